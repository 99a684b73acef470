"""`StageProfile`: what is known of one stage, learned while it runs: time by size and share, quantiles, rate, use.

A stage that serves batches (generation, training) has one profile. A group of environments has three, a
`SimulationProfile`: its steps, its resets, which are one or two orders slower and must not blur them, and its
turn-around. All of it is plain arithmetic on the loop; no clock is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log
from types import MappingProxyType

import numpy as np

from ebrl.core.fit import LinearFit
from ebrl.core.meters import Latencies, Rate, Utilisation

NUM_QUANTILES = 33  # of a record: at 0, 1/32, ..., 1
MAX_SCALING = 4.0  # a share that was never seen is at most so many times faster or slower than the nearest one


@dataclass(frozen=True, slots=True)
class FitRecord:
    """A line that was found at one share; see `LinearFit`.

    Attributes:
        share: Units of the resource that the stage held.
        a_s: Seconds of a call whatever its size.
        b_s: Seconds for each unit of size.
        num: Calls it rests on.
    """

    share: float
    a_s: float
    b_s: float
    num: float


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a file keeps of a stage.

    Attributes:
        name: Of the stage.
        group: It belongs to.
        fits: By share, smallest first.
        mean_s: Of the latencies; 0 where there are none.
        quantiles_s: Of the latencies, at equal distances from 0 to 1; empty where there are none.
        num: Of what was served in all: requests, steps, resets; 0 where nobody counted.
    """

    name: str
    group: str = ""
    fits: tuple[FitRecord, ...] = ()
    mean_s: float = 0.0
    quantiles_s: tuple[float, ...] = ()
    num: float = 0.0


class StageProfile:
    """One stage of one group, online.

    Attributes:
        name: Of the stage, such as ``"gen"``.
        group: Of environments, or the service, that it belongs to.
        latency: Seconds of its calls.
        arrivals: Of what it serves.
        usage: Of its lanes.
        num: Of what it has served, as last read.

    Example:
        >>> gen = StageProfile("gen")
        >>> for n in (1, 8, 4, 8, 1, 4):
        ...     gen.observe(n, 0.004 + 0.0005 * n, share=4)
        >>> round(gen.predict(32, share=4), 4), round(gen.predict(32, share=8), 4)
        (0.02, 0.01)
    """

    def __init__(
        self,
        name: str,
        group: str = "",
        *,
        forgetting: float = 0.99,
        num_samples: int = 512,
        window_s: float = 10.0,
    ) -> None:
        """Make a profile that knows nothing.

        Args:
            name: Of the stage.
            group: It belongs to.
            forgetting: See `LinearFit`.
            num_samples: See `Latencies`.
            window_s: Of the rate and the utilisation.

        Raises:
            ConfigError: Out of range.
        """
        LinearFit(forgetting)  # raises now what would else be raised by the first call
        self.name = name
        self.group = group
        self.latency = Latencies(num_samples)
        self.arrivals = Rate(window_s)
        self.usage = Utilisation(window_s)
        self.num = 0
        self._forgetting = forgetting
        self._fits: dict[float, LinearFit] = {}

    @property
    def fits(self) -> Mapping[float, LinearFit]:
        """What is known, by share; to be read only."""
        return MappingProxyType(self._fits)

    def observe(self, n: float, seconds: float, share: float = 1.0) -> None:
        """Learn from one call: into the fit of its share, and into `latency`.

        Args:
            n: Its size: rows of a batch, environments of a step; above 0.
            seconds: It took.
            share: Units of the resource that it ran on; above 0.
        """
        fit = self._fits.get(share)
        if fit is None:
            fit = self._open(share)
        fit.observe(n, seconds)
        self.latency.add(seconds)

    def read(self, time_s: float, num: int, busy_s: float, capacity: float = 1.0) -> dict[str, float]:
        """Take counters, so that nothing need be done per request; the first reading is the start.

        Args:
            time_s: Now.
            num: What has been served so far.
            busy_s: Seconds of work so far, over all lanes.
            capacity: Units that could work since the last reading.

        Returns:
            For the statistics of a service: what arrives per second, and which part of the lanes works.
        """
        self.arrivals.read(time_s, num)
        self.num = num
        self.usage.read(time_s, busy_s, capacity)
        return {"arrivals_per_s": self.arrivals.per_s(time_s), "utilisation": self.usage.value}

    def predict(self, n: float, share: float = 1.0) -> float:
        """Seconds of a call of size `n` on `share` units; 0 as long as nothing is known.

        At a share that was never seen, the fit of the nearest one (by ratio; the smaller of two) is scaled by known
        over asked, as if work were shared out evenly: hopeful for more units, cautious for fewer. The factor is
        never above `MAX_SCALING` or below its inverse.
        """
        fit = self._fits.get(share)
        if fit is not None:
            return fit.predict(n)
        nearest, factor = self._nearest(share)
        return nearest.predict(n) * factor if nearest is not None else 0.0

    def record(self) -> StageRecord:
        """Return what a file keeps."""
        fits = tuple(FitRecord(float(s), fit.a_s, fit.b_s, fit.num) for s, fit in sorted(self._fits.items()))
        if not len(self.latency):
            return StageRecord(self.name, self.group, fits, num=self.num)
        quantiles = np.quantile(self.latency.samples(), np.linspace(0.0, 1.0, NUM_QUANTILES))
        return StageRecord(self.name, self.group, fits, self.latency.mean, tuple(quantiles.tolist()), self.num)

    def warm_start(self, record: StageRecord) -> None:
        """Begin with what an earlier run knew; where this one has seen something already, that stays.

        See `LinearFit.warm_start` and `Latencies.warm_start` for how much it counts.
        """
        for known in record.fits:
            if known.share not in self._fits:
                fit = self._fits[known.share] = LinearFit(self._forgetting)
                fit.warm_start(known.a_s, known.b_s, known.num)
        if record.quantiles_s and not len(self.latency):
            self.latency.warm_start(record.quantiles_s, record.mean_s)

    def _open(self, share: float) -> LinearFit:
        """Make the fit of a new share; what the nearest share says counts as one call, so its slope is not lost."""
        assert 0.0 < share < inf
        nearest, factor = self._nearest(share)
        fit = LinearFit(self._forgetting)
        if nearest is not None:
            fit.warm_start(nearest.a_s * factor, nearest.b_s * factor, 1.0)
        self._fits[share] = fit
        return fit

    def _nearest(self, share: float) -> tuple[LinearFit | None, float]:
        """Return the fit of the nearest share, and the factor from its times to those at `share`."""
        if not self._fits:
            return None, 1.0
        known = min(self._fits, key=lambda known: (abs(log(known / share)), known))
        return self._fits[known], min(max(known / share, 1.0 / MAX_SCALING), MAX_SCALING)


class SimulationProfile:
    """One group of environments: three stages, kept apart.

    Attributes:
        group: Its name.
        step: Simulator steps; the time of a call that takes several is shared out among them.
        reset: Calls that reset.
        turnaround: From an answer of the policy to the same environment's next request, whatever it did meanwhile;
            its latencies are all that is noted, since the generator counts its requests.
    """

    def __init__(self, group: str, *, num_samples: int = 512, window_s: float = 10.0) -> None:
        """Make profiles that know nothing; see `StageProfile`."""
        self.group = group
        self.step = StageProfile("step", group, num_samples=num_samples, window_s=window_s)
        self.reset = StageProfile("reset", group, num_samples=num_samples, window_s=window_s)
        self.turnaround = StageProfile("turnaround", group, num_samples=num_samples, window_s=window_s)

    @property
    def stages(self) -> tuple[StageProfile, ...]:
        """All three, for a file."""
        return self.step, self.reset, self.turnaround
