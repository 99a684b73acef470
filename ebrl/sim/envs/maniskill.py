"""ManiSkill 3 (Tao et al. 2024, arXiv:2410.00425), such as ``"ManiSkill/PickCube-v1"``.

On the CPU, one simulator each; or, with ``num_slots``, one of many slots on the GPU, which was written for one and not
exercised on one.

States work on a machine that cannot draw: ManiSkill makes materials all the same, so that they are replaced by objects
that do nothing. Pictures need a Vulkan device. Actions of tasks with several robots, which are dictionaries, are one
vector: the robots' actions in the order of their names. Importing this module imports sapien; mani_skill and torch
follow at use.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
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
from ebrl.sim.envs.tensors import TensorVectorEnv, flat, to_numpy
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
    material = sapien.render.RenderMaterial
    if material is Blank:
        return False
    try:
        material()
    except RuntimeError:
        loaded: list[Any] = [module for name, module in sys.modules.items() if name.partition(".")[0] == "sapien"]
        for module in loaded:  # some have names of their own for it, if somebody has imported ManiSkill before
            if getattr(module, "RenderMaterial", None) is material:
                module.RenderMaterial = Blank
            if "RenderTexture2D" in vars(module):
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
        full = full_state if full_state is not None else not cameras
        options = {"sim_backend": "physx_cpu", "render_backend": "cpu" if cameras else "none"} | kwargs
        self._extra = full or bool(cameras)  # beside pictures, ManiSkill leaves out what a robot could not know
        self._cameras: tuple[str, ...] = ()
        env = _make(task, _modes(task, cameras, image_size, full) | options)  # imports ManiSkill in the right order
        self._env = importlib.import_module("mani_skill.utils.wrappers.gymnasium").CPUGymWrapper(env)
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
        parts = _parts(obs, self._extra)
        return {STATE: vector(parts), **{image_key(c): obs["sensor_data"][c]["rgb"] for c in self._cameras}}


def make_batched(
    task: str,
    num_slots: int,
    cameras: str | Sequence[str] = (),
    image_size: int = IMAGE_SIZE,
    full_state: bool | None = None,
    **kwargs: Any,
) -> TensorVectorEnv:
    """Build one simulator of many slots, on the GPU unless `kwargs` say otherwise. Not exercised on a GPU.

    Args:
        task: Such as ``"PickCube-v1"``.
        num_slots: M.
        cameras: As for `ManiSkillEnv`; so are the others.
        image_size: See there.
        full_state: See there.
        **kwargs: See there.

    Raises:
        ConfigError: As `ManiSkillEnv`.
    """
    full = full_state if full_state is not None else not cameras
    options = {"sim_backend": "physx_cuda", "render_backend": "gpu" if cameras else "none", "reconfiguration_freq": 0}
    env = _make(task, _modes(task, cameras, image_size, full) | {"num_envs": num_slots} | options | kwargs)
    seen: Mapping[str, Any] = env.reset(seed=0)[0]
    names = camera_names(cameras, seen.get("sensor_data", {}), f"{FIRST}{task}")
    parts, space = _flat(env.unwrapped.single_action_space)

    def observe(obs: Mapping[str, Any]) -> dict[str, Array]:
        state = flat(_parts(obs, full or bool(cameras)))
        return {STATE: state, **{image_key(c): to_numpy(obs["sensor_data"][c]["rgb"]) for c in names}}

    def act(actions: Array) -> Any:
        return actions if parts is None else {name: actions[:, start:end] for name, (start, end) in parts.items()}

    seen_space = observation_space(observe(seen)[STATE].shape[1], names, image_size)
    return TensorVectorEnv(env.unwrapped, seen_space, space, observe, act)


def _modes(task: str, cameras: str | Sequence[str], image_size: int, full: bool) -> dict[str, Any]:
    """Return the options that say what is observed.

    Raises:
        ConfigError: Nothing can be drawn here.
    """
    if not cameras:
        return {"obs_mode": "state_dict"}
    if not can_draw():
        raise ConfigError(f"{FIRST}{task}: pictures need a Vulkan device ({NO_VULKAN})")
    size = {"width": image_size, "height": image_size}
    return {"obs_mode": "rgb+state" if full else "rgb", "sensor_configs": size}


def _registration() -> Any:
    """Import ManiSkill with all of its tasks, once materials are replaced where nothing can be drawn."""
    os.environ["MS_SKIP_ASSET_DOWNLOAD_PROMPT"] = "1"  # nothing may wait for an answer on stdin
    can_draw()
    importlib.import_module("mani_skill.envs")
    return importlib.import_module("mani_skill.utils.registration")


def _make(task: str, options: dict[str, Any]) -> Any:
    draws, make = can_draw(), _registration().make
    try:
        return make(task, **options)
    except OSError as error:  # of the download that was tried in place of a question on stdin
        raise ConfigError(
            f"{FIRST}{task} needs assets ({error}): python -m mani_skill.utils.download_asset {task}"
        ) from error
    except (AttributeError, RuntimeError) as error:
        if "num_envs" in options:
            raise ConfigError(
                f"{FIRST}{task} in {options['num_envs']} slots needs a GPU; on the CPU leave out num_slots, and use an "
                f"EnvGroup: {str(error).splitlines()[0]}"
            ) from error
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


def _parts(obs: Mapping[str, Any], extra: bool) -> list[Any]:
    """Return what belongs to the state."""
    if STATE in obs:
        return [obs[STATE]]
    return [*_leaves(obs["agent"]), *(_leaves(obs["extra"]) if extra else ())]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    else:
        yield value


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
    make: Any = functools.partial(ManiSkillEnv, task, **wanted.kwargs)
    if wanted.num_slots:
        make = functools.partial(make_batched, task, wanted.num_slots, **wanted.kwargs)
    horizon = known[task].max_episode_steps or HORIZON
    return (wanted.spec(wanted.name, make, horizon, task, num_slots=wanted.num_slots),)
