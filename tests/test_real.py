"""What `bench.rollout` counts and compares; that it runs, peers included, `tests/test_bench.py` shows."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from bench import peers
from bench.real import Burn, Measured, Setting, Span, Window, run_twin
from bench.runs import Job, load
from bench.suites.real_w import Found, Group, agreement, lead, rotated
from ebrl.core.errors import ConfigError
from ebrl.core.virtual import run_virtual

GROUP = Group("W3", 8, {"greedy": "fixed:1", "lockstep": "fixed:8", "best": "fixed:8"}, ("gymnasium",), Setting(), 0)


def test_a_window_counts_what_is_done_within_its_span() -> None:
    async def main() -> Window:
        window = Window(Span(2.0, 4.0))
        window.open()
        for _ in range(100):
            if window.done.is_set():
                return window
            window.stepped(3, False)
            window.launched(5)
            await asyncio.sleep(0.5)
        raise AssertionError("it never ends")

    window = run_virtual(main())
    assert window.speed() == 6.0
    assert window.batch_mean() == 5.0


def test_the_coroutine_that_runs_in_real_time_is_exact_in_virtual_time() -> None:
    measured = run_twin(Job(("w", "W1", "8"), "fixed:8"), Span(1.0, 4.0))
    assert measured.speed == pytest.approx(8 / (0.02 + 0.002 + 8 * 2e-5), rel=0.02)
    assert measured.batch_mean == 8.0
    assert measured.busy["gen"] == pytest.approx((0.002 + 8 * 2e-5) / (0.022 + 8 * 2e-5), rel=0.05)


@pytest.mark.parametrize(
    ("warmup_s", "seconds"), [(1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (math.inf, 1.0), (-1.0, 1.0)]
)
def test_a_span_counts_something(warmup_s: float, seconds: float) -> None:
    with pytest.raises(ConfigError, match="counts nothing"):
        Span(warmup_s, seconds)


def test_a_peer_may_have_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", {"scripted": Scripted})
    assert peers.run(Job(("w", "W3", "8"), "scripted"), Span(0.0, 0.02), Setting()).speed > 0


@pytest.mark.slow
@pytest.mark.hogs("starting thousands takes its time")
def test_there_may_be_thousands_of_environments() -> None:
    num = 4200
    measured = run_twin(Job(("w", "W1", str(num)), f"fixed:{num}"), Span(0.0, 0.3))
    assert measured.batch_mean == num


def test_burning_takes_the_cores_that_there_are() -> None:
    assert load(Job(("w", "W3", "8"), "ebrl", num_cores=2)).machine.num_cores == 2
    assert load(Job(("w", "W3", "8"), "ebrl")).machine.num_cores == 8


@pytest.mark.slow
def test_burning_takes_the_time_of_its_thread() -> None:
    burn = Burn.calibrated()
    began_s = time.thread_time()
    burn(0.05)
    assert 0.025 < time.thread_time() - began_s < 0.1


def found(speeds: dict[str, Sequence[float]], twin: dict[str, float]) -> Found:
    return Found(GROUP, twin, {key: [Measured(value, 1.0) for value in values] for key, values in speeds.items()})


def test_ratios_are_of_runs_that_stood_beside_each_other() -> None:
    one = found(
        {"ebrl": [100, 200, 300], "fixed:1": [90, 180, 330], "fixed:8": [40, 100, 150], "gymnasium": [10, 50, 60]},
        {"ebrl": 1000.0, "fixed:1": 1000.0, "fixed:8": 500.0},
    )
    assert GROUP.ours() == ["ebrl", "fixed:1", "fixed:8"]
    checks = agreement(one)
    assert [check.value for check in checks] == pytest.approx([0.1, 0.0, 0.0])
    assert [check.ok for check in checks] == [True, True, True]
    assert "greedy (fixed:1) / ebrl, real against twin (-10.0%)" in checks[0].name
    assert [(check.value, check.ok) for check in lead(one)] == [(5.0, False)]


def test_everybody_is_the_first_once() -> None:
    orders = [rotated(["a", "b", "c"], by) for by in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


class Scripted:
    """A peer that steps 8 environments in 10 ms, or breaks."""

    closed = 0

    def __init__(self, makers: peers.Makers, generate: peers.Generate) -> None:
        self._num, self._generate = len(makers), generate
        self._env = makers[0]()

    def turn(self) -> int:
        if self._num != 8:
            raise RuntimeError("broken")
        time.sleep(0.01)
        return self._num

    def close(self) -> None:
        Scripted.closed += 1


def test_a_peer_is_measured_after_its_warm_up_and_closed_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", {"scripted": Scripted})
    monkeypatch.setattr(Scripted, "closed", 0)
    measured = peers.run(Job(("w", "W3", "8"), "scripted"), Span(0.02, 0.05), Setting())
    assert 100 < measured.speed < 801
    assert (measured.batch_mean, Scripted.closed) == (8.0, 1)
    with pytest.raises(RuntimeError, match="broken"):
        peers.run(Job(("w", "W3", "4"), "scripted"), Span(0.02, 0.05), Setting())
    assert Scripted.closed == 2


def test_a_peer_that_is_missing_is_named_before_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(ConfigError, match=r"tianshou.*pip install 'ebrl\[bench\]'"):
        peers.require()
