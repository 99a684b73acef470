"""The tuner in the real runtime on modelled hardware: it finds the rule, follows changes, and stays out of the way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ebrl.core.errors import Deadlock
from ebrl.core.readings import Batching, Move, Reading
from ebrl.core.runtime import Runtime
from ebrl.core.trace import Trace
from ebrl.core.tuner import Tuner
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.batcher import Batcher
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.train.trainer import Trainer
from tests.helpers import scripted_spec
from tests.pipeline import FIXED, SPEC, STEPS, CountingLearner, Laws, SlowPolicy, rig, run_for, start

FEW_MOVES = 3  # in any minute of one regime

# It finds the rule.


@pytest.mark.slow
def test_where_the_fixed_cost_is_the_limit_it_waits_for_nearly_all_and_is_faster_than_greedy() -> None:
    rate, moves, threshold = run_for(5, FIXED, 64)
    greedy, none, one = run_for(4, FIXED, 64, batcher=Batcher(1, 64, 1e4))
    assert (none, one) == ((), 1)
    assert threshold >= 0.8 * 64
    assert rate > 1.15 * greedy
    assert all(move.service == "gen" and move.knob == "batching" for move in moves)
    assert len(moves) <= FEW_MOVES


@pytest.mark.slow
def test_where_simulation_is_the_limit_it_waits_for_few_and_loses_nothing() -> None:
    rate, moves, threshold = run_for(6, STEPS, 16)
    greedy, *_ = run_for(6, STEPS, 16, batcher=Batcher(1, 16, 1e4))
    assert threshold <= 4
    assert rate > 0.98 * greedy
    assert len(moves) <= FEW_MOVES


@pytest.mark.slow
def test_where_cores_are_the_limit_it_does_not_wait() -> None:
    laws = Laws(step_s=0.02, fixed_s=0.01)
    rate, moves, _ = run_for(20, laws, machine=laws.machine(num_cores=4))
    assert rate > 0.97 * 4 / 0.02
    assert len(moves) <= FEW_MOVES


@pytest.mark.slow
def test_all_in_step_are_told_apart_by_an_exploration() -> None:
    laws = Laws(step_s=0.005, cv=0.0)
    rate, moves, _ = run_for(6, laws)
    greedy, *_ = run_for(6, laws, batcher=Batcher(1, 32, 1e4))
    assert rate >= 0.97 * greedy
    assert len(moves) <= FEW_MOVES + 1
    assert sum("all alike" in move.reason for move in moves) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(STEPS, FIXED), (FIXED, STEPS)])
def test_it_follows_a_change_of_regime(first: Laws, second: Laws) -> None:
    async def main() -> tuple[float, float, float]:
        laws = replace(first)
        async with rig(laws) as r:
            await asyncio.sleep(2)
            before = r.threshold
            laws.become(second)
            await asyncio.sleep(3)
            return before, r.threshold, await r.rate(2)

    before, after, rate = run_virtual(main())
    low, high = min(before, after), max(before, after)
    assert low <= 4 < 0.8 * 32 <= high
    assert (before < after) == (first is STEPS)
    fresh, *_ = run_for(4, second)
    assert rate > 0.95 * fresh


@pytest.mark.slow
def test_a_policy_that_becomes_five_times_slower_is_noticed() -> None:
    async def main() -> tuple[float, float, list[Move]]:
        laws = Laws(fixed_s=0.004, per_request_s=2e-5, step_s=0.02, cv=0.3)
        async with rig(laws) as r:
            await asyncio.sleep(2)
            before = r.threshold
            laws.fixed_s, laws.per_request_s, laws.step_s = 0.02, 1e-4, 0.005
            await asyncio.sleep(5)
            return before, r.threshold, [move for move in r.moves if move.time_s > 2]

    before, after, moves = run_virtual(main())
    assert before <= 8
    assert after >= 0.8 * 32
    assert 1 <= len(moves) <= 5, "it does not wait until all that it knows is new"
    assert moves[-1].time_s < 4


def test_statistics_have_every_knob_and_the_number_of_moves() -> None:
    async def main() -> None:
        async with rig(replace(FIXED), runtime={"pin": {"concurrency": 5}}) as r:
            begun = r.rt.statistics()["tuner"]
            await asyncio.sleep(2)
            now = r.rt.statistics()["tuner"]
            assert (begun["moves"], begun["gen/threshold"]) == (0, 1)
            assert (now["moves"], now["gen/threshold"]) == (len(r.moves), r.threshold)
            assert begun["gen/threshold"] < now["gen/threshold"]
            assert {"gen/max_size", "gen/max_wait_s", "gen/num_lanes", "cores/sim"} <= now.keys()
            assert now["concurrency"] == 5

    run_virtual(main())


# It stays out of the way.


@pytest.mark.parametrize("options", [{"tune": False}, {"deterministic": True}])
def test_it_can_be_switched_off_and_never_moves_in_a_deterministic_run(options: dict[str, bool]) -> None:
    async def main() -> None:
        async with rig(replace(FIXED), runtime=options, max_lag=0) as r:
            await asyncio.sleep(3)
            assert r.envs.env_steps > 500
            assert r.rt.tuning.num_decisions == 0
            assert r.moves == ()
            assert r.threshold == 1

    run_virtual(main())


def test_a_batcher_of_the_user_is_never_touched() -> None:
    rule = Batcher(3, 5, 0.5)

    async def main() -> None:
        async with rig(replace(FIXED), batcher=rule) as r:
            await asyncio.sleep(3)
            assert r.rt.tuning.num_decisions > 5
            assert r.moves == ()
            assert r.gen.reading().batching == Batching(3, 5, 0.5)

    run_virtual(main())


def test_equal_runs_make_equal_moves_which_the_trace_shows() -> None:
    def once() -> tuple[str, list[tuple[float, str]], tuple[Move, ...]]:
        trace = Trace()
        _, moves, _ = run_for(3, FIXED, runtime={"trace": trace})
        spans = [(span.start_s, span.args["why"]) for span in trace.spans if span.track == "tuner"]
        return trace.digest(), spans, moves

    first, second = once(), once()
    assert first == second
    digest, spans, moves = first
    assert spans == [(move.time_s, str(move)) for move in moves]
    assert spans
    assert digest


def test_a_deadlock_is_still_one() -> None:
    moves: list[Move] = []

    async def stops(env: EnvContext) -> None:
        obs, _ = await env.reset()
        for _ in range(60):
            result = await env.act_step(obs)
            obs = (await env.reset())[0] if env.done else result.obs
        await asyncio.Event().wait()

    async def main() -> None:
        async with rig(replace(FIXED), program=stops, spec=scripted_spec(length=20)) as r:
            try:
                await asyncio.Event().wait()
            finally:
                moves.extend(r.moves)

    with pytest.raises(Deadlock, match="envs-0: "):
        run_virtual(main())
    assert moves


# Who takes part.


@pytest.mark.slow
def test_two_generators_are_tuned_each_for_itself() -> None:
    async def main() -> tuple[float, float]:
        laws = replace(FIXED)
        machine = VirtualMachine({"sim": laws.sim}, num_cores=64, servers={"gen": 2})
        async with Runtime(machine) as rt:
            policies = [SlowPolicy(SPEC, laws), SlowPolicy(SPEC, Laws(fixed_s=2e-4, per_request_s=1e-5))]
            first, second = (start(rt, rt.start(Generator(policy)), 12) for policy in policies)
            await asyncio.sleep(4)
            assert {move.service for move in rt.tuning.moves} <= {"gen", "gen-2"}
            assert all("N 12," in move.reason for move in rt.tuning.moves if "forecast" in move.reason)
            return first.threshold, second.threshold

    first, second = run_virtual(main())
    assert first >= 0.75 * 12
    assert second <= 4


def test_environments_that_wait_for_an_evaluation_do_not_count() -> None:
    async def main() -> None:
        async with rig(replace(FIXED)) as r:
            evaluation = r.rt.start(EnvGroup(SPEC, actor=r.gen, count=20, name="eval"))
            await asyncio.sleep(1)
            assert (r.envs.reading().num_envs, evaluation.reading().num_envs) == (32, 0)
            assert r.moves
            assert all("N 32," in move.reason and move.new.max_size == 32 for move in r.moves)
            running = r.rt.spawn(evaluation.run_episodes(range(20)), "evaluation")
            await asyncio.sleep(1)
            assert evaluation.reading().num_envs == 20
            await running
            assert evaluation.reading().num_envs == 0

    run_virtual(main())


def test_a_group_that_nobody_consumes_does_not_count() -> None:
    async def main() -> None:
        async with Runtime(FIXED.machine()) as rt:
            gen = rt.start(Generator(ScriptedPolicy(SPEC)))
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=8))
            assert envs.reading().num_envs == 0
            await asyncio.sleep(1)
            assert envs.reading().num_envs == 0
            Trainer(envs, CountingLearner(ScriptedPolicy(SPEC), 8), updates=1)
            envs.open_training(64, max_lag=1)
            await asyncio.sleep(0.01)
            assert envs.reading().num_envs == 8

    run_virtual(main())


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.2, 2.0])
def test_services_that_end_are_forgotten_even_in_the_middle_of_a_trial(
    monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    readings: list[Reading] = []
    decide = Tuner.decide

    def spied(self: Tuner, reading: Reading) -> Move | None:
        readings.append(reading)
        return decide(self, reading)

    monkeypatch.setattr(Tuner, "decide", spied)

    async def main() -> None:
        laws = replace(FIXED)
        async with rig(laws, 16, machine=laws.machine(servers={"gen": 2})) as r:
            other = r.rt.start(Generator(ScriptedPolicy(SPEC)))
            gone = start(r.rt, other, 16)
            while not any(move.service == other.name for move in r.moves):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)
            await asyncio.sleep(after_s)
            for service in (gone.trainer, gone.envs, other):
                await r.rt.stop(service)
            now_s = asyncio.get_running_loop().time()
            turn: list[Move] = []
            monkeypatch.setattr(other, "turn", turn.append)
            steps = r.envs.env_steps
            laws.become(STEPS)
            readings.clear()
            await asyncio.sleep(3)
            assert r.envs.env_steps > steps
            assert readings
            for reading in readings:
                seen = [one.name for part in (reading.gens, reading.sims, reading.trains) for one in part]
                assert seen == ["gen", "envs", "trainer"]
            assert turn == []
            assert {move.service for move in r.moves if move.time_s > now_s} == {"gen"}
            assert r.threshold <= 4

    run_virtual(main())


@pytest.mark.slow
def test_a_trainer_that_comes_later_does_not_stop_the_tuning() -> None:
    async def main() -> None:
        laws = Laws(step_s=0.02, cv=0.5, fixed_s=0.002, per_request_s=2e-5)
        async with Runtime(laws.machine()) as rt:
            gen = rt.start(Generator(ScriptedPolicy(SPEC)))
            evaluation = rt.start(EnvGroup(SPEC, actor=gen, count=32, name="eval"))
            running = rt.spawn(evaluation.run_episodes(range(32 * 5)), "evaluation")
            await asyncio.sleep(1)
            laws.become(FIXED)
            await running
            assert rt.tuning.moves
            r = start(rt, gen, 32)
            await asyncio.sleep(1)
            laws.become(STEPS)
            await asyncio.sleep(3)
            assert r.threshold <= 4

    run_virtual(main())
