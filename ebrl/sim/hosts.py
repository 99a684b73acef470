"""Where simulator code runs: on thread lanes of this process, or in a child process of its own.

`ThreadHost` is for simulators that release the interpreter lock (rendering, large models) or that wait. `ProcessHost`
is for short steps that are mostly Python; it costs the loop no more than a thread does: arrays lie in shared memory,
two-byte numbers travel over a socket pair in batches, and nothing is pickled per step.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ebrl.core.errors import Closed, ConfigError, InvalidData, SimulatorError
from ebrl.core.lanes import Mailbox
from ebrl.core.leases import Lender
from ebrl.core.protocols import Lane, Machine
from ebrl.core.records import Array, EnvSpec, Observation, StepResult
from ebrl.sim.child import unpack
from ebrl.sim.link import KILL_S, Link, complete, make_order, unpicklable
from ebrl.sim.shm import CALL, CONTROL, FRAME, HEADER, RESET, STEP, Rows, anonymous_file, frame, frame_end
from ebrl.sim.simulator import ActionReader, Simulator
from ebrl.sim.times import SAMPLE_EVERY, CallTimes


class Slot(Protocol):
    """One simulator, wherever it runs. Called on the loop; the calls of one slot run in order.

    Each method completes `future`, which the caller made. A cancelled call that has not begun does not run.
    """

    @property
    def lane_name(self) -> str:
        """Where it runs, for messages."""

    def reset(self, future: asyncio.Future[tuple[Observation, dict[str, Any]]], seed: int) -> None:
        """See `ebrl.sim.simulator.Simulator.reset`."""

    def step(self, future: asyncio.Future[StepResult], actions: Array, finite: bool = False) -> None:
        """See `ebrl.sim.simulator.Simulator.step`."""

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `ebrl.sim.simulator.Simulator.call`; `fn` and what it returns are pickled for a process host."""


class SimHost(Protocol):
    """Some simulators that start and end together."""

    @property
    def slots(self) -> list[Any]:
        """One `Slot` per simulator."""

    @property
    def times(self) -> CallTimes:
        """Of some of its calls."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in simulators so far."""

    async def open(self) -> None:
        """Build everything; raises what construction raised. Call `aclose` after it, whatever it did."""

    async def aclose(self, deadline_s: float) -> list[str]:
        """Close the simulators behind their running calls.

        Args:
            deadline_s: Roughly how long that may take; never hangs.

        Returns:
            Names of what had to be given up or killed.
        """


class ThreadSlot:
    """A simulator pinned to a lane."""

    __slots__ = ("_built", "_due", "_lane", "_step", "_times", "lane_name", "simulator")

    def __init__(self, lane: Lane, times: CallTimes) -> None:
        self._lane = lane
        self._times = times
        self._due = times.due
        self.lane_name = lane.name
        self.simulator: Simulator
        self._built = False

    def reset(self, future: asyncio.Future[tuple[Observation, dict[str, Any]]], seed: int) -> None:
        """See `Slot`."""
        self._lane.submit(future, self._times.reset, self.simulator, seed)

    def step(self, future: asyncio.Future[StepResult], actions: Array, finite: bool = False) -> None:
        """See `Slot`."""
        if next(self._due):
            self._lane.submit(future, self._times.step, self.simulator, actions, finite)
        else:
            self._lane.submit(future, self._step, actions, finite)

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `Slot`."""
        self._lane.submit(future, self.simulator.call, fn)

    def build(self, spec: EnvSpec) -> None:
        """Make the simulator; called on the lane."""
        self.simulator = Simulator(spec)
        self._step = self.simulator.step  # bound once
        self._built = True

    def start_build(self, spec: EnvSpec) -> asyncio.Future[None]:
        """Queue `build` on the lane."""
        return self._lane.run(self.build, spec, n=0)

    def start_close(self) -> asyncio.Future[None]:
        """Queue the end of the simulator, if there is one, behind whatever runs."""
        return self._lane.run(self._close, n=0)

    def _close(self) -> None:
        if self._built:
            self.simulator.close()


class ThreadHost:
    """Simulators on thread lanes, or on those of a virtual machine."""

    def __init__(
        self,
        specs: Sequence[EnvSpec],
        machine: Machine,
        pool: Lender | None,
        num_lanes: int,
        name: str = "sim",
        *,
        sample_every: int = SAMPLE_EVERY,
    ) -> None:
        """Take the lanes; simulator i belongs to lane ``i % num_lanes`` for life.

        Args:
            specs: What to build, one simulator each.
            machine: Makes the lanes.
            pool: Admits working lanes.
            num_lanes: How many lanes.
            name: Prefix of their names.
            sample_every: One in so many steps is timed; none on a model, where clocks say nothing.
        """
        self.times = CallTimes(sample_every if machine.real else 0)
        self._specs = specs
        self._machine = machine
        self._lanes = [machine.lane("sim", f"{name}-{index}", pool) for index in range(min(num_lanes, len(specs)))]
        self.slots = [ThreadSlot(self._lanes[i % len(self._lanes)], self.times) for i in range(len(specs))]
        self._closed = False

    @property
    def busy_s(self) -> float:
        """Seconds spent in simulators so far."""
        return sum(lane.busy_s for lane in self._lanes)

    async def open(self) -> None:
        """See `SimHost`."""
        futures = [slot.start_build(spec) for slot, spec in zip(self.slots, self._specs, strict=True)]
        try:
            await asyncio.gather(*futures)
        finally:
            for future in futures:  # after a failure, build no more
                future.cancel()

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
        return list(dict.fromkeys([*lost, *unclosed, *broken]))


class Operation:
    """One call of a process slot, from its post to its answer."""

    __slots__ = ("argument", "code", "future", "slot")

    def __init__(self, slot: ProcessSlot, future: asyncio.Future[Any], code: int, argument: Any) -> None:
        self.slot = slot
        self.future = future
        self.code = code
        self.argument = argument


class ProcessSlot:
    """A simulator in a child process. Its row of the shared memory belongs to one operation at a time."""

    __slots__ = ("_actions", "_host", "current", "held", "index", "wire")

    def __init__(self, host: ProcessHost, index: int, actions: ActionReader) -> None:
        self._host = host
        self._actions = actions
        self.index = index
        self.wire = index.to_bytes(2, "little")
        self.current: Operation | None = None
        self.held: deque[Operation] = deque()

    @property
    def lane_name(self) -> str:
        """Where it runs."""
        return self._host.name

    def reset(self, future: asyncio.Future[tuple[Observation, dict[str, Any]]], seed: int) -> None:
        """See `Slot`."""
        self._post(Operation(self, future, RESET, seed))

    def step(self, future: asyncio.Future[StepResult], actions: Array, finite: bool = False) -> None:
        """See `Slot`; at most `max_chunk` actions, which the child looks at in any case."""
        try:
            chunk = self._actions.chunk(actions)
        except InvalidData as error:
            future.set_exception(error)
            return
        if len(chunk) > self._host.max_chunk:
            future.set_exception(
                ConfigError(
                    f"a chunk of {len(chunk)} actions does not fit into the shared memory of {self._host.name}: "
                    f"raise its max_chunk, now {self._host.max_chunk}"
                )
            )
            return
        self._post(Operation(self, future, STEP, chunk))

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `Slot`."""
        try:
            request = pickle.dumps(fn)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            future.set_exception(ConfigError(unpicklable(f"call({fn!r})", error)))
            return
        self._post(Operation(self, future, CALL, frame(request)))

    def next(self) -> None:
        """The current operation is over: begin the one that was held back, if any."""
        self.current = None
        if self.held:
            self._post(self.held.popleft())

    def _post(self, operation: Operation) -> None:
        # A cancelled operation may still be in the child, which then reads and writes the row.
        if self.current is not None:
            self.held.append(operation)
        elif self._host.post(operation):
            self.current = operation


class ProcessHost:
    """One child process with some simulators. See the module, and `ebrl.sim.shm` for the protocol."""

    def __init__(
        self, specs: Sequence[EnvSpec], machine: Machine, pool: Lender | None, name: str, *, max_chunk: int = 64
    ) -> None:
        """Describe the host; `open` starts the process.

        Args:
            specs: What to build, one simulator each; picklable, and alike in what they observe and how they act.
            machine: A real one; gives a lane that starts the process and waits for its end.
            pool: Lends one unit while the child works.
            name: Unique name.
            max_chunk: Most actions in one step.

        Raises:
            ConfigError: `machine` is a model, or the number of simulators or `max_chunk` out of range.
        """
        if not machine.real:
            raise ConfigError(f'{name}: a virtual machine has no processes: pass host="thread"')
        if not 1 <= len(specs) < CONTROL or max_chunk < 1:
            raise ConfigError(
                f"{name}: simulators must be 1 to {CONTROL - 1} and max_chunk at least 1, got {len(specs)}, {max_chunk}"
            )
        self.name = name
        self.max_chunk = max_chunk
        self.times = CallTimes()
        actions = ActionReader(specs[0].action)
        self.slots = [ProcessSlot(self, index, actions) for index in range(len(specs))]
        self._specs = specs
        self._machine = machine
        self._pool = pool
        self._link: Link | None = None
        self._mailbox: Mailbox
        self._ready: asyncio.Future[None]
        self._rows: Rows
        self._dead: SimulatorError | Closed | None = None
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds spent in simulators so far."""
        return self._busy_s if self._dead is not None or self._link is None else self._rows.busy_s[0]

    async def open(self) -> None:
        """See `SimHost`.

        Raises:
            ConfigError: A spec cannot be sent to a process.
            HostDied: The process ended while building.
        """
        order = make_order(self._specs, self.max_chunk)
        loop = asyncio.get_running_loop()
        memory = anonymous_file(Rows(self._specs, self.max_chunk).size)
        self._rows = Rows(self._specs, self.max_chunk, memory)
        self._mailbox = Mailbox(loop, self._pool, self._send, self.name)
        lane = self._machine.lane("io", f"{self.name}-io")
        link = self._link = Link(self.name, lane, memory, self._take, self._end)
        self._ready = link.ready
        await link.start(pickle.dumps(order))

    async def aclose(self, deadline_s: float) -> list[str]:
        """See `SimHost`; the process is killed after the deadline."""
        link, self._link = self._link, None
        if link is None:
            return []
        self._mailbox.close()
        killed = await link.aclose(deadline_s)
        self._end(Closed(f"{self.name} is closed"))
        lost = await self._machine.aclose([link.lane], deadline_s=KILL_S)
        return [self.name] if killed or lost else []

    def post(self, operation: Operation) -> bool:
        """Send an operation when the pool allows it; fails it if nobody is left to do it."""
        if self._dead is not None or self._link is None:
            fail(operation, self._dead or Closed(f"{self.name} is not open"))
            return False
        self._mailbox.post(operation)
        return True

    def _end(self, error: SimulatorError | Closed) -> None:
        # Nobody answers any more: fail what is pending and whatever comes later.
        if self._dead is not None:
            return
        self._dead = error
        self._busy_s = self._rows.busy_s[0]
        for slot in self.slots:
            for operation in (slot.current, *slot.held):
                if operation is not None:
                    fail(operation, error)
            slot.current = None
            slot.held.clear()
        self._mailbox.close()
        self._mailbox.settle(self._mailbox.outstanding)
        del self._rows  # unmaps the memory

    def _send(self, operations: list[Any]) -> None:
        rows, out = self._rows, bytearray()
        for operation in operations:
            slot: ProcessSlot = operation.slot
            if operation.future.done():
                # Not at once: the mailbox is in the middle of sending.
                asyncio.get_running_loop().call_soon(self._skip, operation)
                continue
            index = slot.index
            code = rows.op[index] = operation.code
            out += slot.wire
            if code == STEP:
                chunk = operation.argument
                num = rows.num_actions[index] = len(chunk)
                rows.actions[index][:num] = chunk
            elif code == RESET:
                rows.seed[index] = operation.argument
            else:
                out += operation.argument
        if out and self._link is not None:
            self._link.send(out)

    def _skip(self, operation: Operation) -> None:
        if self._dead is None:
            operation.slot.next()
            self._mailbox.settle()

    def _take(self, data: bytearray) -> int:
        # Completes what was answered, and returns the bytes that were used: the rest is the beginning of a message.
        status, slots = self._rows.status, self.slots
        at, last, num, stepped = 0, len(data) - 1, 0, -1
        while at < last:
            index = data[at] | data[at + 1] << 8
            if index == CONTROL or status[index] == FRAME:
                end = frame_end(data, at + 2)
                if end is None:
                    break
                value, error = unpack(bytes(data[at + 2 + HEADER.size : end]))
                at = end
                if index == CONTROL:
                    complete(self._ready, value, error)
                    continue
                operation = slots[index].current
                assert operation is not None
                complete(operation.future, value, error)
            else:
                at += 2
                operation = slots[index].current
                assert operation is not None
                if operation.code == STEP:
                    stepped = index
                if not operation.future.done():
                    operation.future.set_result(self._read(operation.code, index))
            num += 1
            slots[index].next()
        if stepped >= 0:  # of the steps that came together, one is noted: the loop has less to do
            self.times.steps.append(self._rows.call_s[stepped] / self._rows.num_steps[stepped])
        if num:
            self._mailbox.settle(num)
        return at

    def _read(self, code: int, index: int) -> Any:
        rows = self._rows
        if code == RESET:
            self.times.resets.append(rows.call_s[index])
        row: Any = rows.obs[index]
        obs: Observation = {key: part.copy() for key, part in row.items()} if type(row) is dict else row.copy()
        info = self._read_info(index) if self._rows.num_infos else {}
        if code == RESET:
            return obs, info
        start = index * rows.reward_stride
        num = rows.num_steps[index]
        rewards = (rows.rewards[start],) if num == 1 else tuple(rows.rewards[start : start + num].tolist())
        return StepResult(obs, rewards, rows.terminated[index] == 1, rows.truncated[index] == 1, info)

    def _read_info(self, index: int) -> dict[str, Any]:
        start, num = index * self._rows.num_infos, self._rows.num_infos
        values = self._rows.infos[start : start + num].tolist()
        info = {
            key: value for key, value in zip(self._rows.info_keys, values, strict=True) if value == value
        }  # not NaN
        if "success" in info:
            info["success"] = info["success"] != 0
        return info


def fail(operation: Operation, error: SimulatorError | Closed) -> None:
    """Fail an operation with an exception of its own, since tracebacks belong to one raise."""
    complete(operation.future, None, type(error)(*error.args))
