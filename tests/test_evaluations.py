"""Evaluations that do not come to their end: no report is made of episodes that were cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ebrl import EnvGroup, FailurePolicy, Generator, Runtime, VectorGroup, evaluate
from ebrl.core.errors import Closed, PolicyError
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.sim.context import EnvContext
from ebrl.sim.fake import ScriptedFault
from ebrl.train.evaluate import EvalReport
from tests.helpers import leaves, scripted_spec
from tests.vectors import batched_spec

LAWS: dict[str, Any] = {"sim": lambda n, rng: 1.0, "gen": lambda n, rng: 0.25}
RAISE = FailurePolicy("raise")
AT_ONCE = {2: "raise"}
"""Every simulator fails in its second step, all in the same moment."""


class Broken(ScriptedPolicy):
    """Works for some calls, and then no more."""

    num_left = 2

    def act(self, *args: Any, **kwargs: Any) -> Any:
        self.num_left -= 1
        if self.num_left < 0:
            raise ValueError("it is broken")
        return super().act(*args, **kwargs)


async def by_two_calls(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        obs = (await env.step((await env.act(obs)).action)).obs


async def keeps_its_cancellation(env: EnvContext) -> None:
    obs, _ = await env.reset()
    try:
        while not env.done:
            obs = (await env.act_step(obs)).obs
    except asyncio.CancelledError:
        pass


def singles(policy: type[ScriptedPolicy] = ScriptedPolicy, program: Any = None, **faults: Any) -> EnvGroup:
    spec = scripted_spec(length=9, **faults)
    gen = Generator(policy(spec))
    return EnvGroup(spec, actor=gen, count=3, program=program or by_two_calls, failures=RAISE)


def stock(policy: type[ScriptedPolicy] = ScriptedPolicy, **faults: Any) -> EnvGroup:
    spec = scripted_spec(length=9, **faults)
    return EnvGroup(spec, actor=Generator(policy(spec)), count=3, failures=RAISE)


def batched(policy: type[ScriptedPolicy] = ScriptedPolicy, **faults: Any) -> VectorGroup:
    spec = batched_spec(3, length=9, **faults)
    return VectorGroup(spec, actor=Generator(policy(spec)), num_groups=1, failures=RAISE)


GROUPS: dict[str, Callable[..., EnvGroup | VectorGroup]] = {"act, step": singles, "act_step": stock, "vector": batched}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("options", "expected"), [({"policy": Broken}, PolicyError), ({"faults": AT_ONCE}, ScriptedFault)]
)
def test_an_error_that_ends_the_run_ends_no_episode(group: str, options: dict[str, Any], expected: type) -> None:
    reports: list[EvalReport] = []

    async def main() -> None:
        async with Runtime(VirtualMachine(LAWS)) as rt:
            envs = GROUPS[group](**options)
            rt.start(envs.actor)  # type: ignore[type-var]
            rt.start(envs)
            reports.append(await evaluate(envs, range(3)))

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main())
    assert not reports
    assert all(isinstance(error, expected) for error in leaves(caught.value))


@pytest.mark.parametrize("group", [*GROUPS, "keeps its cancellation"])
@pytest.mark.parametrize("after_s", [0.5, 1.1, 3.0])
def test_a_group_that_is_stopped_tells_who_waits_for_its_evaluation(group: str, after_s: float) -> None:
    async def main() -> None:
        async with Runtime(VirtualMachine(LAWS)) as rt:
            envs = GROUPS[group]() if group in GROUPS else singles(program=keeps_its_cancellation)
            rt.start(envs.actor)  # type: ignore[type-var]
            rt.start(envs)
            waiting = asyncio.create_task(evaluate(envs, range(3)))
            await asyncio.sleep(after_s)
            await rt.stop(envs)
            with pytest.raises(Closed, match="envs has ended, and its evaluation with it"):
                await waiting
            with pytest.raises(Closed, match="envs has ended: evaluate inside"):
                await evaluate(envs, range(3))

    run_virtual(main())


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_evaluates_in_one_runtime_after_the_other(group: str) -> None:
    envs = GROUPS[group]()

    async def main() -> EvalReport:
        async with Runtime(VirtualMachine(LAWS)) as rt:
            rt.start(envs.actor)  # type: ignore[type-var]
            rt.start(envs)
            return await evaluate(envs, range(5))

    for _ in range(2):
        assert [episode.num_steps for episode in run_virtual(main()).episodes] == [9] * 5


def test_an_episode_that_its_program_gives_up_after_a_failure_counts_as_it_was() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        try:
            while not env.done:
                obs = (await env.act_step(obs)).obs
        except PolicyError:
            pass

    async def main() -> list[int]:
        spec = scripted_spec(length=9)
        async with Runtime(VirtualMachine(LAWS)) as rt:
            gen = rt.start(Generator(Broken(spec)))
            envs = rt.start(EnvGroup(spec, actor=gen, count=3, program=program))
            return [episode.num_steps for episode in (await evaluate(envs, range(3))).episodes]

    assert run_virtual(main()) == [2, 2, 2]
