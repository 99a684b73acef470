"""`Tuning`: asks the `Tuner` when its time has come, and turns the knobs of the services that take part.

It has no timer: generators call `look` when a batch has ended, so that nothing is tuned while nothing
happens, and virtual time can still see a deadlock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ebrl.core.errors import ConfigError, amount, whole
from ebrl.core.leases import Lease, Ticket
from ebrl.core.pools import ResourceManager
from ebrl.core.protocols import Machine
from ebrl.core.readings import CoreReading, GenReading, Knob, Move, Reading, SimReading, TrainReading
from ebrl.core.tokens import TokenBucket
from ebrl.core.trace import Trace
from ebrl.core.tuner import Tuner

logger = logging.getLogger("ebrl")

BATCHER = "Generator(policy, batcher=Batcher(threshold=8))"
GENERATOR_PINS = {
    **dict.fromkeys(("batching", "batcher", "threshold", "max_size", "max_wait_s"), BATCHER),
    "lanes": "Generator(policy, lanes=2)",
}
"""How knobs are set that are no knobs of the machine."""


class TunedGenerator(Protocol):
    """A service with a batcher and lanes. Called on the loop."""

    def reading(self) -> GenReading:
        """Return what it knows now."""

    def turn(self, move: Move) -> None:
        """Use a new value."""


class TunedGroup(Protocol):
    """A service with environments. Called on the loop."""

    @property
    def actor(self) -> Any:
        """Who decides in it."""

    def reading(self) -> SimReading:
        """Return what it knows now; `Tuning` fills in the name of the generator."""


class TunedTrainer(Protocol):
    """A service that updates. Called on the loop."""

    @property
    def actor(self) -> Any:
        """Whom it publishes to."""

    def reading(self) -> TrainReading:
        """Return what it knows now; `Tuning` fills in the name of the generator."""


class Tuning:
    """The tuner of one runtime.

    Attributes:
        num_decisions: How often it was asked.
        num_moves: How many knobs it has turned.
        cpu_s: Of the loop's thread, in decisions so far.
    """

    def __init__(
        self,
        machine: Machine,
        resources: ResourceManager,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        claims: Mapping[str, TokenBucket] | None = None,
        trace: Trace | None = None,
        *,
        enabled: bool = True,
        pins: Mapping[Knob, Any] | None = None,
    ) -> None:
        """Begin.

        Args:
            machine: Whose GPU may be divided.
            resources: Whose ``sm`` pool says who has what of it.
            spawn: Starts a task of the runtime, so that an error in a decision ends the run as any other does.
            claims: On the cores, by kind of lane.
            trace: Takes a span per move.
            enabled: Whether knobs are turned at all.
            pins: Knobs of the machine that the user has set; see `Runtime`.

        Raises:
            ConfigError: A pin that is no knob of this machine, or that it cannot be set to.
        """
        self.num_decisions = 0
        self.num_moves = 0
        self._tuner = Tuner() if enabled else None
        self.cpu_s = 0.0
        self._spawn = spawn
        self._deciding = False
        self._machine = machine
        self._resources = resources
        self._division: list[Lease] = []
        self._asked: list[Ticket] = []
        self._claims = dict(claims or {})
        self._trace = trace
        self._generators: list[TunedGenerator] = []
        self._groups: list[TunedGroup] = []
        self._trainers: list[TunedTrainer] = []
        self._gen_units = 0
        self._due_s: float | None = None
        self._opened_s = 0.0
        if pins is not None and not isinstance(pins, Mapping):
            raise ConfigError(f"pin: must be values by knob, such as {{'concurrency': 2}}, got {pins!r}")
        self._pins = dict(pins or {})
        for knob, value in self._pins.items():
            _check_pin(knob, value, machine, list(self._claims))

    @property
    def moves(self) -> tuple[Move, ...]:
        """What was turned and why, in seconds of the run; the latest moves, oldest first."""
        moves = self._tuner.moves if self._tuner is not None else ()
        return tuple(replace(move, time_s=move.time_s - self._opened_s) for move in moves)

    def statistics(self) -> dict[str, float]:
        """Return the number of moves, and what every knob is set to, those of a generator after its name."""
        values: dict[str, float] = {"moves": self.num_moves}
        for generator in self._generators:
            reading = generator.reading()
            values |= {f"{reading.name}/{name}": value for name, value in reading.batching._asdict().items()}
        if "sim" in self._claims:
            values["concurrency"] = self._claims["sim"].account.ceiling
        values |= {f"cores/{kind}": claim.account.rate for kind, claim in self._claims.items()}
        return values | ({"partition": self._gen_units} if self._machine.sm_units else {})

    def open(self, now_s: float) -> None:
        """Set what is pinned; called when the runtime opens."""
        self._opened_s = now_s
        for knob, value in self._pins.items():
            self._set(knob, value)

    def add_generator(self, generator: TunedGenerator) -> None:
        """Tune this one; called when it opens."""
        self._generators.append(generator)

    def add_group(self, group: TunedGroup) -> None:
        """Take part in what is measured; called when it opens."""
        self._groups.append(group)

    def add_trainer(self, trainer: TunedTrainer) -> None:
        """Take part in what is measured; called when it opens."""
        self._trainers.append(trainer)

    @property
    def trainers(self) -> Sequence[TunedTrainer]:
        """Those that run."""
        return self._trainers

    def forget(self, service: Any) -> None:
        """A service has ended."""
        self._generators = [generator for generator in self._generators if generator is not service]
        self._groups = [group for group in self._groups if group is not service]
        self._trainers = [trainer for trainer in self._trainers if trainer is not service]

    def look(self, now_s: float) -> None:
        """A batch has ended: decide if it is time. Costs nothing if it is not."""
        if self._due_s is not None and now_s < self._due_s:
            return
        tuner = self._tuner
        if tuner is None:
            self._due_s = float("inf")
        elif self._due_s is None:
            self._due_s = now_s + tuner.look_s
        elif not self._deciding:
            self._deciding = True
            self._spawn(self._decide(tuner, now_s), "tuner")

    def close(self) -> None:
        """Decide nothing any more; called when the runtime begins to end."""
        self._due_s = float("inf")

    async def _decide(self, tuner: Tuner, now_s: float) -> None:
        self.num_decisions += 1
        began_s = time.thread_time()
        reading, services = self._read(now_s)
        move = tuner.decide(reading)
        self._due_s = max(self._due_s or 0.0, now_s + tuner.look_s)
        if move is not None:
            self._turn(move, services)
        self._deciding = False
        self.cpu_s += time.thread_time() - began_s

    def _turn(self, move: Move, services: Mapping[str, TunedGenerator]) -> None:
        if move.service == "machine":
            self._set(move.knob, move.new)
        else:
            services[move.service].turn(move)
        self.num_moves += 1
        logger.debug("tuner: %s", move)
        if self._trace is not None:
            why, knob = str(move), f"{move.service}.{move.knob}"
            self._trace.span("tuner", "move", move.time_s, move.time_s, knob=knob, why=why)

    def _set(self, knob: Knob, value: Any) -> None:
        if knob == "partition":
            self._divide(value)
        elif knob == "concurrency":
            self._claims["sim"].set(ceiling=value)
        else:
            for kind, rate in value.items():
                self._claims[kind].set(rate=rate)

    def _read(self, now_s: float) -> tuple[Reading, dict[str, TunedGenerator]]:
        gens = [(generator, generator.reading()) for generator in self._generators]

        def name_of(actor: Any) -> str:
            return next((reading.name for generator, reading in gens if generator is actor), "")

        reading = Reading(
            now_s,
            tuple(reading for _, reading in gens),
            tuple(replace(group.reading(), gen=name_of(group.actor)) for group in self._groups),
            tuple(replace(trainer.reading(), gen=name_of(trainer.actor)) for trainer in self._trainers),
            self._machine.sm_units,
            self._gen_units,
            self._machine.num_cores,
            tuple(
                CoreReading(kind, claim.account.rate, claim.statistics().used, claim.account.ceiling)
                for kind, claim in self._claims.items()
            ),
            frozenset(self._pins),
        )
        return reading, {reading.name: generator for generator, reading in gens}

    def _divide(self, gen_units: int) -> None:
        rest = self._machine.sm_units - gen_units
        self._machine.divide({"gen": gen_units, "train": rest} if gen_units else None)
        self._gen_units = gen_units
        for ticket in self._asked:
            ticket.cancel()
        for lease in self._division:
            lease.release()
        self._asked, self._division = [], []
        if gen_units:
            pool = self._resources.pool("sm")
            for who, units in (("gen", gen_units), ("train", rest)):
                self._asked.append(pool.request(units, self._division.append, who))


def _check_pin(knob: str, value: Any, machine: Machine, stages: Sequence[str]) -> None:
    """Raise a `ConfigError` that says what the machine does not have, or which values there are."""
    knobs = {"concurrency": "sim" in stages, "cores": bool(stages), "partition": machine.sm_units > 0}
    if not knobs.get(knob):
        names = ", ".join(name for name, is_there in knobs.items() if is_there) or "none"
        hint = f"; a generator is told by its own arguments: {GENERATOR_PINS[knob]}" if knob in GENERATOR_PINS else ""
        raise ConfigError(f"pin: {knob!r} is no knob of this machine, which has {names}{hint}")
    if knob == "concurrency":
        whole(f"pin: {knob!r}", value, 1, machine.num_cores)
    elif knob == "partition":
        whole(f"pin: {knob!r}", value, 0, machine.sm_units - 1)
    elif not isinstance(value, Mapping) or not value:
        raise ConfigError(f"pin: {knob!r} must be units by stage ({', '.join(stages)}), got {value!r}")
    else:
        for stage, rate in value.items():
            if stage not in stages:
                raise ConfigError(f"pin: no stage {stage!r} shares the cores; these do: {', '.join(stages)}")
            amount(f"pin: {knob!r} of {stage!r}", rate)
