"""Virtual time: a clock that jumps, and that turns a deadlock into an error.

`VirtualLoop` jumps to the next timer instead of waiting for it. When nothing is scheduled and everybody waits, that
is a deadlock: the main task is cancelled at once, so that everything unwinds, and `Deadlock` leaves the loop with a
table of who waits for what. Work handed to real threads (``asyncio.to_thread``) is waited for while the clock stands.

The hardware that goes with it is `ebrl.core.virtual_machine`.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from ebrl.core.errors import Deadlock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _VirtualSelector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.loop._num_threads or len(self.get_map()) > 1:  # else only the loop's own pipe: nobody is out there
            events = super().select(0)
            if events:
                return events
        if timeout == 0:
            return []
        if self.loop._num_threads:
            return super().select(None)
        self.loop._advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps. Use `run_virtual`."""

    def __init__(self) -> None:
        selector = _VirtualSelector()
        selector.loop = self
        self._now = 0.0
        self._num_threads = 0
        self._main: asyncio.Future[Any] | None = None
        self._stalled: Deadlock | None = None
        self._settlers: list[asyncio.Future[None]] = []
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    async def settle(self) -> None:
        """Wait until every other task is blocked, with the clock standing."""
        future = self.create_future()
        self._settlers.append(future)
        await future

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run; a deadlock replaces whatever the cancelled main task made of it."""
        main: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]  # as asyncio does
        outer, self._main = self._main, main
        try:
            return super().run_until_complete(main)
        finally:
            self._main = outer
            stalled, self._stalled = self._stalled, None
            if stalled is not None:
                raise stalled from sys.exception()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run in a thread; the clock stands until it returns."""
        future = super().run_in_executor(executor, func, *args)
        self._num_threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Join the threads of the default executor."""
        self._num_threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._num_threads -= 1

    def _thread_ended(self, future: asyncio.Future[Any]) -> None:
        self._num_threads -= 1

    def _advance(self, timeout: float | None) -> None:
        if self._settlers:
            settlers, self._settlers = self._settlers, []
            for settler in settlers:
                if not settler.done():
                    settler.set_result(None)
        elif timeout is not None:
            self._now += timeout
        elif self._stalled is None and self._main is not None:
            self._stalled = Deadlock(f"everybody waits and nothing is scheduled:\n{who_waits(self)}")
            self._main.cancel()
        else:
            raise Deadlock(f"the tasks that were cancelled wait again:\n{who_waits(self)}") from self._stalled


def who_waits(loop: asyncio.AbstractEventLoop) -> str:
    """Return one line per task: its name, and where in its code it waits."""
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        frames = _await_chain(task.get_coro())
        lines.append(f"  {task.get_name()}: {' > '.join(frames[-3:]) or 'not started'}")
    return "\n".join(lines)


def _await_chain(awaitable: Any) -> list[str]:
    frames = []
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is not None:
            summary = traceback.extract_stack(frame, limit=1)[0]
            frames.append(f"{summary.name} (line {summary.lineno})")
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return frames


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time.

    Raises:
        Deadlock: Everybody waits and nothing is scheduled.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
