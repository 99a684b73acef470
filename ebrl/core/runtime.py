"""`Runtime`: opens the machine and its pools, runs services, and closes everything in order. Knows no stage by name.

Order of the end: services that are being stopped; the others in reverse order of their start (so that a consumer ends
before what it consumes), each cancelled, then closed, all under one deadline; then the lanes; then the interpreter's
settings are restored.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ebrl.core.errors import IN_CHILD, UNGUARDED, Closed, ConfigError, amount, as_path, flag, whole
from ebrl.core.events import EventLog
from ebrl.core.findings import Findings
from ebrl.core.machine import LocalMachine
from ebrl.core.pools import Pool, ResourceManager
from ebrl.core.profile_file import SavedProfiles, load
from ebrl.core.profiles import Profiles
from ebrl.core.protocols import Machine, Service
from ebrl.core.readings import Knob
from ebrl.core.scope import Scope, finish, heeding_callbacks
from ebrl.core.tokens import TokenBucket
from ebrl.core.trace import Trace
from ebrl.core.tuning import Tuning
from ebrl.core.underway import Underway

S = TypeVar("S", bound=Service)
T = TypeVar("T")
logger = logging.getLogger("ebrl")

FIRST_SHARES = {"sim": 0.5, "gen": 0.25, "train": 0.25}  # of the cores, where stages contend; the tuner changes them
SWITCH_INTERVAL_S = 5e-4  # the default of 5 ms lets Python code of a learner take 71 % of the rollouts
YOUNG_THRESHOLD = 1_000_000  # more objects than before that start a collection by themselves
LEAST_S = 0.05  # what closing a service may take in any case, whatever those before it took
FULL_EVERY = 64  # boundaries after which all generations are collected
TUNER = "tuner"  # beside the names of services
MAX_GROWTH = 10_000  # more objects than before that start one between updates


class Runtime:
    """Where services live. The first error in one of their tasks, or in a callback of the loop, ends them all.

    Example::

        async with ebrl.Runtime(seed=0) as rt:
            gen = rt.start(ebrl.Generator(policy))
            envs = rt.start(ebrl.EnvGroup(spec, actor=gen, count=16))

    Attributes:
        clock: Loop time, to the microsecond: that of uvloop counts milliseconds, and whole batches may take less.
        events: The log that is written, if there is one.
        findings: What services have found out, and need not find out again.
        before_failing: What is saved, by name, before the run ends since simulators have failed too often.
    """

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        seed: int = 0,
        deterministic: bool = False,
        trace: Trace | None = None,
        tune: bool = True,
        pin: Mapping[Knob, Any] | None = None,
        profile: SavedProfiles | Path | str | None = None,
        record: Path | str | None = None,
        grace_s: float = 1.5,
    ) -> None:
        """Describe a runtime.

        Args:
            machine: What to run on; default: this computer.
            seed: From which every random stream of the run is keyed.
            deterministic: With ``max_lag=0``: results that depend on the seed alone, not on timing or lanes. A trainer
                with lag is refused, but on modelled hardware, where a run repeats exactly if latencies do.
            trace: Takes the spans of the run; None records nothing.
            tune: Let the tuner turn the knobs that were not set; never in a deterministic run, since it goes by time.
            pin: Knobs of the machine that the tuner leaves alone, with their values: ``concurrency``, how many
                simulator calls run at once; ``cores``, units by stage (``{"sim": 6, "gen": 1, "train": 1}``), whose
                ratio says who is next when stages contend; ``partition``, SM units for generation while training runs
                too, 0 for turns. The rule of a generator is pinned by its own arguments.
            profile: What an earlier run or `ebrl probe` found out on this machine, or the file of it: services begin
                with what it says of their names.
            record: New file for the event log of a training run, with which `ebrl.replay` repeats it offline. Inference
                is then padded to a fixed number of rows, so that no result depends on who shared a batch.
            grace_s: How long the end may wait for running calls.

        Raises:
            ConfigError: An option of a wrong type; `seed` is negative; `grace_s` is not positive; a pin that is no knob
                of this machine, or out of range; or `profile` is no file of profiles.
        """
        self.seed = whole("seed", seed, least=0, most=2**64 - 1)
        self._grace_s = amount("grace_s", grace_s)
        self.machine: Machine = machine or LocalMachine()
        self.deterministic = flag("deterministic", deterministic)
        self.trace = trace
        self.events = EventLog(as_path("record", record)) if record is not None else None
        self.findings = Findings()
        self.before_failing: dict[str, Callable[[], Awaitable[object]]] = {}
        self.clock: Callable[[], float] = time.monotonic
        clock = self.clock if self.machine.real else None  # that of a model's loop is not known yet: pools look for it
        cores = Pool("cores", self.machine.num_cores, clock=clock)
        memory = Pool("memory", self.machine.memory_mib, clock=clock)
        sm = [Pool("sm", self.machine.sm_units, clock=clock)] if self.machine.sm_units else []
        self.resources = ResourceManager([cores, memory, *sm])
        self._claims = {
            kind: TokenBucket(kind, cores, rate=part * cores.units)
            for kind, part in FIRST_SHARES.items()
            if kind in self.machine.on_cores
        }
        self.tuning = Tuning(
            self.machine,
            self.resources,
            self.spawn,
            self._claims,
            trace,
            enabled=flag("tune", tune) and not deterministic,
            pins=pin,
        )
        self.profiles = Profiles(self.machine, load(Path(profile)) if isinstance(profile, str | Path) else profile)
        self._scope = Scope()
        self._exit = AsyncExitStack()
        self._services: dict[str, tuple[Service, asyncio.Task[None]]] = {}
        self._endings: dict[str, tuple[Service, Underway[None]]] = {}  # of those that are being stopped
        self._state = "new"
        self._frozen = False
        self._num_boundaries = 0

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise Closed("a Runtime is entered once: make another one")
        if IN_CHILD in os.environ:
            raise ConfigError(UNGUARDED)
        if not self.machine.real:
            self.clock = asyncio.get_running_loop().time
        if self.events is not None:
            self.events.open()  # may refuse its file: before there is anything to close
            self._exit.callback(self.events.close)
        self._exit.enter_context(heeding_callbacks(self._scope))
        await self._exit.enter_async_context(self._scope)
        self._tune_interpreter()
        if self.machine.sm_units:
            self._exit.callback(self.machine.divide, None)  # the next runtime of this machine knows of no division
        self.tuning.open(self.clock())
        self._exit.push_async_callback(self._close)
        self._state = "open"
        return self

    def start(self, service: S) -> S:
        """Open a service and run it until the runtime ends.

        Args:
            service: Its name gets a number if another one has it.

        Returns:
            The same object.

        Raises:
            Closed: The runtime is not open.
            ConfigError: The service runs already.
            EbrlError: It cannot begin; it says why.
        """
        if self._state != "open":
            raise Closed(f"{service.name} was started outside `async with Runtime()`")
        if any(other is service for other, _ in [*self._services.values(), *self._endings.values()]):
            raise ConfigError(f"{service.name} was started before, and has not ended: make another one")
        name, number = service.name, 1
        while name in self._services or name in self._endings or name == TUNER:
            number += 1
            name = f"{service.name}-{number}"
        service.name = name  # it keys random streams
        service.open(self)
        self._services[name] = service, self._scope.start(service.serve(), name)
        return service

    def claim(self, kind: str) -> TokenBucket | None:
        """Return what a lane of that kind must ask for cores; None: its work takes none."""
        return self._claims.get(kind)

    async def stop(self, service: Service) -> None:
        """End one service before the others.

        Who is cancelled meanwhile does not stop that, and may ask again. Where somebody waits for the end already this
        returns at once: it may be asked by the service itself, on its way out.
        """
        for name, (other, task) in list(self._services.items()):
            if other is service:
                del self._services[name]
                ending = Underway[None](f"the end of {name}")
                ending.begin(self._end(service, task, asyncio.get_running_loop().time() + self._grace_s))
                self._endings[name] = service, ending
        for name, (other, ending) in list(self._endings.items()):
            if other is service and not ending.wanted:
                try:
                    await ending.result()
                finally:
                    if not ending.begun:
                        del self._endings[name]

    def spawn(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a task of the caller's that ends with the runtime, and whose error ends it."""
        if self._state != "open":
            coro.close()
            raise Closed(f"task {name} was started outside `async with Runtime()`")
        return self._scope.start(coro, name)

    def statistics(self) -> Mapping[str, Mapping[str, float]]:
        """Numbers of every service by name, and under ``tuner`` the knobs and how often one was turned."""
        services = {name: service.statistics() for name, (service, _) in self._services.items()}
        return {**services, TUNER: self.tuning.statistics()}

    def boundary(self) -> None:
        """Collect garbage if some may have gathered; called between updates, where a pause costs least."""
        self._num_boundaries += 1
        if self._num_boundaries % FULL_EVERY == 0:
            gc.collect()
        elif gc.get_count()[0] > MAX_GROWTH:
            gc.collect(1)
        if not self._frozen:
            self._frozen = True
            gc.freeze()
            self._exit.callback(gc.unfreeze)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._state = "closed"
        self.tuning.close()
        return await self._exit.__aexit__(kind, error, traceback)

    def _tune_interpreter(self) -> None:
        interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
        self._exit.callback(sys.setswitchinterval, interval)
        self._exit.callback(gc.set_threshold, *thresholds)
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, interval))
        if thresholds[0]:  # 0: the user has switched collection off
            gc.set_threshold(max(YOUNG_THRESHOLD, thresholds[0]), *thresholds[1:])
        self._frozen = gc.get_freeze_count() > 0  # by somebody else, who may still need it

    async def _close(self) -> None:
        await finish(self._end_all(), "ebrl-close")

    async def _end_all(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s

        async def end_lanes() -> None:
            await self.machine.aclose(deadline_s=max(LEAST_S, deadline - loop.time()))

        async with AsyncExitStack() as stack:  # an error in one of them does not keep the others from closing
            stack.push_async_callback(end_lanes)
            for service, task in self._services.values():
                stack.push_async_callback(self._end, service, task, deadline)
            for _, ending in self._endings.values():
                stack.push_async_callback(_ended, ending)
            self._services.clear()

    async def _end(self, service: Service, task: asyncio.Task[None], deadline: float) -> None:
        clock = asyncio.get_running_loop().time
        task.cancel()
        await asyncio.wait([task], timeout=max(LEAST_S, deadline - clock()))
        await service.aclose(max(LEAST_S, deadline - clock()))
        if not task.done():
            await asyncio.wait([task], timeout=LEAST_S)
        if not task.done():
            logger.error("%s ignores that it was cancelled; the runtime ends when it does", task.get_name())


async def _ended(ending: Underway[None]) -> None:
    """Wait for the end of a service, which has a deadline of its own; an error that nobody waits for is raised here."""
    await ending.idle()
    if ending.begun and not ending.wanted:
        await ending.result()
