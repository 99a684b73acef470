"""Losses as pure functions of tensors.

Shape suffixes: ``B`` decisions, ``H`` actions in a chunk, ``A`` numbers in an action, ``X`` whatever the ratio is taken
over: ``[B]`` for decisions. (Ratios per action or per token need only another sum: the functions are elementwise.)

Sources: the clipped objective is equation 7 of Schulman et al. 2017 (arXiv:1707.06347). Its decoupled form, for data of
older versions, is Hilton, Cobbe and Schulman 2021 (arXiv:2110.00641): the clip is around the weights that the update
started from (the anchor), and a weight without gradient corrects from those to the weights that acted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Ratios beyond e**20 are overflow, not information.
MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """Value of the clipped objective; all are scalars.

    Attributes:
        loss: To be minimised.
        approx_kl: From the anchor to the policy, the estimator k3 of Schulman 2020; no gradient.
        clip_fraction: Share of ratios outside the clip range; no gradient.
    """

    loss: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def decision_log_prob(log_prob_BHA: Tensor) -> Tensor:
    """Return the log-probability of whole decisions, ``[B]``."""
    return log_prob_BHA.sum((1, 2))


def behaviour_weight(anchor_X: Tensor, behaviour_X: Tensor, *, cap: float) -> Tensor:
    """Return ``min(pi_anchor / pi_behaviour, cap)``, without gradient; 1 at lag 0.

    Args:
        anchor_X: Log-probability under the weights that the update started from.
        behaviour_X: Log-probability under the weights that acted.
        cap: Truncation, which trades variance for bias.
    """
    log_ratio_X = (anchor_X - behaviour_X).detach()
    return log_ratio_X.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)


def clipped_surrogate(
    log_prob_X: Tensor, anchor_X: Tensor, advantage_X: Tensor, weight_X: Tensor, *, clip_range: float
) -> Surrogate:
    """Return minus the mean of ``w * min(u A, clip(u, 1 - eps, 1 + eps) A)``, where ``u = pi / pi_anchor``.

    Args:
        log_prob_X: Under the weights being trained, with gradient.
        anchor_X: Under the weights that the update started from. (The behaviour's, with weights of 1: plain PPO.)
        advantage_X: Broadcast over chunk and token dimensions by the caller.
        weight_X: See `behaviour_weight`.
        clip_range: eps.
    """
    log_ratio_X = (log_prob_X - anchor_X).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_X = log_ratio_X.exp()
    clipped_X = ratio_X.clamp(1 - clip_range, 1 + clip_range)
    objective_X = weight_X * torch.minimum(ratio_X * advantage_X, clipped_X * advantage_X)
    with torch.no_grad():
        approx_kl = (ratio_X - 1 - log_ratio_X).mean()
        clip_fraction = (ratio_X != clipped_X).float().mean()
    return Surrogate(-objective_X.mean(), approx_kl, clip_fraction)


def value_loss(value_B: Tensor, return_B: Tensor) -> Tensor:
    """Return half the mean squared error."""
    return 0.5 * (value_B - return_B).square().mean()


def explained_variance(value_B: Tensor, return_B: Tensor) -> Tensor:
    """Return ``1 - var(return - value) / var(return)``; NaN where all returns are equal."""
    variance = return_B.var(correction=0)
    return 1 - (return_B - value_B).var(correction=0) / variance.where(variance > 0, torch.nan)


def standardize(x_B: Tensor) -> Tensor:
    """Return zero mean and unit standard deviation over at least two rows."""
    return (x_B - x_B.mean()) / (x_B.std() + 1e-8)
