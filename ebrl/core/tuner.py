"""`Tuner`: which knob to turn next, from statistics alone. Pure: equal readings give equal decisions; reads no clock.

The model proposes (`ebrl.core.throughput`), measurement decides: after a move the rate is compared with the one before
(`ebrl.core.trial`), and the move is taken back where it did not pay. One knob is turned at a time; small gains are not
worth a move; a value that was refused is left alone for a while. When service or latencies have become different
ones, what was measured before is no judge, and the tuner looks often again, as after the start.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ebrl.core.batching import plan
from ebrl.core.concurrency import all_again, fewer
from ebrl.core.readings import GenReading, Knob, Move, Reading, TrainReading
from ebrl.core.sharing import Sharing, gen_units, sharing
from ebrl.core.split import promise
from ebrl.core.stretch import Stretch
from ebrl.core.trial import Trial

FIRST_LOOK_S = 0.01  # after the start; then twice as long each time
SLOWEST_LOOK_S = 1.0
LOOK_AGAIN_S = 0.1  # after the regime has changed
DEAD_BAND = 0.02  # relative gain that is worth a move; twice as much for each one of late
FEW_S = 60.0  # what was moved within it makes the next move less worth
LEAST_LATENCIES = 32
NEW_REGIME = math.log(1.5)  # change of service or latency, as a logarithm, beyond what they scatter
SCATTER = 3.0  # times the usual change from one look to the next
NEWEST_CHANGE = 0.1  # weight of the newest one in that
SHORT_S = 1e-6  # below it, times are all alike
LEAST_SPREAD = 0.02  # relative spread of batch sizes below which fixed and other cost cannot be told apart
CORES_S = 10.0  # how long the use of cores is watched before they are promised anew
REFUSED_S = 60.0  # how long a value that did not pay is left alone; twice as long each time


@dataclass(frozen=True, slots=True)
class _Regime:
    """What a plan rests on: seconds of a batch of one and of a large one on an idle device, and mean latency."""

    small_s: float
    large_s: float
    latency_s: float

    def distance(self, other: _Regime) -> float:
        """Return the largest of the logarithms of their ratios."""
        pairs = (
            (self.small_s, other.small_s),
            (self.large_s, other.large_s),
            (self.latency_s, other.latency_s),
        )
        return max(abs(math.log(max(a, SHORT_S) / max(b, SHORT_S))) for a, b in pairs)


class Tuner:
    """Decides; the caller turns the knobs.

    Attributes:
        look_s: Seconds until it should be asked again.
        moves: The latest ones, oldest first.
    """

    def __init__(self) -> None:
        self.look_s = FIRST_LOOK_S
        self.moves: deque[Move] = deque(maxlen=256)
        self._regimes: dict[str, _Regime] = {}
        self._seen: dict[str, tuple[_Regime, float]] = {}  # at the last look, and how much that changes usually
        self._changed_s = -math.inf  # when one of them did last
        self._trial: Trial | None = None
        self._refused: dict[tuple[str, Knob], tuple[float, float]] = {}  # until when, and for how long
        self._since: Reading | None = None  # when the running settings began
        self._running: frozenset[tuple[str, str]] = frozenset()  # who was there, of those that do something
        self._narrowed_s = -math.inf  # when the number of simulators that run at once was changed
        self._updates: dict[str, tuple[Reading, Reading]] = {}  # per trainer: at its last two updates

    def decide(self, reading: Reading) -> Move | None:
        """Return the knob to turn now, if any; the caller turns it before the next call."""
        self.look_s = min(SLOWEST_LOOK_S, 2 * self.look_s)
        self._note_services(reading)
        self._note_updates(reading)
        for gen in reading.gens:
            self._watch(reading, gen)
        if self._trial is not None:
            return self._judge(reading)
        for gen in reading.gens:
            if len(gen.latencies_s) >= LEAST_LATENCIES:
                move = self._partition(reading, gen) or self._batching(reading, gen) or self._cores(reading)
                if move is not None:
                    return self._turn(reading, move)
        return None

    # What is known.

    def _note_services(self, reading: Reading) -> None:
        """Begin to measure anew when others run than before: what is counted is not the same any more."""
        running = {("gen", gen.name) for gen in reading.gens} | {("train", train.name) for train in reading.trains}
        running |= {("sim", sim.name) for sim in reading.sims if sim.num_envs}
        if self._since is None or running != self._running:
            self._running = frozenset(running)
            self._since = reading
            self._trial = None

    def _note_updates(self, reading: Reading) -> None:
        for train in reading.trains:
            _, last = self._updates.get(train.name, (reading, reading))
            if train.name not in self._updates or _of(last, train.name).num_updates < train.num_updates:
                self._updates[train.name] = last, reading

    def _sharing(self, reading: Reading, gen: GenReading) -> Sharing | None:
        """Return how generator and trainer load the device that they share; None if they share none, or not yet."""
        for train in reading.trains:
            if train.gen == gen.name and reading.sm_units and train.name in self._updates:
                before, last = self._updates[train.name]
                return sharing(before, last, gen.name, train.name)
        return None

    def _watch(self, reading: Reading, gen: GenReading) -> None:
        """Notice when service or latencies are no longer those that the settings were made for."""
        if len(gen.latencies_s) < LEAST_LATENCIES:
            return
        shared = self._sharing(reading, gen)
        slower = shared.gen_slowdown if shared is not None else 1.0
        num_envs = sum(sim.num_envs for sim in reading.of(gen))
        small_s, large_s = gen.fixed_s + gen.per_request_s, gen.fixed_s + gen.per_request_s * num_envs
        regime = _Regime(small_s / slower, large_s / slower, float(gen.latencies_s.mean()))
        known = self._regimes.setdefault(gen.name, regime)
        last, usual = self._seen.get(gen.name, (regime, 0.0))
        self._seen[gen.name] = regime, usual + NEWEST_CHANGE * (min(regime.distance(last), 1.0) - usual)
        if regime.distance(known) < NEW_REGIME + SCATTER * usual:
            return
        self._regimes[gen.name] = regime
        if self._settling(reading):
            return
        self._changed_s = reading.now_s
        self.look_s = min(self.look_s, LOOK_AGAIN_S)
        self._since = reading
        self._trial = None  # what was before is no judge
        # What batches take alone is a guess while they share a device: a division that was bad may look like news.
        self._refused = {key: wait for key, wait in self._refused.items() if key[1] == "partition"}

    def _settling(self, reading: Reading) -> bool:
        """Whether the device was divided anew of late: that changes what batches take, and is no new regime."""
        if self._trial is not None and self._trial.move.knob == "partition":
            return True
        return any(self._updates[train.name][0].gen_units != reading.gen_units for train in reading.trains)

    # Trials.

    def _turn(self, reading: Reading, move: Move) -> Move:
        assert self._since is not None
        self._trial = Trial.of(move, self._since, reading)
        self._since = reading
        self.moves.append(move)
        return move

    def _judge(self, reading: Reading) -> Move | None:
        trial = self._trial
        assert trial is not None
        if not trial.ready(reading):
            return None
        self._trial = None
        if trial.paid(DEAD_BAND):
            return None
        move = trial.move
        back = Move(reading.now_s, move.service, move.knob, move.new, move.old, f"taken back: {trial.result()}", 0.0)
        key = move.service, move.knob
        wait_s = 2 * self._refused.get(key, (0.0, REFUSED_S / 2))[1]
        self._refused[key] = reading.now_s + wait_s, wait_s
        self._since = reading
        self.moves.append(back)
        return back

    def _allowed(self, reading: Reading, service: str, knob: Knob) -> bool:
        return knob not in reading.pinned and reading.now_s >= self._refused.get((service, knob), (0.0, 0.0))[0]

    def _worth(self, reading: Reading, gain: float) -> bool:
        recent = sum(move.time_s > max(reading.now_s - FEW_S, self._changed_s) for move in self.moves)
        return bool(gain > DEAD_BAND * 2.0**recent)  # it may have to be taken back

    # Knobs.

    def _partition(self, reading: Reading, gen: GenReading) -> Move | None:
        """Divide the device anew where generation and training together are the limit: a guess that must be judged."""
        shared, stretch = self._sharing(reading, gen), self._stretch(reading)
        if shared is None or not stretch.judges or not self._allowed(reading, "machine", "partition"):
            return None
        batch = gen.num_requests / max(gen.num_batches, 1)
        ceiling = stretch.simulation_limit(gen)
        rates = {units: min(ceiling, shared.limit(batch, units)) for units in gen_units(reading.sm_units)}
        best = max(rates, key=rates.__getitem__)
        gain = rates[best] / rates.get(reading.gen_units, min(ceiling, shared.limit(batch, reading.gen_units))) - 1.0
        if best == reading.gen_units or not self._worth(reading, gain):
            return None
        reason = (
            f"{gain:+.0%} forecast: a decision needs the device for {1e3 * shared.gen_s(batch):.3g} ms of generation "
            f"and {1e3 * shared.train_s:.3g} ms of training"
        )
        return Move(reading.now_s, "machine", "partition", reading.gen_units, best, reason, gain)

    def _cores(self, reading: Reading) -> Move | None:
        """Let other numbers of simulators run at once, or promise the cores anew."""
        stretch, move = self._stretch(reading), None
        if self._allowed(reading, "machine", "concurrency"):
            move = all_again(stretch) if self._narrowed_s < self._changed_s else None
            move = move or fewer(stretch)
        if move is not None:
            self._narrowed_s = reading.now_s
        elif stretch.seconds >= CORES_S and self._allowed(reading, "machine", "cores"):
            move = promise(stretch)
        return move

    def _batching(self, reading: Reading, gen: GenReading) -> Move | None:
        num_envs = sum(sim.num_envs for sim in reading.of(gen))
        fixed = "batching" in gen.pinned
        if num_envs < 2 or (fixed and len(gen.lanes) < 2) or not self._allowed(reading, gen.name, "batching"):
            return None
        old = gen.batching
        if gen.size_spread < LEAST_SPREAD:
            half = old._replace(threshold=1, max_size=max(1, num_envs // 2))
            reason = "batches are all alike: what costs is unknown"
            return (
                Move(reading.now_s, gen.name, "batching", old, half, reason, 0.0) if half != old and not fixed else None
            )
        stretch = self._stretch(reading)
        limit = stretch.limit(gen, self._sharing(reading, gen))
        other_lanes = stretch.judges and self._allowed(reading, gen.name, "lanes")
        found = plan(gen, num_envs, limit, other_lanes=other_lanes)
        if found.rule == old or not self._worth(reading, found.gain):
            return None
        reason = (
            f"{found.gain:+.0%} forecast: N {num_envs}, batch {1e3 * gen.fixed_s:.3g} + {1e3 * gen.per_request_s:.3g} n"
            f" ms, latency {1e3 * float(gen.latencies_s.mean()):.3g} ms"
        )
        knob: Knob = "batching" if found.rule.num_lanes == old.num_lanes else "lanes"
        return Move(reading.now_s, gen.name, knob, old, found.rule, reason, found.gain)

    def _stretch(self, reading: Reading) -> Stretch:
        assert self._since is not None
        return Stretch(self._since, reading)


def _of(reading: Reading, name: str) -> TrainReading:
    return next(train for train in reading.trains if train.name == name)
