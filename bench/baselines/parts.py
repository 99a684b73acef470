"""What the schedulers share: an alarm bell, a learner, and units that wait for an action."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.hardware import Hardware
from ebrl.core.errors import ConfigError

T = TypeVar("T")


async def together(coros: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once and wait for all; none outlives a failure or a cancellation."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coro) for coro in coros]
    return [task.result() for task in tasks]


def share(hardware: Hardware, gen_share: int | None) -> None:
    """Give generation so many of the GPU's SM units, and training the others, for good; None: they take turns."""
    if gen_share is None:
        return
    gpu, units = hardware.machine.gpu, hardware.workload.machine.sm_units
    if gpu is None or not 0 < gen_share < units:
        has = f"it has {units}" if gpu is not None else "it trains nothing"
        raise ConfigError(f"{hardware.workload.name}: {gen_share} SM units for generation leave none to train; {has}")
    gpu.lends = False
    gpu.partition = {"gen": gen_share, "train": units - gen_share}


class Bell:
    """Wakes whoever waits for something to hold."""

    def __init__(self) -> None:
        self._sleepers: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        """Let everybody look again."""
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` is true; it is asked now and whenever the bell rings."""
        while not holds():
            sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sleepers.append(sleeper)
            await sleeper


class Learner:
    """Decisions that are done and wait for an update, by the version of the policy that made them.

    Decisions are counted in environments: one of a unit counts once per slot. Where nothing is trained, none of this
    ever waits.

    Attributes:
        bell: Rings when a batch is there, when an update has taken it, and when the update has ended.
        batch_size: Decisions of an update; 0 where nothing is trained.
        staleness: Versions that a decision may be behind when its update begins; older ones are dropped. None: any.
        version: Updates so far.
        ready: Decisions that wait.
        dropped: Decisions that were too old.
        updating: Whether an update runs.
    """

    def __init__(self, hardware: Hardware, staleness: int | None = None) -> None:
        self.bell = Bell()
        self.batch_size = hardware.workload.batch_size
        self.staleness = staleness
        self.version = self.ready = self.dropped = 0
        self.updating = False
        self._hardware = hardware
        self._begun = 0
        self._done: deque[tuple[int, int]] = deque()

    @property
    def full(self) -> bool:
        """Whether there are decisions for an update."""
        return 0 < self.batch_size <= self.ready

    def add(self, version: int, num: int) -> None:
        """`num` decisions are done."""
        if self._done and self._done[-1][0] == version:
            num_before = self._done.pop()[1]
            self._done.append((version, num_before + num))
        else:
            self._done.append((version, num))
        self.ready += num
        if self.full:
            self.bell.ring()

    def room(self, num: int) -> bool:
        """Whether `num` more decisions may begin now, such that none can be older than `staleness` when trained.

        The formula of AReaL, and of RLinf's ``wait_if_stale``.
        """
        ahead = 1 + self.version + (self.staleness or 0)
        return not self.batch_size or self._begun + num <= ahead * self.batch_size

    async def begin(self, num: int) -> None:
        """Wait for room for `num` decisions, and take it."""
        await self.bell.until(lambda: self.room(num))
        self._begun += num

    async def update(self) -> None:
        """Train on the oldest decisions of a batch, unless too few are left without those that are too old."""
        if self.staleness is not None:
            while self._done and self._done[0][0] < self.version - self.staleness:
                num = self._done.popleft()[1]
                self.ready, self.dropped, self._begun = self.ready - num, self.dropped + num, self._begun - num
        if self.full:
            self.updating = True
            await self._train(self.batch_size)
            self.updating = False
            self.version += 1
        self.bell.ring()

    async def learn(self) -> None:
        """Update for ever, whenever there is a batch."""
        while True:
            await self.bell.until(lambda: self.full)
            await self.update()

    async def stream(self) -> None:
        """Do one update whose gradients are computed as the decisions come in, however few."""
        left = self.batch_size
        while left:
            await self.bell.until(lambda: self.ready > 0)
            num = min(left, self.ready)
            left -= num
            await self._train(num)
        self.version += 1

    async def _train(self, num: int) -> None:
        # An update takes time by its decisions, so one call per version takes as long as one for all.
        self.ready -= num
        self.bell.ring()
        while num:
            version, there = self._done.popleft()
            now = min(num, there)
            if there > now:
                self._done.appendleft((version, there - now))
            num -= now
            await self._hardware.train(now, self.version - version)


@dataclass(slots=True)
class Request:
    """A unit that waits for an action; `answer` becomes the version of the policy that chose it."""

    unit: int
    ended: bool
    answer: asyncio.Future[int]


class Requests:
    """Units that wait for an action, in the order in which they asked.

    Attributes:
        bell: Rings whenever a unit asks.
        playing: Units that ask again without anybody else's doing; kept by schedulers that need it.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.playing = 0
        self._waiting: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, unit: int, ended: bool = False) -> asyncio.Future[int]:
        """Wait for an action for a unit; `ended`: it must be reset before."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(Request(unit, ended, answer))
        self.bell.ring()
        return answer

    def take(self, num: int) -> list[Request]:
        """Remove and return the oldest `num`, or all if there are fewer."""
        return [self._waiting.popleft() for _ in range(min(num, len(self._waiting)))]


async def answer(hardware: Hardware, learner: Learner, asked: list[Request], lane: int = 0) -> None:
    """Generate one batch, with the policy of this moment."""
    version = learner.version
    await hardware.generate(len(asked), lane)
    for request in asked:
        if not request.answer.done():  # else it was cancelled with its unit
            request.answer.set_result(version)


async def decide(hardware: Hardware, requests: Requests, unit: int) -> int:
    """Let a unit ask, step, and reset at once if its episode has ended; return the version that chose the action."""
    version = await requests.ask(unit)
    _, ended = await hardware.step(unit)
    if ended:
        await hardware.reset(unit)
    return version
