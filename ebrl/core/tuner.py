"""`Tuner`: which knob to turn next, from statistics alone. Pure: equal readings give equal decisions; reads no clock.

The model proposes (`ebrl.core.throughput`), measurement decides: after a move the rate is compared with the one before
(`ebrl.core.trial`), and the move is taken back where it did not pay. One knob is turned at a time; small gains are not
worth a move; a value that was refused is left alone for a while. When service or latencies have become different
ones, what was measured before is no judge, and the tuner looks often again, as after the start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from ebrl.core.batching import plan
from ebrl.core.concurrency import all_again, fewer
from ebrl.core.readings import GenReading, Knob, Move, Reading, TrainReading
from ebrl.core.regime import Regime
from ebrl.core.sharing import Sharing, gen_units, sharing
from ebrl.core.split import promise
from ebrl.core.stretch import Stretch
from ebrl.core.trial import Trial

FIRST_LOOK_S = 0.01  # after the start; then twice as long each time
SLOWEST_LOOK_S = 1.0
LOOK_AGAIN_S = 0.1  # after the regime has changed
DEAD_BAND = 0.02  # relative gain that is worth a move; twice as much for each one of late
SCATTERED = 0.1  # part of what times scatter that a forecast does, and that is not worth one either
FEW_S = 60.0  # what was moved within it makes the next move less worth
LEAST_LATENCIES = 32
USUAL_PART = 0.95  # of the latencies: the rest is their tail
LEAST_SPREAD = 0.02  # relative spread of batch sizes below which fixed and other cost cannot be told apart
CORES_S = 10.0  # how long the use of cores is watched before they are promised anew
REFUSED_S = 60.0  # how long a value that did not pay is left alone; twice as long each time


class Tuner:
    """Decides; the caller turns the knobs.

    Attributes:
        look_s: Seconds until it should be asked again.
        moves: The latest ones, oldest first.
    """

    def __init__(self) -> None:
        self.look_s = FIRST_LOOK_S
        self.moves: deque[Move] = deque(maxlen=256)
        self._regimes: dict[str, Regime] = {}
        self._changed_s = -math.inf  # when one of them did last
        self._news_s = -math.inf  # when one of them did after a while without: phases that alternate are no news
        self._trial: Trial | None = None
        self._refused: dict[tuple[str, Knob], tuple[float, float]] = {}  # until when, and for how long
        self._since: Reading | None = None  # when the running settings began
        self._counts: dict[tuple[str, str], int] = {}  # what was done by whoever does something
        self._narrowed: Reading | None = None  # when the number of simulators that run at once was last changed
        self._updates: dict[str, tuple[Reading, Reading]] = {}  # per trainer: at its last two updates
        self._cycle: dict[str, Reading] = {}  # per trainer: at its first update with the running settings

    def decide(self, reading: Reading) -> Move | None:
        """Return the knob to turn now, if any; the caller turns it before the next call."""
        self.look_s = min(SLOWEST_LOOK_S, 2 * self.look_s)
        self._note_services(reading)
        self._note_updates(reading)
        for gen in reading.gens:
            self._watch(reading, gen)
        if self._trial is not None:
            return self._judge(reading)
        assert self._since is not None
        stretch = Stretch(self._since, reading)
        for gen in reading.gens:
            if len(gen.latencies_s) >= LEAST_LATENCIES:
                move = self._partition(stretch, gen) or self._batching(stretch, gen) or self._cores(stretch)
                if move is not None:
                    return self._turn(reading, move)
        return None

    # What is known.

    def _note_services(self, reading: Reading) -> None:
        """Begin to measure anew when others run than before, or one has: what is counted is not the same any more."""
        counts = {("gen", gen.name): gen.num_requests for gen in reading.gens}
        counts |= {("train", train.name): train.num_updates for train in reading.trains}
        counts |= {("sim", sim.name): sim.num_steps for sim in reading.sims if sim.num_envs}
        same = counts.keys() == self._counts.keys() and all(counts[key] >= num for key, num in self._counts.items())
        self._counts = counts
        if self._since is None or not same:
            self._since = reading
            self._trial = None

    def _note_updates(self, reading: Reading) -> None:
        for train in reading.trains:
            _, last = self._updates.get(train.name, (reading, reading))
            done = _of(last, train.name).num_updates
            if train.name not in self._updates or train.num_updates < done:  # or it has begun anew
                self._updates[train.name] = reading, reading
            elif train.num_updates > done:
                self._updates[train.name] = last, reading
                assert self._since is not None
                if train.name not in self._cycle or self._cycle[train.name].now_s < self._since.now_s:
                    self._cycle[train.name] = reading

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
        regime = self._regimes.setdefault(gen.name, Regime())
        if self._settling(reading, gen):
            regime.settle()
            return
        # A latency counts as part of a round, since beside long batches its changes change nothing; and without its
        # tail, since how many of the rare resets are in the sample says nothing.
        middle = np.sort(gen.latencies_s)[: math.ceil(USUAL_PART * len(gen.latencies_s))]
        round_s = float(middle.mean()) + (small_s + large_s) / 2 / slower
        if not regime.changed(small_s / slower, large_s / slower, round_s):
            return
        if reading.now_s - self._changed_s >= FEW_S:
            self._news_s = reading.now_s
        self._changed_s = reading.now_s
        self.look_s = min(self.look_s, LOOK_AGAIN_S)
        self._since = reading
        self._trial = None  # what was before is no judge
        # What batches take alone is a guess while they share a device: a division that was bad may look like news.
        self._refused = {key: wait for key, wait in self._refused.items() if key[1] == "partition"}

    def _settling(self, reading: Reading, gen: GenReading) -> bool:
        """Whether something was turned of late that changes by itself what is measured, which is no new regime then.

        Another division of the device changes what batches take, and another number of simulators how long they wait
        for each other, until all latencies that are known are newer.
        """
        if self._trial is not None and self._trial.move.knob in ("partition", "concurrency"):
            return True
        if self._narrowed is not None and Stretch(self._narrowed, reading).served(gen)[0] < len(gen.latencies_s):
            return True
        return any(self._updates[train.name][0].gen_units != reading.gen_units for train in reading.trains)

    # Trials.

    def _turn(self, reading: Reading, move: Move) -> Move:
        assert self._since is not None
        self._trial = Trial.of(move, self._since, reading)
        return self._moved(reading, move)

    def _moved(self, reading: Reading, move: Move) -> Move:
        if move.knob == "concurrency":
            self._narrowed = reading
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
        return self._moved(reading, back)

    def _allowed(self, reading: Reading, service: str, knob: Knob) -> bool:
        return knob not in reading.pinned and reading.now_s >= self._refused.get((service, knob), (0.0, 0.0))[0]

    def _worth(self, reading: Reading, gen: GenReading, gain: float) -> bool:
        recent = sum(move.time_s > max(reading.now_s - FEW_S, self._news_s) for move in self.moves)
        band = DEAD_BAND + SCATTERED * self._regimes[gen.name].scatter
        return bool(gain > band * 2.0**recent)  # it may have to be taken back

    # Knobs.

    def _partition(self, stretch: Stretch, gen: GenReading) -> Move | None:
        """Divide the device anew where generation and training together are the limit: a guess that must be judged."""
        reading = stretch.now
        shared = self._sharing(reading, gen)
        if shared is None or not stretch.judges or not self._allowed(reading, "machine", "partition"):
            return None
        batch = gen.num_requests / max(gen.num_batches, 1)
        ceiling = stretch.simulation_limit(gen)
        rates = {units: min(ceiling, shared.limit(batch, units)) for units in gen_units(reading.sm_units)}
        best = max(rates, key=rates.__getitem__)
        gain = rates[best] / rates.get(reading.gen_units, min(ceiling, shared.limit(batch, reading.gen_units))) - 1.0
        if best == reading.gen_units or not self._worth(reading, gen, gain):
            return None
        reason = (
            f"{gain:+.0%} forecast: a decision needs the device for {1e3 * shared.gen_s(batch):.3g} ms of generation "
            f"and {1e3 * shared.train_s:.3g} ms of training"
        )
        return Move(reading.now_s, "machine", "partition", reading.gen_units, best, reason, gain)

    def _cores(self, stretch: Stretch) -> Move | None:
        """Let other numbers of simulators run at once, or promise the cores anew."""
        move = None
        if self._allowed(stretch.now, "machine", "concurrency"):
            move = all_again(stretch, self._narrowed, self._changed_s) or fewer(stretch)
        if move is None and stretch.judges and self._allowed(stretch.now, "machine", "cores"):
            cycles = _whole_cycles(stretch, self._cycle, self._updates)
            recent = sum(m.knob == "cores" and m.time_s > stretch.now.now_s - FEW_S for m in self.moves)
            if cycles is not None and cycles.seconds >= CORES_S:
                move = promise(cycles, 2.0**recent)
        return move

    def _batching(self, stretch: Stretch, gen: GenReading) -> Move | None:
        reading = stretch.now
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
        limit = stretch.limit(gen, self._sharing(reading, gen))
        other_lanes = stretch.judges and self._allowed(reading, gen.name, "lanes")
        found = plan(gen, num_envs, limit, other_lanes=other_lanes)
        if found.rule == old or not self._worth(reading, gen, found.gain):
            return None
        reason = (
            f"{found.gain:+.0%} forecast: N {num_envs}, batch {1e3 * gen.fixed_s:.3g} + {1e3 * gen.per_request_s:.3g} n"
            f" ms, latency {1e3 * float(gen.latencies_s.mean()):.3g} ms"
        )
        knob: Knob = "batching" if found.rule.num_lanes == old.num_lanes else "lanes"
        return Move(reading.now_s, gen.name, knob, old, found.rule, reason, found.gain)


def _of(reading: Reading, name: str) -> TrainReading:
    return next(train for train in reading.trains if train.name == name)


def _whole_cycles(
    stretch: Stretch, began: Mapping[str, Reading], updates: Mapping[str, tuple[Reading, Reading]]
) -> Stretch | None:
    """Return whole cycles of the first trainer within a stretch, as their parts need the cores for different things."""
    if not stretch.now.trains:
        return stretch
    name = stretch.now.trains[0].name
    first, last = began.get(name, stretch.now), updates[name][1]
    return Stretch(first, last) if stretch.since.now_s <= first.now_s < last.now_s else None
