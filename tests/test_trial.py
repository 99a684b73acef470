"""A trial: one move of the tuner, judged by what was done per second before and after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebrl.core.readings import Batching, Move, Reading, SimReading, TrainReading
from ebrl.core.trial import PATIENCE_S, Trial, enough

MOVE = Move(0.0, "gen", "batching", Batching(1, 256, 0.01), Batching(8, 8, 1.0), "", 0.1)


def stepping(now_s: float, steps: int, num_envs: int = 20) -> Reading:
    return Reading(now_s, (), (SimReading("envs", "gen", num_envs, steps, 0.0, 1),))


def training(now_s: float, updates: int, updated_s: float, size: int = 100) -> Reading:
    trains = (TrainReading("trainer", "gen", updates, updates * size, 1.0, updated_s),)
    return replace(stepping(now_s, 10 * updates * size), trains=trains)


def test_a_trial_needs_something_to_compare_with() -> None:
    assert enough(stepping(0, 0)) == 80
    assert enough(stepping(0, 0, 1)) == 64
    assert Trial.of(MOVE, stepping(0, 0), stepping(1, 79)) is None
    assert Trial.of(MOVE, stepping(0, 0), stepping(0, 80)) is None, "no time has passed"
    assert Trial.of(MOVE, stepping(0, 0), stepping(1, 80)) is not None
    assert Trial.of(MOVE, training(0, 0, 0.0), training(9, 1, 9.0)) is None
    assert Trial.of(MOVE, training(0, 0, 0.0), training(9, 2, 9.0)) is not None
    assert Trial.of(MOVE, stepping(0, 0), training(9, 2, 9.0)) is None, "another kind of progress"


@pytest.mark.parametrize(("steps", "paid"), [(1000, True), (960, True), (940, False), (0, False), (2000, True)])
def test_a_trial_compares_rates(steps: int, paid: bool) -> None:
    trial = Trial.of(MOVE, stepping(0, 0), stepping(10, 10_000))
    assert trial is not None
    assert not trial.ready(stepping(10.5, 10_079))
    assert not trial.ready(stepping(10.49, 10_490)), "too short, whatever was done"
    assert trial.ready(stepping(10.5, 10_500))
    assert trial.rates() == pytest.approx((1000, 1000), rel=0.01)
    trial = Trial.of(MOVE, stepping(0, 0), stepping(10, 10_000))
    assert trial is not None
    assert trial.ready(stepping(11 + PATIENCE_S * (not steps), 10_000 + steps))
    assert trial.paid(0.02) is paid
    assert "/s before" in trial.result()


def test_many_portions_are_judged_strictly() -> None:
    for steps, paid in ((9_900, True), (9_700, False)):
        trial = Trial.of(MOVE, stepping(0, 0), stepping(100, 1_000_000))
        assert trial is not None
        assert trial.ready(stepping(200, 1_000_000 + 100 * steps))
        assert trial.paid(0.02) is paid


def test_the_update_in_which_a_knob_was_turned_belongs_to_neither_side() -> None:
    trial = Trial.of(MOVE, training(0, 0, 0.0), training(21, 2, 20.0))
    assert trial is not None
    assert not trial.ready(training(25, 2, 20.0))
    assert not trial.ready(training(41, 3, 40.0)), "the update that ran is over"
    assert not trial.ready(training(46, 4, 45.0))
    assert not trial.ready(training(1000, 4, 45.0)), "an update takes what it takes"
    assert trial.ready(training(1001, 5, 50.0))
    assert trial.rates() == (10.0, 20.0)
    assert trial.paid(0.02)


@pytest.mark.parametrize(("steps", "paid"), [(0, False), (25, False), (40, True), (79, True)])
def test_when_patience_ends_a_trial_is_judged_by_what_was_done(steps: int, paid: bool) -> None:
    trial = Trial.of(MOVE, stepping(0, 0), stepping(100, 100))
    assert trial is not None
    assert not trial.ready(stepping(100 + PATIENCE_S, 100 + steps))
    assert trial.ready(stepping(101 + PATIENCE_S, 100 + steps))
    assert trial.rates() == pytest.approx((1.0, steps / (1 + PATIENCE_S)))
    assert trial.paid(0.02) is paid
