"""GRPO for decisions that may be a few versions old: as good as an episode was within its group, and no critic.

Choices, and where they come from:

- Every decision of an episode has the episode's advantage (`ebrl.train.advantages.group_advantages`; Shao et al. 2024,
  arXiv:2402.03300). It comes with the segments: `groups` asks for complete groups, of ``EnvGroup(group_size=G)``.
- The loss is that of `PPO`: decoupled for data of older versions. The clip is wider upward (0.2 and 0.28), and nothing
  holds the policy to a reference, as in SimpleVLA-RL.
- One pass over each batch, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebrl.core.errors import ConfigError
from ebrl.core.records import GroupRule, TrainBatch
from ebrl.train.learner import Rollout, TorchLearner
from ebrl.train.losses import mean_entropy
from ebrl.train.options import LearnerConfig
from ebrl.train.surrogate import PolicyLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig(LearnerConfig):
    """Options of `GRPO`, beside those that all recipes have (`ebrl.train.options.LearnerConfig`).

    Attributes:
        success_bounds: See `GroupRule`; SimpleVLA-RL has (0.1, 0.9). None: all groups are trained.
        success_return: See `GroupRule`.
    """

    epochs: int = 1
    clip_range_high: float | None = 0.28
    success_bounds: tuple[float, float] | None = None
    success_return: float | None = None

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: A value that cannot work.
        """
        LearnerConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        self.rule()

    def rule(self) -> GroupRule:
        """Return which groups are trained."""
        return GroupRule(success_bounds=self.success_bounds, success_return=self.success_return)


class GRPO(TorchLearner):
    """Group-relative policy optimisation; a `Learner`.

    Args:
        policy: A `Policy`; trained in place. Nothing reads its values.
        config: Options.

    Attributes:
        groups: Asks the trainer for segments of complete groups.
    """

    def __init__(self, policy: Any, config: GRPOConfig) -> None:
        if not isinstance(config, GRPOConfig):
            raise ConfigError(f"GRPO takes a GRPOConfig, got a {type(config).__name__}")
        super().__init__(policy, config)
        self.config = config
        self.groups = config.rule()

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        """One update. Called on the training lane.

        Returns:
            Metrics by name, averaged over the minibatches.

        Raises:
            ConfigError: A segment has no advantage.
            PolicyError: Loss or gradient is not finite.
        """
        cfg = self.config
        left = self.anneal(cfg)

        # What the current weights say about the data, and how good their episodes were.
        rollout = self.collate(batch)
        scores = self.score(rollout)
        lag_metrics = self.lag_metrics(rollout, scores)
        advantage_B = episode_advantages(rollout).to(self.device) * rollout.weight

        # Gradient steps.
        policy_loss = PolicyLoss(cfg, rollout, scores, left)
        minibatches = []
        for rows in self.minibatches(rollout, cfg.epochs):
            log_prob_BHA, _, entropy_BHA = self.evaluate(rollout, rows)
            surrogate = policy_loss(log_prob_BHA, advantage_B[rows], rows, self.proximal_log_prob(rollout, rows))
            entropy = mean_entropy(entropy_BHA, rollout.executed[rows], rollout.weight[rows])
            loss = surrogate.policy_loss - cfg.entropy_coef * entropy
            minibatches.append(self.step(loss, **surrogate._asdict(), entropy=entropy))

        return self.finish(rollout, minibatches) | {"learning_rate": cfg.learning_rate * left, **lag_metrics}


def episode_advantages(rollout: Rollout) -> Tensor:
    """Return ``[B]``: of each decision, the advantage of its episode.

    Raises:
        ConfigError: A segment has none.
    """
    advantages = []
    for segment in rollout.segments:
        if segment.advantage is None:
            raise ConfigError(
                "GRPO learns from how good an episode was within its group, but the episodes of environment "
                f"{segment.env} are in no group: make groups with EnvGroup(..., group_size=8), or use PPO"
            )
        advantages += [segment.advantage] * len(segment.decisions)
    return torch.tensor(advantages)
