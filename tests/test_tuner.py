"""The tuner as a pure function of what it is told: what it moves, what it takes back, and what it leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ebrl.core import batching
from ebrl.core.readings import Batching, CoreReading, GenReading, Move, Reading, SimReading, TrainReading, text
from ebrl.core.sharing import shared_limit
from ebrl.core.split import split
from ebrl.core.throughput import Forecast, Loop, forecast
from ebrl.core.trial import PATIENCE_S, SHORTEST_S
from ebrl.core.tuner import FIRST_LOOK_S, LEAST_LATENCIES, LOOK_AGAIN_S, REFUSED_S, SLOWEST_LOOK_S, Tuner
from tests.plant import FEW_MOVES, GREEDY, Plant, accustomed, busiest, poor_above, turned, warm

# Pure.


def test_equal_readings_give_equal_moves_and_are_left_alone() -> None:
    plant, first = Plant(noise=0.1, fit_noise=0.1, surprise=poor_above(20)), Tuner()
    readings, moves = [], []
    for number in range(300):
        plant.pinned = frozenset({"batching"}) if number < 10 else frozenset()
        plant.advance(first.look_s)
        readings.append(plant.reading())
        move = first.decide(readings[-1])
        moves.append(move)
        if move is not None:
            plant.turn(move)
    kept = copy.deepcopy(readings)
    assert sum(move is not None for move in moves) >= 3
    for second in (Tuner(), Tuner()):
        assert [second.decide(reading) for reading in readings] == moves
        assert second.moves == first.moves
        assert second.look_s == first.look_s
    assert repr(readings) == repr(kept)


def test_it_looks_often_at_first_and_then_less_and_less() -> None:
    plant, tuner, seen = Plant(pinned=frozenset({"batching"})), Tuner(), []
    for _ in range(10):
        seen.append(tuner.look_s)
        tuner.decide(plant.reading())
    assert seen == [min(SLOWEST_LOOK_S, FIRST_LOOK_S * 2**i) for i in range(10)]
    assert (FIRST_LOOK_S, SLOWEST_LOOK_S) == (0.01, 1.0)


# Moves.


def test_a_threshold_that_pays_stays() -> None:
    plant = Plant()
    tuner = accustomed(plant)
    moves = plant.run(tuner, 300)
    assert len(moves) == 1
    assert tuple(tuner.moves) == tuple(moves)
    assert moves[0].gain > 0.2
    assert plant.batching == moves[0].new
    assert 0.8 * plant.num_envs < plant.batching.threshold <= plant.batching.max_size == plant.num_envs
    assert plant.batching.max_wait_s > plant.fixed_s


def test_where_simulation_is_the_limit_few_are_waited_for() -> None:
    plant = Plant(fixed_s=0.002, per_request_s=2e-5, latency_s=0.02, cv=1.5, batching=Batching(64, 64, 1.0))
    plant.run(Tuner(), 60)
    assert plant.batching.threshold <= 4


def test_a_rule_that_cuts_batches_short_is_widened() -> None:
    plant = Plant(num_envs=4096, fixed_s=0.002, per_request_s=2e-5, latency_s=0.02)
    before, _ = plant.rate()
    plant.run(Tuner(), 10)
    after, size = plant.rate()
    assert plant.batching.max_size > size > GREEDY.max_size
    assert after > 1.2 * before


def test_a_gain_within_the_dead_band_is_not_worth_a_move() -> None:
    plant = Plant()
    plant.run(Tuner(), 10)
    best = plant.batching
    for threshold in (best.threshold - 2, best.threshold + 2):
        near = Plant(batching=best._replace(threshold=threshold))
        assert near.run(Tuner(), 120) == []
    few = Plant(fixed_s=0.002, per_request_s=4e-4, latency_s=0.02)
    assert few.run(Tuner(), 120) == [], "a small fixed cost wastes nothing"


def test_nothing_is_moved_before_enough_latencies_are_known() -> None:
    plant, tuner = Plant(), Tuner()
    for num in (0, 1, LEAST_LATENCIES - 1):
        plant.advance(1.0)
        reading = plant.reading()
        few = tuple(replace(gen, latencies_s=gen.latencies_s[:num]) for gen in reading.gens)
        assert tuner.decide(replace(reading, gens=few)) is None
    plant.advance(1.0)
    assert tuner.decide(plant.reading()) is not None


def test_a_pinned_rule_never_moves() -> None:
    plant = Plant(pinned=frozenset({"batching"}), batching=Batching(7, 9, 1.0))
    assert plant.run(Tuner(), 100) == []


@pytest.mark.parametrize("num_envs", [0, 1])
def test_nothing_is_tuned_for_nobody(num_envs: int) -> None:
    plant, tuner = Plant(), Tuner()
    for _ in range(20):
        plant.advance(tuner.look_s)
        reading = plant.reading()
        sims = tuple(replace(sim, num_envs=num_envs) for sim in reading.sims)
        assert tuner.decide(replace(reading, sims=sims)) is None
    assert tuner.decide(Reading(plant.now_s, (), ())) is None


def test_groups_that_wait_and_groups_of_others_do_not_count() -> None:
    plant = Plant()
    tuner, reading = warm(plant)
    sims = (*reading.sims, SimReading("eval", "gen", 0, 10, 1.0, 64), SimReading("others", "gen-2", 500, 10, 1.0, 64))
    move = tuner.decide(replace(reading, sims=sims))
    assert move is not None
    assert move.new.max_size == 64
    assert "N 64," in move.reason


def test_groups_of_one_generator_count_together() -> None:
    plant = Plant(num_envs=64)
    tuner, reading = warm(plant)
    sims = (replace(reading.sims[0], num_envs=40), SimReading("eval", "gen", 24, 10, 1.0, 64))
    move = tuner.decide(replace(reading, sims=sims))
    assert move is not None
    assert move.new.max_size == 64


def test_a_rule_for_more_than_there_are_is_brought_into_range() -> None:
    plant = Plant(num_envs=8, batching=Batching(500, 600, 60.0), surprise=lambda rule: 0.1 if rule.threshold > 8 else 1)
    plant.run(Tuner(), 200)
    tuner, reading = warm(Plant(num_envs=8, fixed_s=0.001, latency_s=0.1, batching=Batching(500, 600, 60.0)))
    move = tuner.decide(reading)
    assert move is not None
    assert 1 <= move.new.threshold <= move.new.max_size <= 8


def test_simulators_that_are_all_busy_are_the_limit() -> None:
    plant = Plant()
    tuner, reading = warm(plant)
    busy = tuple(replace(sim, busy_s=4 * (reading.now_s - 100), num_cores=4) for sim in reading.sims)
    move = tuner.decide(replace(reading, sims=busy))
    assert move is None or move.new.threshold <= 8, "a threshold cannot make four cores faster"
    move = warm(Plant())[0].decide(reading)
    assert move is not None
    assert move.new.threshold > 32


# Trials.


def test_a_move_that_lowers_the_rate_is_taken_back_and_left_alone_for_longer_and_longer() -> None:
    plant = Plant(surprise=poor_above(20))
    moves = plant.run(accustomed(plant), 15 * 60)
    there, back = moves[0::2], moves[1::2]
    assert plant.batching.threshold <= 20
    assert all(move.new.threshold > 20 and move.gain > 0 for move in there)
    assert all("taken back" in move.reason and move.gain == 0 for move in back)
    assert all(second.new == first.old for first, second in zip(there, back, strict=True))
    waits_s = [after.time_s - before.time_s for before, after in zip(back, there[1:], strict=False)]
    assert len(waits_s) >= 3
    for number, wait_s in enumerate(waits_s):
        assert -1e-9 <= wait_s - REFUSED_S * 2**number <= SLOWEST_LOOK_S
    assert busiest(moves) <= FEW_MOVES


def test_nothing_else_moves_while_a_move_is_judged() -> None:
    plant = Plant()
    tuner, reading = warm(plant)
    assert tuner.decide(reading) is not None
    for _ in range(20):  # time stands, and the rule that is read is still the old one
        assert tuner.decide(reading) is None
    soon = replace(reading, now_s=reading.now_s + 0.5)
    assert tuner.decide(soon) is None
    assert len(tuner.moves) == 1


def test_without_training_patience_ends_a_trial_in_which_nothing_happens() -> None:
    plant = Plant()
    tuner, reading = warm(plant)
    move = tuner.decide(reading)
    assert move is not None
    assert tuner.decide(replace(reading, now_s=reading.now_s + PATIENCE_S)) is None
    back = tuner.decide(replace(reading, now_s=reading.now_s + PATIENCE_S + 1))
    assert back is not None
    assert back.new == move.old


@pytest.mark.parametrize("change", [{"fixed_s": 0.1, "per_request_s": 5e-4}, {"latency_s": 0.05}])
def test_a_new_regime_ends_a_trial_and_is_looked_at_soon(change: dict[str, float]) -> None:
    plant = Plant(surprise=poor_above(20))
    tuner, reading = warm(plant)
    first = tuner.decide(reading)
    assert first is not None
    plant.turn(first)
    while tuner.look_s < SLOWEST_LOOK_S:
        tuner.decide(reading)
    for name, value in change.items():
        setattr(plant, name, value)
    plant.advance(5.0)
    found = tuner.decide(plant.reading())
    assert tuner.look_s == LOOK_AGAIN_S
    assert found is None or "taken back" not in found.reason, "what was before is no judge"


def test_latencies_that_vanish_beside_a_batch_are_no_new_regime() -> None:
    tuner, reading = warm(Plant(fixed_s=0.2))
    while tuner.look_s < SLOWEST_LOOK_S:
        tuner.decide(reading)
    for latency_s in (0.001, 0.02, 0.005):
        plant = Plant(fixed_s=0.2, latency_s=latency_s, now_s=reading.now_s + 1)
        tuner.decide(plant.reading())
        assert tuner.look_s == SLOWEST_LOOK_S


def test_a_refusal_does_not_outlive_its_regime() -> None:
    plant = Plant(surprise=poor_above(20))
    tuner = accustomed(plant)
    assert len(plant.run(tuner, 20)) == 2
    plant.fixed_s, plant.per_request_s = 0.1, 5e-4
    plant.surprise = lambda rule: 1.0
    plant.run(tuner, 20)
    assert plant.batching.threshold > 20


def test_moves_of_another_regime_do_not_count_as_many() -> None:
    plant = Plant(surprise=poor_above(20))
    tuner = accustomed(plant)
    assert len(plant.run(tuner, 20)) == 2
    plant.fixed_s, plant.per_request_s, plant.latency_s = 0.002, 2e-5, 0.02
    moves = plant.run(tuner, 10)
    assert [move.new.threshold for move in moves] == [3]
    assert moves[0].gain < 0.1


def test_a_threshold_that_is_close_to_the_right_one_stays() -> None:
    plant = Plant(64, 0.002, 4e-4, 0.02, lanes=2)
    assert len(plant.run(Tuner(), 300)) <= 2


def test_noise_is_no_new_regime() -> None:
    plant, tuner = Plant(noise=0.05, fit_noise=0.05), Tuner()
    plant.run(tuner, 60)
    for _ in range(200):
        plant.advance(1.0)
        tuner.decide(plant.reading())
        assert tuner.look_s == SLOWEST_LOOK_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step_s", "cv", "fixed_s", "per_request_s", "lanes"),
    [
        (0.02, 0.0, 0.002, 2e-5, 1),
        (0.02, 1.5, 0.002, 2e-5, 2),
        (0.005, 0.5, 0.02, 1e-4, 1),
        (0.005, 2.0, 0.02, 1e-4, 1),
        (0.02, 0.5, 0.002, 4e-4, 2),
    ],
)
def test_few_moves_in_a_steady_but_noisy_place(
    step_s: float, cv: float, fixed_s: float, per_request_s: float, lanes: int
) -> None:
    plant = Plant(64, fixed_s, per_request_s, step_s, cv, lanes, noise=0.05, fit_noise=0.03)
    moves = plant.run(Tuner(), 600)
    assert busiest(moves) <= FEW_MOVES, turned(moves)


# Moves that come before enough was measured.


@pytest.mark.parametrize("factor", [0.5, 0.7])
@pytest.mark.parametrize("trained", [False, True])
def test_a_first_move_that_falls_short_of_its_forecast_is_taken_back(factor: float, trained: bool) -> None:
    plant, tuner, moves = Plant(surprise=poor_above(20, factor)), Tuner(), []
    best, _ = plant.rate()
    for updates in range(1, 61):
        plant.advance(tuner.look_s)
        train = TrainReading("trainer", "gen", updates, int(plant.steps), 0.0, plant.now_s)
        reading = plant.reading()
        move = tuner.decide(replace(reading, trains=(train,)) if trained else reading)
        if move is not None:
            plant.turn(move)
            moves.append(move)
    assert moves[0].time_s - 100 <= 2 * FIRST_LOOK_S, "a cold start does not wait"
    assert turned(moves[:2]) == [(1, 58), (58, 1)]
    assert "promised" in moves[1].reason
    assert moves[1].time_s - 100 <= 4 * SHORTEST_S
    assert busiest(moves) <= FEW_MOVES
    assert plant.rate()[0] >= 0.97 * best


def test_what_was_better_after_all_stays_and_is_questioned_once() -> None:
    plant = Plant(surprise=poor_above(20, 0.85))  # less than was promised, and still the best there is
    moves = plant.run(Tuner(), 600)
    assert turned(moves) == [(1, 58), (58, 1), (1, 58)]
    assert moves[2].time_s - moves[1].time_s <= 4 * SHORTEST_S
    plant = Plant(surprise=poor_above(20, 0.95))
    assert turned(plant.run(Tuner(), 600)) == [(1, 58)], "most of the gain has come"


@given(
    at_least=st.integers(2, 60),
    factor=st.floats(0.3, 1.0),
    fixed_s=st.sampled_from([0.002, 0.01, 0.02]),
    latency_s=st.sampled_from([0.005, 0.02]),
)
@settings(max_examples=15, deadline=None)
def test_whatever_surprises_it_ends_with_the_better_of_two(
    at_least: int, factor: float, fixed_s: float, latency_s: float
) -> None:
    plant = Plant(fixed_s=fixed_s, latency_s=latency_s, surprise=poor_above(at_least - 1, factor))
    before, _ = plant.rate()
    moves = plant.run(Tuner(), 55)
    rates = [before, *(replace(plant, batching=move.new).rate()[0] for move in moves)]
    assert plant.rate()[0] >= 0.95 * max(rates)


@pytest.mark.parametrize(
    "place", [{}, {"fixed_s": 0.002, "per_request_s": 2e-5, "latency_s": 0.02}, {"fixed_s": 0.1}, {"num_envs": 256}]
)
def test_a_first_move_that_keeps_its_forecast_is_the_only_one(place: dict[str, float]) -> None:
    plant = Plant(**place)  # type: ignore[arg-type]
    moves = plant.run(Tuner(), 300)
    assert len(moves) == 1
    assert moves[0].time_s - 100 <= 2 * FIRST_LOOK_S


def test_a_first_move_may_be_mended_and_is_taken_back_to_what_was_before_all_of_it() -> None:
    plant, tuner = Plant(surprise=poor_above(20)), Tuner()
    plant.advance(tuner.look_s)
    reading = plant.reading()
    first = tuner.decide(replace(reading, sims=(replace(reading.sims[0], num_envs=24),)))
    assert first is not None
    assert 1 < first.new.threshold < 40
    plant.turn(first)
    moves = [first, *plant.run(tuner, 20)]
    assert turned(moves) == [(1, first.new.threshold), (first.new.threshold, 58), (58, 1)]
    assert moves[1].time_s - first.time_s < 0.1
    assert "promised" in moves[2].reason


# What a decision takes.


def test_a_decision_makes_few_forecasts_however_many_generators_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Loop] = []

    def counted(loop: Loop, thresholds: NDArray[np.int64]) -> Forecast:
        made.append(loop)
        return forecast(loop, thresholds)

    monkeypatch.setattr(batching, "forecast", counted)
    names = ("gen", "eval", "other")
    plants = [Plant(name=name, choices=range(1, 9), lanes=2, per_request_s=4e-4, latency_s=0.001) for name in names]
    tuner, moved = Tuner(), set()
    for _ in range(200):
        for plant in plants:
            plant.advance(tuner.look_s)
        readings = [plant.reading() for plant in plants]
        sims = tuple(replace(reading.sims[0], name=reading.gens[0].name) for reading in readings)
        made.clear()
        move = tuner.decide(replace(readings[0], gens=tuple(reading.gens[0] for reading in readings), sims=sims))
        assert len(made) <= 3
        if move is not None:
            moved.add(move.service)
            plants[names.index(move.service)].turn(move)
    assert moved == set(names), "each has its turn"


# What batches of one size hide.


def test_batches_that_are_all_alike_lead_to_one_exploration() -> None:
    plant, tuner = Plant(spread=0.0), Tuner()
    moves = plant.run(tuner, 300)
    assert [move.new[:2] for move in moves] == [(1, 32)]
    assert moves[0].gain == 0.0
    plant.spread = 0.3
    plant.run(tuner, 30)
    assert plant.batching.threshold > 32, "now that is known what costs"


def test_an_exploration_that_does_not_pay_is_not_repeated_for_a_while() -> None:
    plant = Plant(spread=0.0, surprise=lambda rule: 0.5 if rule.max_size == 32 else 1.0)
    tuner = accustomed(plant)
    moves = plant.run(tuner, REFUSED_S - 10)
    assert [move.new[:2] for move in moves] == [(1, 32), (1, 256)]
    moves = plant.run(tuner, 600)
    assert [move.new[:2] for move in moves] == 3 * [(1, 32), (1, 256)], "after 60 s, then 120 s, then 240 s"


# Who comes and goes.


def judged(plant: Plant) -> tuple[Tuner, Reading]:
    """Return a tuner in the middle of a trial, and what it saw last."""
    tuner, reading = warm(plant)
    move = tuner.decide(reading)
    assert move is not None
    plant.turn(move)
    plant.advance(0.01)
    assert tuner.decide(plant.reading()) is None
    return tuner, plant.reading()


def test_a_generator_that_has_ended_takes_its_trial_along() -> None:
    plant, other = Plant(surprise=poor_above(1, 0.1)), Plant(name="other", pinned=frozenset({"batching"}))
    tuner, _ = judged(plant)
    for _ in range(100):
        other.advance(1.0)
        move = tuner.decide(replace(other.reading(), now_s=plant.now_s + other.now_s))
        assert move is None, "nobody is there to turn it"


def test_a_trainer_that_comes_or_goes_ends_the_trial() -> None:
    trainer = TrainReading("trainer", "gen", 0, 0, 0.0, 100.0)
    for before, after in (((), (trainer,)), ((trainer,), ()), ((trainer,), (trainer, replace(trainer, name="second")))):
        plant, tuner = Plant(), Tuner()
        plant.spread = 0.0  # so that an exploration comes first
        count = 0
        for phase in (before, after):
            for _ in range(80):
                count += 1
                plant.advance(tuner.look_s)
                trained = int(plant.steps) // max(1, len(phase))
                trains = tuple(
                    replace(one, num_updates=count, num_decisions=trained, updated_s=plant.now_s) for one in phase
                )
                move = tuner.decide(replace(plant.reading(), trains=trains))
                if move is not None:
                    assert "taken back" not in move.reason, "nothing has become worse"
                    plant.turn(move)
            plant.spread = 0.5
        assert plant.batching.threshold > 32, "it was not waiting for ever for a trial to end"


def test_an_evaluation_that_comes_and_goes_spoils_no_judgement() -> None:
    plant = Plant()
    tuner, _ = judged(plant)
    extra = SimReading("eval", "gen", 32, 1_000_000, 1.0, 64)
    for second in range(40):
        plant.num_envs = 96 if second < 5 else 64
        plant.advance(1.0)
        reading = plant.reading()
        both = replace(reading.sims[0], num_envs=64), extra
        move = tuner.decide(replace(reading, sims=both) if second < 5 else reading)
        if move is not None:
            assert "taken back" not in move.reason
            plant.turn(move)


# A device that generation and training share.


def sharing_readings(
    num: int, training: float = 0.5, train_s: float = 4e-4, *, surprise: Callable[[int], float] = lambda units: 1.0
) -> list[Move]:
    """Return what is moved over `num` updates of a pipeline that is limited by its GPU."""
    tuner, moves, gen_units, now_s = Tuner(), [], 0, 100.0
    decisions, batch, fixed_s, busy_s = 0.0, 16, 0.004, 0.0
    latencies_s = np.linspace(0.01, 0.03, 64)
    for updates in range(1, num + 1):
        rate = float(shared_limit(fixed_s / batch, train_s, gen_units, 8)) * surprise(gen_units)
        period_s = 1000 / rate
        decisions += 1000
        busy_s += 0.6 * period_s
        for looks in range(4):
            now_s += period_s / 4
            gen = GenReading(
                "gen", Batching(1, 64, 0.01), 2 * fixed_s, 1e-6, 0.5, latencies_s,
                int(decisions), int(decisions / batch), busy_s, pinned=frozenset({"batching"}),
            )  # fmt: skip
            train = TrainReading(
                "trainer", "gen", updates, updates * 1000, training * period_s, now_s - looks * period_s / 4
            )
            sim = SimReading("envs", "gen", 64, int(decisions), 1.0, 64)
            move = tuner.decide(Reading(now_s, (gen,), (sim,), (train,), 8, gen_units))
            if move is not None:
                assert (move.service, move.knob, move.old) == ("machine", "partition", gen_units)
                moves.append(move)
                gen_units = move.new
    return moves


def test_a_shared_device_is_divided_once() -> None:
    moves = sharing_readings(60)
    assert len(moves) == 1
    assert 0 < moves[0].new < 8
    assert "generation" in str(moves[0])
    assert str(moves[0]).startswith(f"machine.partition 0 -> {moves[0].new}: +")


@pytest.mark.parametrize(("training", "train_s"), [(0.2, 4e-4), (0.5, 4e-4), (0.95, 1e-3), (0.95, 1.5e-4)])
def test_a_division_that_does_not_pay_is_undone_though_it_changes_what_batches_take(
    training: float, train_s: float
) -> None:
    moves = sharing_readings(60, training, train_s, surprise=lambda units: 0.5 if units else 1.0)
    assert [bool(move.new) for move in moves[:2]] == [True, False]
    assert "taken back" in moves[1].reason
    assert busiest(moves) <= FEW_MOVES


# Cores that stages contend for.


def cores_moves(used: dict[str, float], rates: dict[str, float], num_cores: int = 8) -> list[Move]:
    """Return what is moved in five minutes in which each kind uses so many cores."""
    plant, tuner, moves = Plant(pinned=frozenset({"batching"})), Tuner(), []
    rates = dict(rates)
    for _ in range(300):
        plant.advance(1.0)
        elapsed_s = plant.now_s - 100
        cores = tuple(CoreReading(kind, rates[kind], used[kind] * elapsed_s, num_cores) for kind in used)
        move = tuner.decide(replace(plant.reading(), num_cores=num_cores, cores=cores))
        if move is not None:
            assert (move.knob, move.old) == ("cores", rates)
            rates = dict(move.new)
            moves.append(move)
    return moves


def test_cores_that_stages_contend_for_are_promised_as_they_are_used() -> None:
    moves = cores_moves({"sim": 6.0, "gen": 1.0, "train": 1.0}, {"sim": 4.0, "gen": 2.0, "train": 2.0})
    assert len(moves) == 1
    assert sum(moves[0].new.values()) == pytest.approx(8, abs=0.01)
    assert moves[0].new["sim"] > moves[0].new["gen"] > moves[0].new["train"]
    assert text(moves[0].new) in str(moves[0])


def test_promises_stay_where_nobody_contends_or_nothing_has_changed() -> None:
    promised = {"sim": 4.0, "gen": 2.0, "train": 2.0}
    assert cores_moves({"sim": 1.0, "gen": 0.5, "train": 4.0}, promised) == [], "there are enough for all"
    used = {"sim": 4.5, "gen": 0.8, "train": 2.2}
    assert cores_moves(used, split(used, 8)) == [], "they have what they need"
    assert cores_moves({"sim": 8.0}, {"sim": 8.0}) == [], "one alone has them all"
