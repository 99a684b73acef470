"""The assembler: exactly B, oldest first, in order, split and masked so that every bootstrap stays right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from ebrl.core.records import Segment, TrainBatch
from ebrl.train.assemble import Assembler, Dropped
from tests.helpers import make_decision, make_segment


def taken(assembler: Assembler, version: int = 0) -> list[list[tuple[int, int]]]:
    """Return environment and index of what the next batch holds, segment by segment."""
    batch, dropped = assembler.take(version)
    assert batch is not None
    assert dropped == []
    return [[(d.env, d.index) for d in segment.decisions] for segment in batch.segments]


def filled(batch_size: int, segments: Sequence[Segment], *, max_lag: int = 9, canonical: bool = False) -> Assembler:
    assembler = Assembler(batch_size, max_lag, canonical=canonical)
    for segment in segments:
        assert assembler.add(segment) == []
    return assembler


def test_there_is_no_batch_before_there_are_b_decisions() -> None:
    assembler = filled(4, [make_segment(3)])
    assert assembler.take(0) == (None, [])
    assert len(assembler) == 3
    assembler.add(make_segment(1, env=1))
    assert taken(assembler) == [[(0, 0), (0, 1), (0, 2)], [(1, 0)]]
    assert len(assembler) == 0


def test_segments_that_fit_are_handed_on_whole_and_unchanged() -> None:
    segments = [make_segment(2, end="terminated"), make_segment(2, env=1, end="truncated")]
    batch, _ = filled(4, segments).take(7)
    assert batch is not None
    assert batch.segments == segments
    assert batch.version == 7
    assert batch.lags.tolist() == [7] * 4


def test_the_last_segment_is_split_and_its_head_bootstraps_from_what_follows() -> None:
    assembler = filled(4, [make_segment(2), make_segment(5, env=1, end="terminated", task="reach")])
    batch, _ = assembler.take(0)
    assert batch is not None
    head = batch.segments[1]
    assert (head.env, head.task, head.reason) == (1, "reach", "split")
    assert_array_equal(head.last_obs, np.full(3, 2))
    assert not any(d.terminated for d in head.decisions)
    assembler.add(make_segment(1, env=2))
    batch, _ = assembler.take(1)
    assert batch is not None
    tail = batch.segments[0]
    assert ([d.index for d in tail.decisions], tail.reason, tail.task) == ([2, 3, 4], "end", "reach")
    assert tail.decisions[-1].terminated


def test_a_long_segment_is_split_again_and_again() -> None:
    assembler = filled(3, [make_segment(10)])
    indices = []
    for _ in range(3):
        batch, _ = assembler.take(0)
        assert batch is not None
        (segment,) = batch.segments
        indices.append([d.index for d in segment.decisions])
        assert_array_equal(segment.last_obs, np.full(3, indices[-1][-1] + 1))
    assert indices == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert assembler.take(0) == (None, [])


def test_the_oldest_version_comes_first() -> None:
    order = [3, 1, 2, 0]
    assembler = filled(2, [make_segment(2, env=env, version=version) for env, version in enumerate(order)])
    assert [taken(assembler, 3)[0][0][0] for _ in order] == [3, 1, 2, 0]


def test_the_oldest_version_comes_first_decision_by_decision() -> None:
    """A segment that begins with an old decision does not bring young ones before old ones of another."""
    assembler = filled(4, [make_segment(4, env=0, version=[0, 2, 2, 2]), make_segment(3, env=1, version=[0, 0, 1])])
    assert taken(assembler, 2) == [[(0, 0)], [(1, 0), (1, 1), (1, 2)]]
    assembler.add(make_segment(1, env=1, first=3, version=2))
    assert taken(assembler, 2) == [[(0, 1), (0, 2), (0, 3)], [(1, 3)]]


def test_segments_of_one_version_come_in_the_order_of_their_arrival() -> None:
    assembler = filled(6, [make_segment(2, env=env) for env in (2, 0, 1)])
    assert [segment[0][0] for segment in taken(assembler)] == [2, 0, 1]


def test_in_canonical_order_arrival_makes_no_difference() -> None:
    segments = [make_segment(2, env=e, first=2 * k, episode=k) for e in range(3) for k in range(2)]
    orders = ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [1, 0, 3, 2, 5, 4])
    rows = [taken(filled(12, [segments[i] for i in order], canonical=True)) for order in orders]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0] == sorted(rows[0])


def test_what_is_too_old_is_masked_a_decision_at_a_time() -> None:
    assembler = filled(2, [make_segment(4, version=[0, 0, 1, 2], end="truncated")], max_lag=1)
    batch, dropped = assembler.take(2)
    assert dropped == [Dropped(0, "masked", 2)]
    assert batch is not None
    (segment,) = batch.segments
    assert [d.index for d in segment.decisions] == [2, 3]
    assert (segment.reason, segment.decisions[-1].truncated) == ("end", True)
    assert batch.lags.tolist() == [1, 0]


def test_masks_are_applied_where_there_is_no_batch_too() -> None:
    assembler = filled(5, [make_segment(4), make_segment(1, env=1, version=1)], max_lag=0)
    assert assembler.take(1) == (None, [Dropped(0, "masked", 4)])
    assert len(assembler) == 1
    assert assembler.take(1) == (None, [])
    assert assembler.take(2) == (None, [Dropped(1, "masked", 1)])
    assembler.add(make_segment(3, version=1))
    assert assembler.take(2) == (None, [Dropped(0, "masked", 3)]), "a segment that comes late is looked at too"


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_a_decision_of_exactly_the_bound_is_trained(max_lag: int) -> None:
    assembler = filled(1, [make_segment(1), make_segment(1, env=1)], max_lag=max_lag)
    batch, dropped = assembler.take(max_lag)
    assert batch is not None
    assert (batch.lags.tolist(), dropped) == ([max_lag], [])
    assert assembler.take(max_lag + 1) == (None, [Dropped(1, "masked", 1)])


@pytest.mark.parametrize(
    ("flags", "runs"),
    [
        ("..i..", [[0, 1], [3, 4]]),
        ("i....", [[1, 2, 3, 4]]),
        ("....i", [[0, 1, 2, 3]]),
        ("i.i.i", [[1], [3]]),
        (".iii.", [[0], [4]]),
        ("iiiii", []),
    ],
)
def test_interventions_are_taken_out_and_their_neighbours_bootstrap_around_them(
    flags: str, runs: list[list[int]]
) -> None:
    decisions = [make_decision(3, i, intervened=flag == "i") for i, flag in enumerate(flags)]
    decisions[-1].truncated = True
    assembler = Assembler(max(1, sum(map(len, runs))), 0)
    assert assembler.add(make_segment(env=3, decisions=decisions, reason="end")) == [
        Dropped(3, "intervention", flags.count("i"))
    ]
    batch, dropped = assembler.take(0)
    assert dropped == []
    if not runs:
        assert batch is None
        return
    assert batch is not None
    assert [[d.index for d in segment.decisions] for segment in batch.segments] == runs
    for segment in batch.segments:
        assert_array_equal(segment.last_obs, np.full(3, segment.decisions[-1].index + 1))
        whole = segment.decisions[-1].index == len(flags) - 1
        assert segment.reason == ("end" if whole else "split")


@st.composite
def arrivals(draw: st.DrawFn) -> list[Segment | None]:
    """Segments of some environments, each environment in its own order with versions that grow; None: a publish."""
    next_index: Counter[int] = Counter()
    acted: Counter[int] = Counter()
    version = 0
    events: list[Segment | None] = []
    for _ in range(draw(st.integers(1, 30))):
        if draw(st.integers(0, 3)) == 0:
            version += 1
            events.append(None)
            continue
        env, length = draw(st.integers(0, 3)), draw(st.integers(1, 6))
        versions = sorted(draw(st.lists(st.integers(acted[env], version), min_size=length, max_size=length)))
        segment = make_segment(length, env=env, first=next_index[env], version=versions)
        for decision in segment.decisions:
            decision.intervened = draw(st.integers(0, 9)) == 0
        next_index[env] += length
        acted[env] = versions[-1]
        events.append(segment)
    return events


def check_batch(batch: TrainBatch, batch_size: int, max_lag: int) -> None:
    assert len(batch.decisions) == batch_size
    assert batch.lags.max() <= max_lag
    for segment in batch.segments:
        indices = [d.index for d in segment.decisions]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        assert {d.env for d in segment.decisions} == {segment.env}
        assert not any(d.intervened for d in segment.decisions)
        assert_array_equal(segment.last_obs, np.full(3, indices[-1] + 1))


@given(events=arrivals(), batch_size=st.integers(1, 9), max_lag=st.integers(0, 3), canonical=st.booleans())
def test_whatever_arrives_is_trained_once_or_dropped_once(
    events: list[Segment | None], batch_size: int, max_lag: int, canonical: bool
) -> None:
    assembler = Assembler(batch_size, max_lag, canonical=canonical)
    version = arrived = 0
    dropped: Counter[str] = Counter()
    trained: list[tuple[int, int]] = []
    for event in events:
        if event is None:
            version += 1
        else:
            arrived += len(event.decisions)
            for drop in assembler.add(event):
                dropped[drop.reason] += drop.num
        batch, drops = assembler.take(version)
        for drop in drops:
            dropped[drop.reason] += drop.num
        if batch is not None:
            check_batch(batch, batch_size, max_lag)
            trained += [(d.env, d.index) for d in batch.decisions]
        assert arrived == len(trained) + dropped.total() + len(assembler)
        assert set(dropped) <= {"masked", "intervention"}
    assert len(set(trained)) == len(trained)
    for env in range(4):
        indices = [index for e, index in trained if e == env]
        assert indices == sorted(indices), "each environment in its own order"
