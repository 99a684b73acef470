"""The queue between requests and lanes, whose rule and number of lanes may change at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.testing import settle
from ebrl.core.virtual import run_virtual
from ebrl.gen.batcher import Batcher
from ebrl.gen.queue import BatchQueue
from tests.helpers import virtually

PATIENT = 1e6


@dataclass(eq=False)
class Item:
    """A request."""

    number: int
    gone: bool = False

    def cancelled(self) -> bool:
        return self.gone


@dataclass
class Lanes:
    """Takes batches from a queue and ends them when a test says so."""

    threshold: int = 1
    num_lanes: int = 1
    running: dict[int, list[Item]] = field(default_factory=dict)
    launched: list[list[int]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.num_open = self.num_lanes
        self.queue = BatchQueue[Item](Batcher(self.threshold, 256, PATIENT), self.num_lanes, self._launch)

    def _launch(self, batch: list[Item], came_s: list[float], lane: int) -> None:
        assert lane not in self.running, "two batches on one lane"
        assert 0 <= lane < self.num_open, "a lane that is not open"
        assert len(batch) == len(came_s) > 0
        assert not any(item.gone for item in batch)
        self.running[lane] = batch
        self.used.append(lane)
        self.launched.append([item.number for item in batch])

    def put(self, num: int) -> list[Item]:
        items = [Item(self.asked + number) for number in range(num)]
        self.asked += num
        for item in items:
            self.queue.put(item)
        return items

    def release(self, lane: int) -> list[Item]:
        ended = self.running.pop(lane)
        self.queue.release(lane)
        return ended

    def turn(self, threshold: int, num_lanes: int, max_size: int = 256) -> None:
        self.num_open = num_lanes
        self.threshold = threshold
        self.queue.turn(Batcher(threshold, max(threshold, max_size), PATIENT), num_lanes)


# By hand.


@virtually
async def test_what_waits_is_launched_when_a_turn_makes_it_enough() -> None:
    lanes = Lanes(threshold=8)
    lanes.put(5)
    await settle()
    assert lanes.launched == []
    lanes.turn(6, 1)
    await settle()
    assert lanes.launched == []
    lanes.turn(5, 1)
    await settle()
    assert lanes.launched == [[0, 1, 2, 3, 4]]


@virtually
async def test_what_waits_is_launched_when_a_turn_opens_a_lane() -> None:
    lanes = Lanes()
    lanes.put(2)
    await settle()
    lanes.put(3)
    await settle()
    assert lanes.launched == [[0, 1]]
    lanes.turn(1, 3)
    await settle()
    assert (lanes.launched, lanes.used) == ([[0, 1], [2, 3, 4]], [0, 1])
    lanes.put(1)
    await settle()
    assert lanes.used == [0, 1, 2]


@virtually
async def test_a_lane_beyond_their_number_ends_its_batch_and_gets_no_other() -> None:
    lanes = Lanes(num_lanes=3)
    for _ in range(3):
        lanes.put(1)
        await settle()
    assert sorted(lanes.running) == [0, 1, 2]
    lanes.turn(1, 1)
    lanes.put(2)
    await settle()
    for lane in (2, 1):
        assert len(lanes.release(lane)) == 1
        await settle()
        assert len(lanes.launched) == 3
    lanes.release(0)
    await settle()
    assert lanes.launched[3:] == [[3, 4]]
    assert lanes.used[3:] == [0]


@virtually
async def test_a_lane_that_is_closed_and_opened_again_under_its_batch_has_that_one_only() -> None:
    lanes = Lanes(num_lanes=2)
    for _ in range(2):
        lanes.put(1)
        await settle()
    lanes.turn(1, 1)
    lanes.turn(1, 2)
    lanes.put(1)
    await settle()
    assert len(lanes.launched) == 2
    lanes.release(1)
    await settle()
    assert lanes.used == [0, 1, 1]


@virtually
async def test_the_deadline_of_an_earlier_rule_is_forgotten() -> None:
    lanes = Lanes()
    lanes.queue.turn(Batcher(8, 8, 1.0), 1)
    lanes.put(2)
    await asyncio.sleep(0.5)
    lanes.turn(8, 1)
    await asyncio.sleep(10)
    assert lanes.launched == []
    lanes.queue.turn(Batcher(8, 8, 12.0), 1)
    await asyncio.sleep(1.4)
    assert lanes.launched == []
    await asyncio.sleep(0.2)
    assert lanes.launched == [[0, 1]], "counted from the request, not from the turn"


# Whatever happens, in whatever order.

Action: TypeAlias = "tuple[str, int, int]"

actions = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("turn"), st.integers(1, 8), st.integers(1, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("settle"), st.just(0), st.just(0)),
)


async def play(sequence: Sequence[Action]) -> None:
    lanes, items, ended = Lanes(threshold=2), list[Item](), list[Item]()
    for what, number, num_lanes in sequence:
        if what == "put":
            items += lanes.put(number)
        elif what == "turn":
            lanes.turn(number, num_lanes, max_size=8)
        elif what == "release" and lanes.running:
            ended += lanes.release(sorted(lanes.running)[number % len(lanes.running)])
        elif what == "cancel" and items:
            items[number % len(items)].gone = True
            lanes.queue.withdraw()
        elif what == "settle":
            await settle()
            living = [item for item in items if not item.gone and not was_launched(lanes, item)]
            free = lanes.num_open - sum(lane < lanes.num_open for lane in lanes.running)
            assert not free or len(living) < lanes.threshold, "a lane is free, and enough wait"
    lanes.turn(1, 1)
    for _ in range(lanes.asked + 2):
        await settle()
        for lane in list(lanes.running):
            ended += lanes.release(lane)
    assert not len(lanes.queue)
    assert not lanes.running
    served = [item.number for item in ended]
    assert len(set(served)) == len(served), "nobody is served twice"
    assert set(served) | {item.number for item in items if item.gone} == set(range(lanes.asked)), "nobody is lost"
    assert [number for batch in lanes.launched for number in batch] == sorted(served), "oldest first"


def was_launched(lanes: Lanes, item: Item) -> bool:
    return any(item.number in batch for batch in lanes.launched)


@given(st.lists(actions, max_size=60))
def test_no_request_is_lost_and_no_lane_has_two_batches(sequence: list[Action]) -> None:
    run_virtual(play(sequence))
