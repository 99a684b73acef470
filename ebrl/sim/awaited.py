"""`AwaitedSimulator`: a simulator whose `reset` and `step` are coroutine functions, with the checks of every other one.

A robot behind a network connection, or a simulator that is a service: nothing blocks, so it needs no thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from ebrl.core.errors import ConfigError
from ebrl.core.records import Array, EnvSpec, Host, Observation, StepResult
from ebrl.sim.simulator import ActionReader, Simulator

T = TypeVar("T")


def is_awaited(env: object) -> bool:
    """Whether the steps of an environment are to be awaited."""
    return inspect.iscoroutinefunction(getattr(env, "step", None))


def check_awaited(spec: EnvSpec, host: Host | None) -> None:
    """Check that what is awaited runs on the loop, and nothing else does.

    Raises:
        ConfigError: The chosen host cannot run it.
    """
    if host in (None, "auto") or (host == "inline") == (spec.host == "inline"):
        return
    if host == "inline":
        raise not_awaited(spec.id)
    raise ConfigError(f"{spec.id}: its reset and step are coroutine functions: leave out host={host!r}")


def not_awaited(name: str) -> ConfigError:
    """Return the error of an environment that cannot run on the loop."""
    return ConfigError(
        f"{name}: host='inline' is for environments whose reset and step are coroutine functions; use host='thread'"
    )


class _Answer:
    """The environment as `Simulator` sees it: what the real one has answered last."""

    def __init__(self) -> None:
        self.last: Any = None

    def reset(self, *, seed: int) -> Any:
        return self.last

    def step(self, action: Any) -> Any:
        return self.last


class AwaitedSimulator:
    """One of them. Its calls must follow each other."""

    def __init__(self, spec: EnvSpec, env: Any) -> None:
        """Take an environment.

        Args:
            spec: What to expect of it.
            env: As `make` built it.

        """
        self._env = env
        self._answer = _Answer()
        self._simulator = Simulator(replace(spec, make=lambda: self._answer, action_repeat=1))
        self._actions = ActionReader(spec.action)
        self._discrete = spec.action.num_values is not None
        self._repeat = spec.action_repeat

    @classmethod
    async def build(cls, spec: EnvSpec) -> Self:
        """Make one; `make` may be a coroutine function, too."""
        made = spec.make()
        return cls(spec, await made if inspect.isawaitable(made) else made)

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """See `Simulator.reset`."""
        self._simulator.interrupt()
        self._answer.last = await self._env.reset(seed=seed)
        return self._simulator.reset(seed)

    async def step(self, actions: Array, finite: bool = False) -> StepResult:
        """See `Simulator.step`."""
        self._simulator.expect_episode()
        chunk = self._actions.chunk(actions)
        if not finite or self._discrete:
            self._actions.check(chunk)
        rewards: tuple[float, ...] = ()
        for action in np.repeat(chunk, self._repeat, axis=0):
            result = await self._once(action)
            rewards += result.rewards
            if result.terminated or result.truncated:
                break
        result.rewards = rewards
        return result

    async def call(self, fn: Callable[[Any], Any]) -> Any:
        """Return ``fn(env)``, awaited where that is possible."""
        result = fn(self._env)
        return await result if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """Close it."""
        self._simulator.interrupt()
        closing = self._env.close()
        if inspect.isawaitable(closing):
            await closing

    async def _once(self, action: Array) -> StepResult:
        try:
            self._answer.last = await self._env.step(int(action) if self._discrete else action.copy())
        except BaseException:
            self._simulator.interrupt()
            raise
        return self._simulator.step(action[np.newaxis], finite=True)


class Apart:
    """An event loop in a thread of its own, for those who cannot await, and may be called where a loop runs already."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ebrl-apart")
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, and block until then."""
        return self._thread.submit(self._runner.run, what).result()
