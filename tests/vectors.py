"""Builders for tests of batched simulators."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ebrl.core.protocols import Machine
from ebrl.core.records import Decision, EnvSpec, GroupRule, Segment
from ebrl.core.runtime import Runtime
from ebrl.core.trace import Trace
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.batcher import Batcher
from ebrl.gen.generator import Generator
from ebrl.sim.spec import in_turn
from ebrl.sim.vector import VectorGroup
from ebrl.train.sampling import Sampling
from ebrl.train.trainer import Trainer
from tests.helpers import ComparingLearner, RecordingLearner, VersionedPolicy, scripted_spec


def batched_spec(num_slots: int = 4, **options: Any) -> EnvSpec:
    """Return the description of scripted environments that are stepped in turn; `options` as for `scripted_spec`."""
    single = scripted_spec(**options)
    return replace(single, make=functools.partial(in_turn, single.make, num_slots), num_slots=num_slots)


def lengths(low: int, high: int) -> Any:
    """Return a law of lengths of episodes."""
    return lambda rng: int(rng.integers(low, high))


@dataclass
class VectorStage:
    """A pipeline that runs."""

    runtime: Runtime
    gen: Generator
    envs: VectorGroup
    trainer: Trainer
    learner: RecordingLearner
    rows: float = 0.0
    open: list[Segment | None] = field(default_factory=list)

    async def run(self) -> list[Decision]:
        """Do all updates, with a look at the ledger after each; return what was trained."""
        async for _ in self.trainer:
            ledger = self.envs.admission.ledger()
            assert ledger.balanced, ledger
        return self.learner.decisions


@asynccontextmanager
async def vector_training(
    spec: EnvSpec | Sequence[EnvSpec],
    machine: Machine | None = None,
    *,
    batch_size: int = 16,
    updates: int = 4,
    max_lag: int = 1,
    sampling: Sampling | None = None,
    horizon: int = 1,
    seed: int = 0,
    batcher: Batcher | None = None,
    trace: Trace | None = None,
    rule: GroupRule | None = None,
    deterministic: bool = False,
    **group: Any,
) -> AsyncIterator[VectorStage]:
    """Start everything, by default on a machine on which nothing takes time; `group` goes to `VectorGroup`."""
    first = spec if isinstance(spec, EnvSpec) else spec[0]
    policy = VersionedPolicy(first, horizon=horizon)
    learner = RecordingLearner(policy, batch_size)
    if rule is not None:
        learner = ComparingLearner(policy, batch_size)
        learner.groups = rule
    async with Runtime(machine or VirtualMachine({}), seed=seed, trace=trace, deterministic=deterministic) as rt:
        gen = rt.start(Generator(learner.policy, lanes=1, batcher=batcher))
        envs = rt.start(VectorGroup(spec, actor=gen, **group))
        trainer = rt.start(Trainer(envs, learner, updates=updates, max_lag=max_lag, sampling=sampling))
        yield VectorStage(rt, gen, envs, trainer, learner)
