"""`BatchQueue`: requests in, batches out over free lanes, by the rule of a `Batcher`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ebrl.gen.batcher import Batcher


class Cancellable(Protocol):
    """What a queue needs to know of its items."""

    def cancelled(self) -> bool:
        """Nobody waits for this any more."""


R = TypeVar("R", bound=Cancellable)


class BatchQueue(Generic[R]):
    """Requests that wait, and lanes that are free. Used on the loop only.

    All requests of one turn of the loop are seen together. Cancelled requests are dropped before the launch.
    """

    def __init__(self, batcher: Batcher, num_lanes: int, launch: Callable[[list[R], int], None]) -> None:
        """Make a queue.

        Args:
            batcher: The rule; may be replaced while running.
            num_lanes: Batches that may run at once.
            launch: Takes a batch and the number of its lane, and calls `release` when the lane is free again.
        """
        self.batcher = batcher
        self.num_batches = 0
        self.num_requests = 0
        self._launch = launch
        self._free = list(reversed(range(num_lanes)))
        self._waiting: deque[R] = deque()
        self._since: deque[float] = deque()
        self._loop = asyncio.get_running_loop()
        self._armed = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: R) -> None:
        """Add a request."""
        self._waiting.append(request)
        self._since.append(self._loop.time())
        if not self._armed and self._free:
            self._arm()

    def release(self, lane: int) -> None:
        """A batch has ended and its lane is free."""
        self._free.append(lane)
        if self._waiting and not self._armed:
            self._arm()

    def close(self) -> list[R]:
        """Stop the timer and return the requests that nobody will answer."""
        if self._timer is not None:
            self._timer.cancel()
        rest = list(self._waiting)
        self._waiting.clear()
        self._since.clear()
        return rest

    def _arm(self) -> None:
        self._armed = True
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._armed = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, since = self._waiting, self._since
        while self._free:
            while waiting and waiting[0].cancelled():
                waiting.popleft()
                since.popleft()
            if not waiting:
                return
            num, again_s = self.batcher.decide(len(waiting), self._loop.time() - since[0])
            if not num:
                if again_s is not None:
                    self._timer = self._loop.call_later(again_s, self._look)
                return
            batch = self._take(num)
            self.num_batches += 1
            self.num_requests += len(batch)
            self._launch(batch, self._free.pop())

    def _take(self, num: int) -> list[R]:
        """Take the oldest `num` requests; of them, those that were cancelled vanish. The first is not cancelled."""
        waiting, since = self._waiting, self._since
        batch = []
        for _ in range(num):
            since.popleft()
            request = waiting.popleft()
            if not request.cancelled():
                batch.append(request)
        return batch
