"""Random workloads: the tuner against the best fixed threshold of each."""

from __future__ import annotations

import math

from bench.plot import Picture
from bench.report import Check, at_least
from bench.runs import Job, by_scheduler, load, run_all, sweep
from bench.shown import HEADING, records, row
from bench.suites import Ask, Result
from bench.workload import Workload, bound
from ebrl.core.rng import Domain, stream

BASE = "W2"  # whose numbers are multiplied


def suite(ask: Ask) -> Result:
    """Compare at every draw; latencies are paired."""
    draws = [draw(ask.seed, number) for number in range(2 if ask.smoke else ask.seeds)]
    drop, count = (200, 400) if ask.smoke else (4000, 20000)
    jobs = []
    for num_envs, lanes, changes in draws:
        fixed = ["fixed:1", f"fixed:{num_envs}"] if ask.smoke else sweep(num_envs)
        for scheduler in ["ebrl", *fixed]:
            workload = ("w", BASE, str(num_envs))
            jobs.append(Job(workload, scheduler, changes, lanes=lanes, drop=drop, count=count, seed=ask.seed))
    outcomes = run_all(jobs)
    ratios, lines, data, bars = [], [HEADING], [], {}
    for number, (num_envs, lanes, changes) in enumerate(draws):
        found = by_scheduler(o for o in outcomes if o.job.changes == changes)
        ours, fixed_speeds = found["ebrl"], {key: o.speed for key, o in found.items() if key != "ebrl"}
        best = max(fixed_speeds, key=fixed_speeds.__getitem__)
        ratio, workload_ = ours.speed / fixed_speeds[best], load(ours.job)
        ratios.append(ratio)
        text = describe(workload_, lanes)
        limit = bound(workload_) if lanes == 1 else None
        greedy = fixed_speeds["fixed:1"] / fixed_speeds[best]
        lines.append(f"{text}: best {best:9} ebrl / best {ratio:.3f}  greedy / best {greedy:.3f}")
        lines.append(row("  ebrl", ours, limit))
        runs = records(found, limit, ("ebrl", best, "fixed:1"))
        data.append({"ratio": ratio, "best": best, "workload": text, "bound": limit, "runs": runs})
        bars[f"{number}: N {num_envs}"] = {"ebrl / best fixed": ratio}
    return Result(verdict(ratios), {"draws": data}, [*lines, summary(ratios)], [Picture("", bars, "ratio")])


def describe(workload: Workload, lanes: int) -> str:
    """Return what was drawn."""
    simulator, policy = workload.simulator, workload.policy
    return (
        f"N {simulator.num_envs:3} lanes {lanes} step {1e3 * simulator.step_s:4.1f} ms cv {simulator.step_cv:.2f} "
        f"batch {1e3 * policy.fixed_s:4.1f} + {1e3 * policy.per_sample_s:.3f} n ms"
    )


def verdict(ratios: list[float]) -> list[Check]:
    """Return the two bars."""
    good = sum(ratio >= 0.95 for ratio in ratios) / len(ratios)
    return [
        at_least("part of draws with at least .95 of the best fixed threshold", good, 0.95),
        at_least("worst draw: ebrl / best fixed threshold", min(ratios), 0.9),
    ]


def summary(ratios: list[float]) -> str:
    """Return the spread in one line."""
    ranked = sorted(ratios)
    median = ranked[len(ranked) // 2]
    return f"ratio: min {ranked[0]:.3f}  median {median:.3f}  max {ranked[-1]:.3f} of {len(ranked)} draws"


def draw(seed: int, number: int) -> tuple[int, int, dict[str, float]]:
    """Return environments, lanes, and what the base workload's numbers are multiplied with."""
    rng = stream(seed, Domain.LATENCY, 10_000 + number)

    def between(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))

    mean_ms, cv, fixed_ms, sample_ms = between(2, 50), float(rng.uniform(0, 2)), between(0.5, 40), between(0.01, 1)
    num_envs, lanes = round(between(16, 512)), int(rng.integers(1, 3))
    base = load(Job(("w", BASE, str(num_envs)), "ebrl")).numbers
    wanted = {
        "simulator.step_s": mean_ms / 1e3,
        "simulator.step_cv": max(cv, 1e-3),
        "policy.fixed_s": fixed_ms / 1e3,
        "policy.per_sample_s": sample_ms / 1e3,
    }
    return num_envs, lanes, {path: value / base[path] for path, value in wanted.items()}
