"""Pictures: the frames that a simulator draws by itself, in both hosts, where two simulators draw at the same time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import seeding

from ebrl.core.errors import ConfigError
from ebrl.core.records import Array, ArraySpec, EnvSpec
from ebrl.sim.envs.common import global_numpy
from ebrl.sim.spec import env_spec
from tests.sims.simulators import SEEDS, STEPS, actions, built, in_host, played, same

pytestmark = [
    pytest.mark.sims,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaks("EGL keeps its display and devices for as long as the process lives"),
    pytest.mark.blocks("simulators import, read and print what they like"),
    pytest.mark.hogs("imports of simulators hold the interpreter lock"),
]
SIZE = 48


def frames_of(traces: list[list[Any]], key: str) -> list[list[Array]]:
    return [[part[key] for part in trace if isinstance(part, dict)] for trace in traces]


def check(pair: list[EnvSpec], key: str, direct: list[list[Array]]) -> None:
    """Compare the frames of all hosts with those drawn directly.

    The two differ in their models: contexts of the same model number their textures alike, and one does for the other.
    """
    for frames in direct:
        assert len(frames) == 1 + STEPS
        assert all(frame.std() > 10 and frame.mean() > 20 for frame in frames), "black, or nearly"
        assert not same(frames[0], frames[-1]), "nothing moves"
    for kind in ("process", "thread"):
        assert same(frames_of(in_host(kind, pair), key), direct), kind


def check_fast(spec: EnvSpec, key: str, direct: list[Array]) -> None:
    """Look whether pictures without shadows are other ones, and yet of the same."""
    with built(spec) as sim:
        (fast,) = frames_of([played(sim, SEEDS[0])], key)
    assert not same(fast, direct), "shadows are still there"
    assert np.abs(np.asarray(fast, float) - np.asarray(direct, float)).mean() < 20


def metaworld_frames(task: str, seed: int, chunk: Array) -> list[Array]:
    env = gymnasium.make(
        "Meta-World/MT1",
        env_name=task,
        seed=0,
        disable_env_checker=True,
        render_mode="rgb_array",
        width=SIZE,
        height=SIZE,
        camera_name="corner2",
    )
    layer: Any = env
    while "RandomTaskSelect" not in type(layer).__name__:
        layer = layer.env
    layer.np_random = np.random.default_rng(seed)
    env.reset()
    frames: list[Any] = [env.render()]
    for action in chunk:
        env.step(action.copy())
        frames.append(env.render())
    copies = [frame.copy() for frame in frames]
    env.close()
    return copies


def test_metaworld() -> None:
    tasks, key = ("drawer-open-v3", "reach-v3"), "images/corner2"
    options: dict[str, Any] = {"image_size": SIZE, "horizon": STEPS}
    pair = [env_spec("Meta-World/MT1", env_name=task, cameras=("corner2", "gripperPOV"), **options) for task in tasks]
    picture = ArraySpec((SIZE, SIZE, 3), "uint8")
    assert pair[0].observation == {
        "state": ArraySpec((4,), "float32"),
        "images/corner2": picture,
        "images/gripperPOV": picture,
    }
    direct = [metaworld_frames(tasks[i], SEEDS[i], actions(pair[i], SEEDS[i])) for i in range(2)]
    check(pair, key, direct)
    fast = env_spec(
        "Meta-World/MT1", env_name=tasks[0], cameras="corner2", full_state=True, fast_render=True, **options
    )
    assert fast.observation == {"state": ArraySpec((39,), "float32"), key: picture}
    check_fast(fast, key, direct[0])


def libero_frames(name: str, task_id: int, seed: int, chunk: Array) -> list[Array]:
    from libero.libero import benchmark
    from libero.libero.envs import OffScreenRenderEnv

    suite = benchmark.get_benchmark(name)()
    env = OffScreenRenderEnv(
        bddl_file_name=suite.get_task_bddl_file_path(task_id), camera_heights=SIZE, camera_widths=SIZE, ignore_done=True
    )
    states = suite.get_task_init_states(task_id)
    rng, _ = seeding.np_random(seed)
    with global_numpy(int(rng.integers(2**32))):
        env.reset()
    seen = [env.set_init_state(states[rng.integers(len(states))])]
    seen += [env.step(action.copy())[0] for action in chunk]
    frames = [obs["agentview_image"][::-1].copy() for obs in seen]
    env.close()
    return frames


def test_libero() -> None:
    tasks, key = (("libero_spatial", 2), ("libero_object", 0)), "images/agentview"
    options: dict[str, Any] = {
        "image_size": SIZE, "horizon": STEPS, "cameras": ("agentview", "robot0_eye_in_hand")
    }  # fmt: skip
    pair = [env_spec(f"LIBERO/{name}", task_id=number, **options) for name, number in tasks]
    assert isinstance(pair[0].observation, dict)
    assert (pair[0].observation["state"], pair[0].memory_mib) == (ArraySpec((8,), "float32"), 900)
    direct = [libero_frames(*tasks[i], SEEDS[i], actions(pair[i], SEEDS[i])) for i in range(2)]
    check(pair, key, direct)
    check_fast(env_spec("LIBERO/libero_spatial", task_id=2, fast_render=True, **options), key, direct[0])


def test_a_camera_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="nocam"):
        env_spec("robosuite/Lift", cameras=("nocam",))


def maniskill_frames(task: str, seed: int, chunk: Array) -> list[Array]:
    env = gymnasium.make(task, obs_mode="rgb", sim_backend="physx_cpu", sensor_configs={"width": SIZE, "height": SIZE})
    obs, _ = env.reset(seed=int(seeding.np_random(seed)[0].integers(2**31)))
    frames: list[Any] = [obs["sensor_data"]["base_camera"]["rgb"][0].numpy()]
    for action in chunk:
        obs = env.step(action.copy())[0]
        frames.append(obs["sensor_data"]["base_camera"]["rgb"][0].numpy())
    copies = [frame.copy() for frame in frames]
    env.close()
    return copies


def test_maniskill() -> None:
    from ebrl.sim.envs.maniskill import can_draw

    if not can_draw():
        pytest.skip("ManiSkill draws on a Vulkan device only, and there is none")
    spec = env_spec("ManiSkill/PickCube-v1", cameras="base_camera", image_size=SIZE, horizon=STEPS)
    direct = [maniskill_frames("PickCube-v1", seed, actions(spec, seed)) for seed in SEEDS[:2]]
    check([spec, spec], "images/base_camera", direct)
