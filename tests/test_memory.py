"""What a policy remembers: carried from decision to decision of an episode, whatever happens in between."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import torch
from numpy.testing import assert_array_equal
from torch import Tensor

from ebrl.core.errors import PolicyError
from ebrl.core.protocols import MEMORY, PolicyOut
from ebrl.core.records import ActionOut, Decision, EnvSpec
from ebrl.core.runtime import Runtime
from ebrl.core.testing import settle
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.batcher import Batcher
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.sim.programs import rollout
from ebrl.train.evaluate import evaluate
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner, scripted_spec, take, the_failure, virtually

Program = Callable[[EnvContext], Awaitable[None]]
SPEC = scripted_spec(length=4)
TICK_S = 0.01
torch.set_num_threads(1)


class Counter(ScriptedPolicy):
    """Remembers how many decisions there were, and adds up the first numbers of what it saw."""

    def __init__(self, spec: EnvSpec = SPEC, **options: Any) -> None:
        super().__init__(spec, **options)
        self.memory_size = 2

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        out.memory = batch[MEMORY] + torch.stack([torch.ones(len(noise)), batch["state"][:, 0]], 1)
        return out


def machine() -> VirtualMachine:
    """Batches and steps take a tick."""
    return VirtualMachine({"gen": lambda n, rng: TICK_S, "sim": lambda n, rng: TICK_S})


def count_before(out: ActionOut) -> int:
    return int(out.aux[MEMORY][0])


def count_after(out: ActionOut) -> int:
    assert out.memory is not None
    return int(out.memory[0])


def assert_remembered(decisions: list[Decision]) -> None:
    """Every decision of an episode goes on from the one before, and the first from nothing."""
    last: dict[int, Decision] = {}
    for decision in sorted(decisions, key=lambda d: (d.env, d.index)):
        before = last.get(decision.env)
        memory = decision.out.aux[MEMORY]
        if before is not None and before.episode == decision.episode:
            assert_array_equal(memory, before.out.memory)
        else:
            assert_array_equal(memory, [0, 0])
        assert count_after(decision.out) == count_before(decision.out) + 1
        last[decision.env] = decision


@asynccontextmanager
async def running(program: Program = rollout, *, count: int = 1) -> AsyncIterator[EnvGroup]:
    """Run a program on a policy that counts, with a consumer that takes segments by hand."""
    async with Runtime(machine()) as rt:
        gen = rt.start(Generator(Counter()))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=count, program=program))
        envs.open_training(1000, max_lag=1)
        yield envs


async def by_hand(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        obs = (await env.step((await env.act(obs)).action)).obs


async def by_turns(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        if env.num_calls % 2:
            obs = (await env.act_step(obs)).obs
        else:
            out = await env.act(obs)
            for action in out.action:
                if not env.done:
                    obs = (await env.step(action)).obs


@pytest.mark.parametrize("program", [rollout, by_hand, by_turns])
def test_it_is_carried_through_an_episode_and_begins_anew_with_the_next(program: Program) -> None:
    async def main() -> None:
        async with running(program, count=3) as envs:
            decisions = [d for segment in await take(envs, 9) for d in segment.decisions]
        assert_remembered(decisions)
        assert {(count_before(d.out), d.episode) for d in decisions} == {(i, e) for i in range(4) for e in range(3)}

    run_virtual(main())


@virtually
async def test_it_outlives_versions() -> None:
    learner = RecordingLearner(Counter(scripted_spec(length=20)), 6)
    async with Runtime(VirtualMachine({"sim": lambda n, rng: 1.0, "train": lambda n, rng: 2.0})) as rt:
        gen = rt.start(Generator(learner.policy))
        envs = rt.start(EnvGroup(scripted_spec(length=20), actor=gen, count=2))
        async for _ in rt.start(Trainer(envs, learner, updates=12)):
            pass
    assert_remembered(learner.decisions)
    assert any(len({d.version for d in s.decisions}) > 1 for batch in learner.batches for s in batch.segments)


@virtually
async def test_an_answer_that_is_not_executed_leaves_no_trace() -> None:
    outs: list[ActionOut] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        obs = (await env.act_step(obs)).obs
        outs.extend([await env.act(obs) for _ in range(3)])  # say, to choose one of them
        obs = (await env.step(outs[-1].action)).obs
        while not env.done:
            obs = (await env.act_step(obs)).obs

    async with running(program) as envs:
        (segment,) = await take(envs, 1)
    assert [count_before(out) for out in outs[:3]] == [1, 1, 1]
    assert len(segment.decisions) == 4
    assert_remembered(segment.decisions)


@virtually
async def test_an_intervention_is_remembered_as_what_the_policy_saw() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            out = await env.act(obs)
            obs = (await env.intervene(0 * out.action)).obs

    async with running(program) as envs:
        (segment,) = await take(envs, 1)
    assert_remembered(segment.decisions)


class Hasty(Generator):
    """Cancels a task when its answer has come, and before the task knows."""

    victim: asyncio.Future[ActionOut] | None = None

    def _landed(self, *args: Any) -> None:
        super()._landed(*args)
        if self.victim is not None:
            self.victim.cancel()


@pytest.mark.parametrize("answered", [False, True])
def test_a_cancelled_act_leaves_no_trace(answered: bool) -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            await env.act(obs)
            asking = asyncio.ensure_future(env.act(obs))
            gen.victim = asking if answered else None
            await asyncio.wait([asking], timeout=None if answered else TICK_S / 2)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            gen.victim = None
            obs = (await env.step((await env.act(obs)).action)).obs

    async def main() -> None:
        async with Runtime(machine()) as rt:
            rt.start(gen)
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=1, program=program))
            envs.open_training(1000, max_lag=1)
            segments = await take(envs, 2)
            assert envs.admission.ledger().dropped["cancelled"] >= 8
        assert_remembered([d for segment in segments for d in segment.decisions])
        assert [len(segment.decisions) for segment in segments] == [4, 4]

    gen = Hasty(Counter())
    run_virtual(main())


@virtually
async def test_an_act_step_that_is_cancelled_ends_the_episode_and_its_memory() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        for _ in range(2):
            obs = (await env.act_step(obs)).obs
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5 * TICK_S):  # the answer is there, the step is not
                await env.act_step(obs)

    async with running(program) as envs:
        decisions = [d for segment in await take(envs, 3) for d in segment.decisions]
    assert [count_before(d.out) for d in decisions] == [0, 1] * 3
    assert_remembered(decisions)


@virtually
async def test_two_actors_remember_apart() -> None:
    own: list[int] = []
    others: list[int] = []
    async with Runtime(machine()) as rt:
        gen, other = rt.start(Generator(Counter())), rt.start(Generator(Counter(), name="other"))

        async def program(env: EnvContext) -> None:
            obs, _ = await env.reset()
            while not env.done:
                out = await env.act(obs)
                own.append(count_before(out))
                others.extend([count_before(await env.act(obs, actor=other)) for _ in range(2)])
                obs = (await env.step(out.action)).obs

        envs = rt.start(EnvGroup(SPEC, actor=gen, count=1, program=program))
        envs.open_training(1000, max_lag=1)
        await take(envs, 2)
    assert own[:8] == [0, 1, 2, 3] * 2
    assert others[:16] == [*range(8)] * 2


@virtually
async def test_an_answer_of_another_actor_that_comes_late_belongs_to_the_old_episode() -> None:
    seconds = iter([1.0, 2.0, 4.0])
    counts: list[int] = []
    laws = {"gen": lambda n, rng: next(seconds, 1.0)}
    async with Runtime(VirtualMachine(laws, servers={"gen": 2})) as rt:
        gen = rt.start(Generator(Counter()))
        other = rt.start(Generator(Counter(), lanes=2, batcher=Batcher(max_size=1), name="other"))

        async def program(env: EnvContext) -> None:
            obs, _ = await env.reset()
            counts.append(count_before(await env.act(obs, actor=other)))
            early, late = (asyncio.ensure_future(env.act(obs, actor=other)) for _ in range(2))
            await settle()
            obs, _ = await env.reset()
            counts.append(count_before(await early))
            counts.append(count_before(await env.act(obs, actor=other)))
            counts.append(count_before(await late))
            counts.append(count_before(await env.act(obs, actor=other)))
            await asyncio.Event().wait()

        rt.start(EnvGroup(SPEC, actor=gen, count=1, program=program)).open_training(1000, max_lag=1)
        await asyncio.sleep(20.0)
    assert counts == [0, 1, 0, 1, 1]


@virtually
async def test_an_evaluation_remembers_too() -> None:
    outs: list[ActionOut] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            outs.append(await env.act(obs))
            obs = (await env.step(outs[-1].action)).obs

    async with Runtime(VirtualMachine({})) as rt:
        gen = rt.start(Generator(Counter(), deterministic=True))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=1, program=program))
        report = await evaluate(envs, range(3))
    assert len(report.episodes) == 3
    assert [count_before(out) for out in outs] == [0, 1, 2, 3] * 3


@pytest.mark.slow
def test_where_simulators_run_does_not_matter() -> None:
    async def main(host: Literal["thread", "process"]) -> list[Any]:
        async with Runtime() as rt:
            gen = rt.start(Generator(Counter()))
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=2, lanes=1, host=host))
            envs.open_training(1000, max_lag=1)
            decisions = [d for segment in await take(envs, 4) for d in segment.decisions]
        assert_remembered(decisions)
        first = [d for d in decisions if d.episode == 0]
        return sorted((d.env, d.index, d.out.aux[MEMORY].tolist()) for d in first)

    assert asyncio.run(main("thread")) == asyncio.run(main("process"))


# What goes wrong.


class Unreasonable(Counter):
    """Cannot look at large numbers, or makes them unreasonable."""

    def __init__(self, memory: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = memory

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        out.memory = self.change(out.memory)  # type: ignore[arg-type]
        return out


def nan_from_the_third_on(memory: Tensor) -> Tensor:
    return torch.where(memory[:, :1] > 2, torch.nan, memory)


def refuse_the_third(memory: Tensor) -> Tensor:
    if (memory[:, 0] > 2).any():
        raise ValueError("three is too many")
    return memory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan_from_the_third_on, "the policy gave a memory that is not finite for env 0 episode 0 decision 2"),
        (refuse_the_third, "the policy failed for env 0 episode 0 decision 2 .* three is too many"),
        (lambda memory: None, r"memory has shape None and not \(1, 2\), as memory_size=2 says"),
        (lambda memory: memory[:, :1], r"memory has shape \(1, 1\) and not \(1, 2\)"),
    ],
)
def test_memories_that_cannot_be(change: Callable[[Tensor], Any], message: str) -> None:
    async def main() -> None:
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(Unreasonable(change), batcher=Batcher(threshold=1)))
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=1))
            envs.open_training(1000, max_lag=1)
            await take(envs, 1)

    error = the_failure(main())
    assert isinstance(error, PolicyError)
    assert re.search(message, str(error))
