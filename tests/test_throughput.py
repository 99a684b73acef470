"""Models of rates: closed forms in limiting cases, an event simulation everywhere else, and sharing of one device."""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebrl.core import throughput
from ebrl.core.readings import Batching, GenReading, Reading, SimReading, TrainReading
from ebrl.core.sharing import Sharing, gen_units, shared_limit, sharing, speeds
from ebrl.core.throughput import Forecast, Loop, Numbers, best_rule, candidates, forecast
from ebrl.core.tuner import Tuner

quick = settings(max_examples=60)
seconds = st.floats(1e-4, 1.0)
DECISION_S = 5e-3  # of CPU: a bar


def make_loop(
    num_envs: int = 64, fixed_s: float = 0.02, per_request_s: float = 1e-4, latency_s: float = 0.005, lanes: int = 1
) -> Loop:
    """Return a loop whose latencies are all equal."""
    return Loop(num_envs, fixed_s, per_request_s, np.full(32, latency_s), lanes)


def serve_s(loop: Loop, size: float) -> float:
    return loop.fixed_s + loop.per_request_s * size


def rate_at(loop: Loop, threshold: int) -> float:
    return float(forecast(loop, np.array([threshold])).rates[0])


def rule_of(loop: Loop) -> tuple[int, int]:
    found = forecast(loop, candidates(loop.num_envs))
    return best_rule(loop, found, found.rates)


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    latencies_s = np.array(draw(st.lists(seconds, min_size=1, max_size=40)))
    costs = st.floats(1e-4, 0.1)
    return Loop(draw(st.integers(1, 200)), draw(costs), draw(costs) / 10, latencies_s, draw(st.integers(1, 3)))


# What is known exactly.


@pytest.fixture
def sharp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take latencies as they are."""
    monkeypatch.setattr(throughput, "BLUR", np.zeros(1))


@pytest.mark.usefixtures("sharp")
@pytest.mark.parametrize("num_envs", [2, 8, 64, 1000])
@pytest.mark.parametrize("latency_s", [0.0, 0.005, 1.0])
def test_a_batch_of_all_takes_its_service_and_the_latency(num_envs: int, latency_s: float) -> None:
    loop = make_loop(num_envs, latency_s=latency_s)
    expected = num_envs / (latency_s + serve_s(loop, num_envs))
    assert rate_at(loop, num_envs) == pytest.approx(expected, rel=2e-3)


@pytest.mark.usefixtures("sharp")
@pytest.mark.parametrize("num_envs", [1, 2, 8, 64])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_lane_that_is_mostly_idle_answers_one_by_one(num_envs: int, lanes: int) -> None:
    loop = make_loop(num_envs, fixed_s=0.001, per_request_s=1e-5, latency_s=1.0, lanes=lanes)
    assert rate_at(loop, 1) == pytest.approx(num_envs / (1.0 + serve_s(loop, 1)), rel=2e-3)
    assert rule_of(loop) == (1, num_envs)


@pytest.mark.usefixtures("sharp")
def test_a_lane_that_is_always_busy_alternates_between_two_halves() -> None:
    loop = make_loop(64, latency_s=0.005)  # shorter than a batch: who was served is back before the next launch
    assert rate_at(loop, 1) == pytest.approx(32 / serve_s(loop, 32), rel=1e-3)
    assert forecast(loop, candidates(64)).natural == pytest.approx(32, rel=1e-3)


@pytest.mark.usefixtures("sharp")
@pytest.mark.parametrize("lanes", [2, 3])
def test_lanes_that_are_always_busy_share_the_requests(lanes: int) -> None:
    loop = make_loop(60, latency_s=0.005, lanes=lanes)
    size = 60 / (lanes + 1)  # one batch on each lane, and one whose environments have just been answered
    assert rate_at(loop, 1) == pytest.approx(lanes * size / serve_s(loop, size), rel=1e-3)


def test_the_blur_costs_a_batch_of_all_no_more_than_its_width() -> None:
    loop = make_loop(64, fixed_s=0.002, latency_s=0.02)
    width = float(throughput.BLUR[-1])
    slowest = 64 / (0.02 * (1 + width) + serve_s(loop, 64))
    assert slowest * 0.999 <= rate_at(loop, 64) <= 64 / (0.02 + serve_s(loop, 64))


def test_what_costs_only_per_request_is_equally_fast_at_every_size() -> None:
    found = forecast(make_loop(64, fixed_s=0.0, per_request_s=1e-3, latency_s=0.001), candidates(64))
    assert found.rates[:-1] == pytest.approx(np.full(len(found.rates) - 1, 1e3), rel=0.03)


def test_no_rate_is_above_what_lanes_or_environments_can_do() -> None:
    for lanes in (1, 2, 3):
        for num_envs in (1, 5, 64, 300):
            loop = make_loop(num_envs, latency_s=0.03, lanes=lanes)
            found = forecast(loop, candidates(num_envs))
            most = [lanes * size / serve_s(loop, size) for size in found.batches]
            assert (found.rates <= np.array(most) * 1.001).all()
            assert (found.rates <= num_envs / (0.03 * 0.69 + serve_s(loop, 1))).all()


# Which way it goes.


@quick
@given(loops(), st.floats(1.0, 10.0))
def test_longer_latencies_never_raise_a_rate(loop: Loop, factor: float) -> None:
    thresholds = candidates(loop.num_envs)
    slower = replace(loop, latencies_s=loop.latencies_s * factor)
    assert (forecast(slower, thresholds).rates <= forecast(loop, thresholds).rates * 1.001).all()


@quick
@given(loops(), st.floats(0.0, 0.5))
def test_a_delay_of_all_latencies_never_raises_a_rate(loop: Loop, delay_s: float) -> None:
    thresholds = candidates(loop.num_envs)
    slower = replace(loop, latencies_s=loop.latencies_s + delay_s)
    assert (forecast(slower, thresholds).rates <= forecast(loop, thresholds).rates * 1.001).all()


@quick
@given(loops(), st.floats(1.0, 10.0))
def test_a_slower_policy_never_raises_a_rate(loop: Loop, factor: float) -> None:
    thresholds = candidates(loop.num_envs)
    slower = replace(loop, fixed_s=loop.fixed_s * factor, per_request_s=loop.per_request_s * factor)
    assert (forecast(slower, thresholds).rates <= forecast(loop, thresholds).rates * 1.001).all()


@quick
@given(loops(), st.floats(0.5, 50.0))
def test_time_has_no_unit(loop: Loop, factor: float) -> None:
    thresholds = candidates(loop.num_envs)
    other = Loop(
        loop.num_envs, loop.fixed_s * factor, loop.per_request_s * factor, loop.latencies_s * factor, loop.num_lanes
    )
    first, second = forecast(loop, thresholds), forecast(other, thresholds)
    assert second.rates * factor == pytest.approx(first.rates, rel=2e-3)
    assert second.natural == pytest.approx(first.natural, rel=2e-3)


@quick
@given(loops())
def test_a_forecast_does_not_depend_on_the_order_of_samples_or_on_the_other_thresholds(loop: Loop) -> None:
    thresholds = candidates(loop.num_envs)
    found = forecast(replace(loop, latencies_s=loop.latencies_s[::-1].copy()), thresholds)
    assert (found.rates == forecast(loop, thresholds).rates).all()
    for threshold, rate in zip(thresholds.tolist(), found.rates, strict=True):
        assert rate_at(loop, threshold) == pytest.approx(rate, rel=1e-3)


# The event simulation that the model stands for.


def simulate(loop: Loop, threshold: int, max_size: int, *, seed: int = 1, num: int = 4000) -> float:
    """Return decisions per second of the last two thirds; heap of (time, tie, size of the batch that ends or 0)."""
    rng = np.random.default_rng(seed)
    draws = iter(rng.choice(loop.latencies_s, 2 * num + 10 * loop.num_envs).tolist())
    events = [(next(draws) * float(rng.random()), i, 0) for i in range(loop.num_envs)]
    heapq.heapify(events)
    ties, waiting, free, done = loop.num_envs, 0, loop.num_lanes, 0
    began: tuple[float, int] | None = None
    now_s = 0.0
    while done < num:
        now_s = events[0][0]
        while events and events[0][0] <= now_s:  # all of one moment, then launch
            size = heapq.heappop(events)[2]
            waiting, free, done = waiting + (not size), free + bool(size), done + size
            for _ in range(size):
                ties += 1
                heapq.heappush(events, (now_s + next(draws), ties, 0))
        if began is None and done >= num / 3:
            began = (now_s, done)
        while free and waiting >= threshold:
            size = min(waiting, max_size)
            waiting, free, ties = waiting - size, free - 1, ties + 1
            heapq.heappush(events, (now_s + serve_s(loop, size), ties, size))
    assert began is not None
    return (done - began[1]) / (now_s - began[0])


def lognormal(rng: np.random.Generator, mean_s: float, cv: float, num: int = 512) -> Numbers:
    sigma = math.sqrt(math.log1p(cv**2))
    drawn: Numbers = mean_s * np.exp(sigma * rng.standard_normal(num) - sigma**2 / 2)
    return drawn


# Step and its variation, reset, then the policy's fixed and other cost; see `bench/profiles`.
WORKLOADS = {
    "W1": (0.02, 0.0, 0.0, 0.002, 2e-5),
    "W2": (0.02, 0.5, 0.0, 0.002, 2e-5),
    "W3": (0.02, 1.5, 0.0, 0.002, 2e-5),
    "W4": (0.01, 0.0, 0.5, 0.002, 2e-5),
    "W5a": (0.005, 0.5, 0.0, 0.02, 1e-4),
    "W5b": (0.02, 0.5, 0.0, 0.002, 4e-4),
}
VARIED = ["W2", "W3", "W5a", "W5b"]


def workload(name: str, num_envs: int, lanes: int = 1) -> Loop:
    step_s, cv, reset_s, fixed_s, per_request_s = WORKLOADS[name]
    rng = np.random.default_rng(0)
    latencies_s = lognormal(rng, step_s, cv) + reset_s * (rng.random(512) < 1 / 50)
    return Loop(num_envs, fixed_s, per_request_s, latencies_s, lanes)


def random_loop(seed: int, cvs: tuple[float, ...] = (0.3, 0.5, 1.0, 2.0)) -> Loop:
    """Return one of very different loops, with one lane if `seed` is even, else with two."""
    rng = np.random.default_rng(seed)
    num_envs, step_s = int(2 ** rng.uniform(2, 7)), 10 ** rng.uniform(-3, -1)
    fixed_s = step_s * 10 ** rng.uniform(-2, 1)
    per_request_s = fixed_s / num_envs * 10 ** rng.uniform(-2, 1)
    latencies_s = lognormal(rng, step_s, float(rng.choice(cvs)))
    return Loop(num_envs, fixed_s, per_request_s, latencies_s, 1 + seed % 2)


def errors(loop: Loop, found: Forecast, num: int = 6000) -> Numbers:
    measured = [simulate(loop, threshold, loop.num_envs, num=num) for threshold in found.thresholds.tolist()]
    wrong: Numbers = found.rates / np.array(measured) - 1
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("num_envs", [8, 64])
def test_forecasts_agree_with_a_simulation(name: str, num_envs: int) -> None:
    loop = workload(name, num_envs)
    found = forecast(loop, candidates(num_envs))
    wrong, early = errors(loop, found), found.thresholds <= 0.9 * num_envs
    assert np.abs(wrong[early]).max() < 0.055
    assert wrong.max() < 0.055, "never hopeful"
    assert wrong.min() > -0.2, "a batch of all waits for the slowest, of whom there are few samples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["W1", "W4"])
def test_forecasts_are_careful_where_equal_latencies_resonate(name: str) -> None:
    loop = workload(name, 64)
    wrong = errors(loop, forecast(loop, candidates(64)))
    assert abs(wrong[0]) < 0.055, "launching at once is not concerned"
    assert -0.4 < wrong.min() < wrong.max() < 0.12


@pytest.mark.slow
def test_forecasts_agree_with_simulations_of_random_loops() -> None:
    for lanes, low, high in ((1, -0.1, 0.06), (2, -0.1, 0.2)):
        wrong = []
        for seed in range(lanes - 1, 40, 2):
            loop = random_loop(seed)
            few = np.array(sorted({1, *(math.ceil(loop.num_envs * part) for part in (0.1, 0.3, 0.5, 0.7))}))
            wrong += errors(loop, forecast(loop, few), num=40 * loop.num_envs + 1000).tolist()
        assert np.median(np.abs(wrong)) < 0.02
        assert low < np.quantile(wrong, 0.05) <= np.quantile(wrong, 0.95) < high


# The rule.


def reached(loop: Loop, num: int) -> float:
    """Return the simulated rate of the best rule, over the best one of a sweep."""
    parts = (0.3, 0.5, 0.7, 0.85, 0.95, 1.0)
    powers = {2**i for i in range(8) if 2**i <= loop.num_envs}
    sweep = sorted(powers | {math.ceil(loop.num_envs * part) for part in parts})
    best = max(simulate(loop, threshold, loop.num_envs, num=num) for threshold in sweep)
    return simulate(loop, *rule_of(loop), num=num) / best


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(13), range(13, 26)])
def test_the_rule_is_nearly_as_fast_as_the_best_of_a_sweep(seeds: range) -> None:
    found = {seed: reached(random_loop(seed), num=30 * random_loop(seed).num_envs + 1000) for seed in seeds}
    assert min(found.values()) >= 0.93, found


@pytest.mark.slow
def test_equal_latencies_are_the_worst_case_of_the_rule() -> None:
    found = {seed: reached(random_loop(seed, (0.0, 0.1)), num=3000) for seed in range(40)}
    assert min(found.values()) >= 0.7, found
    assert np.quantile(list(found.values()), 0.2) >= 0.97, found


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_rule_is_nearly_as_fast_as_the_best_of_a_sweep_on_every_workload(name: str) -> None:
    found = {num_envs: reached(workload(name, num_envs), num=4000) for num_envs in (8, 32, 64)}
    assert min(found.values()) >= 0.97, found


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4", "W5b"])
@pytest.mark.parametrize("num_envs", [8, 32, 64])
def test_few_are_enough_where_simulation_is_the_limit(name: str, num_envs: int) -> None:
    threshold, max_size = rule_of(workload(name, num_envs))
    assert threshold <= 4
    assert max_size == num_envs


@pytest.mark.parametrize("num_envs", [8, 32, 64, 256])
def test_nearly_all_are_waited_for_where_the_fixed_cost_is_the_limit(num_envs: int) -> None:
    threshold, max_size = rule_of(workload("W5a", num_envs))
    assert threshold >= 0.85 * num_envs
    assert max_size == num_envs


def test_where_something_else_is_the_limit_nobody_waits() -> None:
    loop = workload("W5a", 64)
    found = forecast(loop, candidates(64))
    threshold, _ = best_rule(loop, found, np.minimum(found.rates, 100.0))
    assert threshold <= 8


def test_two_lanes_that_are_always_busy_share_evenly() -> None:
    loop = workload("W5a", 64, lanes=2)
    found = forecast(loop, candidates(64))
    threshold, max_size = best_rule(loop, found, np.full(len(found.rates), 500.0))
    assert found.natural < threshold <= 1.1 * found.natural
    assert threshold <= max_size <= 1.2 * found.natural


# Whatever comes.


@pytest.mark.parametrize("num_envs", [1, 2, 3, 64, 4096])
@pytest.mark.parametrize("latencies_s", [[0.0], [0.1], [0.0] * 40, [0.0, 0.0, 1.0], [1e-9, 3600.0]])
@pytest.mark.parametrize("costs", [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01), (1e-12, 1e-15), (0.01, 0.001), (3600.0, 60.0)])
@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_the_oddest_loops_have_a_finite_forecast_and_a_valid_rule(
    num_envs: int, latencies_s: list[float], costs: tuple[float, float], lanes: int
) -> None:
    loop = Loop(num_envs, *costs, np.array(latencies_s), lanes)
    found = forecast(loop, candidates(num_envs))
    for values in (found.rates, found.batches, found.cycles_s):
        assert np.isfinite(values).all()
        assert (values > 0).all()
    assert 1 <= found.natural <= num_envs
    assert (found.batches <= num_envs).all()
    threshold, max_size = best_rule(loop, found, found.rates)
    assert 1 <= threshold <= max_size <= num_envs


@quick
@given(loops(), st.lists(st.floats(0.0, 1e9), min_size=1, max_size=1))
def test_a_rule_is_valid_under_any_limit(loop: Loop, limit: list[float]) -> None:
    found = forecast(loop, candidates(loop.num_envs))
    threshold, max_size = best_rule(loop, found, np.minimum(found.rates, limit[0]))
    assert 1 <= threshold <= max_size <= loop.num_envs


@given(st.integers(1, 5000), st.lists(st.integers(-5, 6000), max_size=3))
def test_candidates_go_from_one_to_all(num_envs: int, others: list[int]) -> None:
    found = candidates(num_envs, *others).tolist()
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (1, num_envs)
    assert {other for other in others if 1 <= other <= num_envs} <= set(found)
    assert len(found) < 40


def test_a_threshold_that_is_no_candidate_is_judged_by_the_nearest_one() -> None:
    found = forecast(make_loop(64), candidates(64))
    assert found.thresholds[found.index(64)] == 64
    assert found.thresholds[found.index(10_000)] == 64
    assert found.thresholds[found.index(5)] in (4, 6)


# What it costs.


def cpu_s(work: object) -> float:
    assert callable(work)
    best_s = math.inf
    for _ in range(5):
        began_s = time.process_time()
        work()
        best_s = min(best_s, time.process_time() - began_s)
    return best_s


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_forecast_of_thousands_of_environments_takes_milliseconds(lanes: int) -> None:
    loop = workload("W3", 4096, lanes)
    assert len(loop.latencies_s) == 512
    assert cpu_s(lambda: rule_of(loop)) < DECISION_S


def test_a_decision_of_the_tuner_about_thousands_of_environments_takes_milliseconds() -> None:
    loop = workload("W5a", 4096)
    gen = GenReading(
        "gen", Batching(1, 256, 0.01), loop.fixed_s, loop.per_request_s, 0.5, loop.latencies_s, 9999, 99, 9.0
    )
    trains = (TrainReading("trainer", "gen", 3, 3000, 0.1, 9.0),)
    reading = Reading(10.0, (gen,), (SimReading("envs", "gen", 4096, 9999, 50.0, 16),), trains, 132)
    assert Tuner().decide(reading) is not None
    assert cpu_s(lambda: Tuner().decide(reading)) < DECISION_S


# Generation and training on one device.


@given(seconds, seconds)
def test_two_that_take_turns_need_the_sum(gen_s: float, train_s: float) -> None:
    assert speeds(0, 8) == (0.5, 0.5)
    assert float(shared_limit(gen_s, train_s, 0, 8)) == pytest.approx(1 / (gen_s + train_s))


@given(st.floats(0.05, 0.95), seconds, seconds)
def test_speeds_that_add_up_to_one_need_the_sum(speed: float, gen_s: float, train_s: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ebrl.core.sharing.speeds", lambda units, sm_units: (speed, 1 - speed))
        assert float(shared_limit(gen_s, train_s, 3, 8)) == pytest.approx(1 / (gen_s + train_s))


@given(seconds, seconds, st.floats(1.0, 10.0), st.integers(0, 7))
def test_more_work_on_a_device_never_raises_its_rate(gen_s: float, train_s: float, more: float, units: int) -> None:
    rate = float(shared_limit(gen_s, train_s, units, 8))
    assert float(shared_limit(gen_s * more, train_s, units, 8)) <= rate * (1 + 1e-9)
    assert float(shared_limit(gen_s, train_s * more, units, 8)) <= rate * (1 + 1e-9)
    assert rate <= 1 / max(gen_s, train_s) * (1 + 1e-9), "neither is faster than alone"
    assert rate > 0


def test_no_work_is_no_limit_but_a_finite_one() -> None:
    assert np.isfinite(shared_limit(np.zeros(3), 0.0, 0, 8)).all()
    assert float(shared_limit(0.0, 0.01, 0, 8)) == pytest.approx(100)


@pytest.mark.parametrize("sm_units", [*range(1, 20), 108, 132])
def test_divisions_leave_something_to_both(sm_units: int) -> None:
    found = gen_units(sm_units)
    assert found == sorted(set(found))
    assert found[0] == 0
    assert all(0 < units < sm_units for units in found[1:])
    assert found == [0] or sm_units > 1
    assert len(found) <= 8
    for units in found:
        assert all(0 < speed <= 1 for speed in speeds(units, sm_units))
    gens = [speeds(units, sm_units)[0] for units in found[1:]]
    assert gens == sorted(gens), "more units are faster"


def shared_readings(
    *,
    gen_units: int = 0,
    fixed_s: float = 0.01,
    per_request_s: float = 0.001,
    train_s: float = 2e-4,
    batch_size: int = 1000,
    training: float = 0.4,
    generating: float = 0.6,
    updates: int = 1,
) -> tuple[Reading, Reading]:
    """Return what is seen at two updates if both sides take so long alone, and meet by chance."""
    gen_speed, train_speed = speeds(gen_units, 8)
    slowdown = training / gen_speed + 1 - training
    update_s = train_s * batch_size / (1 - generating + generating * train_speed)
    period_s = update_s / training * updates
    readings = []
    for num in (3, 3 + updates):
        now_s = 100.0 + period_s * (num > 3)
        busy_s = 50.0 + generating * period_s * (num > 3)
        gen = GenReading(
            "gen", Batching(1, 64, 0.01), fixed_s * slowdown, per_request_s * slowdown, 0.5, np.full(40, 0.01),
            0, 0, busy_s,
        )  # fmt: skip
        trains = (TrainReading("trainer", "gen", num, num * batch_size, update_s, now_s),)
        readings.append(Reading(now_s, (gen,), (), trains, 8, gen_units))
    return readings[0], readings[1]


@given(
    st.sampled_from(gen_units(8)), seconds, seconds, seconds, st.floats(0.05, 1.0), st.floats(0.0, 1.0),
    st.integers(1, 4),
)  # fmt: skip
def test_costs_alone_are_recovered_from_what_was_seen_together(
    units: int,
    fixed_s: float,
    per_request_s: float,
    train_s: float,
    training: float,
    generating: float,
    updates: int,
) -> None:
    before, last = shared_readings(
        gen_units=units,
        fixed_s=fixed_s,
        per_request_s=per_request_s,
        train_s=train_s,
        training=training,
        generating=generating,
        updates=updates,
    )
    found = sharing(before, last, "gen", "trainer")
    assert found is not None
    assert (found.fixed_s, found.per_request_s) == pytest.approx((fixed_s, per_request_s), rel=1e-6)
    assert found.train_s == pytest.approx(train_s, rel=1e-6)
    assert found.gen_slowdown >= 1
    assert found.gen_s(10) == pytest.approx(fixed_s / 10 + per_request_s, rel=1e-6)
    assert found.limits([1, 10], units).tolist() == [found.limit(1, units), found.limit(10, units)]


def test_nothing_is_known_before_an_update_or_of_others() -> None:
    before, last = shared_readings()
    assert sharing(last, last, "gen", "trainer") is None
    assert sharing(before, last, "other", "trainer") is None
    assert sharing(before, last, "gen", "other") is None
    assert isinstance(sharing(before, last, "gen", "trainer"), Sharing)


def test_more_than_all_the_time_counts_as_all_of_it() -> None:
    before, last = shared_readings()
    slow = tuple(replace(train, update_s=1e3) for train in last.trains)
    busy = tuple(replace(gen, busy_s=1e6) for gen in last.gens)
    found = sharing(before, replace(last, trains=slow, gens=busy), "gen", "trainer")
    assert found is not None
    assert found.gen_slowdown == 2
    assert found.train_s == pytest.approx(1e3 / 1000 / 2)
