"""How the cores are promised to the stages that contend for them: in proportion to what each needs of them.

A pool lends whatever is free, so that a promise only says who is next. In a pipeline whose stages wait for each other
every stage must get what it needs for one rate of decisions, which is what it has used of late. Generation counts
double: it is short, and each of its batches sets many simulators free.
"""

from __future__ import annotations

from collections.abc import Mapping

from ebrl.core.readings import Move
from ebrl.core.stretch import Stretch

LEAST = 0.05  # of the cores, so that a stage which was idle is not forgotten
WEIGHTS = {"gen": 2.0}
BUSY = 0.8  # part of the cores in use above which stages contend
CHANGE = 0.25  # relative change of a promise that is worth a move


def split(used: Mapping[str, float], units: int) -> dict[str, float]:
    """Return the promise to each stage.

    Args:
        used: Core-seconds of late, by stage.
        units: Cores.
    """
    wanted = {kind: seconds * WEIGHTS.get(kind, 1.0) for kind, seconds in used.items()}
    total = sum(wanted.values())
    if total <= 0:
        return {kind: units / len(used) for kind in used}
    parts = {kind: max(LEAST, seconds / total) for kind, seconds in wanted.items()}
    whole = sum(parts.values())
    return {kind: units * part / whole for kind, part in parts.items()}


def differs(old: Mapping[str, float], new: Mapping[str, float], band: float = CHANGE) -> bool:
    """Whether promises have changed enough to be made anew: relatively, and by more than the least promise."""
    least = LEAST * sum(new.values())
    return any(abs(new[kind] - old[kind]) > max(band * old[kind], least) for kind in new)


def promise(stretch: Stretch, caution: float = 1.0) -> Move | None:
    """Promise the cores anew where stages contend for them and need other parts than they were promised.

    Args:
        stretch: Whole cycles of all that takes turns.
        caution: How many times the usual change it takes.
    """
    used, num_cores = stretch.used(), stretch.now.num_cores
    if len(used) < 2 or sum(used.values()) < BUSY * num_cores * stretch.seconds:
        return None
    old = {core.kind: core.rate for core in stretch.now.cores}
    new = {kind: round(rate, 3) for kind, rate in split(used, num_cores).items()}
    if not differs(old, new, caution * CHANGE):
        return None
    reason = "used of late: " + ", ".join(f"{kind} {seconds / stretch.seconds:.2f}" for kind, seconds in used.items())
    return Move(stretch.now.now_s, "machine", "cores", old, new, reason, 0.0)
