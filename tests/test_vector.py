"""Batched simulators in virtual time: who waits for whom, what is recorded, and that it is what single ones record."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

from ebrl.core.errors import Closed, ConfigError, PolicyError, ProgramError, SimulatorError
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import Machine, PolicyOut
from ebrl.core.records import Decision, EnvSpec, Episode, GroupRule, Observation
from ebrl.core.rng import episode_seed
from ebrl.core.runtime import Runtime
from ebrl.core.trace import Trace
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.batcher import Batcher
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import ScriptedEnv, ScriptedFault
from ebrl.sim.group import EnvGroup
from ebrl.sim.programs import rollout
from ebrl.sim.vector import VectorGroup
from ebrl.sim.vector_context import VectorContext
from ebrl.train.evaluate import evaluate
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner, scripted_spec, the_failure, training, virtually
from tests.test_memory import Counter as CountingPolicy
from tests.test_memory import assert_remembered
from tests.vectors import batched_spec, lengths, vector_training

VARIED = lengths(3, 9)
PER_SLOT = {"sim": lambda n, rng: 0.01 * n, "gen": lambda n, rng: 0.01 * n, "train": lambda n, rng: 0.05}


def seen(decisions: Iterable[Decision]) -> dict[tuple[int, int], Any]:
    """Return what is to be the same whoever simulates, by environment and decision."""
    return {
        (d.env, d.index): (bytes_of(d.obs), d.out.action.tobytes(), d.rewards, d.episode, d.terminated, d.truncated)
        for d in decisions
    }


def bytes_of(obs: Observation) -> bytes:
    assert not isinstance(obs, dict)
    return obs.tobytes()


def assert_same(one: dict[Any, Any], other: dict[Any, Any], least: int) -> None:
    both = one.keys() & other.keys()
    assert len(both) >= least
    assert {key: one[key] for key in both} == {key: other[key] for key in both}


# Time.


@pytest.mark.parametrize(("num_slots", "num_groups", "cycle_s"), [(8, 1, 0.16), (4, 2, 0.08), (4, 1, 0.08)])
def test_two_simulators_of_half_the_slots_take_half_the_time(num_slots: int, num_groups: int, cycle_s: float) -> None:
    async def main() -> float:
        spec = batched_spec(num_slots, length=1000)
        num = num_slots * num_groups
        machine = VirtualMachine({**PER_SLOT, "train": lambda n, rng: 0.0})
        async with vector_training(spec, machine, batch_size=num, updates=21, max_lag=9, num_groups=num_groups) as s:
            await anext(s.trainer)
            began_s = asyncio.get_running_loop().time()
            await s.run()
            return (asyncio.get_running_loop().time() - began_s) / 20

    assert run_virtual(main()) == pytest.approx(cycle_s)


@pytest.mark.parametrize(("threshold", "rows"), [(1, {4}), (2, {8})])
def test_a_batch_takes_as_many_simulators_as_make_it_worth_launching(threshold: int, rows: set[int]) -> None:
    trace = Trace()

    async def main() -> None:
        batcher = Batcher(threshold=threshold, max_wait_s=1.0)
        machine = VirtualMachine(PER_SLOT)
        async with vector_training(
            batched_spec(length=5), machine, batcher=batcher, trace=trace, max_lag=4, updates=3
        ) as s:
            await s.run()

    run_virtual(main())
    batches = [span for span in trace.spans if span.name == "batch"]
    assert {span.args["n"] for span in batches} == rows


def test_one_steps_while_the_actions_of_the_other_are_chosen() -> None:
    trace = Trace()

    async def main() -> None:
        machine = VirtualMachine(PER_SLOT)
        async with vector_training(batched_spec(length=50), machine, trace=trace, max_lag=9, updates=3) as s:
            await s.run()

    run_virtual(main())
    steps = [span for span in trace.spans if span.name == "step"][4:]
    assert all(before.track != after.track for before, after in pairwise(steps))


# What is recorded.


@virtually
async def test_the_same_trajectories_as_single_environments_in_any_number_of_groups() -> None:
    single = scripted_spec(length=VARIED)
    async with training(single, count=8, batch_size=16, updates=8, seed=3) as s:
        async for _ in s.trainer:
            pass
        expected = seen(s.learner.decisions)
    for num_slots, num_groups in ((8, 1), (4, 2), (2, 4), (1, 8)):
        spec = batched_spec(num_slots, length=VARIED)
        async with vector_training(spec, updates=8, seed=3, num_groups=num_groups) as v:
            assert_same(seen(await v.run()), expected, 100)


@virtually
async def test_truncated_episodes_end_in_what_was_seen_last() -> None:
    async with vector_training(batched_spec(length=3), updates=6, batch_size=16) as s:
        await s.run()
        segments = [segment for batch in s.learner.batches for segment in batch.segments if segment.reason == "end"]
    assert len(segments) > 10
    for segment in segments:
        last = segment.decisions[-1]
        assert last.truncated
        env = ScriptedEnv(3, 2, length=3)
        env.reset(seed=episode_seed(0, segment.env, last.episode))
        own = [d for d in s.learner.decisions if (d.env, d.episode) == (segment.env, last.episode)]
        for decision in sorted(own, key=lambda d: d.index):
            obs = env.step(decision.out.action[0])[0]
        assert np.array_equal(obs, np.asarray(segment.last_obs))


@virtually
async def test_chunks_end_with_the_episode_of_their_slot_and_others_go_on() -> None:
    one = await returns_of(EnvGroup, scripted_spec(length=VARIED, terminates=True), horizon=4, count=4)
    many = await returns_of(VectorGroup, batched_spec(4, length=VARIED, terminates=True), horizon=4, num_groups=1)
    assert many == one


async def returns_of(kind: Any, spec: EnvSpec, *, horizon: int = 1, num: int = 11, **group: Any) -> list[Any]:
    async with Runtime(VirtualMachine(PER_SLOT)) as rt:
        gen = rt.start(Generator(ScriptedPolicy(spec, horizon=horizon), deterministic=True))
        envs = rt.start(kind(spec, actor=gen, **group))
        episodes = (await evaluate(envs, range(num))).episodes
        episodes += (await evaluate(envs, [5, 5])).episodes  # after the first, on slots that were idle
    return [facts(episode) for episode in episodes]


def facts(e: Episode) -> tuple[Any, ...]:
    return e.seed, e.episode, e.total_reward, e.num_steps, e.num_decisions, e.success, e.task


@pytest.mark.parametrize(("num_slots", "num_groups"), [(4, 2), (16, 1), (1, 1), (3, 3)])
def test_an_evaluation_gives_the_same_returns_for_the_same_seeds(num_slots: int, num_groups: int) -> None:
    one = run_virtual(returns_of(EnvGroup, scripted_spec(length=VARIED), count=3))
    many = run_virtual(returns_of(VectorGroup, batched_spec(num_slots, length=VARIED), num_groups=num_groups))
    assert many == one


def test_what_idle_slots_do_is_not_shown() -> None:
    shown: list[list[bool]] = []

    async def program(env: VectorContext) -> None:
        obs, _ = await env.reset()
        await env.step((await env.act(obs)).action)
        obs, _ = await env.reset()  # leaves four episodes, and there is one more
        while True:
            result = await env.step((await env.act(obs)).action)
            shown.append([rewards != () for rewards in result.rewards])
            assert not (result.terminated | result.truncated)[1:].any()
            obs = result.obs
            if env.needs_reset.any():
                obs, _ = await env.reset(env.needs_reset)

    async def main() -> None:
        spec = batched_spec(4, length=3)
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec), deterministic=True))
            envs = rt.start(VectorGroup(spec, actor=gen, num_groups=1, program=program))
            assert [e.num_steps for e in await envs.run_episodes(range(5))] == [1, 1, 1, 1, 3]
            assert envs.env_steps == 7

    run_virtual(main())
    assert shown == [[True, False, False, False]] * 3


@virtually
async def test_each_simulator_has_a_task_and_all_run_all_seeds() -> None:
    specs = [batched_spec(2, length=3, task="short"), batched_spec(2, length=5, task="long")]
    async with Runtime(VirtualMachine({})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(specs[0]), deterministic=True))
        envs = rt.start(VectorGroup(specs, actor=gen, num_groups=3))
        report = await evaluate(envs, range(5))
        assert envs.tasks == ["short", "short", "long", "long", "short", "short"]
    assert [(e.task, e.num_steps, e.seed) for e in report.episodes] == [
        row for seed in range(5) for row in (("short", 3, seed), ("long", 5, seed))
    ]
    async with vector_training(specs, updates=3, max_lag=2) as s:
        async for update in s.trainer:
            assert update.tasks == ("short", "long")


@virtually
async def test_what_is_remembered_goes_from_decision_to_decision_of_a_slot() -> None:
    spec = batched_spec(4, length=VARIED)
    learner = RecordingLearner(CountingPolicy(spec), 16)
    async with Runtime(VirtualMachine(PER_SLOT)) as rt:
        gen = rt.start(Generator(learner.policy))
        envs = rt.start(VectorGroup(spec, actor=gen))
        async for _ in rt.start(Trainer(envs, learner, updates=8)):
            pass
    assert len({d.episode for d in learner.decisions}) > 2
    assert_remembered(learner.decisions)


@pytest.mark.parametrize("how", [np.copy, lambda obs: obs + np.float32(1)])
def test_observations_that_are_not_the_simulators_are_told_once(
    how: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def program(env: VectorContext) -> None:
        obs, _ = await env.reset()
        while True:
            obs = (await env.step((await env.act(how(obs))).action)).obs
            if env.needs_reset.any():
                obs, _ = await env.reset(env.needs_reset)

    async def main() -> None:
        async with vector_training(batched_spec(4, length=VARIED), updates=3, program=program) as s:
            await s.run()

    run_virtual(main())
    assert len(caplog.messages) == (how is not np.copy)
    assert all("shows its policy other observations than the simulator's" in told for told in caplog.messages)


# Credit.


@pytest.mark.parametrize(("batch_size", "max_lag"), [(8, 0), (10, 0), (3, 0), (3, 1), (5, 2), (16, 1), (100, 0)])
def test_any_batch_size_goes_with_any_number_of_slots(batch_size: int, max_lag: int) -> None:
    most = 0

    async def main() -> None:
        nonlocal most
        spec = batched_spec(4, length=VARIED)
        async with vector_training(spec, VirtualMachine(PER_SLOT), batch_size=batch_size, max_lag=max_lag) as s:
            async for report in s.trainer:
                ledger = s.envs.admission.ledger()
                assert ledger.balanced
                assert report.lag_max <= max_lag
                most = max(most, ledger.started - ledger.trained - sum(ledger.dropped.values()))
            if batch_size % 4 == 0:
                assert ledger.dropped == {}

    run_virtual(main())
    assert most <= (max_lag + 1) * batch_size + 3


def batches_of(machine: Machine) -> list[Any]:
    async def main() -> list[Any]:
        spec = batched_spec(4, length=VARIED)
        async with vector_training(spec, machine, deterministic=True, max_lag=0, batch_size=24, updates=5) as s:
            await s.run()
            for batch in s.learner.batches:
                assert Counter(d.env for d in batch.decisions) == dict.fromkeys(range(8), 3)
            return [
                [(d.env, d.index, d.rewards, bytes_of(d.obs)) for d in batch.decisions] for batch in s.learner.batches
            ]

    return run_virtual(main())


def test_deterministic_mode_depends_on_no_time() -> None:
    slow = VirtualMachine({"sim": lambda n, rng: rng.exponential(0.1), "gen": lambda n, rng: rng.exponential(0.1)})
    assert batches_of(VirtualMachine({})) == batches_of(slow)


@pytest.mark.parametrize("deterministic", [False, True])
def test_groups_are_slots_with_equal_seeds(deterministic: bool) -> None:
    async def main() -> None:
        spec, rule = batched_spec(4, length=VARIED), GroupRule()
        machine = VirtualMachine(PER_SLOT)
        lag = 0 if deterministic else 2
        async with vector_training(
            spec, machine, rule=rule, group_size=2, batch_size=60, max_lag=lag, updates=5, deterministic=deterministic
        ) as s:
            decisions = await s.run()
            assert all(segment.advantage is not None for batch in s.learner.batches for segment in batch.segments)
        first: dict[tuple[int, int], Decision] = {}
        for decision in decisions:
            key = decision.env, decision.episode
            if key not in first or decision.index < first[key].index:
                first[key] = decision
        pairs = [(d, first[env + 1, e]) for (env, e), d in first.items() if env % 2 == 0 and (env + 1, e) in first]
        assert len(pairs) > 5
        assert all(bytes_of(one.obs) == bytes_of(other.obs) for one, other in pairs)

    run_virtual(main())


# The end, and what goes wrong.


@pytest.mark.parametrize("at_s", [0.0, 0.02, 0.05, 0.13, 0.21, 0.4])
def test_it_can_be_stopped_at_any_time(at_s: float) -> None:
    async def main() -> None:
        spec = batched_spec(4, length=VARIED)
        async with vector_training(spec, VirtualMachine(PER_SLOT), batch_size=100) as s:
            await asyncio.sleep(at_s)
            await s.runtime.stop(s.envs)
            ledger = s.envs.admission.ledger()
            assert ledger.balanced
            assert ledger.in_flight == 0
            with pytest.raises(Closed, match="the environments or their trainer have ended"):
                await anext(s.trainer)

    run_virtual(main())


async def looks_at_done(env: Any) -> None:
    await env.reset()
    while not env.done:
        pass


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            looks_at_done,
            r"a batched simulator has 4 slots, and the program asks for the `done` of one",
        ),
        (lambda env: None, "the program returned NoneType and no coroutine"),
    ],
)
def test_programs_of_single_environments_are_told_so(program: Any, message: str) -> None:
    async def main() -> None:
        async with vector_training(batched_spec(), program=program, num_groups=1) as s:
            await s.run()

    error = the_failure(main())
    assert isinstance(error, ProgramError)
    assert str(error).count("\n") == 0
    with pytest.raises(ProgramError, match=message):
        raise error


async def unready(env: VectorContext) -> None:
    await env.act(np.zeros((4, 3), np.float32))


async def unasked(env: VectorContext) -> None:
    await env.reset()
    await env.step(np.zeros((4, 2), np.float32))


async def masked_wrongly(env: VectorContext) -> None:
    await env.reset()
    await env.reset([True, False])


async def unpaid(env: VectorContext) -> None:
    obs, _ = await env.reset()
    await env.act(obs)
    env.reward(1.0)


async def at_once(env: VectorContext) -> None:
    obs, _ = await env.reset()
    async with asyncio.TaskGroup() as group:
        group.create_task(env.act(obs))
        group.create_task(env.act(obs))


async def idle(env: VectorContext) -> None:
    """Does nothing."""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (unready, r"act\(\): slots \[0, 1, 2, 3\] have no running episode .*: call reset\(env.needs_reset\) first"),
        (unasked, r"step\(\) without open decisions \(simulator 0 with envs 0 to 3 version 0 lane envs-0\)"),
        (masked_wrongly, r"expected a mask of 4 bools, one of them True at least, got array\(\[ True, False\]\)"),
        (unpaid, r"reward\(\) without an executed decision"),
        (at_once, r"act\(\) while act\(\) of the same simulator is running"),
        (idle, "the program returned without a single call of its environment"),
    ],
)
def test_rules_of_programs(program: Any, message: str) -> None:
    async def main() -> None:
        async with vector_training(batched_spec(), program=program, num_groups=1) as s:
            await s.run()

    with pytest.raises(ProgramError, match=message):
        raise the_failure(main())


def test_what_does_not_go_together() -> None:
    gen = Generator(ScriptedPolicy(batched_spec()))
    spec: Any
    for spec, group, message in (
        (scripted_spec(), {}, r"scripted is no batched simulator: use EnvGroup, or env_spec\(..., num_slots=8\)"),
        ([batched_spec(2, task="a"), batched_spec(3, task="b")], {}, "scripted has 2 slots and scripted has 3"),
        (batched_spec(), {"group_size": 3}, "4 slots are no multiple of group_size=3"),
        (batched_spec(), {"num_groups": 0}, "num_groups must be a whole number of at least 1, got 0"),
        (batched_spec(), {"num_groups": None}, "num_groups must be a whole number of at least 1, got None"),
        (batched_spec(), {"threads": "2"}, "threads must be a whole number of at least 1, got '2'"),
        (batched_spec(), {"segment_length": 1.5}, "segment_length must be a whole number of at least 1, got 1.5"),
        (batched_spec(), {"failures": "drop"}, r"failures must be a FailurePolicy, .* or None, got 'drop'"),
        ("scripted", {}, r"spec must be an EnvSpec, as env_spec\(...\) returns, or several of them, got 'scripted'"),
        (batched_spec(), {"program": rollout}, r"program rollout drives one environment \(EnvContext\)"),
        (replace(batched_spec(), slot_seeds=False), {"group_size": 2}, "its episodes cannot begin alike"),
    ):
        with pytest.raises(ConfigError, match=message):
            VectorGroup(spec, actor=gen, **group)
    with pytest.raises(ConfigError, match=r"is a batched simulator of 4 slots, .*: use VectorGroup"):
        EnvGroup(batched_spec(), actor=gen, count=4)


def test_a_recorded_run_is_refused(tmp_path: Any) -> None:
    async def main() -> None:
        async with Runtime(VirtualMachine({}), record=tmp_path / "events.jsonl") as rt:
            gen = rt.start(Generator(ScriptedPolicy(batched_spec())))
            rt.start(VectorGroup(batched_spec(), actor=gen))

    with pytest.raises(ConfigError, match="a recorded run has no batched simulators"):
        raise the_failure(main())


def test_an_error_says_where_it_was() -> None:
    async def main() -> None:
        spec, failures = batched_spec(2, length=50, faults={7: "raise"}), FailurePolicy("raise")
        async with vector_training(spec, num_groups=1, failures=failures) as s:
            await s.run()

    error = the_failure(main())
    assert isinstance(error, ScriptedFault)
    (note,) = error.__notes__
    assert note.startswith("simulator 0 with envs 0 to 1 version 0 lane envs-0 last action [[[")


class Blinded(ScriptedPolicy):
    """Has no answer to an observation above 0.5."""

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        out.action = out.action.where(batch["state"][:, 0, None, None] < 0.5, torch.nan)
        return out


def test_the_slot_that_got_no_answer_is_named() -> None:
    async def main() -> None:
        spec = batched_spec(8)
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(Blinded(spec)))
            envs = rt.start(VectorGroup(spec, actor=gen, num_groups=1))
            await envs.run_episodes(range(8))

    place = r"env \d \(slot \d of simulator 0\) episode 0 decision \d+ seed \d version 0 lane envs-0"
    with pytest.raises(PolicyError, match=f"an action that is not finite for {place}"):
        raise the_failure(main())


def test_a_program_may_catch_an_error_and_go_on_with_a_reset() -> None:
    async def stubborn(env: VectorContext) -> None:
        obs, _ = await env.reset()
        while True:
            try:
                if env.needs_reset.any():
                    obs, _ = await env.reset(env.needs_reset)
                obs = (await env.step((await env.act(obs)).action)).obs
            except ScriptedFault:
                assert env.needs_reset.all()

    async def main() -> None:
        spec, failures = batched_spec(2, length=6, faults={15: "raise"}), FailurePolicy(per_env=None)
        async with vector_training(spec, program=stubborn, num_groups=1, updates=6, failures=failures) as s:
            await s.run()
            assert s.envs.admission.ledger().dropped["lost"] % 2 == 0
            assert s.envs.admission.ledger().dropped["lost"] >= 4

    run_virtual(main())


def test_programs_may_do_other_things() -> None:
    async def busy(env: VectorContext) -> None:
        obs, info = await env.reset()
        assert info == {}
        await env.act(obs)  # never stepped
        result = await env.step((await env.act(obs)).action)
        env.reward(np.arange(4.0))
        assert await env.call(type) is SyncVectorEnv
        out = await env.act(result.obs)
        assert out.version == env.version
        await env.intervene(out.action[:, 0])
        obs, _ = await env.reset([True, False, True, False])
        await env.step((await env.act(obs)).action)

    async def main() -> None:
        spec = batched_spec(4, length=50)
        async with vector_training(spec, program=busy, num_groups=1, batch_size=12, observe=lambda obs: obs * 2) as s:
            decisions = await s.run()
            dropped = s.envs.admission.ledger().dropped
            assert dropped["unexecuted"] >= 4
            assert dropped["intervention"] >= 4
        bonus = [d.rewards[-1] for d in decisions if d.env == 3 and d.index % 4 == 1]
        assert all(2 < reward <= 3 for reward in bonus)

    run_virtual(main())


@pytest.mark.parametrize(
    ("parts", "executed"),
    [([(0, 4)], None), ([(0, 2), (2, 3)], None), ([(1, 3)], (1, 2)), ([(2, 4), (0, 1)], (0, 2, 3))],
)
def test_learning_is_from_the_actions_that_were_executed(
    parts: list[tuple[int, int]], executed: tuple[int, ...] | None
) -> None:
    async def program(env: VectorContext) -> None:
        obs, _ = await env.reset()
        while True:
            out = await env.act(obs)
            for first, last in parts:
                obs = (await env.step(out.action[:, first:last])).obs

    async def main() -> None:
        async with vector_training(batched_spec(4, length=500), program=program, horizon=4) as s:
            decisions = await s.run()
        assert {decision.executed for decision in decisions} == {executed}
        assert {decision.num_actions for decision in decisions} == {sum(last - first for first, last in parts)}

    run_virtual(main())


@pytest.mark.slow
def test_in_threads_it_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(ScriptedEnv):
        def close(self) -> None:
            raise RuntimeError("no")

    async def main(machine: Machine) -> dict[Any, Any]:
        spec = batched_spec(4, length=VARIED, make=lambda: Sticky(3, 2, length=VARIED))
        async with vector_training(spec, machine, updates=4) as s:
            decisions = await s.run()
            statistics = s.envs.statistics()
            assert statistics["busy_s"] > 0 or not machine.real
            assert s.envs.reading().num_envs == 2
        return seen(decisions)

    real = asyncio.run(main(LocalMachine(2)))
    assert_same(real, run_virtual(main(VirtualMachine({}))), 30)
    assert "a simulator could not be closed: RuntimeError('no')" in caplog.text


def test_a_simulator_that_breaks_its_rules_is_named() -> None:
    class Short(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            return super().step(actions)[:4]

    async def main() -> None:
        spec = batched_spec(2, length=5)
        broken = replace(spec, make=lambda: Short([spec.make().env_fns[0]] * 2, autoreset_mode="Disabled"))
        async with vector_training(broken, num_groups=1) as s:
            await s.run()

    with pytest.raises(
        SimulatorError, match=r"step: expected \(observations, rewards, terminated, truncated, info\), got"
    ):
        raise the_failure(main())
