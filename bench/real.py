"""EBRL on this computer, in real time: what the twin runs, with simulators that sleep or burn.

A run is one coroutine for both kinds of time, so that they are compared over the same seconds of the same simulators.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

import ebrl
from bench.hardware import Conditions, make_machine
from bench.rig import Rig, Work
from bench.runs import Job, load, pinned
from bench.workload import Workload
from ebrl.core.errors import ConfigError
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import Machine
from ebrl.core.readings import Move
from ebrl.core.virtual_machine import spend
from ebrl.gen.policies.base import mlp

PROBE_ROUNDS = 2000  # of the hash, at first: under a millisecond
PROBE_S = 0.05
FEATURES, WIDTH = 64, 256


@dataclass(frozen=True)
class Span:
    """What part of a run counts: so many seconds, after others that do not."""

    warmup_s: float
    seconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.warmup_s < math.inf and 0 < self.seconds < math.inf):
            raise ConfigError(f"a span of {self.seconds} s after {self.warmup_s} s counts nothing")


@dataclass(frozen=True)
class Setting:
    """What takes the time.

    Attributes:
        burn: Simulators keep a core busy, instead of sleeping.
        policy: ``torch``: a small network computes first, and what is left of the batch's time is slept.
    """

    burn: bool = False
    policy: Literal["sleep", "torch"] = "sleep"

    def work(self) -> Work:
        """Return the work; burning is calibrated, so call it where nothing else runs."""
        sleep = Work()
        return Work(
            Burn.calibrated() if self.burn else sleep.simulate,
            Network() if self.policy == "torch" else sleep.generate,
        )


@dataclass(frozen=True)
class Ask:
    """How a suite is to be run.

    Attributes:
        seed: Of everything.
        smoke: Tiny.
        span: Of every run.
        repeats: Of every run.
        setting: What takes the time.
    """

    seed: int
    smoke: bool
    span: Span
    repeats: int
    setting: Setting


@dataclass(frozen=True)
class Measured:
    """What came of a run.

    Attributes:
        speed: Environment steps per second.
        batch_mean: Requests per batch.
        busy: Of EBRL, by kind of lane, warm-up included.
        moves: Of EBRL's tuner.
    """

    speed: float
    batch_mean: float
    busy: dict[str, float] = field(default_factory=dict)
    moves: Sequence[Move] = ()


@dataclass(frozen=True)
class Burn:
    """Uses a core for so many seconds, in C code that leaves the interpreter to others, as a simulator's does."""

    rounds_per_s: float

    def __call__(self, seconds: float) -> None:
        rounds = round(seconds * self.rounds_per_s)
        if rounds:
            hashlib.pbkdf2_hmac("sha256", b"ebrl", b"ebrl", rounds)

    @classmethod
    def calibrated(cls) -> Burn:
        """Measure this computer, in seconds of the thread, so that other load does not matter."""
        burn, spent_s = cls(PROBE_ROUNDS / 1.0), 0.0
        for seconds in (1.0, PROBE_S):  # the first says how many rounds the second needs
            began_s = time.thread_time()
            burn(seconds)
            spent_s = time.thread_time() - began_s
            burn = cls(round(seconds * burn.rounds_per_s) / spent_s)
        return burn


class Network:
    """A policy that computes: a small network, then a sleep for what is left of the time that the batch should take."""

    def __init__(self) -> None:
        self._net = mlp(FEATURES, 8, hidden=(WIDTH, WIDTH), gain=1.0, generator=torch.Generator())

    def __call__(self, conditions: Conditions, num: int) -> None:
        began_s = time.perf_counter()
        rows = num * conditions.workload.simulator.slots_per_unit
        with torch.inference_mode():
            self._net(torch.zeros(rows, FEATURES))
        spend(max(0.0, conditions.workload.generation_s(rows) - (time.perf_counter() - began_s)))


class Window:
    """What was done within a span, told on any thread; see `bench.hardware.Counting`."""

    def __init__(self, span: Span) -> None:
        self.done = asyncio.Event()
        self._span = span
        self._lock = threading.Lock()  # adding to a number is not one step of the interpreter
        self._steps = self._batches = self._requests = 0
        self._clock: Callable[[], float] = time.monotonic
        self._began: tuple[float, int, int, int] | None = None
        self._ended: tuple[float, int, int, int] | None = None

    def open(self) -> None:
        """Let the span begin; called on the loop, whose clock is used."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        loop.call_later(self._span.warmup_s, self._begin)

    def stepped(self, num: int, ended: bool, slots: int = 1, chunk: bool = True) -> None:
        """See `bench.hardware.Counting`."""
        with self._lock:
            self._steps += num * slots

    def launched(self, num: int, chunks: int = 0) -> None:
        """See `bench.hardware.Counting`."""
        with self._lock:
            self._batches += 1
            self._requests += num

    def trained(self, num: int, lag: int) -> None:
        """See `bench.hardware.Counting`; what is trained here is only thrown away."""

    def speed(self) -> float:
        """Return environment steps per second."""
        seconds, steps, _, _ = self._counted()
        return steps / seconds

    def batch_mean(self) -> float:
        """Return requests per batch."""
        _, _, batches, requests = self._counted()
        return requests / max(batches, 1)

    def _counted(self) -> tuple[float, int, int, int]:
        began, ended = self._began, self._ended
        assert began is not None
        assert ended is not None
        return ended[0] - began[0], ended[1] - began[1], ended[2] - began[2], ended[3] - began[3]

    def _now(self) -> tuple[float, int, int, int]:
        with self._lock:  # the clock is read with the numbers: a late timer makes the span longer, not the rate higher
            return self._clock(), self._steps, self._batches, self._requests

    def _begin(self) -> None:
        self._began = self._now()
        asyncio.get_running_loop().call_later(self._span.seconds, self._end)

    def _end(self) -> None:
        self._ended = self._now()
        self.done.set()


def run(job: Job, span: Span, setting: Setting) -> Measured:
    """Run one of EBRL's schedulers."""
    workload = load(job)
    return ebrl.run(_run(job, workload, span, LocalMachine(workload.machine.num_cores), setting.work()))


def run_twin(job: Job, span: Span) -> Measured:
    """Run the same in virtual time."""
    workload = load(job)
    return ebrl.run_virtual(_run(job, workload, span, make_machine(Conditions(workload), job.lanes), Work()))


async def _run(job: Job, workload: Workload, span: Span, machine: Machine, work: Work) -> Measured:
    window = Window(span)
    rig = Rig(Conditions(workload), window, machine, job.seed, work)
    window.open()
    await rig.run(batcher=pinned(job.scheduler, workload.num_units), lanes=job.lanes)
    return Measured(window.speed(), window.batch_mean(), rig.busy, rig.moves)
