"""Pools: never overdrawn, never idle while somebody may use a unit, first come first served within one bucket."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebrl.core.errors import ConfigError, PoolError
from ebrl.core.pools import Lease, Lender, Pool, ResourceManager, Ticket
from ebrl.core.scope import Scope
from ebrl.core.testing import settle
from ebrl.core.tokens import TokenBucket
from ebrl.core.virtual import run_virtual
from tests.helpers import virtually


def taker(order: list[str], leases: list[Lease], who: str) -> Callable[[Lease], None]:
    """Return what a pool is to call with a lease."""

    def take(lease: Lease) -> None:
        order.append(who)
        leases.append(lease)

    return take


def test_units_are_lent_in_order() -> None:
    pool, order, leases = Pool("cores", 2), list[str](), list[Lease]()
    for who in "abcd":
        pool.request(1, taker(order, leases, who), who)
    assert order == ["a", "b"]
    assert pool.statistics().waiting == ("c", "d")
    assert pool.contended
    leases[1].release()
    assert order == ["a", "b", "c"]
    assert pool.statistics().free == 0


def test_a_large_request_is_not_overtaken() -> None:
    pool, order = Pool("memory", 3), list[str]()
    held = list[Lease]()
    pool.request(2, held.append)
    pool.request(3, taker(order, held, "large"), "large")
    pool.request(1, taker(order, held, "small"), "small")
    assert order == []
    held[0].release()
    assert order == ["large"]
    held[1].release()
    assert order == ["large", "small"]


def test_a_ticket_leaves_the_queue_and_lets_the_next_one_in() -> None:
    pool, got = Pool("memory", 3), list[Lease]()
    pool.request(2, got.append)
    large = pool.request(3, got.append)
    pool.request(1, got.append)
    large.cancel()
    assert len(got) == 2
    large.cancel()  # twice does nothing
    assert pool.statistics().free == 0


@pytest.mark.parametrize("units", [0, 3, -1])
def test_more_than_there_is_raises(units: int) -> None:
    pool = Pool("cores", 2)
    with pytest.raises(PoolError, match="cores"):
        pool.request(units, lambda lease: None, "me")


def test_bad_values_name_the_thing() -> None:
    with pytest.raises(ConfigError, match="'cores' must be a whole number of at least 1, got 0"):
        Pool("cores", 0)
    with pytest.raises(PoolError, match=r"no pool 'gpu': there are \['cores'\]"):
        ResourceManager([Pool("cores", 1)]).pool("gpu")


def test_a_lease_is_given_back_once() -> None:
    leases = list[Lease]()
    pool = Pool("cores", 1)
    pool.request(1, leases.append)
    with leases[0]:
        assert pool.statistics().free == 0
    assert pool.statistics().free == 1
    with pytest.raises(PoolError, match="twice"):
        leases[0].release()


def test_statistics_say_who_holds_and_who_waits() -> None:
    pool, leases = Pool("cores", 3), list[Lease]()
    for who in ("sim-0", "sim-1", "sim-0", "sim-2", ""):
        pool.request(1, leases.append, who)
    now = pool.statistics()
    assert (now.holding, now.waiting, now.free) == ({"sim-0": 2, "sim-1": 1}, ("sim-2", "direct"), 0)
    assert [(one.name, one.held, one.waiting) for one in now.buckets] == [("direct", 3, ("sim-2", "direct"))]


def test_statistics_of_all_pools() -> None:
    manager = ResourceManager([Pool("cores", 2), Pool("sm", 4)])
    assert [(one.name, one.units) for one in manager.statistics()] == [("cores", 2), ("sm", 4)]
    assert manager.pool("sm").units == 4


@virtually
async def test_a_cancelled_waiter_costs_nobody_anything() -> None:
    pool = Pool("cores", 1)
    lease = await pool.acquire()
    async with Scope() as scope:
        waiter = scope.start(pool.acquire(), "waiter")
        await settle()
        assert pool.contended
        waiter.cancel()
        await settle()
        assert pool.statistics().waiting == ()
    lease.release()
    assert pool.statistics().free == 1


@virtually
async def test_a_waiter_that_is_cancelled_in_the_turn_of_the_release() -> None:
    pool = Pool("cores", 1)
    lease = await pool.acquire()
    async with Scope() as scope:
        cancelled = scope.start(pool.acquire(), "cancelled")
        other = scope.start(pool.acquire(), "other")
        await settle()
        cancelled.cancel()  # its future is cancelled now, its task hears of it only in the next turn
        lease.release()
        (await other).release()
    assert pool.statistics().free == 1


@virtually
async def test_a_waiter_that_is_cancelled_after_it_was_served_gives_back() -> None:
    pool = Pool("cores", 1)
    lease = await pool.acquire()
    async with Scope() as scope:
        waiter = scope.start(pool.acquire(), "waiter")
        await settle()
        lease.release()
        waiter.cancel()
        await settle()
    assert pool.statistics().free == 1


class Watched(Pool):
    """A pool that remembers in which order it last looked at those who wait."""

    def _ranked(self, now_s: float) -> list[TokenBucket]:
        self.order = super()._ranked(now_s)
        return self.order


class Rehearsal:
    """Random requests, releases, cancellations and changes; what must hold is looked at after each."""

    def __init__(self, seed: int, nested: bool) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.pool = Watched("cores", self.rng.randint(1, 6), clock=lambda: self.now_s)
        self.tops = [self.bucket(f"top{i}", self.pool) for i in range(3)]
        children = [self.bucket(f"child{i}", self.tops[0]) for i in range(2)] if nested else []
        self.leaves = [*(self.tops[1:] if nested else self.tops), *children, self.pool.direct]
        self.leases = list[Lease]()
        self.waiting = dict[Ticket, None]()
        self.num_granted = 0

    def bucket(self, name: str, parent: Pool | TokenBucket) -> TokenBucket:
        rate, burst_s = self.rng.uniform(0.1, 4), self.rng.uniform(0.1, 2)
        return TokenBucket(name, parent, rate=rate, burst_s=burst_s, ceiling=self.rng.randint(1, self.pool.units))

    def leases_of(self, bucket: TokenBucket) -> list[Lease]:
        names = [leaf.name for leaf in self.leaves if bucket.account in leaf.path]
        return [lease for lease in self.leases if lease.who in names]

    def granted(self, lease: Lease) -> None:
        self.num_granted += 1
        self.leases.append(lease)
        for bucket in self.pool.buckets:
            assert lease not in self.leases_of(bucket) or bucket.account.held <= bucket.account.ceiling
        if self.rng.random() < 0.1:  # a waiter that was cancelled in this very turn
            self.leases.remove(lease)
            lease.release()
        elif self.rng.random() < 0.1:
            self.request()

    def request(self) -> None:
        bucket, before = self.rng.choice(self.leaves), self.num_granted
        most = min(account.ceiling for account in bucket.path)
        ticket = bucket.request(self.rng.randint(1, most), self.granted)
        if self.num_granted == before:
            self.waiting[ticket] = None

    def change(self) -> None:
        bucket = self.rng.choice(self.pool.buckets)
        ceiling = self.rng.randint(max(1, bucket.account.widest), self.pool.units)
        bucket.set(rate=self.rng.uniform(0.1, 4), ceiling=ceiling)

    def step(self) -> None:
        what = self.rng.random()
        self.now_s += self.rng.choice([0.0, 0.0, 0.01, 1.0])
        if what < 0.45:
            self.request()
        elif what < 0.8 and self.leases:
            self.leases.pop(self.rng.randrange(len(self.leases))).release()
        elif what < 0.95 and self.waiting:
            ticket = self.rng.choice(list(self.waiting))
            del self.waiting[ticket]
            ticket.cancel()
        else:
            self.change()

    def check(self) -> None:
        pool, lent = self.pool, sum(lease.units for lease in self.leases)
        assert pool.free + lent == pool.units
        assert pool.free >= 0
        assert sum(pool.statistics().holding.values()) == lent
        for bucket in pool.buckets:
            assert bucket.statistics().held == sum(lease.units for lease in self.leases_of(bucket))
        self.check_that_nothing_idles()

    def check_that_nothing_idles(self) -> None:
        # A unit is free only if a ceiling blocks every waiter, or if the first in rank that none blocks collects units.
        if not self.pool.free or not self.pool.waiting:
            return
        assert set(self.pool.order) == set(self.pool.waiting), "somebody waits at whom nobody has looked"
        full = {bucket: bucket.blocked_by(bucket.queue[0].units) for bucket in self.pool.order}
        for number, bucket in enumerate(self.pool.order):
            ahead = [full[other] for other in self.pool.order[:number]]
            behind = any(above in ahead for above in bucket.path[1:])  # a sibling collects what their parent may hold
            if not full[bucket] and not behind:
                assert bucket.queue[0].units > self.pool.free, f"{bucket.name} could have what is free"
                return

    def end(self) -> None:
        while self.leases:
            self.leases.pop().release()
        assert not self.pool.waiting, "somebody waits for units that nobody holds"
        assert self.pool.free == self.pool.units
        assert all(bucket.statistics().held == 0 for bucket in self.pool.buckets)


@settings(max_examples=60)
@given(st.integers(0, 1_000_000), st.booleans())
def test_whatever_happens_nothing_is_lost_overdrawn_or_idle(seed: int, nested: bool) -> None:
    rehearsal = Rehearsal(seed, nested)
    for _ in range(120):
        rehearsal.step()
        rehearsal.check()
    rehearsal.end()


def test_thousands_that_were_cancelled_in_the_turn_of_the_release() -> None:
    async def main() -> None:
        pool = Pool("cores", 1)
        bucket = TokenBucket("many", pool, rate=1)
        lease = await bucket.acquire()
        async with Scope() as scope:
            tasks = [scope.start(bucket.acquire(), f"waiter-{i}") for i in range(2000)]
            await settle()
            for task in tasks:
                task.cancel()
            lease.release()  # each of them gives it on, without a stack of calls
            assert pool.free == 1
            assert not pool.waiting

    run_virtual(main())


async def _visit(lenders: Sequence[Lender], units: int, rng: random.Random, held: list[int]) -> None:
    for _ in range(4):
        with await rng.choice(lenders).acquire(rng.randint(1, units)) as lease:
            held[0] += lease.units
            assert held[0] <= units, "overdrawn"
            try:
                await asyncio.sleep(rng.choice([0, 0, 1, 2]))
            finally:
                held[0] -= lease.units


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_tasks_that_are_cancelled_at_any_moment(seed: int, units: int) -> None:
    async def main() -> None:
        rng, held, pool = random.Random(seed), [0], Pool("cores", units)
        parent = TokenBucket("parent", pool, rate=1)
        lenders: list[Lender] = [pool, TokenBucket("a", pool, rate=2)]
        lenders += [TokenBucket(name, parent, rate=1) for name in "bc"]
        async with Scope() as scope:
            tasks = [scope.start(_visit(lenders, units, rng, held), f"worker-{i}") for i in range(8)]
            for _ in range(20):
                await asyncio.sleep(rng.choice([0, 1]))
                if rng.random() < 0.4:
                    rng.choice(tasks).cancel()
            await asyncio.wait(tasks)
        assert held == [0]
        assert pool.statistics().free == units
        assert pool.statistics().waiting == ()

    run_virtual(main())


@virtually
async def test_a_coroutine_that_is_closed_while_it_waits_leaves_nothing_behind() -> None:
    pool = Pool("cores", 1)
    lease = await pool.acquire()
    waiting = pool.acquire()
    waiting.send(None)
    assert pool.contended
    waiting.close()
    lease.release()
    assert (pool.statistics().free, pool.statistics().waiting) == (1, ())


@virtually
async def test_an_error_in_a_block_is_not_hidden_by_a_lease_that_was_given_back_in_it() -> None:
    pool = Pool("cores", 1)
    with pytest.raises(ValueError, match="mine"), await pool.acquire() as lease:
        lease.release()
        raise ValueError("mine")
    with pytest.raises(PoolError, match="released twice"), await pool.acquire() as lease:
        lease.release()
