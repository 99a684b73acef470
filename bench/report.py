"""What every benchmark prints: a readable table, and with ``--json`` one object on the last line."""

from __future__ import annotations

import argparse
import json
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


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=natural, default=0, help="of everything")
    made.add_argument("--smoke", action="store_true", help="tiny and quick: shows that it runs, checks nothing")
    made.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    return made


def natural(text: str) -> int:
    """Read a number from 0 on; for arguments."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def positive(text: str) -> int:
    """Read a number from 1 on; for arguments."""
    value = natural(text)
    if value == 0:
        raise ValueError(text)
    return value


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


def interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float], seed: int) -> dict[str, float]:
    """Return a statistic with its 95 % interval, a percentile bootstrap over the values.

    Example:
        >>> interval([1.0, 1.0, 1.0], statistics.fmean, 0)
        {'value': 1.0, 'low': 1.0, 'high': 1.0}
    """
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (2000, len(values)))
    low, high = np.quantile([statistic(row.tolist()) for row in drawn], [0.025, 0.975])
    return {"value": statistic(values), "low": float(low), "high": float(high)}


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
