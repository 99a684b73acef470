"""Nobody waits for everybody, nothing stands still, nothing is lost, and nothing is older than it may be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebrl.core.leases import Lender
from ebrl.core.records import Observation, Segment
from ebrl.core.trace import Trace
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualLane, VirtualMachine
from ebrl.sim.context import EnvContext
from ebrl.train.metrics import flatten
from tests.helpers import PATIENT, RecordingLearner, Stage, assert_sound, run_python, scripted_spec, training, virtually

SPEC = scripted_spec(length=25)
MIX = np.array([1.0, 0.5])  # how `ScriptedEnv` weighs the numbers of an action


class OneSlowLane(VirtualMachine):
    """The lane of the first environment has a law of its own."""

    def lane(self, kind: str, name: str, pool: Lender | None = None, units: int = 1) -> VirtualLane:
        return super().lane("slow" if name == "envs-0" else kind, name, pool, units)


def one_second(n: int, rng: np.random.Generator) -> float:
    return 1.0


def exponential(n: int, rng: np.random.Generator) -> float:
    return float(rng.exponential())


def with_stragglers(n: int, rng: np.random.Generator) -> float:
    return 20.0 if rng.random() < 0.05 else 1.0


async def exhaust(stage: Stage) -> None:
    """Do all updates; the ledger and the lag bound are checked at each."""
    async for report in stage.trainer:
        assert_sound(stage.envs.admission.ledger())
        assert report.lag_max <= stage.trainer.max_lag
        assert report.num_decisions == stage.learner.batch_size
    ledger = stage.envs.admission.ledger()
    assert ledger.trained == stage.trainer.updates * stage.learner.batch_size
    assert_trained_fairly(stage.learner, stage.trainer.max_lag)


def assert_trained_fairly(learner: RecordingLearner, max_lag: int) -> None:
    """Every decision was trained at most once, in the order of its environment, young enough, as its version says."""
    last: dict[int, int] = {}
    for version, batch in enumerate(learner.batches):
        assert batch.version == version
        assert batch.lags.min() >= 0
        assert batch.lags.max() <= max_lag
        for decision in batch.decisions:
            assert decision.index > last.get(decision.env, -1), f"env {decision.env}: {decision.index} after {last}"
            last[decision.env] = decision.index
            assert decision.out.log_prob[0, 0] == decision.version, "stamped with another version than it was made by"
            assert decision.num_steps == len(decision.rewards) >= 1
    for batch in learner.batches:
        for segment in batch.segments:
            assert_consecutive(segment)


def assert_consecutive(segment: Segment) -> None:
    """Every transition is one that the simulator made: no other step lies between a decision and what follows it.

    ``x' = x / 2 + push / 4 + drift`` with one drift per episode, and x is the first number of an observation.
    """
    decisions = segment.decisions
    assert {(d.env, d.episode) for d in decisions} == {(segment.env, decisions[0].episode)}
    assert not any(d.terminated or d.truncated for d in decisions[:-1])
    drifts = []
    following = [*(d.obs for d in decisions[1:]), segment.last_obs]
    for decision, after in zip(decisions, following, strict=True):
        x, weight = float(np.asarray(decision.obs)[0]), 0.0
        for action in decision.out.action[: decision.num_steps]:
            x, weight = 0.5 * x + 0.25 * float(action @ MIX), 0.5 * weight + 1.0
        drifts.append((float(np.asarray(after)[0]) - x) / weight)
    assert max(drifts) - min(drifts) < 1e-5
    assert -0.1 <= min(drifts) <= max(drifts) <= 0.1


# Overlap.


@pytest.mark.parametrize("segment_length", [None, 1])
@pytest.mark.parametrize(("max_lag", "least_s", "most_s"), [(0, 200.0, 202.0), (1, 100.0, 105.0), (2, 100.0, 110.0)])
def test_rollouts_and_updates_of_a_second_each_overlap(
    max_lag: int, least_s: float, most_s: float, segment_length: int | None
) -> None:
    async def main() -> None:
        machine = VirtualMachine({"sim": one_second, "train": one_second})
        options: dict[str, Any] = {"count": 8, "batch_size": 8, "updates": 100, "max_lag": max_lag}
        long = scripted_spec(length=10_000)  # a reset takes a second too
        async with training(long, machine, **options, segment_length=segment_length) as stage:
            async for report in stage.trainer:
                elapsed_s = report.elapsed_s
        assert least_s <= elapsed_s <= most_s

    run_virtual(main())


@virtually
async def test_one_slow_environment_slows_no_other() -> None:
    async def steps(slow_s: float) -> list[int]:
        counts = [0] * 8

        async def program(env: EnvContext) -> None:
            obs, _ = await env.reset()
            while not env.done:
                obs = (await env.act_step(obs)).obs
                counts[env.index] += 1

        machine = OneSlowLane({"sim": one_second, "slow": lambda n, rng: slow_s}, servers={"slow": 1})
        async with training(SPEC, machine, count=8, batch_size=16, updates=10_000, program=program) as stage:
            async for report in stage.trainer:
                if report.elapsed_s > 500:
                    break
        return counts

    alike, one_slow = await steps(1.0), await steps(50.0)
    assert 9 <= one_slow[0] <= 10
    assert min(alike) >= 475
    assert min(one_slow[1:]) >= min(alike)


@virtually
async def test_a_slow_reset_slows_no_other() -> None:
    laws = {"sim": one_second, "slow": lambda n, rng: 1e6}
    machine = OneSlowLane(laws, servers={"slow": 1})
    async with training(SPEC, machine, count=4, batch_size=12, updates=50, max_lag=1, failures=PATIENT) as stage:
        async for report in stage.trainer:
            elapsed_s = report.elapsed_s
    assert {d.env for d in stage.learner.decisions} == {1, 2, 3}
    assert elapsed_s < 50 * 12 / 3 * 1.2


# The same again, and quickly.


def test_the_same_seed_does_the_same_three_times() -> None:
    async def digest(seed: int) -> str:
        trace = Trace()
        machine = VirtualMachine(
            {"sim": exponential, "gen": lambda n, rng: 0.01 * n * rng.random(), "train": one_second},
            num_cores=5,
            servers={"gen": 2},
            seed=seed,
        )
        options: dict[str, Any] = {"count": 12, "batch_size": 32, "updates": 20, "gen_lanes": 2}
        async with training(SPEC, machine, **options, seed=seed, trace=trace) as stage:
            await exhaust(stage)
        assert len(trace.spans) > 100
        return trace.digest() + str([(d.env, d.index, d.version) for d in stage.learner.decisions])

    assert len({run_virtual(digest(3)) for _ in range(3)}) == 1
    assert run_virtual(digest(4)) != run_virtual(digest(3))


A_THOUSAND = """
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from tests.helpers import scripted_spec, training
from tests.test_asynchrony import exponential, one_second

async def main():
    machine = VirtualMachine({"sim": exponential, "gen": lambda n, rng: 0.05, "train": one_second}, num_cores=1000)
    spec = scripted_spec(length=100)
    async with training(spec, machine, count=1000, batch_size=10_000, updates=10, lanes=1000) as stage:
        async for report in stage.trainer:
            steps = report.env_steps
    print(steps)

run_virtual(main())
"""


@pytest.mark.slow
def test_a_thousand_environments_of_a_hundred_steps() -> None:
    # In a process of its own, since the guards of conftest.py cost time at every callback.
    done = run_python(A_THOUSAND)
    assert not done.stderr
    assert int(done.stdout) >= 100_000


# Nothing stands still.


def settings_of_starvation() -> Iterable[tuple[int, int, int, int]]:
    for count in (1, 3, 16):
        for batch_size in (1, 4, 7, 30):
            for segment_length in (1, 5, 100):
                for max_lag in (0, 1, 3):
                    yield count, batch_size, segment_length, max_lag


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("law", [one_second, exponential])
def test_no_setting_stands_still(count: int, law: Any) -> None:
    """Among them many whose open segments could hold more decisions than there is credit."""
    for num, batch_size, segment_length, max_lag in settings_of_starvation():
        if num != count:
            continue

        async def main(**options: Any) -> None:
            machine = VirtualMachine({"sim": law, "train": law})
            async with training(SPEC, machine, updates=12, count=count, **options) as stage:
                await exhaust(stage)

        run_virtual(main(batch_size=batch_size, segment_length=segment_length, max_lag=max_lag))


@pytest.mark.parametrize("num_cores", [1, 2, 64])
@pytest.mark.parametrize("lanes", [1, 3, None])
def test_no_number_of_lanes_and_cores_stands_still(lanes: int | None, num_cores: int) -> None:
    async def main() -> None:
        machine = VirtualMachine({"sim": exponential, "train": one_second}, num_cores=num_cores)
        async with training(SPEC, machine, count=7, batch_size=11, updates=10, lanes=lanes) as stage:
            await exhaust(stage)

    run_virtual(main())


# Nothing is too old.


@pytest.mark.parametrize("update_s", [0.0, 1.0])
@pytest.mark.parametrize("max_lag", [1, 2])
@pytest.mark.parametrize("batch_size", [16, 32, 64])
def test_nothing_is_masked_where_all_are_equally_fast(batch_size: int, max_lag: int, update_s: float) -> None:
    """An open segment that could not wait for another version is handed on, when it was begun after the publish too."""

    async def main() -> None:
        machine = VirtualMachine({"sim": one_second, "train": lambda n, rng: update_s})
        async with training(SPEC, machine, count=8, batch_size=batch_size, updates=40, max_lag=max_lag) as stage:
            await exhaust(stage)
            assert stage.envs.admission.ledger().dropped == {}

    run_virtual(main())


@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_trained_decision_is_older_than_the_bound_with_stragglers(max_lag: int, seed: int) -> None:
    async def main() -> None:
        machine = VirtualMachine({"sim": with_stragglers, "train": one_second}, num_cores=32, seed=seed)
        options: dict[str, Any] = {"count": 32, "batch_size": 64, "updates": 60, "max_lag": max_lag}
        async with training(SPEC, machine, **options, seed=seed) as stage:
            await exhaust(stage)
            ledger = stage.envs.admission.ledger()
        lags = np.concatenate([batch.lags for batch in stage.learner.batches])
        assert lags.max() == max_lag, "the bound is used"
        assert set(ledger.dropped) <= {"masked"}
        assert sum(ledger.dropped.values()) < 0.1 * ledger.started

    run_virtual(main())


@virtually
async def test_how_old_they_are_is_told() -> None:
    machine = VirtualMachine({"sim": with_stragglers, "train": one_second}, num_cores=32)
    async with training(SPEC, machine, count=32, batch_size=64, updates=20, max_lag=2) as stage:
        reports = [report async for report in stage.trainer]
    seen = set()
    for report, batch in zip(reports, stage.learner.batches, strict=True):
        counts = np.bincount(batch.lags).tolist()
        assert report.lag_counts == tuple(counts)
        assert (report.lag_mean, report.lag_max) == (batch.lags.mean(), batch.lags.max())
        shares = {f"lag/share_of_{lag}": num / 64 for lag, num in enumerate(counts) if num}
        told = {name: x for name, x in flatten(report).items() if name.startswith("lag/")}
        assert told == {"lag/mean": report.lag_mean, "lag/max": report.lag_max, **shares}
        seen |= {*shares}
    assert seen == {"lag/share_of_0", "lag/share_of_1", "lag/share_of_2"}


@virtually
async def test_a_straggler_that_is_too_old_is_masked() -> None:
    laws = {"sim": one_second, "slow": lambda n, rng: 30.0, "train": one_second}
    machine = OneSlowLane(laws, servers={"slow": 1})
    async with training(SPEC, machine, count=4, batch_size=6, updates=60, max_lag=1) as stage:
        await exhaust(stage)
        assert stage.envs.admission.ledger().dropped["masked"] > 0


# Nothing is lost.


def assert_every_decision_is_accounted_for(**options: Any) -> None:
    async def main() -> None:
        async with training(SPEC, **options) as stage:
            await exhaust(stage)

    run_virtual(main())


@settings(max_examples=40)
@given(
    count=st.integers(1, 12),
    batch_size=st.integers(1, 40),
    max_lag=st.integers(0, 3),
    segment_length=st.none() | st.integers(1, 20),
    horizon=st.integers(1, 3),
    gen_lanes=st.integers(1, 3),
    num_cores=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_the_ledger_is_balanced_at_every_update(seed: int, num_cores: int, **options: Any) -> None:
    laws = {"sim": with_stragglers, "gen": exponential, "train": exponential}
    machine = VirtualMachine(laws, num_cores=num_cores, servers={"gen": 2}, seed=seed)
    assert_every_decision_is_accounted_for(machine=machine, updates=10, seed=seed, **options)


async def chaotic(env: EnvContext) -> None:
    """One episode in which anything may happen."""
    obs, _ = await env.reset()
    while not env.done:
        what = env.rng.choice(["act_step", "step", "twice", "intervene", "fallback", "leave", "call", "slice"])
        try:
            async with asyncio.timeout(float(env.rng.exponential(6.0)) + 0.01):
                obs = await chaos(env, obs, str(what))
        except TimeoutError:
            continue
        if what == "leave":
            return


async def chaos(env: EnvContext, obs: Observation, what: str) -> Observation:
    if what == "act_step":
        return (await env.act_step(obs)).obs
    if what == "fallback":
        return (await env.intervene(np.zeros(2, np.float32))).obs
    if what == "call":
        await env.call(lambda sim: None)
        return obs
    out = await env.act(obs)
    if what == "twice":
        out = await env.act(obs)
    if what == "intervene":
        return (await env.intervene(-out.action)).obs
    if what == "leave":
        return obs
    result = await env.step(out.action[:1] if what == "slice" else out.action)
    env.reward(0.5)
    return result.obs


@settings(max_examples=60)
@given(
    count=st.integers(1, 8),
    batch_size=st.integers(1, 24),
    max_lag=st.integers(0, 3),
    segment_length=st.none() | st.integers(1, 20),
    horizon=st.integers(1, 3),
    gen_lanes=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_the_ledger_is_balanced_whatever_programs_do(seed: int, **options: Any) -> None:
    laws = {"sim": exponential, "gen": lambda n, rng: float(rng.exponential(0.5)), "train": exponential}
    machine = VirtualMachine(laws, num_cores=4, seed=seed)
    assert_every_decision_is_accounted_for(machine=machine, updates=8, seed=seed, program=chaotic, **options)


def test_programs_that_do_anything_do_use_every_way_out() -> None:
    async def main() -> None:
        laws = {"sim": exponential, "gen": lambda n, rng: float(rng.exponential(0.5)), "train": exponential}
        machine = VirtualMachine(laws, num_cores=4)
        async with training(SPEC, machine, count=8, batch_size=16, updates=40, program=chaotic) as stage:
            await exhaust(stage)
            dropped = stage.envs.admission.ledger().dropped
        assert set(dropped) >= {"intervention", "unexecuted", "cancelled", "lost"}

    run_virtual(main())
