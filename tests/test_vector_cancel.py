"""Programs of batched simulators that are cancelled anywhere: the ledger stays whole, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebrl.core.records import GroupRule
from ebrl.core.rng import NoiseStream, name_key
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.vector import VectorGroup
from ebrl.sim.vector_context import VectorContext
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner
from tests.test_memory import Counter as CountingPolicy
from tests.test_memory import assert_remembered
from tests.vectors import VectorStage, batched_spec, lengths, vector_training

LAWS = {"sim": lambda n, rng: 0.02, "gen": lambda n, rng: 0.03, "train": lambda n, rng: 0.05}


def impatient(delays_s: Iterator[float | None]) -> Any:
    """Return a program that gives up what takes longer than the next delay, as long as there are any."""

    async def program(env: VectorContext) -> None:
        obs: Any = None
        while True:
            try:
                async with asyncio.timeout(next(delays_s, None)):
                    if env.needs_reset.any() or obs is None:
                        obs, _ = await env.reset(env.needs_reset if obs is not None else None)
                    out = await env.act(obs)
                    obs = (await env.step(out.action)).obs
            except TimeoutError:
                pass

    return program


async def train(delays_s: Iterator[float | None], **options: Any) -> dict[str, int]:
    spec = batched_spec(3, length=lengths(2, 7))
    async with vector_training(spec, VirtualMachine(LAWS), program=impatient(delays_s), updates=5, **options) as s:
        for decision in await s.run():  # nobody was given an answer to what was asked before
            noise = NoiseStream(0, name_key("envs"), decision.env, 0).row(decision.index, 2)
            assert np.array_equal(decision.out.action[0], (noise + np.asarray(decision.obs)[0]).clip(-1, 1))
        ledger = s.envs.admission.ledger()
    assert ledger.trained == 5 * options["batch_size"]
    return dict(ledger.dropped)


@settings(max_examples=40)
@given(
    delays=st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.07]), max_size=20),
    batch_size=st.integers(1, 20),
    max_lag=st.integers(0, 2),
)
def test_whatever_is_given_up_the_run_goes_on(delays: list[float], batch_size: int, max_lag: int) -> None:
    run_virtual(train(iter(delays), batch_size=batch_size, max_lag=max_lag, num_groups=2))


@pytest.mark.parametrize(
    ("delay_s", "reasons"),
    [(0.0, set()), (0.01, set()), (0.04, {"cancelled"}), (0.06, {"lost", "cancelled"})],
)
def test_what_was_started_is_given_back_or_lost(delay_s: float, reasons: set[str]) -> None:
    dropped = run_virtual(train(iter([delay_s] * 2), batch_size=12, max_lag=2, num_groups=1))
    assert dropped.keys() == reasons
    assert all(num % 3 == 0 for num in dropped.values())


@settings(max_examples=15)
@given(delays=st.lists(st.sampled_from([0.0, 0.02, 0.04, 0.05, 0.07]), max_size=12), max_lag=st.integers(0, 2))
@example(delays=[1.0, 1.0, 0.04] * 4, max_lag=2)
def test_groups_with_a_lost_member_are_given_up_whole(delays: list[float], max_lag: int) -> None:
    async def main() -> None:
        spec = batched_spec(4, length=lengths(2, 7))
        program = impatient(iter(delays))
        machine = VirtualMachine(LAWS)
        options: dict[str, Any] = {"rule": GroupRule(), "group_size": 2, "num_groups": 1}
        async with vector_training(spec, machine, program=program, batch_size=30, max_lag=max_lag, **options) as s:
            await s.run()
        reasons = {segment.reason for batch in s.learner.batches for segment in batch.segments}
        assert "lost" not in reasons

    run_virtual(main())


def run_program(program: Any, seconds: float = 2.0, **options: Any) -> VectorStage:
    async def main() -> VectorStage:
        spec = batched_spec(2, length=50)
        async with vector_training(spec, VirtualMachine(LAWS), program=program, batch_size=100, **options) as s:
            await asyncio.sleep(seconds)
            s.rows = s.gen.statistics()["rows"]
            s.open = [recorder.open_segment for recorder in s.envs.feed.recorders]
            assert s.envs.admission.ledger().balanced
            return s

    return run_virtual(main())


def test_who_gives_up_waiting_for_actions_costs_nobody_a_batch() -> None:
    async def program(env: VectorContext) -> None:
        obs, _ = await env.reset()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01 if env.index else None):  # behind the batch of the other one
                await env.act(obs)
        await asyncio.Event().wait()

    assert run_program(program).rows == 2


def test_a_reset_that_is_given_up_as_it_ends_leaves_the_other_slots_running() -> None:
    found: list[list[bool]] = []

    async def program(env: VectorContext) -> None:
        obs, _ = await env.reset()
        await env.step((await env.act(obs)).action)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02):  # what it takes
                await env.reset([False, True])
        found.append(env.needs_reset.tolist())
        await asyncio.Event().wait()

    run_program(program, num_groups=1)
    assert found == [[False, True]]


def test_what_follows_an_action_of_nobody_is_another_segment() -> None:
    async def program(env: VectorContext) -> None:
        obs, _ = await env.reset()
        for _ in range(2):
            out = await env.act(obs)
            obs = (await env.step(out.action)).obs
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await env.act(obs)
        obs = (await env.intervene(out.action)).obs
        obs = (await env.step((await env.act(obs)).action)).obs
        await env.act(obs)
        await asyncio.Event().wait()

    stage = run_program(program, num_groups=1)
    assert [[d.index for d in segment.decisions] for segment in stage.open if segment is not None] == [[3], [3]]
    assert [[d.index for d in segment.decisions] for segment in stage.envs.take_segments()] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.02, 0.04])
def test_an_evaluation_runs_every_seed_all_the_same(delay_s: float) -> None:
    async def main() -> list[int]:
        spec = batched_spec(3, length=4)
        async with Runtime(VirtualMachine(LAWS)) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            envs = rt.start(VectorGroup(spec, actor=gen, num_groups=1, program=impatient(iter([delay_s] * 3))))
            return [episode.seed for episode in await envs.run_episodes(range(10, 17))]

    assert run_virtual(main()) == list(range(10, 17))


def test_what_was_remembered_is_not_forgotten_with_an_answer() -> None:
    async def main() -> None:
        spec = batched_spec(3, length=9)
        learner = RecordingLearner(CountingPolicy(spec), 12)
        async with Runtime(VirtualMachine(LAWS)) as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(VectorGroup(spec, actor=gen, num_groups=1, program=impatient(cycle([None, None, 0.01]))))
            async for _ in rt.start(Trainer(envs, learner, updates=4)):
                pass
            assert envs.admission.ledger().dropped["cancelled"] >= 6
        assert_remembered(learner.decisions)

    run_virtual(main())
