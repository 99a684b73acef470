"""Spare simulators in virtual time: environments do what they do without them, and wait less."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebrl.core.errors import CallTimeout, ConfigError
from ebrl.core.records import Decision, EnvSpec, GroupRule, Segment
from ebrl.core.rng import episode_seed
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine, spend
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import ScriptedEnv, ScriptedFault
from ebrl.sim.group import EnvGroup
from ebrl.sim.hosts import ThreadSlot
from ebrl.sim.placement import take_spare_memory
from ebrl.sim.programs import rollout
from ebrl.sim.spares import Spare, Spares
from ebrl.train.evaluate import evaluate
from tests.helpers import assert_sound, recording, scripted_spec, the_failure, training, virtually

pytestmark = pytest.mark.slow
RESET_S, STEP_S = 5.0, 1.0
POLICY = FailurePolicy(build_s=40.0, reset_s=20.0, call_s=10.0)
SPEC = scripted_spec()
Trajectories = dict[tuple[int, int], tuple[Any, ...]]


class World:
    """What all simulators of a test did, and what goes wrong in them.

    Attributes:
        faults: By seed, what the first reset with it does.
        builds: By number of the simulator, what its constructor does.
        resets: Seeds, in order.
        stepped: By seed, the simulators that it was stepped in.
        num_built: Simulators.
    """

    def __init__(self, faults: Mapping[int, str] | None = None, builds: Mapping[int, str] | None = None) -> None:
        self.faults = dict(faults or {})
        self.builds = dict(builds or {})
        self.resets: list[int] = []
        self.stepped: dict[int, set[Slow]] = {}
        self.num_built = 0

    def make(self) -> Slow:
        number, self.num_built = self.num_built, self.num_built + 1
        fail(self.builds.get(number))
        return Slow(self)


def fail(how: str | None) -> None:
    if how == "raise":
        raise ScriptedFault("scripted")
    if how == "hang":
        spend(1e7)


class Slow(ScriptedEnv):
    """Its resets take long; episodes have the length that their seed says."""

    def __init__(self, world: World, **options: Any) -> None:
        super().__init__(3, 2, **{"length": lambda rng: int(rng.integers(3, 20)), **options})
        self.world = world
        self.seed = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert seed is not None
        self.seed = seed
        self.world.resets.append(seed)
        fail(self.world.faults.pop(seed, None))
        spend(RESET_S)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.world.stepped.setdefault(self.seed, set()).add(self)
        spend(STEP_S)
        return super().step(action)


def slow_spec(world: World | None = None, **options: Any) -> EnvSpec:
    return scripted_spec(make=(world or World()).make, **options)


def machine(num_cores: int = 512, **options: Any) -> VirtualMachine:
    return VirtualMachine({"gen": lambda n, rng: 0.1}, num_cores=num_cores, **options)


def trajectories(decisions: list[Decision]) -> Trajectories:
    return {
        (d.env, d.index): (d.episode, d.obs.tobytes(), d.out.action.tobytes(), d.rewards, d.terminated, d.truncated)  # type: ignore[union-attr]
        for d in decisions
    }


def of(segments: list[Segment]) -> Trajectories:
    return trajectories([decision for segment in segments for decision in segment.decisions])


def assert_alike(some: Trajectories, more: Trajectories) -> None:
    """Environments have come to different places, on one way."""
    common = some.keys() & more.keys()
    assert len(common) > 0.5 * len(some)
    assert {key: some[key] for key in common} == {key: more[key] for key in common}


async def record(spec: Any, spares: int, *, seconds: float = 150.0, **group: Any) -> tuple[Trajectories, EnvGroup]:
    """Run for some time without credit that limits anything."""
    options = {"count": 16, "machine": machine(), "failures": POLICY, "batch_size": 10**9, **group}
    async with recording(rollout, spec=spec, spares=spares, **options) as envs:
        await asyncio.sleep(seconds)
        assert_sound(envs.admission.ledger())
        return of(envs.take_segments()), envs


def run(spec: Any, spares: int, **options: Any) -> tuple[Trajectories, EnvGroup]:
    return run_virtual(record(spec, spares, **options))


def used(envs: EnvGroup) -> float:
    """Return the part of the resets that environments did not do themselves."""
    now = envs.statistics()
    ahead = now["resets_ready"] + now["resets_waited"]
    return ahead / (ahead + now["resets_own"])


# The same, and sooner.


def test_environments_do_what_they_do_without_spares_and_more_of_it() -> None:
    found, envs = run(slow_spec(), 0, seconds=120.0)
    assert used(envs) == 0
    num_steps = envs.env_steps
    for spares, least, part in ((4, 1.1, 0.4), (16, 1.3, 0.85)):
        more, envs = run(slow_spec(), spares, seconds=120.0)
        assert_alike(found, more)
        assert envs.env_steps > least * num_steps
        assert used(envs) > part
        assert envs.statistics()["spares"] == spares


@pytest.mark.parametrize("spares", [1, 4, 16])
def test_with_several_tasks_a_spare_serves_those_of_its_own(spares: int) -> None:
    def specs() -> list[EnvSpec]:
        worlds = World(), World(), World()
        makes = [lambda world=world, k=k: Slow(world, success_above=k, length=4 + k) for k, world in enumerate(worlds)]
        return [scripted_spec(make=make, task=f"{k}") for k, make in enumerate(makes)]

    found, _ = run(specs(), 0, seconds=80.0)
    more, envs = run(specs(), spares, seconds=80.0)
    assert_alike(found, more)
    assert envs.statistics()["resets_ready"] + envs.statistics()["resets_waited"] > 0
    lengths = {4 + k: k for k in range(3)}
    counts = Counter((env, episode) for (env, _), (episode, *_) in more.items())
    assert all(lengths[num] == env % 3 for (env, episode), num in counts.items())


@pytest.mark.parametrize("rule", [None, GroupRule()])
def test_deterministic_runs_are_bit_by_bit_those_without_spares(rule: GroupRule | None) -> None:
    async def main(spares: int) -> tuple[list[list[Any]], float]:
        options: dict[str, Any] = {"count": 8, "batch_size": 48, "group_size": 4, "updates": 6, "failures": POLICY}
        async with training(
            slow_spec(), machine(), max_lag=0, deterministic=True, rule=rule, spares=spares, **options
        ) as stage:
            took_s = [report.elapsed_s async for report in stage.trainer]
            assert_sound(stage.envs.admission.ledger())
            assert (used(stage.envs) > 0.3) == (spares > 0)
            return [list(trajectories(batch.decisions).items()) for batch in stage.learner.batches], took_s[-1]

    found, took_s = run_virtual(main(0))
    for spares in (4, 8):
        again, now_s = run_virtual(main(spares))
        assert again == found
        assert now_s < took_s


def test_groups_with_lag_do_the_same_episodes() -> None:
    async def main(spares: int) -> Trajectories:
        options: dict[str, Any] = {"count": 8, "batch_size": 64, "group_size": 4, "updates": 8, "failures": POLICY}
        async with training(slow_spec(), machine(), max_lag=2, rule=GroupRule(), spares=spares, **options) as stage:
            async for _ in stage.trainer:
                assert_sound(stage.envs.admission.ledger())
            assert (used(stage.envs) > 0.5) == (spares > 0)
            return trajectories(stage.learner.decisions)

    assert_alike(run_virtual(main(0)), run_virtual(main(8)))


@pytest.mark.parametrize("spares", [1, 2])
def test_the_environment_that_is_farthest_is_served_first(spares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bind, chosen, at_once = Spares._bind, Counter[int](), Counter[bool]()

    def checked(self: Spares, spare: Spare) -> None:
        served = {other.bound.env.index for other in self._all if other.bound is not None}
        steps = {env.index: env.meter.num_steps for env in self._group._contexts if not env.done}
        open_to = {env: num for env, num in steps.items() if env not in served}
        bind(self, spare)
        assert (spare.bound is None) == (not open_to)
        if spare.bound is not None:
            env = spare.bound.env
            assert open_to[env.index] == max(open_to.values())
            assert spare.bound.assigned == (env.episode + 1, episode_seed(0, env.index, env.episode + 1))
            chosen[env.index] += 1
            at_once[any(other._busy == "reset" for other in self._group._contexts)] += 1

    monkeypatch.setattr(Spares, "_bind", checked)
    run(slow_spec(), spares, count=4, seconds=200.0)
    assert all(chosen[env] > 2 for env in range(4))
    assert at_once[True] > at_once[False], "it does not wait until whoever has given it away runs again"


@pytest.mark.parametrize(("length", "ready", "waited"), [(10, 9, 0), (2, 0, 20)])
def test_resets_are_counted_by_what_came_of_them(length: int, ready: int, waited: int) -> None:
    world = World()
    _, envs = run(scripted_spec(make=lambda: Slow(world, length=length)), 1, count=1, seconds=106.0)
    now = envs.statistics()
    assert [now[name] for name in ("spares", "resets_ready", "resets_waited", "resets_own")] == [1, ready, waited, 1]


def test_spares_are_built_when_all_environments_are() -> None:
    built: list[float] = []
    world = World(builds={1: "raise", 3: "raise"})

    def make() -> Slow:
        built.append(asyncio.get_running_loop().time())
        return world.make()

    run(scripted_spec(make=make), 3, count=3, failures=FailurePolicy(backoff_s=30.0))
    assert built[:5] == [0.0] * 4 + [30.0]
    assert len(built) == 8
    assert all(30.0 < at_s < 50.0 for at_s in built[5:])


# What goes wrong.


@pytest.mark.parametrize("spares", [0, 3, 4])
@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_reset_that_fails_is_that_of_its_environment_also_in_a_spare(
    how: str, spares: int, caplog: pytest.LogCaptureFixture
) -> None:
    bad = episode_seed(0, 1, 3)
    world = World({bad: how})
    found, _ = run(slow_spec(World({bad: how})), 0, count=4)
    caplog.clear()
    more, envs = run(slow_spec(world), spares, count=4)
    assert_alike(found, more)
    assert {(env, episode) for (env, _), (episode, *_) in more.items()}.isdisjoint({(1, 3)})
    assert envs.faults == {"restarts": 1, "dropped_envs": 0, "leaked_threads": int(how == "hang")}
    assert len(envs.recovery._failures._of_env[1]) == 1, "it is charged"
    assert ("env 1 hangs: a reset has not ended within 20 s" in caplog.text) == (how == "hang")
    assert world.resets.count(bad) == 1
    assert world.num_built == 4 + spares + 1
    assert envs.statistics()["spares"] == spares
    assert (used(envs) > 0.5) == (spares > 0)


def test_a_budget_that_a_spare_spends_names_its_environment() -> None:
    bad = episode_seed(0, 1, 3)
    error = the_failure(record(slow_spec(World({bad: "raise"})), 4, count=4, failures=FailurePolicy(per_env=0)))
    assert isinstance(error, ScriptedFault)
    assert error.__notes__[0].startswith(f"env 1 episode 3 decision {error.__notes__[0].split()[5]} seed {bad} ")
    raised = the_failure(record(slow_spec(World({bad: "raise"})), 4, count=4, failures=FailurePolicy("raise")))
    assert isinstance(raised, ScriptedFault)
    hung = the_failure(
        record(slow_spec(World({bad: "hang"})), 4, count=4, failures=FailurePolicy("raise", reset_s=20.0))
    )
    assert isinstance(hung, CallTimeout)


@virtually
async def test_one_that_fails_while_nobody_waits_is_left_alone() -> None:
    """Not reset again, not built again, and the run goes on."""
    world = World({episode_seed(0, 0, 1): "raise"})
    spec = scripted_spec(make=lambda: Slow(world, length=400))
    async with recording(rollout, spec=spec, count=2, spares=1, machine=VirtualMachine({}), batch_size=9999) as envs:
        await asyncio.sleep(300.0)
        assert world.resets.count(episode_seed(0, 0, 1)) == 1
        assert envs.faults["restarts"] == 0
        await asyncio.sleep(300.0)
        assert envs.faults["restarts"] == 1
        assert [env.episode for env in envs._contexts] == [2, 1]


def built_badly(num: int, policy: FailurePolicy) -> tuple[World, EnvGroup]:
    """Let the first `num` attempts to build a spare fail."""
    world = World(builds=dict.fromkeys(range(2, 2 + num), "raise"))
    return world, run(slow_spec(world), 1, count=2, seconds=300.0, failures=policy)[1]


def test_one_that_cannot_be_built_is_tried_again_later_and_then_given_up(caplog: pytest.LogCaptureFixture) -> None:
    world, envs = built_badly(3, POLICY)
    assert world.num_built == 2 + 3 + 1
    assert envs.faults["restarts"] == 3
    assert envs.statistics()["spares"] == 1
    assert used(envs) > 0.3
    assert not any(envs.recovery._failures._of_env), "nobody is charged for it"
    for policy, built in ((POLICY, 2 + 6), (FailurePolicy("drop"), 2 + 1), (FailurePolicy("raise"), 2 + 1)):
        caplog.clear()
        world, envs = built_badly(99, policy)
        assert world.num_built == built
        assert envs.statistics()["spares"] == used(envs) == 0
        told = [record.getMessage() for record in caplog.records if "given up" in record.getMessage()]
        assert told == ["envs: spare 0 is given up, and the run goes on: ScriptedFault('scripted')"]


def test_restarts_of_spares_wait_longer_each_time() -> None:
    built: list[float] = []
    world = World(builds=dict.fromkeys(range(2, 6), "raise"))

    def make() -> Slow:
        built.append(asyncio.get_running_loop().time())
        return world.make()

    run(scripted_spec(make=make), 1, count=2, seconds=250.0, failures=FailurePolicy(backoff_s=50.0, max_backoff_s=1e3))
    waits = np.diff(built[2:])
    assert waits[0] < 50.0 < waits[1] < 100.0 < waits[2]


def test_spares_that_share_a_lane_with_one_that_hangs_are_innocent() -> None:
    world = World({episode_seed(0, 1, 3): "hang"})
    _, envs = run(slow_spec(world), 4, count=4, lanes=1, seconds=500.0)
    assert envs.faults["leaked_threads"] == 1
    assert envs.faults["restarts"] > 2
    assert [len(times) for times in envs.recovery._failures._of_env] == [0, 1, 0, 0]
    assert not any(envs.spares._failures._of_env), "and neither are spares"
    assert 0 < envs.recovery.num_spare_restarts < envs.faults["restarts"]
    assert world.num_built == 8 + envs.faults["restarts"]
    assert all(env.episode > 5 for env in envs._contexts)
    assert envs.statistics()["spares"] == 4


def test_a_reset_that_is_lost_beside_another_costs_no_episode() -> None:
    """Of two spares on one lane the first hangs, and the second waits behind it."""
    world = World({episode_seed(0, 0, 1): "hang"})
    spec = scripted_spec(make=lambda: Slow(world, length=40))
    found, envs = run(spec, 2, count=2, lanes=1, seconds=400.0)
    done = {(env, episode) for (env, _), (episode, *_) in found.items()}
    assert done >= {(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)}
    assert (0, 1) not in done
    assert [len(times) for times in envs.recovery._failures._of_env] == [1, 0]
    assert envs.faults == {"restarts": 2, "dropped_envs": 0, "leaked_threads": 1}


def test_who_is_dropped_gives_its_spare_to_another(caplog: pytest.LogCaptureFixture) -> None:
    bad = episode_seed(0, 1, 3)
    found, _ = run(slow_spec(World({bad: "raise"})), 0, count=4, failures=FailurePolicy("drop"))
    more, envs = run(slow_spec(World({bad: "raise"})), 4, count=4, failures=FailurePolicy("drop"))
    assert_alike(found, more)
    assert envs.faults == {"restarts": 0, "dropped_envs": 1, "leaked_threads": 0}
    assert "env 1 is dropped, 3 go on" in caplog.text
    assert all(env.index != 1 for env in (s.bound.env for s in envs.spares._all if s.bound is not None))


@pytest.mark.parametrize("failed", [False, True])
def test_a_step_that_fails_drops_an_environment_that_has_a_spare(failed: bool) -> None:
    class Breaks(Slow):
        def step(self, action: Any) -> Any:
            if self.seed == episode_seed(0, 1, 3) and self._left == 1:
                raise ScriptedFault("in a step")
            return super().step(action)

    world = World({episode_seed(0, 1, 4): "raise"} if failed else {})
    _, envs = run(scripted_spec(make=lambda: Breaks(world)), 3, count=3, failures=FailurePolicy("drop"))
    assert envs.faults["dropped_envs"] == 1
    bound = {spare.bound.env.index for spare in envs.spares._all if spare.bound is not None}
    assert bound <= {0, 2}
    assert envs.statistics()["spares"] == 3 - failed, "whose reset has failed is not used again"
    assert used(envs) > 0.8


# Programs.


def test_an_environment_that_calls_its_simulator_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    async def marks(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            obs = (await env.act_step(obs)).obs
        if env.index == 0 and env.episode >= 2:
            marked = await env.call(lambda sim: sim.__dict__.setdefault("mark", env.episode))
            assert marked == 2

    async def main(spares: int) -> Trajectories:
        options: dict[str, Any] = {"count": 3, "machine": machine(), "batch_size": 10**9}
        async with recording(marks, spec=slow_spec(), spares=spares, **options) as envs:
            await asyncio.sleep(200.0)
            assert envs._contexts[0].episode > 5
            assert (used(envs) > 0.5) == (spares > 0)
            return of(envs.take_segments())

    found = run_virtual(main(0))
    assert "calls its simulator" not in caplog.text
    assert_alike(found, run_virtual(main(3)))
    assert caplog.text.count("env 0 calls its simulator (env.call)") == 1


def test_resets_that_are_cancelled_and_tried_again_are_the_same() -> None:
    async def impatient(env: EnvContext) -> None:
        while True:
            try:
                async with asyncio.timeout(2.0 + env.rng.random()):
                    obs, _ = await env.reset()
                break
            except TimeoutError:
                if env.rng.random() < 0.5:
                    obs, _ = await env.reset()
                    break
        while not env.done and env.rng.random() < 0.95:  # and leaves some episodes
            obs = (await env.act_step(obs)).obs

    async def main(spares: int) -> Counter[tuple[int, int, int]]:
        async with recording(
            impatient, spec=slow_spec(), count=6, spares=spares, machine=machine(), batch_size=10**9
        ) as envs:
            await asyncio.sleep(200.0)
            assert_sound(envs.admission.ledger())
            return Counter((e.env, e.episode, e.seed) for e in envs.take_episodes())

    found = run_virtual(main(6))
    assert len(found) > 30
    assert set(found.values()) == {1}
    assert all(seed == episode_seed(0, env, episode) for env, episode, seed in found)


# Who has no use of spares.


@virtually
async def test_an_evaluation_builds_none() -> None:
    world = World()
    spec = slow_spec(world)
    async with Runtime(machine()) as rt:
        gen = rt.start(Generator(ScriptedPolicy(spec)))
        envs = rt.start(EnvGroup(spec, actor=gen, count=3, spares=3))
        report = await evaluate(envs, range(100, 110))
        assert [episode.seed for episode in report.episodes] == list(range(100, 110))
        assert world.num_built == 3
        assert sorted(world.resets) == list(range(100, 110))
        assert used(envs) == 0


@pytest.mark.parametrize(("memory_mib", "num"), [(500, 2), (400, 2), (399, 1), (300, 1), (299, 0), (200, 0)])
def test_as_many_are_made_as_there_is_memory_for(memory_mib: int, num: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World()
        spec = EnvSpec("test", world.make, SPEC.observation, SPEC.action, memory_mib=100)
        async with Runtime(machine(memory_mib=memory_mib)) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            envs = rt.start(EnvGroup(spec, actor=gen, count=2, spares=2))
            envs.open_training(999, max_lag=1)
            await asyncio.sleep(50.0)
            pool = rt.resources.pool("memory")
            assert pool.units - pool.free == 100 * (2 + num)
            assert world.num_built == 2 + num
            assert envs.statistics()["spares"] == num
            await rt.stop(envs)
            assert pool.free == pool.units

    run_virtual(main())
    told = [record.getMessage() for record in caplog.records]
    assert told == ([] if num == 2 else [f"envs: memory for {num} of 2 spare simulators"])


@virtually
async def test_memory_that_somebody_else_waits_for_is_left_to_them() -> None:
    spec = EnvSpec("test", World().make, SPEC.observation, SPEC.action, memory_mib=100)
    async with Runtime(machine(memory_mib=300)) as rt:
        pool, granted = rt.resources.pool("memory"), list[Any]()
        lease = await pool.acquire(100, "others")
        assert take_spare_memory(rt, [spec] * 3, "envs")[0] == 2
        pool.request(250, granted.append, "others")
        assert take_spare_memory(rt, [spec] * 3, "envs") == (0, None)
        lease.release()
        assert pool.free == 100
        assert not granted


@pytest.mark.parametrize("spares", [-1, 5])
def test_a_number_that_makes_no_sense_is_refused(spares: int) -> None:
    async def main() -> None:
        async with recording(rollout, count=4, spares=spares):
            pass

    error = the_failure(main())
    assert isinstance(error, ConfigError)
    assert str(error) == f"spares must be a whole number from 0 to 4, got {spares}"


# Anything at all.


@given(
    seed=st.integers(0, 2**16),
    count=st.integers(1, 6),
    spares=st.integers(0, 6),
    lanes=st.one_of(st.none(), st.integers(1, 3)),
    reset_s=st.floats(0.0, 30.0),
    num_cores=st.integers(1, 12),
    storm=st.sampled_from([{}, {"raise": 0.02}, {"raise": 0.01, "hang": 0.005}]),
)
@settings(max_examples=15)
def test_whatever_happens_every_episode_is_run_once_by_one_simulator(
    seed: int, count: int, spares: int, lanes: int | None, reset_s: float, num_cores: int, storm: Any
) -> None:
    stepped: dict[int, set[int]] = {}

    class Checked(ScriptedEnv):
        seed = -1

        def reset(self, **options: Any) -> Any:
            self.seed = options["seed"]
            spend(reset_s * self.seed / 2**31)
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            stepped.setdefault(self.seed, set()).add(id(self))
            spend(1.0)
            return super().step(action)

    kept: list[Checked] = []  # so that no two have one id

    def make() -> Checked:
        kept.append(Checked(3, 2, length=lambda rng: int(rng.integers(1, 15)), storm=storm))
        return kept[-1]

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            assert isinstance(env.slot, ThreadSlot)
            assert env.slot.simulator._env.seed == env.meter.seed  # type: ignore[attr-defined]
            slots = [other.slot for other in env._group._contexts] + [spare.slot for spare in env._group.spares._all]
            assert len(set(map(id, slots))) == len(slots) == count + min(spares, count)
            obs = (await env.act_step(obs)).obs

    async def main() -> list[tuple[int, int, int]]:
        policy = FailurePolicy(build_s=None, reset_s=60.0, call_s=60.0, per_env=None, max_backoff_s=10.0)
        options: dict[str, Any] = {"lanes": lanes, "failures": policy, "batch_size": 7 * count, "updates": 8}
        async with training(
            scripted_spec(make=make), machine(num_cores), seed=seed, count=count, spares=min(spares, count),
            program=program, max_lag=2, **options,
        ) as stage:  # fmt: skip
            episodes = []
            async for report in stage.trainer:
                assert_sound(stage.envs.admission.ledger())
                episodes += [(e.env, e.episode, e.seed) for e in report.episodes]
            assert not spares or storm or count == 1 or stage.envs.statistics()["spares"] == min(spares, count)
            return episodes

    episodes = run_virtual(main())
    assert len(set(episodes)) == len(episodes)
    assert all(number == episode_seed(seed, env, episode) for env, episode, number in episodes)
    assert all(len(simulators) == 1 for simulators in stepped.values())
