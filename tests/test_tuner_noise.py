"""The tuner where measurements scatter, where simulators wait for one another, and where services begin anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ebrl.core.readings import Batching, Move, Reading, SimReading, TrainReading
from ebrl.core.trial import PATIENCE_S, ROUNDS
from ebrl.core.tuner import LOOK_AGAIN_S, REFUSED_S, SLOWEST_LOOK_S, Tuner
from tests.plant import FEW_MOVES, Crowd, Plant, accustomed, busiest, turned, warm

PLACES: dict[str, dict[str, Any]] = {
    "generation": {},
    "simulation": {"fixed_s": 0.002, "per_request_s": 2e-5, "latency_s": 0.02, "cv": 1.5},
    "both": {"fixed_s": 0.004, "per_request_s": 2e-4, "latency_s": 0.01},
}

# Times that jump from look to look.


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("jump", [1.3, 1.5, 1.8])
def test_times_that_jump_lead_to_few_moves(place: str, jump: float) -> None:
    for seed in range(3):
        plant, tuner = Plant(jump=jump, noise=0.1, seed=seed, **PLACES[place]), Tuner()
        plant.run(tuner, 10)
        moves = plant.run(tuner, 130)
        assert busiest(moves) <= FEW_MOVES, (seed, turned(moves))


@pytest.mark.parametrize(("jump", "moved"), [(1.0, True), (1.8, False)])
def test_where_times_scatter_a_small_gain_is_not_worth_a_move(jump: float, moved: bool) -> None:
    plant = Plant(jump=jump, batching=Batching(52, 64, 1.0))
    tuner = accustomed(plant, 30)
    plant.jump = 1.0
    plant.advance(1.0)
    move = tuner.decide(plant.reading())
    assert (move is not None) is moved
    plant.batching = Batching(30, 64, 1.0)
    plant.advance(1.0)
    assert tuner.decide(plant.reading()) is not None or moved, "a large one is"


@pytest.mark.parametrize("jump", [1.3, 1.8])
def test_times_that_jump_are_no_new_regime(jump: float) -> None:
    plant, tuner = Plant(jump=jump, noise=0.1), Tuner()
    plant.run(tuner, 10)
    for _ in range(60):
        plant.advance(1.0)
        move = tuner.decide(plant.reading())
        if move is not None:
            plant.turn(move)
        assert tuner.look_s == SLOWEST_LOOK_S


@pytest.mark.slow
@pytest.mark.parametrize("jump", [1.0, 1.3, 1.8])
@pytest.mark.parametrize("change", [{"fixed_s": 0.1, "per_request_s": 5e-4}, {"latency_s": 0.05}])
def test_a_true_change_is_noticed_within_a_few_looks(jump: float, change: dict[str, float]) -> None:
    for seed in range(4):
        plant, tuner = Plant(jump=jump, seed=seed), Tuner()
        plant.run(tuner, 30)
        assert tuner.look_s == SLOWEST_LOOK_S
        for name, value in change.items():
            setattr(plant, name, value)
        looks = 0
        while tuner.look_s == SLOWEST_LOOK_S:
            plant.advance(1.0)
            move = tuner.decide(plant.reading())
            if move is not None:
                plant.turn(move)
            looks += 1
            assert looks <= 5, seed
        assert tuner.look_s == LOOK_AGAIN_S


@pytest.mark.slow
def test_more_lanes_are_taken_one_by_one_and_stay() -> None:
    plant, tuner = Plant(fixed_s=0.002, per_request_s=4e-4, latency_s=0.005, choices=range(1, 4)), Tuner()
    moves = plant.run(tuner, 60)
    lanes = [move for move in moves if move.knob == "lanes"]
    assert [(move.old.num_lanes, move.new.num_lanes) for move in lanes] == [(1, 2), (2, 3)]
    assert plant.batching.num_lanes == 3
    assert "on 2 lanes" in str(lanes[0])


def test_a_lane_that_does_not_pay_is_taken_back_with_its_rule() -> None:
    plant = Plant(per_request_s=2e-3, choices=range(1, 4), surprise=lambda rule: 0.4 if rule.num_lanes > 1 else 1.0)
    tuner = Tuner()
    moves = plant.run(tuner, REFUSED_S)
    there, back = (move for move in moves if move.knob == "lanes")
    assert (there.new.num_lanes, back.old, back.new) == (2, there.new, there.old)
    assert "taken back" in back.reason
    assert plant.batching.num_lanes == 1


# Simulators that wait for one another, or that sleep.


HALVES = [(8, 4), (4, 2), (2, 1)]


def test_fewer_simulators_at_once_are_kept_where_the_rate_stays() -> None:
    crowd, tuner = Crowd(lock=True), Tuner()
    rate = crowd.rate
    moves = crowd.run(tuner, 300)
    assert [(move.old, move.new) for move in moves] == HALVES
    assert "wait for one another" in str(moves[0])
    assert crowd.rate == rate


def test_fewer_simulators_at_once_are_taken_back_where_the_rate_drops() -> None:
    crowd, tuner = Crowd(lock=False), Tuner()
    moves = crowd.run(tuner, 300)
    assert [(move.old, move.new) for move in moves] == 3 * [(8, 4), (4, 8)]
    there, back = moves[0::2], moves[1::2]
    assert all("taken back" in move.reason for move in back)
    waits_s = [after.time_s - before.time_s for before, after in zip(back, there[1:], strict=False)]
    for number, wait_s in enumerate(waits_s):
        assert -1e-9 <= wait_s - REFUSED_S * 2**number <= SLOWEST_LOOK_S, "latencies that are its own doing are no news"


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_few_moves_where_simulators_sleep_and_rates_scatter(noise: float) -> None:
    for seed in range(3):
        crowd, tuner = Crowd(lock=False, noise=noise, seed=seed), Tuner()
        assert busiest(crowd.run(tuner, 200)) <= FEW_MOVES


def test_all_run_again_when_they_take_other_times() -> None:
    crowd, tuner = Crowd(lock=True), Tuner()
    crowd.run(tuner, 30)
    assert crowd.ceiling == 1
    crowd.lock, crowd.sleep_s = False, 0.1
    moves = crowd.run(tuner, REFUSED_S)
    assert [(move.old, move.new) for move in moves] == [(1, 8), (8, 4), (4, 8)], "tried once more, and taken back"
    assert "chosen for others" in moves[0].reason
    assert "taken back" in moves[2].reason


def test_all_run_again_when_others_come_and_not_when_old_ones_come_and_go() -> None:
    for known in (True, False):
        crowd, tuner = Crowd(lock=True), Tuner()
        moves = []
        for second in range(60):
            crowd.advance(1.0)
            reading = crowd.reading()
            extra = SimReading("eval", "gen", 4 if 30 <= second < 40 else 0, 100, 1.0, 8)
            sims = (*reading.sims, extra) if known or extra.num_envs else reading.sims
            move = tuner.decide(replace(reading, sims=sims))
            if move is not None:
                crowd.ceiling = move.new
                moves.append((move.old, move.new))
        assert moves[:3] == HALVES
        assert moves[3:4] == ([] if known else [(1, 8)])


def test_a_number_that_is_pinned_stays() -> None:
    crowd = Crowd(lock=True, pinned=frozenset({"concurrency"}))
    assert crowd.run(Tuner(), 100) == []


@pytest.mark.parametrize("lock", [True, False])
def test_equal_readings_give_equal_decisions_on_cores_too(lock: bool) -> None:
    crowd, first, readings, moves = Crowd(lock, noise=0.1), Tuner(), [], []
    for _ in range(150):
        crowd.advance(first.look_s)
        readings.append(crowd.reading())
        move = first.decide(readings[-1])
        if move is not None:
            crowd.ceiling = move.new
        moves.append(move)
    assert any(moves)
    second = Tuner()
    assert [second.decide(reading) for reading in readings] == moves
    assert second.look_s == first.look_s


# Who begins anew.


def in_a_trial(plant: Plant, seconds: float = 5.0) -> Tuner:
    tuner, reading = warm(plant, seconds)
    move = tuner.decide(reading)
    assert move is not None
    plant.turn(move)
    return tuner


def late_moves(plant: Plant, tuner: Tuner, told: Callable[[Reading], Reading]) -> list[Move]:
    """Return what is moved in some time in which the tuner is told of something else than the plant."""
    moves = []
    for _ in range(40):
        plant.advance(1.0)
        move = tuner.decide(told(plant.reading()))
        if move is not None:
            moves.append(move)
            plant.turn(move)
    return moves


def test_a_group_that_begins_anew_is_no_judge() -> None:
    plant = Plant()
    tuner = in_a_trial(plant)
    plant.steps, plant.batches = 0.0, 0.0  # of the same name as the one before
    assert late_moves(plant, tuner, lambda reading: reading) == []


def test_an_idle_group_that_ends_takes_nothing_from_a_trial() -> None:
    plant, tuner = Plant(), Tuner()
    idle = SimReading("eval", "gen", 0, 1_000_000, 1.0, 64)
    few = plant.reading()
    tuner.decide(replace(few, gens=(replace(few.gens[0], latencies_s=few.gens[0].latencies_s[:1]),)))
    plant.advance(5.0)
    reading = plant.reading()
    move = tuner.decide(replace(reading, sims=(*reading.sims, idle)))
    assert move is not None
    plant.turn(move)
    assert late_moves(plant, tuner, lambda reading: reading) == []


def test_a_trainer_that_begins_anew_is_no_judge() -> None:
    plant, tuner, updates, moves = Plant(), Tuner(), 0, []
    for second in range(60):
        plant.advance(1.0)
        updates = 0 if second == 20 else updates + 1
        train = TrainReading("trainer", "gen", updates, 100 * updates, 0.1, plant.now_s)
        move = tuner.decide(replace(plant.reading(), trains=(train,), sm_units=8))
        if move is not None and move.service == "gen":
            plant.turn(move)
        moves.append(move)
    assert not [move for move in moves if move is not None and "taken back" in move.reason]


def test_a_trial_that_outlasts_patience_is_judged_by_what_was_done() -> None:
    plant = Plant(fixed_s=10.0, latency_s=2.0)
    tuner = in_a_trial(plant, 500.0)
    before, (after, _) = tuner.moves[0], plant.rate()
    assert plant.num_envs * ROUNDS / after > PATIENCE_S
    assert late_moves(plant, tuner, lambda reading: reading) == []
    assert tuple(tuner.moves) == (before,)
