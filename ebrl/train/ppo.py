"""PPO for decisions that may be a few versions old: decoupled, clipped around the weights that the update started from.

At lag 0 it is plain PPO. Choices, and where they come from:

- Values are those of the current critic, at the true last observation: truncation bootstraps, termination does not.
- GAE over decisions; a chunk is one decision, and its log-probability the sum over its numbers.
- Clip around the update's first weights, times ``min(pi_first / pi_acted, cap)`` (Hilton et al. 2021).
- Advantages are normalised per minibatch, gradients clipped, Adam with eps 1e-5, as in CleanRL.
- No clipping of the value loss, which Andrychowicz et al. 2021 found to hurt.
- Rewards are divided by the running deviation of the return; observations are the policy's own business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from ebrl.core.errors import ConfigError, PolicyError
from ebrl.core.records import TrainBatch
from ebrl.train.advantages import gae
from ebrl.train.learner import DiscountUnit, Layout, TorchLearner, time_major
from ebrl.train.losses import (
    behaviour_weight,
    clipped_surrogate,
    decision_log_prob,
    explained_variance,
    standardize,
    value_loss,
)
from ebrl.train.normalizer import ReturnNormalizer


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """Options of `PPO`.

    Attributes:
        batch_size: B, decisions per update.
        epochs: Passes over the batch.
        minibatch_size: Decisions per gradient step, with memory about so many; divides `batch_size`.
        learning_rate: Of Adam.
        gamma: Discount per `discount_unit`.
        gae_lambda: Of GAE, per decision.
        clip_range: How far a ratio may move before its gradient stops.
        value_coef: Weight of the value loss.
        entropy_coef: Weight of the entropy of a decision.
        max_grad_norm: Gradients are scaled down to it.
        normalize_advantage: To zero mean and unit deviation, per minibatch.
        normalize_return: Divide rewards by the running deviation of the discounted return.
        reward_scale: Multiplies rewards first.
        discount_unit: Whether `gamma` counts simulator steps or decisions.
        behaviour_weight_cap: Truncation of the correction for lag.
        adam_eps: Of Adam.
        anneal_updates: Learning rate and clip range go linearly to 0 over so many updates; None leaves them.
        seed: Of the order of minibatches.
    """

    batch_size: int = 1024
    epochs: int = 8
    minibatch_size: int = 256
    learning_rate: float = 5e-4
    gamma: float = 0.98
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    normalize_advantage: bool = True
    normalize_return: bool = True
    reward_scale: float = 1.0
    discount_unit: DiscountUnit = "decision"
    behaviour_weight_cap: float = 2.0
    adam_eps: float = 1e-5
    anneal_updates: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: A value that cannot work.
        """
        smallest = 2 if self.normalize_advantage else 1
        fits = self.minibatch_size >= smallest and self.batch_size % self.minibatch_size == 0
        for name, fine, rule in (
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("minibatch_size", fits, f"at least {smallest} and a divisor of batch_size={self.batch_size}"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("gamma", 0 <= self.gamma <= 1, "in 0..1"),
            ("gae_lambda", 0 <= self.gae_lambda <= 1, "in 0..1"),
            ("clip_range", self.clip_range > 0, "above 0"),
            ("value_coef", self.value_coef >= 0, "at least 0"),
            ("entropy_coef", self.entropy_coef >= 0, "at least 0"),
            ("max_grad_norm", self.max_grad_norm > 0, "above 0"),
            ("reward_scale", self.reward_scale > 0, "above 0"),
            ("discount_unit", self.discount_unit in get_args(DiscountUnit), f"one of {get_args(DiscountUnit)}"),
            ("behaviour_weight_cap", self.behaviour_weight_cap >= 1, "at least 1"),
            ("adam_eps", self.adam_eps > 0, "above 0"),
            ("anneal_updates", self.anneal_updates is None or self.anneal_updates >= 1, "None or at least 1"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            value = getattr(self, name)
            if not fine or (isinstance(value, float) and not math.isfinite(value)):
                raise ConfigError(f"PPOConfig.{name}={getattr(self, name)!r}: must be {rule}")


class PPO(TorchLearner):
    """Proximal policy optimisation; a `Learner`.

    Args:
        policy: A `Policy`; trained in place.
        config: Options.
    """

    def __init__(self, policy: Any, config: PPOConfig) -> None:
        super().__init__(
            policy,
            batch_size=config.batch_size,
            minibatch_size=config.minibatch_size,
            learning_rate=config.learning_rate,
            adam_eps=config.adam_eps,
            max_grad_norm=config.max_grad_norm,
            gamma=config.gamma,
            discount_unit=config.discount_unit,
            seed=config.seed,
        )
        self.config = config
        self.return_normalizer = ReturnNormalizer()

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        """One update. Called on the training lane.

        Returns:
            Metrics by name, averaged over the minibatches.

        Raises:
            PolicyError: Loss or gradient is not finite.
        """
        cfg, policy = self.config, self.policy
        remaining = 1.0 if cfg.anneal_updates is None else max(0.0, 1 - self.num_updates / cfg.anneal_updates)
        learning_rate, clip_range = cfg.learning_rate * remaining, cfg.clip_range * remaining
        self.set_learning_rate(learning_rate)

        # What the current weights say about the data; the ratios below are against these log-probabilities.
        rollout = self.collate(batch)
        scores = self.score(rollout)
        anchor_B = decision_log_prob(scores.log_prob)
        weight_B = behaviour_weight(anchor_B, decision_log_prob(rollout.log_prob), cap=cfg.behaviour_weight_cap)

        # Advantages and value targets.
        reward_B = rollout.reward * cfg.reward_scale
        if cfg.normalize_return:
            self.return_normalizer.update(rollout.segments, reward_B, rollout.discount)
            reward_B = self.return_normalizer.normalize(reward_B)
        layout = Layout(rollout.ends)
        targets = gae(time_major(rollout, layout, scores, reward_B), lam=cfg.gae_lambda)
        advantage_B, return_B = (layout.flat(x_TS).to(self.device) for x_TS in targets)

        # Gradient steps.
        rows_of_metrics = []
        for rows in self.minibatches(rollout, cfg.epochs):
            log_prob_BHA, value_B, entropy_BHA = self.evaluate(rollout, rows)
            adv = standardize(advantage_B[rows]) if cfg.normalize_advantage else advantage_B[rows]
            surrogate = clipped_surrogate(
                decision_log_prob(log_prob_BHA), anchor_B[rows], adv, weight_B[rows], clip_range=clip_range
            )
            v_loss = value_loss(value_B, return_B[rows])
            entropy = entropy_BHA.sum((1, 2)).mean()
            grad_norm = self.step(surrogate.loss + cfg.value_coef * v_loss - cfg.entropy_coef * entropy)
            rows_of_metrics.append(torch.stack([*surrogate, v_loss, entropy, grad_norm]).detach())

        means = torch.stack(rows_of_metrics).mean(0).tolist()
        if not all(map(math.isfinite, means)):
            raise PolicyError(
                f"update {self.num_updates + 1}: loss or gradient is not finite, so the weights are of no use any "
                "more; a smaller learning rate or max_grad_norm may help"
            )
        policy.observe({name: x[: self.batch_size] for name, x in rollout.observations.items()})
        self.num_updates += 1
        names = ("policy_loss", "approx_kl", "clip_fraction", "value_loss", "entropy", "grad_norm")
        return dict(zip(names, means, strict=True)) | {
            "explained_variance": float(explained_variance(scores.value, return_B)),
            "learning_rate": learning_rate,
            "behaviour_weight_mean": float(weight_B.mean()),
        }
