"""What was measured on a machine: schedulers on it, as parts of what no scheduler exceeds. There are no bars."""

from __future__ import annotations

from bench.plot import Picture
from bench.runs import Job, Outcome, by_scheduler, load, run_all, sweep
from bench.shown import HEADING, pictures, records, row
from bench.suites import Ask, Result
from bench.workload import Workload, bound

SETTLED_S = 2.0  # of the start that do not count, or as many steps as a run may have at most
FEWEST, MOST = 4000, 20_000


def suite(ask: Ask) -> Result:
    """Run the tuner, greedy, lock-step and fixed thresholds.

    Raises:
        ConfigError: The file says too little.
    """
    job = Job(("profile", ask.profile, str(ask.num_envs), str(ask.chunk)), "ebrl", seed=ask.seed)
    workload = load(job)
    limit = bound(workload)
    drop, count = (200, 400) if ask.smoke else (round(min(MOST, max(FEWEST, SETTLED_S * limit))), 10_000)
    names = dict.fromkeys(["ebrl", "greedy", "lockstep", *sweep(workload.num_units), *ask.schedulers])
    outcomes = run_all(Job(job.workload, name, drop=drop, count=count, seed=ask.seed) for name in names)
    found = by_scheduler(outcomes)
    bars = {workload.name: {name: outcome.speed / limit for name, outcome in found.items()}}
    shown = [Picture("", bars, "part of the bound"), *pictures({workload.name: found})]
    data = {"bound": limit, "runs": records(found, limit, found)}
    return Result([], data, [*describe(workload, limit), *table(found, limit)], shown)


def describe(workload: Workload, limit: float) -> list[str]:
    """Return what is compared on."""
    simulator, policy, num_cores = workload.simulator, workload.policy, workload.machine.num_cores
    step = f"step {1e3 * simulator.step_s:.4g} ms (cv {simulator.step_cv:.2f})"
    reset = f"reset {1e3 * simulator.reset_s:.4g} ms after {simulator.mean_episode:.0f} steps"
    batch = f"batch {1e3 * policy.fixed_s:.4g} + {1e3 * policy.per_sample_s:.4g} n ms"
    chunk = f" for {policy.chunk} steps each" if policy.chunk > 1 else ""
    return [
        f"{workload.name}: {step}, {reset}, {batch}{chunk}, {num_cores} cores",
        f"no scheduler exceeds {limit:,.0f} steps/s",
    ]


def table(found: dict[str, Outcome], limit: float) -> list[str]:
    """Return a row per scheduler."""
    best = max((name for name in found if name.startswith("fixed:")), key=lambda name: found[name].speed)
    rows = [row(name, outcome, limit) + (" best threshold" if name == best else "") for name, outcome in found.items()]
    return [HEADING, *rows]
