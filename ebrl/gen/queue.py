"""`BatchQueue`: requests in, batches out over free lanes, by the rule of a `Batcher`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from ebrl.core.protocols import Request
from ebrl.gen.batcher import Batcher


class Cancellable(Protocol):
    """What a queue needs to know of its items."""

    def cancelled(self) -> bool:
        """Nobody waits for this any more."""


R = TypeVar("R", bound=Cancellable)


class Bundle:
    """Requests of one asker that are launched, answered and cancelled together; one item of a queue.

    Attributes:
        requests: At least one.
    """

    __slots__ = ("requests",)

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    @property
    def answered_s(self) -> float:
        """When their asker got its last answer."""
        return self.requests[0].answered_s

    def cancelled(self) -> bool:
        """Nobody waits for any of them any more."""
        return self.requests[0].cancelled()

    def fail(self, error: BaseException) -> None:
        """There will be no answer to any of them."""
        for request in self.requests:
            request.fail(error)


class BatchQueue(Generic[R]):
    """Requests that wait, and lanes that are free. Used on the loop only.

    All requests of one turn of the loop are seen together. Cancelled requests are dropped before the launch.

    Attributes:
        has_bundles: Whether there may be bundles among them. Of those, a batch takes no more than make it worth
            launching, the threshold of the rule: a bundle is large, and the next one may as well wait while the first
            is executed.
    """

    def __init__(
        self,
        batcher: Batcher,
        num_lanes: int,
        launch: Callable[[list[R], list[float], int], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Make a queue.

        Args:
            batcher: The rule.
            num_lanes: Batches that may run at once.
            launch: Takes a batch, the times at which its requests came, and the number of its lane; calls `release`
                when the lane is free again.
            clock: Tells the time; default: the loop's.
        """
        self._batcher = batcher
        self.num_batches = 0
        self.num_requests = 0
        self.has_bundles = False
        self._launch = launch
        self._num_lanes = num_lanes
        self._free = list(reversed(range(num_lanes)))
        self._busy: set[int] = set()
        self._waiting: deque[R] = deque()
        self._since: deque[float] = deque()
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._armed = False
        self._withdrawn = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: R) -> None:
        """Add a request."""
        self._waiting.append(request)
        self._since.append(self._clock())
        if not self._armed and self._free:
            self._arm()

    def withdraw(self) -> None:
        """Some request has been cancelled; all that are will be dropped before the next launch."""
        self._withdrawn = True

    def release(self, lane: int) -> None:
        """A batch has ended and its lane is free."""
        self._busy.discard(lane)
        if lane < self._num_lanes:
            self._free.append(lane)
            if self._waiting and not self._armed:
                self._arm()

    def turn(self, batcher: Batcher, num_lanes: int) -> None:
        """Go by another rule from now on; lanes beyond `num_lanes` end the batch that they have and get no other."""
        self._batcher = batcher
        self._num_lanes = num_lanes
        self._free = [lane for lane in reversed(range(num_lanes)) if lane not in self._busy]
        if self._waiting and self._free and not self._armed:
            self._arm()  # what waits may be enough now

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
        if self._withdrawn:
            self._drop_cancelled()
        while self._free and waiting:
            num, again_s = self._batcher.decide(len(waiting), self._clock() - since[0])
            if not num:
                if again_s is not None:
                    self._timer = self._loop.call_later(again_s, self._look)
                return
            if self.has_bundles:
                num = self._up_to(num)
            batch = [waiting.popleft() for _ in range(num)]
            came_s = [since.popleft() for _ in range(num)]
            self.num_batches += 1
            self.num_requests += num
            lane = self._free.pop()
            self._busy.add(lane)
            self._launch(batch, came_s, lane)

    def _up_to(self, num: int) -> int:
        """Return how many of the `num` that waited longest a batch takes."""
        left = self._batcher.threshold
        for index, request in enumerate(islice(self._waiting, num)):
            left -= type(request) is Bundle
            if not left:
                return index + 1
        return num

    def _drop_cancelled(self) -> None:
        self._withdrawn = False
        kept = [(r, s) for r, s in zip(self._waiting, self._since, strict=True) if not r.cancelled()]
        self._waiting.clear()
        self._since.clear()
        for request, since_s in kept:
            self._waiting.append(request)
            self._since.append(since_s)
