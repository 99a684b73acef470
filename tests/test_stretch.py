"""What was done between two readings, what the machine allows by that, and what follows for the cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ebrl.core.concurrency import ALONE, BUSY, all_again, fewer
from ebrl.core.readings import Batching, CoreReading, GenReading, Move, Reading, SimReading
from ebrl.core.split import CHANGE, LEAST, differs, promise, split
from ebrl.core.stretch import LEAST_REQUESTS, Stretch

SECONDS = 10.0


def gen_reading(
    num_requests: int = 0,
    num_batches: int = 0,
    name: str = "gen",
    *,
    fixed_s: float = 0.01,
    per_request_s: float = 0.001,
) -> GenReading:
    rule, latencies_s = Batching(1, 256, 0.01), np.ones(64)
    return GenReading(name, rule, fixed_s, per_request_s, 0.5, latencies_s, num_requests, num_batches, 0.0)


def stretch(
    *,
    gens: Sequence[GenReading] = (),
    sims: Sequence[SimReading] = (),
    used: dict[str, float] | None = None,
    rates: dict[str, float] | None = None,
    ceiling: int = 8,
    num_cores: int = 8,
    before: dict[str, Any] | None = None,
) -> Stretch:
    """Return ten seconds that began when all counters were 0, or as `before` has it."""
    cores = tuple(
        CoreReading(kind, (rates or {}).get(kind, 1.0), seconds, ceiling) for kind, seconds in (used or {}).items()
    )
    since = Reading(100.0, **{"gens": (), "sims": (), **(before or {})})
    now = Reading(100.0 + SECONDS, tuple(gens), tuple(sims), num_cores=num_cores, cores=cores)
    return Stretch(since, now)


def sim(
    busy_s: float, name: str = "envs", *, cpu_part: float = 1.0, num_envs: int = 16, num_cores: int = 8
) -> SimReading:
    return SimReading(name, "gen", num_envs, 1_000_000, busy_s, num_cores, cpu_part)


# What was done.


def test_what_was_there_before_does_not_count_and_who_came_meanwhile_does() -> None:
    before = {
        "gens": (gen_reading(100, 10),),
        "sims": (sim(5.0),),
        "cores": (CoreReading("sim", 1.0, 7.0, 8),),
    }
    found = stretch(
        gens=(gen_reading(150, 20), gen_reading(30, 3, "gen-2")),
        sims=(sim(9.0), sim(2.0, "eval")),
        used={"sim": 10.0, "gen": 1.0},
        before=before,
    )
    assert found.seconds == SECONDS
    assert [found.served(gen) for gen in found.now.gens] == [(50, 10), (30, 3)]
    assert found.simulated(found.now.sims) == 6.0
    assert found.used() == {"sim": 3.0, "gen": 1.0}


def test_a_generator_that_began_anew_has_served_what_it_counts() -> None:
    found = stretch(gens=(gen_reading(40, 4),), before={"gens": (gen_reading(1000, 10),)})
    assert found.served(found.now.gens[0]) == (40, 4)


# What simulators allow.


def test_simulators_allow_what_they_did_on_all_they_may_use() -> None:
    gen = gen_reading(1000, 100)
    assert stretch(gens=(gen,), sims=(sim(20.0),)).simulation_limit(gen) == pytest.approx(8 * 1000 / 20)
    assert stretch(gens=(gen,), sims=(sim(20.0, num_envs=3),)).simulation_limit(gen) == pytest.approx(3 * 1000 / 20)
    assert stretch(gens=(gen,), sims=(sim(20.0, num_cores=2),)).simulation_limit(gen) == pytest.approx(2 * 1000 / 20)


def test_groups_share_the_cores() -> None:
    gen = gen_reading(1000, 100)
    both = stretch(gens=(gen,), sims=(sim(10.0), sim(10.0, "others")))
    assert both.simulation_limit(gen) == pytest.approx(8 * 1000 / 20)
    few = stretch(gens=(gen,), sims=(sim(10.0, num_envs=2), sim(10.0, "others", num_envs=3)))
    assert few.simulation_limit(gen) == pytest.approx(5 * 1000 / 20)
    idle = stretch(gens=(gen,), sims=(sim(20.0), sim(1000.0, "eval", num_envs=0)))
    assert idle.simulation_limit(gen) == pytest.approx(8 * 1000 / 20)


def test_too_little_says_nothing_of_simulators() -> None:
    gen = gen_reading(LEAST_REQUESTS - 1, 3)
    assert stretch(gens=(gen,), sims=(sim(20.0),)).simulation_limit(gen) == math.inf
    gen = gen_reading(1000, 100)
    for sims in ((), (sim(0.0),), (sim(20.0, num_envs=0),)):
        assert stretch(gens=(gen,), sims=sims).simulation_limit(gen) == math.inf


# What cores allow.


def test_cores_are_no_limit_where_generation_takes_none_or_nothing_is_known() -> None:
    gen = gen_reading(1000, 100)
    assert stretch(gens=(gen,), used={"sim": 20.0}).core_limit(gen) is None
    few, free = gen_reading(LEAST_REQUESTS - 1, 3), gen_reading(1000, 100, fixed_s=0.0, per_request_s=0.0)
    assert stretch(gens=(few,), used={"sim": 20.0, "gen": 5.0}).core_limit(few) is None
    assert stretch(gens=(free,), used={"sim": 20.0, "gen": 5.0}).core_limit(free) is None


@given(
    num_batches=st.integers(1, 1000),
    size=st.floats(1.0, 100.0),
    sim_s=st.floats(0.0, 80.0),
    gen_s=st.floats(0.01, 80.0),
    train_s=st.floats(0.0, 80.0),
    fixed_s=st.floats(1e-5, 1.0),
    per_request_s=st.floats(0.0, 0.1),
    num_cores=st.integers(1, 64),
)
def test_cores_allow_what_was_done_per_core_second_and_more_with_larger_batches(
    num_batches: int,
    size: float,
    sim_s: float,
    gen_s: float,
    train_s: float,
    fixed_s: float,
    per_request_s: float,
    num_cores: int,
) -> None:
    num_requests = round(num_batches * size)
    assume(num_requests >= LEAST_REQUESTS)
    gen = gen_reading(num_requests, num_batches, fixed_s=fixed_s, per_request_s=per_request_s)
    used = {"sim": sim_s, "gen": gen_s, "train": train_s}
    limit = stretch(gens=(gen,), used=used, num_cores=num_cores).core_limit(gen)
    assert limit is not None
    mean = num_requests / num_batches
    assert limit(np.array([mean]))[0] == pytest.approx(num_cores / (sum(used.values()) / num_requests))
    rates = limit(np.geomspace(1.0, 1000.0, 30))
    assert (np.diff(rates) >= -1e-9 * rates[1:]).all()
    assert limit(np.array([2 * mean]))[0] <= 2.0 * limit(np.array([mean]))[0] + 1e-9


@given(st.floats(0.0, 80.0), st.floats(0.1, 80.0))
def test_the_limit_is_the_least_of_all(sim_s: float, gen_s: float) -> None:
    gen, sizes = gen_reading(1000, 100), np.array([1.0, 10.0, 100.0])
    found = stretch(gens=(gen,), sims=(sim(sim_s),), used={"sim": sim_s, "gen": gen_s})
    cores = found.core_limit(gen)
    assert cores is not None
    expected = np.minimum(found.simulation_limit(gen), cores(sizes))
    assert found.limit(gen, None)(sizes) == pytest.approx(expected)


# How many simulators run at once.


def crowd(
    running: float, cpu_part: float, ceiling: int = 8, num_cores: int = 8, *others: SimReading, num_envs: int = 16
) -> Stretch:
    """Return ten seconds in which so many simulators ran at once."""
    sims = (sim(SECONDS * running, cpu_part=cpu_part, num_envs=num_envs), *others)
    return stretch(sims=sims, used={"sim": SECONDS * running}, ceiling=ceiling, num_cores=num_cores)


@pytest.mark.parametrize(("cpu_part", "new"), [(0.6, 5), (0.5, 4), (0.25, 4), (0.0, 4)])
def test_as_many_as_compute_are_let_run_and_half_at_least(cpu_part: float, new: int) -> None:
    """Simulators that sleep compute in no part of their time: one of 64 would be tried for half a minute."""
    move = fewer(crowd(8.0, cpu_part))
    assert move is not None
    assert (move.service, move.knob, move.old, move.new) == ("machine", "concurrency", 8, new)
    assert move.time_s == 110.0
    assert f"{cpu_part:.0%}" in move.reason


@pytest.mark.parametrize(
    "found",
    [
        crowd(8.0, 1.0),  # all compute
        crowd(8.0, ALONE + 0.01),
        crowd(8 * BUSY - 0.1, 0.1),  # not all that may run do
        crowd(1.0, 0.1, 1),  # there are no fewer
        crowd(0.0, 0.1),
        stretch(sims=(sim(80.0, cpu_part=0.1),)),  # they take no cores
        stretch(used={"sim": 80.0}),  # nobody is there
        crowd(8.0, 0.1, num_envs=0),
    ],
)
def test_their_number_stays(found: Stretch) -> None:
    assert fewer(found) is None


def test_too_little_is_no_reason() -> None:
    found = crowd(8.0, 0.1)
    short = Stretch(Reading(100.0, (), (sim(0.0),)), found.now)  # as many steps as now
    assert fewer(short) is None


def test_groups_count_by_what_they_take() -> None:
    idle = sim(1000.0, "eval", num_envs=0)
    move = fewer(crowd(8.0, 0.55, 8, 8, idle))
    assert move is not None
    assert move.new == 4
    sims = (sim(60.0, cpu_part=0.4), sim(20.0, "others", cpu_part=1.0))
    move = fewer(stretch(sims=sims, used={"sim": 80.0}))
    assert move is not None
    assert move.new == round(6 * 0.4 + 2)


@given(st.floats(0.0, 64.0), st.floats(0.0, 1.0), st.integers(1, 64))
def test_another_number_is_always_smaller_and_never_none(running: float, cpu_part: float, ceiling: int) -> None:
    move = fewer(crowd(min(running, ceiling), cpu_part, ceiling, 64))
    if move is not None:
        assert ceiling // 2 <= move.new < move.old == ceiling
        assert min(running, ceiling) >= BUSY * ceiling


def test_all_run_again_in_a_new_regime_or_with_others() -> None:
    found = crowd(2.0, 0.5, 2)
    old, new = 90.0, 105.0
    chosen = Reading(100.0, (), (sim(0.0),))
    stays = [all_again(found, None, new), all_again(found, chosen, old), all_again(crowd(8.0, 0.5), chosen, new)]
    assert stays == [None, None, None]
    for move in (all_again(found, chosen, new), all_again(found, Reading(100.0, (), ()), old)):
        assert isinstance(move, Move)
        assert (move.service, move.knob, move.old, move.new) == ("machine", "concurrency", 2, 8)
    idle = crowd(2.0, 0.5, 2, 8, sim(5.0, "eval", num_envs=0))
    assert all_again(idle, chosen, old) is None
    assert all_again(stretch(sims=(sim(1.0),)), chosen, new) is None, "they take no cores"


# Promises of cores.

stages = st.dictionaries(st.sampled_from(["sim", "gen", "train"]), st.floats(0.0, 1e4), min_size=1)


@given(stages, st.integers(1, 256))
def test_a_split_gives_all_and_forgets_nobody(used: dict[str, float], units: int) -> None:
    found = split(used, units)
    assert found.keys() == used.keys()
    assert sum(found.values()) == pytest.approx(units)
    assert min(found.values()) >= units * LEAST / (1 + LEAST * len(used)) * (1 - 1e-9)
    assert not differs(found, split(used, units))
    if "sim" in used and "train" in used and used["sim"] > used["train"]:
        assert found["sim"] >= found["train"]


def test_generation_counts_double() -> None:
    assert split({"sim": 2.0, "gen": 1.0}, 8) == {"sim": 4.0, "gen": 4.0}
    assert split({"sim": 0.0, "gen": 0.0}, 8) == {"sim": 4.0, "gen": 4.0}


def test_cores_are_promised_as_they_were_used() -> None:
    used, old = {"sim": 60.0, "gen": 5.0, "train": 10.0}, {"sim": 4.0, "gen": 2.0, "train": 2.0}
    move = promise(stretch(used=used, rates=old))
    assert move is not None
    assert (move.service, move.knob, move.old) == ("machine", "cores", old)
    assert move.new == pytest.approx(split(used, 8), abs=1e-3)
    assert promise(stretch(used=used, rates=move.new)) is None
    near = {kind: rate * (1 + 0.9 * CHANGE) for kind, rate in move.new.items()}
    assert promise(stretch(used=used, rates=near)) is None


@given(stages, st.floats(0.1, 8.0))
def test_a_promise_is_made_only_where_stages_contend(used: dict[str, float], rate: float) -> None:
    move = promise(stretch(used=used, rates=dict.fromkeys(used, rate)))
    contended = len(used) > 1 and sum(used.values()) >= 0.8 * 8 * SECONDS
    if not contended:
        assert move is None
    elif move is not None:
        assert differs(move.old, move.new)
        assert sum(move.new.values()) == pytest.approx(8, abs=0.01)
