"""Simulators that come with an adapter in `ebrl.sim.envs`: known by the first part of an id, and imported at use."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ebrl.core.errors import ConfigError, whole
from ebrl.core.records import ArraySpec, EnvSpec, Host
from ebrl.sim.simulator import construction_lock

ADAPTERS: Final = {
    "Meta-World": "metaworld",
    "LIBERO": "libero",
    "ManiSkill": "maniskill",
    "robosuite": "robosuite",
    "EnvPool": "envpool",
}
"""First part of an id, and the name of the module in `ebrl.sim.envs` and of the extra that brings the simulator."""

CRASH_BY_OSMESA: Final = frozenset({"LIBERO", "robosuite"})
"""Drawn by OSMesa, LIBERO ended its process (2 of 2 times) when another thread used what one had made; robosuite draws
for it."""

IMAGE_SIZE: Final = "image_size"
"""Option of all adapters that draw."""

NO_GL: Final = "glx"
"""Value of ``MUJOCO_GL`` with which everything can be imported where nothing can be drawn."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an adapter is asked to describe; see `ebrl.env_spec`.

    Attributes:
        name: Id, such as ``"LIBERO/libero_spatial"``.
        kwargs: Options of the adapter.
        horizon: As in `ebrl.env_spec`.
        action_repeat: As there.
        task: As there.
        host: As there.
        num_slots: As there.
    """

    name: str
    kwargs: dict[str, Any]
    horizon: int | None = None
    action_repeat: int = 1
    task: str = ""
    host: Host | None = None
    num_slots: int = 0

    def spec(
        self, name: str, make: Callable[[], Any], horizon: int, task: str, memory_mib: int = 0, num_slots: int = 0
    ) -> EnvSpec:
        """Return a description without spaces.

        Args:
            name: Id of the task, for messages.
            make: Builds it; picklable.
            horizon: Where the user did not ask for another.
            task: Likewise.
            memory_mib: That one simulator takes; 0: little.
            num_slots: Of a batched simulator.
        """
        blank = ArraySpec((), "float32")
        # Else steps that hold the lock, and resets of which one thread at a time is capable.
        host = self.host or ("thread" if num_slots else "process")
        first = self.name.partition("/")[0]
        by_osmesa = bool(self.kwargs.get("cameras")) and os.environ.get("MUJOCO_GL") == "osmesa"
        return EnvSpec(
            name,
            make,
            blank,
            blank,
            self.horizon or horizon,
            self.action_repeat,
            self.task or task,
            host,
            memory_mib=memory_mib,
            num_slots=num_slots,
            crashes=by_osmesa and first in CRASH_BY_OSMESA,
        )


def has_adapter(name: str) -> bool:
    """Whether an id is for an adapter."""
    first, slash, _ = name.partition("/")
    return bool(slash) and first in ADAPTERS


def describe(wanted: Wanted) -> tuple[EnvSpec, ...]:
    """Ask the adapter for the task or tasks that an id stands for; nothing is built, so that spaces are still missing.

    Raises:
        UnknownEnv: The simulator has no such task.
        ConfigError: It is not installed, or its adapter does not take the options.
    """
    if IMAGE_SIZE in wanted.kwargs:
        whole(IMAGE_SIZE, wanted.kwargs[IMAGE_SIZE])  # simulators draw pictures without a pixel, too
    name = ADAPTERS[wanted.name.partition("/")[0]]
    choose_gl()
    try:
        with construction_lock:
            module = importlib.import_module(f"ebrl.sim.envs.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{wanted.name} needs {error.name}: pip install 'ebrl[{name}]'") from error
    specs: tuple[EnvSpec, ...] = module.describe(wanted)
    return specs


def choose_gl() -> None:
    """Let MuJoCo draw without a display where EGL is there, unless the user chose something else.

    MuJoCo reads ``MUJOCO_GL`` when it is imported, and where EGL is asked for and missing, the import fails. robosuite
    asks for EGL on behalf of all who have not chosen; with ``glx``, states can be simulated all the same.
    """
    if sys.platform != "linux" or "MUJOCO_GL" in os.environ:
        return
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        os.environ["MUJOCO_GL"] = NO_GL
    else:
        os.environ["MUJOCO_GL"] = "egl"


def require_gl(name: str) -> None:
    """Look whether pictures can be drawn.

    Raises:
        ConfigError: EGL is missing, and the user chose nothing else.
    """
    if os.environ.get("MUJOCO_GL") == NO_GL:
        raise ConfigError(
            f"{name}: pictures need EGL (Debian: apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri), "
            "or MUJOCO_GL=osmesa"
        )
