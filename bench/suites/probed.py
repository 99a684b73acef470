"""What was measured on a machine: schedulers on it, as parts of what no scheduler exceeds. There are no bars."""

from __future__ import annotations

from bench.runs import Job, Outcome, by_scheduler, load, run_all, sweep
from bench.suites import Ask, Result
from bench.workload import Workload, bound
from ebrl.core.errors import ConfigError

SETTLED_S = 2.0  # of the start that do not count, or as many steps as a run may have at most
FEWEST, MOST = 4000, 20_000


def suite(ask: Ask) -> Result:
    """Run the tuner, greedy, lock-step and fixed thresholds.

    Raises:
        ConfigError: The file says too little, or there are no environments or steps of a decision.
    """
    for option, value in (("num-envs", ask.num_envs), ("chunk", ask.chunk)):
        if value < 1:
            raise ConfigError(f"--{option} must be at least 1, got {value}")
    job = Job(("profile", ask.profile, str(ask.num_envs), str(ask.chunk)), "ebrl", seed=ask.seed)
    workload = load(job)
    limit = bound(workload)
    drop, count = (200, 400) if ask.smoke else (round(min(MOST, max(FEWEST, SETTLED_S * limit))), 10_000)
    names = dict.fromkeys(["ebrl", "greedy", "lockstep", *sweep(workload.num_units), *ask.schedulers])
    outcomes = run_all(Job(job.workload, name, drop=drop, count=count, seed=ask.seed) for name in names)
    found = by_scheduler(outcomes)
    data = {name: outcome.speed / limit for name, outcome in found.items()} | {"bound": limit}
    bars = [(workload.name, {name: outcome.speed / limit for name, outcome in found.items()})]
    return Result([], data, [*describe(workload, limit), *table(found, limit)], bars, "part of the bound")


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
    fixed = [name for name in found if name.startswith("fixed:")]
    best = max(fixed, key=lambda name: found[name].speed)
    lines = [f"{'scheduler':16} {'steps/s':>10} {'of bound':>9} {'batch':>7}"]
    for name, outcome in found.items():
        size = sum(num * times for num, times in outcome.batches.items()) / max(1, sum(outcome.batches.values()))
        mark = "  best threshold" if name == best else ""
        lines.append(f"{name:16} {outcome.speed:10,.0f} {outcome.speed / limit:9.3f} {size:7.1f}{mark}")
    return lines
