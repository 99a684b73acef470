"""Convergence: how much sooner is a target reached, where only the schedule differs?

Hypothesis: with data of at most one version back, training that overlaps independent environments reaches a sustained
target at least 2.4 times sooner than lock-step collection and at least 1.5 times sooner than independent environments
with a barrier before each update, on three of four latency profiles (the 95 % interval is above that).

Schedules:

- ``lockstep``: a vector environment. All ask together, all step, a reset holds up all; then training.
- ``sync``: independent environments, each of which collects its share of the batch; then training. What PPO does.
- ``sync-pooled``: the same, but whoever is ready fills the batch: the default of `max_lag=0` here. It waits for nobody
  but the learner, and has no bar: overlap is all that is left to gain, which is twice only where rollout and training
  take equally long. (When latencies and measure were written down, ``sync`` was this one. Since then ``sync`` is what
  others have, PPO with a number of steps per environment, and both are shown.)
- ``async-1``, ``-2``, ``-4``: the number is `max_lag`. The first is the default, and the one that is compared.
- ``decoupled-1``: as ``async-1``, with the library's default objective for old data; it has no bar. The others clip
  around the weights that acted: where an update moves a policy as far as with these settings, that keeps the next one,
  whose data are older, from moving it as far again. (The first version of this benchmark had the default, and
  ``decoupled-1`` shows what it gives.) Where nothing is old the two are one.

All else is the same: learner, seeds, batches, number of updates, greedy evaluations outside the clock; so are the
latencies of every step and reset (`bench/learning.py`). What is measured, and how failures count, is in
`bench/survival.py`. Latencies come from `bench/profiles/convergence`, where generation and training have a device each;
the policy is a small network on InvertedPendulum-v5: this is no result about a GPU or a VLA. Others report 1.11 to
1.38 (RLinf, its asynchronous over its synchronous mode) and up to 1.85 (RL-VLA3), both in throughput, and 2.5 (VER,
over DD-PPO).

Controls: without variation of latencies, overlap gives no more than twice; where rollout takes no time there is
nothing to gain; and asynchronous code with ``max_lag=0`` does what a plain loop does, bit for bit (`bench/barrier.py`).
Also here: what the bound on lag costs where some decisions straggle (`bench/stragglers.py`).

    python -m bench.convergence --json
    python -m bench.convergence --only long-tail --seeds 40 --plot long-tail.png
    python -m bench.convergence --real --json       # by sleeping, in a twentieth of the time, beside the twin
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from bench.learning import (
    ASYNC,
    LOCKSTEP,
    POOLED,
    SCHEDULES,
    SYNC,
    TARGET,
    Curve,
    Job,
    Schedule,
    learn,
    learn_plainly,
    update_s,
)
from bench.loading import load_convergence
from bench.plot import Line, check_picture, over_time
from bench.profiles import names
from bench.report import COUNT, Check, Interval, at_least, at_most, command, finish, parser, spread
from bench.runs import on_all_cores
from bench.stragglers import stragglers
from bench.survival import ratio, restricted, sustained
from bench.workload import Workload
from ebrl.core.errors import ConfigError

BARS = {LOCKSTEP.name: 2.4, SYNC.name: 1.5}  # by baseline
BASES = (LOCKSTEP.name, SYNC.name, POOLED.name)
ENOUGH = 3  # profiles on which they must hold
CONTROLLED = "robocasa"  # the profile whose latencies the controls take away
PARTS = (0.5, 0.8, 0.95)  # of the final score
REAL_SCALE = 0.05
HEADING = (
    "  schedule      s/update   updates to target   s to target           failed   s to 50/80/95 %        final   "
    "lag mean, max   masked"
)
Found = tuple[list[Check], list[str], dict[str, Any]]
Arms = dict[str, list[Curve]]  # by schedule, in the order of the seeds


def main() -> int:
    return command(answer, arguments())


def answer(args: argparse.Namespace) -> int:
    if args.plot and args.real:
        raise ConfigError("--plot is not for --real, whose runs are too few for a picture")
    if args.plot:
        check_picture(args.plot)
    sections = [real] if args.real else [profiles] if args.only else [profiles, controls, laggards]
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for section in sections:
        more, lines, numbers = section(args)
        print("\n".join(lines), flush=True)
        checks += more
        data |= numbers
    return finish("convergence", args, checks, data)


# The profiles.


def profiles(args: argparse.Namespace) -> Found:
    """Run all schedules on all profiles, and compare."""
    chosen = [name for name in names("convergence") if args.only in (None, name)][: 1 if args.smoke else None]
    workloads = [load_convergence(name) for name in chosen]
    arms = run_all(args, [(workload, schedule) for workload in workloads for schedule in SCHEDULES], args.seeds)
    lines: list[str] = []
    data: dict[str, Any] = {}
    for workload in workloads:
        own = arms[workload.name]
        compared = {base: versus(own[base], own[ASYNC.name], args.seed) for base in BASES}
        lines += [*table(workload, own), *(sentence(base, found) for base, found in compared.items())]
        data[workload.name] = {
            "schedules": {name: summary(curves) for name, curves in own.items()},
            "ratios": {base: {key: vars(one) for key, one in found.items()} for base, found in compared.items()},
        }
    if args.plot:
        draw(arms, args.plot)
    return bars(data), lines, data


def bars(data: dict[str, Any]) -> list[Check]:
    """Return a check per baseline, where there are enough profiles for it."""
    checks = []
    for base, bar in BARS.items():
        lows = sorted((found["ratios"][base]["time"]["low"] for found in data.values()), reverse=True)
        if len(lows) >= ENOUGH:
            name = f"{base} / {ASYNC.name}: time to target, lower bound, {ENOUGH} of {len(lows)} profiles"
            checks.append(at_least(name, lows[ENOUGH - 1], bar))
    return checks


def run_all(args: argparse.Namespace, cases: Iterable[tuple[Workload, Schedule]], num: int) -> dict[str, Arms]:
    """Run cases with so many seeds; by workload and schedule."""
    updates = 2 if args.smoke else Job.updates
    jobs = [
        Job(workload, schedule, args.seed + place, updates)
        for workload, schedule in cases
        for place in range(1 if args.smoke else math.ceil(num / 4) if schedule.aside else num)
    ]
    found: dict[str, Arms] = {}
    for curve in on_all_cores(learn, jobs):
        job = curve.job
        found.setdefault(job.workload.name, {}).setdefault(job.schedule.name, []).append(curve)
    return found


def reached(curve: Curve, numbers: Sequence[float]) -> float | None:
    """Return the number (a time, or updates) of the first evaluation at the target that lasts."""
    place = sustained(curve.returns, TARGET)
    return None if place is None else numbers[place]


def versus(base: Sequence[Curve], ours: Sequence[Curve], seed: int) -> dict[str, Interval]:
    """Return how many times sooner we are, with the seeds of the baseline, and what that comes from.

    Throughput times sample efficiency would be the first if all updates took equally long. Throughput is of whole runs,
    though, and before the target is reached episodes are short, so that resets weigh more.

    Args:
        base: In the order of seeds.
        ours: Of these seeds, and maybe more.
        seed: Of the bootstrap.

    Returns:
        Of the time; of throughput, and of sample efficiency.
    """
    ours = ours[: len(base)]
    ends = [curve.times_s[-1] for curve in base]
    times = [restricted([reached(curve, curve.times_s) for curve in arm], ends) for arm in (base, ours)]
    ends = [float(curve.updates[-1]) for curve in base]
    updates = [restricted([reached(curve, curve.updates) for curve in arm], ends) for arm in (base, ours)]
    totals = [restricted([None] * len(arm), [curve.total_s for curve in arm]) for arm in (base, ours)]
    return {
        "time": ratio(times[0], times[1], seed),
        "throughput": ratio(totals[0], totals[1], seed),
        "sample_efficiency": ratio(updates[0], updates[1], seed),
    }


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return what came of one schedule."""
    finals = [statistics.fmean(curve.returns[-3:]) for curve in curves]
    parts = {
        f"{part:.0%}": statistics.median(
            next(time for time, value in zip(curve.times_s, curve.returns, strict=True) if value >= part * final)
            for curve, final in zip(curves, finals, strict=True)
        )
        for part in PARTS
    }
    return {
        "s_per_update": statistics.fmean(curve.total_s / curve.job.updates for curve in curves),
        "time_s": [reached(curve, curve.times_s) for curve in curves],
        "updates": [reached(curve, curve.updates) for curve in curves],
        "end_s": [curve.times_s[-1] for curve in curves],
        "failed": sum(reached(curve, curve.updates) is None for curve in curves),
        "s_to_part_of_final": parts,
        "final": spread(finals),
        "lag_mean": statistics.fmean(curve.lag_mean for curve in curves),
        "lag_max": max(curve.lag_max for curve in curves),
        "masked": statistics.fmean(curve.masked for curve in curves),
    }


def table(workload: Workload, arms: Arms) -> list[str]:
    """Return a row per schedule."""
    settings = f"{workload.num_units} environments, {update_s(workload):.1f} s in the learner per update"
    note = "to target: of those that reached it (the ratios below are of all)"
    rows = [row(name, summary(curves)) for name, curves in arms.items()]
    return [f"{workload.name}: {settings}; {note}", HEADING, *rows]


def row(name: str, found: dict[str, Any]) -> str:
    """Return a row of the table."""
    parts = " / ".join(f"{value:.0f}" for value in found["s_to_part_of_final"].values())
    return (
        f"  {name:12}  {found['s_per_update']:8.1f}   {shown(found['updates']):17}   {shown(found['time_s']):19}   "
        f"{found['failed']:6d}   {parts:20}   {found['final']['median']:5.0f}   "
        f"{found['lag_mean']:8.2f}, {found['lag_max']:3d}   {found['masked']:6.2%}"
    )


def shown(values: Sequence[float | None]) -> str:
    """Return median and range of those that are there."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0f} [{min(known):.0f} .. {max(known):.0f}]" if known else "never"


def sentence(base: str, found: dict[str, Interval]) -> str:
    """Return a comparison in words."""
    return (
        f"  {ASYNC.name} is at the target {found['time']} times sooner than {base}: throughput {found['throughput']}, "
        f"sample efficiency {found['sample_efficiency']} times as high"
    )


def draw(arms: dict[str, Arms], path: str) -> None:
    """Draw returns over time."""
    panels = {
        name: {schedule: [Line(curve.times_s, curve.returns) for curve in own] for schedule, own in by_schedule.items()}
        for name, by_schedule in arms.items()
    }
    title = f"Greedy return over virtual time\nmedian and quartiles over seeds; dotted: the target, {TARGET:g}"
    over_time(panels, path, title, ("hours", 3600.0), "return", TARGET)


# What must not show a gain.


def controls(args: argparse.Namespace) -> Found:
    """Take latencies away, and compare with a plain loop."""
    workload = load_convergence(CONTROLLED)
    still = without_variance(workload)
    instant = without_latency(workload)
    cases = [(case, schedule) for case in (still, instant) for schedule in (SYNC, ASYNC)]
    arms = run_all(args, cases, max(1, args.seeds // 2))
    found = {name: versus(own[SYNC.name], own[ASYNC.name], args.seed) for name, own in arms.items()}
    lines = [line for name, ratios in found.items() for line in (f"{name}:", sentence(SYNC.name, ratios))]
    differing, seeds = differences(args, workload)
    lines.append(f"plain loop: {differing} of {seeds} seeds differ from asynchronous code with max_lag 0")
    instantly = found[instant.name]["time"]
    checks = [
        at_most(f"{still.name}: throughput over sync", found[still.name]["throughput"].value, 2.0),
        at_most(f"{still.name}: time to target over sync, lower bound", found[still.name]["time"].low, 2.0),
        at_most(f"{instant.name}: throughput over sync", found[instant.name]["throughput"].value, 1.02),
        at_most(f"{instant.name}: time to target over sync, lower bound", instantly.low, 1.0),
        at_least(f"{instant.name}: time to target over sync", instantly.value, 0.8),
        at_most("seeds whose curve with max_lag 0 is not that of a plain loop", differing, 0),
    ]
    ratios = {name: {key: vars(one) for key, one in own.items()} for name, own in found.items()}
    return checks, lines, {"controls": {"ratios": ratios, "plain_loop": {"seeds": seeds, "differ": differing}}}


def without_variance(workload: Workload) -> Workload:
    """Return the profile with equal steps, and resets that take no time."""
    even: dict[str, float] = {"step_cv": 0, "burst_share": 0, "stall_probability": 0, "reset_s": 0, "reset_cv": 0}
    simulator = replace(workload.simulator, **even)  # type: ignore[arg-type]
    return replace(workload, name="zero variance", simulator=simulator)


def without_latency(workload: Workload) -> Workload:
    """Return the profile with simulators and a policy that take no time; only updates do."""
    simulator = replace(without_variance(workload).simulator, step_s=0.0)
    policy = replace(workload.policy, fixed_s=0.0, per_sample_s=0.0)
    return replace(workload, name="zero latency", simulator=simulator, policy=policy)


def differences(args: argparse.Namespace, workload: Workload) -> tuple[int, int]:
    """Return how many seeds learn otherwise in lock-step or asynchronously than in a plain loop, and of how many."""
    num = 1 if args.smoke else 3
    seeds, updates = range(args.seed, args.seed + num), 2 if args.smoke else 24
    jobs = [
        Job(workload, schedule, seed, updates, deterministic=schedule is SYNC)
        for seed in seeds
        for schedule in (LOCKSTEP, SYNC)
    ]
    curves, plain = on_all_cores(learn, jobs), on_all_cores(learn_plainly, jobs[::2])
    triples = zip(curves[::2], curves[1::2], plain, strict=True)
    return sum(len({curve.digest for curve in triple}) > 1 for triple in triples), num


def laggards(args: argparse.Namespace) -> Found:
    """See `bench.stragglers`."""
    checks, lines, data = stragglers(args.seed, args.smoke)
    return checks, lines, {"stragglers": data}


# On this computer.


def real(args: argparse.Namespace) -> Found:
    """Run some by sleeping, one after the other, and beside each the twin: the same job in virtual time."""
    workload = load_convergence(args.only or CONTROLLED).scaled(
        {
            **dict.fromkeys(("simulator.step_s", "simulator.reset_s", "policy.fixed_s"), REAL_SCALE),
            "policy.per_sample_s": REAL_SCALE,
            "training.samples_per_s": 1 / REAL_SCALE,
        }
    )
    num, updates = (1, 2) if args.smoke else (min(args.seeds, 2), 40)
    jobs = [
        Job(workload, schedule, seed, updates, real=True)
        for seed in range(args.seed, args.seed + num)
        for schedule in (LOCKSTEP, SYNC, ASYNC)
    ]
    curves = [learn(job) for job in jobs]
    twins = on_all_cores(learn, [replace(job, real=False) for job in jobs])
    lines, data = [f"{workload.name} by sleeping, {REAL_SCALE:g} of the time"], dict[str, Any]()
    checks = [at_most("CPU seconds per second, of a process on real time", max(c.cpu_part for c in curves), 0.7)]
    for base in BARS:
        here, twin = (versus(arm(found, base), arm(found, ASYNC.name), args.seed) for found in (curves, twins))
        lines += [sentence(base, here), f"    twin: {sentence(base, twin).strip()}"]
        off = abs(here["throughput"].value / twin["throughput"].value - 1)
        checks.append(at_most(f"{ASYNC.name} over {base}: throughput, real beside twin, differs by", off, 0.1))
        data[base] = {"real": {k: vars(v) for k, v in here.items()}, "twin": {k: vars(v) for k, v in twin.items()}}
    lines += [beside(*pair) for pair in zip(curves, twins, strict=True)]
    data["runs"] = [
        {"schedule": c.job.schedule.name, "seed": c.job.seed, "cpu_part": c.cpu_part, "late_s": c.late_s}
        for c in curves
    ]
    return checks, lines, {"real": data}


def beside(curve: Curve, twin: Curve) -> str:
    """Return a run in real time and its twin in words."""
    job, (median_ms, worst_ms) = curve.job, (1e3 * late_s for late_s in curve.late_s)
    return (
        f"  {job.schedule.name:9} seed {job.seed}: {curve.total_s / job.updates:.3f} s/update, twin "
        f"{twin.total_s / job.updates:.3f}; CPU {curve.cpu_part:.0%}; late {median_ms:.1f} ms (p99 {worst_ms:.1f}); "
        f"lag {curve.lag_mean:.2f}, at most {curve.lag_max}"
    )


def arm(curves: Iterable[Curve], schedule: str) -> list[Curve]:
    """Return the curves of one schedule."""
    return [curve for curve in curves if curve.job.schedule.name == schedule]


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--seeds", type=COUNT, default=20, help="runs of each schedule on each profile; a few suffice --real"
    )
    made.add_argument("--only", choices=names("convergence"), help="one profile, and nothing else")
    made.add_argument("--real", action="store_true", help="a few runs in real time, beside their twins")
    made.add_argument("--plot", default="", help="file for a picture of the curves")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
