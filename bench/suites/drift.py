"""A change of regime half-way: does the tuner find the new optimum, soon, and does it then stay there?

The policy of the third case is that of W5a at a fifth of its time, so that it is W5a once it is five times slower; the
fourth is W5a of which half of the environments become ten times slower. The best static settings of both halves come
from a sweep over thresholds. A best threshold is any whose rate is within 1 % of the best: the optimum is flat.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bench.hardware import Conditions
from bench.plot import Picture
from bench.report import Check, at_least, at_most
from bench.runs import Drift, Job, Outcome, change, load, run_all, sweep
from bench.shown import HEADING, records, row
from bench.suites import Ask, Result
from bench.workload import bound

NUM_ENVS = 64
FLAT = 0.01
STEADY_S = 60.0
FASTER = {"policy.fixed_s": 0.2, "policy.per_sample_s": 0.2}


@dataclass(frozen=True)
class Case:
    """One drift.

    Attributes:
        name: For the table.
        first: W workload of the first half.
        drift: What changes.
        changes: Numbers of the first half that are multiplied.
        bar: What must be gained over the first half's best threshold, kept.
    """

    name: str
    first: str
    drift: Drift
    bar: float
    changes: dict[str, float] = field(default_factory=dict)


CASES = (
    Case("W3 -> W5a", "W3", Drift("W5a"), 1.1),
    Case("W5a -> W3", "W5a", Drift("W3"), 1.1),
    Case("policy 5x slower", "W5a", Drift("W5a"), 1.2, FASTER),
    Case("half of the environments 10x slower", "W5a", Drift(slow_part=0.5), 1.2),
)


def suite(ask: Ask) -> Result:
    """Run every case with the tuner and with every static threshold; count the second half."""
    num_envs, half, steady = (8, 400, 800) if ask.smoke else (NUM_ENVS, 40_000, 400_000)
    statics = [f"fixed:{num_envs // 2}"] if ask.smoke else sweep(num_envs)
    jobs = []
    for case in CASES:
        job = Job(("w", case.first, str(num_envs)), "ebrl", case.changes, drop=half, count=half, seed=ask.seed)
        jobs += [replace(job, scheduler=key, drift=case.drift) for key in ("ebrl", *statics)]
        jobs += [replace(job, scheduler=key, drop=half // 4) for key in statics]  # the first half's own best
        jobs.append(replace(job, drift=case.drift, count=steady))  # a long time, for the number of moves
    outcomes = iter(run_all(jobs))
    checks: list[Check] = []
    lines, data, bars = [HEADING], {}, {}
    for case in CASES:
        ours, second, first, long = (
            next(outcomes),
            {key: next(outcomes) for key in statics},
            {key: next(outcomes) for key in statics},
            next(outcomes),
        )
        best, kept = fastest(second), fastest(first)
        launches, threshold = settled(ours, second)
        most = busiest(long)
        gain, limit = ours.speed / second[kept].speed, limit_after(ours.job)
        checks += [
            at_least(f"{case.name}: ebrl / best static of the second half", ours.speed / second[best].speed, 0.95),
            at_least(f"{case.name}: ebrl / the first half's best, kept", gain, case.bar),
            at_most(f"{case.name}: launches until the threshold is within 10 % of a best one", launches, 200),
            at_most(f"{case.name}: moves in any steady {STEADY_S:.0f} s", most, 3),
        ]
        lines.append(
            f"{case.name}: {ours.speed:.0f}/s; best {best} {second[best].speed:.0f}/s, kept {kept} "
            f"{second[kept].speed:.0f}/s; threshold {threshold} after {launches:.0f} launches, "
            f"at most {most} moves a minute"
        )
        lines.append(row("  ebrl", ours, limit))
        lines += [f"    {move.time_s - ours.began_s:8.2f} s  {move}" for move in ours.moves]
        runs = records({"ebrl": ours, **second}, limit, ("ebrl", best, kept))
        data[case.name] = {"best": best, "kept": kept, "bound": limit, "runs": runs}
        bars[case.name] = {"ebrl": 1.0, "best": second[best].speed / ours.speed, "kept": 1 / gain}
    return Result(checks, data, lines, [Picture("", bars, "rate, as a part of EBRL's")])


def limit_after(job: Job) -> float | None:
    """Return the bound of the second half; None where some environments are slower than others."""
    conditions = Conditions(load(job))
    assert job.drift is not None
    change(conditions, job.drift)
    return None if conditions.num_slow else bound(conditions.workload)


def fastest(outcomes: dict[str, Outcome]) -> str:
    """Return the scheduler with the highest rate."""
    return max(outcomes, key=lambda key: outcomes[key].speed)


def thresholds(outcome: Outcome) -> list[tuple[float, int]]:
    """Return when which threshold began to hold."""
    return [(0.0, 1), *((move.time_s, move.new.threshold) for move in outcome.moves)]


def settled(ours: Outcome, second: dict[str, Outcome]) -> tuple[float, int]:
    """Return after how many launches of the second half the threshold came within 10 % of a best one to stay."""
    top = max(outcome.speed for outcome in second.values())
    good = [int(key.split(":")[1]) for key, outcome in second.items() if outcome.speed >= (1 - FLAT) * top]
    low, high = 0.9 * min(good), max(1.1 * max(good), max(good) + 1)
    since_s = None
    history = thresholds(ours)
    for time_s, threshold in history:
        if not low <= threshold <= high:
            since_s = None
        elif since_s is None:
            since_s = max(time_s, ours.began_s)
    if since_s is None:
        return float(len(ours.launch_times_s)), history[-1][1]
    return float(sum(time_s < since_s for time_s in ours.launch_times_s)), history[-1][1]


def busiest(outcome: Outcome) -> int:
    """Return the most moves in a minute that begins a minute after the change or later."""
    times_s = [move.time_s for move in outcome.moves if move.time_s >= outcome.began_s + STEADY_S]
    return max((sum(start <= time_s < start + STEADY_S for time_s in times_s) for start in times_s), default=0)
