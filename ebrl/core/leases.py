"""`Lease`, `Ticket` and `Lender`: held units, a place in a queue for them, and whoever can be asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from ebrl.core.errors import PoolError

if TYPE_CHECKING:
    from ebrl.core.tokens import TokenBucket


class Lender(Protocol):
    """A `ebrl.core.pools.Pool`, or a stage's claim on one: a `ebrl.core.tokens.TokenBucket`. Called on the loop."""

    @property
    def contended(self) -> bool:
        """Whether somebody waits whom units of this lender would bring nearer if they were given back now."""

    def expect(self, units: int, who: str = "") -> None:
        """Say that requests of `units` will come.

        Raises:
            PoolError: They could never be served.
        """

    def request(self, units: int, grant: Callable[[Lease], None], who: str = "") -> Ticket:
        """Ask for units; `grant` is called with the lease, at once if they are free and nobody else is to have them.

        Args:
            units: How many.
            grant: Takes the lease; must not raise.
            who: For statistics.

        Raises:
            PoolError: They could never be served.
        """

    async def acquire(self, units: int = 1, who: str = "") -> Lease:
        """Wait for units. Cancellation while waiting costs nobody anything.

        Args:
            units: How many.
            who: For statistics.

        Raises:
            PoolError: They could never be served.
        """


class Lease:
    """Held units; given back once, by `release` or by leaving a ``with`` block.

    Attributes:
        units: How many.
        who: Holds them.
        since_s: When they were lent.
        until_s: When they were expected back.
    """

    __slots__ = ("_bucket", "since_s", "units", "until_s", "who")

    def __init__(self, bucket: TokenBucket, units: int, who: str, since_s: float, until_s: float) -> None:
        self._bucket: TokenBucket | None = bucket
        self.units = units
        self.who = who
        self.since_s = since_s
        self.until_s = until_s

    def release(self) -> None:
        """Give the units back.

        Raises:
            PoolError: They were given back before.
        """
        bucket, self._bucket = self._bucket, None
        if bucket is None:
            raise PoolError("a lease was released twice: keep one owner for it, or use `with`")
        bucket.take_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self._bucket is not None:  # what went wrong in the block matters more than a second release
            self.release()


class Ticket:
    """A request, and its place in the queue of a bucket while it waits.

    Attributes:
        bucket: In whose queue.
        units: Wanted.
        grant: Takes the lease.
        who: Asks.
        number: Of its arrival, among all that had to wait for the pool.
    """

    __slots__ = ("bucket", "grant", "number", "units", "who")

    def __init__(self, bucket: TokenBucket, units: int, grant: Callable[[Lease], None], who: str) -> None:
        self.bucket = bucket
        self.units = units
        self.grant = grant
        self.who = who
        self.number = 0

    def cancel(self) -> None:
        """Leave the queue; nothing happens if the units were granted already."""
        self.bucket.leave(self)


async def acquire(lender: Lender, units: int, who: str) -> Lease:
    """Wait for units; see `Lender.acquire`."""
    future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    def grant(lease: Lease) -> None:
        if future.done():  # cancelled in this very turn
            lease.release()
        else:
            future.set_result(lease)

    ticket = lender.request(units, grant, who)
    try:
        return await future
    except (asyncio.CancelledError, GeneratorExit):  # or the coroutine was closed while it waited
        if future.done() and not future.cancelled():
            future.result().release()
        ticket.cancel()
        future.cancel()  # nobody waits for it
        raise
