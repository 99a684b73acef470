"""What every benchmark prints: a readable table, and with ``--json`` one object on the last line."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ebrl.core.errors import EbrlError
from ebrl.core.rng import Domain, stream

DRAWS = 10_000  # of a bootstrap


@dataclass(frozen=True)
class Check:
    """One bar: what was measured, what was asked for, and whether it holds."""

    name: str
    value: float
    bar: str
    ok: bool


def at_most(name: str, value: float, bar: float) -> Check:
    """Check ``value <= bar``."""
    return Check(name, value, f"<= {bar:g}", value <= bar)


def at_least(name: str, value: float, bar: float) -> Check:
    """Check ``value >= bar``."""
    return Check(name, value, f">= {bar:g}", value >= bar)


@dataclass(frozen=True)
class Number:
    """What a number of the command line may be: the type of every argument that is one. NaN is in no range.

    Attributes:
        kind: Whole or not.
        least: That is allowed.
        most: That is allowed.
    """

    kind: type[int | float]
    least: float
    most: float

    def __call__(self, text: str) -> float:
        """Read one; called by argparse."""
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:
            what = "a whole number" if self.kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what} from {self.least:g} to {self.most:g}, got {text!r}")
        return value


SEED = Number(int, 0, 2**31 - 1)
COUNT = Number(int, 1, 1_000_000)
SECONDS = Number(float, 0.001, 86_400.0)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=SEED, default=0, help="of everything")
    made.add_argument(
        "--smoke", action="store_true", help="tiny, whatever else is said: shows that it runs, checks nothing"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    return made


def command(answer: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a benchmark; an error that its user can mend is one line.

    Returns:
        Its exit status, or 2.
    """
    try:
        return answer(args)
    except EbrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def finish(bench: str, args: argparse.Namespace, checks: Sequence[Check], data: dict[str, Any]) -> int:
    """Print checks, and the JSON line if asked for.

    Returns:
        Exit status: 1 when a check fails; a smoke run has none.
    """
    checks = [] if args.smoke else checks
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.value:.4g} (bar {check.bar})")
    if args.json:
        record = {
            "bench": bench,
            "git": git_version(),
            "seed": args.seed,
            "machine": machine(),
            "checks": [asdict(check) for check in checks],
            "data": data,
        }
        print(json.dumps(record, allow_nan=False))
    return 0 if all(check.ok for check in checks) else 1


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "num": len(values)}


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest quarter, of five without one each (as in rliable)."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


@dataclass(frozen=True)
class Interval:
    """A statistic, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f} .. {self.high:.2f}]"


def interval(statistic: Callable[..., Any], *samples: Sequence[float] | NDArray[np.float64], seed: int) -> Interval:
    """Return a statistic with its percentile bootstrap interval.

    Args:
        statistic: Of as many arrays as there are samples.
        samples: Of one length. Where there are several, what stands at one place in them is drawn together.
        seed: Of what is drawn.

    Example:
        >>> interval(np.mean, [1.0, 1.0, 1.0], seed=0)
        Interval(value=1.0, low=1.0, high=1.0)
    """
    arrays = [np.asarray(sample) for sample in samples]
    drawn = stream(seed, Domain.EVAL).integers(len(arrays[0]), size=(DRAWS, len(arrays[0])))
    low, high = np.percentile([statistic(*(array[row] for array in arrays)) for row in drawn], [2.5, 97.5])
    return Interval(float(statistic(*arrays)), float(low), float(high))


def show(numbers: dict[str, float], unit: str = "") -> str:
    """Return median and range as text."""
    return f"{numbers['median']:.3g}{unit} [{numbers['min']:.3g} .. {numbers['max']:.3g}]"


def git_version() -> str:
    """Return the commit, with ``+`` for uncommitted changes; empty outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    return {
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
