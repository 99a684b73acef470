"""What is shown of a run in virtual time: its record, its row and its pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.plot import Line, over_time
from bench.runs import Job, Outcome, run
from bench.shown import HEADING, mean, pictures, record, records, row

OUTCOME = Outcome(
    Job(("w", "W3", "8"), "ebrl"),
    {"env_steps": 12_345.678, "chunks": 250.0, "episodes": 5.0, "samples": 240.0},
    {"cores": 0.5, "gen": 0.25, "train": 0.0},
    {4: 1, 1: 2, 2: 1},
    {1: 3, 0: 1},
)


def test_a_record_has_all_and_those_that_are_only_searched_no_histograms() -> None:
    assert record(OUTCOME, 24_691.356) == {
        "rates": {"env_steps": 12345.7, "chunks": 250.0, "episodes": 5.0, "samples": 240.0},
        "of_bound": 0.5,
        "busy": {"cores": 0.5, "gen": 0.25, "train": 0.0},
        "batches": {1: 2, 2: 1, 4: 1},
        "lags": {0: 1, 1: 3},
    }
    assert record(OUTCOME, None)["of_bound"] is None
    found = records({"ebrl": OUTCOME, "greedy": OUTCOME}, 1.0, ("ebrl",))
    assert ["batches" in shown for shown in found.values()] == [True, False]


def test_a_row_stands_under_its_heading() -> None:
    words = row("ebrl", OUTCOME, 24_691.356).split()
    assert words == ["ebrl", "12,346", "0.500", "250.0", "5.0", "240.0", "50.0%", "25.0%", "0.0%", "2.0", "0.75"]
    assert len(row("ebrl", OUTCOME, None)) == len(row("ebrl", replace(OUTCOME, lags={}), 1e5)) == len(HEADING)
    assert mean({}) == 0


def test_pictures_are_of_what_exists() -> None:
    busy, batches, lags = pictures({"W3": {"ebrl": OUTCOME}})
    assert busy.groups == {"W3": {"ebrl: cores": 0.5, "ebrl: gen": 0.25}}
    assert batches.groups == {"W3": {"1": 0.5, "2 to 3": 0.25, "4 to 7": 0.25}}
    assert lags.groups == {"W3": {"0": 0.25, "1": 0.75}}
    assert [picture.name for picture in pictures({"W3": {"ebrl": replace(OUTCOME, lags={})}})] == ["busy", "batches"]


@pytest.mark.blocks("workloads are read where they are run")
@pytest.mark.parametrize("scheduler", ["ebrl", "lockstep"])
def test_where_nothing_is_trained_no_samples_are_counted(scheduler: str) -> None:
    outcome = run(Job(("w", "W1", "4"), scheduler, drop=40, count=200))
    assert outcome.rates["samples"] == 0
    assert outcome.lags == {}
    assert sum(size * num for size, num in outcome.batches.items()) == pytest.approx(200, abs=10)


def test_a_curve_begins_where_it_is_known_and_holds_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn: list[tuple[float, float, float, float]] = []
    plot = Axes.plot

    def spy(axis: Axes, times: Any, values: Any, **options: Any) -> Any:
        drawn.append((times[0], values[0], times[-1], values[-1]))
        return plot(axis, times, values, **options)

    monkeypatch.setattr(Axes, "plot", spy)
    runs = [Line([2.0, 4.0, 10.0], [1.0, 3.0, 5.0]), Line([3.0, 8.0], [3.0, 7.0])]
    panels = {"one": {"both": runs, "short": [Line([2.0], [9.0])]}}
    over_time(panels, str(tmp_path / "curves.png"), "title", ("s", 1.0), "value", 6.0)
    assert drawn == [(3.0, 2.0, 8.0, 5.0), (2.0, 9.0, 2.0, 9.0)]
    assert (tmp_path / "curves.png").stat().st_size > 1000
