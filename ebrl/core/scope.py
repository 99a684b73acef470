"""`Scope`: structured concurrency for everything that EBRL runs; the two others that create tasks say why.

A scope is an `asyncio.TaskGroup` whose owner's exit ends its children. TaskGroup alone waits for them instead, and
`TaskGroup.cancel` does not exist before Python 3.15.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")


async def finish(coro: Coroutine[Any, Any, T], name: str) -> T:
    """Run `coro` to its end whatever cancellations arrive meanwhile, then raise the first of them.

    For the end of things only: what it runs must have a deadline of its own.

    Raises:
        asyncio.CancelledError: The caller was cancelled meanwhile; `coro` has ended all the same.
    """
    task = asyncio.get_running_loop().create_task(coro, name=name)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is not None and not task.cancelled() and task.exception() is None:
        raise cancelled
    return task.result()


class Scope:
    """Named tasks that end when their owner leaves the ``async with`` block.

    The first task that raises cancels the others and the owner; the block then raises an `ExceptionGroup`.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: dict[asyncio.Task[Any], str] = {}  # in the order of their start, which cancellation follows
        self.ending = False
        """Whether the children are being cancelled; one that is cancelled before was so by somebody else."""

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    def start(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `coro` as a child.

        Args:
            coro: What to run.
            name: Shown in traces, logs and deadlock tables.
        """
        task = self._group.create_task(coro, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            self.ending = True

    def fail(self, error: BaseException) -> bool:
        """End as if a child had raised `error`; for what is raised outside of all tasks.

        Returns:
            False: the scope has ended, or ends because of another error.
        """
        failing = _fail(error)
        try:
            self.start(failing, "callback")
        except RuntimeError:
            failing.close()
            return False
        return True

    def cancel(self) -> None:
        """Cancel all children; they are awaited when the block is left."""
        self.ending = True
        for task in list(self._tasks):
            task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
        await self._group.__aexit__(kind, error, traceback)


@contextmanager
def heeding_callbacks(scope: Scope) -> Iterator[None]:
    """Let what the library raises in a callback of the running loop end `scope`.

    asyncio only logs it, and whoever waits for what the callback did not do would wait for ever. Callbacks that never
    enter the library are none of its business: they are logged as before.
    """
    loop = asyncio.get_running_loop()
    outer = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and error is not None and _is_ours(error) and scope.fail(error):
            return
        if outer is not None:
            outer(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(outer)


def _is_ours(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("ebrl.") for frame in frames)


async def _fail(error: BaseException) -> NoReturn:
    if isinstance(error, asyncio.CancelledError):  # would only end this task, as if somebody had cancelled it
        raise RuntimeError(f"{error!r} left a callback of the loop") from error
    raise error
