"""How a run in virtual time is shown: as a record for the JSON line, as a row of a table, and in pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from bench.plot import Picture
from bench.runs import Outcome

HEADING = (
    f"{'scheduler':24} {'steps/s':>9} {'of bound':>8} {'chunks/s':>9} {'episodes/s':>10} {'samples/s':>9} "
    f"{'cores':>6} {'gen':>6} {'train':>6} {'batch':>7} {'lag':>5}"
)
"""Of `row`: rates of the part that counts; busy parts over all time; mean requests of a batch, and mean lag trained."""


def record(outcome: Outcome, limit: float | None, histograms: bool = True) -> dict[str, Any]:
    """Return a run for the JSON line.

    Args:
        outcome: What came of it.
        limit: Analytic bound of its workload, in environment steps per second; None: none is known.
        histograms: Whether batches by size, decisions by lag and moves are among it.

    Returns:
        ``rates`` per second, ``of_bound``, ``busy`` by resource, and the histograms.
    """
    shown: dict[str, Any] = {
        "rates": {name: _short(rate) for name, rate in outcome.rates.items()},
        "of_bound": None if limit is None else _short(outcome.speed / limit),
        "busy": {name: _short(part) for name, part in outcome.busy.items()},
    }
    if histograms:
        moves = [f"{move.time_s:.2f} s {move}" for move in outcome.moves]
        shown |= {"batches": dict(sorted(outcome.batches.items())), "lags": dict(sorted(outcome.lags.items()))}
        shown |= {"moves": moves} if moves else {}
    return shown


def records(found: Mapping[str, Outcome], limit: float | None, compared: Collection[str]) -> dict[str, Any]:
    """Return the runs of a workload by scheduler, with histograms for those that are compared."""
    return {name: record(outcome, limit, name in compared) for name, outcome in found.items()}


def row(name: str, outcome: Outcome, limit: float | None) -> str:
    """Return a run as a row of a table; see `HEADING`."""
    rates, busy = outcome.rates, outcome.busy
    part = f"{'':8}" if limit is None else f"{outcome.speed / limit:8.3f}"
    lag = f"{mean(outcome.lags):5.2f}" if outcome.lags else f"{'-':>5}"
    return (
        f"{name:24} {_number(rates['env_steps'], 9)} {part} {_number(rates['chunks'], 9)} "
        f"{_number(rates['episodes'], 10)} {_number(rates['samples'], 9)} "
        f"{busy['cores']:6.1%} {busy['gen']:6.1%} {busy['train']:6.1%} {mean(outcome.batches):7.1f} {lag}"
    )


def pictures(cases: Mapping[str, Mapping[str, Outcome]]) -> list[Picture]:
    """Return pictures of runs: resources in use, batches by size, and, where something is trained, decisions by lag.

    Args:
        cases: By label and scheduler; the histograms are of ``ebrl``.
    """
    busy = {
        label: {f"{name}: {kind}": part for name, run in found.items() for kind, part in run.busy.items() if part}
        for label, found in cases.items()
    }
    batches = {label: _parts(_by_octave(found["ebrl"].batches)) for label, found in cases.items()}
    lags = {
        label: _parts({str(lag): num for lag, num in sorted(found["ebrl"].lags.items())})
        for label, found in cases.items()
    }
    made = [
        Picture("busy", busy, "busy part of what there is"),
        Picture("batches", batches, "part of EBRL's batches, by requests"),
        Picture("lags", lags, "part of EBRL's trained decisions, by versions behind"),
    ]
    return [picture for picture in made if any(picture.groups.values())]


def mean(histogram: Mapping[int, int]) -> float:
    """Return the mean of what a histogram counts; 0 without any."""
    return sum(value * num for value, num in histogram.items()) / max(1, sum(histogram.values()))


def _by_octave(histogram: Mapping[int, int]) -> dict[str, int]:
    counts: Counter[int] = Counter()
    for size, num in histogram.items():
        counts[size.bit_length()] += num
    return {
        f"{1 << (bits - 1)} to {(1 << bits) - 1}" if bits > 1 else "1": counts[bits]
        for bits in range(1, max(counts, default=0) + 1)
    }


def _parts(histogram: Mapping[str, int]) -> dict[str, float]:
    total = sum(histogram.values())
    return {name: num / total for name, num in histogram.items()}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _number(value: float, width: int) -> str:
    return f"{value:{width},.0f}" if value >= 1000 else f"{value:{width}.1f}"
