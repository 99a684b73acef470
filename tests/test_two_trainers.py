"""Two trainers in one runtime: what they may not share, and with which weights the second one begins."""

from __future__ import annotations

import asyncio

import pytest
import torch

from ebrl import EnvGroup, Generator, Runtime, Trainer, VirtualMachine
from ebrl.core.errors import ConfigError
from tests.helpers import RecordingLearner, VersionedPolicy, assert_sound, scripted_spec, virtually

SPEC = scripted_spec(length=5)
MACHINE = {"sim": lambda n, rng: 0.01, "gen": lambda n, rng: 1.0, "train": lambda n, rng: 0.1}


def learner_of(weight: float) -> RecordingLearner:
    policy = VersionedPolicy(SPEC)
    with torch.no_grad():
        policy.weight.fill_(weight)
    return RecordingLearner(policy, 4)


def start(rt: Runtime, gen: Generator, learner: RecordingLearner, name: str, updates: int = 3) -> Trainer:
    envs = rt.start(EnvGroup(SPEC, actor=gen, count=2, name=f"envs of {name}"))
    return rt.start(Trainer(envs, learner, updates=updates, name=name))


def acted_with(learner: RecordingLearner) -> set[float]:
    return {float(decision.out.log_prob.flat[0]) for decision in learner.decisions}


@pytest.mark.parametrize("shared", ["actor", "learner"])
def test_two_may_share_nothing_while_they_train(shared: str) -> None:
    """Each would train on what the other one's weights did, or two threads would change one policy."""

    @virtually
    async def main() -> None:
        async with Runtime(VirtualMachine(MACHINE)) as rt:
            learners = [learner_of(1.0), learner_of(2.0)]
            gens = [rt.start(Generator(learner.policy, name=f"gen-{i}")) for i, learner in enumerate(learners)]
            first = start(rt, gens[0], learners[0], "first")
            await anext(first)
            gen = gens[0] if shared == "actor" else gens[1]
            learner = learners[0] if shared == "learner" else learners[1]
            told = f"second has the {shared} of first, which has not done its updates: give it one of its own, or end"
            with pytest.raises(ConfigError, match=told):
                start(rt, gen, learner, "second")
            assert [report.update async for report in first] == [2, 3]
            third = start(rt, gen, learner, "third")
            assert [report.update async for report in third] == [1, 2, 3]

    main()


@virtually
async def test_the_first_may_be_stopped_instead() -> None:
    async with Runtime(VirtualMachine(MACHINE)) as rt:
        learner = learner_of(0.0)
        gen = rt.start(Generator(learner.policy))
        first = start(rt, gen, learner, "first")
        await anext(first)
        await rt.stop(first)
        assert [report.update async for report in start(rt, gen, learner, "second")] == [1, 2, 3]


@virtually
async def test_the_second_begins_with_the_weights_of_its_learner() -> None:
    async with Runtime(VirtualMachine(MACHINE)) as rt:
        one, other = learner_of(0.0), learner_of(70.0)
        gen = rt.start(Generator(one.policy))
        async for _ in start(rt, gen, one, "first"):
            pass  # its environments go on, and a batch of the version before this one is on its way
        reports = [report async for report in start(rt, gen, other, "second", updates=1)]
        assert (reports[0].lag_max, acted_with(other)) == (0, {70.0})
        assert gen.weights.version == 5, "three of the first, the beginning of the second, and its own"


@virtually
async def test_a_cancelled_publish_is_no_second_trainer() -> None:
    async with Runtime(VirtualMachine(MACHINE)) as rt:
        learner = learner_of(1.0)
        gen = rt.start(Generator(learner.policy))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=8))
        trainer = rt.start(Trainer(envs, learner, updates=3))
        await anext(trainer)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await gen.publish(learner_of(50.0).policy)
        assert [report.update async for report in trainer] == [2, 3]
        assert gen.weights.version == 3
        assert 50.0 not in acted_with(learner)
        assert_sound(envs.admission.ledger())
