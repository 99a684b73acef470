"""`Generator`: batched policy inference; requests in, actions out, from versioned copies of the policy."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from ebrl.core.errors import Closed, ConfigError, PolicyError, flag, whole
from ebrl.core.profile import StageProfile
from ebrl.core.protocols import Lane, Policy, Request
from ebrl.core.readings import Batching, GenReading, Knob, Move
from ebrl.core.records import ActionOut
from ebrl.core.runtime import Runtime
from ebrl.core.trace import Trace
from ebrl.core.weights import WeightStore
from ebrl.gen.batcher import Batcher
from ebrl.gen.cpu import copy_weights, failure, infer
from ebrl.gen.queue import BatchQueue, Bundle

MOST_LANES = 8  # that are tried: each has a copy of nothing, but its batches are smaller
PAD_TO = 32
"""Rows of each forward pass of a deterministic or recorded run: in batches of one size, padded where they are smaller,
every row gets the same bits whoever shares its batch."""


class Generator:
    """Acts for whoever asks; a service, and the `ebrl.core.protocols.Actor` of environment groups.

    Consumes requests; waits for its batcher's rule and a free lane; is woken by any `act` and by finished batches.
    It never uses the learner's module: a `WeightStore` holds two copies.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        batcher: Batcher | None = None,
        lanes: int | None = None,
        threads: int = 1,
        deterministic: bool = False,
        name: str = "gen",
    ) -> None:
        """Describe a generator.

        Args:
            policy: A ``torch.nn.Module`` with the methods of `Policy`; copied when the service starts.
            batcher: When to launch; default: at first as soon as a lane is free, then as the tuner finds best.
            lanes: Batches that run at once; default: at first one, then as the tuner finds best.
            threads: Of torch, within a lane.
            deterministic: Take the mode of the policy, as in an evaluation. Not for training: data of it say nothing of
                other actions.
            name: Of the service.

        Raises:
            ConfigError: `lanes` or `threads` is no whole number of at least 1, or `batcher` is none.
        """
        for label, value in (("lanes", lanes), ("threads", threads)):
            if value is not None:
                whole(f"Generator.{label}", value)
        if batcher is not None and not isinstance(batcher, Batcher):
            raise ConfigError(f"Generator.batcher must be a Batcher, such as Batcher(threshold=8), got {batcher!r}")
        self.name = name
        self._policy = policy
        self._first = batcher or Batcher(), lanes or 1
        self._batcher, self._num_lanes = self._first
        self._pinned: frozenset[Knob] = frozenset({"batching"}) if batcher is not None else frozenset()
        self._pin_lanes = lanes is not None
        self._choices = range(self._num_lanes, self._num_lanes + 1)
        self._profile = StageProfile("gen", name)
        self._turnaround = StageProfile("turnaround", name)
        self._threads = threads
        self._deterministic = flag("Generator.deterministic", deterministic)
        self._pad_to: int | None = None
        self._lanes: list[Lane] = []
        self._queue: BatchQueue[Request | Bundle] | None = None
        self._num_rows = 0
        self.request: Callable[[Any], None] = self._refuse  # the queue's own `put` while running: one call less
        self._weights: WeightStore[Any] | None = None
        self._trace: Trace | None = None
        self._runtime: Runtime | None = None
        self._clock = time.monotonic

    def open(self, runtime: Runtime) -> None:
        """Take lanes and copy the policy; called by `Runtime.start`."""
        self._runtime = runtime
        self._trace = runtime.trace
        self._clock = runtime.clock
        self._batcher, self._num_lanes = self._first  # what was found in an earlier life may not fit
        self._pad_to = PAD_TO if runtime.deterministic or runtime.events is not None else None
        if runtime.events is not None:
            threads = self._threads if runtime.machine.real else torch.get_num_threads()
            runtime.events.describe("generators", self.name, threads=threads, deterministic=self._deterministic)
        self._weights = WeightStore(copy.deepcopy(self._policy), copy.deepcopy(self._policy), copy_weights)
        self._lanes = []
        self._grow(runtime, self._num_lanes)
        free = runtime.claim("gen") is not None and not self._pin_lanes
        most = min(MOST_LANES, max(1, runtime.machine.num_cores // self._threads)) if free else self._num_lanes
        self._choices = range(1 if free else most, most + 1)
        self._queue = BatchQueue(self._batcher, self._num_lanes, self._launch, runtime.clock)
        self.request, self._num_rows = self._queue.put, 0
        self._profile, self._turnaround = StageProfile("gen", self.name), StageProfile("turnaround", self.name)
        runtime.profiles.add(self._profile, self._turnaround)
        self._read(self._queue)
        runtime.tuning.add_generator(self)

    async def serve(self) -> None:
        """Nothing to do of its own accord: requests and finished batches drive it."""
        await asyncio.get_running_loop().create_future()

    @property
    def weights(self) -> WeightStore[Any]:
        """What it acts with.

        Raises:
            Closed: It was not started.
        """
        if self._weights is None:
            raise Closed(f"{self.name} was not started: call rt.start(generator) first")
        return self._weights

    @property
    def deterministic(self) -> bool:
        """Whether it takes the mode of the policy."""
        return self._deterministic

    def withdraw(self) -> None:
        """Some request has been cancelled; see `ebrl.core.protocols.Actor.withdraw`."""
        if self._queue is not None:
            self._queue.withdraw()

    def request_all(self, requests: Sequence[Request]) -> None:
        """Take requests that belong together; see `ebrl.core.protocols.Actor.request_all`."""
        if self._queue is not None:
            self._queue.has_bundles = True
        self.request(Bundle(requests))

    def _refuse(self, request: Any) -> None:
        raise Closed(f"{self.name} is not running: start it with rt.start(generator) before its environments")

    async def publish(self, policy: Policy) -> int:
        """Act with the weights of `policy` from the next batch on; it must not be trained meanwhile.

        Returns:
            The new version.

        Raises:
            Closed: It was not started, or has ended.
        """
        weights = self.weights
        if self._queue is None:
            raise Closed(f"{self.name} has ended, and takes no weights any more")
        return await weights.publish(policy, self._lanes[0])

    def reading(self) -> GenReading:
        """What the tuner needs to know; see `ebrl.core.tuning.TunedGenerator`."""
        fit = self._profile.fits.get(1.0)
        queue = self._queue
        slots = self._num_rows / queue.num_requests if queue is not None and queue.num_requests else 1.0  # of a request
        return GenReading(
            name=self.name,
            batching=Batching(
                self._batcher.threshold, self._batcher.max_size, self._batcher.max_wait_s, self._num_lanes
            ),
            fixed_s=fit.a_s if fit is not None else 0.0,
            per_request_s=fit.b_s * slots if fit is not None else 0.0,
            size_spread=fit.size_spread if fit is not None else 0.0,
            latencies_s=self._turnaround.latency.samples(),
            num_requests=queue.num_requests if queue is not None else 0,
            num_batches=queue.num_batches if queue is not None else 0,
            busy_s=sum(lane.busy_s for lane in self._lanes),
            lanes=self._choices,
            pinned=self._pinned,
        )

    def turn(self, move: Move) -> None:
        """Turn a knob; see `ebrl.core.tuning.TunedGenerator`."""
        assert self._queue is not None
        assert self._runtime is not None
        threshold, max_size, max_wait_s, num_lanes = move.new
        self._grow(self._runtime, num_lanes)
        self._batcher, self._num_lanes = Batcher(threshold, max_size, max_wait_s), num_lanes
        self._queue.turn(self._batcher, num_lanes)

    def statistics(self) -> Mapping[str, float]:
        """Batches, requests, rows and their rate, mean size, the rule in use, queue, lane time, and its part in use."""
        if self._queue is None:
            return {}
        batches, requests = self._queue.num_batches, self._queue.num_requests
        return {
            "batches": batches,
            "requests": requests,
            "rows": self._num_rows,
            "batch_mean": self._num_rows / batches if batches else 0.0,
            "threshold": self._batcher.threshold,
            "max_size": self._batcher.max_size,
            "max_wait_s": self._batcher.max_wait_s,
            "lanes": self._num_lanes,
            "waiting": len(self._queue),
            "busy_s": sum(lane.busy_s for lane in self._lanes),
            "version": self.weights.version,
            **self._read(self._queue),
        }

    async def aclose(self, deadline_s: float) -> None:
        """Refuse what waits and end the lanes behind the batches that run."""
        if self._queue is not None:
            self._read(self._queue)
            for request in self._queue.close():
                request.fail(Closed(f"{self.name} has ended"))
            self._queue = None
            self.request = self._refuse
        if self._runtime is not None:
            self._runtime.tuning.forget(self)
            await self._runtime.machine.aclose(self._lanes, deadline_s=deadline_s)

    def _grow(self, runtime: Runtime, num_lanes: int) -> None:
        """Have that many lanes at least; those that are not used cost nothing."""
        for number in range(len(self._lanes), num_lanes):
            lane = runtime.machine.lane("gen", f"{self.name}-{number}", runtime.claim("gen"), self._threads)
            if runtime.machine.real:
                lane.run(torch.set_num_threads, self._threads, n=0)
            self._lanes.append(lane)

    def _read(self, queue: BatchQueue[Any]) -> dict[str, float]:
        now_s, busy_s = self._clock(), sum(lane.busy_s for lane in self._lanes)
        return self._profile.read(now_s, self._num_rows, busy_s, self._num_lanes)

    def _launch(self, items: list[Request | Bundle], came_s: list[float], number: int) -> None:
        self._turnaround.latency.extend(
            [s - item.answered_s for item, s in zip(items, came_s, strict=True) if item.answered_s]
        )
        lease, lane, queue = self.weights.lease(), self._lanes[number], self._queue
        bundled = queue is not None and queue.has_bundles
        requests = _rows(items) if bundled else cast(list[Request], items)
        self._num_rows += len(requests)
        future = lane.run(
            infer, lease.weights, requests, lease.version, self._deterministic, self._pad_to, n=len(requests)
        )
        began_s = self._clock()

        def landed(done: asyncio.Future[list[ActionOut | PolicyError]]) -> None:
            lease.release()
            if queue is not None:  # another life of the generator has another queue
                queue.release(number)
            self._landed(done, requests, lane.name, lease.version, began_s)

        future.add_done_callback(landed)

    def _landed(
        self,
        future: asyncio.Future[list[ActionOut | PolicyError]],
        requests: list[Request],
        lane: str,
        version: int,
        began_s: float,
    ) -> None:
        if future.cancelled():  # the lane has ended before the batch began
            for request in requests:
                request.fail(Closed(f"{self.name} has ended"))
            return
        assert self._runtime is not None
        now_s = self._clock()
        error = future.exception()
        if error is not None:
            for request in requests:
                request.fail(failure(self.name, error))  # each its own: notes and tracebacks are added to it
            return
        self._profile.observe(len(requests), now_s - began_s)
        for request, answer in zip(requests, future.result(), strict=True):
            request.answered_s = now_s
            if type(answer) is ActionOut:
                request.deliver(answer)
            else:
                assert isinstance(answer, PolicyError)
                request.fail(answer)
        if self._trace is not None:
            self._trace.span(lane, "batch", began_s, now_s, n=len(requests), version=version)
        self._runtime.tuning.look(now_s)


def _rows(items: Iterable[Request | Bundle]) -> list[Request]:
    """Return all requests, those of bundles one by one."""
    rows: list[Request] = []
    for item in items:
        if isinstance(item, Bundle):
            rows.extend(item.requests)
        else:
            rows.append(item)
    return rows
