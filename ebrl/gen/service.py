"""`BatchService`: any batched function (a reward model, a value model, a planner) as something a program awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from ebrl.core.errors import Closed, PolicyError
from ebrl.core.profile import StageProfile
from ebrl.core.protocols import Lane
from ebrl.core.runtime import Runtime
from ebrl.gen.batcher import Batcher
from ebrl.gen.cpu import failure
from ebrl.gen.queue import BatchQueue

In = TypeVar("In")
Out = TypeVar("Out")


class _Item(Generic[In, Out]):
    __slots__ = ("future", "value")

    def __init__(self, value: In, future: asyncio.Future[Out]) -> None:
        self.value = value
        self.future = future

    def cancelled(self) -> bool:
        return self.future.done()


class BatchService(Generic[In, Out]):
    """A function of many items, called item by item; a service.

    Example::

        score = rt.start(ebrl.BatchService(reward_model.score))   # list of observations -> list of floats
        ...
        env.reward(await score(obs))                              # in a program; batched with whoever else asks
    """

    def __init__(
        self, fn: Callable[[Sequence[In]], Sequence[Out]], *, batcher: Batcher | None = None, name: str = "service"
    ) -> None:
        """Describe a service.

        Args:
            fn: Blocking function of a batch, called on a lane of its own; returns one result per item, in order.
            batcher: When to launch; default: as soon as the lane is free.
            name: Of the service.
        """
        self.name = name
        self._fn = fn
        self._batcher = batcher or Batcher()
        self._lane: Lane | None = None
        self._queue: BatchQueue[_Item[In, Out]] | None = None
        self._runtime: Runtime | None = None
        self._profile = StageProfile("gen", name)

    def open(self, runtime: Runtime) -> None:
        """Take a lane; called by `Runtime.start`."""
        self._runtime = runtime
        self._lane = runtime.machine.lane("gen", f"{self.name}-0", runtime.claim("gen"))
        self._queue = BatchQueue(self._batcher, 1, self._launch, runtime.clock)
        self._profile = StageProfile("gen", self.name)
        runtime.profiles.add(self._profile)
        self._profile.read(runtime.clock(), 0, 0.0)

    async def serve(self) -> None:
        """Nothing to do of its own accord."""
        await asyncio.get_running_loop().create_future()

    async def __call__(self, item: In) -> Out:
        """Return the function's result for `item`.

        Raises:
            Closed: The service is not running.
            PolicyError: The function raised, or did not return one result per item.
        """
        if self._queue is None:
            raise Closed(f"{self.name} is not running: start it with rt.start()")
        future: asyncio.Future[Out] = asyncio.get_running_loop().create_future()
        self._queue.put(_Item(item, future))
        try:
            return await future
        except asyncio.CancelledError:
            if self._queue is not None:
                self._queue.withdraw()
            raise

    def statistics(self) -> Mapping[str, float]:
        """Batches, requests and their rate, lane time, and which part of it is used."""
        if self._queue is None or self._lane is None or self._runtime is None:
            return {}
        return {
            "batches": self._queue.num_batches,
            "requests": self._queue.num_requests,
            "busy_s": self._lane.busy_s,
            **self._profile.read(self._runtime.clock(), self._queue.num_requests, self._lane.busy_s),
        }

    async def aclose(self, deadline_s: float) -> None:
        """Refuse what waits and end the lane."""
        if self._queue is not None:
            self._refuse(self._queue.close())
            self._queue = None
        if self._runtime is not None and self._lane is not None:
            await self._runtime.machine.aclose([self._lane], deadline_s=deadline_s)

    def _refuse(self, items: Sequence[_Item[In, Out]]) -> None:
        for item in items:
            if not item.future.done():
                item.future.set_exception(Closed(f"{self.name} has ended"))

    def _launch(self, items: list[_Item[In, Out]], came_s: list[float], number: int) -> None:
        assert self._lane is not None
        assert self._runtime is not None
        future, queue = self._lane.run(self._answer, [item.value for item in items], n=len(items)), self._queue
        began_s = self._runtime.clock()

        def landed(done: asyncio.Future[list[Out]]) -> None:
            if queue is not None:  # another life of the service has another queue
                queue.release(number)
            self._landed(done, items, began_s)

        future.add_done_callback(landed)

    def _landed(self, future: asyncio.Future[list[Out]], items: list[_Item[In, Out]], began_s: float) -> None:
        if future.cancelled():  # the lane has ended before the batch began
            self._refuse(items)
            return
        error = future.exception()
        if error is None and self._runtime is not None:
            self._profile.observe(len(items), self._runtime.clock() - began_s)
        for i, item in enumerate(items):
            if item.future.done():
                continue
            if error is not None:
                item.future.set_exception(failure(self.name, error))
            else:
                item.future.set_result(future.result()[i])

    def _answer(self, values: Sequence[In]) -> list[Out]:
        """Call the function, and look at what it returns; runs on the lane."""
        results = self._fn(values)
        try:
            answers = list(results)
        except TypeError:
            raise PolicyError(f"expected a sequence of {len(values)} results, got {type(results).__name__}") from None
        if len(answers) != len(values):
            raise PolicyError(f"expected {len(values)} results, got {len(answers)}")
        return answers
