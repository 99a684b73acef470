"""Pools: first come first served, never overdrawn, never idle while the head of the queue fits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.errors import ConfigError, PoolError
from ebrl.core.pools import Lease, Pool, ResourceManager
from ebrl.core.scope import Scope
from ebrl.core.testing import settle
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
    with pytest.raises(ConfigError, match="'cores' needs at least 1"):
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


async def _worker(pool: Pool, rng: random.Random, held: list[int]) -> None:
    for _ in range(rng.randint(1, 4)):
        units = rng.randint(1, pool.units)
        with await pool.acquire(units):
            held[0] += units
            assert held[0] <= pool.units, "overdrawn"
            try:
                await asyncio.sleep(rng.choice([0, 0, 1, 2]))
            finally:
                held[0] -= units


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_random_waiters_and_cancellations(seed: int, units: int) -> None:
    async def main() -> None:
        rng, pool, held = random.Random(seed), Pool("cores", units), [0]
        async with Scope() as scope:
            tasks = [scope.start(_worker(pool, rng, held), f"worker-{i}") for i in range(8)]
            for _ in range(20):
                await asyncio.sleep(rng.choice([0, 1]))
                if rng.random() < 0.4:
                    rng.choice(tasks).cancel()
            await asyncio.wait(tasks)
        assert held == [0]
        assert pool.statistics().free == units
        assert not pool.contended

    run_virtual(main())
