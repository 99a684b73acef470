"""The rule of launching that the model of the loop finds best: threshold, largest size, deadline, and number of lanes.

Lanes belong to the rule, since two lanes with the threshold of one are no better than one. So a move changes all four
together. One lane more or less is looked at, beside the number that there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ebrl.core.readings import Batching, GenReading
from ebrl.core.throughput import Forecast, Loop, best_rule, candidates, forecast

GATHER = 3.0  # a batch waits at most so many intervals between launches
CLOSE = 0.9  # part of the right threshold that is as good with several lanes: what is measured scatters
LANE_GAIN = 0.1  # what another number of lanes must promise beyond the best rule for the one that there is

Numbers: TypeAlias = NDArray[np.float64]
Limit: TypeAlias = Callable[[Numbers], Numbers]
"""Decisions per second that everything but the lanes of generation allows, with batches of given mean sizes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A rule and what it is for.

    Attributes:
        rule: To launch by.
        rate: Decisions per second that are forecast with it.
        gain: Relative, over the rule in use.
    """

    rule: Batching
    rate: float
    gain: float


@dataclass(frozen=True, slots=True)
class _Best:
    """The best rule for a number of lanes, its rate, and the gain over the rule in use if that had as many lanes."""

    rule: Batching
    rate: float
    gain: float


def plan(gen: GenReading, num_envs: int, limit: Limit, *, other_lanes: bool = True) -> Plan:
    """Return the best rule.

    Args:
        gen: The generator, with latencies.
        num_envs: That ask it.
        limit: Of everything else.
        other_lanes: Whether another number of lanes may be chosen, if the generator may have one.
    """
    num_lanes = gen.batching.num_lanes
    here = best = _best(gen, num_envs, num_lanes, limit)
    for other in (num_lanes - 1, num_lanes + 1) if other_lanes else ():
        if other in gen.lanes:
            found = _best(gen, num_envs, other, limit)
            if found.rate > max(best.rate, here.rate * (1 + LANE_GAIN)):
                best = found
    return Plan(best.rule, best.rate, best.rate / max(here.rate, 1e-12) * (1 + here.gain) - 1.0)


def _best(gen: GenReading, num_envs: int, num_lanes: int, limit: Limit) -> _Best:
    old = gen.batching
    loop = Loop(num_envs, gen.fixed_s, gen.per_request_s, gen.latencies_s, num_lanes)
    pinned = "batching" in gen.pinned
    mine = min(old.threshold, num_envs)
    found = forecast(loop, np.array([mine], np.int64) if pinned else candidates(num_envs, mine))
    rates = np.minimum(found.rates, limit(found.batches))
    if pinned:  # the model takes what waits, and a rule that stays may allow less
        rates = np.minimum(rates, _most(loop, old))
    rule = old._replace(num_lanes=num_lanes) if pinned else _rule(loop, found, rates)
    return _Best(rule, float(rates[found.index(rule.threshold)]), _gain(found, rates, old, rule, loop))


def _rule(loop: Loop, found: Forecast, rates: Numbers) -> Batching:
    threshold, max_size = best_rule(loop, found, rates)
    cycle_s = float(found.cycles_s[found.index(threshold)])
    return Batching(threshold, max_size, max(1e-3, GATHER * cycle_s), loop.num_lanes)


def _most(loop: Loop, rule: Batching) -> float:
    """Return decisions per second of lanes that are always busy with the largest batches of a rule."""
    return loop.num_lanes * rule.max_size / max(loop.fixed_s + loop.per_request_s * rule.max_size, 1e-12)


def _gain(found: Forecast, rates: Numbers, old: Batching, new: Batching, loop: Loop) -> float:
    """Return the relative gain of a rule; what busy lanes lose by uneven batches is guessed: the model cannot see it.

    See `best_rule`: up to 4 % with one lane and 15 % with several were seen in simulations. Nor does it see that the
    batches of the old rule may be too small for what is there.
    """
    before = min(float(rates[found.index(old.threshold)]), _most(loop, old))
    gain = float(rates[found.index(new.threshold)]) / before - 1.0
    close = 0.5 if loop.num_lanes == 1 else CLOSE  # one lane needs a threshold of a few, and which does not matter
    if old.threshold < close * min(new.threshold, found.natural):
        fixed = loop.fixed_s / max(loop.fixed_s + loop.per_request_s * found.natural, 1e-12)
        gain += (0.04 if loop.num_lanes == 1 else 0.15) * fixed
    return gain
