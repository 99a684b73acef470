"""`VirtualMachine`: hardware as numbers, for the same runtime in virtual time. It models hardware, never scheduling.

A lane queues for a server of its kind (a core, a GPU), runs the function inline, and takes the time that the kind's
latency law says and that the function itself asks for with `spend`; the result is delivered then. Kinds of work that
share a GPU slow each other down as `GpuModel` says.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ebrl.core.errors import Closed, ConfigError, whole
from ebrl.core.lanes import Call, Mailbox, Result, deliver, execute
from ebrl.core.leases import Lender
from ebrl.core.protocols import Lane
from ebrl.core.rng import Domain, stream
from ebrl.core.virtual_gpu import GpuModel, VirtualGpu

T = TypeVar("T")
Law: TypeAlias = Callable[[int, np.random.Generator], float]
"""``law(n, rng)``: seconds that a call with `n` units of work takes."""
NUMBERS = (float, int, np.floating, np.integer)

_call = threading.local()  # of the thread that runs a virtual call: the seconds it has spent


def spend(seconds: float) -> None:
    """Take so long: virtual time inside a call on a virtual lane, a sleep anywhere else.

    Simulators that exist for tests and benchmarks use it, so that the same one runs in real and in virtual time.

    Args:
        seconds: Not negative.
    """
    if getattr(_call, "spent_s", None) is None:
        time.sleep(seconds)
    else:
        _call.spent_s += seconds


def _execute(call: Call) -> tuple[Result, float]:
    _call.spent_s = 0.0
    try:
        return execute(call), _call.spent_s
    finally:
        _call.spent_s = None


class _Servers:
    """Servers of one kind of lane, first come first served."""

    def __init__(self, num: int) -> None:
        self._free = num
        self._queue: deque[Callable[[], None]] = deque()

    def take(self, begin: Callable[[], None]) -> None:
        if self._free:
            self._free -= 1
            begin()
        else:
            self._queue.append(begin)

    def give_back(self) -> None:
        if self._queue:
            self._queue.popleft()()
        else:
            self._free += 1


class VirtualLane:
    """A lane of a `VirtualMachine`; see `ebrl.core.protocols.Lane`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        pool: Lender | None,
        units: int,
        servers: _Servers,
        law: Callable[[int], float],
        run_for: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._loop = loop
        self._name = name
        self._servers = servers
        self._law = law
        self._run_for = run_for
        self._queue: deque[Call] = deque()  # what has not begun
        self._busy = False  # with a call, or with waiting for a server
        self._closed = False
        self._last: Callable[[], None] | None = None  # what is left to do for one that was given up
        self._busy_s = 0.0
        self.current: Call | None = None
        self._mailbox = Mailbox(loop, pool, self._take, name, units)

    @property
    def name(self) -> str:
        """Of the lane."""
        return self._name

    @property
    def busy_s(self) -> float:
        """Virtual seconds spent in calls so far."""
        return self._busy_s

    @property
    def ident(self) -> int | None:
        """It is no thread."""
        return None

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

    def give_up(self, last: Callable[[], None]) -> str:
        """See `ebrl.core.protocols.Machine.give_up`."""
        self._closed, self._last = True, last
        self._queue.clear()
        self._mailbox.close()
        self._mailbox.settle(self._mailbox.outstanding)
        if self.current is not None:
            self._servers.give_back()
        return f"(the call of {self._name} runs in virtual time)"

    def _take(self, calls: list[Call]) -> None:
        self._queue.extend(calls)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if self._queue:
            self._busy = True
            self._servers.take(self._begin)

    def _begin(self) -> None:
        if self._last is not None:  # it was given up while it waited for a server
            self._servers.give_back()
            return
        call = self.current = self._queue.popleft()
        future, _, _, n = call
        law_s = 0.0 if future.done() else self._law(n)
        result, spent_s = _execute(call)
        began_s = self._loop.time()
        self._run_for(law_s + spent_s, lambda: self._finish(result, began_s))

    def _finish(self, result: Result, began_s: float) -> None:
        if self._last is not None:
            self._last()
            return
        self._busy_s += self._loop.time() - began_s
        self._servers.give_back()
        self._busy, self.current = False, None
        self._mailbox.settle()
        deliver(result)
        if not self._busy:
            self._next()


class VirtualMachine:
    """A machine that exists as numbers. Another event loop finds it as it was made: nothing runs, no draw was made.

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
        on_cores: Iterable[str] = ("sim",),
        gpu: GpuModel | None = None,
        memory_mib: int = 2**40,
        seed: int = 0,
    ) -> None:
        """Describe the machine.

        Args:
            laws: Latency law per kind of lane: ``"sim"``, ``"gen"``, ``"train"``, and ``"io"`` for what is written.
                One without takes no time. Work of ``n=0`` takes none either.
            num_cores: What simulators share, and whatever else is on cores.
            servers: Calls of one kind that run at once; default: one, and `num_cores` for what is on cores.
            on_cores: Kinds whose work takes cores: ``("sim", "gen", "train")`` for a machine without a GPU.
            gpu: What some kinds share; their laws then hold for all of it alone.
            memory_mib: What simulators share that say how much they take.
            seed: Of the latencies; every lane draws from a stream of its own.

        Raises:
            ConfigError: `num_cores` or one of `servers` is no whole number of at least 1, or a law no function. Later,
                and the run ends with it: a law returns something else than seconds.
        """
        for kind, law in laws.items():
            if not callable(law):
                raise ConfigError(f"the latency law of {kind!r} must be a function of (n, rng), got {law!r}")
        self.num_cores = whole("num_cores", num_cores)
        self.memory_mib = memory_mib
        self.gpu = VirtualGpu(gpu) if gpu is not None else None
        self._laws = dict(laws)
        self.on_cores = frozenset(on_cores)
        given = {kind: whole(f"servers[{kind!r}]", num) for kind, num in (servers or {}).items()}
        self._units = {**dict.fromkeys(("sim", *self.on_cores), self.num_cores), **given}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers: dict[str, _Servers] = {}
        self._foreseen: list[tuple[float, Callable[[], None]]] = []
        self._seed = seed
        self._lanes: list[VirtualLane] = []
        self._num_lanes = 0  # made so far: the key of the next one's draws

    @property
    def sm_units(self) -> int:
        """Of the GPU; 0 without one."""
        return self.gpu.model.units if self.gpu is not None else 0

    def divide(self, units: Mapping[str, int] | None) -> None:
        """Divide the GPU; see `ebrl.core.protocols.Machine.divide`.

        Raises:
            ConfigError: There is none.
        """
        if self.gpu is None:
            raise ConfigError("this machine has no GPU whose units could be divided")
        self.gpu.partition = units

    def lane(self, kind: str, name: str, pool: Lender | None = None, units: int = 1) -> VirtualLane:
        """Make a lane; see `ebrl.core.protocols.Machine.lane`."""
        loop = self._here()
        if kind not in self._servers:
            self._servers[kind] = _Servers(self._units.get(kind, 1))
        law, rng = self._laws.get(kind), stream(self._seed, Domain.LATENCY, self._num_lanes)

        def seconds(n: int) -> float:
            if law is None or not n:
                return 0.0
            duration_s: object = law(n, rng)
            if not isinstance(duration_s, NUMBERS) or not 0 <= duration_s < math.inf:
                raise ConfigError(f"the latency law of {kind!r} must return seconds, 0 or more, got {duration_s!r}")
            return float(duration_s)

        def run_for(duration_s: float, done: Callable[[], None]) -> None:
            for seconds, told in self._foreseen:
                if duration_s > seconds:
                    told()
            if self.gpu is not None and kind in self.gpu.model.speed:
                self.gpu.run(kind, duration_s, done)
            else:
                loop.call_later(duration_s, done)

        lane = VirtualLane(loop, name, pool, units, self._servers[kind], seconds, run_for)
        self._lanes.append(lane)
        self._num_lanes += 1
        return lane

    def give_up(self, lane: Lane, last: Callable[[], None]) -> str:
        """Forget a lane; see `ebrl.core.protocols.Machine.give_up`."""
        chosen = next(own for own in self._lanes if own is lane)
        self._lanes.remove(chosen)
        return chosen.give_up(last)

    def foresee(self, seconds: float, call: Callable[[], None]) -> bool:
        """See `ebrl.core.protocols.Machine.foresee`; what shares the GPU is not foreseen to be slowed down."""
        self._here()
        self._foreseen.append((seconds, call))
        return True

    async def aclose(self, lanes: Sequence[Lane] | None = None, *, deadline_s: float) -> list[str]:
        """Run nothing that has not begun; nothing can be lost here."""
        self._here()
        for lane in self._lanes:
            if lanes is None or lane in lanes:
                lane.close()
        self._lanes = [lane for lane in self._lanes if lanes is not None and lane not in lanes]
        return []

    def _here(self) -> asyncio.AbstractEventLoop:
        # The running loop. What was in flight on another one has ended with it.
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._servers, self._foreseen = loop, {}, []
            self._lanes, self._num_lanes = [], 0
        return loop
