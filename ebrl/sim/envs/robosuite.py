"""robosuite 1.4.0: manipulation tasks with one or two arms, such as ``"robosuite/Lift"``; and what LIBERO is built on.

Success does not end an episode, as in robosuite itself. Importing this module imports robosuite.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np
import robosuite
from gymnasium import spaces
from robosuite.utils.binding_utils import MjRenderContextOffscreen
from robosuite.utils.errors import RandomizationError
from robosuite.utils.transform_utils import quat2axisangle

from ebrl.core.errors import ConfigError
from ebrl.core.records import Array, EnvSpec
from ebrl.sim.adapters import Wanted, require_gl
from ebrl.sim.envs.common import IMAGE_SIZE, STATE, global_numpy, image_key, observation_space, vector
from ebrl.sim.spec import unknown_env

FIRST = "robosuite/"
HORIZON = 500
"""Steps of 50 ms, as in robosuite's own benchmark."""
MEMORY_MIB = 200
"""Measured: 72 for each further Lift in a process, and 550 for the process."""
MAX_TRIES = 20
UNNEEDED = (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION)


class RobosuiteEnv(gymnasium.Env[Any, Array]):
    """A robosuite environment behind gymnasium's interface. With cameras, it belongs to the thread that made it.

    The robot's own state is, for each arm, position and rotation (axis times angle) of the hand and the positions of
    the fingers: 8 numbers for a Panda, as in the data sets of LIBERO. The full one is all that robosuite reports.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        cameras: str | Sequence[str] = (),
        image_size: int = IMAGE_SIZE,
        full_state: bool | None = None,
        fast_render: bool = False,
        init_states: Array | None = None,
        success_ends: bool = False,
    ) -> None:
        """Build it. Call under `ebrl.sim.simulator.construction_lock`: numpy's global generator is used meanwhile.

        Args:
            make: Builds the robosuite environment, given what it draws.
            cameras: Names of those that are seen.
            image_size: Height and width of a picture.
            full_state: Whether the state has objects; None: only without cameras.
            fast_render: No shadows, reflections or smooth edges: other pictures in less than half of the time on a CPU.
            init_states: ``[K, ...]`` states of the simulator, of which the seed chooses one for each episode.
            success_ends: Whether an episode ends with success.
        """
        self._cameras = (cameras,) if isinstance(cameras, str) else tuple(cameras)
        self._full = full_state if full_state is not None else not self._cameras
        self._init_states = init_states
        self._success_ends = success_ends
        drawn: dict[str, Any] = {"has_renderer": False, "has_offscreen_renderer": bool(self._cameras)}
        drawn |= {"use_camera_obs": bool(self._cameras), "ignore_done": True}
        if self._cameras:
            require_gl("robosuite")
            drawn |= {"camera_names": list(self._cameras), "camera_heights": image_size, "camera_widths": image_size}
        with global_numpy(0):
            try:
                self._env = make(**drawn)
            except (KeyError, ValueError) as error:  # there is no such camera, or no such robot
                raise ConfigError(f"robosuite does not know {' '.join(str(error).split())}") from error
        if fast_render and self._cameras:
            _draw_plainly(self._env)
        size = len(self._observe(self._env._get_observations(force_update=True))[STATE])
        self.observation_space = observation_space(size, self._cameras, image_size)
        low, high = (np.asarray(bound, np.float32) for bound in self._env.action_spec)
        self.action_space = spaces.Box(low, high, dtype=np.float32)

    @property
    def unwrapped(self) -> Any:
        """The robosuite environment."""
        return self._env

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the model is loaded anew, as robosuite does by default."""
        super().reset(seed=seed)
        self._take_context()
        with global_numpy(int(self.np_random.integers(2**32))):
            obs = _placed(self._env)
        if self._init_states is not None:
            obs = self._begin_at(self._init_states[self.np_random.integers(len(self._init_states))])
        return self._observe(obs), {"success": bool(self._env._check_success())}

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Advance by one step of 50 ms; ``info["success"]`` is a bool."""
        self._take_context()
        obs, reward, _, info = self._env.step(action)
        success = bool(self._env._check_success())
        return self._observe(obs), float(reward), success and self._success_ends, False, {**info, "success": success}

    def close(self) -> None:
        """Give the simulator's memory back, in the thread that made it."""
        self._take_context()
        self._env.close()

    def _take_context(self) -> None:
        # Drawing and freeing act on the thread's current context, and simulators of one process share a thread.
        context = None if self._env.sim is None else self._env.sim._render_context_offscreen
        if context is not None:
            context.gl_ctx.make_current()

    def _begin_at(self, state: Array) -> Any:
        # As LIBERO's ControlEnv.set_init_state.
        env = self._env
        env.sim.set_state_from_flattened(state)
        env.sim.forward()
        env._check_success()
        env._post_process()
        env._update_observables(force=True)
        return env._get_observations()

    def _observe(self, obs: Mapping[str, Any]) -> dict[str, Array]:
        # Rows of robosuite's pictures begin at the bottom.
        pictures = {image_key(camera): obs[f"{camera}_image"][::-1] for camera in self._cameras}
        if self._full:
            parts = [value for key, value in obs.items() if key.endswith(("proprio-state", "object-state"))]
        else:
            parts = [part for index in range(len(self._env.robots)) for part in _hand(obs, f"robot{index}_")]
        return {STATE: vector(parts), **pictures}


def _placed(env: Any) -> Any:
    for _ in range(MAX_TRIES):
        with contextlib.suppress(RandomizationError):  # objects did not fit: place them anew, as LIBERO does
            return env.reset()
    return env.reset()


def _hand(obs: Mapping[str, Any], arm: str) -> list[Array]:
    return [obs[f"{arm}eef_pos"], quat2axisangle(obs[f"{arm}eef_quat"]), obs[f"{arm}gripper_qpos"]]


def _draw_plainly(env: Any) -> None:
    """From the next reset on: quality is read when the drawing context is made, which is when the model is loaded."""
    initialize = env._initialize_sim

    def initialize_plainly(xml_string: str | None = None) -> None:
        initialize(xml_string)
        quality = env.sim.model._model.vis.quality
        quality.shadowsize = quality.offsamples = 0
        context = MjRenderContextOffscreen(env.sim, device_id=env.render_gpu_device_id)
        for flag in UNNEEDED:
            context.scn.flags[flag] = 0

    env._initialize_sim = initialize_plainly


def make_robosuite(task: str, controller: str, options: Mapping[str, Any], **kwargs: Any) -> RobosuiteEnv:
    """Make a task; a module-level function, so that it can be sent to a process.

    Args:
        task: Such as ``"Lift"``.
        controller: Such as ``"OSC_POSE"``, which moves the hand as LIBERO does: 7 numbers in -1 to 1.
        options: For ``robosuite.make``: robots and so on.
        **kwargs: For `RobosuiteEnv`.
    """
    robots = ["Panda", "Panda"] if task.startswith("TwoArm") else "Panda"
    controllers = robosuite.load_controller_config(default_controller=controller)
    merged = {
        "robots": robots,
        "controller_configs": controllers,
        "control_freq": 20,
        "reward_shaping": True,
        **options,
    }
    return RobosuiteEnv(functools.partial(robosuite.make, task, **merged), **kwargs)


def describe(wanted: Wanted) -> tuple[EnvSpec, ...]:
    """Describe one task; see `ebrl.sim.adapters.describe`.

    Raises:
        UnknownEnv: No such task.
    """
    task = wanted.name.removeprefix(FIRST)
    if task not in robosuite.ALL_ENVIRONMENTS:
        unknown_env(wanted.name, {f"{FIRST}{name}": f"{FIRST}{name}" for name in robosuite.ALL_ENVIRONMENTS})
    own = {"cameras", "image_size", "full_state", "fast_render"}
    options = {key: value for key, value in wanted.kwargs.items() if key not in own}
    controller = options.pop("controller", "OSC_POSE")
    kwargs = {key: value for key, value in wanted.kwargs.items() if key in own}
    make = functools.partial(make_robosuite, task, controller, options, **kwargs)
    return (wanted.spec(wanted.name, make, HORIZON, task, MEMORY_MIB),)
