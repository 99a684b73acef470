"""What the tuner is told about the services of a runtime, and what it says: plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Knob: TypeAlias = Literal["batching", "lanes", "concurrency", "cores", "partition"]


class Batching(NamedTuple):
    """When to launch, and on how many lanes; see `ebrl.gen.batcher.Batcher`."""

    threshold: int
    max_size: int
    max_wait_s: float
    num_lanes: int = 1


@dataclass(frozen=True, slots=True)
class GenReading:
    """A generator now.

    Attributes:
        name: Of the service.
        batching: Its rule, with the number of batches that may run at once.
        fixed_s: Seconds of a batch whatever its size.
        per_request_s: Seconds per request in it.
        size_spread: Standard deviation of batch sizes over their mean.
        latencies_s: Sample of the seconds between an answer and the next request of the same environment.
        num_requests: Since it started.
        num_batches: Since it started.
        busy_s: Of its lanes, since it started.
        lanes: Numbers of lanes that it may have.
        pinned: Knobs that the user has set.
    """

    name: str
    batching: Batching
    fixed_s: float
    per_request_s: float
    size_spread: float
    latencies_s: NDArray[np.float64]
    num_requests: int
    num_batches: int
    busy_s: float
    lanes: range = range(1, 2)
    pinned: frozenset[Knob] = frozenset()


@dataclass(frozen=True, slots=True)
class SimReading:
    """A group of environments now.

    Attributes:
        name: Of the service.
        gen: Name of the generator that decides in it.
        num_envs: N; 0 while nobody consumes what it does.
        num_steps: Environment steps since it started.
        busy_s: Core-seconds in simulators since it started.
        num_cores: That its simulators may use at once.
        cpu_part: Of the time of their calls in which they compute; 1 where that is not known.
    """

    name: str
    gen: str
    num_envs: int
    num_steps: int
    busy_s: float
    num_cores: int
    cpu_part: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainReading:
    """A trainer now.

    Attributes:
        name: Of the service.
        gen: Name of the generator that it publishes to.
        num_updates: Since it started.
        num_decisions: Trained since it started.
        update_s: Seconds of the last update.
        updated_s: When it ended; before the first: when the trainer started.
    """

    name: str
    gen: str
    num_updates: int
    num_decisions: int
    update_s: float
    updated_s: float


@dataclass(frozen=True, slots=True)
class CoreReading:
    """A stage's claim on the cores now.

    Attributes:
        kind: Of its lanes.
        rate: Cores that it was promised.
        used: Core-seconds since the runtime opened.
        ceiling: Cores that it may hold at once.
    """

    kind: str
    rate: float
    used: float
    ceiling: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything the tuner knows.

    Attributes:
        now_s: Time.
        gens: Generators.
        sims: Groups.
        trains: Trainers.
        sm_units: Of the GPU that generation and training share; 0: they share none, or it cannot be divided.
        gen_units: Of these, for generation while training runs too; 0: undivided, they take turns.
        num_cores: That stages share.
        cores: Claims on them.
        pinned: Knobs of the machine that the user has set.
    """

    now_s: float
    gens: tuple[GenReading, ...]
    sims: tuple[SimReading, ...]
    trains: tuple[TrainReading, ...] = ()
    sm_units: int = 0
    gen_units: int = 0
    num_cores: int = 0
    cores: tuple[CoreReading, ...] = ()
    pinned: frozenset[Knob] = frozenset()

    @property
    def num_steps(self) -> int:
        """Environment steps of the groups that run: one that nobody consumes may end unnoticed, and take its along."""
        return sum(sim.num_steps for sim in self.sims if sim.num_envs)

    def trainers(self, gen: str = "") -> tuple[TrainReading, ...]:
        """Return those that publish to a generator; to any, if it is not named."""
        return tuple(train for train in self.trains if gen in ("", train.gen))

    def progress(self, gen: str = "") -> tuple[float, float, int]:
        """Return what has been done, when that was true, and in how many portions it comes.

        Where something is trained that is decisions at the end of the last update, since rollout comes in waves there;
        else environment steps.

        Args:
            gen: Counts what this generator alone has decided, in decisions, as forecasts are.
        """
        if trains := self.trainers(gen):
            updates = sum(train.num_updates for train in trains)
            ended_s = max(train.updated_s for train in trains)
            return float(sum(train.num_decisions for train in trains)), ended_s, updates
        num = sum(one.num_requests for one in self.gens if one.name == gen) if gen else self.num_steps
        return float(num), self.now_s, num

    def of(self, gen: GenReading) -> tuple[SimReading, ...]:
        """Return the groups that a generator decides in, as far as they run."""
        return tuple(sim for sim in self.sims if sim.gen == gen.name and sim.num_envs)


@dataclass(frozen=True, slots=True)
class Move:
    """One knob, turned.

    Attributes:
        time_s: When; what `Tuning.moves` shows counts from the start of the run.
        service: Whose.
        knob: Which.
        old: Value.
        new: Value.
        reason: For people.
        gain: Relative gain that was forecast; 0 where a move is taken back.
        rate: Decisions per second of the generator that were forecast; 0: none were.
    """

    time_s: float
    service: str
    knob: Knob
    old: Any
    new: Any
    reason: str
    gain: float
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.service}.{self.knob} {text(self.old)} -> {text(self.new)}: {self.reason}"


def text(value: Any) -> str:
    """Return a knob's value for people."""
    if isinstance(value, Batching):
        lanes = f" on {value.num_lanes} lanes" if value.num_lanes > 1 else ""
        return f"{value.threshold}..{value.max_size} within {1e3 * value.max_wait_s:.3g} ms{lanes}"
    if isinstance(value, dict):
        return " ".join(f"{kind} {rate:.2f}" for kind, rate in value.items())
    return str(value)
