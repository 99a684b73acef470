"""Two trainers in one runtime: what they may not share, and with which weights the second one begins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ebrl import Checkpointer, EnvGroup, Generator, Runtime, Trainer, VirtualMachine, run_virtual
from ebrl.core.errors import Closed, ConfigError, PolicyError, PoolError
from ebrl.core.records import TrainBatch
from tests.helpers import RecordingLearner, VersionedPolicy, assert_sound, scripted_spec, virtually

SPEC = scripted_spec(length=5)
MACHINE = {"sim": lambda n, rng: 0.01, "gen": lambda n, rng: 1.0, "train": lambda n, rng: 0.1}


class Kept(RecordingLearner):
    """Can be saved."""

    def state_dict(self) -> dict[str, float]:
        return {"weight": self.policy.weight.item()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        raise NotImplementedError


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


@pytest.mark.parametrize("shared", ["generator", "learner", "policy"])
def test_two_may_share_nothing_while_they_train(shared: str) -> None:
    """Each would train on what the other one's weights did, or two threads would change one policy."""

    @virtually
    async def main() -> None:
        async with Runtime(VirtualMachine(MACHINE)) as rt:
            learners = [learner_of(1.0), learner_of(2.0)]
            gens = [rt.start(Generator(learner.policy, name=f"gen-{i}")) for i, learner in enumerate(learners)]
            first = start(rt, gens[0], learners[0], "first")
            await anext(first)
            gen = gens[0] if shared == "generator" else gens[1]
            learner = {
                "generator": learners[1],
                "learner": learners[0],
                "policy": RecordingLearner(learners[0].policy, 4),
            }[shared]
            what = "generator" if shared == "generator" else "policy"
            told = f"second has the {what} of first, which has not done its updates: give it one of its own"
            version = gen.weights.version
            with pytest.raises(ConfigError, match=told):
                start(rt, gen, learner, "second")
            assert gen.weights.version == version
            assert [report.update async for report in first] == [2, 3]
            third = start(rt, gen, learner, "third")
            assert [report.update async for report in third] == [1, 2, 3]

    main()


@virtually
async def test_a_trainer_that_is_refused_has_changed_nothing() -> None:
    async with Runtime(VirtualMachine(MACHINE)) as rt:
        learner = learner_of(0.0)
        gen = rt.start(Generator(learner.policy))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=2))
        async for _ in rt.start(Trainer(envs, learner, updates=3)):
            pass
        second = Trainer(envs, learner_of(70.0), updates=3, name="second")
        with pytest.raises(ConfigError, match="envs has a trainer already"):
            rt.start(second)
        with pytest.raises(Closed, match="second is not running"):
            await anext(second)
        with gen.weights.lease() as lease:
            assert (lease.version, lease.weights.weight.item()) == (3, 3.0)


@virtually
async def test_what_refuses_a_trainer_may_be_mended() -> None:
    async with Runtime(VirtualMachine({**MACHINE, "io": lambda n, rng: 1.0}, on_cores=("sim", "train"))) as rt:
        learner, other = learner_of(5.0), learner_of(6.0)
        other.policy.register_buffer("more", torch.zeros(2))
        gen = rt.start(Generator(learner.policy))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=2))
        with pytest.raises(PoolError, match="trainer"):
            rt.start(Trainer(envs, learner, updates=3, threads=99))
        publishing = asyncio.ensure_future(gen.publish(learner.policy))
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="somebody publishes to gen: start trainer when that is done"):
            rt.start(Trainer(envs, learner, updates=3))
        await publishing
        with pytest.raises(PolicyError, match="not of the form of the generator's"):
            rt.start(Trainer(envs, other, updates=3))
        trainer = rt.start(Trainer(envs, learner, updates=3))
        assert [report.update async for report in trainer] == [1, 2, 3]


def test_a_second_trainer_that_is_not_recorded_has_changed_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Runtime(VirtualMachine(MACHINE), record=tmp_path / "log") as rt:
            learner = Kept(VersionedPolicy(SPEC), 4)
            gen = rt.start(Generator(learner.policy))
            first, saves = start(rt, gen, learner, "first"), Checkpointer(tmp_path / "saves")
            async for _ in first:
                pass
            with pytest.raises(ConfigError, match="records a trainer already"):
                start(rt, gen, learner, "second")
            assert gen.weights.version == 3
            await saves.save(first)

    run_virtual(main())


def test_who_has_an_heir_is_not_saved(tmp_path: Path) -> None:
    """Its learner, or what its environments do, is not that of its last update any more."""
    run_virtual(inherit(tmp_path))


async def inherit(folder: Path) -> None:
    async with Runtime(VirtualMachine(MACHINE)) as rt:
        learner = Kept(VersionedPolicy(SPEC), 4)
        gen = rt.start(Generator(learner.policy))
        first, saves = start(rt, gen, learner, "first"), Checkpointer(folder)
        async for _ in first:
            pass
        await saves.save(first)
        second = start(rt, gen, learner, "second")
        await anext(second)
        with pytest.raises(ConfigError, match="second goes on with what first has done: save that one"):
            await saves.save(first)
        assert not rt.before_failing
        await saves.save(second)
        assert list(rt.before_failing) == ["second"]
        await rt.stop(second)
        assert not rt.before_failing


def test_who_was_given_up_in_an_update_keeps_its_policy() -> None:
    """Its thread goes on, and changes it."""
    release, begun = threading.Event(), threading.Event()

    class Slow(RecordingLearner):
        def update(self, batch: TrainBatch) -> Mapping[str, float]:
            begun.set()
            assert release.wait(30)
            return super().update(batch)

    async def main() -> None:
        learner = Slow(VersionedPolicy(SPEC), 4)
        async with Runtime(grace_s=0.2, tune=False) as rt:
            gen = rt.start(Generator(learner.policy))
            first = start(rt, gen, learner, "first")
            waits = asyncio.ensure_future(anext(first))
            await asyncio.to_thread(begun.wait, 30)
            await rt.stop(first)
            with pytest.raises(Closed, match="an update of first was given up"):
                await waits
            with pytest.raises(ConfigError, match="the policy of first, which did not end its last update in time"):
                start(rt, gen, learner, "second")
            release.set()

    asyncio.run(main())


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
