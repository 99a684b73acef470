"""How long something takes that may not happen: time to a target, and the ratio of two such times with an interval.

Chosen before any two schedules were compared:

- The time of a run is that of the first evaluation at the target which the next one confirms.
- A run that does not get there is censored, and counted. What is compared is the **restricted mean**: the mean of the
  times up to the end of the baseline's run of the same seed. A run of the baseline that fails counts with its end,
  which is too early; one of ours counts with the end of the baseline's run, which is later than its own. Both are
  against us.
- Why not the median: of 20 runs it rests on one or two, and its standard error is 1.25 times that of the mean where
  logarithms of times are normal. Medians are printed beside it.
- The interval is a percentile bootstrap over seeds, which stay paired: both schedules of a seed are drawn together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.report import Interval, interval


def sustained(values: Sequence[float], target: float) -> int | None:
    """Return the place of the first value that reaches the target and is followed by another; None: there is none.

    Example:
        >>> sustained([1, 5, 2, 5, 5], 5)
        3
    """
    reached = [min(pair) >= target for pair in itertools.pairwise(values)]
    return reached.index(True) if any(reached) else None


def restricted(times: Sequence[float | None], ends: Sequence[float]) -> NDArray[np.float64]:
    """Return times up to the ends; None: not reached."""
    return np.array([end if time is None else min(time, end) for time, end in zip(times, ends, strict=True)])


def ratio(base: NDArray[np.float64], ours: NDArray[np.float64], seed: int = 0) -> Interval:
    """Return ``mean(base) / mean(ours)`` of paired numbers, with its interval.

    Args:
        base: ``[num]`` of the baseline.
        ours: ``[num]`` of the same seeds.
        seed: Of the bootstrap.
    """
    return interval(lambda ones, others: ones.mean() / others.mean(), base, ours, seed=seed)
