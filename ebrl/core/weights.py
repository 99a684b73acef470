"""`WeightStore`: versioned weights in a double buffer, so that publishing never stops a reader and never tears a read.

A reader leases the front buffer for one batch. The publisher waits until nobody reads the back buffer any more (at
most the batches in flight), copies into it on a lane of its own, and makes it the front on the loop, with no await
between the end of the copy and that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from ebrl.core.errors import Closed, ConfigError
from ebrl.core.protocols import Lane

W = TypeVar("W")
TWO: Final = "two publish to one generator at once: one after the other, or give each learner a generator of its own"


@dataclass(slots=True)
class _Buffer(Generic[W]):
    weights: W
    readers: int = 0


@dataclass(slots=True)
class _Request:
    wanted: bool = True  # whoever asked for a copy waits for it; written on the loop
    begun: bool = False  # written on the lane


class WeightLease(Generic[W]):
    """A right to read one buffer until released."""

    __slots__ = ("_buffer", "_store", "version", "weights")

    def __init__(self, store: WeightStore[W], buffer: _Buffer[W], version: int) -> None:
        self._store: WeightStore[W] | None = store
        self._buffer = buffer
        self.weights = buffer.weights
        self.version = version

    def release(self) -> None:
        """Stop reading; once per lease."""
        store, self._store = self._store, None
        assert store is not None, "a weight lease was released twice"
        store._release(self._buffer)

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
        self._front, self._back = _Buffer(front), _Buffer(back)
        self._version = 0
        self._copy = copy
        self._free: asyncio.Future[None] | None = None
        self._publishing = False
        self._copied: asyncio.Future[None] | None = None  # until the copy has ended, wanted or not

    @property
    def version(self) -> int:
        """Of the weights in front: the number of publishes, and of trainers that began after one.

        A trainer that goes on with an earlier run begins with the version there.
        """
        return self._version

    @property
    def publishing(self) -> bool:
        """Whether somebody publishes."""
        return self._publishing

    def lease(self) -> WeightLease[W]:
        """Read the newest version."""
        self._front.readers += 1
        return WeightLease(self, self._front, self._version)

    def stage(self, source: Any) -> None:
        """Copy the weights with which a consumer will `begin`, on the calling thread. Nobody sees them until then.

        Raises:
            ConfigError: Somebody is publishing.
        """
        if self._publishing:
            raise ConfigError(TWO)
        if self._back.readers or self._copied is not None:  # somebody is not done with it, and this cannot wait
            self._back = _Buffer(deepcopy(self._front.weights))
        self._copy(source, self._back.weights)

    def begin(self, version: int) -> None:
        """Let a consumer begin: the next lease has the weights that were staged in this very turn of the loop.

        Args:
            version: Their number; of a run that is continued, their number there.
        """
        self._flip(version)

    async def publish(self, source: Any, lane: Lane) -> int:
        """Copy `source` into the back buffer and make it the front.

        Args:
            source: Not written to by anyone until this returns.
            lane: Where the copy runs. Who is cancelled before it has ended publishes nothing: what has begun of it ends
                unseen, and the next publisher waits for that.

        Returns:
            The new version.

        Raises:
            ConfigError: Somebody else is publishing.
            Closed: The lane was closed before the copy began.
        """
        if self._publishing:
            raise ConfigError(TWO)
        self._publishing, request, copied = True, _Request(), None
        try:
            if self._copied is not None:
                await asyncio.wait([self._copied])
            while self._back.readers:
                self._free = asyncio.get_running_loop().create_future()
                await self._free
            copied = lane.run(self._copy_if_wanted, request, source, self._back.weights, n=0)
            self._copied = copied
            copied.add_done_callback(partial(self._end_copy, request))
            await asyncio.wait([copied])
            if copied.cancelled():
                raise Closed(f"lane {lane.name} has ended: nothing was published")
            copied.result()
        finally:
            self._publishing = request.wanted = False
            if self._copied is copied and not request.begun:  # and never will be: its lane looks whether it is wanted
                self._copied = None
        return self._version

    def _copy_if_wanted(self, request: _Request, source: Any, buffer: W) -> None:
        request.begun = True
        if request.wanted:
            self._copy(source, buffer)

    def _end_copy(self, request: _Request, copied: asyncio.Future[None]) -> None:
        if self._copied is copied:
            self._copied = None
        if not copied.cancelled() and copied.exception() is None and request.wanted:
            self._flip(self._version + 1)

    def _flip(self, version: int) -> None:
        self._front, self._back, self._version = self._back, self._front, version

    def _release(self, buffer: _Buffer[W]) -> None:
        buffer.readers -= 1
        if self._free is not None and buffer is self._back and not buffer.readers:
            if not self._free.done():
                self._free.set_result(None)
            self._free = None
