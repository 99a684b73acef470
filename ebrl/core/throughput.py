"""How many decisions per second a batch threshold gives: a model of N environments and one batch server.

N environments circulate: each waits in the queue of the generator, is served in a batch of `n` that takes ``a + b n``
on one of K lanes, and comes back after a latency drawn from a measured distribution F. With a threshold T and a steady
interval c between launches, the batch of j launches ago has on average ``B (1 - F(j c - s))`` environments still out,
where ``s = a + b B``. All N are somewhere, so that c solves

    B * sum_{j>=1} (1 - F(j c - s)) = N - B + 1/2

(the half, because the T-th arrival lies where N - T and a half are expected to be out). Where the lanes cannot launch
that often, c is ``s / K`` and the batches are larger than T. This mean-field model is ours; it was compared with an
event simulation on the workloads of ``bench/profiles`` and on random ones, where the threshold it picks reaches .955
or more of the best one found by a sweep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

COHORTS = np.arange(1, 65)  # launches that are looked back on one by one; older ones are an integral
MAX_SAMPLES = 1024  # of F, after blurring
BLUR = np.linspace(-0.3, 0.3, 7)  # relative: equal latencies would make launches resonate with them
BISECTIONS = 26
SHORTEST_S = 1e-7  # between two launches: where nothing takes time, rates are large and not infinite
TOLERANCE = 0.01  # relative difference of rates that is none
GREEDY_TOLERANCE = 0.02  # that is none where launching at once is as good: it needs no forecast to hold
SMALLEST_NATURAL = 1.5  # below it, lanes are idle at times
SMALL_FIXED = 0.1  # part of the fixed cost in a batch below which small batches waste nothing


@dataclass(frozen=True, slots=True)
class Loop:
    """What circulates, and how it is served.

    Attributes:
        num_envs: N that may ask.
        fixed_s: a, seconds of a batch whatever its size.
        per_request_s: b, seconds per request in it.
        latencies_s: Sample of the seconds between an answer and the next request of the same environment.
        num_lanes: K, batches that may run at once, each at full speed.
    """

    num_envs: int
    fixed_s: float
    per_request_s: float
    latencies_s: Numbers
    num_lanes: int = 1


@dataclass(frozen=True, slots=True)
class Forecast:
    """What each threshold would give.

    Attributes:
        thresholds: Candidates, ascending.
        rates: Decisions per second.
        batches: Mean size of a batch.
        cycles_s: Seconds between two launches.
        natural: Size of the batches of a generator that launches whenever a lane is free, if that keeps it busy.
    """

    thresholds: NDArray[np.int64]
    rates: Numbers
    batches: Numbers
    cycles_s: Numbers
    natural: float

    def index(self, threshold: int) -> int:
        """Return where the candidate next to `threshold` is."""
        return int(np.abs(self.thresholds - threshold).argmin())


def candidates(num_envs: int, *others: int) -> NDArray[np.int64]:
    """Return thresholds worth a look: 1 to N, dense where it matters (near N), and `others`."""
    few = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    parts = [round(num_envs * part) for part in (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.94, 0.97, 1.0)]
    return np.array(sorted({t for t in (*few, *parts, *others) if 1 <= t <= num_envs}), np.int64)


def forecast(loop: Loop, thresholds: NDArray[np.int64]) -> Forecast:
    """Predict the steady state for every threshold.

    Args:
        loop: At least one latency in it.
        thresholds: From 1 to N, ascending.
    """
    tail = _Tail(loop.latencies_s)
    sizes = thresholds.astype(np.float64)
    serve_s = loop.fixed_s + loop.per_request_s * sizes
    cycles_s = _intervals(tail, sizes, serve_s, loop.num_envs - sizes + 0.5)
    natural = _natural(loop, tail)
    natural_s = loop.fixed_s + loop.per_request_s * natural
    busy = (sizes < natural) | (cycles_s < serve_s / loop.num_lanes)
    batches = np.where(busy, np.maximum(natural, sizes), sizes)
    cycles_s = np.where(busy, np.where(sizes < natural, natural_s, serve_s) / loop.num_lanes, cycles_s)
    cycles_s = np.maximum(cycles_s, SHORTEST_S)
    return Forecast(thresholds, batches / cycles_s, batches, cycles_s, natural)


def best_rule(loop: Loop, found: Forecast, rates: Numbers) -> tuple[int, int]:
    """Return threshold and largest size of a batch: the smallest threshold that is as good as the best.

    Lanes that are always busy and take what is there share it unevenly, which wastes the fixed cost on small batches.
    One lane needs a threshold of a few against that. Several lanes need the natural size of a batch, or a little more:
    a threshold a little smaller lets them fall into a rhythm of large and small batches, and was up to 15 % slower.

    Args:
        loop: As in `forecast`.
        found: From `forecast`.
        rates: Of the candidates; those of `found`, or less where something else is the limit.
    """
    greedy = rates[0] >= rates.max() * (1 - GREEDY_TOLERANCE)
    good = np.flatnonzero(rates >= rates.max() * (1 - (GREEDY_TOLERANCE if greedy else TOLERANCE)))
    threshold, natural = int(found.thresholds[good[0]]), found.natural
    if threshold >= natural or natural < SMALLEST_NATURAL:
        return threshold, loop.num_envs
    fixed = loop.fixed_s / max(loop.fixed_s + loop.per_request_s * natural, 1e-12)
    if loop.num_lanes == 1:
        return max(threshold, math.ceil(1.2 * math.sqrt(fixed * natural))), loop.num_envs
    if fixed > SMALL_FIXED:
        threshold = min(loop.num_envs, round(1.03 * natural))
    return threshold, min(loop.num_envs, max(threshold, math.ceil(1.1 * natural)))


class _Tail:
    """The latency distribution, as the expected number of environments that are still out."""

    def __init__(self, latencies_s: Numbers) -> None:
        step = math.ceil(len(latencies_s) * len(BLUR) / MAX_SAMPLES)
        blurred = (np.asarray(latencies_s, np.float64)[:, None] * (1 + BLUR)).ravel()
        self.samples = np.sort(blurred)[step // 2 :: step]
        self.levels = (np.arange(len(self.samples)) + 0.5) / len(self.samples)
        self._above = np.append(np.cumsum(self.samples[::-1])[::-1], 0.0)

    @property
    def longest_s(self) -> float:
        return float(self.samples[-1])

    def out(self, interval_s: Numbers, serve_s: Numbers) -> Numbers:
        """Return ``sum_j (1 - F(j c - s))`` for each pair of c and s."""
        ages = COHORTS * interval_s[:, None] - serve_s[:, None]
        recent = (1 - np.interp(ages, self.samples, self.levels, left=0.0, right=1.0)).sum(1)
        oldest_s = (COHORTS[-1] + 0.5) * interval_s - serve_s
        first = np.searchsorted(self.samples, oldest_s)
        rest_s = (self._above[first] - (len(self.samples) - first) * oldest_s) / len(self.samples)
        total: Numbers = recent + np.maximum(rest_s, 0.0) / interval_s
        return total


def _intervals(tail: _Tail, sizes: Numbers, serve_s: Numbers, out: Numbers) -> Numbers:
    """Solve ``B * tail.out(c, s) = out`` for c, by bisection on a logarithmic scale."""
    low = np.full(len(sizes), SHORTEST_S)
    high = np.full(len(sizes), (tail.longest_s + float(serve_s.max())) * 1.01 + 1e-6)
    for _ in range(BISECTIONS):
        middle = np.sqrt(low * high)
        too_short = sizes * tail.out(middle, serve_s) > out
        low, high = np.where(too_short, middle, low), np.where(too_short, high, middle)
    solved: Numbers = np.sqrt(low * high)
    return solved


def _natural(loop: Loop, tail: _Tail) -> float:
    """Return the batch size at which K lanes that never wait are just busy; 1 where they are idle at times."""

    def too_large(size: float) -> bool:
        serve_s = np.array([loop.fixed_s + loop.per_request_s * size])
        interval_s = np.maximum(serve_s / loop.num_lanes, SHORTEST_S)
        return size * (1 + float(tail.out(interval_s, serve_s)[0])) > loop.num_envs

    low, high = 1.0, float(loop.num_envs)
    if too_large(low):
        return low
    for _ in range(18):
        middle = (low + high) / 2
        low, high = (low, middle) if too_large(middle) else (middle, high)
    return (low + high) / 2
