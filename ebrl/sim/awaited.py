"""`AwaitedSimulator`: a simulator whose `reset` and `step` are coroutine functions, with the checks of every other one.

A robot behind a network connection, or a simulator that is a service: nothing blocks, so it needs no thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from ebrl.core.errors import ConfigError, SimulatorError
from ebrl.core.records import Array, EnvSpec, Host, Observation, StepResult
from ebrl.sim.border import Border

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


async def answer(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call user code on the loop, and await what it returns where that is possible.

    Raises:
        SimulatorError: It ended as if the task that runs were cancelled, which nobody has asked for (a task of its own
            was), or with the whole program.
        BaseException: What else it raised, and the cancellation that somebody has asked for.
    """
    try:
        result = fn(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    except (asyncio.CancelledError, SystemExit) as error:
        task = asyncio.current_task()
        assert task is not None
        if isinstance(error, asyncio.CancelledError) and task.cancelling():
            raise
        raise SimulatorError(f"{error!r} left a simulator") from error


class AwaitedSimulator:
    """One of them. Its calls must follow each other."""

    def __init__(self, spec: EnvSpec, env: Any) -> None:
        """Take an environment.

        Args:
            spec: What to expect of it.
            env: As `make` built it.
        """
        self._border = Border(spec)
        self._env = env

    @classmethod
    async def build(cls, spec: EnvSpec) -> Self:
        """Make one; `make` may be a coroutine function, too.

        Not under `construction_lock`: while a thread builds, the loop would stand still.
        """
        return cls(spec, await answer(spec.make))

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """See `Simulator.reset`."""
        self._border.interrupt()
        return self._border.begin(await answer(self._env.reset, seed=seed))

    async def step(self, actions: Array, finite: bool = False) -> StepResult:
        """See `Simulator.step`."""
        border = self._border
        for action in border.take(actions, finite):
            result = await answer(self._env.step, action)
            if border.note(result):
                break
        return border.give(result)

    async def call(self, fn: Callable[[Any], Any]) -> Any:
        """Return ``fn(env)``, awaited where that is possible."""
        return await answer(fn, self._env)

    async def close(self) -> None:
        """Close it."""
        self._border.interrupt("step after close")
        await answer(self._env.close)


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
