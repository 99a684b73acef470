"""`PolicyLoss`: the policy loss of one update, as a recipe's options want it.

Which log-probabilities stand in the ratio and in the weight:

===============  ======================================================  ======================
objective        ratio: the weights being trained, over                  weight
===============  ======================================================  ======================
``decoupled``    those that the update starts from, or their average     those over what acted
``ppo``          those that acted                                        1
``uncorrected``  those that the update starts from                       1
===============  ======================================================  ======================
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebrl.train.learner import Rollout, Scores
from ebrl.train.losses import Surrogate, at_level, behaviour_weight, broadcast, clipped_surrogate, counted, m2_mask
from ebrl.train.options import LearnerConfig


class PolicyLoss:
    """What the minibatches of one update have in common; call it for each.

    Args:
        config: Says which loss.
        rollout: The data.
        scores: Of the weights that the update starts from.
        left: Of the schedule, from 1 down to 0; see `anneal_clip_range`.
    """

    def __init__(self, config: LearnerConfig, rollout: Rollout, scores: Scores, left: float) -> None:
        self._config, self._scale = config, left if config.anneal_clip_range else 1.0
        self._level, self._executed_BH = config.ratio_level, rollout.executed
        self._behaviour_X = at_level(rollout.log_prob, self._executed_BH, self._level)
        start_X = at_level(scores.log_prob, self._executed_BH, self._level)
        self._anchor_X = self._behaviour_X if config.objective == "ppo" else start_X
        self._counted_X = counted(self._executed_BH, rollout.log_prob.shape[2], self._level)
        self._kept_X = torch.ones_like(start_X)
        if config.m2_threshold is not None:
            self._kept_X = self._keep(start_X - self._behaviour_X, slice(None), config.m2_threshold)

    def __call__(
        self, log_prob_BHA: Tensor, advantage_B: Tensor, rows: Tensor, proximal_BHA: Tensor | None = None
    ) -> Surrogate:
        """Return the loss of some rows.

        Args:
            log_prob_BHA: Of these rows, under the weights being trained.
            advantage_B: Of these rows.
            rows: Which.
            proximal_BHA: Of these rows, under the average of the weights, where the clip is around that.
        """
        config, executed_BH = self._config, self._executed_BH[rows]
        anchor_X = self._anchor_X[rows]
        if proximal_BHA is not None:
            anchor_X = at_level(proximal_BHA, executed_BH, self._level)
        weight_X = self._kept_X[rows]
        if proximal_BHA is not None and config.m2_threshold is not None:
            weight_X = self._keep(anchor_X - self._behaviour_X[rows], rows, config.m2_threshold)
        if config.objective == "decoupled":
            weight_X = weight_X * behaviour_weight(
                anchor_X, self._behaviour_X[rows], cap=config.behaviour_weight_cap, beyond=config.behaviour_weight
            )
        log_prob_X = at_level(log_prob_BHA, executed_BH, self._level)
        high = config.clip_range_high
        return clipped_surrogate(
            log_prob_X,
            anchor_X,
            broadcast(advantage_B, log_prob_X),
            weight_X,
            self._counted_X[rows],
            clip_range=config.clip_range * self._scale,
            clip_range_high=None if high is None else high * self._scale,
            dual_clip=config.dual_clip,
        )

    def _keep(self, log_weight_X: Tensor, rows: Tensor | slice, threshold: float) -> Tensor:
        """Return 1 for what the second moment leaves, and 0."""
        return m2_mask(log_weight_X, self._counted_X[rows], threshold=threshold).to(log_weight_X.dtype)
