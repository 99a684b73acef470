"""`TokenBucket`: a stage's claim on a pool, which ranks its waiters among those of other stages.

Under its rate a bucket is entitled; above it, it borrows only what no entitled waiter wants. A bucket may be the child
of another, as in a hierarchical token bucket (Devera 2002): its use counts for its parents too, and above its own rate
it lives on what they leave unused before it is a plain borrower.

What the numbers mean is in `ebrl.core.accounts`, who is next in `ebrl.core.pools`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, TypeAlias

from ebrl.core.accounts import Account
from ebrl.core.errors import ConfigError, PoolError, is_a, whole
from ebrl.core.leases import Lease, Ticket, acquire

if TYPE_CHECKING:
    from ebrl.core.pools import Pool

FIRST_HOLD_S = 0.001  # expected of a lease before one has ended
NEWEST = 0.1  # weight of the newest hold time in the prediction
OWN, OF_PARENT, BORROWED = 0, 1, 2  # under the own rate, on what a parent leaves unused, above both

Rank: TypeAlias = tuple[int, tuple[tuple[float, int], ...]]
"""``(class, turn and arrival from the top down)``: the smallest is next."""


@dataclass(frozen=True, slots=True)
class BucketStatistics:
    """A bucket now; what its children hold and use is in it.

    Attributes:
        name: Of the bucket.
        rate: Units that it is entitled to.
        ceiling: Most units that it may hold.
        level: In unit-seconds; entitled while above 0.
        held: Units.
        waiting: Who waits in its own queue, in order.
        used: Unit-seconds so far.
        num_grants: Leases of its own so far.
        num_borrowed: Those of them that were granted above its rate.
    """

    name: str
    rate: float
    ceiling: int
    level: float
    held: int
    waiting: tuple[str, ...]
    used: float
    num_grants: int
    num_borrowed: int


class TokenBucket:
    """A claim on the units of a pool; a `ebrl.core.leases.Lender`. All methods are called on the loop.

    Attributes:
        name: For messages.
        pool: Whose units it claims.
        account: Its numbers.
        path: Its account and those of its parents, up to the top.
        queue: Who waits.

    Example:
        >>> from ebrl.core.pools import Pool
        >>> pool, leases = Pool("cores", 4), []
        >>> sim, train = TokenBucket("sim", pool, rate=3), TokenBucket("train", pool, rate=1)
        >>> tickets = [sim.request(1, leases.append, "step") for _ in range(6)]  # beyond its rate: nobody else asks
        >>> ticket = train.request(1, leases.append, "update")
        >>> leases[0].release()
        >>> [lease.who for lease in leases]
        ['step', 'step', 'step', 'step', 'update']
    """

    __slots__ = (
        "_above",
        "_asked",
        "_divided",
        "_hold_s",
        "_newest",
        "_num_borrowed",
        "_num_grants",
        "account",
        "name",
        "path",
        "pool",
        "queue",
    )

    def __init__(
        self, name: str, parent: Pool | TokenBucket, *, rate: float, burst_s: float = 1.0, ceiling: int | None = None
    ) -> None:
        """Claim units.

        Args:
            name: For messages.
            parent: The pool, or the bucket whose claim this one shares with its other children.
            rate: Units, above 0, not always whole. If the rates of a pool add up to more than its units, they count in
                proportion.
            burst_s: Seconds of the rate that may be saved up, above 0.
            ceiling: Most units held at once; None: all that the pool has.

        Raises:
            ConfigError: A number out of range, or the parent was asked for units itself.
        """
        if isinstance(parent, TokenBucket):
            pool, front, above = parent.pool, parent.account.inner, parent.path
        else:
            pool, front, above = parent, parent.front, ()
        self.name = name
        self.pool: Pool = pool
        self.account: Account = Account(name, front, rate, burst_s, pool.units)
        self.path: tuple[Account, ...] = (self.account, *above)
        self._above = above
        self.queue: deque[Ticket] = deque()
        self._divided = False
        self._asked = 0  # widest request of its own
        self._hold_s = FIRST_HOLD_S
        self._newest = 1.0  # the first hold time replaces the guess
        self._num_grants = 0
        self._num_borrowed = 0
        if ceiling is not None:
            self.set(ceiling=ceiling)
        if isinstance(parent, TokenBucket):
            parent.divide()
        pool.buckets.append(self)

    @property
    def contended(self) -> bool:
        """See `ebrl.core.leases.Lender`. Who is held up by a ceiling that this bucket is not under does not count."""
        for other in self.pool.waiting:
            full = other.blocked_by(other.queue[0].units)
            if full is None or full in self.path:
                return True
        return False

    def expect(self, units: int, who: str = "") -> None:
        """See `ebrl.core.leases.Lender`."""
        if self._divided:
            raise PoolError(f"bucket {self.name!r} of pool {self.pool.name!r} is divided: ask one of its children")
        if not is_a(Integral, units):
            whose = f"pool {self.pool.name!r}"
            raise ConfigError(f"{who or 'somebody'} asked {units!r} units of {whose}, which lends whole ones")
        for account in self.path:
            if not 1 <= units <= account.ceiling:
                whose = f"pool {self.pool.name!r}"
                if account.ceiling < self.pool.units:
                    whose = f"bucket {account.name!r} of {whose}: ask less, or raise its ceiling"
                raise PoolError(f"{who or 'somebody'} asked {units} of the {account.ceiling} units of {whose}")
        self._asked = max(self._asked, units)
        for account in self.path:
            account.widest = max(account.widest, units)

    def request(self, units: int, grant: Callable[[Lease], None], who: str = "") -> Ticket:
        """See `ebrl.core.leases.Lender`."""
        if type(units) is not int or not 1 <= units <= self._asked:
            self.expect(units, who)
        pool = self.pool
        ticket = Ticket(self, units, grant, who or self.name)
        if units > pool.free or (pool.waiting and self.contended) or self.blocked_by(units) is not None:
            pool.wait(ticket)
        else:
            self._lend(ticket)
        return ticket

    async def acquire(self, units: int = 1, who: str = "") -> Lease:
        """See `ebrl.core.leases.Lender`."""
        return await acquire(self, units, who)

    def set(self, *, rate: float | None = None, ceiling: int | None = None) -> None:
        """Change the claim; revokes nothing that is held.

        Args:
            rate: Units; None: as it is.
            ceiling: Most units held at once; all that the pool has: no ceiling; None: as it is.

        Raises:
            ConfigError: A number out of range, or a ceiling below what one request asks.
        """
        account, pool = self.account, self.pool
        if ceiling is not None:
            why = f" (the widest request is {account.widest})" if account.widest > 1 else ""
            what = f"ceiling of bucket {self.name!r} of pool {pool.name!r}{why}"
            ceiling = whole(what, ceiling, max(1, account.widest), pool.units)
        if rate is not None:
            account.change_rate(rate, pool.clock())
        if ceiling is not None:
            account.ceiling = ceiling
        pool.serve()

    def statistics(self) -> BucketStatistics:
        """What it has, holds and waits for."""
        account = self.account
        level = account.level(self.pool.clock())
        waiting = tuple(ticket.who for ticket in self.queue)
        counts = (self._num_grants, self._num_borrowed)
        return BucketStatistics(
            self.name, account.rate, account.ceiling, level, account.held, waiting, account.used, *counts
        )

    # For the pool, leases and tickets.

    def divide(self) -> None:
        """Have children, which are asked from now on.

        Raises:
            ConfigError: It was asked for units itself.
        """
        if self._asked:
            raise ConfigError(f"bucket {self.name!r} was asked for units itself: make its children before that")
        self._divided = True

    def rank(self, now_s: float, first: Mapping[Account, int]) -> Rank:
        """Where the first in the queue stands among all that wait.

        Args:
            now_s: When.
            first: By account, when the first of those asked who wait in its queue or in those of its children.
        """
        kind, path = BORROWED, self.path
        if self.account.level(now_s) > 0:
            kind = OWN
        elif any(account.level(now_s) > 0 for account in path[1:]):
            kind = OF_PARENT
        return kind, tuple((account.turn_s(now_s), first[account]) for account in reversed(path))

    def blocked_by(self, units: int) -> Account | None:
        """Return the innermost account whose ceiling forbids `units` more now; None if they may be lent."""
        for account in self.path:
            if account.held + units > account.ceiling:
                return account
        return None

    def stand_aside(self, now_s: float) -> None:
        """Let others pass: a ceiling blocks the first in the queue."""
        for account in self.path:
            account.stand_aside(self._hold_s, now_s)

    def lend_first(self) -> None:
        """Grant the first in the queue what it waits for."""
        ticket = self.queue.popleft()
        if not self.queue:
            self.pool.forget(self)
        self._lend(ticket)

    def take_back(self, lease: Lease) -> None:
        """Settle what a lease has cost; its units go to whoever is next."""
        pool, units, until_s = self.pool, lease.units, lease.until_s
        now_s = pool.clock()
        del pool.lent[lease]
        pool.free += units
        for account in self.path:
            account.give_back(units, until_s, now_s)
        if pool.waiting:
            if lease.since_s < pool.contest_since_s:  # it began when nobody else wanted the units
                for account in self.path:
                    account.excuse(units * (now_s - pool.contest_since_s))
            elif self.contended:  # else a holder may keep its units for as long as it has work: nothing to learn from
                self._hold_s += self._newest * (now_s - lease.since_s - self._hold_s)
                self._newest = NEWEST
            pool.serve()

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket out of the queue, if it is there."""
        if ticket in self.queue:
            self.queue.remove(ticket)
            if not self.queue:
                self.pool.forget(self)
            self.pool.serve()

    def _lend(self, ticket: Ticket) -> None:
        pool, units = self.pool, ticket.units
        now_s = pool.clock()
        if pool.waiting:
            for account in self.path:
                account.advance(now_s)
        until_s = now_s + self._hold_s
        lease = Lease(self, units, ticket.who, now_s, until_s)
        pool.free -= units
        pool.lent[lease] = None
        entitled = self.account.take(units, until_s, now_s)
        for account in self._above:
            account.take(units, until_s, now_s)
        self._num_grants += 1
        if not entitled:
            self._num_borrowed += 1
            for account in self.path:
                account.forgive()
        ticket.grant(lease)
