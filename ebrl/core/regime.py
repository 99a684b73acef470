"""`Regime`: whether what batches and simulators of a generator take is still what the settings were made for. Pure.

Times scatter from one look to the next, on a busy machine by as much as a change of load would change them. So a
regime knows how much they usually do: one look must be further off than that by far, a few looks together by less.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

NEW = math.log(1.35)  # change of a time, as a logarithm, beyond what it scatters
SCATTER = 3.0  # times the usual change from one look to the next, for one look
FEW = 3  # looks whose mean may be off by that usual change once
NEWEST = 0.1  # weight of the newest change in it
ANCHOR = 8  # first looks of a regime whose mean is what later ones are compared with
SHORT_S = 1e-6  # below it, times are all alike


class Regime:
    """Of one generator: some times, at every look the same ones in the same order.

    Attributes:
        scatter: How much they usually change from one look to the next: the largest logarithm of a ratio.
    """

    def __init__(self) -> None:
        self.scatter = 0.0
        self._known: NDArray[np.float64] | None = None  # logarithms, as all below; None: the next look says
        self._num = 0  # looks in it
        self._last: NDArray[np.float64] | None = None
        self._recent: deque[NDArray[np.float64]] = deque(maxlen=FEW)

    def settle(self) -> None:
        """What is seen is on its way to something else by itself: what comes then is no new regime."""
        self._known = self._last = None

    def changed(self, *times_s: float) -> bool:
        """Take a look; whether a new regime has begun.

        Args:
            times_s: In seconds.
        """
        logs = np.log(np.maximum(times_s, SHORT_S))
        known, usual = self._known, self.scatter
        if self._last is not None:
            self.scatter += NEWEST * (min(_distance(logs, self._last), 1.0) - usual)
        self._last = logs
        if known is None:
            self._begin(logs)
            return False
        self._recent.append(logs)
        together = len(self._recent) == FEW and _distance(np.mean(self._recent, 0), known) >= NEW + usual
        if together or _distance(logs, known) >= NEW + SCATTER * usual:
            self._begin(logs)
            return True
        if self._num < ANCHOR:
            self._num += 1
            self._known = known + (logs - known) / self._num
        return False

    def _begin(self, logs: NDArray[np.float64]) -> None:
        self._known, self._num = logs, 1
        self._recent.clear()


def _distance(some: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the largest of the logarithms of their ratios."""
    return float(np.abs(some - others).max())
