"""What a program may do, and what is recorded: one test per rule."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ebrl.core.records import ActionOut, Array, Observation, StepResult
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.gen.service import BatchService
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.sim.programs import receding_horizon, rollout
from tests.helpers import STEP_S, assert_sound, recording, scripted_spec, take, training, virtually

Program = Callable[[EnvContext], Awaitable[None]]
SPEC = scripted_spec(length=4)


# Decisions: what is recorded.


@virtually
async def test_a_decision_is_one_act_and_its_steps() -> None:
    outs: list[ActionOut] = []
    results: list[StepResult] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            outs.append(await env.act(obs))
            results.append(await env.step(outs[-1].action))
            obs = results[-1].obs

    async with recording(program, spec=scripted_spec(length=7, task="reach"), horizon=3) as envs:
        (segment,) = await take(envs, 1)
    decisions = segment.decisions
    assert [d.num_steps for d in decisions] == [3, 3, 1], "a step stops at the end of the episode"
    assert [d.rewards for d in decisions] == [result.rewards for result in results[:3]]
    assert all(d.out is out for d, out in zip(decisions, outs[:3], strict=True))
    assert [(d.env, d.episode, d.index, d.version) for d in decisions] == [(0, 0, i, 0) for i in range(3)]
    assert [(d.terminated, d.truncated) for d in decisions] == [(False, False), (False, False), (False, True)]
    assert (segment.env, segment.task, segment.reason) == (0, "reach", "end")
    for after, result in zip(decisions[1:], results, strict=False):
        assert_array_equal(after.obs, result.obs)
    assert_array_equal(segment.last_obs, results[2].obs)


@virtually
async def test_act_step_records_what_act_and_step_do() -> None:
    async def by_hand(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            obs = (await env.step((await env.act(obs)).action)).obs

    rows = []
    for program in (by_hand, rollout):
        async with recording(program, spec=scripted_spec(length=7, terminates=True), horizon=3, count=2) as envs:
            segments = await take(envs, 6)
        rows.append(
            [
                (d.env, d.episode, d.index, d.rewards, d.num_steps, d.terminated, d.out.action.tolist())
                for segment in sorted(segments, key=lambda s: (s.env, s.decisions[0].index))
                for d in segment.decisions
            ]
        )
    assert rows[0] == rows[1]
    assert {row[4:6] for row in rows[0]} == {(3, False), (1, True)}


@virtually
async def test_step_takes_a_chunk_a_slice_or_one_action_and_belongs_to_the_open_decision() -> None:
    seen: list[float] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        for cut in (slice(None), slice(0, 2), 0):
            out = await env.act(obs)
            result = await env.step(out.action[cut])
            seen.extend(result.rewards)
            obs = result.obs
        out = await env.act(obs)
        for action in out.action:
            seen.extend((await env.step(np.clip(action, -0.1, 0.1))).rewards)
        await env.reset()

    async with recording(program, spec=scripted_spec(length=50), horizon=3) as envs:
        (segment,) = await take(envs, 1)
    assert [d.num_steps for d in segment.decisions] == [3, 2, 1, 3]
    assert [d.out.action.shape for d in segment.decisions] == [(3, 2)] * 4, "what the policy said is kept whole"
    assert [r for d in segment.decisions for r in d.rewards] == seen[:9]


@virtually
async def test_receding_horizon_executes_the_beginning_of_every_chunk() -> None:
    program = functools.partial(receding_horizon, execute=2)
    async with recording(program, spec=scripted_spec(length=5), horizon=4) as envs:
        (segment,) = await take(envs, 1)
    assert [d.num_steps for d in segment.decisions] == [2, 2, 1]


@virtually
async def test_an_act_that_is_never_stepped_is_dropped_as_unexecuted() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        obs = (await env.act_step(obs)).obs
        await env.act(obs)
        while not env.done:
            obs = (await env.act_step(obs)).obs
        del seen[:]
        seen.append(obs)

    seen: list[Observation] = []
    async with training(SPEC, count=1, batch_size=4, updates=1, program=program) as stage:
        async for report in stage.trainer:
            assert report.dropped == {"unexecuted": 1}
        assert_sound(stage.envs.admission.ledger())
    (segment,) = stage.learner.batches[0].segments
    assert [d.index for d in segment.decisions] == [0, 2, 3, 4]
    assert [d.num_steps for d in segment.decisions] == [1, 1, 1, 1]


@virtually
async def test_the_decision_before_an_unexecuted_one_bootstraps_from_what_was_seen_then() -> None:
    last: list[Observation] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        obs = (await env.act_step(obs)).obs
        last.append(obs)
        await env.act(obs)  # and then the episode is left

    async with recording(program) as envs:
        segments = await take(envs, 2)
    for segment, obs in zip(segments, last, strict=False):
        assert [d.num_steps for d in segment.decisions] == [1]
        assert [(d.terminated, d.truncated) for d in segment.decisions] == [(False, False)]
        assert_array_equal(segment.last_obs, obs)
    assert envs.admission.ledger().dropped["unexecuted"] >= 2


@virtually
async def test_intervene_marks_the_decision_which_is_recorded() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            out = await env.act(obs)
            correct = env.recorder.num_decisions == 2
            obs = (await (env.intervene(-out.action) if correct else env.step(out.action))).obs

    async with recording(program) as envs:
        (segment,) = await take(envs, 1)
    assert [d.intervened for d in segment.decisions] == [False, True, False, False]


@virtually
async def test_an_intervention_is_not_trained_and_its_neighbours_bootstrap_around_it() -> None:
    obs_of: dict[int, Observation] = {}

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            obs_of.setdefault(env.recorder.num_decisions, obs)
            out = await env.act(obs)
            correct = env.recorder.num_decisions == 2
            obs = (await (env.intervene(-out.action) if correct else env.step(out.action))).obs
        obs_of.setdefault(-1, obs)

    async with training(SPEC, count=1, batch_size=3, updates=1, program=program) as stage:
        async for report in stage.trainer:
            assert report.dropped == {"intervention": 1}
        assert_sound(stage.envs.admission.ledger())
    before, *after = stage.learner.batches[0].segments
    assert [d.index for d in before.decisions] == [0]
    assert [d.index for s in after for d in s.decisions] == [2, 3]
    assert_array_equal(before.last_obs, obs_of[1])
    assert_array_equal(after[0].decisions[0].obs, obs_of[2])
    assert_array_equal(after[-1].last_obs, obs_of[-1])


@virtually
async def test_an_intervention_without_an_open_decision_records_nothing() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        obs = (await env.intervene(np.zeros(2, np.float32))).obs
        while not env.done:
            obs = (await env.act_step(obs)).obs

    async with recording(program) as envs:
        (segment,) = await take(envs, 1)
    assert [d.index for d in segment.decisions] == [0, 1, 2]
    assert [d.intervened for d in segment.decisions] == [False] * 3


@virtually
async def test_steps_that_belong_to_no_decision_end_the_segment() -> None:
    """A fallback action after an act that came too late: the decision before it must not bootstrap from beyond it."""
    seen: list[Observation] = []
    slow = VirtualMachine({"gen": lambda n, rng: 10.0, "sim": lambda n, rng: STEP_S})

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        obs = (await env.act_step(obs)).obs
        seen.append(obs)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await env.act(obs)
        obs = (await env.intervene(np.ones(2, np.float32))).obs
        while not env.done:
            obs = (await env.act_step(obs)).obs

    async with recording(program, machine=slow) as envs:
        first, second = await take(envs, 2)
    assert [d.index for d in first.decisions] == [0]
    assert_array_equal(first.last_obs, seen[0])
    assert len(second.decisions) == 2


# Other services.


@virtually
async def test_a_second_actor_answers_in_batches_and_opens_no_decision() -> None:
    async with Runtime(VirtualMachine({"sim": lambda n, rng: 1.0, "gen": lambda n, rng: 0.1})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC)))
        teacher = rt.start(Generator(ScriptedPolicy(SPEC, horizon=5), name="teacher"))

        async def program(env: EnvContext) -> None:
            obs, _ = await env.reset()
            while not env.done:
                advice = await env.act(obs, actor=teacher)
                assert advice.action.shape == (5, 2)
                out = await env.act(obs)
                again = await env.act(obs, actor=teacher)  # while a decision is open
                assert not np.array_equal(advice.action, again.action), "one stream of noise, two draws"
                obs = (await env.step(out.action)).obs

        envs = rt.start(EnvGroup(SPEC, actor=gen, count=4, program=program))
        envs.open_training(100, max_lag=0)
        segments = await take(envs, 4)
        assert [d.index for d in segments[0].decisions] == [0, 1, 2, 3]
        asked = teacher.statistics()
        assert asked["batch_mean"] == 4
        started = envs.admission.ledger().started
        assert asked["requests"] >= 2 * started - 4


@virtually
async def test_a_second_actor_needs_no_credit() -> None:
    asked = 0
    async with Runtime(VirtualMachine({"sim": lambda n, rng: 1.0})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC)))
        teacher = rt.start(Generator(ScriptedPolicy(SPEC), name="teacher"))

        async def program(env: EnvContext) -> None:
            nonlocal asked
            obs, _ = await env.reset()
            await env.act_step(obs)
            for _ in range(5):
                await env.act(obs, actor=teacher)
                asked += 1
            await env.act_step(obs)

        envs = rt.start(EnvGroup(SPEC, actor=gen, count=1, program=program))
        envs.open_training(1, max_lag=0)
        await asyncio.sleep(100)
        assert asked == 5
        assert envs.admission.ledger().num_waiting == 1


@virtually
async def test_a_reward_service_is_batched_and_adds_to_the_open_decision() -> None:
    own: dict[tuple[int, int], float] = {}
    sizes: list[int] = []

    def score(observations: Any) -> list[float]:
        sizes.append(len(observations))
        return [100.0] * len(observations)

    async with Runtime(VirtualMachine({"sim": lambda n, rng: 1.0, "gen": lambda n, rng: 0.1})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC, horizon=2)))
        service = rt.start(BatchService(score, name="score"))

        async def program(env: EnvContext) -> None:
            obs, _ = await env.reset()
            while not env.done:
                out = await env.act(obs)
                result = await env.step(out.action)
                own[env.index, env.recorder.num_decisions - 1] = result.rewards[-1]
                env.reward(await service(result.obs))  # after the last step of the episode too
                obs = result.obs

        envs = rt.start(EnvGroup(SPEC, actor=gen, count=3, program=program))
        envs.open_training(100, max_lag=0)
        segments = await take(envs, 3)
    assert set(sizes) == {3}
    for segment in segments:
        assert [len(d.rewards) for d in segment.decisions] == [2, 2]
        for d in segment.decisions:
            assert d.rewards[-1] == own[d.env, d.index] + 100.0
            assert abs(d.rewards[0]) < 10
    assert all(abs(episode.total_reward) < 10 for episode in envs.take_episodes()), "episodes count the simulator's own"


# Episodes, and what a program knows.


@virtually
async def test_one_call_of_a_program_may_run_many_episodes() -> None:
    calls: Counter[int] = Counter()

    async def program(env: EnvContext) -> None:
        calls[env.index] += 1
        for _ in range(3):
            obs, _ = await env.reset()
            while not env.done:
                obs = (await env.act_step(obs)).obs

    async with recording(program) as envs:
        segments = await take(envs, 7)
    assert [s.decisions[0].episode for s in segments] == list(range(7))
    assert [s.reason for s in segments] == ["end"] * 7
    assert calls[0] == 3
    episodes = envs.take_episodes()
    assert [e.episode for e in episodes[:7]] == list(range(7))
    assert len({e.seed for e in episodes}) == len(episodes)


@virtually
async def test_an_episode_that_is_left_bootstraps_from_what_was_seen_last() -> None:
    last: list[Observation] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        for _ in range(2):
            obs = (await env.act_step(obs)).obs
        last.append(obs)

    async with recording(program) as envs:
        segments = await take(envs, 3)
    for segment, obs in zip(segments, last, strict=False):
        assert [(d.terminated, d.truncated) for d in segment.decisions] == [(False, False)] * 2
        assert_array_equal(segment.last_obs, obs)
    assert {e.num_decisions for e in envs.take_episodes()} == {2}


@virtually
async def test_the_random_stream_of_a_program_is_keyed_by_its_environment() -> None:
    async def draws(count: int, seed: int) -> dict[int, list[float]]:
        drawn: dict[int, list[float]] = {i: [] for i in range(count)}

        async def program(env: EnvContext) -> None:
            obs, _ = await env.reset()
            drawn[env.index].append(env.rng.random())
            while not env.done:
                obs = (await env.act_step(obs)).obs

        async with recording(program, count=count, seed=seed) as envs:
            await take(envs, 3 * count)
        return {index: numbers[:3] for index, numbers in drawn.items()}

    few, many, other = await draws(1, 0), await draws(3, 0), await draws(1, 1)
    assert few[0] == many[0] != other[0]
    assert len({tuple(numbers) for numbers in many.values()}) == 3


@virtually
async def test_observations_are_transformed_the_final_one_too() -> None:
    def observe(obs: Observation) -> Observation:
        assert isinstance(obs, np.ndarray)
        return np.concatenate([obs, [7.0]]).astype(np.float32)

    async with recording(rollout, observe=observe) as envs:
        (segment,) = await take(envs, 1)
    seen = [d.obs for d in segment.decisions] + [segment.last_obs]
    assert [(np.asarray(obs).shape, np.asarray(obs)[-1]) for obs in seen] == [((4,), 7.0)] * 5


@virtually
async def test_a_program_knows_its_version_episode_and_time() -> None:
    seen: list[tuple[int, int, float, bool, int]] = []

    async def program(env: EnvContext) -> None:
        assert env.task == "reach"
        obs, _ = await env.reset()
        while not env.done:
            before = env.version
            out = await env.act(obs)
            assert before <= out.version <= env.version
            seen.append((env.episode, out.version, env.episode_time, env.done, env.index))
            obs = (await env.step(out.action)).obs

    spec, machine = scripted_spec(length=4, task="reach"), VirtualMachine({"sim": lambda n, rng: 2.0})
    async with training(spec, machine, count=1, batch_size=4, updates=3, max_lag=0, program=program) as stage:
        async for _ in stage.trainer:
            pass
    assert seen[:12] == [(e, e, 2.0 * i, False, 0) for e in range(3) for i in range(4)]


def replaced(how: Callable[[Array], Any], method: str = "step") -> Program:
    """Return a program that executes something else, in two of three steps."""

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        for number in itertools.count():
            if env.done:
                return
            out = await env.act(obs)
            step = getattr(env, method if number % 3 else "step")
            obs = (await step(how(out.action) if number % 3 else out.action)).obs

    return program


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda action: action + np.float32(0.01), True),
        (lambda action: -action[0], True),
        (lambda action: action.copy(), False),
        (lambda action: action[:1].tolist(), False),
        (lambda action: action.astype(np.float64), False),
        (lambda action: action[-1], False),
    ],
)
def test_actions_that_the_policy_did_not_choose_are_told_once(
    how: Callable[[Array], Any], told: bool, horizon: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with training(SPEC, count=3, batch_size=12, horizon=horizon, program=replaced(how)) as stage:
            async for report in stage.trainer:
                assert report.dropped == {}

    run_virtual(main())
    assert len(caplog.messages) == told
    if told:
        assert "steps with actions that its policy did not choose" in caplog.text
        assert "give others to env.intervene(action)" in caplog.text


def shown(how: Callable[[Observation], Observation]) -> Program:
    """Return a program whose policy sees something else."""

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            obs = (await env.act_step(how(obs))).obs

    return program


@pytest.mark.parametrize("ends", ["cut off", "terminated"])
@pytest.mark.parametrize("how", [np.copy, lambda obs: obs + np.float32(1), lambda obs: np.roll(obs, 1)])
def test_observations_that_are_not_the_simulators_are_told_once(
    how: Callable[[Observation], Observation], ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a truncated episode would have been worth is read off the simulator's last one."""

    async def main() -> None:
        spec = scripted_spec(length=4, terminates=ends == "terminated")
        async with training(spec, count=3, batch_size=12, program=shown(how)) as stage:
            async for _ in stage.trainer:
                pass

    run_virtual(main())
    told = how is not np.copy and ends == "cut off"
    assert len(caplog.messages) == told
    if told:
        assert "shows its policy other observations than the simulator's" in caplog.text


def test_interventions_and_evaluations_need_no_word(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        program = replaced(lambda action: action * 2, "intervene")
        async with training(SPEC, count=2, batch_size=4, updates=2, program=program) as stage:
            reports = [report async for report in stage.trainer]
        assert reports[-1].dropped["intervention"] > 0
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(ScriptedPolicy(SPEC)))
            judged = EnvGroup(SPEC, actor=gen, count=2, program=replaced(lambda action: action * 2))
            assert len(await rt.start(judged).run_episodes([1, 2, 3])) == 3

    run_virtual(main())
    assert caplog.messages == []
