"""What asynchrony does to a sample if nobody takes care, in numbers, and that EBRL does not do it.

The runs are of the real library in virtual time. What speed does to the shares of tasks is in `tests/test_sampling.py`,
and what groups would lose by those who end first in `tests/test_groups.py`.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ebrl.core.records import Array, Episode
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine, spend
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.train.evaluate import EvalReport, evaluate
from ebrl.train.sampling import Sampling
from tests.helpers import scripted_spec, training

SUCCESS_S, FAILURE_S = 10.0, 50.0


class Coin(gymnasium.Env[Array, Array]):
    """One step, that succeeds for half of the seeds: in 10 s, while a failure takes 50 s."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    success = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self.success = succeeds(seed or 0)
        return np.zeros(3, np.float32), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        spend(SUCCESS_S if self.success else FAILURE_S)
        return np.zeros(3, np.float32), float(self.success), True, False, {"success": self.success}


def succeeds(seed: int) -> bool:
    return seed % 2 == 0


COIN = scripted_spec(make=Coin)
NUM_ENVS = 640


@pytest.fixture(scope="module")
def finished() -> list[Episode]:
    """Episodes of very many environments in the order in which they finish, eight minutes long."""

    async def main() -> list[Episode]:
        async with Runtime(VirtualMachine({}, num_cores=NUM_ENVS), tune=False) as rt:
            gen = rt.start(Generator(ScriptedPolicy(COIN)))
            envs = rt.start(EnvGroup(COIN, actor=gen, count=NUM_ENVS, lanes=NUM_ENVS))
            envs.open_training(100 * NUM_ENVS, max_lag=0)
            await asyncio.sleep(480.5)
            return envs.take_episodes()

    return run_virtual(main())


def first_finished(episodes: Sequence[Episode], num_envs: int, num: int) -> float:
    """Return the success rate of the first `num` episodes of so many environments, on average over sets of them."""
    first: dict[int, list[bool]] = defaultdict(list)
    for episode in episodes:
        found = first[episode.env // num_envs]
        if len(found) < num:
            found.append(bool(episode.success))
    assert all(len(found) == num for found in first.values())
    return float(np.mean(list(first.values())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_envs", "num", "expected", "within"),
    [
        (8, 8, 0.791, 0.04),
        (8, 16, 0.623, 0.04),
        (8, 80, 0.529, 0.015),
        (64, 64, 0.906, 0.04),
        (64, 128, 0.625, 0.04),
        (64, 640, 0.533, 0.015),
    ],
)
def test_those_who_finish_first_are_no_sample(
    finished: list[Episode], num_envs: int, num: int, expected: float, within: float
) -> None:
    assert first_finished(finished, num_envs, num) == pytest.approx(expected, abs=within)


def all_started(episodes: Sequence[Episode], num_envs: int, num: int) -> list[bool]:
    """Return the successes of `num` episodes each; an environment stops when the rest can do without it."""
    found: dict[int, list[bool]] = defaultdict(list)
    stopped: dict[int, set[int]] = defaultdict(set)
    for episode in episodes:
        block = episode.env // num_envs
        if episode.env not in stopped[block]:
            found[block].append(bool(episode.success))
            if num - len(found[block]) < num_envs - len(stopped[block]):
                stopped[block].add(episode.env)
    assert all(len(each) == num for each in found.values())
    return [success for each in found.values() for success in each]


@pytest.mark.slow
@pytest.mark.parametrize(("num_envs", "num"), [(8, 8), (8, 16), (8, 80), (64, 64), (64, 128), (64, 640)])
def test_they_are_one_where_whoever_has_started_counts(finished: list[Episode], num_envs: int, num: int) -> None:
    """As tianshou's collector does for a number of episodes."""
    successes = all_started(finished, num_envs, num)
    assert np.mean(successes) == pytest.approx(0.5, abs=1.2 / np.sqrt(len(successes)))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["arrival", "quota"])
@pytest.mark.parametrize(("num_envs", "num"), [(8, 8), (8, 16), (8, 80), (64, 64), (64, 128), (64, 640)])
def test_a_batch_is_of_those_who_started(sampling: Sampling, num_envs: int, num: int) -> None:
    """An update has as many episodes as may start, by anybody or by each, and waits for all of them: none is chosen."""
    updates = max(4, 3200 // num)

    async def main() -> list[bool]:
        machine = VirtualMachine({}, num_cores=num_envs)
        options: dict[str, Any] = {"count": num_envs, "batch_size": num, "updates": updates, "lanes": num_envs}
        async with training(COIN, machine, max_lag=0, sampling=sampling, **options) as stage:
            reports = [report async for report in stage.trainer]
            ledger = stage.envs.admission.ledger()
            assert (ledger.trained, ledger.dropped) == (updates * num, {})
        successes = {(e.env, e.episode): bool(e.success) for report in reports for e in report.episodes}
        assert len(successes) == updates * num, "whoever started is in the batch, and nobody else has ended"
        return [successes[decision.env, decision.episode] for decision in stage.learner.decisions]

    trained = run_virtual(main())
    assert np.mean(trained) == pytest.approx(0.5, abs=0.02)
    assert np.mean(trained[:num]) == pytest.approx(0.5, abs=1.5 / np.sqrt(num)), "the first batch, too"


@pytest.mark.parametrize("num_envs", [8, 64])
def test_an_evaluation_counts_those_who_started(num_envs: int) -> None:
    async def main() -> EvalReport:
        async with Runtime(VirtualMachine({}, num_cores=num_envs), tune=False) as rt:
            gen = rt.start(Generator(ScriptedPolicy(COIN)))
            return await evaluate(rt.start(EnvGroup(COIN, actor=gen, count=num_envs)), seeds)

    seeds = range(400)
    report = run_virtual(main())
    assert [episode.success for episode in report.episodes] == [succeeds(seed) for seed in seeds]
    assert report.success_rate == 0.5


# Age: whole episodes that are too old are long ones.


async def timed_rollout(env: EnvContext, began_s: dict[tuple[int, int], float]) -> None:
    obs, _ = await env.reset()
    began_s[env.index, env.episode] = asyncio.get_running_loop().time()
    while not env.done:
        obs = (await env.act_step(obs)).obs


def test_long_episodes_are_trained_that_a_limit_on_age_would_drop() -> None:
    """An update every 20 s. Decisions are trained by their own age, as soon as a batch needs them."""

    ages: list[tuple[int, float]] = []  # length of an episode, and age of its beginning when its end is trained

    async def main() -> float:
        began_s: dict[tuple[int, int], float] = {}
        lengths: dict[tuple[int, int], int] = {}
        program = functools.partial(timed_rollout, began_s=began_s)
        spec = scripted_spec(length=lambda rng: 10 if rng.random() < 0.5 else 50)
        machine = VirtualMachine({"sim": lambda n, rng: 1.0}, num_cores=64)
        async with training(spec, machine, count=16, batch_size=304, updates=30, program=program) as stage:
            async for report in stage.trainer:
                lengths |= {(episode.env, episode.episode): episode.num_steps for episode in report.episodes}
                for segment in stage.learner.batches[-1].segments:
                    key = segment.env, segment.decisions[-1].episode
                    if segment.reason == "end":
                        ages.append((lengths[key], report.elapsed_s - began_s[key]))
            assert stage.envs.admission.ledger().dropped == {}
        trained = [lengths.get((d.env, d.episode), 0) for d in stage.learner.decisions]
        return trained.count(50) / (trained.count(10) + trained.count(50))

    def kept(length: int, limit_s: float) -> float:
        return float(np.mean([age <= limit_s for found, age in ages if found == length]))

    assert run_virtual(main()) == pytest.approx(50 / 60, abs=0.03), "what was started"
    assert [kept(10, 60.0), kept(10, 30.0), kept(50, 30.0)] == pytest.approx([1.0, 1.0, 0.0], abs=0.03)
    assert kept(50, 60.0) == pytest.approx(0.5, abs=0.1)
