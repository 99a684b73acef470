"""EBRL itself on modelled or real hardware: the unmodified runtime; simulators, policy and learner take their time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from bench.hardware import Conditions, Counting, Unit, generate, update
from ebrl import Batcher, EnvGroup, FailurePolicy, Generator, PolicyOut, Runtime, TorchPolicy, Trainer, env_spec
from ebrl.core.protocols import Machine
from ebrl.core.readings import Move
from ebrl.core.records import Array, EnvSpec, TrainBatch
from ebrl.core.virtual_machine import spend
from ebrl.train.sampling import Sampling

UNTRAINED_ROUNDS = 8  # decisions per environment in a "batch" of a workload that trains nothing
UNTRAINED_LAG = 4  # so many of them may be open: more than ever are, so that credit does not limit anything


@dataclass(frozen=True)
class Work:
    """How what takes time takes it: as modelled, if nothing else is said.

    Attributes:
        simulate: Takes so many seconds.
        generate: Takes the time of a batch of so many requests.
    """

    simulate: Callable[[float], None] = spend
    generate: Callable[[Conditions, int], None] = generate


class UnitEnv(gymnasium.Env[Array, Any]):
    """A unit as an environment: its steps and resets take their time, and nothing else happens."""

    def __init__(self, unit: Unit, work: Work, stepped: Callable[[bool], None] | None = None) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self._unit, self._simulate, self._stepped = unit, work.simulate, stepped
        self._obs = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self._simulate(self._unit.reset())
        return self._obs, {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        seconds, ended = self._unit.step()
        self._simulate(seconds)
        if self._stepped is not None:
            self._stepped(ended)
        return self._obs, 0.0, False, ended, {}


class RowPolicy(TorchPolicy):
    """Answers with zeros, and takes the time of the workload's policy."""

    def __init__(self, conditions: Conditions, tally: Counting, work: Work) -> None:
        super().__init__(horizon=conditions.workload.policy.chunk, noise_dim=0)
        self._conditions, self._tally, self._work = conditions, tally, work
        self._slots = conditions.workload.simulator.slots_per_unit

    def __deepcopy__(self, memo: dict[int, Any]) -> RowPolicy:
        return self  # nothing in it is ever trained

    def collate(self, observations: Any) -> dict[str, Tensor]:
        return {}

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        num = len(noise)
        self._tally.launched(num, num * self._slots)
        self._work.generate(self._conditions, num)
        action = torch.zeros(num, self.horizon, 1)
        return PolicyOut(action, action, torch.zeros(num), {})

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("nothing is learned here")


class TimedLearner:
    """Learns nothing and takes the time of an update; counts what it was given and how old that was."""

    def __init__(self, policy: RowPolicy, batch_size: int, conditions: Conditions, tally: Counting) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self._conditions, self._tally = conditions, tally
        self._slots = conditions.workload.simulator.slots_per_unit

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        if self._conditions.workload.training is not None:
            for lag, num in Counter(batch.lags.tolist()).items():
                self._tally.trained(num * self._slots, lag)
        update(self._conditions, self.batch_size)
        return {}


class Rig:
    """One run of EBRL on a workload, in virtual time or on a real machine.

    Attributes:
        moves: What the tuner did.
        num_decisions: How often the tuner was asked.
        busy: Busy seconds by kind of lane over all time, as a part of what there is.
        resets: How many were ready, waited for, and done without a spare.
    """

    def __init__(
        self,
        conditions: Conditions,
        tally: Counting,
        machine: Machine,
        seed: int = 0,
        work: Work | None = None,
        spares: int = 0,
    ) -> None:
        self.workload = workload = conditions.workload
        self._conditions = conditions
        self.tally = tally
        self.machine = machine
        self.seed = seed
        self._work = work or Work()
        self._spares = spares
        self.units = [Unit(conditions, index, seed) for index in range(workload.num_units + spares)]
        self.moves: tuple[Move, ...] = ()
        self.num_decisions = 0
        self.busy: dict[str, float] = {}
        self.resets: dict[str, float] = {}

    async def run(
        self,
        *,
        batcher: Batcher | None = None,
        lanes: int = 1,
        max_lag: int = 1,
        quota: int = 0,
    ) -> None:
        """Run until the tally is done.

        Args:
            batcher: Pins the rule; None: the tuner finds it.
            lanes: Of generation.
            max_lag: Where something is trained.
            quota: Decisions of every environment in each batch, which all wait for; 0: whoever decides first has more.
        """
        workload, tally, slots = self.workload, self.tally, self.workload.simulator.slots_per_unit
        batch_size = workload.batch_size // slots or (quota or UNTRAINED_ROUNDS) * workload.num_units
        spec = self._spec()
        policy = RowPolicy(self._conditions, tally, self._work)
        learner = TimedLearner(policy, batch_size, self._conditions, tally)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        async with Runtime(self.machine, seed=self.seed) as rt:
            gen = rt.start(Generator(policy, batcher=batcher, lanes=lanes))
            envs = rt.start(
                EnvGroup(
                    spec,
                    actor=gen,
                    count=workload.num_units,
                    host="thread",
                    lanes=workload.num_units,
                    spares=self._spares,
                    failures=FailurePolicy(build_s=None, reset_s=None, call_s=None),  # some laws have long tails
                )
            )
            lag = 0 if quota else max_lag if workload.training else UNTRAINED_LAG
            sampling: Sampling | None = "quota" if quota else None
            trainer = rt.start(Trainer(envs, learner, updates=1_000_000, max_lag=lag, sampling=sampling))
            updating = rt.spawn(_consume(trainer), "updates")
            await tally.done.wait()
            updating.cancel()
            self.moves, self.num_decisions = rt.tuning.moves, rt.tuning.num_decisions
            elapsed_s = clock() - began_s
            cores = min(self.machine.num_cores, len(self.units))
            self.resets = {name: num for name, num in envs.statistics().items() if name.startswith("resets_")}
            self.busy = {
                "cores": envs.statistics()["busy_s"] / elapsed_s / cores,
                "gen": gen.statistics()["busy_s"] / elapsed_s / lanes,
                "train": trainer.statistics()["busy_s"] / elapsed_s,
            }

    def _spec(self) -> EnvSpec:
        slots = self.workload.simulator.slots_per_unit

        def stepped(ended: bool) -> None:
            self.tally.stepped(1, ended, slots, chunk=False)

        probe = UnitEnv(Unit(self._conditions, 0, self.seed), Work(simulate=lambda seconds: None))  # for its spaces
        envs = iter([probe, *(UnitEnv(unit, self._work, stepped) for unit in self.units)])
        return env_spec(lambda: next(envs))


async def _consume(trainer: Trainer) -> None:
    async for _ in trainer:
        pass
