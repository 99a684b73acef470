"""Requests of many rows: how a generator launches and answers them, and how their credit is given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.admission import Admission
from ebrl.core.errors import Closed, PolicyError
from ebrl.core.scope import Scope
from ebrl.core.testing import settle
from ebrl.core.virtual import run_virtual
from ebrl.gen.batcher import Batcher
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from tests.helpers import virtually
from tests.test_generator import SPEC, Ask, Bench, bench


def ask_all(b: Bench, envs: Sequence[int]) -> list[Ask]:
    asks = [Ask(env) for env in envs]
    b.gen.request_all(asks)
    return asks


@virtually
async def test_each_is_a_batch_of_its_own() -> None:
    async with bench() as b:
        first, second = ask_all(b, range(3)), ask_all(b, range(3, 5))
        await asyncio.sleep(5)
        statistics = b.gen.statistics()
    assert b.batches == [(0.0, 3), (1.0, 2)]
    assert [ask.answered_s for ask in [*first, *second]] == [1.0] * 3 + [2.0] * 2
    assert [statistics[key] for key in ("batches", "requests", "rows", "batch_mean")] == [2, 2, 5, 2.5]


@virtually
async def test_the_threshold_says_how_many_make_a_batch_and_others_ride_along() -> None:
    async with bench(batcher=Batcher(threshold=2, max_wait_s=9.0)) as b:
        b.ask(9)
        for first in (0, 3, 6):
            ask_all(b, range(first, first + 3))
        b.ask(10)
        await asyncio.sleep(20)
    assert [size for _, size in b.batches] == [7, 4]


@virtually
async def test_single_requests_are_not_held_back_by_bundles_before_them() -> None:
    async with bench() as b:
        ask_all(b, range(3))
        b.ask(3, 4, 5)
        await asyncio.sleep(5)
    assert b.batches == [(0.0, 3), (1.0, 3)]


@virtually
async def test_a_row_is_answered_as_if_it_had_come_alone() -> None:
    async with bench() as b:
        asks = ask_all(b, range(4))
        alone = b.ask(*range(4))
        await asyncio.sleep(5)
        for one, other in zip(asks, alone, strict=True):
            assert np.array_equal(one.future.result().action, other.future.result().action)


@virtually
async def test_who_is_cancelled_is_dropped_whole_before_the_launch() -> None:
    async with bench() as b:
        b.ask(9)
        await settle()
        asks = ask_all(b, range(3))
        for ask in asks:
            ask.future.cancel()
        b.gen.withdraw()
        ask_all(b, range(3, 5))
        await asyncio.sleep(5)
    assert [size for _, size in b.batches] == [1, 2]


@virtually
async def test_the_row_at_fault_is_named() -> None:
    async with bench() as b:
        asks = [Ask(env, np.full(3, np.nan if env == 2 else 0.0, np.float32)) for env in range(4)]
        b.gen.request_all(asks)
        await asyncio.sleep(5)
        with pytest.raises(PolicyError, match="not finite for env 2 episode 4 decision 7"):
            asks[2].future.result()
        assert asks[1].future.done()


@virtually
async def test_what_waits_at_the_end_is_told_so() -> None:
    async with bench() as b:
        ask_all(b, range(2))
        asks = ask_all(b, range(2))
        await settle()
        await b.runtime.stop(b.gen)
        for ask in asks:
            with pytest.raises(Closed, match="gen has ended"):
                ask.future.result()
        with pytest.raises(Closed, match="gen is not running"):
            b.gen.request_all(asks)


@virtually
async def test_the_tuner_is_told_what_a_request_costs() -> None:
    async with bench(batch_s=0.0) as b:
        for num in (4, 8, 4, 8):
            b.gen._profile.observe(num, 0.001 + 0.002 * num)
        assert b.gen.reading().per_request_s == pytest.approx(0.002, rel=0.01)
        ask_all(b, range(4))
        assert b.gen.reading().num_requests == 0
        await settle()
        assert b.gen.reading().per_request_s == pytest.approx(0.008, rel=0.01)
        assert b.gen.reading().num_requests == 1


def test_before_it_runs_nobody_can_ask() -> None:
    with pytest.raises(Closed, match="gen is not running"):
        Generator(ScriptedPolicy(SPEC)).request_all([])


# Credit.


def test_all_start_or_none() -> None:
    admission = Admission(8)
    assert not admission.try_start(0, 1, 2)
    admission.open(4, 0)
    assert admission.try_start(0, 1, 2)
    assert admission.try_start(3, 4, 5)  # while there is credit for one of them
    assert not admission.try_start(6)
    assert admission.ledger().in_flight == 6
    quota = Admission(4)
    quota.open(4, 0, per_env=True)
    assert quota.try_start(0, 1)
    assert not quota.try_start(0, 1)
    assert quota.try_start(2, 3)


@virtually
async def test_who_waits_is_served_in_order_and_cancelled_whole() -> None:
    admission = Admission(8)
    admission.open(3, 0)
    assert admission.try_start(0, 1, 2)
    async with Scope() as scope:
        first = scope.start(admission.start(3, 4, 5), "first")
        second = scope.start(admission.start(6), "second")
        await settle()
        assert admission.ledger().num_waiting == 4
        admission.drop(0, "lost", "in_flight")
        first.cancel()  # in the very turn in which it was served
        await settle()
        assert second.done()
        assert admission.ledger().in_flight == 3
        assert admission.ledger().num_waiting == 0
        assert admission.ledger().balanced


@given(
    num_slots=st.integers(1, 6),
    num_units=st.integers(1, 4),
    batch_size=st.integers(1, 25),
    max_lag=st.integers(0, 2),
    quota=st.booleans(),
)
def test_credit_never_runs_out_for_ever(
    num_slots: int, num_units: int, batch_size: int, max_lag: int, quota: bool
) -> None:
    num = num_slots * num_units
    batch_size = batch_size * num if quota else batch_size

    async def main() -> None:
        admission = Admission(num)
        admission.open(batch_size, max_lag, per_env=quota)
        finished = [0] * num

        async def unit(first: int) -> None:
            envs = range(first, first + num_slots)
            while True:
                if not admission.try_start(*envs):
                    await admission.start(*envs)
                await asyncio.sleep(0.01 * (first + 1))
                for env in envs:
                    admission.park()
                    finished[env] += 1

        async with Scope() as scope:
            for first in range(0, num, num_slots):
                scope.start(unit(first), f"unit-{first}")
            for _ in range(5):
                await admission.ready()
                left, shares = batch_size, []
                for env in range(num):
                    part = min(left, finished[env])
                    finished[env] -= part
                    left -= part
                    shares.append((env, part))
                admission.emit(batch_size)
                ledger = admission.ledger()
                assert ledger.balanced
                assert ledger.started - ledger.trained <= (max_lag + 1) * batch_size + num_slots - 1
                admission.train(shares)

    run_virtual(main())
