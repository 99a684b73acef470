"""Virtual time: the same runtime on a modelled machine, faster than real time and exactly repeatable.

`VirtualLoop` jumps to the next timer instead of waiting for it. When nothing is scheduled and everybody waits, that
is a deadlock: the main task is cancelled at once, so that everything unwinds, and `Deadlock` leaves the loop with a
table of who waits for what. Work handed to real threads (``asyncio.to_thread``) is waited for while the clock stands.

`VirtualMachine` models hardware, never scheduling: its lanes queue for a server of their kind (a core, a GPU), spend
the time that the kind's latency law says, then run the function inline.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import numpy as np

from ebrl.core.errors import Closed, Deadlock
from ebrl.core.lanes import Call, Mailbox, deliver, execute
from ebrl.core.pools import Lease, Pool
from ebrl.core.protocols import Lane
from ebrl.core.rng import Domain, stream

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Law: TypeAlias = Callable[[int, np.random.Generator], float]
"""``law(n, rng)``: seconds that a call with `n` units of work takes."""


class _VirtualSelector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.loop._num_threads or len(self.get_map()) > 1:  # else only the loop's own pipe: nobody is out there
            events = super().select(0)
            if events:
                return events
        if timeout == 0:
            return []
        if self.loop._num_threads:
            return super().select(None)
        self.loop._advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps. Use `run_virtual`."""

    def __init__(self) -> None:
        selector = _VirtualSelector()
        selector.loop = self
        self._now = 0.0
        self._num_threads = 0
        self._main: asyncio.Future[Any] | None = None
        self._stalled: Deadlock | None = None
        self._settlers: list[asyncio.Future[None]] = []
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    async def settle(self) -> None:
        """Wait until every other task is blocked, with the clock standing."""
        future = self.create_future()
        self._settlers.append(future)
        await future

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run; a deadlock replaces whatever the cancelled main task made of it."""
        main: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]  # as asyncio does
        outer, self._main = self._main, main
        try:
            return super().run_until_complete(main)
        finally:
            self._main = outer
            stalled, self._stalled = self._stalled, None
            if stalled is not None:
                raise stalled from sys.exception()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run in a thread; the clock stands until it returns."""
        future = super().run_in_executor(executor, func, *args)
        self._num_threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Join the threads of the default executor."""
        self._num_threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._num_threads -= 1

    def _thread_ended(self, future: asyncio.Future[Any]) -> None:
        self._num_threads -= 1

    def _advance(self, timeout: float | None) -> None:
        if self._settlers:
            settlers, self._settlers = self._settlers, []
            for settler in settlers:
                if not settler.done():
                    settler.set_result(None)
        elif timeout is not None:
            self._now += timeout
        elif self._stalled is None and self._main is not None:
            self._stalled = Deadlock(f"everybody waits and nothing is scheduled:\n{who_waits(self)}")
            self._main.cancel()
        else:
            raise Deadlock(f"the tasks that were cancelled wait again:\n{who_waits(self)}") from self._stalled


def who_waits(loop: asyncio.AbstractEventLoop) -> str:
    """Return one line per task: its name, and where in its code it waits."""
    lines = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        frames = _await_chain(task.get_coro())
        lines.append(f"  {task.get_name()}: {' > '.join(frames[-3:]) or 'not started'}")
    return "\n".join(lines)


def _await_chain(awaitable: Any) -> list[str]:
    frames = []
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is not None:
            summary = traceback.extract_stack(frame, limit=1)[0]
            frames.append(f"{summary.name} (line {summary.lineno})")
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return frames


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time.

    Raises:
        Deadlock: Everybody waits and nothing is scheduled.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualLane:
    """A lane of a `VirtualMachine`; see `ebrl.core.protocols.Lane`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        pool: Pool | None,
        servers: Pool,
        law: Callable[[int], float],
    ) -> None:
        self._loop = loop
        self._name = name
        self._servers = servers
        self._law = law
        self._queue: deque[Call] = deque()
        self._running: Call | None = None
        self._closed = False
        self._busy_s = 0.0
        self._mailbox = Mailbox(loop, pool, self._take, name)

    @property
    def name(self) -> str:
        """Of the lane."""
        return self._name

    @property
    def busy_s(self) -> float:
        """Virtual seconds spent in calls so far."""
        return self._busy_s

    def run(self, fn: Callable[..., T], *args: Any, n: int = 1) -> asyncio.Future[T]:
        """Queue ``fn(*args)``; see `ebrl.core.protocols.Lane.run`."""
        future: asyncio.Future[T] = self._loop.create_future()
        self.submit(future, fn, *args, n=n)
        return future

    def submit(self, future: asyncio.Future[Any], fn: Callable[..., Any], *args: Any, n: int = 1) -> None:
        """Queue ``fn(*args)`` for a future of the caller's."""
        if self._closed:
            raise Closed(f"lane {self._name} is closed: {getattr(fn, '__qualname__', fn)} was not run")
        self._mailbox.post((future, fn, args, n))

    def close(self) -> None:
        """Run nothing that has not begun."""
        self._closed = True
        for future, *_ in [*self._mailbox.close(), *self._queue]:
            future.cancel()

    def _take(self, calls: list[Call]) -> None:
        self._queue.extend(calls)
        if self._running is None:
            self._next()

    def _next(self) -> None:
        if self._queue:
            self._running = self._queue.popleft()
            self._servers.request(1, self._begin, self._name)

    def _begin(self, lease: Lease) -> None:
        call = self._running
        assert call is not None
        future, _, _, n = call
        seconds = 0.0 if future.cancelled() else self._law(n)
        self._busy_s += seconds
        self._loop.call_later(seconds, self._finish, call, lease)

    def _finish(self, call: Call, lease: Lease) -> None:
        result = execute(call)
        lease.release()
        self._running = None
        self._mailbox.settle()
        deliver(result)
        if self._running is None:
            self._next()


class VirtualMachine:
    """A machine that exists as numbers.

    Example:
        >>> machine = VirtualMachine({"sim": lambda n, rng: 0.02, "gen": lambda n, rng: 0.004 + 0.0002 * n})
        >>> machine.num_cores
        16
    """

    real = False

    def __init__(
        self,
        laws: Mapping[str, Law],
        *,
        num_cores: int = 16,
        servers: Mapping[str, int] | None = None,
        seed: int = 0,
    ) -> None:
        """Describe the machine.

        Args:
            laws: Latency law per kind of lane; a kind without one takes no time. Work of ``n=0`` takes none either.
            num_cores: What simulators share.
            servers: Calls of one kind that run at once; default: one, and `num_cores` for ``"sim"``.
            seed: Of the latencies; every lane draws from a stream of its own.
        """
        self.num_cores = num_cores
        self._laws = dict(laws)
        self._units = {"sim": num_cores, **(servers or {})}
        self._servers: dict[str, Pool] = {}
        self._seed = seed
        self._lanes: list[VirtualLane] = []

    def lane(self, kind: str, name: str, pool: Pool | None = None) -> VirtualLane:
        """Make a lane; see `ebrl.core.protocols.Machine.lane`."""
        if kind not in self._servers:
            self._servers[kind] = Pool(f"virtual {kind}", self._units.get(kind, 1))
        law, rng = self._laws.get(kind), stream(self._seed, Domain.LATENCY, len(self._lanes))

        def seconds(n: int) -> float:
            return law(n, rng) if law is not None and n else 0.0

        lane = VirtualLane(asyncio.get_running_loop(), name, pool, self._servers[kind], seconds)
        self._lanes.append(lane)
        return lane

    async def aclose(self, lanes: Sequence[Lane] | None = None, *, deadline_s: float) -> list[str]:
        """Run nothing that has not begun; nothing can be lost here."""
        for lane in self._lanes:
            if lanes is None or lane in lanes:
                lane.close()
        return []
