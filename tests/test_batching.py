"""The rule of launching: threshold, largest size and deadline, and how many lanes go with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.batching import LANE_GAIN, Limit, Numbers, plan
from ebrl.core.readings import Batching, GenReading, Knob

N = 64
GREEDY = Batching(1, N, 0.01)


def gen_reading(
    batching: Batching = GREEDY,
    lanes: range = range(1, 5),
    *,
    fixed_s: float = 0.002,
    per_request_s: float = 4e-4,
    latency_s: float = 0.004,
    pinned: frozenset[Knob] = frozenset(),
) -> GenReading:
    """Return a generator whose costs per request matter, as on a CPU."""
    latencies_s = latency_s * np.linspace(0.5, 1.5, 64)
    return GenReading(
        "gen", batching, fixed_s, per_request_s, 0.5, latencies_s, 10_000, 1000, 10.0, lanes=lanes, pinned=pinned
    )


def at_most(rate: float) -> Limit:
    """Return a limit that no size of a batch changes, as that of simulators."""
    return lambda sizes: np.full(len(sizes), rate)


def cores(num_cores: float, others_s: float, gen: GenReading) -> Limit:
    """Return the limit of cores that a batch takes one of for as long as it lasts."""

    def limit(sizes: Numbers) -> Numbers:
        rates: Numbers = num_cores / (others_s + gen.fixed_s / sizes + gen.per_request_s)
        return rates

    return limit


FREE = at_most(math.inf)


# How many lanes.


def test_a_second_lane_is_proposed_where_generation_is_the_limit_and_cores_are_free() -> None:
    found = plan(gen_reading(), N, FREE)
    assert found.rule.num_lanes == 2
    assert found.gain > 0.5
    more = plan(gen_reading(found.rule), N, FREE)
    assert more.rule.num_lanes == 3
    assert LANE_GAIN < more.gain < found.gain
    assert found.rule.threshold != GREEDY.threshold, "it comes with a rule of its own"


def test_no_lane_is_added_where_simulators_are_the_limit() -> None:
    one = plan(gen_reading(lanes=range(1, 2)), N, FREE)
    rate = 1 / (0.002 / N + 4e-4)  # of one lane with the largest batches
    assert plan(gen_reading(), N, at_most(0.9 * rate)).rule.num_lanes == 1
    assert plan(gen_reading(one.rule), N, at_most(rate)).rule.num_lanes == 1, "not for so little"
    assert plan(gen_reading(one.rule), N, at_most(1.5 * rate)).rule.num_lanes == 2


def test_no_lane_is_added_where_cores_are_the_limit() -> None:
    gen = gen_reading()
    assert plan(gen, N, cores(1.0, 0.0, gen)).rule.num_lanes == 1, "its one lane has a core, and there is no other"
    assert plan(gen, N, cores(2.0, 4e-4, gen)).rule.num_lanes == 1, "simulators have the other one"
    assert plan(gen, N, cores(4.0, 4e-4, gen)).rule.num_lanes == 2


def test_one_lane_fewer_where_cores_are_the_limit_and_larger_batches_pay() -> None:
    # A threshold that may rise does the same, so this is about one that may not.
    pinned = frozenset[Knob]({"batching"})
    for num_lanes in (2, 3, 4):
        rule = Batching(1, N, 0.01, num_lanes)
        gen = gen_reading(rule, fixed_s=0.02, per_request_s=1e-5, latency_s=0.05, pinned=pinned)
        found = plan(gen, N, cores(1.0, 1e-4, gen))
        assert found.rule == rule._replace(num_lanes=num_lanes - 1)
        assert found.gain > LANE_GAIN
        assert plan(gen, N, cores(64.0, 1e-4, gen)).rule.num_lanes >= num_lanes


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_lanes_stay_within_what_the_generator_may_have(num_lanes: int) -> None:
    gen = gen_reading(GREEDY._replace(num_lanes=num_lanes), range(1, num_lanes + 1))
    assert plan(gen, N, FREE).rule.num_lanes == num_lanes


def test_lanes_that_are_pinned_stay_and_their_rule_does_not() -> None:
    for limit in (FREE, at_most(100.0), cores(1.0, 1e-3, gen_reading())):
        found = plan(gen_reading(GREEDY._replace(num_lanes=2), range(2, 3)), N, limit)
        assert found.rule.num_lanes == 2
    assert plan(gen_reading(Batching(1, 4, 0.01, 2), range(2, 3)), N, FREE).rule.max_size > 4
    assert plan(gen_reading(), N, FREE, other_lanes=False).rule.num_lanes == 1


def test_a_rule_that_is_pinned_stays_and_its_lanes_do_not() -> None:
    rule = Batching(7, 20, 0.5)
    found = plan(gen_reading(rule, pinned=frozenset({"batching"})), N, FREE)
    assert found.rule == rule._replace(num_lanes=2)
    assert found.gain > 0.5
    alone = plan(gen_reading(rule, range(1, 2), pinned=frozenset({"batching"})), N, FREE)
    assert (alone.rule, alone.gain) == (rule, 0.0)


def test_a_pinned_rule_that_cuts_batches_short_needs_more_lanes() -> None:
    # Without the largest size, one lane would be as good as two: batches of all that wait cost no more than small ones.
    gen = gen_reading(
        Batching(1, 4, 0.01), fixed_s=0.02, per_request_s=1e-6, latency_s=1e-4, pinned=frozenset({"batching"})
    )
    found = plan(gen, N, FREE)
    assert found.rule == Batching(1, 4, 0.01, 2)
    assert found.gain == pytest.approx(1.0, abs=0.05)


# Whatever it is told.

rules = st.builds(
    lambda threshold, more, num_lanes: Batching(threshold, threshold + more, 0.01, num_lanes),
    st.integers(1, 300),
    st.integers(0, 300),
    st.integers(1, 8),
)


@given(
    rule=rules,
    num_envs=st.integers(1, 300),
    most=st.integers(1, 8),
    fixed_s=st.floats(0.0, 0.1),
    per_request_s=st.floats(0.0, 0.01),
    latency_s=st.floats(1e-6, 10.0),
    rate=st.floats(0.1, 1e6),
    pinned=st.booleans(),
)
def test_a_plan_is_always_within_range(
    rule: Batching,
    num_envs: int,
    most: int,
    fixed_s: float,
    per_request_s: float,
    latency_s: float,
    rate: float,
    pinned: bool,
) -> None:
    gen = gen_reading(
        rule,
        range(1, most + 1),
        fixed_s=fixed_s,
        per_request_s=per_request_s,
        latency_s=latency_s,
        pinned=frozenset({"batching"}) if pinned else frozenset(),
    )
    found = plan(gen, num_envs, at_most(rate))
    assert found == plan(gen, num_envs, at_most(rate))
    assert math.isfinite(found.gain)
    assert found.rule.num_lanes in {rule.num_lanes} | {rule.num_lanes - 1, rule.num_lanes + 1} & set(gen.lanes)
    if pinned:
        assert found.rule[:3] == rule[:3]
        return
    assert 1 <= found.rule.threshold <= found.rule.max_size <= num_envs
    assert 1e-3 <= found.rule.max_wait_s < math.inf
