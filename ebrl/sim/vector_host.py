"""`VectorHost`: a batched simulator on a thread lane of its own, or on one of a virtual machine."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from ebrl.core.errors import EbrlError, SimulatorError
from ebrl.core.leases import Lender
from ebrl.core.protocols import Lane, Machine
from ebrl.core.records import Array, EnvSpec, Observation
from ebrl.sim.hosts import PHASES, Running, close_failed
from ebrl.sim.link import heed
from ebrl.sim.simulator import Missing, construction_lock
from ebrl.sim.times import CallTimes
from ebrl.sim.vector_simulator import VectorSimulator, VectorStep

logger = logging.getLogger("ebrl")
SHORTEST_S = 0.05  # that the end of lanes may take in any case


class VectorHost:
    """One batched simulator. Called on the loop; its calls run in order, and each completes a future of the caller's.

    A call that is cancelled before it has begun does not run. A simulator is built, and built again after it has
    failed; one whose thread hangs fails the call that waits for it and every later one until then.

    Attributes:
        lane: Where it runs; another one after a call that did not return.
        times: Of its calls; none on a model, where clocks say nothing.
        built: Whether the simulator is there.
        innocent: Never: it shares its thread with no other.
        lost: Why it is not there any more, also if nobody waited for it; None once it is being built.
        num_steps: Of the simulator, so far.
        num_leaked: Threads that were given up so far.
    """

    def __init__(
        self, spec: EnvSpec, machine: Machine, pool: Lender | None, name: str, *, first: int, threads: int
    ) -> None:
        """Take a lane.

        Args:
            spec: What to build.
            machine: Makes the lane.
            pool: Admits it while it works.
            name: Of the lane.
            first: Index of the environment in the first slot, for messages.
            threads: Cores that it uses while it steps.
        """
        self.times = CallTimes(0)
        self.built = False
        self.innocent = False
        self.lost: EbrlError | None = None
        self.num_steps = 0
        self.num_leaked = 0
        self._spec = spec
        self._machine = machine
        self._first = first
        self._new_lane: Callable[[str], Lane] = lambda suffix: machine.lane("sim", name + suffix, pool, threads)
        self._moving = threading.Lock()
        self._lost_busy_s = 0.0
        self._future: asyncio.Future[Any] | None = None  # of the call that was made last
        self._simulator: VectorSimulator | Missing = Missing(SimulatorError("the simulator was not built"))
        self.lane = self._new_lane("")

    @property
    def busy_s(self) -> float:
        """Seconds spent in the simulator so far."""
        return self._lost_busy_s + self.lane.busy_s

    def reset(self, future: asyncio.Future[tuple[Observation, dict[str, Any]]], seeds: dict[int, int]) -> None:
        """See `VectorSimulator.reset`."""
        self._future = future
        self.lane.submit(future, self._reset, seeds, n=self._spec.num_slots)

    def step(self, future: asyncio.Future[VectorStep], actions: Array) -> None:
        """See `VectorSimulator.step`."""
        self._future = future
        self.lane.submit(future, self._step, actions, n=self._spec.num_slots)

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `VectorSimulator.call`."""
        self._future = future
        self.lane.submit(future, self._simulator.call, fn)

    def start(self, on_call: Callable[[], None] | None = None) -> None:
        """The lane runs already."""

    def build(self) -> asyncio.Future[None]:
        """Make the simulator, after closing the one before, behind whatever runs."""
        self.lost = None
        self._future = future = self.lane.run(self._build, self.lane, n=0)
        return future

    def retire(self) -> None:
        """Close the simulator for good."""
        self.start_close().add_done_callback(heed)

    def start_close(self) -> asyncio.Future[None]:
        """Queue the end of the simulator, if there is one, behind whatever runs."""
        return self.lane.run(self._close, n=0)

    def running(self) -> list[Running]:
        """What it does now; waiting for the turn to build is left out."""
        call = self.lane.current
        if call is None or construction_lock.is_awaited_by(self.lane.ident):
            return []
        return [Running(self.lane, call, PHASES.get(call[1].__name__, "call"), None)]

    def give_up(self, running: Running, error: SimulatorError) -> None:
        """End a call that does not end by itself: the lane is replaced, and its thread leaks."""
        lane = self.lane
        assert running.place is lane
        self._lost_busy_s += lane.busy_s
        stack = self._machine.give_up(lane)
        construction_lock.take_from(lane.ident)
        self.num_leaked += 1
        logger.error(
            "the simulator with envs %d to %d hangs: %s. Lane %s is given up and its thread leaks; it runs here:\n%s",
            self._first, self._first + self._spec.num_slots - 1, error, lane.name, stack,
        )  # fmt: skip
        with self._moving:
            self.lane = self._new_lane(f"+{self.num_leaked}")
            self._simulator, self.built, self.lost = Missing(error), False, error
        if self._future is not None and not self._future.done():
            self._future.set_exception(type(error)(*error.args))

    # On the lane.

    def _build(self, lane: Lane) -> None:
        close_failed(self._simulator)
        self.built = False
        made = VectorSimulator(self._spec)
        with self._moving:
            if self.lane is lane:  # not given up meanwhile
                self._simulator, self.built = made, True

    def _reset(self, seeds: dict[int, int]) -> tuple[Observation, dict[str, Any]]:
        began_s = perf_counter()
        result = self._simulator.reset(seeds)
        if self._machine.real:
            self.times.resets.append(perf_counter() - began_s)
        return result

    def _step(self, actions: Array) -> VectorStep:
        began_s = perf_counter()
        result = self._simulator.step(actions)
        self.num_steps += result.num_steps
        if self._machine.real:
            self.times.steps.append((perf_counter() - began_s) / result.num_steps)
        return result

    def _close(self) -> None:
        simulator, self._simulator = self._simulator, Missing(SimulatorError("the simulator is closed"))
        simulator.close()


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
