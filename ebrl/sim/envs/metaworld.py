"""Meta-World: manipulation tasks of the Sawyer arm, each with 50 positions of object and goal.

MT1 is one task. MT10 and MT50 are ten and fifty at once, and one policy for all of them is told the task by a one-hot
vector at the end of its observation, as in the benchmark (Yu et al. 2019, arXiv:1910.10897).

Importing this module imports metaworld; `ebrl.env_spec("Meta-World/MT1", env_name="reach-v3")` does it at use.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import gymnasium
import metaworld as _registers_ids  # noqa: F401
import numpy as np
from gymnasium import spaces
from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3, MT50_V3
from metaworld.wrappers import RandomTaskSelectWrapper

from ebrl.core.errors import ConfigError
from ebrl.core.records import Array, ArraySpec, EnvSpec, Host
from ebrl.sim.spec import probe, unknown_env

MT1 = "Meta-World/MT1"
BENCHMARKS = {"Meta-World/MT10": tuple(MT10_V3), "Meta-World/MT50": tuple(MT50_V3)}
"""Tasks of each, in the order of Meta-World, which the one-hot vector follows."""
OBS_DIM = 39
MAX_HORIZON = 500
"""Steps after which Meta-World itself ends an episode."""


class MetaWorldEnv(gymnasium.Env[Array, Array]):
    """One MT1 task whose `reset(seed=...)` decides the episode, which Meta-World's own does not.

    The 50 positions are drawn from `seed` at construction, the same in every instance, and not from numpy's global
    generator as they would be by default. Success never ends an episode.
    """

    def __init__(self, env_name: str, seed: int = 0, task_id: tuple[int, int] | None = None, **kwargs: Any) -> None:
        """Build it. Call under `ebrl.sim.simulator.construction_lock`: numpy's global generator is swapped meanwhile.

        Args:
            env_name: Such as ``"reach-v3"``.
            seed: Of the 50 positions of object and goal.
            task_id: ``(i, n)`` puts n numbers at the end of an observation, of which number i is 1 and the others 0.
            **kwargs: For ``gymnasium.make``.
        """
        self._env = gymnasium.make(MT1, env_name=env_name, seed=seed, **{"disable_env_checker": True, **kwargs})
        self.observation_space = self._env.observation_space
        self._one_hot: Array | None = None
        if task_id is not None:
            index, num = task_id
            self._one_hot = np.eye(num)[index]
            self.observation_space = spaces.Box(-np.inf, np.inf, (OBS_DIM + num,))
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

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode; `seed` chooses the position."""
        if seed is not None:
            self._selector.np_random = np.random.default_rng(seed)
        obs, info = self._env.reset(options=options)
        return self._with_task(obs), info

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Advance by one step of 12.5 ms; ``info["success"]`` is a bool."""
        obs, reward, terminated, truncated, info = self._env.step(action)
        info["success"] = bool(info["success"])
        return self._with_task(obs), float(reward), bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """One picture, in the thread that made the environment."""
        return self._env.render()

    def close(self) -> None:
        """Give the simulator's memory back."""
        self._env.close()

    def _with_task(self, obs: Array) -> Array:
        return obs if self._one_hot is None else np.concatenate([obs, self._one_hot])


def metaworld_spec(
    name: str, horizon: int | None, action_repeat: int, task: str, host: Host | None, kwargs: dict[str, Any]
) -> EnvSpec:
    """Describe one MT1 task; see `ebrl.env_spec`.

    Args:
        name: ``"Meta-World/MT1"``.
        horizon: At most 500; None: 500.
        action_repeat: Simulator steps per action.
        task: Instruction; default: the task's name.
        host: Default ``"process"``: its steps are short and mostly Python, which threads cannot share.
        kwargs: `env_name`, and options of `MetaWorldEnv`.

    Raises:
        UnknownEnv: No such benchmark or task.
        ConfigError: No `env_name`, or a horizon that Meta-World cannot reach.
    """
    if name in BENCHMARKS:
        raise ConfigError(f'{name} has {len(BENCHMARKS[name])} tasks: env_specs("{name}") describes all of them')
    if name != MT1:
        unknown_env(name, _ids())
    env_name = kwargs.get("env_name")
    if env_name is None:
        raise ConfigError(f'{MT1} needs a task: env_spec("{MT1}", env_name="reach-v3")')
    if env_name not in ALL_V3_ENVIRONMENTS:
        unknown_env(env_name, {task: task for task in ALL_V3_ENVIRONMENTS})
    if horizon is not None and horizon > MAX_HORIZON:
        raise ConfigError(f"Meta-World ends episodes after {MAX_HORIZON} steps: horizon must be no more, got {horizon}")
    make = functools.partial(MetaWorldEnv, **kwargs)
    blank = ArraySpec((), "float32")
    spec = EnvSpec(
        f"{MT1}:{env_name}",
        make,
        blank,
        blank,
        horizon or MAX_HORIZON,
        action_repeat,
        task or env_name,
        host or "process",
    )
    return probe(spec, _observation)


def benchmark_specs(
    name: str, horizon: int | None, action_repeat: int, host: Host | None, kwargs: dict[str, Any]
) -> tuple[EnvSpec, ...]:
    """Describe all tasks of MT10 or MT50; see `ebrl.env_specs`. One is built: they have one form.

    Args:
        name: ``"Meta-World/MT10"`` or ``"Meta-World/MT50"``.
        horizon: As in `metaworld_spec`.
        action_repeat: As there.
        host: As there.
        kwargs: Options of `MetaWorldEnv`, the same for all.

    Raises:
        UnknownEnv: No such benchmark.
        ConfigError: A horizon that Meta-World cannot reach.
    """
    if name not in BENCHMARKS:
        unknown_env(name, _ids())
    for option in sorted({"env_name", "task_id"} & kwargs.keys()):
        raise ConfigError(f'{name} is all of its tasks and takes no {option}: one is env_spec("{MT1}", env_name="...")')
    tasks = BENCHMARKS[name]
    options = [{"env_name": task, "task_id": (index, len(tasks)), **kwargs} for index, task in enumerate(tasks)]
    first = metaworld_spec(MT1, horizon, action_repeat, "", host, options[0])
    return tuple(
        replace(first, id=f"{name}:{task}", make=functools.partial(MetaWorldEnv, **each), task=task)
        for task, each in zip(tasks, options, strict=True)
    )


def names() -> dict[str, str]:
    """What can be asked for: its short name, and how to ask for it."""
    return {**_ids(), **{task: f'{MT1} with env_name="{task}"' for task in ALL_V3_ENVIRONMENTS}}


def _ids() -> dict[str, str]:
    return {MT1: MT1, **{name: f'env_specs("{name}")' for name in BENCHMARKS}}


def _observation(space: Any, name: str) -> ArraySpec:
    # The simulator reports float64, policies want float32: the cast happens once, where observations are checked.
    # Its bounds are of no use: until the first reset they say that the goal is at the origin.
    return ArraySpec(tuple(space.shape), "float32")
