"""The convergence bench compares what it says: schedules that are what they are called, equal latencies, fair times."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bench.convergence import bars, versus, without_latency, without_variance
from bench.learning import (
    ASYNC,
    BATCH,
    LOCKSTEP,
    SYNC,
    Curve,
    Job,
    Pace,
    TimedEnv,
    learn,
    learn_plainly,
    make_policy,
    train,
    update_s,
)
from bench.loading import load_convergence
from bench.profiles import names
from bench.stragglers import UNBOUNDED, Case, run
from bench.survival import ratio, restricted, sustained
from bench.workload import Workload
from ebrl.core.records import Array
from ebrl.core.trace import Span, Trace
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from tests.helpers import virtually

pytestmark = [
    pytest.mark.sims,
    pytest.mark.blocks("simulators read their models when they are built"),
    pytest.mark.hogs("updates are real, and run on the loop's thread in virtual time"),
]
LIBERO = load_convergence("libero")
NUM = LIBERO.num_units


def traced(job: Job) -> tuple[Curve, dict[str, list[Span]]]:
    """Run a job, and return its spans by kind: ``batch``, ``update``, ``act_step``, ``reset``."""
    trace, spans = Trace(), defaultdict[str, list[Span]](list)
    machine = VirtualMachine({}, num_cores=NUM)
    curve, _ = run_virtual(train(job, machine, make_policy(job.seed), trace))
    for span in trace.spans:
        spans[span.name].append(span)
    return curve, spans


@pytest.mark.slow
def test_lockstep_is_lockstep() -> None:
    curve, spans = traced(Job(LIBERO, LOCKSTEP, seed=0, updates=2, every=1))
    batches, steps, updates = spans["batch"], spans["act_step"], spans["update"]
    assert [batch.args["n"] for batch in batches] == [NUM] * (2 * BATCH // NUM), "all ask together"
    for number, batch in enumerate(batches):
        of_round = [step for step in steps if step.start_s < batch.end_s <= step.end_s]
        assert len({step.track for step in of_round}) == len(of_round) == NUM, "all step, each once"
        later = [*batches[number + 1 :][:1], *(update for update in updates if update.start_s >= batch.end_s)]
        assert max(step.end_s for step in of_round) <= min(span.start_s for span in later), "nobody goes on before"
    for update in updates:
        others = [
            span for span in [*batches, *spans["reset"]] if span.start_s < update.end_s and span.end_s > update.start_s
        ]
        assert others == [], "nothing overlaps with training"
        assert update.end_s - update.start_s == pytest.approx(update_s(LIBERO))
    ended = sum(1 for span in spans["reset"]) - NUM
    assert ended > 10, "a reset belongs to the step before it"
    assert max(span.end_s - span.start_s for span in spans["reset"][NUM:]) == 0
    assert max(step.end_s - step.start_s for step in steps) > LIBERO.reset_s
    assert curve.lag_max == 0


@pytest.mark.slow
def test_in_sync_environments_are_independent_and_training_waits() -> None:
    curve, spans = traced(Job(LIBERO, SYNC, seed=0, updates=2, every=1))
    assert min(batch.args["n"] for batch in spans["batch"]) < NUM
    first = spans["update"][0]
    asked = [batch for batch in spans["batch"] if first.start_s < batch.start_s < first.end_s]
    assert asked == [], "no decision while an update runs"
    stepped = Counter(step.track for step in spans["act_step"] if step.end_s <= first.start_s)
    assert set(stepped.values()) == {BATCH // NUM}, "equal shares"
    assert curve.lag_max == 0


@pytest.mark.slow
def test_asynchronously_decisions_are_made_while_an_update_runs() -> None:
    curve, spans = traced(Job(LIBERO, ASYNC, seed=0, updates=2, every=1))
    first = spans["update"][0]
    assert [batch for batch in spans["batch"] if first.start_s < batch.start_s < first.end_s]
    assert curve.lag_max == 1


class Coin(gymnasium.Env[Array, np.int64]):
    """Ends an episode where the action says so."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[Array, dict[str, object]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, object]]:
        return np.zeros(1, np.float32), 1.0, bool(action), False, {}


async def times_of(script: str, *, vectorised: bool, index: int = 0, seed: int = 0) -> list[tuple[str, float]]:
    """Return what each call takes: ``s`` steps, ``e`` is the last step of an episode, ``r`` resets."""
    lane = VirtualMachine({}).lane("sim", "sim-0")
    env = TimedEnv(Coin(), LIBERO, index, seed, Pace(), vectorised)
    clock, times = asyncio.get_running_loop().time, list[tuple[str, float]]()
    for call in script:
        began_s = clock()
        await (lane.run(env.reset) if call == "r" else lane.run(env.step, int(call == "e")))
        times.append((call, clock() - began_s))
    return times


@virtually
async def test_the_kth_step_and_the_kth_reset_take_the_same_whatever_lies_between() -> None:
    one, other = [await times_of(script, vectorised=False) for script in ("rsssererss", "rerssserss")]
    steps, resets = ([[t for call, t in times if (call == "r") == reset] for times in (one, other)] for reset in (0, 1))
    assert steps[0] == pytest.approx(steps[1])
    assert resets[0] == pytest.approx(resets[1])
    assert len(set(np.round(steps[0], 9))) == len(steps[0])
    assert (await times_of("rs", vectorised=False, index=1))[1] != one[1]
    assert (await times_of("rs", vectorised=False, seed=1))[1] != one[1]


@virtually
async def test_a_vector_environment_resets_in_the_step_that_ends() -> None:
    apart, together = [await times_of("rserser", vectorised=vectorised) for vectorised in (False, True)]
    assert sum(t for _, t in apart) == pytest.approx(sum(t for _, t in together))
    assert [t for call, t in together if call == "r"][1:] == [0.0, 0.0]
    assert together[2][1] == pytest.approx(apart[2][1] + apart[3][1])


@pytest.mark.slow
def test_asynchronous_code_without_lag_is_the_plain_loop() -> None:
    job = Job(load_convergence("long-tail"), SYNC, seed=1, updates=2, deterministic=True)
    plain = learn_plainly(job)
    assert learn(job).digest == learn(replace(job, schedule=LOCKSTEP, deterministic=False)).digest == plain.digest
    assert learn_plainly(replace(job, seed=2)).digest != plain.digest


@pytest.mark.parametrize(
    ("values", "place"), [([], None), ([5], None), ([5, 5], 0), ([5, 4, 5, 5], 2), ([5, 4, 5], None), ([1, 9, 9, 1], 1)]
)
def test_a_target_is_reached_when_the_next_evaluation_confirms_it(values: list[float], place: int | None) -> None:
    assert sustained(values, 5) == place


def test_who_does_not_get_there_counts_with_the_end_of_the_baseline() -> None:
    assert restricted([3.0, None, 9.0], [10.0, 10.0, 8.0]).tolist() == [3.0, 10.0, 8.0]


def test_ratios_are_those_of_means_with_paired_intervals() -> None:
    ours = np.array([1.0, 2.0, 4.0, 8.0])
    exact = ratio(3 * ours, ours)
    assert (exact.value, exact.low, exact.high) == pytest.approx((3, 3, 3)), "pairs are drawn together"
    loose = ratio(3 * ours[::-1], ours)
    assert loose.value == pytest.approx(3)
    assert loose.low < 2 < 4 < loose.high


def curve(schedule: str, returns: list[float], second: float) -> Curve:
    job = Job(LIBERO, replace(ASYNC, name=schedule), 0, updates=len(returns), every=1)
    updates = list(range(1, len(returns) + 1))
    return Curve(job, updates, [second * u for u in updates], returns, second * len(returns))


def test_where_updates_take_equally_long_sooner_is_throughput_times_sample_efficiency() -> None:
    base = [curve("sync", [0, 1000, 1000, 1000], 10.0)]
    ours = [curve("async-1", [0, 0, 1000, 1000], 4.0)]
    found = versus(base, ours, seed=0)
    assert found["time"].value == pytest.approx(20 / 12)
    assert found["throughput"].value == pytest.approx(2.5)
    assert found["sample_efficiency"].value == pytest.approx(2 / 3)
    failed = versus(base, [curve("async-1", [0, 1000, 0, 1000], 4.0)], seed=0)
    assert failed["time"].value == pytest.approx(20 / 40), "a failure of ours is as slow as the whole baseline"


def test_a_bar_is_for_three_of_four_profiles() -> None:
    def profile(low: float) -> dict[str, object]:
        return {"ratios": {base: {"time": {"low": low}} for base in ("lockstep", "sync")}}

    (lockstep, sync) = bars({str(low): profile(low) for low in (1.0, 2.5, 3.0, 1.6)})
    assert (lockstep.value, lockstep.ok, sync.value, sync.ok) == (1.6, False, 1.6, True)
    assert bars({"one": profile(3.0)}) == []
    assert len(names("convergence")) >= 4


def mean_step_s(workload: Workload) -> float:
    async def main() -> float:
        lane = VirtualMachine({}).lane("sim", "sim-0")
        env = TimedEnv(Coin(), workload, 0, 0, Pace(), vectorised=False)
        for _ in range(50):
            await lane.run(env.step, 0)
        return asyncio.get_running_loop().time() / 50

    return run_virtual(main())


def test_the_controls_take_away_what_they_say() -> None:
    still = without_variance(LIBERO)
    assert mean_step_s(still) == pytest.approx(LIBERO.call_s * LIBERO.policy.chunk)
    assert (still.generation_s(8), still.reset_s) == (LIBERO.generation_s(8), 0)
    instant = without_latency(LIBERO)
    assert mean_step_s(instant) == instant.generation_s(8) == instant.reset_s == 0
    assert update_s(instant) == update_s(still) == update_s(LIBERO) == pytest.approx(512 * 2 / 85)


@pytest.mark.slow
def test_stragglers_are_masked_where_lag_is_bounded_and_old_where_it_is_not() -> None:
    bounded = run(Case(64, 0.9, 60, 1, seed=0))
    assert bounded.lag_max <= 1
    assert 0 < bounded.masked < 0.06
    free = run(Case(64, 0.9, 60, UNBOUNDED, seed=0))
    assert free.lag_max > 2
    assert free.masked == 0
