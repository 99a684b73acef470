"""A workload as modelled hardware: units that take their time, on a virtual machine; the same for every scheduler.

What a unit does next depends on the seed and on how far it is, never on who schedules it: two schedulers that are
compared meet the same steps, stalls, resets and episode lengths.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bench.workload import Workload, speedup
from ebrl.core.protocols import Lane
from ebrl.core.rng import Domain, stream
from ebrl.core.virtual_gpu import GpuModel
from ebrl.core.virtual_machine import VirtualMachine, spend

BLOCK = 256  # steps that are drawn at once
SLOW = 10.0  # times longer
STAGES = {"sim": "simulation", "gen": "generation", "train": "training"}


@dataclass
class Conditions:
    """What holds now; a drift changes it while everything runs.

    Attributes:
        workload: Whose laws hold.
        num_slow: Units, counted from 0, whose steps take `SLOW` times as long.
    """

    workload: Workload
    num_slow: int = 0


class Unit:
    """One simulator: an environment, or all slots of a batched one."""

    def __init__(self, conditions: Conditions, index: int, seed: int) -> None:
        self._conditions = conditions
        self._index = index
        self._rng = stream(seed, Domain.LATENCY, index)
        self._bursting = bool(self._rng.random() < conditions.workload.simulator.burst_share)
        self._drawn: tuple[Workload | None, int] = (None, 0)  # the conditions that `_steps` were drawn under
        self._steps: list[float] = []
        self._left = 0
        self._fresh = True

    def reset(self) -> float:
        """Begin an episode, and return the seconds that takes.

        The first one takes a random part of a step: units do not begin in step, and start-up is not measured.
        """
        workload = self._conditions.workload
        self._left = workload.simulator.draw_episode(self._rng)
        if self._fresh:
            self._fresh = False
            return float(self._rng.random()) * workload.call_s * workload.policy.chunk
        mean_s, cv = workload.reset_s, workload.simulator.reset_cv
        sigma = float(np.sqrt(np.log1p(cv**2)))
        return mean_s * float(np.exp(sigma * self._rng.standard_normal() - sigma**2 / 2))

    def step(self) -> tuple[float, bool]:
        """Take one environment step; return its seconds, and whether the episode has ended."""
        if not self._steps or self._drawn != (self._conditions.workload, self._conditions.num_slow):
            self._steps = self._draw()
        self._left -= 1
        return self._steps.pop(), self._left <= 0

    def chunk(self, num: int) -> tuple[int, float, bool]:
        """Take up to `num` steps of one episode; return how many, their seconds, and whether it has ended."""
        total_s = 0.0
        for done in range(1, num + 1):
            seconds, ended = self.step()
            total_s += seconds
            if ended:
                return done, total_s, True
        return num, total_s, False

    def _draw(self) -> list[float]:
        workload, rng = self._conditions.workload, self._rng
        simulator, self._drawn = workload.simulator, (workload, self._conditions.num_slow)
        sigma = float(np.sqrt(np.log1p(simulator.step_cv**2)))
        mean_s = workload.call_s * simulator.calm_factor * (SLOW if self._index < self._conditions.num_slow else 1.0)
        seconds = mean_s * np.exp(sigma * rng.standard_normal(BLOCK) - sigma**2 / 2)
        if simulator.burst_share:
            uniform, ends = rng.random(BLOCK), 1.0 / simulator.burst_steps
            begins = simulator.burst_share / ((1 - simulator.burst_share) * simulator.burst_steps)
            for i in range(BLOCK):
                if uniform[i] < (ends if self._bursting else begins):
                    self._bursting = not self._bursting
                if self._bursting:
                    seconds[i] *= simulator.burst_factor
        if simulator.stall_probability:
            seconds[rng.random(BLOCK) < simulator.stall_probability] *= simulator.stall_factor
        drawn: list[float] = seconds[::-1].tolist()
        return drawn


def make_machine(conditions: Conditions, num_lanes: int = 1) -> VirtualMachine:
    """Return the cores and the GPU of a workload.

    Whatever runs on it says itself how long it takes. Each of `num_lanes` generation lanes is a server of its own;
    where something is trained they share the GPU.
    """
    workload = conditions.workload
    machine, gpu = workload.machine, None
    if workload.training is not None:
        units, training = machine.sm_units, workload.training
        linearity = {"gen": workload.policy.linearity, "train": training.linearity}
        if workload.simulator.kind == "gpu-batched":
            share = workload.simulator.sm_share
            linearity["sim"] = share / max(1 - share, 1e-3)  # half of its speed on half of the SMs it needs, roughly
        gpu = GpuModel(
            units,
            {kind: _speed(units, k) for kind, k in linearity.items()},
            {kind: workload.bandwidth(STAGES[kind]) for kind in linearity},  # type: ignore[arg-type]
        )
    return VirtualMachine(
        {},
        num_cores=machine.num_cores // workload.simulator.cores_per_unit,
        servers={"gen": num_lanes, "train": 1},
        gpu=gpu,
    )


def generate(conditions: Conditions, num: int) -> None:
    """Take the time of a batch of `num` requests; a request of a unit has a row per slot."""
    workload = conditions.workload
    spend(workload.generation_s(num * workload.simulator.slots_per_unit))


def update(conditions: Conditions, num: int) -> None:
    """Take the time of an update with `num` decisions of units, or with the part of a batch that they are."""
    workload = conditions.workload
    if workload.training is not None:
        spend(workload.update_s() * num * workload.simulator.slots_per_unit / workload.batch_size)


def _speed(units: int, linearity: float) -> Callable[[float], float]:
    return lambda num: speedup(min(1.0, num / units), linearity)


class Counting(Protocol):
    """Who is told of all work, on the thread that does it.

    Attributes:
        done: Set on the loop when enough has been counted.
    """

    done: asyncio.Event

    def stepped(self, num: int, ended: bool, slots: int = 1, chunk: bool = True) -> None:
        """A unit of `slots` environments has done `num` steps of a chunk; `chunk`: and with them all of it."""

    def launched(self, num: int, chunks: int = 0) -> None:
        """A batch of `num` requests has been generated; `chunks`: that many are counted now, not when they end."""

    def trained(self, num: int, lag: int) -> None:
        """`num` decisions that were `lag` versions behind have been trained."""


@dataclass
class Tally:
    """What was done, and when the part that counts began: a number of environment steps. For one thread.

    Attributes:
        drop: Environment steps that do not count: the start.
        count: Environment steps that do.
        done: Set when both have been done.
        env_steps, chunks, episodes, samples: Since the start.
        on_count: Called when the part that counts begins: a drift.
        launch_times_s: Of its batches.
        batches: Generation batches by number of requests, of the part that counts.
        lags: Trained decisions by versions behind, of the part that counts.
        began: Time and numbers when the part that counts began.
        ended_s: When it ended.
    """

    drop: int
    count: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    env_steps: int = 0
    chunks: int = 0
    episodes: int = 0
    samples: int = 0
    on_count: Callable[[], None] | None = None
    launch_times_s: list[float] = field(default_factory=list)
    batches: Counter[int] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    began: tuple[float, int, int, int, int] | None = None
    ended: tuple[float, int, int, int, int] | None = None

    def now(self) -> tuple[float, int, int, int, int]:
        """Return time, and all numbers."""
        return asyncio.get_running_loop().time(), self.env_steps, self.chunks, self.episodes, self.samples

    def stepped(self, num: int, ended: bool, slots: int = 1, chunk: bool = True) -> None:
        """See `Counting`."""
        self.env_steps += num * slots
        self.chunks += slots * chunk
        self.episodes += slots * ended
        if self.began is None:
            if self.env_steps >= self.drop:
                self.began = self.now()
                if self.on_count is not None:
                    self.on_count()
        elif self.ended is None and self.env_steps >= self.drop + self.count:
            self.ended = self.now()
            self.done.set()

    def launched(self, num: int, chunks: int = 0) -> None:
        """See `Counting`."""
        self.chunks += chunks
        if self.began is not None and self.ended is None:
            self.batches[num] += 1
            self.launch_times_s.append(asyncio.get_running_loop().time())

    def trained(self, num: int, lag: int) -> None:
        """See `Counting`."""
        self.samples += num
        if self.began is not None and self.ended is None:
            self.lags[lag] += num

    def rates(self) -> dict[str, float]:
        """Return environment steps, chunks, episodes and trained samples per second of the part that counts."""
        assert self.began is not None
        assert self.ended is not None
        seconds = self.ended[0] - self.began[0]
        names = ("env_steps", "chunks", "episodes", "samples")
        return {name: (b - a) / seconds for name, a, b in zip(names, self.began[1:], self.ended[1:], strict=True)}


class Hardware:
    """What a baseline scheduler may use: units, batches and updates, which take their time on one machine.

    Each method is awaited; many may be awaited at once, and then queue for cores, lanes and the GPU as anywhere else.
    """

    def __init__(
        self,
        workload: Workload,
        tally: Tally,
        *,
        num_lanes: int = 1,
        seed: int = 0,
        conditions: Conditions | None = None,
    ) -> None:
        self.workload = workload
        self.tally = tally
        self._conditions = conditions = conditions or Conditions(workload)
        self.machine = make_machine(conditions, num_lanes)
        self.num_lanes = num_lanes
        self.slots = workload.simulator.slots_per_unit
        self._units = [Unit(conditions, index, seed) for index in range(workload.num_units)]
        self._sims: list[Lane] = [self.machine.lane("sim", f"sim-{i}") for i in range(workload.num_units)]
        self._gens: list[Lane] = [self.machine.lane("gen", f"gen-{i}") for i in range(num_lanes)]
        self._train: Lane = self.machine.lane("train", "train-0")

    @property
    def num_units(self) -> int:
        """Of simulators."""
        return len(self._units)

    async def reset(self, unit: int) -> None:
        """Reset a unit."""
        await self._sims[unit].run(lambda: spend(self._units[unit].reset()))

    async def step(self, unit: int, num: int | None = None, *, chunk: bool = True) -> tuple[int, bool]:
        """Take up to `num` (default: a chunk) steps; return how many, and whether the episode has ended.

        Args:
            unit: Which.
            num: Steps.
            chunk: Whether a chunk ends with them, for what is counted.
        """
        num = num or self.workload.policy.chunk

        def work() -> tuple[int, bool]:
            steps, seconds, ended = self._units[unit].chunk(num)
            spend(seconds)
            return steps, ended

        steps, ended = await self._sims[unit].run(work)
        self.tally.stepped(steps, ended, self.slots, chunk)
        return steps, ended

    async def generate(self, num: int, lane: int = 0) -> None:
        """Answer a batch of `num` requests (units)."""
        await self._gens[lane].run(generate, self._conditions, num)
        self.tally.launched(num)

    async def train(self, num: int, lag: int = 0) -> None:
        """Update with `num` decisions, counted in environments: a unit's decision is one per slot."""
        await self._train.run(update, self._conditions, num // self.slots)
        self.tally.trained(num, lag)

    def utilisation(self) -> dict[str, float]:
        """Return busy seconds per kind of lane over all time so far, as a part of what there is."""
        elapsed_s = max(asyncio.get_running_loop().time(), 1e-9)
        cores = min(self.machine.num_cores, self.num_units)
        return {
            "cores": sum(lane.busy_s for lane in self._sims) / elapsed_s / cores,
            "gen": sum(lane.busy_s for lane in self._gens) / elapsed_s / self.num_lanes,
            "train": self._train.busy_s / elapsed_s,
        }
