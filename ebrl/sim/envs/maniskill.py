"""ManiSkill 3 (Tao et al. 2024, arXiv:2410.00425) on the CPU, one simulator each, such as ``"ManiSkill/PickCube-v1"``.

States work on a machine that cannot draw: ManiSkill makes materials all the same, so that they are replaced by objects
that do nothing. Pictures need a Vulkan device. Actions of tasks with several robots, which are dictionaries, are one
vector: the robots' actions in the order of their names. Importing this module imports sapien; mani_skill and torch
follow at use.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import sapien.pysapien
import sapien.render
from gymnasium import spaces

from ebrl.core.errors import ConfigError
from ebrl.core.records import Array, EnvSpec
from ebrl.sim.adapters import Wanted
from ebrl.sim.envs.common import IMAGE_SIZE, STATE, camera_names, image_key, observation_space, vector
from ebrl.sim.simulator import construction_lock
from ebrl.sim.spec import unknown_env

FIRST = "ManiSkill/"
HORIZON = 100
"""Where ManiSkill gives a task no limit."""
NO_VULKAN = "Debian: mesa-vulkan-drivers 24.3 or newer and libvulkan1; a GPU: render_backend='gpu'"


class Blank:
    """Stands in for a material where nothing can be drawn: it takes everything and does nothing."""

    def __init__(self, *_: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __getattr__(self, name: str) -> Any:
        return _nothing if name.startswith("set_") else None


def _nothing(*_: Any, **__: Any) -> None:
    return None


def can_draw() -> bool:
    """Whether there is a Vulkan device; if not, materials are replaced, once, so that states can be simulated."""
    if sapien.render.RenderMaterial is Blank:
        return False
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        for module in (sapien.render, sapien.pysapien.render):  # builders use the second
            module.RenderMaterial = Blank
            module.RenderTexture2D = _nothing
        return False
    return True


class ManiSkillEnv(gymnasium.Env[Any, Array]):
    """One simulator as numpy arrays without ManiSkill's batch dimension; may be used from any thread, one at a time."""

    def __init__(
        self,
        task: str,
        cameras: str | Sequence[str] = (),
        image_size: int = IMAGE_SIZE,
        full_state: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Build it.

        Args:
            task: Such as ``"PickCube-v1"``.
            cameras: Names of those that are seen, such as ``"base_camera"``.
            image_size: Height and width of a picture.
            full_state: Whether the state has objects; None: only without cameras.
            **kwargs: For ManiSkill: control_mode, reward_mode, render_backend and so on.

        Raises:
            ConfigError: No such camera, or the task needs a Vulkan device or assets that are not there.
        """
        draws = can_draw()
        if cameras and not draws:
            raise ConfigError(f"{FIRST}{task}: pictures need a Vulkan device ({NO_VULKAN})")
        full = full_state if full_state is not None else not cameras
        mode = ("rgb+state" if full else "rgb") if cameras else "state_dict"
        backend = "cpu" if cameras else "none"
        options: dict[str, Any] = {"obs_mode": mode, "sim_backend": "physx_cpu", "render_backend": backend}
        if cameras:
            options["sensor_configs"] = {"width": image_size, "height": image_size}
        self._extra = full or bool(cameras)  # beside pictures, ManiSkill leaves out what a robot could not know
        self._cameras: tuple[str, ...] = ()
        self._env = _make(task, draws, options | kwargs)
        self._parts, self.action_space = _flat(self._env.action_space)
        obs, _ = self._env.reset(seed=0)
        self._cameras = camera_names(cameras, obs.get("sensor_data", {}), f"{FIRST}{task}")
        size = len(self._observe(obs)[STATE])
        self.observation_space = observation_space(size, self._cameras, image_size)

    @property
    def unwrapped(self) -> Any:
        """ManiSkill's own environment."""
        return self._env.unwrapped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; under the lock of constructions, since ManiSkill seeds torch's global generator in it."""
        super().reset(seed=seed)
        with construction_lock:
            obs, info = self._env.reset(seed=int(self.np_random.integers(2**31)), options=options)
        return self._observe(obs), _numbers(info)

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Advance by one step; ``info["success"]`` is a bool."""
        given: Any = action
        if self._parts is not None:
            given = {name: action[start:end] for name, (start, end) in self._parts.items()}
        obs, reward, terminated, truncated, info = self._env.step(given)
        return self._observe(obs), float(reward), bool(terminated), bool(truncated), _numbers(info)

    def close(self) -> None:
        """Give the simulator's memory back."""
        self._env.close()

    def _observe(self, obs: Mapping[str, Any]) -> dict[str, Array]:
        parts = [obs[STATE]] if STATE in obs else [*_leaves(obs["agent"])]
        if STATE not in obs and self._extra:
            parts += _leaves(obs["extra"])
        return {STATE: vector(parts), **{image_key(c): obs["sensor_data"][c]["rgb"] for c in self._cameras}}


def _registration() -> Any:
    """Import ManiSkill with all of its tasks, once materials are replaced where nothing can be drawn."""
    os.environ["MS_SKIP_ASSET_DOWNLOAD_PROMPT"] = "1"  # nothing may wait for an answer on stdin
    can_draw()
    importlib.import_module("mani_skill.envs")
    return importlib.import_module("mani_skill.utils.registration")


def _make(task: str, draws: bool, options: dict[str, Any]) -> Any:
    make = _registration().make
    wrap = importlib.import_module("mani_skill.utils.wrappers.gymnasium").CPUGymWrapper
    try:
        return wrap(make(task, **options))
    except OSError as error:  # of the download that was tried in place of a question on stdin
        raise ConfigError(
            f"{FIRST}{task} needs assets ({error}): python -m mani_skill.utils.download_asset {task}"
        ) from error
    except (AttributeError, RuntimeError) as error:
        if draws and options["render_backend"] == "none":
            raise
        raise ConfigError(f"{FIRST}{task} needs a Vulkan device here ({NO_VULKAN}): {error}") from error


def _flat(space: Any) -> tuple[dict[str, tuple[int, int]] | None, spaces.Box]:
    if not isinstance(space, spaces.Dict):
        return None, space
    parts: dict[str, tuple[int, int]] = {}
    boxes: dict[str, Any] = dict(sorted(space.spaces.items()))
    end = 0
    for name, box in boxes.items():
        parts[name] = (end, end + box.shape[0])
        end += box.shape[0]
    low, high = (np.concatenate([getattr(box, bound) for box in boxes.values()]) for bound in ("low", "high"))
    return parts, spaces.Box(low, high, dtype=np.float32)


def _leaves(value: Any) -> Iterator[Array]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    else:
        yield np.asarray(value)


def _numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        key: value for key, value in info.items() if np.size(value) == 1 and np.asarray(value).dtype.kind in "biuf"
    }
    return {key: np.asarray(value).item() for key, value in found.items()}


def describe(wanted: Wanted) -> tuple[EnvSpec, ...]:
    """Describe one task; see `ebrl.sim.adapters.describe`.

    Raises:
        UnknownEnv: No such task.
    """
    task = wanted.name.removeprefix(FIRST)
    known = _registration().REGISTERED_ENVS
    if task not in known:
        unknown_env(wanted.name, {f"{FIRST}{name}": f"{FIRST}{name}" for name in known})
    make = functools.partial(ManiSkillEnv, task, **wanted.kwargs)
    return (wanted.spec(wanted.name, make, known[task].max_episode_steps or HORIZON, task),)
