"""The synchronous algorithm as a plain loop: what asynchronous code with ``max_lag=0`` must come to, bit for bit.

No event loop, no admission, no assembler, no segments that grow: each environment acts B / N times, all of it is
learned from, and so on. Randomness is keyed as in the library, and inference is padded to one size likewise.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch

from ebrl import PPO, TorchPolicy
from ebrl.core.records import ActionOut, BatchOut, Decision, EnvSpec, Observation, Segment, TrainBatch
from ebrl.core.rng import Domain, NoiseStream, episode_seed, name_key, stream
from ebrl.gen.generator import PAD_TO
from ebrl.sim.simulator import Simulator


@dataclass
class Place:
    """Where one environment is."""

    simulator: Simulator
    noise: NoiseStream
    obs: Observation
    episode: int = -1
    index: int = 0
    over: bool = True


class PlainLoop:
    """Rollout, update, rollout, update."""

    def __init__(self, spec: EnvSpec, policy: TorchPolicy, learner: PPO, num_envs: int, seed: int) -> None:
        self._policy, self._learner, self._seed = policy, learner, seed
        self._places = [
            Place(Simulator(spec), NoiseStream(stream(seed, Domain.NOISE, name_key("envs"), env)), np.zeros(0))
            for env in range(num_envs)
        ]
        self._version = 0

    def update(self) -> None:
        """Let every environment act with the newest weights, and learn from all of it."""
        acting = copy.deepcopy(self._policy)
        segments: list[Segment] = []
        for env, place in enumerate(self._places):
            segments += self._rollout(env, place, acting, self._learner.batch_size // len(self._places))
        self._learner.update(TrainBatch(segments, self._version))
        self._version += 1

    def close(self) -> None:
        """Close the simulators."""
        for place in self._places:
            place.simulator.close()

    def _rollout(self, env: int, place: Place, acting: TorchPolicy, num: int) -> list[Segment]:
        segments: list[Segment] = []
        decisions: list[Decision] = []
        for _ in range(num):
            if place.over:
                place.episode += 1
                place.obs, _ = place.simulator.reset(episode_seed(self._seed, env, place.episode))
            out = self._act(acting, place)
            result = place.simulator.step(out.action)
            decision = Decision(env, place.episode, place.index, place.obs, out, result.rewards, result.num_steps)
            decision.terminated, decision.truncated = result.terminated, result.truncated
            decisions.append(decision)
            place.obs, place.index, place.over = result.obs, place.index + 1, result.terminated or result.truncated
            if place.over:
                segments.append(Segment(env, "", decisions, place.obs, "end"))
                decisions = []
        if decisions:
            segments.append(Segment(env, "", decisions, place.obs, "taken"))
        return segments

    def _act(self, acting: TorchPolicy, place: Place) -> ActionOut:
        noise = np.zeros((PAD_TO, acting.noise_dim), np.float32)
        noise[0] = place.noise.draw(acting.noise_dim)
        with torch.inference_mode():
            out = acting.act(acting.collate([place.obs] * PAD_TO), torch.from_numpy(noise))
        aux = {name: rows.numpy() for name, rows in out.aux.items()}
        batch = BatchOut(out.action.numpy(), out.log_prob.numpy(), out.value.numpy(), aux)
        return ActionOut(batch.action[0], self._version, batch, 0)
