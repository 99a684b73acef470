"""What happens after something went wrong and the caller goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from ebrl import BatchService, EnvContext, EnvGroup, Generator, PolicyOut, Runtime, Trainer, VirtualMachine
from ebrl.core.errors import Closed, ConfigError, PolicyError
from ebrl.core.records import TrainBatch
from ebrl.gen.fake import ScriptedPolicy
from tests.helpers import RecordingLearner, VersionedPolicy, assert_sound, leaves, scripted_spec, training, virtually

SPEC = scripted_spec(length=5)
OF_OTHERS = [SystemExit(0), asyncio.CancelledError(), KeyboardInterrupt()]
MACHINE = {"sim": lambda n, rng: 0.01, "train": lambda n, rng: 3.0}


@virtually
async def test_who_is_cancelled_in_an_update_gets_its_report_the_next_time() -> None:
    async with training(SPEC, VirtualMachine(MACHINE), updates=2, count=2, batch_size=4) as stage:
        for update in (1, 2):
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await anext(stage.trainer)
            report = await anext(stage.trainer)
            assert (report.update, stage.envs.actor.weights.version, len(stage.learner.batches)) == (update,) * 3
            assert report.update_s == pytest.approx(3.0)
            assert "lost" not in report.dropped
            assert stage.envs.admission.ledger().trained == 4 * update
            assert_sound(stage.envs.admission.ledger())
        with pytest.raises(StopAsyncIteration):
            await anext(stage.trainer)


@virtually
async def test_an_update_nobody_waits_for_ends_with_the_trainer_and_is_booked() -> None:
    machine = VirtualMachine({**MACHINE, "train": lambda n, rng: 1.5})
    async with training(SPEC, machine, updates=2, count=2, batch_size=4) as stage:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await anext(stage.trainer)
    assert stage.envs.actor.weights.version == 1
    assert stage.envs.admission.ledger().trained == 4
    assert (await anext(stage.trainer)).update == 1, "whoever comes late still gets it"
    with pytest.raises(Closed):
        await anext(stage.trainer)


@virtually
async def test_who_has_no_time_takes_a_report_that_is_there() -> None:
    async with training(SPEC, VirtualMachine(MACHINE), updates=2, count=2, batch_size=4) as stage:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(stage.trainer)
            await asyncio.sleep(10.0)
        async with asyncio.timeout(0):
            assert (await anext(stage.trainer)).update == 1


@virtually
async def test_a_checkpoint_has_the_episodes_of_a_report_that_nobody_took() -> None:
    async with training(SPEC, VirtualMachine(MACHINE), updates=2, count=2, batch_size=20) as stage:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await anext(stage.trainer)
        await stage.trainer.between_updates()
        with pytest.raises(ConfigError, match="state_dict"):
            await stage.trainer.snapshot()
        saved = stage.envs.save()
        assert len(saved.episodes) >= 4
        assert list((await anext(stage.trainer)).episodes)[: len(saved.episodes)] == list(saved.episodes)


@virtually
async def test_who_waits_for_a_trainer_that_is_stopped_is_told() -> None:
    machine = VirtualMachine({"sim": lambda n, rng: 1.0})
    async with training(SPEC, machine, updates=2, count=2, batch_size=400) as stage:
        waits = asyncio.ensure_future(anext(stage.trainer))
        await asyncio.sleep(5.0)
        await stage.runtime.stop(stage.trainer)
        with pytest.raises(Closed, match="their trainer have ended: no further batch will come"):
            await waits
        assert_sound(stage.envs.admission.ledger())


@virtually
async def test_an_update_that_is_given_up_is_booked_as_lost() -> None:
    async with training(SPEC, VirtualMachine(MACHINE), updates=2, count=2, batch_size=4) as stage:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await anext(stage.trainer)
    ledger = stage.envs.admission.ledger()
    assert_sound(ledger)
    assert (ledger.trained, stage.envs.actor.weights.version) == (0, 0)
    assert ledger.dropped == {"lost": 4}, "its batch; of what came back with it nobody begins anything"


class Useless(RecordingLearner):
    """Fails in every update."""

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        raise ValueError("of no use")


@asynccontextmanager
async def failing() -> AsyncIterator[tuple[Runtime, Trainer]]:
    """Start a trainer whose updates fail after 1.2 s."""
    policy = ScriptedPolicy(SPEC)
    async with Runtime(VirtualMachine({**MACHINE, "train": lambda n, rng: 1.2})) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=2))
        yield rt, rt.start(Trainer(envs, Useless(policy, 4), updates=3))


def test_an_update_that_fails_when_nobody_waits_is_told(caplog: pytest.LogCaptureFixture) -> None:
    @virtually
    async def main() -> None:
        async with failing() as (_, trainer):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await anext(trainer)

    main()
    assert "an update of trainer failed, and nobody waits for it any more" in caplog.text
    assert "of no use" in caplog.text


def test_an_update_that_fails_while_its_trainer_is_stopped_is_told_to_who_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @virtually
    async def main() -> None:
        async with failing() as (rt, trainer):
            waits = asyncio.ensure_future(anext(trainer))
            await asyncio.sleep(0.5)
            await rt.stop(trainer)
            with pytest.raises(ValueError, match="of no use"):
                await waits

    main()
    assert not caplog.records


@virtually
async def test_an_update_that_raises_is_booked_as_lost_and_the_next_goes_on() -> None:
    class Fails(RecordingLearner):
        def update(self, batch: TrainBatch) -> Mapping[str, float]:
            if not self.batches:
                self.batches.append(batch)
                raise ValueError("once")
            return super().update(batch)

    policy = ScriptedPolicy(SPEC)
    async with Runtime(VirtualMachine(MACHINE)) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=2))
        trainer = rt.start(Trainer(envs, Fails(policy, 4), updates=3))
        with pytest.raises(ValueError, match="once") as caught:
            await anext(trainer)
        assert caught.value.__notes__ == ["in update 1 of trainer"]
        assert (await anext(trainer)).dropped["lost"] == 4
        assert_sound(envs.admission.ledger())


@virtually
async def test_a_trainer_raises_closed_after_its_runtime_and_after_its_environments() -> None:
    async with training(SPEC, VirtualMachine(MACHINE), updates=9, count=2, batch_size=4) as stage:
        await anext(stage.trainer)
        await stage.runtime.stop(stage.envs)
        with pytest.raises(Closed, match="environments or their trainer have ended"):
            while True:
                await anext(stage.trainer)
    with pytest.raises(Closed, match="trainer is not running"):
        await anext(stage.trainer)


class TooFew(ScriptedPolicy):
    """Answers the first request of a batch only."""

    def act(self, batch: Any, noise: Any, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        return PolicyOut(out.action[:1], out.log_prob[:1], out.value[:1], {})


class NoValue(ScriptedPolicy):
    """Its critic has diverged."""

    def act(self, batch: Any, noise: Any, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        return PolicyOut(out.action, out.log_prob, out.value * float("nan"), {})


@pytest.mark.parametrize(
    ("policy", "message"), [(TooFew(SPEC), "B, H = (3, "), (NoValue(SPEC), "a value that is not finite")]
)
def test_a_policy_whose_rows_are_of_no_use_ends_the_run(policy: ScriptedPolicy, message: str) -> None:
    @virtually
    async def main() -> None:
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=3))
            async for _ in rt.start(Trainer(envs, RecordingLearner(policy, 6), updates=3)):
                pass

    with pytest.raises(ExceptionGroup) as caught:
        main()
    assert all(isinstance(error, PolicyError) and message in str(error) for error in leaves(caught.value))


@pytest.mark.parametrize("error", [*OF_OTHERS, StopIteration(), StopAsyncIteration()])
def test_what_would_end_the_loop_or_a_task_is_an_error_of_the_call(error: BaseException) -> None:
    def breaks(items: Any) -> Any:
        raise error

    @virtually
    async def main() -> None:
        async with Runtime(VirtualMachine({})) as rt:
            service: BatchService[int, int] = rt.start(BatchService(breaks))
            with pytest.raises(PolicyError, match=type(error).__name__) as caught:
                await service(1)
            told = caught.value.__cause__
            assert told is not None
            assert told.__cause__ is error, "with the line of the caller's that raised it"

    main()


@pytest.mark.parametrize("error", [*OF_OTHERS, StopIteration(), StopAsyncIteration()])
def test_a_learner_ends_no_loop_by_what_it_raises(error: BaseException) -> None:
    class Raises(RecordingLearner):
        def update(self, batch: TrainBatch) -> Mapping[str, float]:
            raise error

    @virtually
    async def main() -> None:
        policy = ScriptedPolicy(SPEC)
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=2))
            with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
                async for _ in rt.start(Trainer(envs, Raises(policy, 4), updates=3)):
                    pass
            assert caught.value.__cause__ is error

    main()


@virtually
async def test_a_program_that_waits_at_its_end_does_not_keep_the_runtime_open() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        try:
            while not env.done:
                obs = (await env.act_step(obs)).obs
        finally:
            await asyncio.get_running_loop().create_future()  # an answer that never comes

    async with Runtime(VirtualMachine({"sim": lambda n, rng: 0.1}), grace_s=1.0) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC)))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=2, program=program))
        envs.open_training(100, max_lag=0)
        await asyncio.sleep(0.25)
        ended_s = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - ended_s < 2.0


@virtually
async def test_two_groups_of_one_name_have_streams_of_their_own() -> None:
    drawn: list[Any] = []

    async def program(env: EnvContext) -> None:
        await env.reset()
        drawn.append(env.rng.random())
        await asyncio.get_running_loop().create_future()

    async with Runtime(VirtualMachine({})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC)))
        for _ in range(2):
            rt.start(EnvGroup(SPEC, actor=gen, count=1, program=program)).open_training(10, max_lag=0)
        await asyncio.sleep(1.0)
    assert len(np.unique(drawn)) == 2


@virtually
async def test_a_policy_that_was_changed_after_its_actor_was_made_acts_as_it_is() -> None:
    """Weights that are loaded a line too late: without this the first batch would be that of others, at lag 0."""
    policy = VersionedPolicy(SPEC)
    async with Runtime(VirtualMachine({})) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(SPEC, actor=gen, count=2))
        with torch.no_grad():
            policy.weight.fill_(7.0)
        learner = RecordingLearner(policy, 4)
        trainer = rt.start(Trainer(envs, learner, updates=1))
        assert gen.weights.version == 0
        with gen.weights.lease() as lease:
            assert lease.weights.weight.item() == 7
        async for report in trainer:
            assert report.lag_counts == (4,)
