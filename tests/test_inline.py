"""Environments that are awaited: on the loop, without a thread, and otherwise as all others."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ebrl.core.errors import CallTimeout, ConfigError, ProgramError, SimulatorError
from ebrl.core.records import Decision, EnvSpec
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.awaited import is_awaited
from ebrl.sim.check import check_env
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import CLOSE, CONSTRUCTION, ScriptedEnv
from ebrl.sim.group import EnvGroup
from ebrl.sim.programs import rollout
from ebrl.sim.simulator import construction_lock
from ebrl.sim.spec import env_spec
from ebrl.train.evaluate import evaluate
from tests.helpers import assert_sound, recording, take, the_failure, training, virtually

POLICY = FailurePolicy(build_s=40.0, reset_s=20.0, call_s=10.0)


class Robot:
    """A scripted environment at the other end of a line.

    Args:
        step_s: That an answer takes.
        hang: Call of `step` that never answers.
        stubborn: Whether it ignores once that it is cancelled.
        raises: What leaves it, by the number of the call of `step`, `CONSTRUCTION` or `CLOSE`.
        **options: Of the environment.
    """

    def __init__(
        self,
        step_s: float = 0.0,
        *,
        hang: int = -1,
        stubborn: bool = False,
        raises: Mapping[int, type[BaseException]] | None = None,
        **options: Any,
    ) -> None:
        self._env = ScriptedEnv(3, **options)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self._step_s = step_s
        self._hang, self._stubborn = hang, stubborn
        self._raises = dict(raises or {})
        self._num_steps = 0
        self.events: list[str] = []
        self._raise(CONSTRUCTION)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(self._step_s)
        return self._env.reset(seed=seed)

    async def step(self, action: Any) -> Any:
        self._num_steps += 1
        self._raise(self._num_steps)
        while self._num_steps == self._hang:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.events.append("cancelled")
                if not self._stubborn or len(self.events) > 1:
                    raise
        await asyncio.sleep(self._step_s)
        return self._env.step(action)

    async def close(self) -> None:
        self.events.append("closed")
        self._raise(CLOSE)

    def _raise(self, call: int) -> None:
        if call in self._raises:
            raise self._raises[call]


ROBOT = env_spec(Robot)
CHOOSER = env_spec(functools.partial(Robot, num_actions=3))


def robots(**options: Any) -> EnvSpec:
    return replace(ROBOT, make=functools.partial(Robot, **options))


def as_seen(decisions: list[Decision]) -> dict[tuple[int, int], Any]:
    return {(d.env, d.index): (np.asarray(d.obs).tobytes(), d.rewards, d.terminated, d.truncated) for d in decisions}


async def trained(spec: EnvSpec, **options: Any) -> dict[tuple[int, int], Any]:
    async with training(spec, VirtualMachine({}), batch_size=24, updates=6, **options) as stage:
        async for _ in stage.trainer:
            assert_sound(stage.envs.admission.ledger())
    return as_seen(stage.learner.decisions)


@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize(("length", "repeat", "limit"), [(9, 1, None), (9, 2, None), (50, 2, 7)])
def test_trajectories_are_those_of_a_thread(horizon: int, length: int, repeat: int, limit: int | None) -> None:
    shape: dict[str, Any] = {"horizon": limit, "action_repeat": repeat}
    inline = env_spec(functools.partial(Robot, length=length), **shape)
    thread = env_spec(functools.partial(ScriptedEnv, 3, length=length), **shape)
    assert (inline.host, thread.host) == ("inline", "thread")
    one, other = (run_virtual(trained(spec, horizon=horizon)) for spec in (inline, thread))
    both = one.keys() & other.keys()
    assert len(both) > 100
    assert all(one[key] == other[key] for key in both)


def test_actions_from_a_list() -> None:
    async def main(spec: EnvSpec) -> list[float]:
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            report = await evaluate(rt.start(EnvGroup(spec, actor=gen, count=2)), range(4))
            return [episode.total_reward for episode in report.episodes]

    shape: dict[str, Any] = {"num_actions": 3, "length": 5}
    inline = replace(CHOOSER, make=functools.partial(Robot, **shape))
    thread = replace(CHOOSER, make=functools.partial(ScriptedEnv, 3, **shape), host="thread")
    assert run_virtual(main(inline)) == run_virtual(main(thread))


AUTO = env_spec(Robot, host="auto")


@virtually
async def test_where_they_run_is_not_to_be_found_out() -> None:
    assert AUTO.host == "inline"
    async with training(robots(length=5), host="auto") as s:
        assert len([report async for report in s.trainer]) == 4
        assert s.envs.choice is None
    mixed = [replace(ROBOT, task="a"), replace(ROBOT, task="b", host="thread")]
    with pytest.raises(ConfigError, match='wants host="inline", Robot host="thread"'):
        EnvGroup(mixed, actor=s.gen, count=2, host="auto")


@virtually
async def test_all_are_awaited_at_once_and_need_no_core() -> None:
    async with training(robots(step_s=1.0, length=50), VirtualMachine({}, num_cores=1), count=32, batch_size=320) as s:
        reports = [report async for report in s.trainer]
        assert reports[0].elapsed_s == 11.0, "a reset and ten steps"
        assert s.envs.statistics()["busy_s"] > 32 * 10
        assert s.envs.reading().num_envs == 32


def test_spares_are_awaited_too() -> None:
    async def main(spares: int) -> tuple[dict[tuple[int, int], Any], float]:
        spec = robots(step_s=1.0, length=3)
        async with training(spec, VirtualMachine({}), count=4, batch_size=24, updates=12, spares=spares) as stage:
            took_s = [report.elapsed_s async for report in stage.trainer]
            now = stage.envs.statistics()
            assert (now["resets_ready"] + now["resets_waited"] > 10) == (spares > 0)
        return as_seen(stage.learner.decisions), took_s[-1]

    (one, one_s), (other, other_s) = run_virtual(main(0)), run_virtual(main(4))
    both = one.keys() & other.keys()
    assert len(both) > 100
    assert all(one[key] == other[key] for key in both)
    assert other_s < 0.9 * one_s


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(
    "fault",
    [
        {"faults": {0: "raise"}},
        {"faults": {3: "raise"}},
        {"faults": {CONSTRUCTION: "raise"}},
        {"faults": {2: "nan"}},
        {"faults": {2: "shape"}},
        {"hang": 3},
        {"hang": 3, "stubborn": True},
        {"raises": {3: SystemExit}},
        # It awaited a task of its own that was cancelled, since the connection was closed.
        {"raises": {CONSTRUCTION: asyncio.CancelledError}},
        {"raises": {3: asyncio.CancelledError, CLOSE: asyncio.CancelledError}},
    ],
    ids=str,
)
def test_one_that_fails_is_built_again_and_the_others_go_on(fault: dict[str, Any], count: int) -> None:
    made: list[Robot] = []
    faults = [fault]

    def make() -> Robot:
        made.append(Robot(1.0, length=4, **(faults.pop() if faults else {})))
        return made[-1]

    async def main() -> None:
        spec = replace(ROBOT, make=make)
        async with training(spec, count=count, batch_size=8 * count, updates=6, failures=POLICY) as s:
            async for _ in s.trainer:
                assert_sound(s.envs.admission.ledger())
            assert s.envs.faults == {"restarts": 1, "dropped_envs": 0, "leaked_threads": 0}
        assert {d.env for d in s.learner.decisions} == set(range(count))

    run_virtual(main())
    assert len(made) in (count, count + 1)  # the former where construction has failed
    assert [robot.events.count("closed") for robot in made] == [1] * len(made)


class NeverClosed(Robot):
    async def close(self) -> None:
        if not self.events:
            self.events.append("closing")
            await asyncio.get_running_loop().create_future()


@virtually
async def test_what_hangs_when_it_is_closed_after_a_failure_has_the_time_of_a_call() -> None:
    made: list[Robot] = []

    def make() -> Robot:
        made.append(Robot(1.0, length=4) if made else NeverClosed(1.0, length=4, faults={3: "raise"}))
        return made[-1]

    spec = replace(ROBOT, make=make)
    async with recording(rollout, spec=spec, batch_size=999, failures=FailurePolicy(call_s=10.0)) as envs:
        await asyncio.sleep(100.0)
        assert envs.faults["restarts"] == 2, "for the step, and for closing"
        assert envs._contexts[0].episode > 5
    assert (len(made), made[0].events) == (2, ["closing"])


@virtually
async def test_a_call_that_is_not_awaited_any_more_is_cancelled() -> None:
    robot = Robot(1.0, hang=3, length=50)
    spec = replace(ROBOT, make=lambda: robot)

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                while True:
                    obs = (await env.act_step(obs)).obs
        await asyncio.sleep(0.1)
        assert robot.events == ["cancelled"]
        with pytest.raises(ProgramError, match="call reset first"):
            await env.act(obs)

    async with recording(program, spec=spec) as envs:
        (segment,) = await take(envs, 1)
    assert len(segment.decisions) == 2
    assert envs.admission.ledger().dropped["lost"] >= 1


@virtually
async def test_a_call_that_ignores_that_it_is_cancelled_holds_up_nobody_for_ever() -> None:
    made: list[Robot] = []

    def make() -> Robot:
        made.append(Robot(1.0, length=9) if made else Robot(1.0, hang=3, stubborn=True))
        return made[-1]

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()  # the second one waits behind the step that hangs
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                while not env.done:
                    obs = (await env.act_step(obs)).obs

    async with (
        asyncio.timeout(1000.0),
        recording(program, spec=replace(ROBOT, make=make), failures=POLICY) as envs,
    ):
        await take(envs, 3)
        assert envs.faults["restarts"] == 1
        assert made[0].events == ["cancelled", "cancelled", "closed"]
        assert len(made) == 2


class Deaf(Robot):
    """Goes on however often it is cancelled, until it is told to listen."""

    listens = False

    async def step(self, action: Any) -> Any:
        while not self.listens:
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
        return await super().step(action)


def test_a_call_that_outlives_the_runtime_is_named(caplog: pytest.LogCaptureFixture) -> None:
    deaf = Deaf()

    async def main() -> None:
        async with recording(rollout, spec=replace(ROBOT, make=lambda: deaf)):
            await asyncio.sleep(1.0)
        deaf.listens = True
        (left,) = asyncio.all_tasks() - {asyncio.current_task()}
        left.cancel()
        await left

    run_virtual(main())
    named = "envs-inline-0 ignores that its call is cancelled; the loop ends when that does"
    assert caplog.messages.count(named) == 1


def test_building_waits_for_no_thread() -> None:
    """While a simulator of another group is built in a thread, the loop would stand still."""
    has_it, served, loop = threading.Event(), threading.Event(), threading.get_ident()
    waited: list[bool] = []

    def build() -> None:
        with construction_lock:
            has_it.set()
            while not (served.wait(0.001) or construction_lock.is_awaited_by(loop)):
                pass
            waited.append(construction_lock.is_awaited_by(loop))

    async def main() -> None:
        async with training(robots(length=4)) as s:
            assert len([report async for report in s.trainer]) == 4

    thread = threading.Thread(target=build)
    thread.start()
    has_it.wait()
    try:
        run_virtual(main())
    finally:
        served.set()
        thread.join()
    assert waited == [False]


@virtually
async def test_what_a_program_calls_is_awaited() -> None:
    async def line(robot: Robot) -> str:
        await asyncio.sleep(1.0)
        return "ready" if is_awaited(robot) else "?"

    async def program(env: EnvContext) -> None:
        answer: Any = await env.call(line)
        assert answer == "ready"
        assert await env.call(lambda robot: robot.events) == []
        obs, _ = await env.reset()
        while not env.done:
            obs = (await env.act_step(obs)).obs

    async with recording(program, spec=robots(length=4)) as envs:
        assert len(await take(envs, 2)) == 2


async def made_by_a_coroutine(delay_s: float = 0.0) -> Robot:
    await asyncio.sleep(delay_s)
    return Robot(length=4)


MADE = env_spec(made_by_a_coroutine)


@virtually
async def test_it_may_be_made_by_a_coroutine() -> None:
    assert (MADE.host, MADE.observation, MADE.info_keys) == ("inline", ROBOT.observation, ROBOT.info_keys)
    spec = replace(MADE, make=functools.partial(made_by_a_coroutine, 1.0))
    async with training(spec, count=2, batch_size=8, updates=2) as s:
        async for report in s.trainer:
            assert report.elapsed_s == 1.0


def test_a_deadline_ends_a_run_that_is_to_raise() -> None:
    async def main() -> None:
        async with training(robots(hang=3, length=9), count=1, failures=FailurePolicy("raise", call_s=10.0)) as s:
            async for _ in s.trainer:
                pass

    assert isinstance(the_failure(main()), CallTimeout)


def test_hosts_that_cannot_run_it() -> None:
    with pytest.raises(ConfigError, match="its reset and step are coroutine functions: leave out host='process'"):
        env_spec(Robot, host="process")
    with pytest.raises(ConfigError, match="host='inline' is for environments whose reset and step are coroutine func"):
        env_spec("CartPole-v1", host="inline")
    with pytest.raises(ConfigError, match="environments that are awaited are not stepped in turn: leave out num_slots"):
        env_spec(Robot, num_slots=3)
    with pytest.raises(ConfigError, match="environments that are awaited are not stepped in turn: leave out num_slots"):
        env_spec(made_by_a_coroutine, num_slots=3)

    async def make() -> ScriptedEnv:
        return ScriptedEnv()

    with pytest.raises(ConfigError, match="this one made ScriptedEnv: make it with a plain function"):
        env_spec(make)
    gen: Any = Generator(ScriptedPolicy(robots()))
    with pytest.raises(ConfigError, match="leave out host='thread'"):
        EnvGroup(robots(), actor=gen, count=1, host="thread")
    with pytest.raises(ConfigError, match="use host='thread'"):
        EnvGroup(env_spec("CartPole-v1"), actor=gen, count=1, host="inline")


class Restless(Robot):
    async def reset(self, **options: Any) -> Any:
        return await super().reset(seed=None)


def test_a_cancellation_of_its_own_is_an_error_where_it_is_looked_at() -> None:
    with pytest.raises(SimulatorError, match="left a simulator"):
        env_spec(functools.partial(Robot, raises={1: asyncio.CancelledError}))


def test_a_check_finds_what_it_finds_in_others() -> None:
    check_env(MADE)
    check_env(env_spec(functools.partial(Robot, length=5)))
    with pytest.raises(SimulatorError, match="the same seed and actions gave another observation"):
        check_env(env_spec(functools.partial(Restless, length=5)))
