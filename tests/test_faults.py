"""Simulators that fail, in virtual time: that environment alone is built again, and the others notice nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from ebrl.core.admission import Ledger
from ebrl.core.errors import CallTimeout, ConfigError, InvalidAction, SimulatorError
from ebrl.core.records import GroupRule, Segment
from ebrl.core.rng import episode_seed
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine, spend
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import CLOSE, CONSTRUCTION, ScriptedEnv, ScriptedFault
from ebrl.sim.group import EnvGroup
from ebrl.sim.programs import rollout
from ebrl.sim.simulator import Missing
from ebrl.train.evaluate import evaluate
from ebrl.train.metrics import flatten
from tests.helpers import assert_sound, leaves, recording, scripted_spec, the_failure, training, virtually

Faults = Mapping[int, Any]
LENGTH = 4
POLICY = FailurePolicy(build_s=40.0, reset_s=20.0, call_s=10.0)


class Recorded(ScriptedEnv):
    """Writes down with which seeds it was reset, and for how many steps each of them went on."""

    def __init__(self, log: list[tuple[int, int]], **options: Any) -> None:
        super().__init__(3, 2, length=LENGTH, **options)
        self.log = log

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.log.append((seed or 0, 0))
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.log[-1] = self.log[-1][0], self.log[-1][1] + 1
        return result


class Fleet:
    """Makes environments one after the other; the first ones may have faults."""

    def __init__(self, *faults: Faults) -> None:
        self.logs: list[list[tuple[int, int]]] = []
        self._faults = iter(faults)

    def __call__(self) -> Recorded:
        log: list[tuple[int, int]] = []
        self.logs.append(log)
        return Recorded(log, faults=next(self._faults, {}))


def seeds(env: int, *episodes: int) -> list[int]:
    return [episode_seed(0, env, episode) for episode in episodes]


def machine(step_s: float = 1.0) -> VirtualMachine:
    return VirtualMachine({"sim": lambda n, rng: step_s}, num_cores=512)


async def train(fleet: Callable[[], Any], count: int, *, updates: int = 8, **group: Any) -> tuple[EnvGroup, Ledger]:
    """Train `updates` batches of as many decisions as an episode of all has."""
    spec = scripted_spec(make=fleet)
    options = {"failures": POLICY, "batch_size": LENGTH * count, "max_lag": 2, **group}
    async with training(spec, machine(), count=count, updates=updates, **options) as stage:
        reports = [report async for report in stage.trainer]
        assert_sound(stage.envs.admission.ledger())
        assert reports[-1].faults == stage.envs.faults
        assert flatten(reports[-1]).get("faults/restarts", 0) == stage.envs.faults["restarts"]
        return stage.envs, stage.envs.admission.ledger()


FAULTS: dict[str, Faults] = {
    "raises in a reset": {0: "raise"},
    "raises in a later reset": {LENGTH + 1: "raise"},
    "raises in a step": {3: "raise"},
    "raises in its constructor": {CONSTRUCTION: "raise"},
    "NaN": {2: "nan"},
    "NaN in a reset": {0: "nan"},
    "another shape": {2: "shape"},
    "another dtype": {2: "dtype"},
    "hangs in a reset": {0: "hang"},
    "hangs in a step": {2: "hang"},
    "hangs in its constructor": {CONSTRUCTION: "hang"},
    "raises when closed after it raised": {2: "raise", CLOSE: "raise"},
    "hangs when closed after it raised": {2: "raise", CLOSE: "hang"},
}


@pytest.mark.parametrize("count", [1, 2, 19])
@pytest.mark.parametrize("name", FAULTS)
def test_one_that_fails_is_built_again_and_the_others_go_on_at_their_pace(name: str, count: int) -> None:
    faults, fleet = FAULTS[name], Fleet(FAULTS[name])

    async def main() -> EnvGroup:
        spec = scripted_spec(make=fleet)
        async with recording(rollout, spec=spec, machine=machine(), count=count, batch_size=9999, failures=POLICY) as e:
            await asyncio.sleep(100.5)
            assert_sound(e.admission.ledger())
            return e

    envs = run_virtual(main())
    hangs = "hangs" in name
    twice = CLOSE in faults and hangs  # first it raised, and then it could not be replaced
    assert envs.faults == {"restarts": 1 + twice, "dropped_envs": 0, "leaked_threads": int(hangs)}
    others = [log for log in fleet.logs if log[:1] and log[0][0] in seeds_of_first(count)]
    assert len(others) == count - 1
    for env, log in enumerate(others, 1):  # episode after episode, without a pause
        assert [seed for seed, _ in log] == seeds(env, *range(21))
    first, again = fleet.logs[0], fleet.logs[-1]
    began = len(first)  # episodes of the one that failed
    assert [seed for seed, _ in again] == seeds(0, *range(began, began + len(again)))
    assert len(again) > 5


def seeds_of_first(count: int) -> set[int]:
    return {episode_seed(0, env, 0) for env in range(1, count)}


@virtually
async def test_what_was_executed_is_trained_and_what_was_lost_is_booked() -> None:
    spec = scripted_spec(make=Fleet({3: "raise"}))
    async with recording(rollout, spec=spec, failures=POLICY) as envs:
        segments: list[Segment] = []
        while not segments:
            await asyncio.sleep(0.5)
            segments += envs.take_segments()
        (segment,) = segments
        assert segment.reason == "lost"
        assert [decision.index for decision in segment.decisions] == [0, 1]
        assert_sound(envs.admission.ledger())
        assert envs.admission.ledger().dropped == {"lost": 1}
        assert envs.take_episodes() == []
        await asyncio.sleep(LENGTH + 2)
        (later,) = envs.take_segments()
        assert later.decisions[0].episode == 1
        assert later.decisions[0].index == 3
        (episode,) = envs.take_episodes()
        assert (episode.episode, episode.seed) == (1, episode_seed(0, 0, 1))


@virtually
async def test_restarts_in_a_row_wait_longer_and_an_episode_ends_the_row() -> None:
    built: list[float] = []
    fleet = Fleet({1: "raise"}, {0: "raise"}, {CONSTRUCTION: "raise"}, {}, {1: "raise"})

    def make() -> Recorded:
        built.append(asyncio.get_running_loop().time())
        env = fleet()
        if len(built) == 4:
            env._faults[LENGTH + 2] = "raise"  # after a whole episode
        return env

    envs, _ = await train(make, 1)
    assert np.diff(built).tolist() == [2.0, 2.0, 2.0, 7.0, 3.0]
    assert envs.faults["restarts"] == 5


def test_a_constructor_that_takes_half_a_minute_holds_up_nobody() -> None:
    fleet = Fleet()
    numbers = itertools.count()

    def make() -> Recorded:
        if next(numbers) == 0:
            spend(30.0)
        return fleet()

    async def main() -> EnvGroup:
        async with training(
            scripted_spec(make=make), machine(), count=3, batch_size=99, max_lag=9, failures=POLICY
        ) as stage:
            await asyncio.sleep(29.0)
            assert [len(log) for log in fleet.logs] == [0, 6, 6]
            await asyncio.sleep(29.0)
            assert [len(log) for log in fleet.logs] == [6, 12, 12]
            return stage.envs

    assert run_virtual(main()).faults["restarts"] == 0


def spent(fleet: Callable[[], Any], *, count: int = 2, policy: FailurePolicy = POLICY, **group: Any) -> BaseException:
    return the_failure(train(fleet, count, failures=policy, **group))


def test_a_budget_that_is_spent_ends_the_run_and_says_where_and_why() -> None:
    policy = FailurePolicy(per_env=2, call_s=None)
    fleet = Fleet({2: "raise"}, {}, {2: "raise"}, {2: "raise"})
    error = spent(fleet, policy=policy, updates=100)
    assert isinstance(error, ScriptedFault)
    where, why = error.__notes__
    assert where.startswith(f"env 0 episode 2 decision 5 seed {episode_seed(0, 0, 2)} version ")
    assert "lane envs-0 last action [[" in where
    assert why == "env 0 was restarted 2 times within an hour, which is its budget: see FailurePolicy.per_env"


def test_the_budget_of_all_is_shared() -> None:
    fleet = Fleet({2: "raise"}, {3: "raise"})
    error = spent(fleet, policy=FailurePolicy(per_hour=1))
    assert "envs were restarted 1 times within an hour, which is the budget of all" in error.__notes__[1]


def test_a_hang_that_is_too_much_names_its_phase() -> None:
    error = spent(Fleet({2: "hang"}), policy=FailurePolicy(per_env=0, call_s=5.0))
    assert isinstance(error, CallTimeout)
    assert str(error) == "a step has not ended within 5 s"


def test_raising_ends_the_run_as_it_is_and_hangs_too() -> None:
    error = spent(Fleet({2: "raise"}), policy=FailurePolicy("raise"))
    assert isinstance(error, ScriptedFault)
    (where,) = error.__notes__
    assert where.startswith("env 0 episode 0 decision 1 ")
    assert isinstance(spent(Fleet({2: "hang"}), policy=FailurePolicy("raise", call_s=5.0)), CallTimeout)
    assert isinstance(spent(Fleet({CONSTRUCTION: "raise"}), policy=FailurePolicy("raise")), ScriptedFault)


def test_without_deadlines_a_hang_is_waited_for() -> None:
    class Slow(ScriptedEnv):
        def step(self, action: Any) -> Any:
            spend(1e5)
            return super().step(action)

    async def main() -> float:
        await train(
            partial(Slow, 3, 2, length=LENGTH),
            2,
            failures=FailurePolicy(build_s=None, reset_s=None, call_s=None),
            updates=1,
        )
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) > 1e5


# Lost while nobody waits.


@virtually
async def test_one_that_is_lost_while_its_program_is_elsewhere_is_counted() -> None:
    async def program(env: EnvContext) -> None:
        await rollout(env)
        if env.index == 1:
            await asyncio.sleep(60.0)

    fleet = Fleet({3 * LENGTH: "hang"})
    async with recording(
        program, spec=scripted_spec(make=fleet), machine=machine(), count=2, batch_size=999, lanes=1, failures=POLICY
    ) as envs:
        await asyncio.sleep(150.0)
        assert [len(log) for log in fleet.logs[:2]] == [3, 1], "the second shared the lane of the first"
        assert envs.faults == {"restarts": 2, "dropped_envs": 0, "leaked_threads": 1}
        assert [len(times) for times in envs.recovery._failures._of_env] == [1, 0]
        assert len(fleet.logs) == 4


def test_one_that_hangs_when_its_program_has_left_the_call_is_charged() -> None:
    async def program(env: EnvContext) -> None:
        try:
            async with asyncio.timeout(6.0):
                await rollout(env)
        except TimeoutError:
            await asyncio.sleep(50.0)

    error = spent(Fleet({2: "hang"}), policy=FailurePolicy(per_env=0, call_s=10.0), program=program, count=1)
    assert isinstance(error, CallTimeout)
    assert error.__notes__[0].startswith("env 0 episode 0 decision 1 seed ")
    error = spent(Fleet({2: "hang"}), policy=FailurePolicy("raise", call_s=10.0), program=program, count=1)
    assert isinstance(error, SimulatorError)
    assert isinstance(error.__cause__, CallTimeout)


# Dropped.


def test_one_that_is_dropped_ends_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet({}, {2: "raise"}, {})

    async def main() -> EnvGroup:
        envs, ledger = await train(fleet, 3, failures=FailurePolicy("drop"))
        assert ledger.dropped["lost"] == 1
        assert envs.reading().num_envs == 2
        return envs

    envs = run_virtual(main())
    assert envs.faults == {"restarts": 0, "dropped_envs": 1, "leaked_threads": 0}
    assert len(fleet.logs) == 3
    assert fleet.logs[1] == [(episode_seed(0, 1, 0), 1)]
    assert "env 1 is dropped, 2 go on: ScriptedFault('scripted at call 2')" in caplog.text


def test_the_last_one_is_an_error() -> None:
    error = spent(Fleet({2: "raise"}, {4: "raise"}), policy=FailurePolicy("drop"))
    assert isinstance(error, ScriptedFault)
    assert error.__notes__[1] == "env 1 was the last one that had not failed"


@pytest.mark.parametrize("options", [{"sampling": "quota"}, {"deterministic": True, "max_lag": 0}])
def test_nobody_can_be_dropped_where_all_are_needed(options: dict[str, Any]) -> None:
    async def main() -> None:
        async with training(scripted_spec(), failures=FailurePolicy("drop"), **options):
            pass

    error = the_failure(main())
    assert isinstance(error, ConfigError)
    assert 'FailurePolicy("drop") does not go with' in str(error)


# Programs.


@virtually
async def test_a_program_may_catch_the_error_and_reset_by_itself() -> None:
    caught: list[str] = []

    async def program(env: EnvContext) -> None:
        while True:
            try:
                obs, _ = await env.reset()
                while not env.done:
                    obs = (await env.step((await env.act(obs)).action)).obs
            except ScriptedFault as error:
                assert env.done
                caught.append(str(error))

    fleet = Fleet({2: "raise"})
    envs, _ = await train(fleet, 1, program=program)
    assert caught == ["scripted at call 2"]
    assert envs.faults["restarts"] == 1
    assert fleet.logs[1][0][0] == episode_seed(0, 0, 1)


@virtually
async def test_what_raises_in_a_call_that_a_program_catches_is_no_failure() -> None:
    def fails(env: Any) -> None:
        raise KeyError("no plan")

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        with pytest.raises(KeyError):
            await env.call(fails)
        while not env.done:
            obs = (await env.act_step(obs)).obs

    fleet = Fleet()
    envs, _ = await train(fleet, 2, program=program)
    assert envs.faults["restarts"] == 0
    assert len(fleet.logs) == 2


@virtually
async def test_what_raises_in_a_call_that_nobody_catches_is_one() -> None:
    fleet = Fleet()

    def fails(env: Any) -> None:
        if env.log is fleet.logs[0]:
            raise KeyError("no plan")

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        obs = (await env.act_step(obs)).obs
        await env.call(fails)
        while not env.done:
            obs = (await env.act_step(obs)).obs

    envs, ledger = await train(fleet, 2, program=program)
    assert envs.faults["restarts"] == 1
    assert "lost" not in ledger.dropped, "what came before is whole"
    assert fleet.logs[2][0][0] == episode_seed(0, 0, 1)


@virtually
async def test_a_task_group_of_a_program_may_carry_the_error() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            async with asyncio.TaskGroup() as group:
                stepping = group.create_task(env.act_step(obs))
            obs = stepping.result().obs

    envs, _ = await train(Fleet({2: "raise"}), 2, program=program)
    assert envs.faults["restarts"] == 1


def test_errors_of_a_program_end_the_run_also_those_after_a_failure() -> None:
    async def own(env: EnvContext) -> None:
        await env.reset()
        raise KeyError("mine")

    async def after(env: EnvContext) -> None:
        try:
            await rollout(env)
        except ScriptedFault:
            raise KeyError("mine") from None

    for program in (own, after):
        error = spent(Fleet({2: "raise"}), program=program, count=1)
        assert isinstance(error, KeyError)


def test_an_action_that_is_no_number_is_the_programs_fault() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        await env.step((await env.act(obs)).action * math.nan)

    error = spent(Fleet(), program=program, count=1)
    assert isinstance(error, InvalidAction)
    assert len(error.__notes__) == 1, "where, and nothing about restarts"


@virtually
async def test_a_reset_that_is_cancelled_while_its_simulator_is_built_is_not_built_twice() -> None:
    fleet, numbers = Fleet({2: "raise"}, {2 * LENGTH: "raise"}), itertools.count()

    def make() -> Recorded:
        if next(numbers) == 1:
            spend(25.0)
        return fleet()

    async def program(env: EnvContext) -> None:
        while True:
            try:
                async with asyncio.timeout(2.0):
                    obs, _ = await env.reset()
                break
            except TimeoutError:
                pass
        while not env.done:
            obs = (await env.act_step(obs)).obs

    envs, _ = await train(make, 1, program=program)
    assert envs.faults["restarts"] == 2
    assert len(fleet.logs) == 3, "and again when that one fails"


# Lanes that are shared.


@virtually
async def test_all_simulators_of_a_lane_that_is_lost_are_built_again_and_one_is_charged() -> None:
    fleet = Fleet({2: "hang"})
    policy = FailurePolicy(call_s=10.0, per_env=1)
    envs, _ = await train(fleet, 4, lanes=2, failures=policy, updates=30)
    assert envs.faults == {"restarts": 2, "dropped_envs": 0, "leaked_threads": 1}
    assert len(fleet.logs) == 6
    assert [seed for seed, _ in fleet.logs[1]] == seeds(1, *range(len(fleet.logs[1]))), "of the other lane"


def test_a_lane_that_is_lost_gives_its_core_back() -> None:
    async def main() -> None:
        spec = scripted_spec(make=Fleet({2: "hang"}, {2: "hang"}))
        two = VirtualMachine({"sim": lambda n, rng: 0.1}, num_cores=2)
        async with training(spec, two, count=4, failures=POLICY, updates=20) as stage:
            async for _ in stage.trainer:
                pass
            assert stage.envs.faults["leaked_threads"] == 2

    run_virtual(main())


# Storms, evaluations, groups.


@pytest.mark.parametrize("count", [1, 2, 19, 257])
def test_a_storm_in_which_every_call_may_fail(count: int) -> None:
    storm = {"raise": 0.01, "nan": 0.005, "hang": 0.005}
    updates = {1: 40, 2: 20, 19: 4, 257: 2}[count]

    async def main() -> tuple[EnvGroup, Ledger]:
        spec = scripted_spec(length=20, storm=storm)
        policy = FailurePolicy(call_s=5.0, reset_s=5.0, per_env=None, max_backoff_s=8.0)
        async with training(
            spec, machine(), count=count, batch_size=16 * count, updates=updates, failures=policy
        ) as stage:
            async for report in stage.trainer:
                assert_sound(stage.envs.admission.ledger())
                assert report.lag_max <= 1
            return stage.envs, stage.envs.admission.ledger()

    envs, ledger = run_virtual(main())
    started = ledger.started
    assert 0.005 * started < envs.faults["restarts"] < 0.05 * started
    assert 0 <= envs.faults["leaked_threads"] < envs.faults["restarts"]
    assert ledger.dropped["lost"] <= envs.faults["restarts"]


@pytest.mark.parametrize("action", ["restart", "drop"])
def test_an_evaluation_counts_every_seed_once_whatever_fails(action: Any) -> None:
    fleet = Fleet({2: "raise"}, {LENGTH + 1: "raise"}, {CONSTRUCTION: "raise"})

    async def main() -> Any:
        spec = scripted_spec(make=fleet)
        async with Runtime(machine()) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            envs = rt.start(EnvGroup(spec, actor=gen, count=5, failures=FailurePolicy(action)))
            report = await evaluate(envs, range(100, 120))
            assert envs.faults["restarts" if action == "restart" else "dropped_envs"] == 3
            return report

    report = run_virtual(main())
    assert [episode.seed for episode in report.episodes] == list(range(100, 120))
    assert all(episode.num_steps == LENGTH for episode in report.episodes)


def test_groups_with_a_member_that_failed_are_dropped_whole_and_the_next_go_on() -> None:
    async def main() -> None:
        spec = scripted_spec(make=Fleet({2: "raise"}, {}, {LENGTH + 1: "raise"}))
        async with training(
            spec, machine(), count=4, group_size=2, batch_size=16, updates=6, rule=GroupRule(), failures=POLICY
        ) as stage:
            reports = [report async for report in stage.trainer]
            assert_sound(stage.envs.admission.ledger())
            assert stage.envs.faults["restarts"] == 2
            assert reports[-1].dropped["incomplete"] > 0
            groups = {(d.episode, d.env // 2) for d in stage.learner.decisions}
            for episode, group in groups:
                envs = {d.env for d in stage.learner.decisions if (d.episode, d.env // 2) == (episode, group)}
                assert len(envs) == 2
            assert (0, 0) not in groups

    run_virtual(main())


def test_deterministic_runs_with_failures_are_repeatable() -> None:
    def run() -> list[tuple[int, int, int]]:
        async def main() -> list[tuple[int, int, int]]:
            spec = scripted_spec(length=7, storm={"raise": 0.05})
            policy = FailurePolicy(per_env=None)
            async with training(
                spec, machine(), count=4, batch_size=16, updates=10, max_lag=0, deterministic=True, failures=policy
            ) as stage:
                async for _ in stage.trainer:
                    pass
                assert stage.envs.faults["restarts"] > 0
                return [(d.env, d.episode, d.index) for d in stage.learner.decisions]

        return run_virtual(main())

    assert run() == run()


def test_restarts_are_told_and_then_rarely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ebrl")

    async def main() -> EnvGroup:
        envs, _ = await train(lambda: ScriptedEnv(3, 2, length=LENGTH, storm={"raise": 0.1}), 4, updates=40,
                              failures=FailurePolicy(per_env=None))  # fmt: skip
        return envs

    num = run_virtual(main()).faults["restarts"]
    told = [record.getMessage() for record in caplog.records]
    assert num > 32
    assert len(told) < 20
    assert told[0].startswith("envs: restart 1, in 0 s: ScriptedFault('scripted at call ")
    assert "[env " in told[0]


@virtually
async def closed_badly() -> None:
    spec = scripted_spec(faults={CLOSE: "raise"})
    async with training(spec, machine(), updates=2, count=2) as stage:
        async for _ in stage.trainer:
            pass


def test_closing_that_fails_at_the_end_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    closed_badly()
    assert caplog.messages == ["a simulator could not be closed: ScriptedFault('scripted at call 9')"] * 2


def test_a_simulator_that_is_not_there_raises() -> None:
    missing = Missing(SimulatorError("gone"))
    for call in (missing.reset, missing.step, missing.call):
        with pytest.raises(SimulatorError, match="gone"):
            call(1)
    missing.close()


def test_leaves_of_two_that_fail_at_once_are_one() -> None:
    error = spent(Fleet({2: "raise"}, {2: "raise"}), policy=FailurePolicy(per_env=0))
    assert list(leaves(error)) == [error]
