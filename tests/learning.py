"""Batches for learners, made up by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ebrl.core.protocols import PolicyOut
from ebrl.core.records import ActionOut, Array, ArraySpec, BatchOut, Decision, EnvSpec, Segment, TrainBatch
from ebrl.gen.policies import GaussianPolicy
from ebrl.gen.policies.base import TorchPolicy
from ebrl.train.learner import TorchLearner
from ebrl.train.ppo import PPO, PPOConfig

SPEC = EnvSpec("Toy-v0", lambda: None, ArraySpec((3,), "float32"), ArraySpec((2,), "float32"))


class Ruler(TorchPolicy):
    """Values are read off the observation, log-probabilities off the sample: all can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__(horizon=1, noise_dim=1)
        self.scale = nn.Parameter(torch.ones(()))

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        raise NotImplementedError

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        rows = aux["u"] * self.scale
        return rows, batch["state"][:, 0] * self.scale, rows


def value(x: float) -> Array:
    """Return an observation of this value."""
    return np.array([x], np.float32)


def segment(
    values: Sequence[float],
    rewards: Sequence[Any],
    *,
    last: float,
    end: str = "",
    env: int = 0,
    first: int = 0,
    versions: Sequence[int] | None = None,
    acted: Sequence[float] | None = None,
    now: Sequence[float] | None = None,
) -> Segment:
    """Build a segment for the `Ruler`.

    Args:
        values: Of its observations.
        rewards: A number, or the list of a chunk.
        last: Value of the observation that follows.
        end: ``"terminated"``, ``"truncated"`` or neither.
        env: Whose.
        first: Index of the first decision.
        versions: That acted; default: 0.
        acted: Log-probabilities when they acted; default: 0.
        now: Log-probabilities of the learner; default: 0.
    """
    num = len(values)
    then, here = (np.array(x or [0.0] * num, np.float32).reshape(-1, 1, 1) for x in (acted, now))
    out = BatchOut(np.zeros((num, 1, 1), np.float32), then, np.zeros(num, np.float32), {"u": here})
    decisions = []
    for t, (v, reward) in enumerate(zip(values, rewards, strict=True)):
        reward = tuple(reward) if isinstance(reward, list) else (float(reward),)
        answer = ActionOut(out.action[t], (versions or [0] * num)[t], out, t)
        decisions.append(Decision(env, 0, first + t, value(v), answer, reward, len(reward)))
    decisions[-1].terminated, decisions[-1].truncated = end == "terminated", end == "truncated"
    return Segment(env, "", decisions, value(last), "end" if end else "full")


def hand_learner(size: int, **options: Any) -> PPO:
    """Return a learner of the `Ruler`, with one minibatch, that changes no number on its way."""
    plain = {"gamma": 0.5, "gae_lambda": 0.5, "normalize_return": False, "normalize_advantage": False}
    return PPO(Ruler(), PPOConfig(batch_size=size, minibatch_size=size, **plain | options))


def rollout_of(
    policy: TorchPolicy,
    *,
    seed: int = 0,
    num_envs: int = 4,
    num_steps: int = 16,
    executed: Callable[[int, int], int] = lambda env, t: 1,
) -> TrainBatch:
    """Act for a while in a made-up world whose episodes last five decisions.

    Args:
        policy: Acts.
        seed: Of world and noise.
        num_envs: Environments.
        num_steps: Decisions of each.
        executed: Simulator steps of a decision, by environment and time.
    """
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    current: list[list[Decision]] = [[] for _ in range(num_envs)]
    for t in range(num_steps):
        obs = list(rng.standard_normal((num_envs, 3)).astype(np.float32))
        noise = torch.from_numpy(rng.standard_normal((num_envs, policy.noise_dim), np.float32))
        with torch.no_grad():
            out = policy.act(policy.collate(obs), noise)
        aux = {name: x.numpy() for name, x in out.aux.items()}
        batch = BatchOut(out.action.numpy(), out.log_prob.numpy(), out.value.numpy(), aux)
        for env in range(num_envs):
            # The good action is the one near the first number of the observation.
            reward = -float(np.square(batch.action[env].flat[0] - obs[env][0]))
            answer, num = ActionOut(batch.action[env], 0, batch, env), executed(env, t)
            decision = Decision(env, t // 5, t, obs[env], answer, (reward,) + (0.0,) * (num - 1), num)
            current[env].append(decision)
            if t % 5 == 4 or t == num_steps - 1:
                decision.terminated = env == 0 and t % 5 == 4
                segments.append(Segment(env, "", current[env], rng.standard_normal(3).astype(np.float32), "end"))
                current[env] = []
    return TrainBatch(segments, 0)


def outputs(batch: TrainBatch) -> list[BatchOut]:
    """Return the batches of generation that decisions came from."""
    return list({id(d.out.batch): d.out.batch for d in batch.decisions}.values())


def made_exact(batch: TrainBatch, learner: TorchLearner) -> TrainBatch:
    """Make the recorded log-probabilities those that the learner computes, to the last bit; return the batch."""
    rollout = learner.collate(batch)
    decisions = [decision for part in rollout.segments for decision in part.decisions]
    for decision, log_prob in zip(decisions, learner.score(rollout).log_prob, strict=True):
        decision.out.batch.log_prob[decision.out.row] = log_prob.numpy()
    return batch


def made_old(batch: TrainBatch, *, scale: float = 0.7, seed: int = 0) -> TrainBatch:
    """Make a batch look as if another policy had acted; return it."""
    rng = np.random.default_rng(seed)
    for out in outputs(batch):
        out.log_prob = out.log_prob + rng.normal(0.0, scale, out.log_prob.shape).astype(np.float32)
    return batch


def make_ppo(policy: TorchPolicy | None = None, **options: Any) -> PPO:
    """Return a small learner for `rollout_of`."""
    policy = GaussianPolicy.for_spec(SPEC, hidden=(16,)) if policy is None else policy
    return PPO(policy, PPOConfig(**{"batch_size": 64, "minibatch_size": 16, "epochs": 2} | options))


def weights(learner: TorchLearner) -> list[Tensor]:
    """Return parameters and buffers."""
    return list(learner.policy.state_dict().values())


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether tensors are equal to the last bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
