"""How many simulator calls run at once: fewer, where those that run together wait for one another.

Calls that hold the interpreter lock, or another one, take a core each and use one between them: the cores that they
hold up are what generation and training lack, and their wake-ups cost time too. What shows it is the part of their
time in which they compute. Calls that wait for something outside look the same, and for them fewer are worse; so a
smaller number is tried only where all that may run do run, and a trial decides.
"""

from __future__ import annotations

from ebrl.core.readings import CoreReading, Move, Reading
from ebrl.core.stretch import Stretch

BUSY = 0.8  # part of what may run that runs, on average, above which the number matters
ALONE = 0.6  # part of it that computes, below which they wait for one another


def fewer(stretch: Stretch) -> Move | None:
    """Let fewer run at once: as many as compute now, or half, whichever is more, for calls that wait lose as much."""
    sims, claim = [sim for sim in stretch.now.sims if sim.num_envs], _claim(stretch)
    busy_s, ever_s = stretch.simulated(sims), sum(sim.busy_s for sim in sims)
    if claim is None or not stretch.judges or busy_s <= 0.0:
        return None
    running, part = busy_s / stretch.seconds, sum(sim.cpu_part * sim.busy_s for sim in sims) / ever_s
    if claim.ceiling < 2 or running < BUSY * claim.ceiling or running * part > ALONE * claim.ceiling:
        return None
    reason = f"{running:.2f} run at once and compute in {part:.0%} of their time: they wait for one another"
    return _move(stretch, claim, max(round(running * part), claim.ceiling // 2), reason)


def all_again(stretch: Stretch, chosen: Reading | None, changed_s: float) -> Move | None:
    """Let all run at once, where another number was chosen in another regime or for other simulators.

    Args:
        stretch: What was done of late.
        chosen: Who was there when the number was last changed; None: it never was.
        changed_s: When the regime began.
    """
    claim = _claim(stretch)
    if claim is None or chosen is None or claim.ceiling >= stretch.now.num_cores:
        return None
    known = {sim.name for sim in chosen.sims}
    if chosen.now_s >= changed_s and all(sim.name in known for sim in stretch.now.sims if sim.num_envs):
        return None
    return _move(stretch, claim, stretch.now.num_cores, "their number was chosen for others, or other times")


def _claim(stretch: Stretch) -> CoreReading | None:
    return next((core for core in stretch.now.cores if core.kind == "sim"), None)


def _move(stretch: Stretch, claim: CoreReading, new: int, reason: str) -> Move:
    return Move(stretch.now.now_s, "machine", "concurrency", claim.ceiling, new, reason, 0.0)
