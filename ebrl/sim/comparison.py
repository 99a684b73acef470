"""Simulators tried in threads and in processes, by turns; for `ebrl.sim.auto`.

The threads are those of another process. A simulator that crashes, hangs or fails there takes nothing with it.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from time import monotonic, thread_time
from typing import Any, Final, TypeVar

from ebrl.core.errors import CallTimeout
from ebrl.core.lateness import Lateness
from ebrl.core.machine import LocalMachine
from ebrl.core.pools import Pool
from ebrl.core.protocols import Machine
from ebrl.core.records import ArraySpec, EnvSpec, Place
from ebrl.core.run import loop_factory
from ebrl.core.runtime import SWITCH_INTERVAL_S
from ebrl.sim.placement import make_hosts
from ebrl.sim.players import Players
from ebrl.sim.process import ProcessHost
from ebrl.sim.recovery import is_fault

T = TypeVar("T")

ALONE_S: Final = 0.3  # that one is played for
LEAST_S: Final = 0.7  # that all are; longer where they are slow, until each has done
LEAST_STEPS: Final = 20  # and an episode, if the spec says how long it is, but at most
MOST_S: Final = 4.0
NUM_ROUNDS: Final = 3  # that this is done in
LIMIT_S: Final = 600.0  # for what is tried at a time, such as building; then it hangs
CLOSE_S: Final = 5.0
DECISION_S: Final = 1.5e-4  # of a processor, that a small policy, its learner and the loop of a run take for a decision


@dataclass(frozen=True, slots=True)
class Measured:
    """What simulators did in one place.

    Attributes:
        steps_per_s: Of all of them, at once.
        lag_s: How late the loop is beside one of them, the 99th percentile.
    """

    steps_per_s: float
    lag_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured.

    Attributes:
        num: Simulators at once.
        threads: Each in a thread of one process.
        processes: Each in a process of its own.
        draws: Whether they show pictures, which most simulators draw without the lock.
    """

    num: int
    threads: Measured
    processes: Measured
    draws: bool = False


class TrialFailedError(Exception):
    """A simulator failed in a trial; for this module.

    Attributes:
        place: Where.
        error: What it raised, or what became of its process.
    """

    def __init__(self, place: Place, error: Exception) -> None:
        super().__init__(place, error)
        self.place = place
        self.error = error


async def compare(threads: Threads, processes: Processes) -> Comparison:
    """Let them play in turn, so that whatever else this computer does is shared."""
    tried: tuple[Threads | Processes, ...] = (threads, processes)
    alone = {each.place: await blamed_on(each.place, each.play(ALONE_S, alone=True, anew=True)) for each in tried}
    slowest_s = max(one.step_s for one in alone.values())
    episode_s = max(one.step_s * (threads.specs[0].horizon or 0) + one.reset_s for one in alone.values())
    seconds = min(max(LEAST_S, LEAST_STEPS * slowest_s, episode_s), MOST_S)
    played: dict[Place, list[Played]] = {"thread": [], "process": []}
    for number in range(NUM_ROUNDS):
        for each in tried if number % 2 else tried[::-1]:
            trying = each.play(seconds / NUM_ROUNDS, anew=number == 0)
            played[each.place].append(await blamed_on(each.place, trying))
    num, horizon = len(threads.specs), threads.specs[0].horizon
    in_threads, in_processes = (
        Measured(per_s(played[each.place], num, horizon), alone[each.place].lag_s) for each in tried
    )
    return Comparison(num, in_threads, in_processes, any(map(draws, threads.specs)))


def per_s(played: Sequence[Played], num: int, horizon: int | None) -> float:
    """Return the steps per second of some simulators over whole episodes, of which a trial sees a part.

    Args:
        played: All of it; at first each simulator was reset.
        num: Simulators at once.
        horizon: Steps of an episode, unless it ends before; None: as many as there were.
    """
    num_steps, num_resets = sum(each.num_steps for each in played), sum(each.num_resets for each in played)
    reset_s = sum(each.reset_s * each.num_resets for each in played) / num_resets
    step_s = (num * sum(each.elapsed_s for each in played) - num_resets * reset_s) / num_steps
    num_ended, length = num_resets - num, float(horizon or num_steps)
    if num_ended:
        length = min(length, num_steps / num_ended)
    return num * length / (length * step_s + reset_s)


async def blamed_on(place: Place, trying: Awaitable[T]) -> T:
    """Return what came of a trial.

    Args:
        place: Where simulators play in it.
        trying: The trial.

    Raises:
        TrialFailedError: A simulator failed there; what is no fault of one is raised as it is.
    """
    (found,) = await asyncio.gather(_limited(trying), return_exceptions=True)
    if not isinstance(found, BaseException):
        return found
    if isinstance(found, Exception) and is_fault(found):
        raise TrialFailedError(place, found)
    raise found


async def _limited(trying: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(LIMIT_S) as limit:
            return await trying
    except TimeoutError:
        if limit.expired():
            raise CallTimeout(f"a trial has not ended within {LIMIT_S:g} s") from None
        raise


@dataclass(frozen=True, slots=True)
class Played:
    """What simulators did for a while.

    Attributes:
        num_steps: Of all of them.
        num_resets: Of all of them.
        elapsed_s: So long.
        step_s: Seconds of a step where it ran.
        reset_s: Likewise of a reset; 0 where there was none.
        lag_s: How late the loop was, the 99th percentile.
    """

    num_steps: int
    num_resets: int
    elapsed_s: float
    step_s: float
    reset_s: float
    lag_s: float


class Rehearsal:
    """Simulators that play beside what a run computes, in a thread of its own, for each of their steps.

    Beside an idle loop, those that hold the interpreter lock would look better in threads than they are.
    """

    def __init__(self, specs: Sequence[EnvSpec], place: Place, machine: Machine, name: str) -> None:
        hosts = make_hosts(
            specs,
            host=place,
            lanes=len(specs),
            machine=machine,
            pool=Pool("trial", len(specs)),  # what it costs to ask for a core is part of a step
            name=name,
            sample_every=1,
        )
        self._machine = machine
        self._policy = policy = machine.lane("gen", f"{name}-policy")
        self._players = Players(specs, hosts, monotonic, decide=lambda: policy.run(_compute, DECISION_S))

    async def open(self) -> None:
        """Build them."""
        await self._players.open()

    async def play(self, seconds: float, alone: bool, anew: bool) -> Played:
        """See `Processes.play`."""
        with Lateness() as late:
            found = await self._players.play(seconds, num=1 if alone else None, anew=anew)
        step_s = sum(found.steps_s) / len(found.steps_s)
        reset_s = sum(found.resets_s) / max(1, len(found.resets_s))
        return Played(found.num_steps, found.num_resets, found.elapsed_s, step_s, reset_s, late.quantile(0.99))

    async def aclose(self, patience_s: float) -> None:
        """Close them, whatever they do."""
        await self._players.aclose(patience_s)
        await self._machine.aclose([self._policy], deadline_s=patience_s)


def _compute(seconds: float) -> None:
    """Take so much time of a processor; in Python, and so with the interpreter lock."""
    until_s = thread_time() + seconds
    while thread_time() < until_s:
        pass


class Processes:
    """Simulators in a process each."""

    place: Place = "process"

    def __init__(self, specs: Sequence[EnvSpec], machine: Machine, name: str) -> None:
        self.specs = specs
        self._rehearsal = Rehearsal(specs, self.place, machine, name)

    async def open(self) -> None:
        """Build them."""
        await self._rehearsal.open()

    async def play(self, seconds: float, *, alone: bool = False, anew: bool = False) -> Played:
        """Let them play, all or one of them alone, where they have stopped or from a reset on."""
        return await self._rehearsal.play(seconds, alone, anew)

    async def aclose(self, patience_s: float) -> None:
        """Close them, whatever they do."""
        await self._rehearsal.aclose(patience_s)


class Threads:
    """Simulators in threads of one process, which is not this one: a process host has a `Crowd` for a simulator."""

    place: Place = "thread"

    def __init__(self, specs: Sequence[EnvSpec], machine: Machine, name: str) -> None:
        self.specs = specs
        crowd = replace(specs[0], make=functools.partial(Crowd, tuple(specs)))
        self._host = ProcessHost([crowd], machine, None, name)

    async def open(self) -> None:
        """Build them."""
        await self._host.open()
        await self._call(methodcaller("open"))

    async def play(self, seconds: float, *, alone: bool = False, anew: bool = False) -> Played:
        """See `Processes.play`."""
        played: Played = await self._call(methodcaller("play", seconds, alone, anew))
        return played

    async def aclose(self, patience_s: float) -> None:
        """Close them, whatever they do."""
        await self._host.aclose(patience_s)

    async def _call(self, fn: Callable[[Any], Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._host.slots[0].call(future, fn)
        return await future


class Crowd:
    """Simulators in threads, and an event loop beside them, as in a run. Lives in the process that `Threads` starts."""

    def __init__(self, specs: Sequence[EnvSpec]) -> None:
        """Begin; nothing is built yet, since whoever calls this holds the lock for it."""
        self._specs = specs
        self._rehearsal: Rehearsal | None = None
        self._runner = asyncio.Runner(loop_factory=loop_factory())

    def open(self) -> None:
        """Build them."""

        async def build() -> None:
            self._rehearsal = Rehearsal(self._specs, "thread", LocalMachine(), "trial")
            await self._rehearsal.open()

        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))  # as in a run
        self._runner.run(build())

    def play(self, seconds: float, alone: bool, anew: bool) -> Played:
        """See `Processes.play`."""
        assert self._rehearsal is not None
        return self._runner.run(self._rehearsal.play(seconds, alone, anew))

    def close(self) -> None:
        """Close them."""
        with self._runner as runner:
            if self._rehearsal is not None:
                runner.run(self._rehearsal.aclose(CLOSE_S))


def draws(spec: EnvSpec) -> bool:
    """Whether an observation has pictures: uint8 of three dimensions."""
    forms = [spec.observation] if isinstance(spec.observation, ArraySpec) else spec.observation.values()
    return any(form.dtype == "uint8" and len(form.shape) == 3 for form in forms)
