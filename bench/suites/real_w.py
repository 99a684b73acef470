"""W1 to W5b in real time beside the same in virtual time, and vector environments of others on W3 and W4."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bench import peers, real
from bench.report import Check, at_least, at_most, show, spread
from bench.runs import Job, load, on_all_cores, run_all, sweep
from bench.suites import Result
from bench.suites.w import NAMES
from bench.workload import bound
from ebrl.core.machine import available_cores

NUM_ENVS = 64
TOLERANCE = 0.10
AHEAD = {("W3", "gymnasium"): 6.0, ("W3", "tianshou"): 1.1, ("W4", "tianshou"): 6.0}


@dataclass(frozen=True)
class Group:
    """What is compared on one workload.

    Attributes:
        name: Of the workload.
        num_envs: N.
        roles: Schedulers of EBRL by what they are here: ``greedy``, ``lockstep`` and ``best``.
        others: Peers.
        setting: What takes the time.
        seed: Of everything.
    """

    name: str
    num_envs: int
    roles: dict[str, str]
    others: tuple[str, ...]
    setting: real.Setting
    seed: int

    @property
    def label(self) -> str:
        """For reports."""
        return f"{self.name} N={self.num_envs}"

    def job(self, scheduler: str) -> Job:
        """Return the run of a scheduler."""
        num_cores = available_cores() if self.setting.burn else None
        return Job(("w", self.name, str(self.num_envs)), scheduler, seed=self.seed, num_cores=num_cores)

    def ours(self) -> list[str]:
        """Return EBRL's schedulers, each once."""
        return list(dict.fromkeys(["ebrl", *self.roles.values()]))


@dataclass
class Found:
    """What came of a group: steps per second of every run in order, and of the twin."""

    group: Group
    twin: dict[str, float]
    runs: dict[str, list[real.Measured]] = field(default_factory=dict)

    def speeds(self, scheduler: str) -> list[float]:
        """Return those of one scheduler."""
        return [run.speed for run in self.runs[scheduler]]

    def ratio(self, scheduler: str, other: str = "ebrl") -> float:
        """Return the median of the ratios of runs that stood beside each other."""
        return statistics.median(a / b for a, b in zip(self.speeds(scheduler), self.speeds(other), strict=True))


def suite(ask: real.Ask) -> Result:
    """Find the best thresholds in virtual time, run what is compared in both, and the peers in real time."""
    peers.require()
    found = run_twins(groups(ask), ask.span)
    with peers.running() as run_peer:
        for repeat in range(ask.repeats):
            for number, one in enumerate(found):
                todo = [*one.group.ours(), *one.group.others]
                for scheduler in rotated(todo, repeat + number):
                    run = run_peer if scheduler in peers.PEERS else real.run
                    measured = run(one.group.job(scheduler), ask.span, one.group.setting)
                    one.runs.setdefault(scheduler, []).append(measured)
                    print(f"{one.group.label} {scheduler}: {measured.speed:.0f}/s", flush=True)
    checks: list[Check] = []
    if ask.setting == real.Setting() and not ask.smoke:  # what the bars are about
        checks = [check for one in found for check in (*agreement(one), *lead(one))]
    return Result(checks, {one.group.label: record(one) for one in found}, [line(one) for one in found])


def groups(ask: real.Ask) -> list[Group]:
    """Return what is compared; the smoke run shows every way to take time."""
    if ask.smoke:
        everything = replace(ask.setting, burn=True, policy="torch")
        roles = {"greedy": "fixed:1", "lockstep": "fixed:4", "best": "fixed:2"}
        both = tuple(peers.PEERS)
        return [
            Group("W3", 4, roles, both, ask.setting, ask.seed),
            Group("W4", 4, {}, both, everything, ask.seed),
        ]
    made = [Group(name, NUM_ENVS, {}, (), ask.setting, ask.seed) for name in NAMES]
    made = [replace(group, roles=roles) for group, roles in zip(made, best(made), strict=True)]
    made = [replace(group, others=tuple(peers.PEERS)) if group.name == "W3" else group for group in made]
    return [*made, Group("W4", NUM_ENVS // 2, {}, tuple(peers.PEERS), ask.setting, ask.seed)]


def best(made: Sequence[Group]) -> list[dict[str, str]]:
    """Return the schedulers of every group, with the best threshold of a sweep in virtual time."""
    outcomes = run_all(group.job(scheduler) for group in made for scheduler in sweep(group.num_envs))
    roles = []
    for group in made:
        mine = [outcome for outcome in outcomes if outcome.job.workload == group.job("").workload]
        top = max(mine, key=lambda outcome: outcome.speed).job.scheduler
        roles.append({"greedy": "fixed:1", "lockstep": f"fixed:{group.num_envs}", "best": top})
    return roles


def run_twins(made: Sequence[Group], span: real.Span) -> list[Found]:
    """Run in virtual time what will be run in real time."""
    jobs = [group.job(scheduler) for group in made for scheduler in group.ours()]
    measured = iter(on_all_cores(partial(real.run_twin, span=span), jobs))
    return [Found(group, {scheduler: next(measured).speed for scheduler in group.ours()}) for group in made]


def rotated(schedulers: Sequence[str], by: int) -> list[str]:
    """Return them with another one first, so that none is always the first."""
    by %= len(schedulers)
    return [*schedulers[by:], *schedulers[:by]]


def agreement(one: Found) -> list[Check]:
    """Return whether ratios are those of the twin."""
    checks = []
    for role, scheduler in one.group.roles.items():
        apart = one.ratio(scheduler) / (one.twin[scheduler] / one.twin["ebrl"]) - 1.0
        name = f"{one.group.label}: {role} ({scheduler}) / ebrl, real against twin ({apart:+.1%})"
        checks.append(at_most(name, abs(apart), TOLERANCE))
    return checks


def lead(one: Found) -> list[Check]:
    """Return whether EBRL is as far ahead of others as it should be."""
    bars = {other: AHEAD.get((one.group.name, other)) for other in one.group.others}
    return [
        at_least(f"{one.group.label}: ebrl / {other}", one.ratio("ebrl", other), bar)
        for other, bar in bars.items()
        if bar is not None
    ]


def record(one: Found) -> dict[str, Any]:
    """Return what is kept of a group."""
    return {
        "bound": bound(load(one.group.job("ebrl"))),
        "roles": one.group.roles,
        "twin": one.twin,
        "real": {
            scheduler: {"speed": spread(one.speeds(scheduler)), "batch_mean": [run.batch_mean for run in runs]}
            | ({"busy": [run.busy for run in runs], "moves": len(runs[-1].moves)} if scheduler == "ebrl" else {})
            for scheduler, runs in one.runs.items()
        },
    }


def line(one: Found) -> str:
    """Return a row of the table."""
    limit = bound(load(one.group.job("ebrl")))
    ours = f"ebrl {show(spread(one.speeds('ebrl')), '/s')}, twin {one.twin['ebrl']:.4g}/s"
    parts = [
        f"{role} ({scheduler}) {one.ratio(scheduler):.3f}, twin {one.twin[scheduler] / one.twin['ebrl']:.3f}"
        for role, scheduler in one.group.roles.items()
    ]
    parts += [f"ebrl / {other} {one.ratio('ebrl', other):.2f}" for other in one.group.others]
    return "; ".join([f"{one.group.label:9} bound {limit:.0f}/s; {ours}", *parts])
