"""A modelled GPU: how fast several kinds of work run beside each other on one set of SMs.

A kind that runs alone has all units. Kinds that run together are either time-sliced (no partition: each makes
progress for its part of the time, as ordinary streams do when kernels fill the device), or partitioned: each has its
units and is as fast as its speed-up law says, which saturates, so that two halves are worth more than one whole. Units
of a kind that does not run are lent. A kind without units of its own takes turns with all others. Memory bandwidth is
divided among all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DONE_S = 1e-9  # what is left of a job that has ended: a clock cannot tell less apart after some hours


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What a GPU is.

    Attributes:
        units: Of SMs that can be given to one kind of work or another.
        speed: Per kind of lane: speed with u units, as a fraction of that with all of them; ``speed(units) == 1``.
        bandwidth: Per kind: part of the memory bandwidth that it uses at full speed; 0 where it is missing.
    """

    units: int
    speed: Mapping[str, Callable[[float], float]]
    bandwidth: Mapping[str, float]


class _Job:
    __slots__ = ("done", "kind", "left_s", "rate")

    def __init__(self, kind: str, left_s: float, done: Callable[[], None]) -> None:
        self.kind = kind
        self.left_s = left_s  # at full speed
        self.done = done
        self.rate = 0.0


class VirtualGpu:
    """Jobs that share the units; speeds are divided anew whenever one begins or ends.

    Jobs and partition belong to the running loop; another loop finds none.

    Attributes:
        model: What it is.
        lends: Whether a partition lends what nobody uses; False: each kind has its units and no more, as with whole
            devices.
    """

    def __init__(self, model: GpuModel) -> None:
        self.model = model
        self.lends = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._partition: Mapping[str, int] | None = None
        self._jobs: list[_Job] = []
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def partition(self) -> Mapping[str, int] | None:
        """Units per kind of lane; None: time-sliced. A change counts from now on for what runs already."""
        return self._partition

    @partition.setter
    def partition(self, partition: Mapping[str, int] | None) -> None:
        self._advance()
        self._partition = partition
        self._divide()

    def run(self, kind: str, seconds: float, done: Callable[[], None]) -> None:
        """Begin a job.

        Args:
            kind: Of its lane.
            seconds: That it takes alone.
            done: Called at its end.
        """
        self._advance()
        self._jobs.append(_Job(kind, seconds, done))
        self._divide()

    def _advance(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._partition, self._jobs, self._timer = loop, None, [], None
        now_s = loop.time()
        for job in self._jobs:
            job.left_s -= job.rate * (now_s - self._since_s)
        self._since_s = now_s

    def _divide(self) -> None:
        counts: dict[str, int] = {}
        for job in self._jobs:
            counts[job.kind] = counts.get(job.kind, 0) + 1
        speeds = self._speeds(counts)
        demand = sum(self.model.bandwidth.get(kind, 0.0) * speed for kind, speed in speeds.items())
        for job in self._jobs:
            job.rate = speeds[job.kind] / counts[job.kind] / max(1.0, demand)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            wait_s = min(job.left_s / job.rate for job in self._jobs)
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._look)

    def _speeds(self, counts: Mapping[str, int]) -> dict[str, float]:
        # Of a kind: its jobs share it. What has no part in a partition cannot be confined to units: it takes turns.
        partition = self._partition or {}
        inside = {kind: partition[kind] for kind in counts if kind in partition}
        turns = len(counts) - len(inside) + bool(inside)
        total = sum(inside.values()) if self.lends else self.model.units
        speeds = dict.fromkeys(counts, 1.0 / max(1, turns))
        for kind, units in inside.items():
            speeds[kind] *= self.model.speed[kind](self.model.units * units / total)
        return speeds

    def _look(self) -> None:
        self._advance()
        ended = [job for job in self._jobs if job.left_s <= DONE_S]
        self._jobs = [job for job in self._jobs if job.left_s > DONE_S]
        self._divide()
        for job in ended:
            job.done()
