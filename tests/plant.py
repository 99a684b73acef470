"""A generator and its environments as numbers, for tests of the tuner that need no runtime."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ebrl.core.readings import Batching, CoreReading, GenReading, Knob, Move, Reading, SimReading
from ebrl.core.throughput import Loop, Numbers, forecast
from ebrl.core.tuner import Tuner

GREEDY = Batching(1, 256, 0.01)
FEW_MOVES = 3  # in any minute of one regime


class Tuned(ABC):
    """What a tuner looks at and turns."""

    now_s: float

    @abstractmethod
    def advance(self, seconds: float) -> None: ...

    @abstractmethod
    def reading(self) -> Reading: ...

    @abstractmethod
    def turn(self, move: Move) -> None: ...

    def run(self, tuner: Tuner, seconds: float) -> list[Move]:
        """Let the tuner look whenever it wants to."""
        until_s, moves = self.now_s + seconds, []
        while self.now_s < until_s:
            self.advance(tuner.look_s)
            move = tuner.decide(self.reading())
            if move is not None:
                self.turn(move)
                moves.append(move)
        return moves


@dataclass
class Plant(Tuned):
    """A generator and its environments as numbers, which do what the model says times `surprise`.

    Attributes:
        noise: Relative, of what is done from one look to the next.
        fit_noise: Relative, of the costs that are read.
        jump: Factor by which costs and latencies that are read differ at most from what they are, anew at every look.
        surprise: Factor of the rate with a rule.
    """

    num_envs: int = 64
    fixed_s: float = 0.02
    per_request_s: float = 1e-4
    latency_s: float = 0.005
    cv: float = 0.5
    lanes: int = 1
    choices: range = range(1, 2)
    batching: Batching = GREEDY
    noise: float = 0.0
    fit_noise: float = 0.0
    jump: float = 1.0
    seed: int = 0
    surprise: Callable[[Batching], float] = lambda rule: 1.0
    pinned: frozenset[Knob] = frozenset()
    spread: float = 0.5
    name: str = "gen"
    now_s: float = 100.0
    steps: float = 0.0
    batches: float = 0.0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.batching = self.batching._replace(num_lanes=self.lanes)
        self._rates: dict[tuple[Batching, float, float, float], tuple[float, float]] = {}

    def latencies(self, num: int = 512, factor: float = 1.0) -> Numbers:
        sigma = math.sqrt(math.log1p(self.cv**2))
        drawn: Numbers = factor * self.latency_s * np.exp(sigma * self.rng.standard_normal(num) - sigma**2 / 2)
        return np.sort(drawn)

    def rate(self) -> tuple[float, float]:
        """Return decisions per second, and the size of a batch."""
        key = self.batching, self.fixed_s, self.per_request_s, self.latency_s
        if key not in self._rates:
            self._rates[key] = self._rate()
        rate, size = self._rates[key]
        return rate * self.surprise(self.batching), size

    def _rate(self) -> tuple[float, float]:
        loop = Loop(self.num_envs, self.fixed_s, self.per_request_s, self.latencies(2048), self.batching.num_lanes)
        found = forecast(loop, np.array([min(self.batching.threshold, self.num_envs)]))
        size = min(float(found.batches[0]), self.batching.max_size)
        most = self.batching.num_lanes * size / max(self.fixed_s + self.per_request_s * size, 1e-9)
        return min(float(found.rates[0]), most), size

    def advance(self, seconds: float) -> None:
        rate, size = self.rate()
        num = rate * seconds * max(0.0, 1 + self.noise * float(self.rng.standard_normal()))
        self.now_s, self.steps, self.batches = self.now_s + seconds, self.steps + num, self.batches + num / size

    def reading(self) -> Reading:
        fixed, per_request, latency = self.jumps()
        fixed_s, per_request_s = (
            value * math.exp(self.fit_noise * float(self.rng.standard_normal()))
            for value in (fixed * self.fixed_s, per_request * self.per_request_s)
        )
        gen = GenReading(
            name=self.name,
            batching=self.batching,
            fixed_s=fixed_s,
            per_request_s=per_request_s,
            size_spread=self.spread,
            latencies_s=self.latencies(factor=latency),
            num_requests=int(self.steps),
            num_batches=int(self.batches),
            busy_s=self.now_s - 100.0,
            lanes=self.choices,
            pinned=self.pinned,
        )
        sim = SimReading("envs", self.name, self.num_envs, int(self.steps), self.steps * self.latency_s, self.num_envs)
        return Reading(self.now_s, (gen,), (sim,))

    def jumps(self) -> Sequence[float]:
        """Return factors of fixed cost, cost of a request, and latency."""
        if self.jump == 1.0:
            return 1.0, 1.0, 1.0
        factors: Sequence[float] = (self.jump ** self.rng.uniform(-1, 1, 3)).tolist()
        return factors

    def turn(self, move: Move) -> None:
        assert move.service == self.name
        assert move.old == self.batching
        self.batching = move.new


@dataclass
class Crowd(Tuned):
    """Simulators that take all cores, a core each, while generation takes next to nothing.

    Attributes:
        lock: They compute one at a time, and the others wait; else all of them sleep for most of their time.
        call_s: Of computing in a call.
        sleep_s: Of a call in which they sleep.
    """

    lock: bool
    num_envs: int = 32
    num_cores: int = 8
    call_s: float = 0.0025
    sleep_s: float = 0.0175
    noise: float = 0.0
    seed: int = 0
    pinned: frozenset[Knob] = frozenset()
    now_s: float = 100.0
    steps: float = 0.0
    busy_s: float = 0.0
    ceiling: int = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.ceiling = self.num_cores
        self.rng = np.random.default_rng(self.seed)
        self._latencies: deque[float] = deque(maxlen=512)

    @property
    def rate(self) -> float:
        """Calls per second."""
        return 1 / self.call_s if self.lock else self.ceiling / (self.call_s + self.sleep_s)

    @property
    def cpu_part(self) -> float:
        """Of the time of a call, the part in which it computes."""
        return 1 / self.ceiling if self.lock else self.call_s / (self.call_s + self.sleep_s)

    def advance(self, seconds: float) -> None:
        num = self.rate * seconds * max(0.0, 1 + self.noise * float(self.rng.standard_normal()))
        new = min(512, int(self.steps + num) - int(self.steps))
        self._latencies.extend((self.num_envs / self.rate * self.rng.uniform(0.5, 1.5, new)).tolist())
        self.now_s, self.steps = self.now_s + seconds, self.steps + num
        self.busy_s += self.ceiling * seconds

    def reading(self) -> Reading:
        num, latencies_s = int(self.steps), np.sort(np.array(self._latencies))
        fixed = frozenset[Knob]({"batching"})
        gen = GenReading("gen", GREEDY, 1e-4, 1e-6, 0.5, latencies_s, num, num // 4, 0.0, pinned=fixed)
        sim = SimReading("envs", "gen", self.num_envs, num, self.busy_s, self.ceiling, self.cpu_part)
        cores = (CoreReading("sim", self.num_cores / 2, self.busy_s, self.ceiling),)
        return Reading(self.now_s, (gen,), (sim,), num_cores=self.num_cores, cores=cores, pinned=self.pinned)

    def turn(self, move: Move) -> None:
        assert (move.service, move.knob, move.old) == ("machine", "concurrency", self.ceiling)
        self.ceiling = move.new


def warm(plant: Plant, seconds: float = 5.0) -> tuple[Tuner, Reading]:
    """Return a tuner that has seen enough to judge, but could not move yet."""
    tuner = Tuner()
    first = plant.reading()
    few = tuple(replace(gen, latencies_s=gen.latencies_s[:1]) for gen in first.gens)
    assert tuner.decide(replace(first, gens=few)) is None
    plant.advance(seconds)
    return tuner, plant.reading()


def accustomed(plant: Plant, seconds: float = 5.0) -> Tuner:
    """Return a tuner that has looked on for a while."""
    tuner, pinned = Tuner(), plant.pinned
    plant.pinned = frozenset({"batching"})
    assert plant.run(tuner, seconds) == []
    plant.pinned = pinned
    return tuner


def turned(moves: Sequence[Move]) -> list[tuple[int, int]]:
    return [(move.old.threshold, move.new.threshold) for move in moves]


def busiest(moves: Sequence[Move]) -> int:
    """Return the most moves in a minute."""
    times_s = [move.time_s for move in moves]
    return max((sum(start <= time_s < start + 60 for time_s in times_s) for start in times_s), default=0)


def poor_above(threshold: int, factor: float = 0.5) -> Callable[[Batching], float]:
    """Return a surprise: larger thresholds do not pay."""
    return lambda rule: factor if rule.threshold > threshold else 1.0
