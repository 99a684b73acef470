"""`Pool`: integer units of one resource, lent as leases: *how many* may work at once.

A pool is work-conserving (no unit is free while the first in the queue can use it), first come first served, and never
overdrawn. Rate limiters were measured and rejected for this job: a limit of 8 kept 8 cores at 1.00, a limiter with
predicted cost at .76 to .90. Who is next when stages contend will be the business of token buckets, which rank the
waiters of a pool; their place is between `Pool.request` and the queue.

All methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ebrl.core.errors import ConfigError, PoolError


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A pool now.

    Attributes:
        name: Of the pool.
        units: It has in all.
        free: Not lent.
        waiting: Who waits, in order.
    """

    name: str
    units: int
    free: int
    waiting: tuple[str, ...]


class Lease:
    """Held units; given back once, by `release` or by leaving a ``with`` block."""

    __slots__ = ("_pool", "units")

    def __init__(self, pool: Pool, units: int) -> None:
        self._pool: Pool | None = pool
        self.units = units

    def release(self) -> None:
        """Give the units back.

        Raises:
            PoolError: They were given back before.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            raise PoolError("a lease was released twice: keep one owner for it, or use `with`")
        pool._take_back(self.units)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Ticket:
    """A place in the queue of a pool."""

    __slots__ = ("_pool", "grant", "units", "who")

    def __init__(self, pool: Pool, units: int, grant: Callable[[Lease], None], who: str) -> None:
        self._pool = pool
        self.units = units
        self.grant = grant
        self.who = who

    def cancel(self) -> None:
        """Leave the queue; nothing happens if the units were granted already."""
        self._pool._leave(self)


class Pool:
    """Units of one resource.

    Example:
        >>> pool = Pool("cores", 2)
        >>> leases = []
        >>> tickets = [pool.request(1, leases.append) for _ in range(3)]
        >>> len(leases), pool.statistics().free
        (2, 0)
        >>> leases[0].release()
        >>> len(leases)
        3
    """

    def __init__(self, name: str, units: int) -> None:
        """Make a pool.

        Args:
            name: For messages.
            units: At least 1.

        Raises:
            ConfigError: `units` is below 1.
        """
        if units < 1:
            raise ConfigError(f"pool {name!r} needs at least 1 unit, got {units}")
        self.name = name
        self.units = units
        self._free = units
        self._queue: deque[Ticket] = deque()

    @property
    def contended(self) -> bool:
        """Whether somebody waits."""
        return bool(self._queue)

    def request(self, units: int, grant: Callable[[Lease], None], who: str = "") -> Ticket:
        """Ask for units; `grant` is called with the lease, at once if they are free and nobody waits.

        Args:
            units: How many.
            grant: Takes the lease; must not raise.
            who: For `statistics`.

        Raises:
            PoolError: More than the pool has.
        """
        if not 1 <= units <= self.units:
            raise PoolError(f"{who or 'somebody'} asked {units} of {self.units} units of pool {self.name!r}")
        ticket = Ticket(self, units, grant, who)
        if self._queue or units > self._free:
            self._queue.append(ticket)
        else:
            self._free -= units
            grant(Lease(self, units))
        return ticket

    async def acquire(self, units: int = 1, who: str = "") -> Lease:
        """Wait for units. Cancellation while waiting costs nobody anything.

        Args:
            units: How many.
            who: For `statistics`.

        Raises:
            PoolError: More than the pool has.
        """
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

        def grant(lease: Lease) -> None:
            if future.done():  # cancelled in this very turn
                lease.release()
            else:
                future.set_result(lease)

        ticket = self.request(units, grant, who)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled():
                future.result().release()
            ticket.cancel()
            raise

    def statistics(self) -> PoolStatistics:
        """Who waits, and for how much."""
        return PoolStatistics(self.name, self.units, self._free, tuple(ticket.who for ticket in self._queue))

    def _take_back(self, units: int) -> None:
        self._free += units
        if self._free > self.units:
            raise PoolError(f"pool {self.name!r} got back more units than it has")
        self._serve()

    def _serve(self) -> None:
        queue = self._queue
        while queue and queue[0].units <= self._free:
            ticket = queue.popleft()
            self._free -= ticket.units
            ticket.grant(Lease(self, ticket.units))

    def _leave(self, ticket: Ticket) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
            self._serve()


class ResourceManager:
    """The pools of one runtime, and the answer to "who waits for what"."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools = {pool.name: pool for pool in pools}

    def pool(self, name: str) -> Pool:
        """Return the pool of that name.

        Raises:
            PoolError: There is none.
        """
        if name not in self._pools:
            raise PoolError(f"no pool {name!r}: there are {sorted(self._pools)}")
        return self._pools[name]

    def statistics(self) -> tuple[PoolStatistics, ...]:
        """All pools."""
        return tuple(pool.statistics() for pool in self._pools.values())
