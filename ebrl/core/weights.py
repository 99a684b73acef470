"""`WeightStore`: versioned weights in a double buffer, so that publishing never stops a reader and never tears a read.

A reader leases the front buffer for one batch. The publisher waits until nobody reads the back buffer any more (at
most the batches in flight), copies into it on a lane of its own, and flips the index on the loop, with no await
between the end of the copy and the flip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ebrl.core.errors import ConfigError
from ebrl.core.protocols import Lane

W = TypeVar("W")


class WeightLease(Generic[W]):
    """A right to read one buffer until released."""

    __slots__ = ("_index", "_store", "version", "weights")

    def __init__(self, store: WeightStore[W], index: int, weights: W, version: int) -> None:
        self._store: WeightStore[W] | None = store
        self._index = index
        self.weights = weights
        self.version = version

    def release(self) -> None:
        """Stop reading; once per lease."""
        store, self._store = self._store, None
        assert store is not None, "a weight lease was released twice"
        store._release(self._index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class WeightStore(Generic[W]):
    """Two buffers and the number of the version in front. Used on the loop only."""

    def __init__(self, front: W, back: W, copy: Callable[[Any, W], None]) -> None:
        """Make a store.

        Args:
            front: Version 0. Nobody else may write to it.
            back: Another buffer of the same form.
            copy: ``copy(source, buffer)``; runs on the publisher's lane.
        """
        self._buffers = (front, back)
        self._readers = [0, 0]
        self._front = 0
        self._version = 0
        self._copy = copy
        self._free: asyncio.Future[None] | None = None
        self._publishing = False

    @property
    def version(self) -> int:
        """Of the weights in front; the number of publishes so far, in this run and the one that it continues."""
        return self._version

    def lease(self) -> WeightLease[W]:
        """Read the newest version."""
        front = self._front
        self._readers[front] += 1
        return WeightLease(self, front, self._buffers[front], self._version)

    def begin(self, source: Any, version: int) -> None:
        """Go on from an earlier run: the next lease has these weights and this version.

        For the start only, when nobody publishes; copies on the calling thread.

        Args:
            source: Copied.
            version: Its number there.
        """
        back = 1 - self._front
        assert not self._publishing, "a run cannot be continued while weights are published"
        assert not self._readers[back], "a run cannot be continued while an older version is read"
        self._copy(source, self._buffers[back])
        self._front, self._version = back, version

    async def publish(self, source: Any, lane: Lane) -> int:
        """Copy `source` into the back buffer and make it the front.

        Args:
            source: Not written to by anyone until this returns.
            lane: Where the copy runs. Who is cancelled meanwhile does not stop it: the version is published.

        Returns:
            The new version.

        Raises:
            ConfigError: Somebody else is publishing.
        """
        if self._publishing:
            raise ConfigError("two trainers publish to one generator: give each learner a generator of its own")
        self._publishing = True
        back = 1 - self._front
        try:
            while self._readers[back]:
                self._free = asyncio.get_running_loop().create_future()
                await self._free
            copied = lane.run(self._copy, source, self._buffers[back], n=0)
        except BaseException:
            self._publishing = False
            raise
        version = self._version + 1
        copied.add_done_callback(self._flip)
        await asyncio.shield(copied)
        return version

    def _flip(self, copied: asyncio.Future[None]) -> None:
        self._publishing = False
        if not copied.cancelled() and copied.exception() is None:
            self._front = 1 - self._front
            self._version += 1

    def _release(self, index: int) -> None:
        self._readers[index] -= 1
        if self._free is not None and index != self._front and not self._readers[index]:
            if not self._free.done():
                self._free.set_result(None)
            self._free = None
