"""Which part of the time of their calls simulators compute, as noted on the threads on which they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.records import Array
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.simulator import Simulator
from ebrl.sim.times import CallTimes
from tests.helpers import scripted_spec

ACTIONS = np.zeros((1, 2), np.float32)


class Working(ScriptedEnv):
    """Does something in each step."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(3, 2, length=1000)
        self.work = work

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.work()
        return super().step(action)


def compute() -> int:
    """Take some milliseconds of one core."""
    return sum(range(400_000))


def part_of(work: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> float:
    """Return the part that is noted of steps on a thread of their own."""
    times, simulator = CallTimes(), Simulator(scripted_spec(make=lambda: Working(work)))
    simulator.reset(0)
    for _ in range(3):
        thread = threading.Thread(target=times.step, args=(simulator, ACTIONS, True))
        thread.start()
        meanwhile()
        thread.join()
    assert len(times.parts) == len(times.steps) == 3
    return times.cpu_part()


def test_a_step_that_computes_is_told_from_one_that_waits() -> None:
    entered, go = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        go.wait()
        go.clear()

    def work_and_let_go() -> None:
        entered.wait()
        entered.clear()
        compute()
        go.set()

    waits, computes = part_of(wait, work_and_let_go), part_of(compute)
    assert 0.0 <= waits < computes / 2 <= 0.5


def test_nothing_is_known_before_a_step_was_noted() -> None:
    times = CallTimes()
    assert times.cpu_part() == 1.0
    times.parts.append((0.0, 0.0))
    assert times.cpu_part() == 1.0, "it took no time"


def test_recent_steps_count_more_and_each_once() -> None:
    times = CallTimes()
    times.parts.extend([(1.0, 0.2)] * 10)
    assert times.cpu_part() == pytest.approx(0.2)
    assert not times.parts
    assert times.cpu_part() == pytest.approx(0.2)
    seen = []
    for _ in range(300):
        times.parts.append((1.0, 0.9))
        seen.append(times.cpu_part())
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(0.9, abs=0.01)
    times.parts.append((100.0, 0.0))
    assert times.cpu_part() < 0.5, "a long one counts for what it took"


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0))))
def test_a_part_is_never_more_than_all(parts: list[tuple[float, float]]) -> None:
    times = CallTimes()
    times.parts.extend(parts)
    assert 0.0 <= times.cpu_part() <= 1.0


def test_resets_say_nothing_of_it() -> None:
    times, simulator = CallTimes(1), Simulator(scripted_spec())
    times.reset(simulator, 0)
    assert (len(times.resets), len(times.parts)) == (1, 0)
