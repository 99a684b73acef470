"""Meta-World: manipulation tasks of the Sawyer arm, each with 50 positions of object and goal.

MT1 is one task. MT10 and MT50 are ten and fifty at once, and one policy for all of them is told the task by a one-hot
vector at the end of its state, as in the benchmark (Yu et al. 2019, arXiv:1910.10897).

Pictures are what its cameras see: those of ``corner``, ``corner2`` and ``corner3`` are upside down. Importing this
module imports metaworld; `ebrl.env_spec("Meta-World/MT1", env_name="reach-v3")` does it at use.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gymnasium
import metaworld as _registers_ids  # noqa: F401
import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3, MT50_V3
from metaworld.wrappers import RandomTaskSelectWrapper

from ebrl.core.errors import ConfigError
from ebrl.core.records import Array, EnvSpec
from ebrl.sim.adapters import Wanted, require_gl
from ebrl.sim.envs.common import IMAGE_SIZE, STATE, camera_names, image_key, observation_space, vector
from ebrl.sim.spec import unknown_env

MT1 = "Meta-World/MT1"
BENCHMARKS = {"Meta-World/MT10": tuple(MT10_V3), "Meta-World/MT50": tuple(MT50_V3)}
"""Tasks of each, in the order of Meta-World, which the one-hot vector follows."""
FULL_DIM = 39
HAND_DIM = 4
"""The first numbers of a state: where the hand is, and how far it is open."""
MAX_HORIZON = 500
"""Steps after which Meta-World itself ends an episode."""
UNNEEDED = (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION)


class MetaWorldEnv(gymnasium.Env[Any, Array]):
    """One MT1 task whose `reset(seed=...)` decides the episode, which Meta-World's own does not.

    The 50 positions are drawn from `seed` at construction, the same in every instance, and not from numpy's global
    generator as they would be by default. Success never ends an episode. With cameras, it belongs to the thread that
    made it.
    """

    def __init__(
        self,
        env_name: str,
        seed: int = 0,
        task_id: tuple[int, int] | None = None,
        cameras: str | Sequence[str] = (),
        image_size: int = IMAGE_SIZE,
        full_state: bool | None = None,
        fast_render: bool = False,
        **kwargs: Any,
    ) -> None:
        """Build it. Call under `ebrl.sim.simulator.construction_lock`: numpy's global generator is swapped meanwhile.

        Args:
            env_name: Such as ``"reach-v3"``.
            seed: Of the 50 positions of object and goal.
            task_id: ``(i, n)`` puts n numbers at the end of the state, of which number i is 1 and the others 0.
            cameras: Names of those that are seen, such as ``"topview"`` and ``"gripperPOV"``. ``"corner"``,
                ``"corner2"`` and ``"corner3"`` hang upside down, and so are their pictures.
            image_size: Height and width of a picture.
            full_state: Whether the state has objects and goal besides the hand; None: only without cameras.
            fast_render: No shadows, reflections or smooth edges: 6 ms a picture instead of 81 on a CPU.
            **kwargs: For ``gymnasium.make``.
        """
        if cameras:
            require_gl(MT1)
            kwargs = {"render_mode": "rgb_array", "width": image_size, "height": image_size, **kwargs}
        self._env = gymnasium.make(MT1, env_name=env_name, seed=seed, **{"disable_env_checker": True, **kwargs})
        model = self.unwrapped.model
        ids = {model.camera(index).name: index for index in range(model.ncam)}
        self._cameras = {camera: ids[camera] for camera in camera_names(cameras, ids, f"{MT1}:{env_name}")}
        self._plain = fast_render
        if fast_render:  # read when the drawing context is made, which is at the first picture
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self._num_state = FULL_DIM if full_state or (full_state is None and not self._cameras) else HAND_DIM
        self._one_hot: Array = np.zeros(0) if task_id is None else np.eye(task_id[1])[task_id[0]]
        size = self._num_state + len(self._one_hot)
        self.observation_space = observation_space(size, tuple(self._cameras), image_size)
        self.action_space = self._env.action_space
        self.render_mode = self._env.render_mode
        layer: Any = self._env
        while not isinstance(layer, RandomTaskSelectWrapper):
            layer = layer.env
        self._selector = layer

    @property
    def unwrapped(self) -> Any:
        """The simulator below all wrappers."""
        return self._env.unwrapped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; `seed` chooses the position."""
        if seed is not None:
            self._selector.np_random = np.random.default_rng(seed)
        obs, info = self._env.reset(options=options)
        return self._observe(obs), info

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Advance by one step of 12.5 ms; ``info["success"]`` is a bool."""
        obs, reward, terminated, truncated, info = self._env.step(action)
        info["success"] = bool(info["success"])
        return self._observe(obs), float(reward), bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """One picture, in the thread that made the environment."""
        return self._env.render()

    def close(self) -> None:
        """Give the simulator's memory back."""
        self._env.close()

    def _observe(self, obs: Array) -> dict[str, Array]:
        observed: dict[str, Array] = {STATE: vector((obs[: self._num_state], self._one_hot))}
        renderer: Any = self.unwrapped.mujoco_renderer if self._cameras else None
        for camera, number in self._cameras.items():
            # Several simulators share the thread in a process host, and only the last context that was made is current.
            viewer = renderer._get_viewer("rgb_array")
            viewer.make_context_current()
            if self._plain:
                for flag in UNNEEDED:
                    viewer.scn.flags[flag] = 0
            observed[image_key(camera)] = viewer.render("rgb_array", camera_id=number)
        return observed


def describe(wanted: Wanted) -> tuple[EnvSpec, ...]:
    """Describe one MT1 task, or all of MT10 or MT50; see `ebrl.sim.adapters.describe`.

    Raises:
        UnknownEnv: No such benchmark or task.
        ConfigError: No `env_name`, or a horizon that Meta-World cannot reach.
    """
    name, kwargs = wanted.name, wanted.kwargs
    if wanted.horizon is not None and wanted.horizon > MAX_HORIZON:
        raise ConfigError(
            f"Meta-World ends episodes after {MAX_HORIZON} steps: horizon must be no more, got {wanted.horizon}"
        )
    if name == MT1:
        task = kwargs.get("env_name")
        if task is None:
            raise ConfigError(f'{MT1} needs a task: env_spec("{MT1}", env_name="reach-v3")')
        if task not in ALL_V3_ENVIRONMENTS:
            unknown_env(task, {task: task for task in ALL_V3_ENVIRONMENTS})
        return (_spec(wanted, task, kwargs),)
    if name not in BENCHMARKS:
        unknown_env(name, _ids())
    for option in sorted({"env_name", "task_id"} & kwargs.keys()):
        raise ConfigError(f'{name} is all of its tasks and takes no {option}: one is env_spec("{MT1}", env_name="...")')
    tasks = BENCHMARKS[name]
    return tuple(
        _spec(wanted, task, {"env_name": task, "task_id": (index, len(tasks)), **kwargs})
        for index, task in enumerate(tasks)
    )


def names() -> dict[str, str]:
    """What can be asked for: its short name, and how to ask for it."""
    return {**_ids(), **{task: f'{MT1} with env_name="{task}"' for task in ALL_V3_ENVIRONMENTS}}


def _spec(wanted: Wanted, task: str, kwargs: dict[str, Any]) -> EnvSpec:
    make = functools.partial(MetaWorldEnv, **kwargs)
    return wanted.spec(f"{wanted.name}:{task}", make, MAX_HORIZON, task)


def _ids() -> dict[str, str]:
    return {MT1: MT1, **{name: f'env_specs("{name}")' for name in BENCHMARKS}}
