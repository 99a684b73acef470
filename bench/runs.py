"""One run of one scheduler on one modelled workload, and many of them on all cores of this computer."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench import baselines
from bench.hardware import Conditions, Hardware, Tally, make_machine
from bench.loading import load_pair, load_w
from bench.probed import load_probed
from bench.rig import Rig
from bench.workload import Workload
from ebrl import Batcher, run_virtual
from ebrl.core.errors import ConfigError
from ebrl.core.readings import Move

S = TypeVar("S")
T = TypeVar("T")
PATIENT_S = 1e4  # a fixed threshold waits for its requests
MANY = 50  # runs that may take long enough for somebody to wonder
TELL_EVERY_S = 10.0
OURS = ("ebrl", "greedy", "fixed:T")


@dataclass(frozen=True)
class Drift:
    """A change of regime.

    Attributes:
        workload: Name of the W workload that holds then; None: the same.
        changes: Numbers of it that are multiplied.
        slow_part: Of the environments, which become ten times slower.
    """

    workload: str | None = None
    changes: Mapping[str, float] = field(default_factory=dict)
    slow_part: float = 0.0


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        workload: ``("w", name, num_envs)``, ``("pair", simulator, policy, machine)`` or
            ``("profile", file, num_envs, chunk)``.
        scheduler: ``ebrl``, ``greedy``, ``fixed:T``, or one of `bench.baselines`.
        changes: Numbers of the workload that are multiplied; see `Workload.scaled`.
        lanes: Of generation.
        drop: Environment steps before those that count.
        count: Environment steps that count.
        seed: Of steps, resets and episodes.
        drift: What changes when counting begins; None: nothing.
        num_cores: For simulators; None: what the workload says.
    """

    workload: tuple[str, ...]
    scheduler: str
    changes: Mapping[str, float] = field(default_factory=dict)
    lanes: int = 1
    drop: int = 4000
    count: int = 20000
    seed: int = 0
    drift: Drift | None = None
    num_cores: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of it: rates per second, and how they came about.

    Attributes:
        job: What was run.
        rates: ``env_steps``, ``chunks``, ``episodes`` and trained ``samples`` per second.
        busy: By kind of lane, as a part of what there is; over all time, the start included.
        batches: Generation batches by size.
        lags: Trained decisions by versions behind.
        moves: Of the tuner: time in seconds, and what it did.
        began_s: When counting began.
        ended_s: When it ended.
        launch_times_s: Of the batches that count, where there is a drift.
    """

    job: Job
    rates: Mapping[str, float]
    busy: Mapping[str, float]
    batches: Mapping[int, int]
    lags: Mapping[int, int]
    moves: Sequence[Move] = ()
    began_s: float = 0.0
    ended_s: float = 0.0
    launch_times_s: Sequence[float] = ()

    @property
    def speed(self) -> float:
        """Environment steps per second."""
        return self.rates["env_steps"]


def load(job: Job) -> Workload:
    """Return the workload of a job."""
    kind, *names = job.workload
    if kind == "w":
        workload = load_w(names[0], int(names[1]))
    elif kind == "pair":
        workload = load_pair(names[0], names[1], names[2])
    elif kind == "profile":
        workload = load_probed(Path(names[0]), int(names[1]), int(names[2]))
    else:
        raise ConfigError(f"a workload is of kind 'w', 'pair' or 'profile', got {kind!r}")
    if job.num_cores is not None:
        workload = replace(workload, machine=replace(workload.machine, num_cores=job.num_cores))
    return workload.scaled(job.changes) if job.changes else workload


def pinned(scheduler: str, num_units: int) -> Batcher | None:
    """Return the fixed rule of a scheduler that is EBRL's; None: the tuner's."""
    if scheduler == "ebrl":
        return None
    number = "1" if scheduler == "greedy" else scheduler.removeprefix("fixed:")
    if not number.isdecimal() or not 1 <= int(number) <= num_units:
        raise ConfigError(
            f"{scheduler!r} is not of the form fixed:T, with T from 1 to {num_units}, the units there are"
        )
    return Batcher(int(number), max_size=num_units, max_wait_s=PATIENT_S)


def check_scheduler(text: str) -> None:
    """Raise a `ConfigError` if there is no scheduler of that name and setting."""
    if is_ours(text):
        pinned(text, sys.maxsize)
        return
    try:
        baselines.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{error}; and EBRL's own: {', '.join(OURS)}") from None


def is_ours(scheduler: str) -> bool:
    """Whether a scheduler runs on EBRL."""
    return scheduler in ("ebrl", "greedy") or scheduler.startswith("fixed:")


def run(job: Job) -> Outcome:
    """Run in virtual time."""
    return run_virtual(_run(job))


async def _run(job: Job) -> Outcome:
    workload, tally = load(job), Tally(job.drop, job.count)
    conditions = Conditions(workload)
    if job.drift is not None:
        tally.on_count = partial(change, conditions, job.drift)
    if is_ours(job.scheduler):
        rig = Rig(conditions, tally, make_machine(conditions, job.lanes), job.seed)
        await rig.run(batcher=pinned(job.scheduler, workload.num_units), lanes=job.lanes)
        busy, moves = rig.busy, rig.moves
    else:
        hardware = Hardware(workload, tally, num_lanes=job.lanes, seed=job.seed, conditions=conditions)
        running = asyncio.ensure_future(baselines.parse(job.scheduler)(hardware))
        await asyncio.wait([running, asyncio.ensure_future(tally.done.wait())], return_when="FIRST_COMPLETED")
        if running.done():
            running.result()
            raise RuntimeError(f"{job.scheduler} has ended by itself")
        busy, moves = hardware.utilisation(), ()
        running.cancel()
        await asyncio.wait([running])
    assert tally.began is not None
    assert tally.ended is not None
    times_s = tally.launch_times_s if job.drift is not None else ()
    return Outcome(
        job, tally.rates(), busy, dict(tally.batches), dict(tally.lags), moves, tally.began[0], tally.ended[0], times_s
    )


def change(conditions: Conditions, drift: Drift) -> None:
    """Let the drift happen."""
    num_envs = conditions.workload.simulator.num_envs
    workload = load_w(drift.workload, num_envs) if drift.workload is not None else conditions.workload
    conditions.workload = workload.scaled(drift.changes) if drift.changes else workload
    conditions.num_slow = round(drift.slow_part * num_envs)


def run_all(jobs: Iterable[Job]) -> list[Outcome]:
    """Run on all cores; virtual time does not mind company."""
    return on_all_cores(run, jobs)


def on_all_cores(fn: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return ``fn(item)`` of all items, in order."""
    return list(each_on_all_cores(fn, items))


def each_on_all_cores(fn: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Yield ``fn(item)`` of all items, in order, as soon as it is there."""
    todo = list(items)
    workers = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if workers == 1 or len(todo) == 1:
        yield from counted(map(fn, todo), len(todo))
        return
    with ProcessPoolExecutor(workers, initializer=end_with_parent) as pool:
        chunksize = max(1, min(8, len(todo) // (16 * workers)))  # of few long runs none waits for another
        yield from counted(pool.map(fn, todo, chunksize=chunksize), len(todo))


def end_with_parent() -> None:
    """End this worker when the process that asked for it is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def counted(results: Iterable[T], num: int, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """Yield results; where many are to come, say on stderr now and then how many there are."""
    told_s = clock()
    for number, result in enumerate(results, 1):
        if num >= MANY and clock() - told_s >= TELL_EVERY_S:
            told_s = clock()
            print(f"{number} of {num} runs", file=sys.stderr, flush=True)
        yield result


def by_scheduler(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    """Return the outcomes of one workload by scheduler."""
    return {outcome.job.scheduler: outcome for outcome in outcomes}


def sweep(num_units: int) -> list[str]:
    """Return fixed thresholds to try: powers of two, and close to all."""
    parts = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
    thresholds = {2**i for i in range(10)} | {3, 6, 12} | {round(num_units * part) for part in parts}
    return [f"fixed:{threshold}" for threshold in sorted(thresholds) if 1 <= threshold <= num_units]
