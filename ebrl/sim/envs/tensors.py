"""Simulators that are batched on a GPU, as `VectorGroup` drives them: tensors inside, numpy arrays at the border.

Not exercised on a GPU: written for one, and tested with tensors on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from ebrl.core.records import Array
from ebrl.sim.simulator import construction_lock
from ebrl.sim.vector_simulator import SLOT_SEEDS


class TensorVectorEnv(VectorEnv[Any, Array, Array]):
    """A batched simulator with ManiSkill's interface (3.0), whose slots are reset by their numbers.

    One seed decides what all slots draw in one reset: where they begin follows from the seed of the first of them, and
    from which others are reset with it. So slots have no seeds of their own.
    """

    def __init__(
        self,
        env: Any,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        observe: Callable[[Any], dict[str, Array]],
        act: Callable[[Array], Any] | None = None,
    ) -> None:
        """Take over a simulator.

        Args:
            env: With ``num_envs``, ``device``, ``step(action)`` and ``reset(seed=..., options={"env_idx": ...})``; both
                return tensors ``[M, ...]``, and it resets no slot by itself.
            observation_space: Of one slot.
            action_space: Of one slot.
            observe: Makes arrays ``[M, ...]`` of what `env` observes; see `to_numpy`.
            act: Makes what `env` takes of actions ``[M, A]``; None: they are taken as they are.
        """
        self.num_envs = int(env.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED, SLOT_SEEDS: False}
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        self._env = env
        self._observe = observe
        self._act = act

    @property
    def unwrapped(self) -> Any:
        """The simulator's own environment."""
        return self._env

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Begin episodes, in the slots of ``options["reset_mask"]`` or in all.

        Under the lock of constructions, since torch's global generator is seeded in it.
        """
        given: dict[str, Any] = {}
        if options is not None and "reset_mask" in options:
            chosen = np.flatnonzero(options["reset_mask"])
            given["env_idx"] = importlib.import_module("torch").from_numpy(chosen).to(self._env.device)
        with construction_lock:
            obs, info = self._env.reset(seed=seed, options=given)
        return self._observe(obs), self._numbers(info)

    def step(self, actions: Array) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Any]]:
        """Advance all slots by one step."""
        given = actions if self._act is None else self._act(actions)
        obs, reward, terminated, truncated, info = self._env.step(given)
        flags = to_numpy(terminated), to_numpy(truncated)
        return self._observe(obs), to_numpy(reward), *flags, self._numbers(info)

    def close_extras(self, **_: Any) -> None:
        """Give the simulator's memory back."""
        self._env.close()

    def _numbers(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that have a number per slot."""
        tensor = importlib.import_module("torch").Tensor
        found = {key: to_numpy(value) for key, value in info.items() if isinstance(value, tensor)}
        return {key: value for key, value in found.items() if value.shape == (self.num_envs,)}


def to_numpy(tensor: Any) -> Array:
    """Return the numbers of a tensor, wherever it is."""
    array: Array = tensor.detach().cpu().numpy()
    return array


def flat(parts: list[Any]) -> Array:
    """Return tensors ``[M, ...]`` side by side, ``[M, D]`` float32."""
    arrays = [to_numpy(part) for part in parts]
    return np.concatenate(
        [array.reshape(len(array), -1) for array in arrays], axis=1, dtype=np.float32, casting="unsafe"
    )
