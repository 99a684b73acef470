"""Profiles: fits find the line and lose no time over stalls, meters are exact, files come back as they were."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebrl.core.errors import ConfigError
from ebrl.core.fit import ADOPT, PRIOR_NUM, LinearFit
from ebrl.core.meters import PRIOR_SAMPLES, Latencies, Rate, Utilisation
from ebrl.core.profile import MAX_SCALING, FitRecord, SimulationProfile, StageProfile, StageRecord
from ebrl.core.profile_file import load, save

A_S, B_S = 0.004, 0.0002
seeds = st.integers(0, 10_000)
lines = st.tuples(st.floats(1e-4, 0.1), st.floats(1e-5, 0.01))
quick = settings(max_examples=40)


def line(n: float, a_s: float = A_S, b_s: float = B_S) -> float:
    return a_s + b_s * n


def off(fit: LinearFit, a_s: float = A_S, b_s: float = B_S, sizes: tuple[int, ...] = (8, 32, 64)) -> float:
    """Return the largest relative error of the predictions."""
    return max(abs(fit.predict(n) / line(n, a_s, b_s) - 1.0) for n in sizes)


def feed(
    fit: LinearFit,
    rng: random.Random,
    num: int = 300,
    *,
    a_s: float = A_S,
    b_s: float = B_S,
    noise: float = 0.1,
    stalls: float = 0.0,
    size: Callable[[random.Random], int] = lambda rng: rng.randint(1, 64),
) -> LinearFit:
    """Let a fit see calls whose times scatter by `noise`, of which a share `stalls` takes 10 to 50 times as long."""
    for _ in range(num):
        n = size(rng)
        seconds = line(n, a_s, b_s) * rng.lognormvariate(0.0, noise)
        fit.observe(n, seconds * (rng.uniform(10.0, 50.0) if rng.random() < stalls else 1.0))
    return fit


def test_a_fit_is_defined_from_the_start() -> None:
    fit = LinearFit()
    assert (fit.num, fit.predict(7)) == (0.0, 0.0)
    fit.observe(4, 0.02)
    assert (fit.a_s, fit.b_s, fit.num) == (0.02, 0.0, 1.0)
    for seconds in (0.02, 0.021, 0.019, 0.02):
        fit.observe(4, seconds)
    assert fit.b_s == 0.0
    assert fit.predict(100) == fit.a_s == pytest.approx(0.02, rel=0.01)
    with pytest.raises(ConfigError, match="forgetting"):
        LinearFit(1.5)


def test_calls_that_take_no_time() -> None:
    fit = LinearFit()
    for n in (1, 2, 3, 2):
        fit.observe(n, 0.0)
    assert (fit.a_s, fit.b_s) == (0.0, 0.0)
    for n in (1, 2, 3, 2):
        fit.observe(n, 0.5)
    assert fit.predict(2) == pytest.approx(0.5)


@given(lines, st.lists(st.integers(1, 256), min_size=2, max_size=30).filter(lambda sizes: len(set(sizes)) > 1))
def test_a_line_without_noise_is_found_exactly(known: tuple[float, float], sizes: list[int]) -> None:
    fit = LinearFit()
    for n in sizes:
        fit.observe(n, line(n, *known))
    assert (fit.a_s, fit.b_s) == pytest.approx(known, rel=1e-6)


@quick
@given(lines, seeds)
def test_without_forgetting_it_is_least_squares_in_any_order(known: tuple[float, float], seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 64) for _ in range(60)]
    calls = [(n, line(n, *known) * rng.uniform(0.99, 1.01)) for n in sizes]
    b_s, a_s = np.polyfit([n for n, _ in calls], [seconds for _, seconds in calls], 1)
    if a_s <= 0.0:
        return
    for _ in range(3):
        rng.shuffle(calls)
        fit = LinearFit(forgetting=1.0)
        for call in calls:
            fit.observe(*call)
        assert fit.num == 60
        assert (fit.a_s, fit.b_s) == pytest.approx((a_s, b_s), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(1, 1.0), (2, 0.9), (3, 0.8)], (0.9, 0.0)),  # falling: a constant
        ([(10, 1.0), (12, 1.4)], (0.0, (10 * 1.0 + 12 * 1.4) / (10**2 + 12**2))),  # steeper than in proportion
    ],
)
def test_where_a_bound_is_broken_the_best_line_on_it_is_taken(
    calls: list[tuple[int, float]], expected: tuple[float, float]
) -> None:
    fit = LinearFit(forgetting=1.0)
    for call in calls:
        fit.observe(*call)
    assert (fit.a_s, fit.b_s) == pytest.approx(expected)


@quick
@given(lines, seeds, st.sampled_from([0.02, 0.1, 0.2]))
def test_a_noisy_line_is_recovered(known: tuple[float, float], seed: int, noise: float) -> None:
    fit = feed(LinearFit(), random.Random(seed), a_s=known[0], b_s=known[1], noise=noise)
    assert off(fit, *known) < 0.03 + 1.2 * noise
    assert fit.num == pytest.approx(100, abs=6)


@quick
@given(lines, seeds, st.sampled_from([0.02, 0.1, 0.2]))
def test_stalls_do_not_matter(known: tuple[float, float], seed: int, noise: float) -> None:
    fit = feed(LinearFit(), random.Random(seed), a_s=known[0], b_s=known[1], noise=noise, stalls=0.05)
    assert off(fit, *known) < 0.03 + 1.2 * noise


@quick
@given(seeds, st.floats(10.0, 50.0), st.integers(1, 64))
def test_one_stall_moves_nothing(seed: int, times: float, n: int) -> None:
    fit = feed(LinearFit(), random.Random(seed))
    before = (fit.a_s, fit.b_s, fit.num)
    fit.observe(n, line(n) * times)
    assert (fit.a_s, fit.b_s, fit.num) == before


def test_a_stall_at_a_size_that_was_never_seen_moves_nothing() -> None:
    fit = feed(LinearFit(), random.Random(0), size=lambda rng: 16)
    fit.observe(32, 1.0)  # a line through the others gives at most twice their time
    assert fit.predict(32) == fit.predict(16)
    fit.observe(32, 1.7 * line(16))
    assert fit.predict(32) == pytest.approx(1.7 * line(16), rel=0.1)


def test_a_slow_first_call_is_forgotten_after_the_second() -> None:
    fit = LinearFit()
    for seconds in (4.0, 0.5, 0.011):
        fit.observe(16, seconds)
        assert fit.predict(16) == seconds
    fit.observe(32, 0.012)
    assert fit.predict(16) == pytest.approx(0.011, rel=0.1)


@quick
@given(seeds, st.sampled_from([5.0, 3.0, 0.2]), st.sampled_from([0.02, 0.1]), st.booleans())
def test_a_new_regime_is_followed(seed: int, times: float, noise: float, one_size: bool) -> None:
    rng = random.Random(seed)
    size: Callable[[random.Random], int] = (lambda rng: 16) if one_size else (lambda rng: rng.randint(1, 64))
    fit = feed(LinearFit(), rng, noise=noise)
    feed(fit, rng, 8, a_s=times * A_S, b_s=times * B_S, noise=noise, size=size)
    assert abs(math.log(fit.predict(32) / line(32))) < 0.5 * abs(math.log(times)), "too soon"
    feed(fit, rng, ADOPT, a_s=times * A_S, b_s=times * B_S, noise=noise, size=size)
    assert off(fit, times * A_S, times * B_S) < 0.05 + 3.0 * noise  # at other sizes too, whose times were known


def test_what_is_neither_rare_nor_far_off_counts() -> None:
    rng = random.Random(0)
    fit = LinearFit()
    for _ in range(600):
        fit.observe(16, (0.03 if rng.random() < 0.3 else 0.01) * rng.lognormvariate(0.0, 0.05))
    assert fit.predict(16) == pytest.approx(0.016, rel=0.2)


def test_the_slope_outlives_batches_of_one_size() -> None:
    fit = feed(LinearFit(), random.Random(0), noise=0.05)
    slope_s = fit.b_s
    feed(fit, random.Random(1), 2000, noise=0.05, size=lambda rng: 64)
    assert fit.b_s == pytest.approx(slope_s, rel=0.05)
    feed(fit, random.Random(1), 1000, noise=0.05, size=lambda rng: rng.choice([63, 64]))
    assert off(fit, sizes=(1, 8, 64)) < 0.3


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.0, 1e6)), max_size=60), st.floats(0.5, 1.0))
def test_never_negative_never_falling(calls: list[tuple[int, float]], forgetting: float) -> None:
    fit = LinearFit(forgetting)
    for call in calls:
        fit.observe(*call)
        assert 0.0 <= fit.a_s < math.inf
        assert 0.0 <= fit.b_s < math.inf
        assert 0.0 < fit.num <= (1.0 / (1.0 - forgetting) + 1.0 if forgetting < 1.0 else len(calls))
        assert fit.a_s <= 1e6 * (1.0 + 1e-9)


@given(seeds)
def test_equal_calls_give_equal_fits(seed: int) -> None:
    first, second = (feed(LinearFit(), random.Random(seed), 60, stalls=0.1) for _ in range(2))
    assert (first.a_s, first.b_s, first.num) == (second.a_s, second.b_s, second.num)


def test_a_warm_start_is_a_prior() -> None:
    fit = LinearFit()
    fit.warm_start(A_S, B_S, 5000.0)
    assert (fit.predict(10), fit.num) == (line(10), PRIOR_NUM)
    for _ in range(50):  # sizes that are all equal: the level is learned, the slope kept
        fit.observe(16, 1.1 * line(16))
    assert fit.b_s == pytest.approx(B_S)
    assert fit.predict(16) == pytest.approx(1.1 * line(16), rel=0.03)
    feed(fit, random.Random(0), a_s=2 * A_S, b_s=3 * B_S)
    assert off(fit, 2 * A_S, 3 * B_S) < 0.1


def test_a_wrong_warm_start_falls_soon() -> None:
    fit = LinearFit()
    fit.warm_start(10 * A_S, 10 * B_S, 3.0)
    for _ in range(3):
        fit.observe(16, line(16))
    assert off(fit) < 1e-6  # its slope is kept in proportion
    fit = LinearFit()
    fit.warm_start(A_S, B_S, 0.0)  # rests on nothing
    assert fit.predict(1) == 0.0
    fit.warm_start(line(16), 0.0, 50.0)  # from a run that saw one size
    for n in (16, 32):
        fit.observe(n, line(n))
    assert off(fit) < 1e-6


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=60), st.integers(1, 40), st.floats(0.0, 1.0), seeds)
def test_quantiles_are_those_of_the_last_samples(seconds: list[float], size: int, q: float, seed: int) -> None:
    latencies = Latencies(size)
    for one in seconds[: len(seconds) // 2]:
        latencies.add(one)
    latencies.extend(seconds[len(seconds) // 2 :])
    last = seconds[-size:]
    assert latencies.samples().tolist() == sorted(last)
    assert latencies.quantile(q) == pytest.approx(float(np.quantile(last, q)))
    assert latencies.mean == pytest.approx(float(np.mean(last)))
    if latencies.mean > 1e-9:
        assert latencies.cv == pytest.approx(float(np.std(last) / np.mean(last)), abs=1e-9)
    shuffled = Latencies(size)
    random.Random(seed).shuffle(last)
    shuffled.extend(last)
    assert (shuffled.quantile(q), shuffled.mean, shuffled.cv) == (latencies.quantile(q), latencies.mean, latencies.cv)


def test_latencies_at_the_edges() -> None:
    empty = Latencies()
    assert len(empty) == 0
    assert all(map(math.isnan, (empty.quantile(0.5), empty.mean, empty.cv)))
    empty.add(0.0)
    assert (empty.mean, empty.cv) == (0.0, 0.0)
    with pytest.raises(ConfigError, match=r"Latencies\.size"):
        Latencies(0)


@quick
@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=600))
def test_a_warm_start_has_the_same_distribution(seconds: list[float]) -> None:
    known, warm = Latencies(), Latencies()
    known.extend(seconds)
    quantiles = [known.quantile(i / 32) for i in range(33)]
    warm.warm_start(quantiles, known.mean)
    assert len(warm) == PRIOR_SAMPLES
    assert np.min(seconds[-512:]) <= warm.quantile(0.0) <= warm.quantile(1.0) <= np.max(seconds[-512:])
    assert quantiles[7] <= warm.quantile(0.25) <= quantiles[9]
    warm.extend([1.0] * 512)
    assert warm.mean == 1.0


def test_a_warm_start_keeps_the_mean_of_a_long_tail() -> None:
    known, warm = Latencies(), Latencies()
    known.extend(float(x) for x in np.random.default_rng(0).lognormal(0.0, 1.0, 512))
    warm.warm_start([known.quantile(i / 32) for i in range(33)], known.mean)
    assert warm.mean == pytest.approx(known.mean, rel=0.02)


@quick
@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 9)), max_size=40), st.floats(0.1, 100.0), st.floats(0, 9))
def test_a_rate_is_weighted_arrivals_over_weighted_time(
    arrivals: list[tuple[float, int]], window_s: float, after_s: float
) -> None:
    rate, now_s, seen = Rate(window_s), 100.0, list[tuple[float, int]]()
    rate.add(now_s, 5)  # starts the meter
    for gap_s, num in arrivals:
        now_s += gap_s
        rate.add(now_s, num)
        seen.append((now_s, num))
    now_s += after_s
    if now_s - 100.0 < 1e-9:
        assert rate.per_s(100.0) == 0.0
        return
    weighted_s = window_s * (1.0 - math.exp((100.0 - now_s) / window_s))
    expected = sum(num * math.exp((time_s - now_s) / window_s) for time_s, num in seen) / weighted_s
    assert rate.per_s(now_s) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seconds", [3.0, 30.0, 300.0])
def test_periodic_arrivals(seconds: float) -> None:
    rate = Rate(10.0)
    for tick in range(round(seconds / 0.05) + 1):
        rate.add(1e5 + 0.05 * tick, 2)
    assert rate.per_s(1e5 + seconds + 0.025) == pytest.approx(40.0, rel=0.01)


@given(seeds)
@settings(max_examples=20)
def test_poisson_arrivals(seed: int) -> None:
    rng, rate, now_s = random.Random(seed), Rate(10.0), 0.0
    rate.add(now_s, 0)
    while now_s < 40.0:
        now_s += rng.expovariate(50.0)
        rate.add(now_s)
    assert rate.per_s(now_s) == pytest.approx(50.0, rel=0.2)  # 1000 arrivals count: four standard deviations are 0.13


def test_a_rate_follows_and_fades() -> None:
    rate = Rate(2.0)
    assert rate.per_s(5.0) == 0.0
    for tick in range(1000):
        rate.add(0.01 * tick)
    for tick in range(100):
        rate.add(10.0 + 0.1 * tick)
    assert rate.per_s(20.0) == pytest.approx(10.0, rel=0.1)
    assert rate.per_s(40.0) < 0.01
    with pytest.raises(ConfigError, match=r"Rate\.window_s"):
        Rate(0.0)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20), st.floats(0.0, 1.0), st.floats(0.5, 64.0))
def test_constant_use_is_measured_exactly(gaps_s: list[float], use: float, capacity: float) -> None:
    usage, now_s = Utilisation(5.0), 1e4
    usage.read(now_s, 7.0)
    assert usage.value == 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        usage.read(now_s, 7.0 + use * capacity * (now_s - 1e4), capacity)
    assert usage.value == pytest.approx(use, abs=1e-6)


def test_utilisation_follows_and_stands_readings_that_make_no_sense() -> None:
    usage = Utilisation(5.0)
    for second in range(50):
        usage.read(float(second), float(second))
    usage.read(49.0, 49.5)  # the same moment again: put off
    assert usage.value == pytest.approx(1.0)
    usage.read(50.0, 3.0)  # a lane was replaced: nothing can be said but that no work was seen
    for second in range(51, 100):
        usage.read(float(second), 3.0)
    assert usage.value < 0.001
    idle = Utilisation()
    idle.read(0.0, 0.0, 0.0)
    idle.read(1.0, 0.0, 0.0)
    assert idle.value == 0.0
    with pytest.raises(ConfigError, match=r"Utilisation\.window_s"):
        Utilisation(-1.0)


def profile(*shares: float, name: str = "gen", group: str = "policy") -> StageProfile:
    """Return a profile of a stage that speeds up with the root of its share."""
    made = StageProfile(name, group)
    rng = random.Random(0)
    for share in shares:
        for _ in range(120):
            n = rng.randint(1, 64)
            made.observe(n, line(n) / math.sqrt(share) * rng.lognormvariate(0.0, 0.02), share)
    return made


def test_a_profile_keeps_shares_apart() -> None:
    made = profile(1, 4, 16)
    assert sorted(made.fits) == [1, 4, 16]
    for share in (1, 4, 16):
        assert made.predict(32, share) == pytest.approx(line(32) / math.sqrt(share), rel=0.02)
    assert len(made.latency) == 360
    with pytest.raises(ConfigError, match="forgetting"):
        StageProfile("gen", forgetting=0.0)


def test_a_share_that_was_never_seen_is_scaled_from_the_nearest() -> None:
    made = profile(2, 8)
    assert made.predict(16, 3) == pytest.approx(made.predict(16, 2) * 2 / 3)
    assert made.predict(16, 10) == pytest.approx(made.predict(16, 8) * 0.8)
    assert made.predict(16, 4) == made.predict(16, 2) / 2  # as near to both: the smaller
    assert made.predict(16, 800) == made.predict(16, 8) / MAX_SCALING
    assert made.predict(16, 0.01) == made.predict(16, 2) * MAX_SCALING
    assert StageProfile("new").predict(16) == 0.0


def test_a_new_share_takes_the_slope_of_the_nearest() -> None:
    made = profile(2)
    for _ in range(4):
        made.observe(16, line(16) / math.sqrt(8), 8)
    assert made.predict(64, 8) == pytest.approx(line(64) / math.sqrt(8), rel=0.05)


def test_steps_and_resets_are_kept_apart() -> None:
    sim = SimulationProfile("reach")
    sim.step.latency.extend([0.01, 0.03])
    sim.reset.latency.add(1.0)
    sim.turnaround.latency.extend([0.02] * 3)
    assert [(stage.name, stage.group, len(stage.latency)) for stage in sim.stages] == [
        ("step", "reach", 2),
        ("reset", "reach", 1),
        ("turnaround", "reach", 3),
    ]


numbers = st.floats(0.0, 1e6)
fits = st.lists(
    st.builds(FitRecord, st.floats(1e-3, 1e3), numbers, numbers, st.floats(0.1, 1e6)),
    max_size=3,
    unique_by=lambda fit: fit.share,
)


@quick
@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), unique=True, max_size=3), st.data(), st.text())
def test_a_file_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, names: list[tuple[str, str]], data: st.DataObject, machine: str
) -> None:
    profiles = []
    for name, group in names:
        made = StageProfile(name, group)
        made.warm_start(StageRecord(name, group, tuple(data.draw(fits))))
        made.latency.extend(data.draw(st.lists(numbers, max_size=40)))
        profiles.append(made)
    path = tmp_path_factory.mktemp("profiles") / "profiles.json"
    save(path, profiles, machine)
    saved = load(path)
    assert saved.machine == machine
    assert saved.stages == tuple(made.record() for made in profiles)
    warm = [StageProfile(name, group) for name, group in names]
    assert saved.warm_start([*warm, StageProfile("nobody", "knows")]) == len(names)
    for made, again in zip(profiles, warm, strict=True):
        assert again.record().fits == made.record().fits
        assert len(again.latency) == (PRIOR_SAMPLES if len(made.latency) else 0)


def test_a_warm_profile_predicts_at_once_and_learns(tmp_path: Path) -> None:
    path = tmp_path / "profiles.json"
    save(path, [profile(1, 4), *SimulationProfile("reach").stages], "16 cores")
    save(path, [profile(1, 4), *SimulationProfile("reach").stages], "16 cores")  # replaces
    assert [child.name for child in tmp_path.iterdir()] == ["profiles.json"]
    warm = StageProfile("gen", "policy")
    assert load(path).warm_start([warm]) == 1
    assert warm.predict(48, 4) == pytest.approx(line(48) / 2, rel=0.02)
    assert warm.latency.quantile(0.5) == pytest.approx(profile(1, 4).latency.quantile(0.5), rel=0.1)
    for _ in range(30):
        warm.observe(16, 5 * line(16), 4)
    assert warm.predict(48, 4) == pytest.approx(5 * line(48), rel=0.05)
    seen = StageProfile("gen", "policy")
    seen.observe(8, 1.0)
    assert load(path).warm_start([seen]) == 1
    assert (seen.predict(8), len(seen.latency)) == (1.0, 1), "what was seen stays"
    assert seen.predict(48, 4) == pytest.approx(line(48) / 2, rel=0.02)


FIT = {"share": 2.0, "a_s": 0.1, "b_s": 0.2, "num": 3.0}
STAGE = {"name": "gen", "group": "", "fits": [FIT], "mean_s": 0.5, "quantiles_s": [0.1, 0.9], "num": 4}
FILE = {"version": 1, "machine": "", "stages": [STAGE]}
NOWHERE = object()


def changed(where: tuple[str | int, ...], value: object) -> Any:
    """Return the good file with one value replaced, or removed."""
    root: Any = copy.deepcopy(FILE)
    node = root
    for key in where[:-1]:
        node = node[key]
    if value is NOWHERE:
        del node[where[-1]]
    else:
        node[where[-1]] = value
    return root


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("version",), 2, "version must be 1 (or remove the file to begin without it), got 2"),
        (("version",), True, "version must be a number of at least 0, got True"),
        (("machine",), None, "machine must be a string, got None"),
        (("machine",), NOWHERE, "machine is missing; there is stages, version"),
        (("stages",), {}, "stages must be a list, got {}"),
        (("stages", 0), 7, "stages[0] must be an object, got 7"),
        (
            ("stages", 0, "group"),
            NOWHERE,
            "stages[0].group is missing; there is fits, mean_s, name, num, quantiles_s",
        ),
        (("stages", 0, "name"), 3, "stages[0].name must be a string, got 3"),
        (("stages",), [STAGE, STAGE], "stages[1] repeats the name and group of an earlier one: ('gen', '')"),
        (("stages", 0, "fits"), "none", "stages[0].fits must be a list, got 'none'"),
        (("stages", 0, "fits"), [FIT, FIT], "stages[0].fits[1] repeats the share of an earlier one: 2.0"),
        (("stages", 0, "fits", 0, "share"), 0, "stages[0].fits[0].share must be a number above 0, got 0"),
        (("stages", 0, "fits", 0, "a_s"), "x", "stages[0].fits[0].a_s must be a number of at least 0, got 'x'"),
        (("stages", 0, "fits", 0, "b_s"), -1, "stages[0].fits[0].b_s must be a number of at least 0, got -1"),
        (
            ("stages", 0, "fits", 0, "num"),
            float("nan"),
            "stages[0].fits[0].num must be a number of at least 0, got nan",
        ),
        (("stages", 0, "num"), -1, "stages[0].num must be a number of at least 0, got -1"),
        (("stages", 0, "mean_s"), float("inf"), "stages[0].mean_s must be a number of at least 0, got inf"),
        (("stages", 0, "mean_s"), 5.0, "stages[0].mean_s must be between the ends of quantiles_s, 0.1 and 0.9, got"),
        (("stages", 0, "mean_s"), 0.09, "stages[0].mean_s must be between the ends of quantiles_s, 0.1 and 0.9, got"),
        (("stages", 0, "quantiles_s"), [], "stages[0].mean_s must be between the ends of quantiles_s, 0 and 0, got"),
        (("stages", 0, "quantiles_s", 1), [], "stages[0].quantiles_s[1] must be a number of at least 0, got []"),
        (
            ("stages", 0, "quantiles_s"),
            [1],
            "stages[0].quantiles_s must be empty, or two or more rising numbers, got [1]",
        ),
        (("stages", 0, "quantiles_s", 0), 1, "stages[0].quantiles_s must be empty, or two or more rising numbers, got"),
    ],
)
def test_a_malformed_file_names_the_field(
    tmp_path: Path, where: tuple[str | int, ...], value: object, message: str
) -> None:
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps(changed(where, value)))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


PLACES: list[tuple[str | int, ...]] = [
    *((key,) for key in FILE),
    ("stages", 0),
    *(("stages", 0, key) for key in STAGE),
    *(("stages", 0, "fits", 0, key) for key in FIT),
    ("stages", 0, "quantiles_s", 0),
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


@given(st.sampled_from(PLACES), values)
def test_any_value_anywhere_is_taken_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, where: tuple[str | int, ...], value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(changed(where, value)))
    refused = ""
    try:
        load(path)
    except ConfigError as error:
        refused = str(error)
    assert not refused or refused.startswith(f"{path}: {where[0]}")
    assert "\n" not in refused


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, b"\xff", "[1] 2", '{"version": ' + "1" * 5000 + "}"])
def test_what_is_not_json(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "profiles.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="is not JSON") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_what_the_operating_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "profiles.json")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        save(tmp_path / "no" / "profiles.json", [])
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "profiles.json", tmp_path / ("x" * 250)):
        with pytest.raises(ConfigError, match="cannot be written: "):
            save(place, [])
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        save(folder, [])
    assert {child.name for child in tmp_path.iterdir()} == {"file", "folder"}, "nothing half written is left"
