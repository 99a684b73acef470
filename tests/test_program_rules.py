"""What a program may not do, and what becomes of its decisions when it is interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from ebrl.core.errors import ProgramError
from ebrl.core.machine import LocalMachine
from ebrl.core.records import Observation
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import ScriptedEnv, ScriptedFault
from tests.helpers import STEP_S, assert_sound, leaves, recording, scripted_spec, take, training, virtually

Program = Callable[[EnvContext], Awaitable[None]]
SPEC = scripted_spec(length=4)


async def failure(program: Program, **options: Any) -> ProgramError:
    """Return the error with which a program ends the run."""
    with pytest.raises(ExceptionGroup) as caught:
        async with recording(program, **options) as envs:
            await take(envs, 1000)
    (leaf,) = leaves(caught.value)
    assert isinstance(leaf, ProgramError)
    return leaf


# Misuse.


@virtually
async def test_a_program_that_does_nothing_is_an_error_and_no_busy_loop() -> None:
    async def program(env: EnvContext) -> None:
        pass

    assert "without a single call" in str(await failure(program))


@virtually
async def test_a_program_that_only_resets_is_an_error_and_no_busy_loop() -> None:
    async def program(env: EnvContext) -> None:
        await env.reset()
        await env.call(id)

    async with asyncio.timeout(1000.0):  # no segment ever comes
        error = await failure(program)
    assert str(error).startswith("the program returned 100 times in a row without a decision or a step")
    assert "await env.act_step(obs)" in str(error)
    assert error.__notes__[0].startswith("env 0 episode 99 ")


@virtually
async def test_a_program_may_only_reset_now_and_then() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        if env.episode % 90 == 89:
            await env.intervene(np.zeros(2, np.float32)) if env.episode % 180 == 89 else await env.act_step(obs)

    async with recording(program, horizon=4) as envs:
        await asyncio.sleep(1000 * STEP_S)
        assert envs._contexts[0].episode > 400


@virtually
async def test_a_program_whose_simulator_does_not_let_it_act_is_not_to_blame() -> None:
    num_failed = 0

    async def program(env: EnvContext) -> None:
        nonlocal num_failed
        try:
            await env.reset()
        except ScriptedFault:
            num_failed += 1

    spec = scripted_spec(faults={0: "raise"})
    async with recording(program, spec=spec, failures=FailurePolicy(per_env=None, backoff_s=0.0)) as envs:
        await asyncio.sleep(1000 * STEP_S)
        assert num_failed > 200
        assert envs.faults["restarts"] >= num_failed - 1


@virtually
async def test_a_program_that_is_no_coroutine_function_is_told_what_it_lacks() -> None:
    def program(env: EnvContext) -> None:
        pass

    error = await failure(program)  # type: ignore[arg-type]
    assert str(error) == "the program returned NoneType and no coroutine: define it with `async def`"


async def awaits_who_was_cancelled(env: EnvContext) -> None:
    await env.reset()
    planner = asyncio.get_running_loop().create_future()
    planner.cancel()
    await planner


async def cancels_itself(env: EnvContext) -> None:
    await env.reset()
    own_task().cancel()
    await asyncio.sleep(0)


async def is_cancelled_by_a_watchdog(env: EnvContext) -> None:
    await env.reset()
    asyncio.get_running_loop().call_later(1.0, own_task().cancel)
    await asyncio.Event().wait()


def own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@pytest.mark.parametrize("program", [awaits_who_was_cancelled, cancels_itself, is_cancelled_by_a_watchdog])
def test_a_program_does_not_end_silently_by_a_cancellation_of_its_own(
    program: Callable[[EnvContext], Awaitable[None]],
) -> None:
    async def main() -> Exception:
        async with asyncio.timeout(100.0):  # nothing would tell, and the segments never come
            return await failure(program)

    error = run_virtual(main())
    assert str(error).startswith("CancelledError() left the program, which the run had not cancelled")
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert error.__notes__[0].startswith("env 0 episode 0")


@virtually
async def test_two_calls_of_one_environment_at_once_are_an_error() -> None:
    refused: list[str] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "act": lambda: env.act(obs),
            "act_step": lambda: env.act_step(obs),
            "step": lambda: env.step(np.zeros(2, np.float32)),
            "intervene": lambda: env.intervene(np.zeros(2, np.float32)),
            "reset": env.reset,
            "call": lambda: env.call(id),
        }
        async with asyncio.TaskGroup() as group:
            group.create_task(env.act_step(obs))
            await asyncio.sleep(0)
            for name, call in calls.items():
                with pytest.raises(ProgramError, match=rf"{name}\(\) while act_step\(\) .*\(env 0 episode"):
                    await call()
                refused.append(name)
        while not env.done:
            await env.act_step(obs)

    slow = VirtualMachine({"sim": lambda n, rng: 1.0, "gen": lambda n, rng: 1.0})
    async with recording(program, machine=slow) as envs:
        (segment,) = await take(envs, 1)
        assert_sound(envs.admission.ledger())
    assert refused[:6] == ["act", "act_step", "step", "intervene", "reset", "call"]
    assert [d.intervened for d in segment.decisions] == [False] * 4


@pytest.mark.parametrize("name", ["act", "act_step", "step", "intervene"])
def test_nothing_goes_on_before_the_first_reset(name: str) -> None:
    async def program(env: EnvContext) -> None:
        await getattr(env, name)(np.zeros(3 if name.startswith("act") else 2, np.float32))

    async def main() -> str:
        return str(await failure(program))

    message = virtually(main)()
    assert f"{name}(): there was no reset yet" in message
    assert "call reset() first" in message


@pytest.mark.parametrize("name", ["act", "act_step", "step", "intervene"])
def test_nothing_goes_on_after_the_end_of_the_episode(name: str) -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            obs = (await env.act_step(obs)).obs
        await getattr(env, name)(np.zeros(3 if name.startswith("act") else 2, np.float32))

    async def main() -> str:
        return str(await failure(program))

    assert f"{name}(): the episode has ended" in virtually(main)()


@virtually
async def test_an_intervention_that_is_refused_marks_nothing() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            obs = (await env.act_step(obs)).obs
        with pytest.raises(ProgramError, match="has ended"):
            await env.intervene(np.zeros(2, np.float32))

    async with recording(program) as envs:
        (segment,) = await take(envs, 1)
    assert [d.intervened for d in segment.decisions] == [False] * 4


@virtually
async def test_step_needs_a_decision_and_reward_an_executed_one() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        with pytest.raises(ProgramError, match="without an open decision"):
            await env.step(np.zeros(2, np.float32))
        with pytest.raises(ProgramError, match="without an executed decision"):
            env.reward(1.0)
        out = await env.act(obs)
        with pytest.raises(ProgramError, match="without an executed decision"):
            env.reward(1.0)
        await env.step(out.action)
        env.reward(8e37)
        for bad in (float("nan"), float("inf"), 1e200, 8e37, "much"):
            with pytest.raises(ProgramError, match=r"reward: expected .*, got .*env 0"):
                env.reward(bad)  # type: ignore[arg-type]
        env.reward(-8e37)
        while not env.done:
            await env.act_step(obs)

    async with recording(program) as envs:
        (segment,) = await take(envs, 1)
    assert np.isfinite([r for d in segment.decisions for r in d.rewards]).all()


# Any blocking call, timeouts and tasks.


def test_a_blocking_call_runs_on_the_lane_of_its_simulator() -> None:
    names: list[tuple[str, str]] = []

    class Named(ScriptedEnv):
        def reset(self, **options: Any) -> Any:
            self.thread = threading.current_thread().name
            return super().reset(**options)

    async def program(env: EnvContext) -> None:
        before = await env.call(lambda sim: threading.current_thread().name)  # before the first reset too
        obs, _ = await env.reset()
        names.append((before, await env.call(lambda sim: sim.thread)))
        while not env.done:
            obs = (await env.act_step(obs)).obs

    async def main() -> None:
        spec = scripted_spec(make=lambda: Named(3, 2, length=4))
        async with recording(program, spec=spec, count=3, lanes=2, machine=LocalMachine(2)) as envs:
            await take(envs, 6)

    asyncio.run(main())
    assert {name for pair in names for name in pair} == {"ebrl-envs-0", "ebrl-envs-1"}
    assert all(a == b for a, b in names)


@virtually
async def test_a_timeout_cancels_an_act_that_waits_and_the_program_goes_on() -> None:
    seconds = iter([10.0])

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        if env.index == 1 and env.episode == 0:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await env.act(obs)
        while not env.done:
            obs = (await env.act_step(obs)).obs

    # The only lane is busy with another environment: the request of environment 1 is still in the queue.
    laws = {"gen": lambda n, rng: next(seconds, 0.0), "sim": lambda n, rng: 0.0}
    async with recording(program, count=2, machine=VirtualMachine(laws)) as envs:
        segments = await take(envs, 2)
        ledger = envs.admission.ledger()
        assert_sound(ledger)
        assert ledger.dropped == {"cancelled": 1}
    assert sorted((s.env, len(s.decisions)) for s in segments) == [(0, 4), (1, 4)]


@virtually
async def test_a_timeout_cancels_an_act_that_waits_for_credit_which_costs_none() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        obs = (await env.act_step(obs)).obs
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await env.act(obs)
        await asyncio.Event().wait()

    async with recording(program, count=2, batch_size=1, machine=VirtualMachine({})) as envs:
        await asyncio.sleep(50)
        ledger = envs.admission.ledger()
    assert (ledger.started, ledger.parked, ledger.in_flight, ledger.dropped) == (2, 2, 0, {})
    assert envs.admission.ledger().num_waiting == 0


@pytest.mark.parametrize("calls", ["act, step", "act_step"])
def test_a_timeout_loses_a_step_that_runs_and_the_program_must_reset(calls: str) -> None:
    seconds = iter([1.0, 1.0, 1.0, 100.0])  # a reset, two steps, and one that hangs
    errors: list[str] = []

    async def step(env: EnvContext, obs: Observation) -> Observation:
        if calls == "act_step":
            return (await env.act_step(obs)).obs
        return (await env.step((await env.act(obs)).action)).obs

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        try:
            async with asyncio.timeout(5.0):
                while not env.done:
                    obs = await step(env, obs)
        except TimeoutError:
            assert env.done
            with pytest.raises(
                ProgramError, match=r"state of the simulator is unknown .*call reset\(\) first"
            ) as caught:
                await env.act(obs)
            errors.append(str(caught.value))

    async def main() -> None:
        machine = VirtualMachine({"sim": lambda n, rng: next(seconds, 1.0)})
        group: Any = {"program": program, "failures": FailurePolicy(call_s=None)}
        async with training(SPEC, machine, count=1, batch_size=6, updates=2, **group) as stage:
            async for report in stage.trainer:
                assert_sound(stage.envs.admission.ledger())
                assert report.dropped == {"lost": 1}
        lost, *others = stage.learner.batches[0].segments
        assert (lost.reason, [d.index for d in lost.decisions], [d.num_steps for d in lost.decisions]) == (
            "lost",
            [0, 1],
            [1, 1],
        )
        assert not any(d.terminated or d.truncated for d in lost.decisions)
        assert [d.episode for s in others for d in s.decisions] == [1, 1, 1, 1]

    virtually(main)()
    assert len(errors) == 1


@virtually
async def test_an_intervention_that_is_lost_costs_no_decision() -> None:
    seconds = iter([1.0, 100.0])

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        if env.episode == 0:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5.0):
                    await env.intervene(np.zeros(2, np.float32))
            return
        while not env.done:
            obs = (await env.act_step(obs)).obs

    async with recording(program, machine=VirtualMachine({"sim": lambda n, rng: next(seconds, 1.0)})) as envs:
        await take(envs, 1)
        assert_sound(envs.admission.ledger())
        assert envs.admission.ledger().dropped == {}


@virtually
async def test_tasks_of_a_program_run_beside_its_environment() -> None:
    overlaps: list[float] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            out = await env.act(obs)
            began = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as group:
                step = group.create_task(env.step(out.action))
                group.create_task(asyncio.sleep(STEP_S))
            overlaps.append(asyncio.get_running_loop().time() - began)
            obs = step.result().obs

    async with recording(program) as envs:
        (segment,) = await take(envs, 1)
    assert len(segment.decisions) == 4
    assert overlaps == pytest.approx([STEP_S] * 4)
