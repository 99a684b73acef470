"""Admission: the ledger balances at every point, credit never lies idle, first come is first served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.admission import Admission, Drop
from ebrl.core.errors import ConfigError
from ebrl.core.scope import Scope
from ebrl.core.testing import settle
from ebrl.core.virtual import run_virtual
from tests.helpers import virtually


def opened(num_envs: int = 4, batch_size: int = 4, max_lag: int = 0, **kwargs: Any) -> Admission:
    admission = Admission(num_envs)
    admission.open(batch_size, max_lag, **kwargs)
    return admission


async def begin(admission: Admission, env: int) -> None:
    """Start a decision the way an environment does."""
    if not admission.try_start(env):
        await admission.start(env)


def test_closed_until_a_consumer_opens_it() -> None:
    admission = Admission(2)
    assert not admission.try_start(0)
    admission.open(1, 0)
    assert admission.try_start(0)
    admission.close()
    assert not admission.try_start(1)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_credit_is_max_lag_plus_one_batches(max_lag: int) -> None:
    admission = opened(batch_size=3, max_lag=max_lag)
    granted = [admission.try_start(i % 4) for i in range(30)]
    assert granted == [True] * 3 * (max_lag + 1) + [False] * (30 - 3 * (max_lag + 1))


def test_training_and_dropping_give_credit_back() -> None:
    admission = opened(batch_size=2)
    assert admission.try_start(0)
    assert admission.try_start(1)
    assert not admission.try_start(2)
    admission.park()
    admission.park()
    admission.emit(2)
    assert admission.ledger().buffered == 2
    admission.train([(0, 1), (1, 1)])
    assert admission.try_start(2)
    admission.drop(2, "unexecuted", "in_flight")
    ledger = admission.ledger()
    assert ledger.balanced
    assert (ledger.started, ledger.trained, dict(ledger.dropped)) == (3, 2, {"unexecuted": 1})


@pytest.mark.parametrize("place", ["in_flight", "parked", "buffered"])
def test_a_decision_may_be_dropped_anywhere(place: Any) -> None:
    admission = opened(batch_size=1)
    assert admission.try_start(0)
    if place != "in_flight":
        admission.park()
    if place == "buffered":
        admission.emit(1)
    admission.drop(0, "lost", place)
    assert admission.ledger().balanced
    assert admission.ledger().dropped == {"lost": 1}
    assert admission.try_start(0)


def test_bad_values() -> None:
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        opened(batch_size=0)
    with pytest.raises(ConfigError, match="max_lag must be at least 0"):
        opened(max_lag=-1)
    with pytest.raises(ConfigError, match="7 is no multiple of 4"):
        opened(num_envs=4, batch_size=7, per_env=True)


def test_deterministic_mode_gives_every_environment_the_same() -> None:
    admission = opened(num_envs=2, batch_size=4, per_env=True)
    assert [admission.try_start(0) for _ in range(3)] == [True, True, False]
    assert [admission.try_start(1) for _ in range(3)] == [True, True, False]
    for _ in range(4):
        admission.park()
    admission.emit(4)
    admission.train([(0, 2), (1, 2)])
    assert admission.try_start(0)


def test_a_quota_is_of_starts_per_version_whoever_was_trained() -> None:
    """Else an environment whose decisions make up a whole batch could start another whole batch."""
    admission = opened(num_envs=2, batch_size=4, max_lag=1, per_env=True)
    assert [admission.try_start(0) for _ in range(5)] == [True] * 4 + [False]
    for _ in range(4):
        admission.park()
    admission.emit(4)
    admission.train([(0, 4)])
    assert [admission.try_start(0) for _ in range(3)] == [True, True, False]
    assert [admission.try_start(1) for _ in range(7)] == [True] * 6 + [False], "it has those of three versions"
    assert admission.ledger().balanced


@virtually
async def test_in_deterministic_mode_nobody_waits_behind_another_environment() -> None:
    admission, order = opened(num_envs=2, batch_size=2, per_env=True), list[int]()

    async def wait(env: int) -> None:
        await begin(admission, env)
        order.append(env)

    assert admission.try_start(0)
    assert admission.try_start(1)
    async with Scope() as scope:
        tasks = [scope.start(wait(0), "0"), scope.start(wait(1), "1")]
        await settle()
        admission.drop(1, "lost", "in_flight")
        await settle()
        assert order == [1]
        admission.drop(0, "lost", "in_flight")
        await asyncio.wait(tasks)
    assert order == [1, 0]


@virtually
async def test_first_come_first_served() -> None:
    admission, order = opened(num_envs=8, batch_size=1), list[int]()
    assert admission.try_start(0)

    async def wait(env: int) -> None:
        await begin(admission, env)
        order.append(env)

    async with Scope() as scope:
        for env in (5, 3, 7, 1):
            scope.start(wait(env), f"{env}")
            await settle()
        for env in (0, 5, 3, 7):
            admission.drop(env, "lost", "in_flight")
            assert not admission.try_start(2), "overtook a waiter"
            await settle()
    assert order == [5, 3, 7, 1]


@virtually
async def test_start_takes_free_credit_at_once() -> None:
    admission = opened(batch_size=1)
    await admission.start(0)
    assert admission.ledger().in_flight == 1


@virtually
async def test_a_cancelled_waiter_is_no_waiter() -> None:
    admission = opened(batch_size=1)
    assert admission.try_start(0)
    async with Scope() as scope:
        waiter = scope.start(admission.start(1), "waiter")
        await settle()
        assert admission.ledger().num_waiting == 1
        waiter.cancel()
        await settle()
        assert admission.ledger().num_waiting == 0


@virtually
async def test_a_waiter_cancelled_in_the_turn_of_its_credit_passes_it_on() -> None:
    admission = opened(batch_size=1)
    assert admission.try_start(0)
    async with Scope() as scope:
        first, second = scope.start(admission.start(1), "first"), scope.start(admission.start(2), "second")
        await settle()
        admission.drop(0, "lost", "in_flight")
        first.cancel()
        await second
    ledger = admission.ledger()
    assert ledger.balanced
    assert (ledger.started, ledger.in_flight) == (2, 1)


@virtually
async def test_the_consumer_is_ready_when_a_batch_is_finished_in_segments_or_out_of_them() -> None:
    admission = opened(num_envs=3, batch_size=2)
    async with Scope() as scope:
        ready = scope.start(admission.ready(), "consumer")
        for env in (0, 1):
            assert admission.try_start(env)
        admission.park()
        await settle()
        assert not ready.done(), "one finished decision makes no batch"
        admission.emit(1)
        admission.park()
        await ready
        assert admission.missing == 1
    await admission.ready()  # at once, as long as nothing was taken


@virtually
async def test_a_drop_of_what_was_finished_makes_the_consumer_wait_again() -> None:
    admission = opened(num_envs=2, batch_size=2)
    for env in (0, 1):
        assert admission.try_start(env)
        admission.park()
    admission.emit(2)
    admission.drop(0, "masked", "buffered")
    async with Scope() as scope:
        ready = scope.start(admission.ready(), "consumer")
        await settle()
        assert not ready.done()
        assert admission.try_start(0)
        assert not admission.next(0), "there is no further credit"
        await ready


class Model:
    """Environments that start, park and lose decisions at random, and a consumer that trains them."""

    def __init__(self, seed: int, num_envs: int, batch_size: int, max_lag: int, per_env: bool) -> None:
        self.rng = random.Random(seed)
        self.num_envs = num_envs
        self.batch_size = batch_size
        self.limit = (max_lag + 1) * batch_size
        self.admission = Admission(num_envs)
        self.parked: list[int] = []
        self.buffered: list[int] = []
        self.arrived: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.per_env = per_env
        self.admission.open(batch_size, max_lag, per_env=per_env)

    def check(self) -> None:
        ledger = self.admission.ledger()
        assert ledger.balanced
        assert min(ledger.in_flight, ledger.parked, ledger.buffered) >= 0
        assert (ledger.parked, ledger.buffered) == (len(self.parked), len(self.buffered))
        held = ledger.in_flight + ledger.parked + ledger.buffered
        assert held <= self.limit
        assert not self.per_env or sum(self.admission._held) == held
        assert not self.per_env or max(self.admission._held) <= self.limit // self.num_envs
        assert self.per_env or held == self.limit or not ledger.num_waiting, "credit is free, somebody waits"

    def flush(self) -> None:
        self.check()
        num, self.buffered, self.parked = len(self.parked), self.buffered + self.parked, []
        self.admission.emit(num)

    async def env(self, env: int) -> None:
        for _ in range(self.rng.randint(1, 12)):
            await self.start(env)
            try:
                await asyncio.sleep(self.rng.choice([0, 1, 1, 20]))
            except asyncio.CancelledError:
                self.admission.drop(env, "cancelled", "in_flight")
                raise
            if self.rng.random() < 0.2:
                self.drop(env, "unexecuted", "in_flight")
                continue
            self.parked.append(env)
            self.admission.park()
            if self.rng.random() < 0.3 and self.parked:
                self.flush()

    async def start(self, env: int) -> None:
        if self.admission.try_start(env):
            return
        waiting = self.admission.start(env)
        self.arrived.append(env)
        try:
            await waiting
        except asyncio.CancelledError:
            self.arrived.remove(env)
            raise
        # Whoever came before and still waits was overtaken (each environment waits at most once at a time).
        if not self.per_env:
            assert self.arrived[0] == env
        self.arrived.remove(env)

    def drop(self, env: int, reason: Drop, place: Any) -> None:
        self.admission.drop(env, reason, place)
        self.check()

    async def consumer(self) -> None:
        while True:
            await self.admission.ready()
            assert len(self.parked) + len(self.buffered) >= self.batch_size
            self.flush()
            if self.rng.random() < 0.3:  # too old: found when the batch is taken
                self.drop(self.buffered.pop(0), "masked", "buffered")
                continue
            batch, self.buffered = self.buffered[: self.batch_size], self.buffered[self.batch_size :]
            self.admission.train((env, 1) for env in batch)
            self.check()
            if self.rng.random() < 0.3:  # in the turn in which waiters got credit, before they know of it
                self.rng.choice(self.tasks).cancel()
            await asyncio.sleep(self.rng.choice([0, 1, 5]))


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_random_runs(seed: int, per: int, max_lag: int, per_env: bool) -> None:
    run_virtual(_random_run(Model(seed, 4, 4 * per, max_lag, per_env)))


def _random_run(model: Model) -> Coroutine[Any, Any, None]:
    async def main() -> None:
        async with Scope() as scope:
            consumer = scope.start(model.consumer(), "consumer")
            envs = [scope.start(model.env(env), f"env-{env}") for env in range(model.num_envs)]
            model.tasks.extend(envs)
            for _ in range(15):
                await asyncio.sleep(model.rng.choice([0, 1, 3]))
                if model.rng.random() < 0.3:
                    model.rng.choice(envs).cancel()
                model.check()
            _, pending = await asyncio.wait(envs, timeout=500)
            # Equal shares stand still once an environment has ended; in a common queue nobody may wait for ever.
            assert model.per_env or not pending
            consumer.cancel()
        model.check()

    return main()
