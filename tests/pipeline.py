"""A pipeline on modelled hardware whose laws may change while it runs, for tests of the tuner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from ebrl.core.errors import Closed
from ebrl.core.protocols import PolicyOut
from ebrl.core.readings import Move
from ebrl.core.records import EnvSpec, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine, spend
from ebrl.gen.batcher import Batcher
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.group import EnvGroup
from ebrl.train.trainer import Trainer
from tests.helpers import scripted_spec

SPEC = scripted_spec(length=50)


@dataclass
class Laws:
    """How long everything takes; may be changed while it runs."""

    step_s: float = 0.005
    cv: float = 0.5
    fixed_s: float = 0.02
    per_request_s: float = 1e-4
    update_s: float = 0.0

    def sim(self, n: int, rng: np.random.Generator) -> float:
        sigma = math.sqrt(math.log1p(self.cv**2))
        return self.step_s * math.exp(sigma * rng.standard_normal() - sigma**2 / 2)

    def gen(self, n: int, rng: np.random.Generator) -> float:
        return self.fixed_s + self.per_request_s * n

    def train(self, n: int, rng: np.random.Generator) -> float:
        return self.update_s

    def become(self, other: Laws) -> None:
        self.__dict__.update(other.__dict__)

    def machine(self, num_cores: int = 128, **options: Any) -> VirtualMachine:
        return VirtualMachine({"sim": self.sim, "gen": self.gen, "train": self.train}, num_cores=num_cores, **options)


FIXED = Laws()  # the fixed cost of a batch is the limit: nearly all should be waited for
STEPS = Laws(step_s=0.02, cv=1.5, fixed_s=0.002, per_request_s=2e-5)  # simulation is the limit: nobody should


class CountingLearner:
    """Learns nothing."""

    def __init__(self, policy: ScriptedPolicy, batch_size: int) -> None:
        self.policy = policy
        self.batch_size = batch_size

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        return {}


class SlowPolicy(ScriptedPolicy):
    """Takes its own time."""

    def __init__(self, spec: EnvSpec, laws: Laws) -> None:
        super().__init__(spec)
        self.laws = laws

    def __deepcopy__(self, memo: dict[int, Any]) -> SlowPolicy:
        return SlowPolicy(SPEC, self.laws)

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        spend(self.laws.fixed_s + self.laws.per_request_s * len(noise))
        return super().act(batch, noise, deterministic)


@dataclass
class Rig:
    """What runs."""

    rt: Runtime
    gen: Generator
    envs: EnvGroup
    trainer: Trainer

    @property
    def moves(self) -> tuple[Move, ...]:
        return self.rt.tuning.moves

    @property
    def threshold(self) -> float:
        return self.gen.statistics()["threshold"]

    async def rate(self, seconds: float) -> float:
        """Return environment steps per second of the next seconds."""
        before = self.envs.env_steps
        await asyncio.sleep(seconds)
        return (self.envs.env_steps - before) / seconds


async def consume(trainer: Trainer) -> None:
    with suppress(Closed):
        async for _ in trainer:
            pass


def start(rt: Runtime, gen: Generator, count: int, *, max_lag: int = 4, rounds: int = 8, **group: Any) -> Rig:
    """Start environments and a trainer on a generator that runs."""
    envs = rt.start(EnvGroup(group.pop("spec", SPEC), actor=gen, count=count, **group))
    learner = CountingLearner(ScriptedPolicy(SPEC), rounds * count)
    trainer = rt.start(Trainer(envs, learner, updates=1_000_000, max_lag=max_lag))
    rt.spawn(consume(trainer), f"consume-{trainer.name}")
    return Rig(rt, gen, envs, trainer)


@asynccontextmanager
async def rig(
    laws: Laws,
    count: int = 32,
    *,
    machine: VirtualMachine | None = None,
    batcher: Batcher | None = None,
    lanes: int | None = None,
    runtime: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Run a pipeline whose credit does not limit anything."""
    async with Runtime(machine or laws.machine(), **(runtime or {})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC), batcher=batcher, lanes=lanes))
        yield start(rt, gen, count, **options)


def run_for(seconds: float, laws: Laws, count: int = 32, **options: Any) -> tuple[float, tuple[Move, ...], float]:
    """Return the rate of the second half, the moves, and the threshold at the end."""

    async def main() -> tuple[float, tuple[Move, ...], float]:
        async with rig(replace(laws), count, **options) as r:
            await asyncio.sleep(seconds / 2)
            rate = await r.rate(seconds / 2)
            return rate, r.moves, r.threshold

    return run_virtual(main())
