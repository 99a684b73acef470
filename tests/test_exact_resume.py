"""A deterministic run that ends anywhere and goes on is, bit by bit, the run that did not end."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebrl.core.errors import SimulatorError
from ebrl.core.records import Array, EnvSpec, TrainBatch, UpdateReport
from ebrl.core.runtime import Runtime
from ebrl.core.saved import SavedExperience
from ebrl.core.virtual import run_virtual
from ebrl.gen.generator import Generator
from ebrl.gen.policies import TorchPolicy, default_policy
from ebrl.sim.context import EnvContext
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.group import EnvGroup, EnvProgram
from ebrl.sim.programs import rollout
from ebrl.train.checkpoint import Checkpoint, Checkpointer
from ebrl.train.options import Proximal
from ebrl.train.ppo import PPO, PPOConfig
from ebrl.train.trainer import Trainer
from tests.helpers import assert_sound, leaves, scripted_spec
from tests.test_determinism import LENGTHS, machine, parameter_hash
from tests.test_resume import going, saved_after
from tests.test_resume import machine as scattered


class Watched:
    """A learner that hashes what it consumes, batch by batch."""

    def __init__(self, learner: PPO) -> None:
        self.learner = learner
        self.batch_size = learner.batch_size
        self.policy = learner.policy
        self.state_dict, self.load_state_dict = learner.state_dict, learner.load_state_dict
        self.consumed: list[str] = []

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        hasher = hashlib.sha256()
        for d in batch.decisions:
            hasher.update(f"{d.env},{d.episode},{d.index},{d.version},{d.rewards};".encode())
            hasher.update(d.out.action.tobytes() + d.out.log_prob.tobytes())
        self.consumed.append(hasher.hexdigest())
        return self.learner.update(batch)


@dataclass
class Part:
    """What one process did, and what it saved after which update."""

    consumed: list[str] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    dropped: list[Mapping[str, int]] = field(default_factory=list)
    episodes: list[Any] = field(default_factory=list)
    weights: str = ""
    saved: dict[int, list[Checkpoint]] = field(default_factory=dict)

    def take(self, report: UpdateReport) -> None:
        self.metrics.append(report.metrics)
        self.steps.append(report.env_steps)
        self.dropped.append(report.dropped)
        self.episodes.append(
            [(e.env, e.episode, e.seed, e.total_reward, e.num_steps, e.num_decisions) for e in report.episodes]
        )


async def mixed(env: EnvContext) -> None:
    """Draws, asks another policy and intervenes between an answer and a step, and calls its simulator at the end."""
    obs, _ = await env.reset()
    while not env.done:
        out = await env.act(obs)
        other = await env.act(obs, OTHER[0])
        chance = env.rng.random() * (1.0 if other.action[0, 0] > -0.5 else 0.5)
        step = await (env.intervene(-out.action) if chance < 0.2 else env.step(out.action))
        obs = step.obs
        if step.truncated or step.terminated:
            await env.call(nothing)


async def draws_and_asks_first(env: EnvContext) -> None:
    env.rng.random()
    obs, _ = await env.reset()
    while not env.done:
        other = await env.act(obs, OTHER[0])
        replaced = env.rng.random() < 0.3
        obs = (await (env.intervene(other.action) if replaced else env.act_step(obs))).obs


async def draws_and_asks_last(env: EnvContext) -> None:
    """A noisy reward, and one from a policy."""
    obs, _ = await env.reset()
    while not env.done:
        obs = (await env.act_step(obs)).obs
        env.reward(env.rng.random() + float((await env.act(obs, OTHER[0])).action[0, 0]))


async def in_any_order(env: EnvContext) -> None:
    """Everything that comes before a step, in random order and number."""
    obs, _ = await env.reset()
    while not env.done:
        action: Array = np.zeros((1, 2), np.float32)
        for _ in range(env.rng.integers(3)):
            action = action + 0.5 * (await env.act(obs, OTHER[env.rng.integers(2)])).action
        what = env.rng.choice(["act_step", "step", "intervene", "twice", "chunks"])
        if what == "act_step":
            obs = (await env.act_step(obs)).obs
        elif what == "intervene":
            obs = (await env.intervene(action + env.rng.uniform(-1, 1, 2))).obs
        else:
            out = await env.act(obs)
            if what == "twice":
                out = await env.act(obs)
            obs = (await env.step(out.action + action * env.rng.random())).obs
            if what == "chunks" and not env.done:
                obs = (await env.step(out.action)).obs
    if env.rng.random() < 0.5:
        await env.act(obs, OTHER[0])


OTHER: list[Generator] = []  # of the running test
TASKS = [replace(LENGTHS, task="a"), replace(LENGTHS, task="b")]


@dataclass(frozen=True)
class Case:
    """What runs."""

    program: EnvProgram = rollout
    specs: Sequence[EnvSpec] = (LENGTHS,)
    segment_length: int | None = None
    memory_size: int = 0
    proximal: Proximal = "start"

    def policy(self, seed: int = 0) -> TorchPolicy:
        return default_policy(LENGTHS, hidden=(8,), memory_size=self.memory_size, seed=seed)

    def learner(self, policy: TorchPolicy) -> PPO:
        return PPO(policy, PPOConfig(batch_size=24, minibatch_size=8, epochs=1, proximal=self.proximal))


CASES = {
    "plain": Case(),
    "several tasks": Case(specs=TASKS),
    "mixed": Case(program=mixed, segment_length=3),
    "draws and asks first": Case(program=draws_and_asks_first, memory_size=3),
    "draws and asks last": Case(program=draws_and_asks_last, memory_size=3),
    "in any order": Case(program=in_any_order, segment_length=3, memory_size=3),
    "recurrent": Case(program=mixed, memory_size=3, proximal="ewma"),
}


def nothing(sim: Any) -> int:
    return 0


def deterministic(
    updates: int,
    resume: Checkpoint | None = None,
    *,
    case: Case = CASES["plain"],
    seed: int = 0,
    pauses: Mapping[int, Sequence[float]] | None = None,
    spares: int = 0,
) -> Part:
    """Run to `updates`, with a snapshot after each pause that an update is followed by."""
    policy = case.policy()
    learner = Watched(case.learner(policy))
    part = Part(learner.consumed)

    async def main() -> None:
        async with Runtime(machine(seed), seed=3, deterministic=True) as rt:
            gen = rt.start(Generator(policy))
            OTHER[:] = [rt.start(Generator(case.policy(seed=9), name="other")) for _ in range(2)]
            options: dict[str, Any] = {"program": case.program, "segment_length": case.segment_length}
            envs = rt.start(EnvGroup(case.specs, actor=gen, count=4, spares=spares, **options))
            trainer = rt.start(Trainer(envs, learner, updates=updates, max_lag=0, resume=resume))
            async for report in trainer:
                part.take(report)
                assert_sound(envs.admission.ledger())
                for pause_s in (pauses or {}).get(report.update, ()):
                    await asyncio.sleep(pause_s)
                    part.saved.setdefault(report.update, []).append(await trainer.snapshot())

    run_virtual(main())
    part.weights = parameter_hash(policy)
    return part


QUICK = (rollout, draws_and_asks_first, draws_and_asks_last)  # they do next to nothing after the end of an episode
Wanted = Callable[[SavedExperience], bool]
MOMENTS: dict[int, tuple[Sequence[float], Wanted]] = {
    1: ([0.0], lambda saved: saved.ledger.in_flight == 4),
    2: ([0.5] * 20, lambda saved: saved.ledger.parked > 2 and saved.ledger.in_flight > 1),
    3: ([0.5] * 40, lambda saved: any(env.running is None for env in saved.envs)),
    4: ([0.5] * 40, lambda saved: any(env.running is not None and env.running.reported for env in saved.envs)),
    5: ([400.0], lambda saved: saved.ledger.num_waiting == 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_deterministic_run_goes_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    """Saved in the midst of decisions, between two episodes, and while a program still holds one that has ended."""
    case = CASES[name]
    whole = deterministic(6, case=case)
    saving = deterministic(6, pauses={update: pauses for update, (pauses, _) in MOMENTS.items()}, seed=1, case=case)
    assert (saving.consumed, saving.metrics, saving.weights) == (whole.consumed, whole.metrics, whole.weights)
    for update, (_, wanted) in MOMENTS.items():
        if update == 4 and case.program in QUICK:
            continue
        saves = Checkpointer(tmp_path / str(update))
        saves._write(next(saved for saved in saving.saved[update] if wanted(saved.experience)))
        part = deterministic(6, saves.latest(), seed=100 + update, case=case)
        assert part.consumed == whole.consumed[update:]
        assert part.metrics == whole.metrics[update:]
        assert part.weights == whole.weights
        assert part.dropped == whole.dropped[update:]
        before = [episode for episodes in saving.episodes[:update] for episode in episodes]
        after = [episode for episodes in part.episodes for episode in episodes]
        assert len(set(before + after)) == len(before + after), "none is reported twice"
        assert set(before + after) >= {episode for episodes in whole.episodes for episode in episodes}


@pytest.mark.slow
def test_a_run_that_was_resumed_can_be_resumed_again_before_all_episodes_are_back() -> None:
    whole = deterministic(4, pauses={2: [3.0]})
    (first,) = whole.saved[2]

    async def main() -> Checkpoint:
        case = CASES["plain"]
        policy = case.policy()
        async with Runtime(machine(1), seed=3, deterministic=True) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=4))
            learner = case.learner(policy)
            trainer = rt.start(Trainer(envs, learner, updates=4, max_lag=0, resume=first))
            await asyncio.sleep(0.5)
            return await trainer.snapshot()

    second = run_virtual(main())
    pairs = zip(first.experience.envs, second.experience.envs, strict=True)
    assert any(env.running is again.running is not None for env, again in pairs)
    third = deterministic(4, second, seed=2)
    assert third.consumed == whole.consumed[2:]
    assert third.weights == whole.weights


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 4), (4, 2)])
def test_spares_make_no_difference_to_a_run_that_goes_on(before: int, after: int) -> None:
    whole = deterministic(4)
    saving = deterministic(4, pauses={2: [3.0]}, seed=1, spares=before)
    part = deterministic(4, saving.saved[2][0], seed=2, spares=after)
    assert saving.consumed == whole.consumed
    assert part.consumed == whole.consumed[2:]
    assert part.weights == whole.weights


async def by_hand(env: EnvContext) -> None:
    """Makes no decision in every second episode, and draws and calls after its end."""
    obs, _ = await env.reset()
    while not env.done:
        obs = (await (env.intervene(env.rng.uniform(-1, 1, 2)) if env.episode % 2 else env.act_step(obs))).obs
    env.rng.random()
    await env.call(nothing)
    env.rng.random()


@pytest.mark.slow
def test_what_a_program_does_after_the_end_of_an_episode_without_a_decision_is_done_again() -> None:
    case = Case(program=by_hand)
    whole = deterministic(3, pauses={1: [0.5] * 60}, case=case)
    saved = next(
        saved
        for saved in whole.saved[1]
        for env in saved.experience.envs
        if env.running is not None and env.running.reported and env.running.first_decision == env.num_decisions
    )
    part = deterministic(3, saved, seed=1, case=case)
    assert part.consumed == whole.consumed[1:]
    assert part.weights == whole.weights


def test_a_run_whose_actor_had_a_version_goes_on_with_the_versions_that_it_had() -> None:
    """Of a curriculum, say: a second trainer with the same generator, whose versions are not the numbers of updates.

    Where it begins is a version too: its learner may have another policy.
    """

    async def curriculum(resume: Checkpoint | None) -> Checkpoint:
        learner = PPO(default_policy(LENGTHS, hidden=(8,)), PPOConfig(batch_size=24, minibatch_size=12))
        async with Runtime(machine(0)) as rt:
            gen = rt.start(Generator(learner.policy))
            if resume is None:
                easy = rt.start(EnvGroup(LENGTHS, actor=gen, count=6, name="easy"))
                async for _ in rt.start(Trainer(easy, learner, updates=3)):
                    pass
            hard = rt.start(EnvGroup(LENGTHS, actor=gen, count=6))
            trainer = rt.start(Trainer(hard, learner, updates=4 if resume is None else 8, resume=resume))
            before = 0 if resume is None else resume.update
            async for report in trainer:
                before += 1
                assert report.update == before
                assert gen.weights.version == before + 4
                assert len(report.lag_counts) <= 2
            await asyncio.sleep(9.0)  # so that decisions lie there that were not trained
            return await trainer.snapshot()

    saved = run_virtual(curriculum(None))
    assert (saved.update, saved.version) == (4, 8)
    kept = [*saved.experience.taken, *saved.experience.segments, *saved.experience.open]
    assert {decision.version for segment in kept for decision in segment.decisions} <= {7, 8}
    assert kept
    ended = run_virtual(curriculum(saved))
    assert (ended.update, ended.version) == (8, 12)


class Restless(ScriptedEnv):
    """Not deterministic: what it shows depends on how many were built."""

    num_built = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Restless.num_built += 1
        self._offset = np.float32(Restless.num_built)

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs + self._offset, *rest


@pytest.mark.parametrize("sooner", [True, False], ids=["it ends sooner", "it shows something else"])
def test_a_simulator_that_is_another_one_when_an_episode_is_run_again_is_found_out(sooner: bool) -> None:
    spec = scripted_spec(length=40) if sooner else scripted_spec(make=functools.partial(Restless, 3, 2, length=40))
    saved, _ = saved_after(2, 4.0, spec=spec, on_resume="replay")

    now = replace(spec, horizon=2) if sooner else spec

    async def main(on_resume: Any) -> None:
        async with Runtime(scattered()) as rt:
            run = await going(rt, updates=4, resume=saved, spec=now, on_resume=on_resume)
            async for _ in run.trainer:
                pass

    run_virtual(main("next"))
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main("replay"))
    error = next(leaves(caught.value))
    assert isinstance(error, SimulatorError)
    what = "ended after 2 of the calls, where it had not before" if sooner else "came to another observation"
    assert re.search(
        rf"env \d: episode 0 was run again with the same seed and actions and {what}, so this simulator is not "
        r'deterministic, or not the one of that run: continue with EnvGroup\(on_resume="next"\)',
        str(error),
    )


def test_an_episode_that_was_saved_at_its_end_and_ends_sooner_is_found_out() -> None:
    async def lingering(env: EnvContext) -> None:
        await rollout(env)
        await asyncio.sleep(1000.0)

    spec = scripted_spec(length=40)
    saved, _ = saved_after(2, 100.0, spec=replace(spec, horizon=6), on_resume="replay", program=lingering)
    assert any(env.running and env.running.reported for env in saved.experience.envs)

    async def main() -> None:
        async with Runtime(scattered()) as rt:
            now = replace(spec, horizon=5)
            run = await going(rt, updates=4, resume=saved, spec=now, on_resume="replay", program=lingering)
            async for _ in run.trainer:
                pass

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main())
    assert "ended after 5 of the calls, where it had not before" in str(next(leaves(caught.value)))
