"""EnvPool (Weng et al. 2022, arXiv:2206.10558): many simulators in C++ threads, such as ``"EnvPool/HalfCheetah-v5"``.

EnvPool starts the next episode of a slot with the step after its end, whatever the action: a reset, and no decision.
Here a slot is never stepped after its end. It is reset by its number first, which EnvPool can do to some slots while
the others stand, so that last observations are kept and no decision is made up.

A step sends the actions of all slots and receives what came of all of them. EnvPool can also return the first of them
that are ready (``batch_size`` below ``num_envs``). That is not used: batches of half the slots were slower than whole
ones, .88 of them with a policy that costs nothing and .72 with one of a millisecond (HalfCheetah, 32 slots, two cores,
EnvPool 1.2.5), since each costs the policy as much as a whole one, and which slots share one would depend on timing.
What it is for, that half of the slots step while the actions of the others are chosen, two simulators do:
``VectorGroup(num_groups=2)``.

Slots take their seeds when EnvPool makes them, and their episodes follow from those: an episode has none of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import envpool
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from ebrl.core.errors import ConfigError
from ebrl.core.records import Array, EnvSpec
from ebrl.sim.adapters import Wanted
from ebrl.sim.spec import unknown_env
from ebrl.sim.vector_simulator import SLOT_SEEDS

FIRST = "EnvPool/"
ENV_ID = "env_id"


class EnvPoolEnv(VectorEnv[Any, Array, Array]):
    """A pool of EnvPool that resets slots when it is told to, and never by itself."""

    def __init__(self, task: str, num_slots: int, **kwargs: Any) -> None:
        """Describe it; the pool is made by the first reset, since it takes its seeds then.

        Args:
            task: As EnvPool names it.
            num_slots: M.
            **kwargs: For EnvPool: ``num_threads``, ``max_episode_steps`` and so on.
        """
        spec = envpool.make_spec(task, num_envs=num_slots, **kwargs)
        self.num_envs = num_slots
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, SLOT_SEEDS: False}
        self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_slots)
        self.action_space = batch_space(self.single_action_space, num_slots)
        self._make = functools.partial(envpool.make_gymnasium, task, num_envs=num_slots, **kwargs)
        self._pool: Any = None
        self._obs: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin episodes in the slots of ``options["reset_mask"]``, or in all.

        Args:
            seed: From which all slots are seeded by the first reset, and looked at by no other.
            options: See there.
        """
        ids = np.arange(self.num_envs, dtype=np.int32)
        if self._pool is None:
            seeds = np.random.SeedSequence(seed).generate_state(self.num_envs) >> 1  # int32
            self._pool = self._make(seed=seeds.tolist())
        if options is not None and "reset_mask" in options:
            ids = ids[options["reset_mask"]]
        obs, info = self._pool.reset(ids)
        if len(ids) == self.num_envs:
            self._obs = _rows(obs, np.argsort(info[ENV_ID]))
        else:
            _write(self._obs, info[ENV_ID], obs)
        return self._obs, {}

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Advance all slots by one step."""
        self._pool.send(actions)
        obs, reward, terminated, truncated, info = self._pool.recv()
        order = np.argsort(info[ENV_ID])
        self._obs = _rows(obs, order)
        numbers = {k: v[order] for k, v in info.items() if isinstance(v, np.ndarray) and v.shape == (self.num_envs,)}
        return self._obs, reward[order], terminated[order], truncated[order], numbers

    def close_extras(self, **_: Any) -> None:
        """End the threads of the pool."""
        self._pool = None


def _rows(obs: Any, order: Array) -> Any:
    if isinstance(obs, dict):
        return {key: part[order] for key, part in obs.items()}
    return obs[order]


def _write(obs: Any, ids: Array, some: Any) -> None:
    if isinstance(obs, dict):
        for key, part in obs.items():
            part[ids] = some[key]
    else:
        obs[ids] = some


def describe(wanted: Wanted) -> tuple[EnvSpec, ...]:
    """Describe one task; see `ebrl.sim.adapters.describe`.

    Raises:
        UnknownEnv: No such task.
        ConfigError: A number of slots is missing, or one of EnvPool's own that is ours to set.
    """
    task = wanted.name.removeprefix(FIRST)
    if task not in envpool.list_all_envs():
        unknown_env(wanted.name, {f"{FIRST}{name}": f"{FIRST}{name}" for name in envpool.list_all_envs()})
    if not wanted.num_slots:
        raise ConfigError(f"{wanted.name} is a batched simulator: say of how many slots, env_spec(..., num_slots=8)")
    ours = {"num_envs": "num_slots", "batch_size": "num_slots, all of which are stepped", "seed": "Runtime(seed=...)"}
    for key, instead in ours.items():
        if key in wanted.kwargs:
            raise ConfigError(f"{wanted.name}: {key} is given by {instead}")
    limit = int(envpool.make_spec(task, num_envs=1, **wanted.kwargs).config.max_episode_steps)
    make = functools.partial(EnvPoolEnv, task, wanted.num_slots, **wanted.kwargs)
    return (wanted.spec(wanted.name, make, limit, task, num_slots=wanted.num_slots),)
