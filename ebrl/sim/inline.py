"""`InlineHost`: simulators that are awaited run on the loop itself, a task for each call.

They use no thread and no core of the pool. A call that its program no longer waits for is cancelled. Tasks belong to
the host, whose `aclose` ends all of them and waits for that until its deadline. No `Scope` could: it waits for ever for
user code that ignores that it is cancelled, and starts nothing while it ends, when simulators are yet to be closed. So
a `Runtime` ends in time whatever such code does, and names it. The loop has its task all the same, and `ebrl.run`, as
``asyncio.run``, waits for that until it ends by itself, or for ever: nothing can end a task from outside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ebrl.core.errors import EbrlError, SimulatorError
from ebrl.core.futures import complete, heed
from ebrl.core.records import Array, EnvSpec, StepResult
from ebrl.sim.awaited import AwaitedSimulator
from ebrl.sim.failures import Phase
from ebrl.sim.hosts import Reset, Running, look_closed, open_all
from ebrl.sim.simulator import Missing
from ebrl.sim.times import CallTimes

logger = logging.getLogger("ebrl")


class InlineSlot:
    """A simulator that is awaited; see `ebrl.sim.hosts.Slot`."""

    def __init__(self, spec: EnvSpec, times: CallTimes, name: str, env: int, on_call: Callable[[], None]) -> None:
        self._spec = spec
        self._on_call = on_call
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()  # calls of one simulator follow each other
        self._simulator: AwaitedSimulator | None = None
        self._missing = Missing(SimulatorError("the simulator was not built"))
        self.env = env
        self.lane_name = name
        self.built = False
        self.innocent = False
        self.lost: EbrlError | None = None
        self.busy_s = 0.0
        self.current: tuple[asyncio.Task[None], Phase] | None = None
        self.tasks: dict[asyncio.Task[None], asyncio.Future[Any]] = {}  # calls that run or wait, and whom they answer
        self._lost: dict[asyncio.Task[None], AwaitedSimulator] = {}  # by the call that did not end

    def reset(self, future: asyncio.Future[Reset], seed: int) -> None:
        """See `Slot`."""
        self._start(future, "reset", lambda: self._reset(seed))

    def step(self, future: asyncio.Future[StepResult], actions: Array, finite: bool = False) -> None:
        """See `Slot`."""
        self._start(future, "step", lambda: self._step(actions, finite))

    def call(self, future: asyncio.Future[Any], fn: Callable[[Any], Any]) -> None:
        """See `Slot`; what `fn` returns is awaited where that is possible."""
        self._start(future, "call", lambda: self._there().call(fn))

    def build(self) -> asyncio.Future[None]:
        """See `Slot`."""
        self.lost = None
        if self.built:
            self.start_close().add_done_callback(heed)  # it has failed, and so an error in that is no news
        future: asyncio.Future[None] = self._loop.create_future()
        self._start(future, "build", self._build)
        return future

    def retire(self) -> None:
        """See `Slot`."""
        self.start_close().add_done_callback(look_closed)

    def start_close(self) -> asyncio.Future[None]:
        """Queue the end of the simulator, if there is one, behind whatever runs."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._start(future, "close", self._close)
        return future

    def lose(self, error: SimulatorError) -> None:
        """End the running call and those that wait for it, and go on without a simulator."""
        assert self.current is not None
        current, _ = self.current
        if self._simulator is not None:
            self._lost[current] = self._simulator
        self._simulator, self._missing, self.built, self.lost = None, Missing(error), False, error
        self._turn, self.current = asyncio.Lock(), None  # should it ignore that it is cancelled, it holds up nobody
        for task, future in self.tasks.items():
            if task is current or not future.done():
                complete(future, None, type(error)(*error.args))
                task.cancel()

    def _start(self, future: asyncio.Future[Any], phase: Phase, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        task = self._loop.create_task(self._run(future, phase, call), name=f"ebrl-{self.lane_name}")
        self.tasks[task] = future
        task.add_done_callback(self.tasks.pop)
        future.add_done_callback(lambda future: task.cancel() if future.cancelled() else None)

    async def _run(
        self, future: asyncio.Future[Any], phase: Phase, call: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with self._turn:
                self.current = task, phase
                self._on_call()
                began_s = self._loop.time()
                try:
                    result = await call()
                finally:
                    self.busy_s += self._loop.time() - began_s
                    if _is_current(self):
                        self.current = None
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:  # the border: whatever user code raises
            complete(future, None, error)
        else:
            complete(future, result, None)
        finally:
            if task in self._lost:
                await _close_failed(self._lost.pop(task))

    def _there(self) -> AwaitedSimulator:
        if self._simulator is None:
            self._missing.step()
        return self._simulator

    async def _reset(self, seed: int) -> Reset:
        began_s = self._loop.time()
        result = await self._there().reset(seed)
        self._times.resets.append(self._loop.time() - began_s)
        return result

    async def _step(self, actions: Array, finite: bool) -> StepResult:
        began_s = self._loop.time()
        result = await self._there().step(actions, finite)
        took_s = self._loop.time() - began_s
        self._times.steps.append(took_s / len(result.rewards))
        self._times.parts.append((took_s, 0.0))  # it waits
        return result

    async def _build(self) -> None:
        made = await AwaitedSimulator.build(self._spec)
        if _is_current(self):
            self._simulator, self.built = made, True
        else:
            await _close_failed(made)

    async def _close(self) -> None:
        simulator, self._simulator = self._simulator, None
        self._missing, self.built = Missing(SimulatorError("the simulator is closed")), False
        if simulator is not None:
            await simulator.close()


def _is_current(slot: InlineSlot) -> bool:
    """Whether the task that runs is that of the current call, and not one that was given up."""
    return slot.current is not None and slot.current[0] is asyncio.current_task()


async def _close_failed(simulator: AwaitedSimulator) -> None:
    """See `ebrl.sim.hosts.close_failed`."""
    try:
        await simulator.close()
    except Exception as error:  # the border: whatever user code raises
        logger.debug("a simulator that is replaced could not be closed: %r", error)


class InlineHost:
    """Simulators on the loop; see `ebrl.sim.hosts.SimHost`."""

    def __init__(self, specs: Sequence[EnvSpec], name: str) -> None:
        """Make the slots.

        Args:
            specs: What to build, one simulator each.
            name: Of the group.
        """
        self.times = CallTimes()
        self.num_leaked = 0
        self.slots = [
            InlineSlot(spec, self.times, f"{name}-inline-{i}", i, self._called) for i, spec in enumerate(specs)
        ]
        self._closed = False
        self._on_call: Callable[[], None] | None = None

    @property
    def busy_s(self) -> float:
        """Seconds for which simulators were awaited."""
        return sum(slot.busy_s for slot in self.slots)

    def start(self, on_call: Callable[[], None] | None = None) -> None:
        """See `SimHost`."""
        self._on_call = on_call

    def _called(self) -> None:
        if self._on_call is not None:
            self._on_call()

    async def open(self) -> None:
        """See `SimHost`."""
        await open_all(self)

    def running(self) -> list[Running]:
        """See `SimHost`."""
        busy = [(slot, slot.current) for slot in self.slots if slot.current is not None]
        return [Running(slot, task, phase, slot) for slot, (task, phase) in busy]

    def give_up(self, running: Running, error: SimulatorError) -> None:
        """See `SimHost`: the call is cancelled."""
        slot = next(slot for slot in self.slots if slot is running.place)
        logger.error("env %d hangs: %s. Its call is cancelled", slot.env, error)
        slot.lose(error)

    async def aclose(self, deadline_s: float) -> list[str]:
        """See `SimHost`: calls that do not end are cancelled, and what ignores that is left to the loop."""
        if self._closed:
            return []
        self._closed = True
        closing = {slot.start_close(): slot for slot in self.slots}
        tasks = {task: slot for slot in self.slots for task in slot.tasks}
        late = (await asyncio.wait(tasks, timeout=deadline_s / 2))[1]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=deadline_s / 2)
        for name in sorted({tasks[task].lane_name for task in late if not task.done()}):
            logger.error("%s ignores that its call is cancelled; the loop ends when that does", name)
        for future, slot in closing.items():
            if future.done() and not future.cancelled() and future.exception() is not None:
                logger.warning("the simulator of %s could not be closed: %r", slot.lane_name, future.exception())
        return sorted({tasks[task].lane_name for task in late})
