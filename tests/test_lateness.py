"""How late a loop is: every timer that was due while something held it up counts, with its own wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ebrl.core import lateness
from ebrl.core.lateness import TICK_S, Lateness
from ebrl.core.virtual import run_virtual


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what holds up the loop for so many seconds: only the clock goes on."""
    held_s = 0.0

    def hold(seconds: float) -> None:
        nonlocal held_s
        held_s += seconds

    monkeypatch.setattr(lateness, "perf_counter", lambda: asyncio.get_running_loop().time() + held_s)
    return hold


def watch(seconds: float, then: Callable[[], None] = lambda: None) -> Lateness:
    async def main() -> Lateness:
        with Lateness() as late:
            await asyncio.sleep(seconds)
            then()
        return late

    return run_virtual(main())


def test_an_idle_loop_is_not_late(stop: Callable[[float], None]) -> None:
    late = watch(0.0205)
    assert late.waits_s == pytest.approx([0.0] * 10, abs=1e-9)
    assert late.quantile(0.99) == pytest.approx(0.0, abs=1e-9)


def test_one_long_stop_holds_up_all_that_was_due_in_it(stop: Callable[[float], None]) -> None:
    async def main() -> Lateness:
        with Lateness() as late:
            await asyncio.sleep(0.0105)
            stop(0.0205)
            await asyncio.sleep(0.0105)
        return late

    late = run_virtual(main())
    waits_s = [wait for wait in late.waits_s if wait > 1e-6]
    assert waits_s == pytest.approx([0.0205 - TICK_S * i for i in range(11)], abs=1e-6)
    assert late.quantile(0.99) > 0.019
    assert 9 <= len(late.waits_s) - len(waits_s) <= 10


def test_a_timer_that_is_late_at_the_end_counts(stop: Callable[[float], None]) -> None:
    assert max(watch(0.0005, lambda: stop(0.1)).waits_s) == pytest.approx(0.0985)


def test_nothing_was_due() -> None:
    assert watch(0.0).quantile(0.99) == 0.0


def test_no_timer_stays_behind_a_failure() -> None:
    async def main() -> None:
        late = Lateness()
        with pytest.raises(ZeroDivisionError), late:
            raise ZeroDivisionError
        before = len(late.waits_s)
        await asyncio.sleep(1.0)
        assert len(late.waits_s) == before

    run_virtual(main())
