"""`Scope`: structured concurrency for everything that EBRL runs; no other module creates tasks.

A scope is an `asyncio.TaskGroup` whose owner's exit ends its children. TaskGroup alone waits for them instead, and
`TaskGroup.cancel` does not exist before Python 3.15.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

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
        task.add_done_callback(self._tasks.pop)
        return task

    def cancel(self) -> None:
        """Cancel all children; they are awaited when the block is left."""
        for task in list(self._tasks):
            task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
        await self._group.__aexit__(kind, error, traceback)
