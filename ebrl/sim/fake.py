"""`ScriptedEnv`: an environment of plain arithmetic, whose lengths, delays and failures are written down beforehand.

Tests and benchmarks use it where a real simulator would only add time and doubt. A step without latency costs about a
microsecond and a half. Its observation is one buffer that each step overwrites, as in many real simulators.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from ebrl.core.records import Array
from ebrl.core.virtual_machine import spend

Fault: TypeAlias = Literal["raise", "nan", "shape", "dtype", "hang", "exit", "crash"]
Draw: TypeAlias = "Callable[[np.random.Generator], float]"

CONSTRUCTION = -1
"""Call number of the constructor in a plan of faults."""

CLOSE = -2
"""Likewise of `close`."""

FOREVER_S = 1e7
"""How long ``"hang"`` takes without a gate, in virtual time too."""


class ScriptedFault(Exception):
    """Raised where a plan says ``"raise"``."""


class ScriptedEnv(gymnasium.Env[Array, Any]):
    """``x' = 0.5 x + 0.25 mix(action) + drift``, and the observation is ``x`` times fixed weights.

    Example:
        >>> env = ScriptedEnv(obs_dim=2, length=3)
        >>> obs, info = env.reset(seed=0)
        >>> [bool(env.step(np.zeros(4, np.float32))[3]) for _ in range(3)]
        [False, False, True]
    """

    def __init__(
        self,
        obs_dim: int = 39,
        action_dim: int = 4,
        *,
        num_actions: int | None = None,
        length: int | Draw = 100,
        terminates: bool = False,
        success_above: float = 0.0,
        latency_s: float | Draw = 0.0,
        faults: Mapping[int, Fault] | None = None,
        storm: Mapping[Fault, float] | None = None,
        gate: threading.Event | None = None,
    ) -> None:
        """Write the script.

        Args:
            obs_dim: Numbers in an observation.
            action_dim: Numbers in an action, each in -1 .. 1.
            num_actions: Makes the action discrete.
            length: Steps of an episode, or a law that draws them from the episode's generator.
            terminates: Whether an episode ends by termination rather than by truncation.
            success_above: ``info["success"]`` of the last step says whether x is above this.
            latency_s: Sleep per step, or a law likewise.
            faults: What goes wrong at which call; resets and steps are counted together from 0, the constructor is
                `CONSTRUCTION` and the end `CLOSE`, where data cannot be wrong.
            storm: With which probability each reset and each step goes wrong how, drawn from the episode's generator.
            gate: What ``"hang"`` waits for; None waits for ever.
        """
        self.observation_space = spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self.action_space = (
            spaces.Box(-1.0, 1.0, (action_dim,), np.float32) if num_actions is None else spaces.Discrete(num_actions)
        )
        self._discrete = num_actions is not None
        self._weights = np.linspace(1.0, 2.0, obs_dim, dtype=np.float32)
        self._mix = np.linspace(1.0, 0.5, action_dim, dtype=np.float32)
        self._length, self._latency = length, latency_s
        self._terminates = terminates
        self._success_above = success_above
        self._faults = dict(faults or {})
        self._storm = dict(storm or {})
        self._gate = gate
        self._obs = np.zeros(obs_dim, np.float32)
        self._x = self._drift = 0.0
        self._left = 0
        self._num_calls = 0
        self._rng = np.random.default_rng(0)
        if CONSTRUCTION in self._faults:
            self._fail(self._faults[CONSTRUCTION], self._obs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode that depends on `seed` alone."""
        self._rng = rng = np.random.default_rng(seed)
        self._drift = float(rng.uniform(-0.1, 0.1))
        self._x = float(rng.uniform(-1.0, 1.0))
        self._left = int(self._length(rng)) if callable(self._length) else self._length
        np.multiply(self._weights, self._x, out=self._obs)
        return self._planned(self._obs), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Advance by one step."""
        if self._latency:
            time.sleep(self._latency(self._rng) if callable(self._latency) else self._latency)
        push = 0.1 * action if self._discrete else float(action.dot(self._mix))
        self._x = x = 0.5 * self._x + 0.25 * push + self._drift
        obs = self._obs
        np.multiply(self._weights, x, obs)
        if self._faults or self._storm:
            obs = self._planned(obs)
        self._left -= 1
        if self._left > 0:
            return obs, -x * x, False, False, {"success": False, "x": x}
        ends = self._terminates
        return obs, -x * x, ends, not ends, {"success": x > self._success_above, "x": x}

    def close(self) -> None:
        """End."""
        if CLOSE in self._faults:
            self._fail(self._faults[CLOSE], self._obs)

    def _planned(self, obs: Array) -> Array:
        fault = self._faults.get(self._num_calls)
        self._num_calls += 1
        if self._storm:
            chance = self._rng.random()
            for drawn, probability in self._storm.items():
                if fault is None and chance < probability:
                    fault = drawn
                chance -= probability
        return obs if fault is None else self._fail(fault, obs)

    def _fail(self, fault: Fault, obs: Array) -> Array:
        if fault == "raise":
            raise ScriptedFault(f"scripted at call {self._num_calls - 1}")
        if fault == "exit":
            os._exit(3)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "nan":
            obs[-1] = np.nan
            return obs
        if fault == "shape":
            return np.zeros(len(obs) + 1, np.float32)
        if fault == "dtype":
            return np.zeros(len(obs), np.complex64)
        if self._gate is None:
            spend(FOREVER_S)
        else:
            self._gate.wait()
        return obs
