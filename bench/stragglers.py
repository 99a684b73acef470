"""Stragglers: what the bound on lag costs where some decisions take very long; part of `bench.convergence`.

One decision in twenty, drawn anew each time, takes twenty times as long, so that half of all environments are busy with
one at any moment. A count of what is started bounds the mean lag only: 35 versions were seen for a bound of 1. Waiting
for the oldest bounds it and stands still (178 s per update instead of 28). The trainer, the assembler and admission
are the real ones; nothing is learned.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import gymnasium

from bench.report import Check, at_least, at_most, spread
from bench.runs import on_all_cores
from ebrl import EnvGroup, Generator, Runtime, Trainer, VirtualMachine, env_spec, run_virtual
from ebrl.core.records import Array, TrainBatch
from ebrl.core.rng import Domain, stream
from ebrl.core.virtual_machine import spend
from ebrl.gen.fake import ScriptedPolicy
from ebrl.sim.fake import ScriptedEnv

PART, FACTOR = 0.05, 20.0
STEP_S = 0.4
NUM_ENVS = 32
BOUND, UNBOUNDED = 1, 1_000_000
LEAST = 0.9  # of the unbounded throughput


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        batch_size: Decisions of an update; with few, a straggler lasts for many versions.
        update_s: Of an update: half of what rollout takes, so that waiting for decisions would show.
    """

    batch_size: int
    update_s: float
    updates: int
    max_lag: int
    seed: int


@dataclass(frozen=True)
class Found:
    """What came of it.

    Attributes:
        rate: Trained decisions per second.
        lag_max: Versions, over all that was trained, counted by the learner itself.
        masked: Share of the ended decisions that were too old to be trained.
    """

    rate: float
    lag_max: int
    masked: float


class Straggling(gymnasium.Wrapper[Array, Any, Array, Any]):
    """Takes its time, and now and then much more."""

    def __init__(self, env: gymnasium.Env[Array, Any], index: int, seed: int) -> None:
        super().__init__(env)
        self._rng = stream(seed, Domain.LATENCY, index)

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        spend(STEP_S * (FACTOR if self._rng.random() < PART else 1.0))
        return self.env.step(action)


class LagLearner:
    """Learns nothing; counts how old its data are."""

    def __init__(self, policy: ScriptedPolicy, case: Case) -> None:
        self.policy, self.batch_size, self._update_s = policy, case.batch_size, case.update_s
        self.lags: Counter[int] = Counter()
        self._version = 0

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        spend(self._update_s)
        self.lags.update(self._version - decision.version for decision in batch.decisions)
        self._version += 1
        return {}


async def _run(case: Case) -> Found:
    spec, indices = env_spec(ScriptedEnv), itertools.count()

    def make() -> gymnasium.Env[Array, Any]:
        return Straggling(ScriptedEnv(length=50), next(indices), case.seed)

    policy = ScriptedPolicy(spec)
    learner = LagLearner(policy, case)
    machine = VirtualMachine({"gen": lambda n, rng: 0.08 + 0.004 * n}, num_cores=NUM_ENVS)
    async with Runtime(machine, seed=case.seed) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(replace(spec, make=make), actor=gen, count=NUM_ENVS))
        async for report in rt.start(Trainer(envs, learner, updates=case.updates, max_lag=case.max_lag)):
            elapsed_s, masked = report.elapsed_s, report.dropped.get("masked", 0)
    trained = case.updates * case.batch_size
    return Found(trained / elapsed_s, max(learner.lags), masked / (masked + trained))


def run(case: Case) -> Found:
    """Run in virtual time."""
    return run_virtual(_run(case))


def cases(seed: int, smoke: bool) -> list[Case]:
    """Return the runs: batches of 16 and of 2 decisions of every environment, bounded and not."""
    shapes = [(512, 7.0, 60), (64, 0.9, 400)]
    seeds = range(seed, seed + (1 if smoke else 3))
    return [
        Case(batch_size, update_s, 4 if smoke else updates, max_lag, each)
        for batch_size, update_s, updates in shapes
        for each in seeds
        for max_lag in (BOUND, UNBOUNDED)
    ]


def stragglers(seed: int, smoke: bool) -> tuple[list[Check], list[str], dict[str, Any]]:
    """Return checks, lines and data."""
    todo = cases(seed, smoke)
    found = dict(zip(todo, on_all_cores(run, todo), strict=True))
    bounded = [case for case in todo if case.max_lag == BOUND]
    parts = {case: found[case].rate / found[replace(case, max_lag=UNBOUNDED)].rate for case in bounded}
    lines = [f"stragglers: {PART:.0%} of the decisions take {FACTOR:g} times as long, {NUM_ENVS} environments"]
    for case in bounded:
        own, free = found[case], found[replace(case, max_lag=UNBOUNDED)]
        lines.append(
            f"  batch {case.batch_size} seed {case.seed}: max_lag {BOUND} {own.rate:.1f} decisions/s, "
            f"lag at most {own.lag_max}, masked {own.masked:.2%}; unbounded {free.rate:.1f}/s, lag at most "
            f"{free.lag_max}; part {parts[case]:.3f}"
        )
    checks = [
        at_least(f"stragglers: lowest throughput of {len(parts)}, part of unbounded", min(parts.values()), LEAST),
        at_most("stragglers: oldest trained, in versions", max(found[case].lag_max for case in bounded), BOUND),
    ]
    data = {"runs": [asdict(case) | asdict(found[case]) for case in todo], "part": spread(list(parts.values()))}
    return checks, lines, data
