"""Meters: latency quantiles, the rate of arrivals, and utilisation; time is an argument, no clock is read here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import exp, expm1, nan

import numpy as np
from numpy.typing import NDArray

from ebrl.core.errors import ConfigError

PRIOR_SAMPLES = 32  # that a warm start counts as


class Latencies:
    """The last samples of one latency, whatever their order.

    Cheap to fill and dear to read (some 50 us): it is filled per call and read per decision of a tuner.

    Example:
        >>> latencies = Latencies()
        >>> latencies.extend([0.03, 0.01, 0.02])
        >>> latencies.add(0.04)
        >>> latencies.quantile(0.5), latencies.mean, len(latencies)
        (0.025, 0.025, 4)
    """

    __slots__ = ("_ring",)

    def __init__(self, size: int = 512) -> None:
        """Make an empty meter.

        Args:
            size: Samples that are kept, the newest ones.

        Raises:
            ConfigError: `size` is below 1.
        """
        if size < 1:
            raise ConfigError(f"Latencies.size must be at least 1, got {size}")
        self._ring: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, seconds: float) -> None:
        """Take one sample."""
        self._ring.append(seconds)

    def extend(self, seconds: Iterable[float]) -> None:
        """Take many, oldest first."""
        self._ring.extend(seconds)

    def samples(self) -> NDArray[np.float64]:
        """Return a copy, sorted."""
        samples = np.fromiter(self._ring, np.float64, len(self._ring))
        samples.sort()
        return samples

    def quantile(self, q: float) -> float:
        """Seconds below which a share `q` of the samples lies, as `numpy.quantile` has it; NaN without samples."""
        return float(np.quantile(self.samples(), q)) if self._ring else nan

    @property
    def mean(self) -> float:
        """Seconds; NaN without samples."""
        return float(self.samples().mean()) if self._ring else nan

    @property
    def cv(self) -> float:
        """Standard deviation over mean; 0 where everything took no time, NaN without samples."""
        if not self._ring:
            return nan
        samples = self.samples()  # sorted, so that sums do not depend on the order of arrival
        mean = samples.mean()
        return float(samples.std() / mean) if mean else 0.0

    def warm_start(self, quantiles_s: Sequence[float], mean_s: float) -> None:
        """Begin with a distribution from elsewhere; only while empty.

        It counts as `PRIOR_SAMPLES` samples, which leave as new ones fill the ring.

        Args:
            quantiles_s: At equal distances from 0 to 1, at least two.
            mean_s: Of the distribution; the slowest sample is chosen such that all have it, where it can.
        """
        assert not self._ring, "a warm start must come before the first sample"
        known_at = np.linspace(0.0, 1.0, len(quantiles_s))
        samples = np.interp((np.arange(PRIOR_SAMPLES) + 0.5) / PRIOR_SAMPLES, known_at, quantiles_s)
        rest_s = mean_s * PRIOR_SAMPLES - float(samples[:-1].sum())
        samples[-1] = np.clip(rest_s, samples[-2], quantiles_s[-1])
        self._ring.extend(samples.tolist())


class Rate:
    """Arrivals per second, the recent ones weighted more: ``exp(-age / window)``.

    The estimate is the weighted number of arrivals over the weighted time since the start, so it is unbiased from the
    beginning. The first `add` starts it; what arrives in that moment is not counted, as the time before is not known.

    Example:
        >>> rate = Rate(window_s=10.0)
        >>> for second in range(101):
        ...     rate.add(float(second), 4)
        >>> round(rate.per_s(100.5), 2)
        4.0
    """

    __slots__ = ("_count", "_last_s", "_num", "_start_s", "_window_s")

    def __init__(self, window_s: float = 10.0) -> None:
        """Make a meter.

        Args:
            window_s: Age at which an arrival counts 1/e of a new one.

        Raises:
            ConfigError: `window_s` is not above 0.
        """
        self._window_s = _checked(window_s, "Rate")
        self._start_s: float | None = None
        self._last_s = 0.0
        self._num = 0.0  # weighted, as of the last arrival
        self._count = 0  # as last read

    def add(self, time_s: float, num: int = 1) -> None:
        """Count arrivals.

        Args:
            time_s: When; never before the last one.
            num: How many came then; 0 starts the meter.
        """
        if self._start_s is None:
            self._start_s = self._last_s = time_s
            return
        self._num = self._num * exp((self._last_s - time_s) / self._window_s) + num
        self._last_s = time_s

    def read(self, time_s: float, count: int) -> None:
        """Take a counter instead: what has come since the last reading is taken to have come evenly.

        The first one is the start; a second one in the same moment is put off to the next.

        Args:
            time_s: When; never before the last one.
            count: Arrivals so far.
        """
        if self._start_s is None:
            self._start_s = self._last_s = time_s
            self._count = count
            return
        elapsed_s = time_s - self._last_s
        if elapsed_s <= 0.0:
            return
        kept, weight = _fading(elapsed_s, self._window_s)
        self._num = self._num * kept + (count - self._count) * weight
        self._last_s, self._count = time_s, count

    def per_s(self, now_s: float) -> float:
        """Arrivals per second as of now, which is not before the last one; 0 while no time has passed."""
        if self._start_s is None or now_s <= self._start_s:
            return 0.0
        weighted_s = -self._window_s * expm1((self._start_s - now_s) / self._window_s)
        return self._num * exp((self._last_s - now_s) / self._window_s) / weighted_s


class Utilisation:
    """Busy seconds over the seconds that there were to be busy in, recent ones weighted more.

    Calls are booked when they end, so a reading may show more than 1 just after a long one.

    Example:
        >>> usage = Utilisation(window_s=10.0)
        >>> for second in range(5):
        ...     usage.read(float(second), busy_s=3.0 * second, capacity=4.0)
        >>> round(usage.value, 3)
        0.75
    """

    __slots__ = ("_available_s", "_busy_s", "_last_busy_s", "_last_s", "_window_s")

    def __init__(self, window_s: float = 10.0) -> None:
        """Make a meter.

        Args:
            window_s: Age at which a second counts 1/e of a new one.

        Raises:
            ConfigError: `window_s` is not above 0.
        """
        self._window_s = _checked(window_s, "Utilisation")
        self._last_s: float | None = None
        self._last_busy_s = 0.0
        self._busy_s = 0.0  # both weighted, as of the last reading
        self._available_s = 0.0

    def read(self, time_s: float, busy_s: float, capacity: float = 1.0) -> None:
        """Take a reading; the first one is the start. A second one in the same moment is put off to the next.

        Args:
            time_s: When; never before the last one.
            busy_s: Seconds of work so far, over all lanes. Where it falls, as when a lane was replaced, nothing counts.
            capacity: Units that could work since the last reading.
        """
        if self._last_s is None:
            self._last_s, self._last_busy_s = time_s, busy_s
            return
        elapsed_s = time_s - self._last_s
        if elapsed_s <= 0.0:
            return
        kept, weight = _fading(elapsed_s, self._window_s)
        worked_s = max(0.0, busy_s - self._last_busy_s)
        self._busy_s = self._busy_s * kept + worked_s * weight
        self._available_s = self._available_s * kept + capacity * elapsed_s * weight
        self._last_s, self._last_busy_s = time_s, busy_s

    @property
    def value(self) -> float:
        """As of the last reading; 0 before the second, or without capacity."""
        return self._busy_s / self._available_s if self._available_s else 0.0


def _fading(elapsed_s: float, window_s: float) -> tuple[float, float]:
    """Return what is left of weights after a time, and the mean weight of what came evenly within it."""
    return exp(-elapsed_s / window_s), -window_s * expm1(-elapsed_s / window_s) / elapsed_s


def _checked(window_s: float, owner: str) -> float:
    if not window_s > 0.0:
        raise ConfigError(f"{owner}.window_s must be above 0, got {window_s}")
    return window_s
