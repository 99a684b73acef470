"""Where simulator code runs: on thread lanes, in child processes (`ebrl.sim.process`), or inline (`ebrl.sim.inline`).

`ThreadHost` is for simulators that release the interpreter lock (rendering, large models) or that wait, and for batched
ones. `ProcessHost` is for short steps that are mostly Python; it costs the loop no more than a thread does.
`InlineHost` is for simulators that are awaited.

A simulator is built, and built again after it has failed. One that is lost, since its thread hangs or its process has
ended, fails the call that waits for it and every later one, until it is built again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from ebrl.core.errors import EbrlError, SimulatorError
from ebrl.core.futures import heed
from ebrl.core.lanes import Call
from ebrl.core.leases import Lender
from ebrl.core.protocols import Lane, Machine
from ebrl.core.records import Array, EnvSpec, Observation, StepResult
from ebrl.sim.failures import Phase
from ebrl.sim.simulator import Missing, Simulator, construction_lock
from ebrl.sim.times import SAMPLE_EVERY, CallTimes

logger = logging.getLogger("ebrl")

Reset: TypeAlias = tuple[Observation, dict[str, Any]]


class Slot(Protocol):
    """One simulator, wherever it runs. Called on the loop; the calls of one slot run in order.

    Each method completes `future`, which the caller made. A cancelled call that has not begun does not run.

    Attributes:
        env: Index of its environment, or of a spare after those of all environments; for messages.
        built: Whether there is a simulator.
        innocent: It was lost because of another one that shares its thread or process.
        lost: Why it is not there any more, also if nobody waited for it; None once it is being built.
    """

    env: int
    built: bool
    innocent: bool
    lost: EbrlError | None

    @property
    def lane_name(self) -> str:
        """Where it runs, for messages."""

    def reset(self, future: asyncio.Future[Reset], seed: int) -> None:
        """See `ebrl.sim.simulator.Simulator.reset`."""

    def step(self, future: asyncio.Future[StepResult], actions: Array, finite: bool = False) -> None:
        """See `ebrl.sim.simulator.Simulator.step`."""

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `ebrl.sim.simulator.Simulator.call`; `fn` and what it returns are pickled for a process host."""

    def build(self) -> asyncio.Future[None]:
        """Close the simulator before, if there is one, and then make one, behind whatever runs: two calls."""

    def retire(self) -> None:
        """Close the simulator for good."""


class Running(NamedTuple):
    """What a host does now.

    Attributes:
        place: Its lane or child process, which does one call at a time.
        call: The same object for as long as the same call runs.
        phase: What kind of call.
        slot: Whose; None if it is not known.
    """

    place: object
    call: object
    phase: Phase
    slot: Slot | None


class SimHost(Protocol):
    """Some simulators that start and end together."""

    @property
    def slots(self) -> Sequence[Slot]:
        """One per simulator."""

    @property
    def times(self) -> CallTimes:
        """Of some of its calls."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in simulators so far."""

    @property
    def num_leaked(self) -> int:
        """Threads that were given up so far."""

    def start(self, on_call: Callable[[], None] | None = None) -> None:
        """Begin; nothing is built yet. Call `aclose` after it.

        Args:
            on_call: Called at the beginning of calls that the machine does not see, since they run on the loop.

        Raises:
            ConfigError: A spec cannot be sent to a process.
        """

    async def open(self) -> None:
        """`start`, and build everything; raises what construction raised. Call `aclose` after it, whatever it did."""

    def running(self) -> list[Running]:
        """What it does now, call by call."""

    def give_up(self, running: Running, error: SimulatorError) -> None:
        """End a call that does not end by itself, and all that shares its thread or process.

        Args:
            running: From `running`, just now.
            error: Raised where its end is waited for.
        """

    async def aclose(self, deadline_s: float) -> list[str]:
        """Close the simulators behind their running calls.

        Args:
            deadline_s: Roughly how long that may take; never hangs.

        Returns:
            Names of what had to be given up or killed.
        """


async def open_all(host: SimHost) -> None:
    """Start a host and build all of its simulators, at once where they have lanes of their own."""
    host.start()
    futures = [slot.build() for slot in host.slots]
    try:
        await asyncio.gather(*futures)
    finally:
        for future in futures:  # after a failure, build no more
            future.cancel()


class Blocking(Protocol):
    """What a thread host builds: a `Simulator`, or an `ebrl.sim.vector_simulator.VectorSimulator`."""

    def reset(self, seed: Any, /) -> Reset:
        """Begin an episode; of a batched one in some slots, and `seed` has theirs."""

    def step(self, actions: Array, finite: bool = False, /) -> Any:
        """Execute a chunk."""

    def call(self, fn: Callable[[Any], Any], /) -> Any:
        """Return ``fn(env)``."""

    def close(self) -> None:
        """End."""


class ThreadSlot:
    """A simulator pinned to a lane; see `Slot`.

    A lane whose call does not return is replaced. Should its thread return after all, it finds that the slot has
    another lane: it leaves what is there alone, and closes what it has made itself.
    """

    __slots__ = (
        "_due", "_kind", "_moving", "_phases", "_spec", "_step", "_submit", "_times", "built", "env", "future",
        "innocent", "lane", "lost", "simulator",
    )  # fmt: skip

    def __init__(
        self, spec: EnvSpec, kind: Callable[[EnvSpec], Blocking], lane: Lane, times: CallTimes, env: int
    ) -> None:
        self._spec = spec
        self._kind = kind
        self._times = times
        self._due = times.due
        self._moving = threading.Lock()
        self._phases: WeakKeyDictionary[asyncio.Future[Any], Phase] = WeakKeyDictionary()  # of calls that are no steps
        self.env = env
        self.future: asyncio.Future[Any] | None = None  # of the call that was made last
        self.innocent = False
        self.lost: EbrlError | None = None
        self.lane: Lane
        self.simulator: Blocking
        self._move(lane, Missing(SimulatorError("the simulator was not built")))

    @property
    def lane_name(self) -> str:
        """Where it runs."""
        return self.lane.name

    @property
    def who(self) -> str:
        """What it simulates, for messages."""
        first, num = self.env * self._spec.num_slots, self._spec.num_slots
        return f"simulator {self.env} with envs {first} to {first + num - 1}" if num else f"env {self.env}"

    def reset(self, future: asyncio.Future[Reset], seed: Any) -> None:
        """See `Slot`; a batched simulator takes seeds by slot."""
        self.future = future
        self._phases[future] = "reset"
        self._submit(future, self._reset, seed)

    def step(self, future: asyncio.Future[Any], actions: Array, finite: bool = False) -> None:
        """See `Slot`."""
        self.future = future
        self._submit(future, self._timed_step if next(self._due) else self._step, actions, finite)

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `Slot`."""
        self.future = future
        self._phases[future] = "call"
        self.lane.submit(future, self.simulator.call, fn)

    def build(self) -> asyncio.Future[None]:
        """See `Slot`."""
        self.innocent, self.lost = False, None
        if self.built:
            self.start_close().add_done_callback(heed)  # it has failed, and so an error in that is no news
        self.future = future = self.lane.run(self._build, self.lane, n=0)
        self._phases[future] = "build"
        return future

    def retire(self) -> None:
        """See `Slot`."""
        self.start_close().add_done_callback(look_closed)

    def start_close(self) -> asyncio.Future[None]:
        """Queue the end of the simulator, if there is one, behind whatever runs."""
        future = self.lane.run(self._close, self.lane, n=0)
        self._phases[future] = "close"
        return future

    def phase(self, future: asyncio.Future[Any]) -> Phase:
        """Return what kind of call a future is of."""
        return self._phases.get(future, "step")

    def lose(self, lane: Lane, error: SimulatorError, innocent: bool) -> Blocking:
        """Go on with another lane, and without a simulator: the thread of the one before does not return.

        Returns:
            The simulator, which is that thread's to close.
        """
        with self._moving:
            left = self.simulator
            self._move(lane, Missing(error))
        self.innocent, self.lost = innocent, error
        if self.future is not None and not self.future.done():
            self.future.set_exception(type(error)(*error.args))
        return left

    # On the lane.

    def _reset(self, seed: Any) -> Reset:
        return self._times.reset(self.simulator, seed)

    def _timed_step(self, actions: Array, finite: bool) -> Any:
        return self._times.step(self.simulator, actions, finite)

    def _build(self, lane: Lane) -> None:
        if self.lane is not lane:
            return
        made = self._kind(self._spec)
        with self._moving:
            if self.lane is lane:
                self.simulator, self._step, self.built = made, made.step, True  # bound once
                return
        close_failed(made)  # a simulator belongs to one thread

    def _close(self, lane: Lane) -> None:
        with self._moving:
            if self.lane is not lane:
                return
            simulator = self.simulator
            self._move(lane, Missing(SimulatorError("the simulator is closed")))
        simulator.close()

    def _move(self, lane: Lane, instead: Missing) -> None:
        self.lane = lane
        # A step of a batched simulator takes as long as its slots need, which matters where time is a model.
        self._submit = partial(lane.submit, n=self._spec.num_slots) if self._spec.num_slots else lane.submit
        self.simulator, self._step = instead, instead.step
        self.built = False


def close_failed(*simulators: Blocking) -> None:
    """Close simulators that are not used any more, or that failed: an error in that is no news."""
    for simulator in simulators:
        try:
            simulator.close()
        except Exception as error:  # the border: whatever user code raises
            logger.debug("a simulator that is replaced could not be closed: %r", error)


def tell_unclosed(error: BaseException) -> None:
    """A simulator has ended for good, and not well."""
    logger.warning("a simulator could not be closed: %r", error)


def look_closed(closing: asyncio.Future[None]) -> None:
    """A simulator has ended for good: say so where it did not end well."""
    if not closing.cancelled() and (error := closing.exception()) is not None:
        tell_unclosed(error)


class ThreadHost:
    """Simulators on thread lanes, or on those of a virtual machine; see `SimHost`."""

    def __init__(
        self,
        specs: Sequence[EnvSpec],
        machine: Machine,
        pool: Lender | None,
        num_lanes: int,
        name: str = "sim",
        *,
        kind: Callable[[EnvSpec], Blocking] = Simulator,
        threads: int = 1,
        sample_every: int = SAMPLE_EVERY,
    ) -> None:
        """Take the lanes; simulator i belongs to lane ``i % num_lanes`` for life.

        Args:
            specs: What to build, one simulator each.
            machine: Makes the lanes.
            pool: Admits working lanes.
            num_lanes: How many lanes.
            name: Prefix of their names.
            kind: Builds a simulator.
            threads: Units of the pool, that is cores, which one simulator uses while it works.
            sample_every: One in so many steps is timed; none on a model, where clocks say nothing.
        """
        self.times = CallTimes(sample_every if machine.real else 0)
        self.num_leaked = 0
        self._machine = machine
        self._new_lane: Callable[[str], Lane] = lambda suffix: machine.lane("sim", f"{name}-{suffix}", pool, threads)
        self._lanes = [self._new_lane(str(index)) for index in range(min(num_lanes, len(specs)))]
        self._lost_busy_s = 0.0
        self._closed = False
        self.slots = [
            ThreadSlot(spec, kind, self._lanes[i % len(self._lanes)], self.times, i) for i, spec in enumerate(specs)
        ]

    @property
    def busy_s(self) -> float:
        """Seconds spent in simulators so far."""
        return self._lost_busy_s + sum(lane.busy_s for lane in self._lanes)

    def start(self, on_call: Callable[[], None] | None = None) -> None:
        """See `SimHost`; lanes run already."""

    async def open(self) -> None:
        """See `SimHost`."""
        await open_all(self)

    def running(self) -> list[Running]:
        """See `SimHost`; who waits for the turn to build is left out."""
        return [
            self._describe(lane, call)
            for lane in self._lanes
            if (call := lane.current) is not None and not construction_lock.is_awaited_by(lane.ident)
        ]

    def give_up(self, running: Running, error: SimulatorError) -> None:
        """See `SimHost`: the lane is replaced, and its thread leaks."""
        index = next(i for i, lane in enumerate(self._lanes) if lane is running.place)
        lane, owner = self._lanes[index], next((slot for slot in self.slots if slot is running.slot), None)
        self.num_leaked += 1
        self._lost_busy_s += lane.busy_s
        self._lanes[index] = new = self._new_lane(f"{index}+{self.num_leaked}")
        left = [slot.lose(new, error, innocent=slot is not owner) for slot in self.slots if slot.lane is lane]
        stack = self._machine.give_up(lane, partial(close_failed, *left))
        construction_lock.take_from(lane.ident)
        logger.error(
            "%s hangs: %s. Lane %s is given up and its thread leaks, the %d. of this group; it runs here:\n%s",
            owner.who if owner is not None else "a simulator", error, lane.name, self.num_leaked, stack,
        )  # fmt: skip

    def _describe(self, lane: Lane, call: Call) -> Running:
        future, fn, _, _ = call  # the function is bound to a slot, or to its simulator
        bound_to = getattr(fn, "__self__", None)
        owner = next((slot for slot in self.slots if bound_to in (slot, slot.simulator)), None)
        return Running(lane, call, owner.phase(future) if owner is not None else "call", owner)

    async def aclose(self, deadline_s: float) -> list[str]:
        """See `SimHost`."""
        if self._closed:
            return []
        self._closed = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        closing = [slot.start_close() for slot in self.slots]
        done, _ = await asyncio.wait(closing, timeout=deadline_s)
        failed = [future for future in done if not future.cancelled() and future.exception() is not None]
        lost = await self._machine.aclose(self._lanes, deadline_s=max(0.05, deadline - loop.time()))
        # A lane that never got a unit of the pool has ended well, but its simulators were not closed.
        unclosed = [s.lane_name for s, future in zip(self.slots, closing, strict=True) if future.cancelled()]
        broken = [f"{s.lane_name} (close failed)" for s, f in zip(self.slots, closing, strict=True) if f in failed]
        for future in failed:
            look_closed(future)
        return list(dict.fromkeys([*lost, *unclosed, *broken]))
