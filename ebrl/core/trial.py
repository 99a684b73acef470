"""`Trial`: one move of the tuner, on its way to being judged by what was done per second before and after it.

A move may come before enough was done to judge it by, as the first ones do: a cold start cannot wait. Then it is held
against its forecast: half of the gain must have come, as far as what is known by the end allows that much. Where it
falls short the setting before is tried, in a trial as any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebrl.core.readings import Move, Reading

ROUNDS = 4  # environment steps per environment that judge a move, where nothing is trained
UPDATES = 2  # updates that judge it, where something is
SHORTEST_S = 0.5  # for which it is watched at least
KEPT = 0.5  # part of the gain that was forecast which must have come, where the setting before was not measured
PATIENCE_S = 30.0  # without training: after which it is judged by what there is


@dataclass(slots=True)
class Trial:
    """A move that is being judged.

    Attributes:
        move: What was turned.
        rate_before: What was done per second, or was to be done by the forecast.
        num_before: Portions in which that was measured.
        turned: What had been done when it was turned.
        gen: Generator whose decisions are counted; empty: all that is done.
        promised: Whether the rate before is a forecast.
        began: Where the measurement began; None: not yet.
        ended: Where it ended; None: not yet.
    """

    move: Move
    rate_before: float
    num_before: int
    turned: tuple[float, float, int]
    gen: str = ""
    promised: bool = False
    began: tuple[float, float, int] | None = None
    ended: tuple[float, float, int] | None = None

    @classmethod
    def of(cls, move: Move, since: Reading, now: Reading) -> Trial | None:
        """Begin; None if too little was measured since the reading `since`, and nothing was forecast."""
        (done, then_s, portions), (done_now, now_s, portions_now) = since.progress(), now.progress()
        if portions_now - portions >= enough(now) and now_s > then_s and bool(since.trains) == bool(now.trains):
            return cls(move, (done_now - done) / (now_s - then_s), portions_now - portions, now.progress())
        if move.rate:
            promise = move.rate * (1 + KEPT * move.gain) / (1 + move.gain)
            return cls(move, promise, enough(now, move.service), now.progress(move.service), move.service, True)
        return None

    def reversed(self, back: Move, now: Reading) -> Trial:
        """Return the trial of the setting before, when that is tried in place of the one that was judged."""
        _, after = self.rates()
        return Trial(back, after, self.num_after, now.progress(self.gen), self.gen)

    def ready(self, reading: Reading) -> bool:
        """Whether enough was measured by now."""
        progress, trains = reading.progress(self.gen), reading.trainers(self.gen)
        if self.began is None:
            # An update that ran when the knob was turned belongs to neither side.
            if trains and progress[2] == self.turned[2]:
                return False
            self.began = progress if trains else self.turned
        num, seconds = progress[2] - self.began[2], progress[1] - self.began[1]
        if num < min(enough(reading, self.gen), self.num_before):
            if trains or seconds <= PATIENCE_S:
                return False
        elif seconds < SHORTEST_S:
            return False
        self.ended = progress
        return True

    @property
    def restoring(self) -> bool:
        """Whether the move goes back to what was before one that fell short of its forecast."""
        return bool(self.gen) and not self.promised

    @property
    def num_after(self) -> int:
        """Portions that were measured."""
        assert self.began is not None
        return (self.ended or self.began)[2] - self.began[2]

    def rates(self) -> tuple[float, float]:
        """Return what was done per second before and after."""
        assert self.began is not None
        ended = self.ended or self.began
        return self.rate_before, (ended[0] - self.began[0]) / max(ended[1] - self.began[1], 1e-9)

    def paid(self, dead_band: float, most: float = math.inf) -> bool:
        """Whether the rate is not lower than before, as far as can be told.

        Where what can be told is not enough the model is believed, which has chosen what it forecast: so what was there
        before that must be better.

        Args:
            dead_band: Relative difference that is none.
            most: Per second, where it is known by now that no forecast could be better.
        """
        before, after = self.rates()
        if self.restoring:
            return after > before
        noise = 2.0 * math.sqrt(1.0 / max(self.num_after, 1) + 1.0 / max(self.num_before, 1))
        return after >= min(before, most) * (1.0 - max(dead_band, min(noise, 0.05)))

    def result(self) -> str:
        """Return both rates, for people."""
        before, after = self.rates()
        return f"{after:.4g}/s after it, {before:.4g}/s {'promised' if self.promised else 'before'}"


def enough(reading: Reading, gen: str = "") -> int:
    """Return the portions of progress that judge a setting; of one generator, if it is named."""
    if reading.trainers(gen):
        return UPDATES
    return ROUNDS * max(16, sum(sim.num_envs for sim in reading.sims if gen in ("", sim.gen)))
