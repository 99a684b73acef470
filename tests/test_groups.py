"""Groups: complete or not at all, advantages over all members, and nothing that stands still."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from ebrl.core.admission import ENDLESS, Admission
from ebrl.core.errors import ConfigError
from ebrl.core.records import Array, GroupRule, Segment, TrainBatch, UpdateReport
from ebrl.core.runtime import Runtime
from ebrl.core.scope import Scope
from ebrl.core.testing import settle
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.generator import Generator
from ebrl.gen.policies import GaussianPolicy, TorchPolicy
from ebrl.sim.cohorts import Cohorts
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.train.advantages import group_advantages
from ebrl.train.assemble import Dropped
from ebrl.train.groups import FUTILE, Groups
from ebrl.train.grpo import GRPOConfig
from ebrl.train.trainer import Trainer
from tests.helpers import (
    PATIENT,
    ComparingLearner,
    Stage,
    assert_sound,
    make_segment,
    scripted_spec,
    the_failure,
    training,
    virtually,
)
from tests.test_asynchrony import OneSlowLane, chaos, exponential, one_second, with_stragglers

SPEC = scripted_spec(length=lambda rng: int(rng.integers(3, 20)))
ALL = GroupRule()
Key = tuple[int, int]


def key_of(segment: Segment, size: int) -> Key:
    return segment.env // size, segment.decisions[0].episode


# What a member is worth.


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ((1, 0, 0, 1), (0.8660, -0.8660, -0.8660, 0.8660)),
        ((1, 0, 0, 0), (1.5, -0.5, -0.5, -0.5)),
        ((3, 3, 3), (0.0, 0.0, 0.0)),
    ],
)
def test_advantages_use_the_deviation_of_the_sample(returns: Sequence[float], expected: Sequence[float]) -> None:
    assert group_advantages(returns) == pytest.approx(expected, abs=1e-4)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_advantages_add_up_to_nothing(returns: list[float]) -> None:
    found = np.array(group_advantages(returns))
    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(0.0, abs=1e-6)
    assert np.square(found).sum() <= len(returns) - 1 + 1e-9


def member(env: int, total_reward: float, *, success: bool | None = None, episode: int = 0) -> list[Segment]:
    """Return an episode of two segments."""
    half = {"env": env, "episode": episode, "rewards": (total_reward / 6,)}
    parts = [make_segment(2, **half), make_segment(4, first=2, end="terminated", **half)]  # type: ignore[arg-type]
    return [replace(part, success=success) for part in parts]


def group(*successes: bool | None) -> list[Segment]:
    return [
        part for env, success in enumerate(successes) for part in member(env, float(bool(success)), success=success)
    ]


def test_all_segments_of_a_member_have_its_advantage() -> None:
    segments = [*member(5, 0.0), *member(4, 6.0), *member(1, 2.0, episode=7), *member(0, 2.0, episode=7)]
    kept, dropped = Groups(2, ALL).admit([segments[i] for i in (0, 4, 2, 6, 1, 5, 3, 7)])
    assert dropped == []
    found = {(s.env, s.decisions[0].episode, s.decisions[0].index): s.advantage for s in kept}
    apart = 1 / np.sqrt(2)
    assert [found[4, 0, 0], found[4, 0, 2], found[5, 0, 0]] == pytest.approx([apart, apart, -apart], abs=1e-4)
    assert [found[env, 7, index] for env in (0, 1) for index in (0, 2)] == [0.0] * 4


@pytest.mark.parametrize(
    ("num", "bounds", "wanted"),
    [(0, (0.1, 0.9), False), (1, (0.1, 0.9), True), (9, (0.1, 0.9), True), (10, (0.1, 0.9), False), (0, None, True),
     (10, (0.0, 1.0), True)],
)  # fmt: skip
def test_groups_are_filtered_by_their_success_rate_bounds_included(
    num: int, bounds: tuple[float, float] | None, wanted: bool
) -> None:
    segments = group(*[env < num for env in range(10)])
    kept, dropped = Groups(10, GroupRule(success_bounds=bounds)).admit(segments)
    assert [replace(segment, advantage=None) for segment in kept] == (segments if wanted else [])
    assert dropped == ([] if wanted else [Dropped(s.env, "filtered", len(s.decisions)) for s in segments])
    assert all(segment.advantage is None for segment in segments), "what was handed over stays as it was"


def test_a_return_may_stand_for_success() -> None:
    rule = GroupRule(success_bounds=(0.1, 0.9), success_return=4.9)
    assert Groups(2, rule).admit([*member(0, 5.0), *member(1, 5.5)])[0] == []
    assert Groups(2, rule).admit([*member(0, 5.0), *member(1, 4.5)])[1] == []


def test_an_episode_without_a_word_of_success_is_none_once_another_one_had_one() -> None:
    groups = Groups(2, GroupRule(success_bounds=(0.1, 0.9)))
    with pytest.raises(ConfigError, match="report no success in their info: say from which return"):
        groups.admit(group(None, None))
    assert [segment.env for segment in groups.admit(group(True, None))[0]] == [s.env for s in group(True, None)]
    assert groups.admit(group(None, None))[0] == []


@pytest.mark.parametrize("bounds", [(0.9, 0.1), (-0.1, 0.5), (0.5, 1.1)])
def test_bounds_are_a_part_of_zero_to_one(bounds: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"success_bounds must be two numbers in 0 \.\. 1"):
        GroupRule(success_bounds=bounds)
    with pytest.raises(ConfigError, match="success_bounds must be"):
        GRPOConfig(success_bounds=bounds)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"success_return": 1.0}, "success_return says which episodes success_bounds counts: give those too"),
        (
            {"success_return": math.nan, "success_bounds": (0, 1)},
            "success_return must be a finite number or None, got nan",
        ),
        ({"success_return": "1", "success_bounds": (0, 1)}, "success_return.*must be a"),
    ],
)
@pytest.mark.parametrize("form", [GroupRule, GRPOConfig])
def test_a_return_that_counts_as_success(form: Any, rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        form(**rule)


def test_it_is_said_once_that_nothing_gets_through(caplog: pytest.LogCaptureFixture) -> None:
    groups = Groups(2, GroupRule(success_bounds=(0.1, 0.9)))
    for _ in range(FUTILE - 1):
        groups.admit(group(False, False))
    groups.admit(group(True, False))
    assert not caplog.records
    for _ in range(3 * FUTILE):
        groups.admit(group(False, False))
    groups.admit(group(True, False))
    for _ in range(3 * FUTILE):
        groups.admit(group(False, False))
    (record,) = caplog.records
    assert "100 groups in a row were filtered, the last with a success rate of 0.00, outside of 0.1 .. 0.9" in str(
        record.getMessage()
    )


# In a run.


def assert_whole(handed: Sequence[Segment], batches: Sequence[TrainBatch], size: int) -> None:
    """A group is in one batch with all that can be trained of all its members, or in none; all know what it is worth.

    Args:
        handed: All that the environments handed over.
        batches: All that were trained.
        size: G.
    """
    there: dict[Key, set[tuple[int, int]]] = defaultdict(set)
    totals: dict[Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for segment in handed:
        for d in segment.decisions:
            totals[key_of(segment, size)][d.env] += sum(d.rewards)
            if not d.intervened:
                there[key_of(segment, size)].add((d.env, d.index))
    seen: set[Key] = set()
    for batch in batches:
        trained: dict[Key, set[tuple[int, int]]] = defaultdict(set)
        for segment in batch.segments:
            key = key_of(segment, size)
            trained[key] |= {(d.env, d.index) for d in segment.decisions}
            worth = dict(zip(totals[key], group_advantages(list(totals[key].values())), strict=True))
            assert segment.advantage == pytest.approx(worth[segment.env], abs=1e-5)
        assert {key: there[key] for key in trained} == trained
        assert not seen & trained.keys(), "in one batch"
        seen |= trained.keys()
    assert all(len(totals[key]) == size for key in seen)


def assert_as_reported(batches: Sequence[TrainBatch], size: int, reports: Sequence[UpdateReport]) -> None:
    """Members began alike, and what they are worth follows from what simulators said of whole episodes."""
    seeds: dict[Key, set[int]] = defaultdict(set)
    totals: dict[Key, dict[int, float]] = defaultdict(dict)
    for report in reports:
        for episode in report.episodes:
            seeds[episode.env // size, episode.episode].add(episode.seed)
            totals[episode.env // size, episode.episode][episode.env] = episode.total_reward
    assert all(len(found) == 1 for found in seeds.values())
    for batch in batches:
        for segment in batch.segments:
            of_group = totals[key_of(segment, size)]
            assert len(of_group) == size
            worth = dict(zip(of_group, group_advantages(list(of_group.values())), strict=True))
            assert segment.advantage == pytest.approx(worth[segment.env], abs=1e-5)


async def exhaust(stage: Stage, *, wild: bool = False) -> list[UpdateReport]:
    """Do all updates; ledger, lag and groups are checked.

    Args:
        stage: What runs.
        wild: Programs get rewards outside of decisions.
    """
    handed: list[Segment] = []
    take = stage.envs.take_segments

    def watched(stale: int | None = None) -> list[Segment]:
        segments = take(stale)
        handed.extend(segments)
        return segments

    stage.envs.__dict__["take_segments"] = watched
    reports = []
    async for report in stage.trainer:
        assert_sound(stage.envs.admission.ledger())
        assert report.lag_max <= stage.trainer.max_lag
        reports.append(report)
    batches = stage.learner.batches
    assert stage.envs.admission.ledger().trained == sum(report.num_decisions for report in reports)
    assert [report.num_decisions for report in reports] == [len(batch.decisions) for batch in batches]
    if stage.trainer.max_lag == 0:
        assert "masked" not in reports[-1].dropped, "all that were begun are trained"
    if isinstance(stage.learner, ComparingLearner):
        assert_whole(handed, batches, stage.envs.group_size)
        if not wild:
            assert_as_reported(batches, stage.envs.group_size, reports)
    return reports


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_members_run_at_their_own_pace_and_are_trained_as_a_group(max_lag: int) -> None:
    async def main() -> None:
        machine = VirtualMachine({"sim": with_stragglers, "train": one_second}, num_cores=32)
        options: dict[str, Any] = {"count": 12, "group_size": 4, "batch_size": 120, "updates": 6, "max_lag": max_lag}
        async with training(SPEC, machine, rule=ALL, **options) as stage:
            await exhaust(stage)
            ledger = stage.envs.admission.ledger()
        assert set(ledger.dropped) <= {"masked"}
        assert sum(ledger.dropped.values()) < 0.35 * ledger.started
        ends = [d.episode for b in stage.learner.batches for d in b.decisions if d.env == 0]
        assert len(set(ends)) > 3

    run_virtual(main())


@pytest.mark.parametrize("law", [one_second, exponential])
def test_no_setting_stands_still(law: Any) -> None:
    """Among them batches smaller than an episode, and groups larger than all credit."""

    async def main(**options: Any) -> None:
        machine = VirtualMachine({"sim": law, "train": law})
        async with training(SPEC, machine, rule=ALL, updates=6, **options) as stage:
            await exhaust(stage)

    for count, size in ((2, 2), (6, 3), (8, 8)):
        for batch_size in (1, 30):
            for max_lag in (0, 2):
                run_virtual(main(count=count, group_size=size, batch_size=batch_size, max_lag=max_lag))


async def unruly(env: EnvContext) -> None:
    """An episode that goes wrong now and then, in all the ways there are."""
    obs, _ = await env.reset()
    while not env.done:
        draw = env.rng.random()
        try:
            async with asyncio.timeout(1.0 if draw < 0.02 else None):
                if draw < 0.9:
                    obs = (await env.act_step(obs)).obs
                elif draw < 0.99:
                    obs = await chaos(env, obs, str(env.rng.choice(["twice", "intervene", "fallback", "slice"])))
                else:
                    return
        except TimeoutError:
            continue


@settings(max_examples=25)
@given(
    groups=st.integers(1, 3),
    size=st.integers(2, 4),
    batch_size=st.integers(1, 60),
    max_lag=st.integers(0, 3),
    segment_length=st.none() | st.integers(1, 9),
    horizon=st.integers(1, 3),
    num_cores=st.integers(1, 12),
    deterministic=st.booleans(),
    bounds=st.none() | st.just((0.1, 0.9)),
    wild=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_whatever_arrives_groups_are_complete_and_the_ledger_is_balanced(
    groups: int, size: int, seed: int, num_cores: int, wild: bool, bounds: tuple[float, float] | None, **options: Any
) -> None:
    """With programs that do anything, too: then some groups are incomplete, and dropped as a whole."""

    async def main() -> None:
        machine = VirtualMachine({"sim": with_stragglers, "gen": exponential, "train": exponential}, seed=seed,
                                 num_cores=num_cores, servers={"gen": 2})  # fmt: skip
        rule = GroupRule(success_bounds=bounds, success_return=-1.3 if bounds else None)
        if wild:
            options["program"] = unruly
        count = groups * size
        async with training(
            SPEC, machine, rule=rule, count=count, group_size=size, updates=4, seed=seed, **options
        ) as stage:
            reports = await exhaust(stage, wild=wild)
        if not wild:
            assert set(reports[-1].dropped) <= {"masked", "filtered"}

    run_virtual(main())


@virtually
async def test_one_group_that_stands_still_holds_up_no_other() -> None:
    machine = OneSlowLane({"sim": one_second, "slow": lambda n, rng: 1e9}, servers={"slow": 1})
    spec = scripted_spec(length=10)
    options: dict[str, Any] = {"count": 9, "group_size": 3, "batch_size": 60, "updates": 40, "failures": PATIENT}
    async with training(spec, machine, rule=ALL, **options) as stage:
        reports = await exhaust(stage)
    assert {d.env for d in stage.learner.decisions} == {3, 4, 5, 6, 7, 8}
    assert reports[-1].elapsed_s < 40 * 60 / 6 * 1.3, "as if the other two groups were alone"
    ran = [episode for report in reports for episode in report.episodes if episode.env in (1, 2)]
    assert max(episode.episode for episode in ran) == 1, "its other members are one episode ahead, and no more"


async def careless(env: EnvContext) -> None:
    """One member loses its second episode, after two decisions."""
    obs, _ = await env.reset()
    num = 0
    while not env.done:
        num += 1
        if (env.index, env.episode, num) == (2, 1, 3):
            try:
                async with asyncio.timeout(0.5):
                    await env.act_step(obs)
            except TimeoutError:
                return
        obs = (await env.act_step(obs)).obs


@virtually
async def test_a_group_with_a_lost_member_is_dropped_as_incomplete() -> None:
    machine, spec = VirtualMachine({"sim": one_second}), scripted_spec(length=5)
    options: dict[str, Any] = {"count": 4, "group_size": 2, "batch_size": 20, "updates": 6, "program": careless}
    async with training(spec, machine, rule=ALL, **options) as stage:
        reports = await exhaust(stage)
    trained = {(d.env // 2, d.episode) for d in stage.learner.decisions}
    assert (1, 1) not in trained
    assert {(0, 0), (0, 1), (1, 0), (1, 2)} <= trained
    assert reports[-1].dropped == {"lost": 1, "incomplete": 2 + 5}


@virtually
async def test_filtered_groups_give_their_credit_back() -> None:
    machine = VirtualMachine({"sim": exponential})
    rule = GroupRule(success_bounds=(0.1, 0.9), success_return=-1.3)
    async with training(SPEC, machine, rule=rule, count=8, group_size=2, batch_size=60, updates=10) as stage:
        reports = await exhaust(stage)
        ledger = stage.envs.admission.ledger()
    assert reports[-1].dropped["filtered"] > 300
    assert ledger.started > 600 + 300, "others took its place"


class Side(gymnasium.Env[Array, Array]):
    """Three steps. Success: all actions on the side that is seen."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self.side = 1.0 if np.random.default_rng(seed).random() < 0.5 else -1.0
        self.right, self.left = True, 3
        return np.full(1, self.side, np.float32), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.right &= bool(action[0] * self.side > 0)
        self.left -= 1
        success = self.right and not self.left
        return np.full(1, self.side, np.float32), float(success), not self.left, False, {"success": success}


class Reinforce:
    """One step of policy gradient with the advantages of groups."""

    batch_size = 120
    groups = GroupRule(success_bounds=(0.0, 1.0))  # all, and their success must be known

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy
        self._adam = torch.optim.Adam(policy.parameters(), lr=0.04)

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        decisions = batch.decisions
        advantages = [segment.advantage for segment in batch.segments for _ in segment.decisions]
        aux = {name: torch.from_numpy(np.stack([d.out.aux[name] for d in decisions])) for name in decisions[0].out.aux}
        log_prob, _, _ = self.policy.evaluate(self.policy.collate([d.obs for d in decisions]), aux)
        loss = -(torch.tensor(advantages) * log_prob.sum((1, 2))).mean()
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        return {}


@pytest.mark.hogs("the policy is built on the loop, and what torch imports at its first step with it")
def test_a_policy_learns_from_groups() -> None:
    spec = scripted_spec(make=Side, obs_dim=1, action_dim=1)
    policy = GaussianPolicy.for_spec(spec, hidden=(16,), normalize=False)
    learner = Reinforce(policy)

    async def main() -> list[float]:
        async with Runtime(VirtualMachine({"sim": exponential, "train": one_second}), tune=False) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(spec, actor=gen, count=16, group_size=8))
            trainer = rt.start(Trainer(envs, learner, updates=10))
            return [report.success_rate async for report in trainer]

    rates = run_virtual(main())
    assert np.mean(rates[:3]) < 0.35, "by chance, one in eight"
    assert np.mean(rates[-2:]) > 0.8


# Deterministic mode.


@pytest.mark.parametrize("batch_size", [40, 150])
def test_in_deterministic_mode_groups_depend_on_the_seed_alone(batch_size: int) -> None:
    """A batch is less than an episode of all, or several."""

    async def main(latency_seed: int, seed: int = 0) -> list[tuple[Any, ...]]:
        laws = {"sim": with_stragglers, "gen": lambda n, rng: 0.01 * float(rng.random()), "train": exponential}
        machine = VirtualMachine(laws, num_cores=5, seed=latency_seed)
        rule = GroupRule(success_bounds=(0.1, 0.9), success_return=-1.3)
        options: dict[str, Any] = {"count": 8, "group_size": 2, "batch_size": batch_size, "updates": 4, "max_lag": 0}
        async with training(SPEC, machine, rule=rule, seed=seed, deterministic=True, **options) as stage:
            await exhaust(stage)
        return [
            (batch.version, segment.advantage, d.env, d.index, d.version, d.out.action.tobytes())
            for batch in stage.learner.batches
            for segment in batch.segments
            for d in segment.decisions
        ]

    one, other = run_virtual(main(1)), run_virtual(main(2))
    assert one == other
    assert one != run_virtual(main(1, seed=1))


@virtually
async def test_in_waves_nobody_begins_before_the_last_has_ended_and_nothing_is_handed_over() -> None:
    admission, handed = Admission(4), list[Segment]()
    cohorts = Cohorts(admission, handed.append, num_envs=4, size=2, batch_size=100, max_lag=0, in_waves=True)
    admission.open(100, 0, whole=True)
    async with Scope() as scope:
        for env in range(4):
            await cohorts.begin(env, 0)
        for env in (0, 1, 2):
            cohorts.add(make_segment(1, env=env, end="truncated"))
            cohorts.end(env, 0, None, lost=False)
        waiter = scope.start(cohorts.begin(0, 1), "waiter")
        await settle()
        assert (waiter.done(), cohorts.num_waiting, handed) == (False, 1, [])
        cohorts.add(make_segment(1, env=3, end="truncated"))
        cohorts.end(3, 0, None, lost=False)
        await waiter
    assert sorted(segment.env for segment in handed) == [0, 1, 2, 3]
    assert not cohorts.must_wait(2, 1), "all begin at once"


def test_the_noise_of_members_differs_and_groups_that_are_added_change_nothing() -> None:
    async def main(count: int) -> dict[int, list[bytes]]:
        async with training(SPEC, rule=ALL, count=count, group_size=2, batch_size=30, updates=3, max_lag=0,
                            deterministic=True) as stage:  # fmt: skip
            await exhaust(stage)
        firsts: dict[int, list[bytes]] = defaultdict(list)
        for d in stage.learner.decisions:
            if d.episode == 0:
                firsts[d.env].append(np.asarray(d.obs).tobytes())
        return firsts

    few, many = run_virtual(main(2)), run_virtual(main(8))
    assert few[0][0] == few[1][0], "the same start"
    assert few[0][1:4] != few[1][1:4], "and then other actions"
    for env in (0, 1):
        assert many[env][: len(few[env])] == few[env][: len(many[env])]


# Who asks for groups, and who has them.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the learner compares episodes that begin alike, but every environment of envs runs its own"),
        ({"group_size": 2, "sampling": "quota"}, 'groups are admitted by episodes: use "weighted" or "arrival"'),
        ({"group_size": 3}, "count=4 is no multiple of group_size=3"),
        ({"group_size": 0}, "group_size must be a whole number of at least 1, got 0"),
    ],
)
def test_groups_that_cannot_work(options: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with training(SPEC, rule=ALL, count=4, **options):
            pass

    error = the_failure(main())
    assert isinstance(error, ConfigError)
    assert message in str(error)


@virtually
async def test_a_learner_that_does_not_ask_for_groups_learns_as_ever() -> None:
    async with training(SPEC, count=4, group_size=2, batch_size=12, updates=4) as stage:
        reports = await exhaust(stage)
    assert all(segment.advantage is None for batch in stage.learner.batches for segment in batch.segments)
    assert {segment.reason for batch in stage.learner.batches for segment in batch.segments} > {"end"}, "cut as needed"
    seeds: dict[tuple[int, int], set[int]] = defaultdict(set)
    for report in reports:
        for episode in report.episodes:
            seeds[episode.env // 2, episode.episode].add(episode.seed)
    assert all(len(found) == 1 for found in seeds.values()), "the same seeds all the same"


@virtually
async def test_groups_of_two_tasks_have_one_task_each_and_weights() -> None:
    specs = [scripted_spec(length=5, task="short"), scripted_spec(length=15, task="long")]
    machine = VirtualMachine({"sim": exponential, "train": one_second})
    async with training(specs, machine, rule=ALL, count=8, group_size=2, batch_size=100, updates=8) as stage:
        assert stage.envs.tasks == ["short", "short", "long", "long"] * 2
        await exhaust(stage)
    for batch in stage.learner.batches:
        assert batch.weights is not None
        assert batch.weights.mean() == pytest.approx(1.0)


@pytest.mark.parametrize(("batch_size", "num_warnings"), [(40, 1), (100, 0)])
def test_too_little_credit_for_all_environments_is_said_once(
    caplog: pytest.LogCaptureFixture, batch_size: int, num_warnings: int
) -> None:
    async def main() -> None:
        spec = scripted_spec(length=20)
        async with training(spec, rule=ALL, count=8, group_size=2, batch_size=batch_size, updates=20) as stage:
            await exhaust(stage)

    run_virtual(main())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == num_warnings
    assert all("8 environments have about 160 decisions together, more than" in message for message in messages)


def test_that_episodes_of_groups_do_not_end_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        machine = VirtualMachine({"sim": lambda n, rng: 0.01})
        spec = scripted_spec(length=10**9)
        async with training(spec, machine, rule=ALL, count=4, group_size=2, batch_size=8) as stage:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5.0):
                    await anext(stage.trainer)

    run_virtual(main())
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        f"{ENDLESS * 2 * 8 + 1} decisions lie in episodes of groups that have not ended, and batches of 8 wait for "
        "them: do episodes end at all? A horizon ends them: env_spec(..., horizon=...)"
    )
