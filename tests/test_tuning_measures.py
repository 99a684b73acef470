"""The tuner in the real runtime: what it is told, the GPU that it divides, and what happens when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ebrl.core.readings import Batching, Move, Reading
from ebrl.core.records import Array
from ebrl.core.runtime import Runtime
from ebrl.core.trace import Trace
from ebrl.core.tuner import Tuner
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_gpu import GpuModel
from ebrl.core.virtual_machine import VirtualMachine, spend
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.group import EnvGroup
from ebrl.train.trainer import Trainer
from tests.helpers import leaves, scripted_spec, virtually
from tests.pipeline import FIXED, SPEC, CountingLearner, Laws, rig

# What is measured.


class TimedEnv(ScriptedEnv):
    """Its steps and resets take their time."""

    def __init__(self, step_s: float, reset_s: float, length: int) -> None:
        super().__init__(3, 2, length=length)
        self.step_s, self.reset_s = step_s, reset_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        spend(self.reset_s)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        spend(self.step_s)
        return super().step(action)


async def by_hand(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        out = await env.act(obs)
        obs = (await env.step(out.action)).obs


async def in_one(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        obs = (await env.act_step(obs)).obs


@pytest.mark.parametrize("program", [by_hand, in_one])
def test_resets_belong_to_the_turn_around_and_waiting_for_credit_does_not(program: Callable[..., Any]) -> None:
    async def main() -> Array:
        spec = scripted_spec(make=lambda: TimedEnv(0.125, 2.0, 8))
        laws = Laws(fixed_s=0.0625, per_request_s=0.0, update_s=64.0)
        machine = VirtualMachine({"gen": laws.gen, "train": laws.train})
        async with rig(laws, 4, machine=machine, spec=spec, program=program, max_lag=0, rounds=5) as r:
            await asyncio.sleep(1000)
            ledger = r.envs.admission.ledger()
            assert ledger.trained >= 10 * 20
            return r.gen.reading().latencies_s

    latencies_s = run_virtual(main())
    assert set(latencies_s.tolist()) == {0.125, 2.125}
    assert 0.05 < (latencies_s > 1).mean() < 0.2


@pytest.mark.parametrize("program", [by_hand, in_one])
def test_the_time_between_two_evaluations_does_not_belong_to_the_turn_around(program: Callable[..., Any]) -> None:
    async def main() -> None:
        spec = scripted_spec(make=lambda: TimedEnv(0.125, 0.0, 8))
        async with Runtime(VirtualMachine({"gen": lambda n, rng: 0.0625})) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            envs = rt.start(EnvGroup(spec, actor=gen, count=4, program=program))
            for _ in range(3):
                assert len(await envs.run_episodes(range(6))) == 6
                await asyncio.sleep(1000)
            assert set(gen.reading().latencies_s.tolist()) == {0.125}

    run_virtual(main())


def test_a_request_that_was_given_up_does_not_belong_to_the_turn_around() -> None:
    async def impatient(env: EnvContext) -> None:
        obs, _ = await env.reset()
        number = 0
        while not env.done:
            number += 1
            try:
                async with asyncio.timeout(0.03 if number % 3 == 0 else 10):
                    out = await env.act(obs)
            except TimeoutError:
                await asyncio.sleep(5)
                continue
            obs = (await env.step(out.action)).obs

    async def main() -> None:
        spec = scripted_spec(make=lambda: TimedEnv(0.125, 0.0, 8))
        async with rig(
            FIXED, 2, machine=VirtualMachine({"gen": lambda n, rng: 0.0625}), spec=spec, program=impatient
        ) as r:
            await asyncio.sleep(100)
            assert r.envs.admission.ledger().dropped["cancelled"] > 5
            assert set(r.gen.reading().latencies_s.tolist()) == {0.125}

    run_virtual(main())


@virtually
async def test_updates_are_timed_by_the_clock_of_the_runtime() -> None:
    time = asyncio.get_running_loop().time
    async with Runtime(VirtualMachine({"train": lambda n, rng: 2.0})) as rt:
        rt.clock = lambda: time() + 1e6
        gen = rt.start(Generator(ScriptedPolicy(SPEC)))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=4))
        trainer = rt.start(Trainer(envs, CountingLearner(ScriptedPolicy(SPEC), 8), updates=3))
        assert (trainer.reading().update_s, trainer.reading().updated_s) == (0.0, 1e6)
        reports = [report async for report in trainer]
        assert (trainer.reading().update_s, trainer.reading().updated_s) == (2.0, 1e6 + 6.0)
    assert [(report.elapsed_s, report.update_s) for report in reports] == [(2.0, 2.0), (4.0, 2.0), (6.0, 2.0)]


# A GPU that generation and training share.


def gpu() -> GpuModel:
    return GpuModel(8, {"gen": saturating(2.0), "train": saturating(10.0)}, {})


def saturating(linearity: float) -> Callable[[float], float]:
    return lambda units: units / 8 * (1 + linearity) / (units / 8 + linearity)


BOTH = Laws(step_s=0.01, fixed_s=0.01, per_request_s=0.001, update_s=0.45)


@pytest.mark.slow
def test_a_gpu_that_is_the_limit_is_divided() -> None:
    async def main() -> None:
        machine = BOTH.machine(gpu=gpu())
        async with rig(BOTH, machine=machine, max_lag=2) as r:
            assert machine.gpu is not None
            await asyncio.sleep(20)
            divisions = [move for move in r.moves if move.knob == "partition"]
            assert divisions
            assert divisions[0].service == "machine"
            units = divisions[-1].new
            assert machine.gpu.partition == ({"gen": units, "train": 8 - units} if units else None)

    run_virtual(main())


@pytest.mark.slow
def test_a_division_that_turns_out_worse_is_taken_back() -> None:
    async def main() -> None:
        poor = {"gen": lambda units: (units / 8) ** 3, "train": lambda units: (units / 8) ** 3}
        machine = BOTH.machine(gpu=GpuModel(8, poor, {}))
        async with rig(BOTH, machine=machine, max_lag=2) as r:
            assert machine.gpu is not None
            await asyncio.sleep(25)
            divisions = [move for move in r.moves if move.knob == "partition"]
            assert [bool(move.new) for move in divisions] == [True, False]
            assert "taken back" in divisions[1].reason
            assert machine.gpu.partition is None

    run_virtual(main())


def test_a_gpu_that_nothing_is_trained_on_is_left_whole() -> None:
    async def main() -> None:
        machine = FIXED.machine(gpu=gpu())
        async with Runtime(machine) as rt:
            gen = rt.start(Generator(ScriptedPolicy(SPEC)))
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=16))
            await envs.run_episodes(range(32))
            assert rt.tuning.moves
            assert {move.knob for move in rt.tuning.moves} == {"batching"}

    run_virtual(main())


def decided(monkeypatch: pytest.MonkeyPatch, decide: Callable[[Reading], Move | None]) -> None:
    monkeypatch.setattr(Tuner, "decide", lambda self, reading: decide(reading))


def test_a_division_is_turned_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def decide(reading: Reading) -> Move | None:
        asked.append(reading.gen_units)
        new = {1: 6, 3: 0, 5: 2}.get(len(asked))
        return None if new is None else Move(reading.now_s, "machine", "partition", reading.gen_units, new, "", 0.0)

    decided(monkeypatch, decide)

    async def main() -> None:
        machine = BOTH.machine(gpu=gpu())
        async with rig(BOTH, 4, machine=machine):
            assert machine.gpu is not None
            seen: list[Mapping[str, int] | None] = []
            while len(asked) < 6:
                await asyncio.sleep(0.001)
                if len(seen) < len(asked):
                    seen.append(machine.gpu.partition)
        assert seen[:6] == [{"gen": 6, "train": 2}] * 2 + [None] * 2 + [{"gen": 2, "train": 6}] * 2
        assert asked[:6] == [0, 6, 6, 0, 0, 2]

    run_virtual(main())


# What goes wrong.


class Broken(Exception):
    pass


@pytest.mark.parametrize("what", ["decision", "rule"])
def test_an_error_of_the_tuner_ends_the_run_and_loses_no_answer(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def decide(reading: Reading) -> Move | None:
        if reading.now_s < 1:
            return None
        if what == "decision":
            raise Broken("the tuner")
        return Move(reading.now_s, "gen", "batching", Batching(1, 256, 0.01), Batching(5, 4, 0.01), "", 0.0)

    decided(monkeypatch, decide)
    answers = 0
    trace = Trace()

    async def counting(env: EnvContext) -> None:
        nonlocal answers
        obs, _ = await env.reset()
        while not env.done:
            out = await env.act(obs)
            answers += 1
            obs = (await env.step(out.action)).obs

    async def main() -> None:
        async with rig(replace(FIXED), runtime={"trace": trace}, program=counting):
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main())
    errors = list(leaves(caught.value))
    assert len(errors) == 1
    assert "the tuner" in str(errors[0]) if what == "decision" else "threshold <= max_size" in str(errors[0])
    batches = [span for span in trace.spans if span.name == "batch"]
    assert batches[-1].end_s == pytest.approx(1, abs=0.05), "at once"
    assert answers == sum(span.args["n"] for span in batches)


@virtually
async def test_an_error_of_the_tuner_after_the_end_of_its_generator_hurts_nobody() -> None:
    laws = replace(FIXED)
    async with rig(laws, 4, machine=laws.machine(servers={"gen": 2})) as r:
        other = r.rt.start(Generator(ScriptedPolicy(SPEC)))
        evaluation = r.rt.start(EnvGroup(SPEC, actor=other, count=4, name="eval"))
        running = r.rt.spawn(evaluation.run_episodes(range(4)), "evaluation")
        await asyncio.sleep(0.11)
        running.cancel()
        await r.rt.stop(evaluation)
        await r.rt.stop(other)  # behind its running batch
        steps = r.envs.env_steps
        await asyncio.sleep(1)
        assert r.envs.env_steps > steps
