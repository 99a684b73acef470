"""`VectorHost`: a batched simulator on a thread lane of its own, or on one of a virtual machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from ebrl.core.protocols import Lane, Machine
from ebrl.core.records import Array, EnvSpec, Observation
from ebrl.sim.times import CallTimes
from ebrl.sim.vector_simulator import VectorSimulator, VectorStep

logger = logging.getLogger("ebrl")
SHORTEST_S = 0.05  # that the end of lanes may take in any case


class VectorHost:
    """One batched simulator. Called on the loop; its calls run in order, and each completes a future of the caller's.

    A call that is cancelled before it has begun does not run.

    Attributes:
        lane: Where it runs, for life.
        times: Of its calls; none on a model, where clocks say nothing.
        built: Whether the simulator is there.
        num_steps: Of the simulator, so far.
    """

    def __init__(self, spec: EnvSpec, lane: Lane, *, timed: bool) -> None:
        self.lane = lane
        self.times = CallTimes(0)
        self.built = False
        self.num_steps = 0
        self._spec = spec
        self._timed = timed
        self._simulator: VectorSimulator

    def reset(self, future: asyncio.Future[tuple[Observation, dict[str, Any]]], seeds: dict[int, int]) -> None:
        """See `VectorSimulator.reset`."""
        self.lane.submit(future, self._reset, seeds, n=self._spec.num_slots)

    def step(self, future: asyncio.Future[VectorStep], actions: Array) -> None:
        """See `VectorSimulator.step`."""
        self.lane.submit(future, self._step, actions, n=self._spec.num_slots)

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `VectorSimulator.call`."""
        self.lane.submit(future, self._simulator.call, fn)

    async def open(self) -> None:
        """Build the simulator; raises what construction raised."""
        await self.lane.run(self._build, n=0)
        self.built = True

    def start_close(self) -> asyncio.Future[None]:
        """Queue the end of the simulator, if there is one, behind whatever runs."""
        return self.lane.run(self._close, n=0)

    # On the lane.

    def _build(self) -> None:
        self._simulator = VectorSimulator(self._spec)

    def _reset(self, seeds: dict[int, int]) -> tuple[Observation, dict[str, Any]]:
        began_s = perf_counter()
        result = self._simulator.reset(seeds)
        if self._timed:
            self.times.resets.append(perf_counter() - began_s)
        return result

    def _step(self, actions: Array) -> VectorStep:
        began_s = perf_counter()
        result = self._simulator.step(actions)
        self.num_steps += result.num_steps
        if self._timed:
            self.times.steps.append((perf_counter() - began_s) / result.num_steps)
        return result

    def _close(self) -> None:
        if self.built:
            self._simulator.close()


async def close_hosts(hosts: Sequence[VectorHost], machine: Machine, deadline_s: float) -> None:
    """Close simulators behind their running calls, and end their lanes; never hangs."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    closing = {host.start_close(): host.lane for host in hosts}
    done, _ = await asyncio.wait(closing, timeout=deadline_s)
    for future in done:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            logger.error("the simulator of lane %s could not be closed: %r", closing[future].name, error)
    await machine.aclose([host.lane for host in hosts], deadline_s=max(SHORTEST_S, deadline - loop.time()))
