"""``host="auto"``: where simulators run is found out by letting them run, once for each kind of simulator and runtime.

As many as can work at once do so for about a second each, in threads and in processes of their own by turns, and where
they do more steps is right. Where that is about the same, threads are: they need less memory, nothing pickled and no
start. Unless a simulator there holds the interpreter lock for so long that the loop, and so everybody else, waits for
it. A simulator that crashes, hangs or fails in a trial belongs into processes; so does one that is known to crash,
without a trial.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final

from ebrl.core.errors import CallTimeout, HostDied
from ebrl.core.records import EnvSpec, Place
from ebrl.core.runtime import Runtime
from ebrl.core.scope import finish
from ebrl.sim.comparison import CLOSE_S, Comparison, Processes, Threads, TrialFailedError, blamed_on, compare
from ebrl.sim.link import OutOfReach, make_order
from ebrl.sim.placement import take_now

logger = logging.getLogger("ebrl")

LEAST_NUM: Final = 2  # simulators at once: one alone does not show that it takes the lock away from others
KILL_S: Final = 0.5  # for closing after a failure: no reason to wait
AHEAD: Final = 1.05  # by less than this factor, one place is as fast as the other
LATE_S: Final = 0.005  # a loop that is later does harm, if simulators in threads are the reason: it is later than
LATER: Final = 2.0  # by this factor beside one in a process


@dataclass(frozen=True, slots=True)
class Choice:
    """Where simulators run, and why.

    Attributes:
        host: Where.
        reason: For people.
        comparison: What it rests on; None where nothing could be measured, or was not needed.
    """

    host: Place
    reason: str
    comparison: Comparison | None = None

    def __str__(self) -> str:
        return f"{'threads' if self.host == 'thread' else 'processes'}, since {self.reason}"


def decide(found: Comparison) -> Choice:
    """Return what follows from a comparison.

    Example:
        >>> from ebrl.sim.comparison import Measured
        >>> decide(Comparison(2, Measured(990.0, lag_s=0.001), Measured(1000.0, lag_s=0.001))).host
        'thread'

    Args:
        found: What was measured.
    """
    threads, processes = found.threads, found.processes
    host: Place = "process"
    if threads.steps_per_s >= AHEAD * processes.steps_per_s:
        host, why = "thread", "they are faster"
    elif processes.steps_per_s >= AHEAD * threads.steps_per_s:
        why = "they are faster"
    elif threads.lag_s > max(LATE_S, LATER * processes.lag_s):
        why = "they are as fast, and threads keep the loop waiting"
    else:
        host, why = "thread", "they are as fast, and need less"
    rates = " and ".join(_number(each.steps_per_s) for each in (threads, processes))
    lags = " and ".join(_number(1e3 * each.lag_s) for each in (threads, processes))
    kind = " with pictures" if found.draws else ""
    reason = (
        f"{why}: {found.num}{kind} do {rates} steps/s in threads and processes, one delays the loop by {lags} ms (p99)"
    )
    return Choice(host, reason, found)


async def choose(runtime: Runtime, specs: Sequence[EnvSpec], *, lanes: int | None = None, name: str) -> Choice:
    """Find out where simulators are to run, and say so in the log.

    That takes some seconds and builds a few simulators in other processes, unless the same ones were tried before in
    this runtime, for whatever group. Groups of others wait for their trial until this one is over.

    Args:
        runtime: An open one. Its other simulators wait while these are measured.
        specs: Of the simulators of a group, in their order.
        lanes: Threads, or processes, that may work at once; None: as many as there are cores.
        name: Of the group.

    Raises:
        ConfigError: They cannot be built, wherever that is.
    """
    choice = await _choose(runtime, specs, lanes, name)
    measured = choice.comparison is not None or not runtime.machine.real
    logger.log(logging.INFO if measured else logging.WARNING, "%s: simulators run in %s", name, choice)
    return choice


async def _choose(runtime: Runtime, specs: Sequence[EnvSpec], lanes: int | None, name: str) -> Choice:
    if not runtime.machine.real:
        return Choice("thread", "a modelled machine has no processes")
    crashing = next((spec.id for spec in specs if spec.crashes), None)
    if crashing is not None:
        return Choice("process", f"{crashing} is known to crash")
    different = {id(spec): replace(spec, host="auto") for spec in specs}.values()
    try:
        key = frozenset(make_order([spec]).specs for spec in different)
    except OutOfReach as error:
        return Choice("thread", str(error))
    return await runtime.findings.get((choose, key), lambda: _tried(runtime, specs, lanes, name))


async def _tried(runtime: Runtime, specs: Sequence[EnvSpec], lanes: int | None, name: str) -> Choice:
    """Try those that can work at once, as far as there is memory to build them twice. What groups hold, they keep."""
    num = max(LEAST_NUM, min(len(specs), runtime.machine.num_cores, lanes or len(specs)))
    some = [specs[i % len(specs)] for i in range(num)]
    memory = runtime.resources.pool("memory")
    while some and 2 * _memory_mib(some) > memory.free:
        some.pop()
    wanted = 2 * _memory_mib(some)
    lease = take_now(memory, wanted, f"{name}-auto") if wanted else None
    if not some or (wanted and lease is None):
        return Choice("process", f"{memory.free} MiB of memory are free, too few for a trial")
    logger.info("%s: trying %d simulators in threads and in processes", name, len(some))
    with lease or nullcontext():
        return await _try(runtime, some, f"{name}-auto")


def _memory_mib(specs: Sequence[EnvSpec]) -> int:
    return sum(spec.memory_mib for spec in specs)


async def _try(runtime: Runtime, specs: Sequence[EnvSpec], name: str) -> Choice:
    tried = Threads(specs, runtime.machine, f"{name}-threads"), Processes(specs, runtime.machine, name)
    patience_s = KILL_S
    try:
        for each in tried:
            await blamed_on(each.place, each.open())
        cores = runtime.resources.pool("cores")
        with await cores.acquire(min(len(specs), cores.units), name):
            choice = decide(await compare(*tried))
        patience_s = CLOSE_S
    except TrialFailedError as failed:
        return _without(failed.place, failed.error)
    except OutOfReach as error:
        return Choice("thread", str(error))
    finally:
        await finish(_close(tried, patience_s), f"{name}-close")
    return choice


def _without(place: Place, error: Exception) -> Choice:
    if place == "thread":
        return Choice("process", f"a simulator failed in a trial of threads: {error!r}")
    if isinstance(error, HostDied | CallTimeout):
        return Choice("process", f"a simulator failed in a trial, and threads cannot be ended: {error!r}")
    return Choice("thread", f"a simulator failed in a process, and none did in a thread: {error!r}")


async def _close(tried: Sequence[Threads | Processes], patience_s: float) -> None:
    await asyncio.gather(*(each.aclose(patience_s) for each in tried))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"
