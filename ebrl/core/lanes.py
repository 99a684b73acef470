"""Lanes: named threads that own things for life, and the one wake-up through which they all report.

Why not ``run_in_executor``: it costs 10 to 17 us of loop time per call. Here a lane takes work from a
`queue.SimpleQueue` and puts results into a deque; the first result after a drain arms one ``call_soon_threadsafe``,
the others ride along: 2 to 6 us with everything else included.

Why pinned threads: a GL context belongs to the thread that made it, and misuse is silent (black frames).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from ebrl.core.errors import Closed
from ebrl.core.leases import Lease, Lender, Ticket

T = TypeVar("T")
logger = logging.getLogger("ebrl")


Call: TypeAlias = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...], int]
"""``(future, fn, args, n)``: one function call on its way to a lane. A tuple, since an object costs 0.1 us more."""

Result: TypeAlias = "tuple[asyncio.Future[Any] | None, Any, Any]"
"""``(future, value, error)``: what came of a call; ``(None, mailbox, num)``: `num` calls of that mailbox have ended."""


def execute(call: Call) -> Result:
    """Run a call on the calling thread; one whose future is done does not run."""
    future, fn, args, _ = call
    if future.done():
        return future, None, None
    try:
        return future, fn(*args), None
    except BaseException as error:  # the border: whatever user code raised travels to the task that asked
        if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
            return future, None, error
        # SystemExit would end the loop, CancelledError a task that nobody cancelled, the others an iteration
        wrapped = RuntimeError(f"{error!r} left a call on a lane")
        wrapped.__cause__ = error
        return future, None, wrapped


def deliver(result: Result) -> None:
    """Complete the future of a call, on the loop; a late result of a cancelled call is dropped."""
    future, value, error = result
    if future is None:
        value.settle(error)
    elif future.done():
        return
    elif error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


class Mailbox:
    """Calls posted in one turn of the loop leave together, once the pool has lent its units.

    They are held while calls are outstanding. As long as the pool is not contended, later calls may follow at once, so
    that a busy lane never idles for a turn of the loop; when somebody waits, the units go round.
    """

    __slots__ = ("_armed", "_lease", "_loop", "_name", "_pool", "_send", "_ticket", "_units", "outstanding", "waiting")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: Lender | None,
        send: Callable[[list[Any]], None],
        name: str,
        units: int = 1,
    ) -> None:
        """Make a mailbox.

        Args:
            loop: Of the callers.
            pool: Lends the units, a pool or a stage's bucket of it; None: nothing is asked.
            send: Takes the calls, in order; must neither raise nor call `settle` itself.
            name: Shown as who waits for the pool.
            units: That the calls use, for example threads of one operation.

        Raises:
            PoolError: The pool never lends so many at once.
        """
        if pool is not None:
            pool.expect(units, name)
        self._loop = loop
        self._pool = pool
        self._send = send
        self._name = name
        self._units = units
        self._armed = False
        self._lease: Lease | None = None
        self._ticket: Ticket | None = None
        self.waiting: list[Any] = []
        self.outstanding = 0

    def post(self, call: Any) -> None:
        """Add a call."""
        self.waiting.append(call)
        if not self._armed:
            self._armed = True
            self._loop.call_soon(self._flush)

    def settle(self, num: int = 1) -> None:
        """Say that `num` sent calls have ended."""
        self.outstanding -= num
        if self.outstanding or self._lease is None:
            return
        if self.waiting and self._pool is not None and not self._pool.contended:
            self._go()
            return
        lease, self._lease = self._lease, None
        if self.waiting:
            self._ask()  # before the units are free, so that its place in the queue is fair
        lease.release()

    def close(self) -> list[Any]:
        """Leave the queue and return the calls that were not sent; the units go back when the last sent call ends."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        calls, self.waiting = self.waiting, []
        return calls

    def _flush(self) -> None:
        self._armed = False
        if not self.waiting:
            return
        pool = self._pool
        if pool is None or (self._lease is not None and not pool.contended):
            self._go()
        elif self._lease is None and self._ticket is None:
            self._ask()

    def _ask(self) -> None:
        assert self._pool is not None
        ticket = self._pool.request(self._units, self._granted, self._name)
        if self._lease is None:  # not granted at once
            self._ticket = ticket

    def _granted(self, lease: Lease) -> None:
        self._ticket = None
        self._lease = lease
        self._go()

    def _go(self) -> None:
        calls, self.waiting = self.waiting, []
        self.outstanding += len(calls)
        self._send(calls)


class Completions:
    """Results of all lanes of one loop, delivered by one armed wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.num_wakeups = 0
        self._done: deque[Result] = deque()
        self._armed = False

    def put(self, result: Result) -> None:
        """Hand in a result; called on any thread."""
        self._done.append(result)
        if not self._armed:
            self._armed = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: nobody is left to hear of it
                logger.debug("a result came after the loop had closed")

    def _drain(self) -> None:
        self._armed = False  # before draining: a result put from now on arms again
        self.num_wakeups += 1
        done = self._done
        while done:
            result = done.popleft()
            future, value, error = result
            if error is None and future is not None:  # as in deliver(), which is not called for the common case
                if not future.done():
                    future.set_result(value)
            else:
                deliver(result)


class ThreadLane:
    """One named thread; calls run in order. See `ebrl.core.protocols.Lane`.

    Attributes:
        current: See there. Written by the thread, and read on the loop.
    """

    def __init__(self, completions: Completions, name: str, pool: Lender | None = None, units: int = 1) -> None:
        self._completions = completions
        self._name = name
        self._queue: SimpleQueue[list[Call] | None] = SimpleQueue()
        self._pooled = pool is not None
        self._closed = False
        self._busy_s = 0.0
        self._ended: asyncio.Future[None] = completions.loop.create_future()
        self.current: Call | None = None
        self.mailbox = Mailbox(completions.loop, pool, self._queue.put, name, units)
        self.thread = threading.Thread(target=self._work, name=f"ebrl-{name}", daemon=True)
        self.thread.start()

    @property
    def name(self) -> str:
        """Of the lane."""
        return self._name

    @property
    def busy_s(self) -> float:
        """Seconds spent in calls so far."""
        return self._busy_s

    @property
    def ident(self) -> int | None:
        """Of its thread."""
        return self.thread.ident

    def run(self, fn: Callable[..., T], *args: Any, n: int = 1) -> asyncio.Future[T]:
        """Queue ``fn(*args)``; see `ebrl.core.protocols.Lane.run`."""
        future: asyncio.Future[T] = self._completions.loop.create_future()
        self.submit(future, fn, *args, n=n)
        return future

    def submit(self, future: asyncio.Future[Any], fn: Callable[..., Any], *args: Any, n: int = 1) -> None:
        """Queue ``fn(*args)`` for a future of the caller's."""
        if self._closed:
            raise Closed(f"lane {self._name} is closed: {getattr(fn, '__qualname__', fn)} was not run")
        call = (future, fn, args, n)
        if self._pooled:
            self.mailbox.post(call)
        else:
            self._queue.put([call])

    async def aclose(self, deadline_s: float) -> bool:
        """End the thread behind its running call; calls that were not sent are forgotten.

        Returns:
            False when it still ran after `deadline_s`: it is then given up, and named in the log with its stack. Its
            units of the pool go back: the thread may still use a core, but else the pool would shrink for good.
        """
        if not self._closed:
            self._closed = True
            for future, *_ in self.mailbox.close():
                future.cancel()
            self._queue.put(None)
        done, _ = await asyncio.wait([self._ended], timeout=deadline_s)
        if done:
            return True
        text = "lane %s is lost: its call did not return in time; its units go back, its thread runs on here:\n%s"
        logger.error(text, self._name, self.give_up())
        return False

    def give_up(self, last: Callable[[], None] | None = None) -> str:
        """See `ebrl.core.protocols.Machine.give_up`. Should the call return after all, its thread ends after `last`."""
        self._closed = True
        self.mailbox.close()
        self.mailbox.settle(self.mailbox.outstanding)
        if last is not None:
            self._queue.put([(self._completions.loop.create_future(), last, (), 0)])
        self._queue.put(None)
        return self._stack()

    def _stack(self) -> str:
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(no stack)"

    def _work(self) -> None:
        put, get, clock = self._completions.put, self._queue.get, time.perf_counter
        while (calls := get()) is not None:
            began, num = clock(), len(calls)
            self._run_all(calls)
            calls.clear()  # what they hold is freed here and now, not when the next calls come
            self._busy_s += clock() - began
            if self._pooled:
                put((None, self.mailbox, num))
        put((self._ended, None, None))

    def _run_all(self, calls: list[Call]) -> None:
        put = self._completions.put
        for call in calls:
            self.current = call
            put(execute(call))
        self.current = None
