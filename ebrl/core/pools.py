"""`Pool`: integer units of one resource, lent as leases: *how many* may work at once, and who is next.

A pool counts: it is never overdrawn, and never waits on a timer while a unit is free. Rate limiters were measured and
rejected for this job: a limit of 8 kept 8 cores at 1.00, a limiter with predicted cost at .76 to .90. So the rates of
`ebrl.core.tokens.TokenBucket` only rank those who wait:

- entitled buckets first, then those that live on what their parent leaves unused, then those that just borrow;
- within each class the bucket that was served least for its rate, then the one that asked first; where two are not side
  by side, those of their parents that are: a parent asks when the first of its waiting children does;
- a bucket at its ceiling is passed over.

The first in this order is not overtaken: while it waits for more units than are free, these are kept for it, so that
large requests are not starved by small ones. So a unit is free only if nobody may use it, or if the first in the order
collects its units. The order is looked at when somebody asks, gives back or changes a claim, and not in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ebrl.core.accounts import Account, Front
from ebrl.core.errors import PoolError, whole
from ebrl.core.leases import Lease, Lender, Ticket
from ebrl.core.tokens import BucketStatistics, TokenBucket

__all__ = ["Lease", "Lender", "Pool", "PoolStatistics", "ResourceManager", "Ticket"]

DIRECT_RATE = 1.0  # units: a request that names no stage counts as one of a stage with one unit


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A pool now.

    Attributes:
        name: Of the pool.
        units: It has in all.
        free: Not lent.
        holding: Units per holder.
        waiting: Who waits, in the order of arrival.
        buckets: All that claim units, the one of direct requests first.
    """

    name: str
    units: int
    free: int
    holding: Mapping[str, int]
    waiting: tuple[str, ...]
    buckets: tuple[BucketStatistics, ...]


class Pool:
    """Units of one resource; a `ebrl.core.leases.Lender`. All methods are called on the loop.

    The attributes are for its buckets, and to look at.

    Attributes:
        name: For messages.
        units: It has in all.
        free: Not lent.
        clock: In seconds.
        buckets: All claims; parents stand before their children.
        waiting: Buckets with somebody in their queue.
        lent: The leases that are out (a set that keeps its order).
        contest_since_s: When somebody began to wait whom a free unit would have served, and nobody did before.
        front: How far the service of the buckets that have no parent has come.
        direct: The bucket of requests that are made at the pool itself.

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

    __slots__ = (
        "_num_tickets",
        "_serving",
        "buckets",
        "clock",
        "contest_since_s",
        "direct",
        "free",
        "front",
        "lent",
        "name",
        "units",
        "waiting",
    )

    def __init__(self, name: str, units: int, *, clock: Callable[[], float] | None = None) -> None:
        """Make a pool.

        Args:
            name: For messages.
            units: A whole number, at least 1.
            clock: In seconds, never goes back; default: that of the running loop.

        Raises:
            ConfigError: `units` is no whole number of at least 1.
        """
        self.name = name
        self.units = self.free = whole(f"units of pool {name!r}", units)
        self.clock = clock or self._loop_time
        self.buckets: list[TokenBucket] = []
        self.waiting: list[TokenBucket] = []
        self.lent: dict[Lease, None] = {}
        self.front = Front()
        self.contest_since_s = 0.0
        self._num_tickets = 0
        self._serving = False
        self.direct = TokenBucket("direct", self, rate=DIRECT_RATE)

    @property
    def contended(self) -> bool:
        """See `ebrl.core.leases.Lender`."""
        return self.direct.contended

    def expect(self, units: int, who: str = "") -> None:
        """See `ebrl.core.leases.Lender`."""
        self.direct.expect(units, who)

    def request(self, units: int, grant: Callable[[Lease], None], who: str = "") -> Ticket:
        """See `ebrl.core.leases.Lender`."""
        return self.direct.request(units, grant, who)

    async def acquire(self, units: int = 1, who: str = "") -> Lease:
        """See `ebrl.core.leases.Lender`."""
        return await self.direct.acquire(units, who)

    def statistics(self) -> PoolStatistics:
        """Who holds and who waits."""
        holding: dict[str, int] = {}
        for lease in self.lent:
            holding[lease.who] = holding.get(lease.who, 0) + lease.units
        tickets = sorted((ticket for bucket in self.waiting for ticket in bucket.queue), key=lambda t: t.number)
        waiting = tuple(ticket.who for ticket in tickets)
        buckets = tuple(bucket.statistics() for bucket in self.buckets)
        return PoolStatistics(self.name, self.units, self.free, holding, waiting, buckets)

    # For buckets.

    def wait(self, ticket: Ticket) -> None:
        """Put a ticket into the queue of its bucket, and serve whoever is next."""
        bucket, now_s = ticket.bucket, self.clock()
        self._num_tickets += 1
        ticket.number = self._num_tickets
        if not bucket.queue:
            if not bucket.contended:  # a contest begins
                self.contest_since_s = now_s
                for one in self.buckets:
                    one.account.start_counting(now_s)
            for account in bucket.path:
                account.start_waiting(now_s)
            self.waiting.append(bucket)
        bucket.queue.append(ticket)
        self.serve()

    def forget(self, bucket: TokenBucket) -> None:
        """Nobody waits in the queue of a bucket any more."""
        self.waiting.remove(bucket)
        for account in bucket.path:
            account.num_waiting -= 1

    def serve(self) -> None:
        """Lend what is free to whoever is next, until nobody is."""
        if self._serving or not self.waiting:  # in a grant: the loop below goes on anyway
            return
        self._serving = True
        try:
            while self.free and (bucket := self._next()) is not None:
                bucket.lend_first()
        finally:
            self._serving = False

    def _loop_time(self) -> float:
        # A pool belongs to the loop that first asks it; asked where none runs, it goes on looking for one.
        try:
            self.clock = asyncio.get_running_loop().time
        except RuntimeError:
            return time.monotonic()
        return self.clock()

    def _next(self) -> TokenBucket | None:
        # The first in rank that no ceiling blocks; None if it has to wait for units, as everybody behind it then does.
        now_s = self.clock()
        collecting: list[Account] = []
        for bucket in self._ranked(now_s):
            units = bucket.queue[0].units
            full = bucket.blocked_by(units)
            if full is not None:
                bucket.stand_aside(now_s)
                collecting.append(full)  # what a parent has left is kept for the first of its children
            elif not collecting or not any(account in collecting for account in bucket.path):
                return bucket if units <= self.free else None
        return None

    def _ranked(self, now_s: float) -> list[TokenBucket]:
        if len(self.waiting) == 1:
            return self.waiting
        first: dict[Account, int] = {}  # arrival
        for bucket in self.waiting:
            number = bucket.queue[0].number
            for account in bucket.path:
                first[account] = min(number, first.get(account, number))
        return sorted(self.waiting, key=lambda bucket: bucket.rank(now_s, first))


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
