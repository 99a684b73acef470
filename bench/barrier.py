"""The synchronous algorithm as a plain loop: environments stepped by hand, all with one version of the weights.

No event loop, no admission, no assembler: every environment makes its share of the decisions, all of it is learned
from, and so on. Randomness is keyed as in the library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ebrl import TorchPolicy
from ebrl.core.records import ActionOut, BatchOut, Decision, Observation, Segment
from ebrl.core.rng import NoiseStream, episode_seed
from ebrl.sim.simulator import Simulator


@dataclass
class World:
    """One environment, stepped by hand."""

    index: int
    seed: int
    simulator: Simulator
    noise: NoiseStream
    returns: deque[float]
    obs: Observation = field(default_factory=dict)
    episode: int = -1
    num_decisions: int = 0
    total: float = 0.0

    def reset(self) -> None:
        self.episode += 1
        self.obs, _ = self.simulator.reset(episode_seed(self.seed, self.index, self.episode))
        self.total = 0.0

    def step(self, out: ActionOut) -> tuple[Decision, Observation]:
        """Execute a decision; return it, and the observation that followed, which may be the last of its episode."""
        result = self.simulator.step(out.action)
        decision = Decision(
            self.index,
            self.episode,
            self.num_decisions,
            self.obs,
            out,
            result.rewards,
            result.num_steps,
            result.terminated,
            result.truncated,
        )
        self.num_decisions += 1
        self.total += result.reward
        self.obs = result.obs
        if result.terminated or result.truncated:
            self.returns.append(self.total)
            self.reset()
        return decision, result.obs


def act(policy: TorchPolicy, worlds: Sequence[World], version: int, num_rows: int) -> list[ActionOut]:
    """Let all environments decide, in one forward pass of so many rows; those beyond the environments are padding."""
    padding = num_rows - len(worlds)
    noise = np.stack([world.noise.row(world.num_decisions, policy.noise_dim) for world in worlds])
    noise = np.concatenate([noise, np.zeros((padding, policy.noise_dim), np.float32)])
    observations = [world.obs for world in worlds]
    with torch.no_grad():
        out = policy.act(policy.collate(observations + observations[-1:] * padding), torch.from_numpy(noise))
    aux = {name: rows.numpy() for name, rows in out.aux.items()}
    batch = BatchOut(out.action.numpy(), out.log_prob.numpy(), out.value.numpy(), aux)
    return [ActionOut(batch.action[row], version, batch, row) for row in range(len(worlds))]


def collect(
    policy: TorchPolicy, worlds: Sequence[World], version: int, length: int, num_rows: int | None = None
) -> list[Segment]:
    """Let every environment make `length` decisions with one version.

    Args:
        policy: Decides.
        worlds: All of them.
        version: Of the policy.
        length: Decisions of each.
        num_rows: Of a forward pass; None: one for each environment.
    """
    segments: list[Segment] = []
    running: list[list[Decision]] = [[] for _ in worlds]
    for t in range(length):
        for world, out in zip(worlds, act(policy, worlds, version, num_rows or len(worlds)), strict=True):
            decision, following = world.step(out)
            running[world.index].append(decision)
            over = decision.terminated or decision.truncated
            if over or t == length - 1:
                segments.append(Segment(world.index, "", running[world.index], following, "end" if over else "taken"))
                running[world.index] = []
    return segments
