"""Helpers for tests of services and programs, shipped because users test theirs too."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ebrl.core.virtual import VirtualLoop


async def settle() -> None:
    """Wait until every other task is blocked, with the virtual clock standing.

    Raises:
        RuntimeError: Not on a `VirtualLoop`: on a real loop nothing tells blocked from slow.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError("settle() needs virtual time: run the test with run_virtual()")
    await loop.settle()


class Sequencer:
    """Makes tasks reach points in a fixed order.

    Example::

        seq = Sequencer()
        async with seq(1):   # in one task: entered only after seq(0) was left in another
            ...
    """

    def __init__(self) -> None:
        self._next = 0
        self._waiters: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def __call__(self, position: int) -> AsyncIterator[None]:
        """Wait for the turn of `position`, and give it on at the end of the block."""
        if position != self._next:
            self._waiters[position] = asyncio.get_running_loop().create_future()
            await self._waiters[position]
        try:
            yield
        finally:
            self._next += 1
            waiter = self._waiters.pop(self._next, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


@contextmanager
def no_leaks(patience_s: float = 1.0) -> Iterator[None]:
    """Fail if the block leaves a thread behind.

    Args:
        patience_s: How long a thread that is ending may take.

    Raises:
        AssertionError: Names the threads.
    """
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + patience_s
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in left if thread.is_alive()]
    assert not names, f"threads left behind: {names}"
