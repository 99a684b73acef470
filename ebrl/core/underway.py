"""`Underway`: one piece of work at a time, which ends whether or not who began it is still there.

An update cannot be undone: half of it would be in the weights, and all of its data used up; nor can the end of a
service. So who is cancelled while one runs leaves it to whoever asks next. No `Scope` could: it ends with its owner,
who waits for its children without a deadline. Whoever makes an `Underway` closes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from ebrl.core.errors import Closed, logger

T = TypeVar("T")


class Underway(Generic[T]):
    """Begin a piece of work, then take its result, once. Used on the loop only."""

    def __init__(self, name: str) -> None:
        """Make one.

        Args:
            name: Of the work, for messages.
        """
        self._name = name
        self._task: asyncio.Task[T] | None = None  # until its result is taken
        self._wanted = False  # somebody waits for it
        self._awaited = False  # somebody waits until nothing runs

    @property
    def begun(self) -> bool:
        """Whether there is a result to take, at once or later."""
        return self._task is not None

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the result; the work itself cannot."""
        return self._wanted or (self._task is not None and asyncio.current_task() is self._task)

    @property
    def runs(self) -> bool:
        """Whether the work has not ended."""
        return self._task is not None and not self._task.done()

    async def before(self) -> None:
        """Let those go first who have waited in `idle`; called before the data of the next piece are taken."""
        if self._awaited:
            await asyncio.sleep(0)

    def begin(self, work: Coroutine[Any, Any, T]) -> None:
        """Begin a piece of work; the result of the last one was taken."""
        assert self._task is None
        self._task = asyncio.create_task(work, name=self._name)

    async def result(self) -> T:
        """Wait for the end, and take what came of it. Who is cancelled takes nothing, and stops nothing.

        Raises:
            Closed: It was given up.
        """
        assert self._task is not None
        self._wanted = True
        try:
            if self.runs:
                await asyncio.wait([self._task])
        finally:
            self._wanted = False
        task, self._task = self._task, None
        if task.cancelled():
            raise Closed(f"{self._name} was given up: it had not ended when there was no more time for closing")
        return task.result()

    async def idle(self) -> None:
        """Wait until nothing runs; nothing begins in the turn of the loop in which this returns."""
        while self._task is not None and self.runs:
            self._awaited = True
            await asyncio.wait([self._task])
        self._awaited = False

    async def aclose(self, deadline_s: float) -> bool:
        """Wait for the end, and give up what still runs at the deadline; an error that nobody asked for is logged.

        Returns:
            Whether it has ended in time.
        """
        if (task := self._task) is None:
            return True
        try:
            ended, _ = await asyncio.wait([task], timeout=deadline_s)
        finally:
            task.cancel()
        await asyncio.wait([task])
        taken = self._wanted or self._task is not task
        if not taken and not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed, and nobody waits for it any more", self._name, exc_info=error)
        return bool(ended)
