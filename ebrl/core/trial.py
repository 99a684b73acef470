"""`Trial`: one move of the tuner, on its way to being judged by what was done per second before and after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebrl.core.readings import Move, Reading

ROUNDS = 4  # environment steps per environment that judge a move, where nothing is trained
UPDATES = 2  # updates that judge it, where something is
SHORTEST_S = 0.5  # for which it is watched at least
PATIENCE_S = 30.0  # without training: after which it is judged by what there is


@dataclass(slots=True)
class Trial:
    """A move that is being judged.

    Attributes:
        move: What was turned.
        rate_before: What was done per second.
        num_before: Portions in which that was measured.
        began: Where the measurement began; None: not yet.
        ended: Where it ended; None: not yet.
    """

    move: Move
    rate_before: float
    num_before: int
    turned: tuple[float, float, int]
    began: tuple[float, float, int] | None = None
    ended: tuple[float, float, int] | None = None

    @classmethod
    def of(cls, move: Move, since: Reading, now: Reading) -> Trial | None:
        """Begin; None if too little was measured since the reading `since` for a fair judgement."""
        (done, then_s, portions), (done_now, now_s, portions_now) = since.progress, now.progress
        if portions_now - portions < enough(now) or now_s <= then_s or bool(since.trains) != bool(now.trains):
            return None
        return cls(move, (done_now - done) / (now_s - then_s), portions_now - portions, now.progress)

    def ready(self, reading: Reading) -> bool:
        """Whether enough was measured by now."""
        progress = reading.progress
        if self.began is None:
            # An update that ran when the knob was turned belongs to neither side.
            if reading.trains and progress[2] == self.turned[2]:
                return False
            self.began = progress if reading.trains else self.turned
        num, seconds = progress[2] - self.began[2], progress[1] - self.began[1]
        if num < min(enough(reading), self.num_before):
            if reading.trains or seconds <= PATIENCE_S:
                return False
        elif seconds < SHORTEST_S:
            return False
        self.ended = progress
        return True

    def rates(self) -> tuple[float, float]:
        """Return what was done per second before and after."""
        assert self.began is not None
        ended = self.ended or self.began
        return self.rate_before, (ended[0] - self.began[0]) / max(ended[1] - self.began[1], 1e-9)

    def paid(self, dead_band: float) -> bool:
        """Whether the rate is not lower than before, as far as can be told."""
        before, after = self.rates()
        assert self.began is not None
        num = (self.ended or self.began)[2] - self.began[2]
        noise = 2.0 * math.sqrt(1.0 / max(num, 1) + 1.0 / max(self.num_before, 1))
        return after >= before * (1.0 - max(dead_band, min(noise, 0.05)))

    def result(self) -> str:
        """Return both rates, for people."""
        before, after = self.rates()
        return f"{after:.4g}/s after it, {before:.4g}/s before"


def enough(reading: Reading) -> int:
    """Return the portions of progress that judge a setting."""
    if reading.trains:
        return UPDATES
    return ROUNDS * max(16, sum(sim.num_envs for sim in reading.sims))
