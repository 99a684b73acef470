"""Every simulator from state: a training update and equal episodes in both hosts, forms, ends, and wrong names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ebrl
from ebrl.core.errors import ConfigError, UnknownEnv
from ebrl.core.records import ArraySpec
from ebrl.core.run import run
from ebrl.sim.check import check_env
from ebrl.sim.spec import env_spec, env_specs
from tests.sims.simulators import SEEDS, STATES, STEPS, actions, built, in_host, played, same, spec_of

pytestmark = [
    pytest.mark.sims,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaks("simulators keep files, devices and displays open for as long as the process lives"),
    pytest.mark.blocks("simulators import, read and print what they like"),
    pytest.mark.hogs("imports of simulators hold the interpreter lock"),
]
every = pytest.mark.parametrize("name", STATES)
both = pytest.mark.parametrize("kind", ["thread", "process"])


@both
@every
def test_one_update(name: str, kind: Any) -> None:
    spec = spec_of(name)
    policy = ebrl.GaussianPolicy.for_spec(spec)
    learner = ebrl.PPO(policy, ebrl.PPOConfig(batch_size=4 * STEPS, minibatch_size=2 * STEPS))

    async def main() -> ebrl.UpdateReport:
        async with ebrl.Runtime(seed=0) as rt:
            gen = rt.start(ebrl.Generator(policy))
            lanes = 2 if kind == "thread" else 1
            envs = rt.start(ebrl.EnvGroup(spec, actor=gen, count=2, host=kind, lanes=lanes))
            async for report in rt.start(ebrl.Trainer(envs, learner, updates=1, max_lag=0)):
                return report
        raise AssertionError("no update")

    report = run(main())
    assert (report.update, report.num_decisions) == (1, 4 * STEPS)


@every
def test_seeds_decide_episodes_in_both_hosts(name: str) -> None:
    spec = spec_of(name)
    check_env(spec, episodes=1)
    with built(spec) as sim:
        expected = [played(sim, seed) for seed in SEEDS]
    assert not same(expected[0][0], expected[1][0])
    for kind in ("thread", "process"):
        assert same(in_host(kind, [spec, spec]), expected), kind


@every
def test_form(name: str) -> None:
    spec = spec_of(name)
    assert isinstance(spec.observation, dict)
    assert list(spec.observation) == ["state"]
    assert spec.observation["state"].dtype == "float32"
    assert spec.action.low is not None
    assert spec.action.high is not None
    assert (spec.horizon, spec.host, spec.info_keys[0]) == (STEPS, "process", "success")
    with built(spec) as sim:
        assert type(sim.reset(0)[1].get("success", False)) is bool
        result = sim.step(actions(spec, 0))
        assert (result.num_steps, result.terminated, result.truncated) == (STEPS, False, True)
        assert type(result.info["success"]) is bool


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("Meta-World/MT2", {}, UnknownEnv, "nearest: Meta-World/MT"),
        (
            "Meta-World/MT1",
            {"env_name": "reach-v3", "cameras": "corner9"},
            ConfigError,
            "no camera 'corner9'; .*corner2",
        ),
        ("LIBERO/libero_spatiol", {}, UnknownEnv, "nearest: LIBERO/libero_spatial"),
        ("LIBERO/libero_spatial", {}, ConfigError, r"has 10 tasks: env_specs\("),
        ("LIBERO/libero_spatial", {"task_id": 10}, ConfigError, "has tasks 0 to 9, got task_id=10"),
        ("LIBERO/libero_100", {}, ConfigError, "is registered, but has no tasks"),
        ("LIBERO/libero_goal_temp", {}, ConfigError, "lacks files of it: Initialization states unavailable"),
        ("LIBERO/libero_spatial", {"task_id": 0, "colour": 1}, ConfigError, "does not take .*colour"),
        ("ManiSkill/PikCube-v1", {}, UnknownEnv, "nearest: ManiSkill/PickCube-v1"),
        ("ManiSkill/PickCube-v1", {"colour": 1}, ConfigError, "does not take .*colour"),
        ("robosuite/Lifft", {}, UnknownEnv, "nearest: robosuite/Lift"),
        ("robosuite/Lift", {"robots": "Pandda"}, ConfigError, "does not know 'Pandda'"),
    ],
)
def test_wrong_names(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        env_spec(name, **options)


def test_tasks_of_libero() -> None:
    specs = env_specs("LIBERO/libero_goal", full_state=False, horizon=STEPS)
    assert len({spec.task for spec in specs}) == 10
    assert specs[0].task == "open the middle drawer of the cabinet"
    assert specs[3].id == "LIBERO/libero_goal:3"
    assert {spec.memory_mib for spec in specs} == {700}
    assert specs[0].observation == {"state": ArraySpec((8,), "float32")}
    assert env_spec("LIBERO/libero_goal", task_id=3, full_state=False, memory_mib=5).memory_mib == 5
    with pytest.raises(ConfigError, match="different numbers of objects"):
        env_specs("LIBERO/libero_10")


def test_success_ends_an_episode_of_libero_but_none_of_robosuite() -> None:
    def succeed(env: Any) -> None:
        env.unwrapped._check_success = lambda: True

    for name, ends in (("LIBERO/libero_spatial", True), ("robosuite/Lift", False)):
        with built(spec_of(name)) as sim:
            sim.reset(0)
            sim.call(succeed)
            result = sim.step(actions(sim.spec, 0)[0])
            assert (result.terminated, result.info["success"]) == (ends, True)


def test_libero_begins_in_its_initial_states() -> None:
    from libero.libero import benchmark

    states = benchmark.get_benchmark("libero_spatial")().get_task_init_states(2)
    begun = []
    with built(spec_of("LIBERO/libero_spatial")) as sim:
        for seed in range(3):
            sim.reset(seed)
            now = sim.call(lambda env: env.unwrapped.sim.get_state().flatten())
            begun.append(int(np.argmin(np.abs(states - now).max(1))))
            np.testing.assert_array_equal(states[begun[-1]], now)
    assert len(set(begun)) > 1


def test_actions_of_several_robots_are_one_vector() -> None:
    spec = env_spec("ManiSkill/TwoRobotPickCube-v1", horizon=STEPS)
    assert spec.action.shape == (16,)
    rows = {}
    with built(spec) as sim:
        for moved in (slice(0, 7), slice(8, 15)):
            sim.reset(0)
            action = np.zeros((1, 16), np.float32)
            action[0, moved] = 0.5
            sim.step(np.repeat(action, 3, 0))
            rows[moved.start] = sim.call(lambda env: [robot.robot.get_qpos()[0].tolist() for robot in agents(env)])
    assert np.abs(np.subtract(rows[0][0], rows[8][0])).max() > 1e-3
    assert np.abs(np.subtract(rows[0][1], rows[8][1])).max() > 1e-3


def agents(env: Any) -> list[Any]:
    return list(env.unwrapped.agent.agents)


def test_what_maniskill_cannot_do_without_a_vulkan_device() -> None:
    from ebrl.sim.envs.maniskill import can_draw

    if can_draw():
        pytest.skip("there is a Vulkan device")
    with pytest.raises(ConfigError, match="pictures need a Vulkan device"):
        env_spec("ManiSkill/PickCube-v1", cameras="base_camera")
    with pytest.raises(ConfigError, match="ManiSkill/PushT-v1 needs a Vulkan device here"):
        env_spec("ManiSkill/PushT-v1")


def test_nothing_asks_on_stdin() -> None:
    spec_of("ManiSkill/PickCube-v1")
    from mani_skill.utils.download_asset import prompt_yes_no

    assert prompt_yes_no("download?") is True


def test_all_tasks_of_metaworld_run() -> None:
    specs = env_specs("Meta-World/MT50", horizon=STEPS)
    assert len({spec.task for spec in specs}) == 50
    assert specs[0].observation == {"state": ArraySpec((89,), "float32")}
    for spec in specs:
        with built(spec) as sim:
            sim.reset(0)
            assert sim.step(actions(spec, 0)).truncated
