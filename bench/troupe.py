"""A group of environments in a run that trains, as users have it, which plays when told to; for `bench.sims`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from ebrl.core.records import EnvSpec, Place, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.scope import Scope
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.gen.policies.base import mlp
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.group import EnvGroup
from ebrl.train.trainer import Trainer

BATCH_SIZE = 256
NUM_PASSES = 8  # over a batch, each a gradient step: as many per decision as with the options that PPO begins with
NUM_FEATURES = 32
FOR_EVER = 1_000_000_000  # updates


class Computing:
    """A learner that computes as much as that of a small policy, and learns nothing: what is measured stays the same.

    Attributes:
        policy: It leaves this as it is.
        batch_size: Decisions per update.
    """

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self.batch_size = BATCH_SIZE
        self._net = mlp(NUM_FEATURES, 1, gain=1.0, generator=torch.Generator())
        self._adam = torch.optim.Adam(self._net.parameters())

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        rewards = torch.tensor([sum(decision.rewards) for decision in batch.decisions], dtype=torch.float32)
        features = torch.ones(len(rewards), NUM_FEATURES)
        for _ in range(NUM_PASSES):
            self._adam.zero_grad()
            (self._net(features).squeeze(1) - rewards).square().mean().backward()
            self._adam.step()
        return {}


class Troupe:
    """An `EnvGroup` with a generator and a trainer of its own. Between episodes environments wait for their turn."""

    def __init__(self, runtime: Runtime, scope: Scope, spec: EnvSpec, place: Place, num: int) -> None:
        """Start all of it.

        Args:
            runtime: An open one.
            scope: Ends the training, before the runtime ends.
            spec: Of every simulator.
            place: Where simulators run, each in a thread or a process of its own.
            num: How many.
        """
        self._clock = runtime.clock
        self._turn = asyncio.Event()
        self._rest = asyncio.Event()
        self._num_waiting = 0
        self._num = num
        self._played: dict[int, tuple[int, float]] = {}  # steps of this turn, and when the last episode ended
        policy = ScriptedPolicy(spec)
        gen = runtime.start(Generator(policy))
        envs = EnvGroup(
            spec,
            actor=gen,
            count=num,
            host=place,
            lanes=num,
            program=self._episode,
            failures=FailurePolicy("raise"),
            name=f"{num}-in-{place}",
        )
        trainer = Trainer(runtime.start(envs), Computing(policy), updates=FOR_EVER)
        scope.start(_train(runtime.start(trainer)), "train")

    async def play(self, seconds: float) -> float:
        """Let each environment play whole episodes, at least one, until the time is over and while others are left.

        Returns:
            Steps per second, resets included: the sum of those of each environment over its own time.
        """
        await self._rest.wait()
        self._played.clear()
        began_s = self._clock()
        self._turn.set()
        await asyncio.sleep(seconds)
        self._turn.clear()
        self._rest.clear()
        await self._rest.wait()
        return sum(num_steps / (ended_s - began_s) for num_steps, ended_s in self._played.values())

    async def _episode(self, env: EnvContext) -> None:
        self._num_waiting += 1
        if self._num_waiting == self._num:
            self._rest.set()
        await self._turn.wait()
        self._num_waiting -= 1
        obs, _ = await env.reset()
        num_steps = 0
        while not env.done:
            out = await env.act_step(obs)
            obs = out.obs
            num_steps += out.num_steps
        before, _ = self._played.get(env.index, (0, 0.0))
        self._played[env.index] = before + num_steps, self._clock()


async def _train(trainer: Trainer) -> None:
    async for _ in trainer:
        pass
