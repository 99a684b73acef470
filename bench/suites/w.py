"""W1 to W5b: the tuner against every fixed threshold, greedy and lock-step, from a cold start."""

from __future__ import annotations

from bench.plot import Picture
from bench.report import Check, at_least
from bench.runs import Job, Outcome, by_scheduler, load, run_all, sweep
from bench.shown import HEADING, pictures, records, row
from bench.suites import Ask, Result
from bench.workload import bound

NAMES = ("W1", "W2", "W3", "W4", "W5a", "W5b")
COUNTS = (32, 64, 256)


def suite(ask: Ask) -> Result:
    """Compare at every workload and count; latencies are paired."""
    counts, names = ((8,), ("W3", "W5a")) if ask.smoke else (COUNTS, NAMES)
    cases = [(name, count) for count in counts for name in names]
    drop, count = (200, 400) if ask.smoke else (4000, 20000)
    jobs = [
        Job(("w", name, str(num)), scheduler, drop=drop, count=count, seed=ask.seed)
        for name, num in cases
        for scheduler in schedulers(num, ask)
    ]
    outcomes = run_all(jobs)
    checks, lines, data, bars, runs = list[Check](), [HEADING], {}, {}, {}
    for name, num in cases:
        found = by_scheduler(o for o in outcomes if o.job.workload == ("w", name, str(num)))
        label, limit = f"{name} N={num}", bound(load(found["ebrl"].job))
        fixed = {key: outcome.speed for key, outcome in found.items() if key.startswith("fixed:")}
        best = max(fixed, key=fixed.__getitem__)
        checks += compare(label, found, fixed[best])
        shown = tuple(dict.fromkeys(["lockstep", "greedy", best, "ebrl", *ask.schedulers]))
        lines.append(line(label, found, best, limit))
        lines += [row(f"  {key}", found[key], limit) for key in dict.fromkeys(["ebrl", *ask.schedulers])]
        data[label] = {"bound": limit, "runs": records(found, limit, shown)}
        runs[label] = {"fixed" if key == best else key: found[key] for key in shown}
        bars[label] = {key: outcome.speed / limit for key, outcome in runs[label].items()}
    return Result(checks, data, lines, [Picture("", bars, "part of the bound"), *pictures(runs)])


def schedulers(num_envs: int, ask: Ask) -> list[str]:
    """Return what is run on a workload."""
    fixed = ["fixed:1", f"fixed:{num_envs}"] if ask.smoke else sweep(num_envs)
    return list(dict.fromkeys(["ebrl", "greedy", "lockstep", *fixed, *ask.schedulers]))


def compare(label: str, found: dict[str, Outcome], best: float) -> list[Check]:
    """Return the three bars of a workload."""
    ours = found["ebrl"].speed
    return [
        at_least(f"{label}: ebrl / best fixed threshold", ours / best, 0.97),
        at_least(f"{label}: ebrl / greedy", ours / found["greedy"].speed, 0.99),
        at_least(f"{label}: ebrl / lockstep", ours / found["lockstep"].speed, 0.99),
    ]


def line(label: str, found: dict[str, Outcome], best: str, limit: float) -> str:
    """Return a row of the table: parts of the analytic bound."""
    others = [key for key in found if key not in ("ebrl", "greedy", "lockstep") and "fixed" not in key]
    parts = "  ".join(f"{key} {found[key].speed / limit:.3f}" for key in ("ebrl", best, "greedy", "lockstep", *others))
    moves = "; ".join(f"{move.time_s:.2f} s {move.new.threshold}" for move in found["ebrl"].moves)
    return f"{label:10} bound {limit:7.0f}/s  {parts}  [{moves}]"
