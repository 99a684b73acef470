"""What depends on the seed alone: not on latencies, lanes, batches or the number of environments."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ebrl.core.errors import ConfigError
from ebrl.core.records import ActionOut, Episode
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.gen.policies import GaussianPolicy
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.train.evaluate import evaluate
from ebrl.train.fake import ScriptedLearner
from ebrl.train.ppo import PPO, PPOConfig
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner, next_segments, scripted_spec, the_failure

LENGTHS = scripted_spec(length=lambda rng: 3 + int(rng.integers(10)))
CONFIG = PPOConfig(batch_size=24, minibatch_size=8, epochs=2)
GAUSSIAN = GaussianPolicy.for_spec(LENGTHS, hidden=(16,))
torch.set_num_threads(1)


def machine(latency_seed: int = 0, num_cores: int = 4) -> VirtualMachine:
    return VirtualMachine(
        {
            "sim": lambda n, rng: float(rng.lognormal(0.0, 1.0)),
            "gen": lambda n, rng: 0.05 * n * float(rng.exponential()),
            "train": lambda n, rng: float(rng.exponential()),
        },
        num_cores=num_cores,
        servers={"gen": 2},
        seed=latency_seed,
    )


def parameter_hash(module: torch.nn.Module) -> str:
    hasher = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        hasher.update(name.encode() + tensor.numpy().tobytes())
    return hasher.hexdigest()


def train(
    *, latency_seed: int = 0, sim_lanes: int | None = None, gen_lanes: int = 1, seed: int = 0, num_cores: int = 4
) -> tuple[str, float]:
    """Return the hash of all parameters and statistics after ten updates, and the virtual time they took."""
    policy = GaussianPolicy.for_spec(LENGTHS, hidden=(8,), seed=seed)
    learner = PPO(policy, CONFIG)

    async def main() -> float:
        async with Runtime(machine(latency_seed, num_cores), seed=seed, deterministic=True) as rt:
            gen = rt.start(Generator(policy, lanes=gen_lanes))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=6, lanes=sim_lanes))
            async for report in rt.start(Trainer(envs, learner, updates=10, max_lag=0)):
                assert report.lag_max == 0
                assert report.dropped == {}
        return report.elapsed_s

    elapsed_s = run_virtual(main())
    return parameter_hash(policy), elapsed_s


def test_synchronous_training_depends_on_the_seed_alone() -> None:
    results = [
        train(latency_seed=latency_seed, sim_lanes=sim_lanes, gen_lanes=gen_lanes)
        for latency_seed in (0, 1, 2)
        for sim_lanes in (2, None)
        for gen_lanes in (1, 2)
    ]
    assert len({digest for digest, _ in results}) == 1
    assert len({seconds for _, seconds in results}) == len(results), "they differed in everything else"
    assert train(seed=1)[0] != results[0][0]


@pytest.mark.parametrize("segment_length", [None, 1, 3])
def test_a_program_that_drops_decisions_is_deterministic_too(segment_length: int | None) -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            out = await env.act(obs)
            chance = env.rng.random()
            if chance < 0.1:
                await env.act(obs)  # leaves the first one unexecuted
            elif chance < 0.2:
                obs = (await env.intervene(-out.action)).obs
                continue
            obs = (await env.step(out.action)).obs

    async def digest(latency_seed: int) -> str:
        learner = RecordingLearner(ScriptedPolicy(LENGTHS), 12)
        async with Runtime(machine(latency_seed), deterministic=True) as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=4, program=program, segment_length=segment_length))
            async for report in rt.start(Trainer(envs, learner, updates=20, max_lag=0)):
                assert set(report.dropped) <= {"unexecuted", "intervention"}
        assert set(report.dropped) == {"unexecuted", "intervention"}
        consumed = ScriptedLearner(12)
        for batch in learner.batches:
            consumed.update(batch)
        return consumed.hexdigest

    assert len({run_virtual(digest(latency_seed)) for latency_seed in range(4)}) == 1


def test_every_environment_gives_an_equal_share_of_every_version() -> None:
    async def main() -> None:
        learner = RecordingLearner(ScriptedPolicy(LENGTHS), 12)
        async with Runtime(machine(), deterministic=True) as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=4))
            async for _ in rt.start(Trainer(envs, learner, updates=10, max_lag=0)):
                pass
        for version, batch in enumerate(learner.batches):
            places = [(d.env, d.episode, d.index) for d in batch.decisions]
            assert places == sorted(places)
            assert np.bincount([d.env for d in batch.decisions]).tolist() == [3] * 4
            assert {d.version for d in batch.decisions} == {version}

    run_virtual(main())


def test_a_batch_that_cannot_be_shared_equally_is_refused() -> None:
    async def main() -> None:
        policy = ScriptedPolicy(LENGTHS)
        async with Runtime(machine(), deterministic=True) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=5))
            rt.start(Trainer(envs, RecordingLearner(policy, 12), updates=1, max_lag=0))

    error = the_failure(main())
    assert isinstance(error, ConfigError)
    assert "share a batch equally: batch_size 12 is no multiple of 5 environments" in str(error)


async def answers(count: int, *, gen_lanes: int = 1, latency_seed: int = 0) -> list[ActionOut]:
    """Return what the policy told environment 0."""
    outs: list[ActionOut] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            out = await env.act(obs)
            if env.index == 0:
                outs.append(out)
            obs = (await env.step(out.action)).obs

    async with Runtime(machine(latency_seed), deterministic=True) as rt:
        gen = rt.start(Generator(GAUSSIAN, lanes=gen_lanes))
        envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=count, program=program))
        envs.open_training(10_000 * count, max_lag=0)
        while len(outs) < 40:
            await next_segments(envs)
    return outs[:40]


def test_the_noise_of_an_environment_does_not_depend_on_who_else_is_there() -> None:
    first, *others = [
        [(out.action.tobytes(), out.log_prob.tobytes(), out.value) for out in run_virtual(answers(count, **options))]
        for count, options in ((1, {}), (4, {}), (40, {}), (4, {"gen_lanes": 2, "latency_seed": 1}))
    ]
    assert all(other == first for other in others)
    assert len({action for action, _, _ in first}) == 40


async def evaluated(
    seeds: Sequence[int], count: int, *, sim_lanes: int | None = None, gen_lanes: int = 1, latency_seed: int = 0
) -> tuple[Episode, ...]:
    async with Runtime(machine(latency_seed), deterministic=True) as rt:
        gen = rt.start(Generator(GAUSSIAN, deterministic=True, lanes=gen_lanes))
        envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=count, lanes=sim_lanes))
        return (await evaluate(envs, seeds)).episodes


def test_an_evaluation_depends_on_its_seeds_alone() -> None:
    seeds = [5, 3, 5, 8, 1, 3, 0, 2, 9, 4]
    settings: list[dict[str, Any]] = [
        {"count": 1},
        {"count": 4},
        {"count": 10, "latency_seed": 1},
        {"count": 32, "gen_lanes": 2},
        {"count": 4, "sim_lanes": 1},
        {"count": 4, "sim_lanes": 3, "gen_lanes": 2, "latency_seed": 2},
    ]
    rows = []
    for options in settings:
        episodes = run_virtual(evaluated(seeds, **options))
        assert [episode.seed for episode in episodes] == seeds
        assert [episode.episode for episode in episodes] == list(range(10))
        rows.append([(e.total_reward, e.num_steps, e.num_decisions, e.success) for e in episodes])
    assert all(row == rows[0] for row in rows)
    assert rows[0][0] == rows[0][2]
    assert rows[0][0] != rows[0][1]


def test_every_episode_that_starts_counts_however_long_it_takes() -> None:
    """Successes are quick here: counting the first that finish would report more of them."""
    quick = scripted_spec(length=lambda rng: 3 if rng.random() < 0.5 else 60, success_above=-1e9)

    async def main() -> tuple[Episode, ...]:
        policy = ScriptedPolicy(quick)
        async with Runtime(machine()) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(quick, actor=gen, count=8))
            return (await evaluate(envs, range(40))).episodes

    episodes = run_virtual(main())
    assert len(episodes) == 40
    alone = [3 if _is_short(seed) else 60 for seed in range(40)]
    assert [episode.num_steps for episode in episodes] == alone


def _is_short(seed: int) -> bool:
    rng = np.random.default_rng(seed)
    rng.uniform(-0.1, 0.1)
    rng.uniform(-1.0, 1.0)
    return rng.random() < 0.5


def test_an_evaluation_that_was_cancelled_leaves_nothing_to_the_next() -> None:
    async def main() -> None:
        policy = ScriptedPolicy(LENGTHS)
        async with Runtime(VirtualMachine({"sim": lambda n, rng: 1.0})) as rt:
            gen = rt.start(Generator(policy, deterministic=True))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=4))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5.5):
                    await evaluate(envs, [100, 101, 102, 103, 104, 105])
            episodes = (await evaluate(envs, [7, 8, 9, 7])).episodes
        assert [episode.seed for episode in episodes] == [7, 8, 9, 7]
        assert episodes[0].total_reward == episodes[3].total_reward

    run_virtual(main())


def test_two_evaluations_at_once_or_one_of_a_group_in_training_are_refused() -> None:
    async def main() -> None:
        policy = ScriptedPolicy(LENGTHS)
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=2))
            first = rt.spawn(evaluate(envs, [1, 2]), "first")
            await asyncio.sleep(0)
            with pytest.raises(ConfigError, match="an evaluation is running"):
                await evaluate(envs, [3])
            assert len((await first).episodes) == 2
            with pytest.raises(ConfigError, match="has run an evaluation"):
                envs.open_training(4, max_lag=0)
            others = rt.start(EnvGroup(LENGTHS, actor=gen, count=2))
            others.open_training(4, max_lag=0)
            with pytest.raises(ConfigError, match="is used for training"):
                await evaluate(others, [3])
            with pytest.raises(ConfigError, match="has a trainer already"):
                others.open_training(4, max_lag=0)

    run_virtual(main())
