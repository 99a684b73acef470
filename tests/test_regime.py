"""When what batches and simulators take is no longer what the settings were made for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.regime import FEW, NEW, Regime


def looks(regime: Regime, *times_s: float) -> list[bool]:
    return [regime.changed(one) for one in times_s]


def test_what_stays_is_no_news_and_what_changes_by_a_third_is() -> None:
    regime = Regime()
    assert looks(regime, *[1.0] * 20) == [False] * 20
    assert looks(regime, 1.3, 1.0, 1 / 1.3) == [False] * 3
    regime = Regime()
    assert looks(regime, 1.0, 1.36, 1.36, 0.8) == [False, True, False, True]
    assert Regime().changed(1.0) is False


def test_any_of_the_times_counts() -> None:
    for at in range(3):
        regime, times_s = Regime(), [1.0, 2.0, 3.0]
        regime.changed(*times_s)
        times_s[at] /= 2
        assert regime.changed(*times_s)


def test_times_that_are_hardly_any_are_all_alike() -> None:
    assert looks(Regime(), 0.0, 1e-9, 5e-7, 1e-6, 0.0) == [False] * 5


@given(st.lists(st.floats(1e-5, 10.0), min_size=1, max_size=40), st.floats(1e-5, 10.0))
def test_settling_is_no_news(before: list[float], after: float) -> None:
    regime = Regime()
    looks(regime, *before)
    scatter = regime.scatter
    regime.settle()
    assert regime.changed(after) is False
    assert regime.scatter == scatter, "what was turned is nothing that scatters"
    assert regime.changed(after) is False


@pytest.mark.parametrize("jump", [1.1, 1.5, 2.0])
def test_what_scatters_is_no_news_once_that_is_known_and_a_change_is(jump: float) -> None:
    rng = np.random.default_rng(0)
    for change in (5.0, 0.2):
        regime = Regime()
        looks(regime, *(jump ** rng.uniform(-1, 1, 40)).tolist())
        assert 0.1 * math.log(jump) < regime.scatter < 2 * math.log(jump)
        assert not any(looks(regime, *(jump ** rng.uniform(-1, 1, 300)).tolist()))
        assert any(looks(regime, *(change * jump ** rng.uniform(-1, 1, FEW + 1)).tolist()))


def test_a_slow_drift_is_noticed_in_the_end() -> None:
    regime = Regime()
    drift = [1.01**number for number in range(200)]
    news = looks(regime, *drift)
    assert 2 <= sum(news) <= math.log(drift[-1]) / NEW
