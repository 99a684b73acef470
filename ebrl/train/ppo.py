"""PPO for decisions that may be a few versions old: decoupled, clipped around the weights that the update started from.

At lag 0 it is plain PPO; with ``targets="vtrace"`` it is APPO. Choices, and where they come from:

- Values are those of the current critic, at the true last observation: truncation bootstraps, termination does not.
- GAE over decisions; a chunk is one decision, and its log-probability the sum over the numbers that were executed.
- Clip around the update's first weights, times ``min(pi_first / pi_acted, cap)`` (Hilton et al. 2021).
- Advantages are normalised per minibatch, gradients clipped, Adam with eps 1e-5, as in CleanRL.
- No clipping of the value loss, which Andrychowicz et al. 2021 found to hurt.
- Rewards are divided by the running deviation of the return; observations are the policy's own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ebrl.core.errors import ConfigError
from ebrl.core.records import TrainBatch
from ebrl.train.advantages import gae, vtrace
from ebrl.train.learner import DiscountUnit, Layout, Rollout, Scores, TorchLearner, time_major
from ebrl.train.losses import MAX_LOG_RATIO, explained_variance, mean_entropy, standardize, value_loss
from ebrl.train.normalizer import ReturnNormalizer
from ebrl.train.options import LearnerConfig, check, one_of
from ebrl.train.surrogate import PolicyLoss

ValueTargets: TypeAlias = Literal["gae", "vtrace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig(LearnerConfig):
    """Options of `PPO`, beside those that all recipes have (`ebrl.train.options.LearnerConfig`).

    Attributes:
        gamma: Discount per `discount_unit`.
        gae_lambda: Of GAE and of V-trace, per decision.
        targets: How advantages and value targets come about: ``gae``, or ``vtrace`` (IMPALA, arXiv:1802.01561), which
            also corrects them for lag. V-trace is usually run with a `gae_lambda` of 1. IMPALA's factor in front of the
            advantage, ``min(rho_bar, w)``, is here the weight of the decoupled objective: with `behaviour_weight_cap`
            of 1 it is the same.
        rho_bar: Of V-trace: cap of the weights of temporal differences, 1 in IMPALA.
        c_bar: Of V-trace: cap of the weights that carry corrections back, 1 in IMPALA, where it is at most `rho_bar`.
        value_coef: Weight of the value loss, which is half the squared error as in CleanRL: Stable-Baselines3's
            ``vf_coef`` times two.
        normalize_advantage: To zero mean and unit deviation, per minibatch as in CleanRL and Stable-Baselines3.
        normalize_return: Divide rewards by the running deviation of the discounted return.
        reward_scale: Multiplies rewards first. It matters without `normalize_return`, which divides it out again.
        discount_unit: Whether `gamma` counts simulator steps or decisions.
    """

    gamma: float = 0.98
    gae_lambda: float = 0.95
    targets: ValueTargets = "gae"
    rho_bar: float = 1.0
    c_bar: float = 1.0
    value_coef: float = 0.5
    normalize_advantage: bool = True
    normalize_return: bool = True
    reward_scale: float = 1.0
    discount_unit: DiscountUnit = "decision"

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: A value that cannot work.
        """
        LearnerConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        fits = self.minibatch_size >= 2 or not self.normalize_advantage
        check(
            self,
            ("minibatch_size", fits, "at least 2 where advantages are normalised"),
            ("gamma", 0 <= self.gamma <= 1, "in 0..1"),
            ("gae_lambda", 0 <= self.gae_lambda <= 1, "in 0..1"),
            one_of("targets", self.targets, ValueTargets),
            ("rho_bar", self.rho_bar > 0, "above 0"),
            ("c_bar", self.c_bar > 0, "above 0"),
            ("value_coef", self.value_coef >= 0, "at least 0"),
            ("reward_scale", self.reward_scale > 0, "above 0"),
            one_of("discount_unit", self.discount_unit, DiscountUnit),
        )


class PPO(TorchLearner):
    """Proximal policy optimisation; a `Learner`.

    Args:
        policy: A `Policy`; trained in place.
        config: Options.
    """

    def __init__(self, policy: Any, config: PPOConfig) -> None:
        if not isinstance(config, PPOConfig):
            raise ConfigError(f"PPO takes a PPOConfig, got a {type(config).__name__}")
        super().__init__(policy, config, gamma=config.gamma, discount_unit=config.discount_unit)
        self.config = config
        self.return_normalizer = self.parts["return_normalizer"] = ReturnNormalizer()

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        """One update. Called on the training lane.

        Returns:
            Metrics by name, averaged over the minibatches.

        Raises:
            PolicyError: Loss or gradient is not finite.
        """
        cfg = self.config
        left = self.anneal(cfg)

        # What the current weights say about the data; the ratios below are against these log-probabilities.
        rollout = self.collate(batch)
        scores = self.score(rollout)
        lag_metrics = self.lag_metrics(rollout, scores)
        advantage_B, return_B = self.targets(rollout, scores, self.log_weight(rollout, scores))

        # Gradient steps.
        policy_loss = PolicyLoss(cfg, rollout, scores, left)
        minibatches = []
        for rows in self.minibatches(rollout, cfg.epochs):
            log_prob_BHA, value_B, entropy_BHA = self.evaluate(rollout, rows)
            adv_B, weight_B = advantage_B[rows], rollout.weight[rows]
            if cfg.normalize_advantage:
                adv_B = standardize(adv_B, weight_B)
            surrogate = policy_loss(log_prob_BHA, adv_B * weight_B, rows, self.proximal_log_prob(rollout, rows))
            v_loss = value_loss(value_B, return_B[rows], weight_B)
            entropy = mean_entropy(entropy_BHA, rollout.executed[rows], weight_B)
            loss = surrogate.policy_loss + cfg.value_coef * v_loss - cfg.entropy_coef * entropy
            minibatches.append(self.step(loss, **surrogate._asdict(), value_loss=v_loss, entropy=entropy))

        return self.finish(rollout, minibatches) | {
            "explained_variance": float(explained_variance(scores.value, return_B)),
            "learning_rate": cfg.learning_rate * left,
            **lag_metrics,
        }

    def targets(self, rollout: Rollout, scores: Scores, log_weight_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets ``[B]``.

        Args:
            rollout: The data.
            scores: Of the current critic.
            log_weight_B: Of the current policy over the one that acted.
        """
        cfg = self.config
        reward_B = rollout.reward * cfg.reward_scale
        if cfg.normalize_return:
            self.return_normalizer.update(rollout.segments, reward_B, rollout.discount)
            reward_B = self.return_normalizer.normalize(reward_B)
        layout = Layout(rollout.ends)
        steps = time_major(rollout, layout, scores, reward_B)
        if cfg.targets == "gae":
            targets = gae(steps, lam=cfg.gae_lambda)
        else:
            weight_TS = layout.pad(log_weight_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().cpu())
            targets = vtrace(steps, weight_TS, lam=cfg.gae_lambda, rho_bar=cfg.rho_bar, c_bar=cfg.c_bar)
        advantage_B, return_B = (layout.flat(x_TS).to(self.device) for x_TS in targets)
        return advantage_B, return_B
