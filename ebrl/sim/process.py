"""`ProcessHost`: simulators in a child process of their own.

Arrays lie in shared memory, two-byte numbers travel over a socket pair in batches, and nothing is pickled per step.
The process is started again after its end, by whoever builds a simulator in it first.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ebrl.core.errors import Closed, ConfigError, EbrlError, HostDied, InvalidData, SimulatorError
from ebrl.core.futures import complete, heed
from ebrl.core.lanes import Mailbox
from ebrl.core.leases import Lender
from ebrl.core.protocols import Machine
from ebrl.core.records import Array, EnvSpec, Observation, StepResult
from ebrl.sim.border import SUCCESS, ActionReader
from ebrl.sim.child import unpack
from ebrl.sim.failures import Phase
from ebrl.sim.hosts import Reset, Running, Slot, look_closed, open_all, tell_unclosed
from ebrl.sim.link import KILL_S, Link, make_order, not_found, packed
from ebrl.sim.shm import (
    BUILD,
    CALL,
    CLOSE,
    CONTROL,
    FRAME,
    HEADER,
    MAX_CHUNK,
    RESET,
    STEP,
    Rows,
    anonymous_file,
    frame,
    frame_end,
    size_of,
)
from ebrl.sim.times import CallTimes

logger = logging.getLogger("ebrl")

PHASES: dict[int, Phase] = {BUILD: "build", RESET: "reset", STEP: "step", CALL: "call", CLOSE: "close"}


class Operation:
    """One call of a process slot, from its post to its answer."""

    __slots__ = ("argument", "code", "future", "slot")

    def __init__(self, slot: ProcessSlot, future: asyncio.Future[Any], code: int, argument: Any = None) -> None:
        self.slot = slot
        self.future = future
        self.code = code
        self.argument = argument


class ProcessSlot:
    """A simulator in a child process; see `Slot`. Its row of shared memory belongs to one operation at a time."""

    __slots__ = ("_actions", "_host", "built", "current", "env", "held", "index", "innocent", "lost", "wire")

    def __init__(self, host: ProcessHost, index: int, actions: ActionReader) -> None:
        self._host = host
        self._actions = actions
        self.index = self.env = index
        self.wire = index.to_bytes(2, "little")
        self.built = False
        self.innocent = False
        self.lost: EbrlError | None = None
        self.current: Operation | None = None
        self.held: deque[Operation] = deque()

    @property
    def lane_name(self) -> str:
        """Where it runs."""
        return self._host.name

    def reset(self, future: asyncio.Future[Reset], seed: int) -> None:
        """See `Slot`."""
        self._post(Operation(self, future, RESET, seed))

    def step(self, future: asyncio.Future[StepResult], actions: Array, finite: bool = False) -> None:
        """See `Slot`; at most `MAX_CHUNK` actions, which the child looks at in any case."""
        try:
            chunk = self._actions.chunk(actions)
        except InvalidData as error:
            future.set_exception(error)
            return
        if len(chunk) > MAX_CHUNK:
            text = f"a process takes at most {MAX_CHUNK} actions in one step, got {len(chunk)}: do them in several"
            future.set_exception(ConfigError(text))
            return
        self._post(Operation(self, future, STEP, chunk))

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `Slot`."""
        try:
            request = packed(fn, f"call({fn!r})")
        except ConfigError as error:
            future.set_exception(error)
            return
        self._post(Operation(self, future, CALL, frame(request)))

    def build(self) -> asyncio.Future[None]:
        """See `Slot`; starts the process again if it has ended."""
        self.innocent, self.lost = False, None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._note_built)
        self._host.when_ready(future, lambda: self._build(future))
        return future

    def retire(self) -> None:
        """See `Slot`."""
        if self.built:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.add_done_callback(self._note_retired)
            self._post(Operation(self, future, CLOSE))

    def lose(self, error: EbrlError, innocent: bool) -> None:
        """The process has ended: fail what is pending."""
        self.built, self.innocent, self.lost = False, innocent, error
        for operation in (self.current, *self.held):
            if operation is not None:
                fail(operation, error)
        self.current = None
        self.held.clear()

    def next(self) -> None:
        """The current operation is over: begin the one that was held back, if any."""
        self.current = None
        if self.held:
            self._post(self.held.popleft())

    def _post(self, operation: Operation) -> None:
        # A cancelled operation may still be in the child, which then reads and writes the row.
        if not self.built and operation.code != BUILD:
            fail(operation, self._host.why_not_built)
        elif self.current is not None:
            self.held.append(operation)
        elif self._host.post(operation):
            self.current = operation

    def _build(self, future: asyncio.Future[None]) -> None:
        if self.built:
            closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            closing.add_done_callback(heed)  # it has failed, and so an error in that is no news
            self._post(Operation(self, closing, CLOSE))
        self._post(Operation(self, future, BUILD))

    def _note_built(self, future: asyncio.Future[None]) -> None:
        self.built = not future.cancelled() and future.exception() is None

    def _note_retired(self, future: asyncio.Future[None]) -> None:
        self.built = False
        if self.lost is None:
            look_closed(future)
        else:  # it went with its process
            heed(future)


class ProcessHost:
    """One child process with some simulators. See the module, and `ebrl.sim.shm` for the protocol."""

    num_leaked = 0  # no thread of this process runs a simulator

    def __init__(self, specs: Sequence[EnvSpec], machine: Machine, pool: Lender | None, name: str) -> None:
        """Describe the host; `start` starts the process.

        Args:
            specs: What to build, one simulator each; picklable, and alike in what they observe and how they act.
            machine: A real one; gives a lane that starts the process and waits for its end.
            pool: Lends one unit while the child works.
            name: Unique name.

        Raises:
            ConfigError: `machine` is a model, or the number of simulators out of range.
        """
        if not machine.real:
            raise ConfigError(f'{name}: a virtual machine has no processes: pass host="thread"')
        if not 1 <= len(specs) < CONTROL:
            raise ConfigError(f"{name}: simulators must be 1 to {CONTROL - 1}, got {len(specs)}")
        self.name = name
        self.times = CallTimes()
        actions = ActionReader(specs[0].action)
        self.slots = [ProcessSlot(self, index, actions) for index in range(len(specs))]
        self._specs = specs
        self._machine = machine
        self._pool = pool
        self._order = b""
        self._link: Link | None = None
        self._mailbox: Mailbox
        self._rows: Rows
        self.why_not_built: EbrlError = Closed(f"{name} is not open")
        self._alive = False
        self._closed = False
        self._ready: asyncio.Future[None]
        self._given_up: tuple[EbrlError, Slot | None] | None = None  # why it was killed, and because of whom
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds spent in simulators so far."""
        return self._busy_s + (self._rows.busy_s[0] if self._alive else 0.0)

    def start(self, on_call: Callable[[], None] | None = None) -> None:
        """See `SimHost`.

        Raises:
            ConfigError: A spec cannot be sent to a process.
        """
        self._order = self._order or pickle.dumps(make_order(self._specs))
        loop = asyncio.get_running_loop()
        memory = anonymous_file(size_of(self._specs))
        self._rows = Rows(self._specs, memory)
        self._mailbox = Mailbox(loop, self._pool, self._send, self.name)
        lane = self._link.lane if self._link is not None else self._machine.lane("io", f"{self.name}-io")
        self._alive = True
        self._given_up = None
        self._link = Link(self.name, lane, memory, self._take, self._end)
        self._ready = self._link.ready
        self._link.start(self._order)

    async def open(self) -> None:
        """See `SimHost`.

        Raises:
            ConfigError: A spec cannot be sent to a process.
            HostDied: The process ended while building.
        """
        await open_all(self)

    def when_ready(self, future: asyncio.Future[None], post: Callable[[], None]) -> None:
        """Call `post` when there is a child that answers; fail `future` if there will be none."""
        if self._closed or self._link is None:
            future.set_exception(Closed(f"{self.name} is not open"))
            return
        if not self._alive:
            self.start()

        def go_on(ready: asyncio.Future[None]) -> None:
            error = Closed(f"{self.name} is closed") if ready.cancelled() else ready.exception()
            if error is not None:
                complete(future, None, another(error))
            elif not future.done():
                post()

        self._ready.add_done_callback(go_on)

    def running(self) -> list[Running]:
        """See `SimHost`."""
        if not self._alive or self._link is None:
            return []
        if not self._ready.done():
            return [Running(self, self._link, "build", None)]
        if not self._mailbox.outstanding:
            return []
        row = self._rows.running[0] - 1
        if row >= 0:
            operation = self.slots[row].current
        else:  # between two calls; or it has stopped, and does not even begin one
            operation = next((slot.current for slot in self.slots if slot.current is not None), None)
        if operation is None:
            return []
        return [Running(self, operation, PHASES[operation.code], operation.slot if row >= 0 else None)]

    def give_up(self, running: Running, error: SimulatorError) -> None:
        """See `SimHost`: the process is killed."""
        if self._given_up is None and self._link is not None:
            self._given_up = error, running.slot
            self._link.kill()

    async def aclose(self, deadline_s: float) -> list[str]:
        """See `SimHost`; the process is killed after the deadline."""
        link, self._link, self._closed = self._link, None, True
        if link is None:
            return []
        if self._alive:
            self._mailbox.close()
        killed = await link.aclose(deadline_s)
        if killed:
            logger.warning("%s: its simulators did not close within %.1f s, and it was killed", self.name, deadline_s)
        self._end(Closed(f"{self.name} is closed"))
        lost = await self._machine.aclose([link.lane], deadline_s=KILL_S)
        return [self.name] if killed or lost else []

    def post(self, operation: Operation) -> bool:
        """Send an operation when the pool allows it; fails it if nobody is left to do it."""
        if not self._alive or self._link is None:
            fail(operation, self.why_not_built)
            return False
        self._mailbox.post(operation)
        return True

    def _end(self, error: EbrlError) -> None:
        # Nobody answers any more: fail what is pending and whatever comes later.
        if not self._alive:
            return
        self._alive = False
        row = self._rows.running[0] - 1
        guilty: Slot | None = self.slots[row] if row >= 0 else None
        if self._given_up is not None:
            error, guilty = self._given_up
        self.why_not_built = error
        self._busy_s += self._rows.busy_s[0]
        for slot in self.slots:
            slot.lose(error, innocent=guilty is not None and slot is not guilty)
        complete(self._ready, None, another(error))
        self._mailbox.close()
        self._mailbox.settle(self._mailbox.outstanding)
        del self._rows  # unmaps the memory

    def _begin(self, error: BaseException | None) -> None:
        # The child has imported what it needs, or could not.
        if error is None:
            complete(self._ready, None, None)
        elif self._given_up is None and self._link is not None:
            if isinstance(error, AttributeError | ImportError):  # of pickle; it would be so again and again
                error = not_found(self.name, error)
            elif not isinstance(error, EbrlError):
                error = another(error, HostDied(f"the process of {self.name} could not begin: {error!r}"))
            self._given_up = error, None
            self._link.kill()

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
            elif code == CALL:
                out += operation.argument
        if out and self._link is not None:
            self._link.send(out)

    def _skip(self, operation: Operation) -> None:
        if operation.slot.current is operation:  # and the process has not ended meanwhile
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
                    if not self._ready.done():
                        self._begin(error)
                    elif error is not None:  # it ends, and has closed a simulator
                        tell_unclosed(error)
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
        for name in SUCCESS:
            if name in info:
                info[name] = info[name] != 0
        return info


def fail(operation: Operation, error: EbrlError) -> None:
    """Fail an operation with an exception of its own, since tracebacks belong to one raise."""
    complete(operation.future, None, another(error))


def another(error: BaseException, form: EbrlError | None = None) -> EbrlError:
    """Return a copy of an error of ours, or `form` with the notes of any other."""
    copy = form or type(error)(*error.args)
    assert isinstance(copy, EbrlError)
    for note in getattr(error, "__notes__", []):
        copy.add_note(note)
    return copy
