"""Losses as pure functions of tensors.

Shape suffixes: ``B`` decisions, ``H`` actions in a chunk, ``A`` numbers (tokens) in an action, ``X`` whatever ratios
are taken of: ``[B]`` per decision, ``[B, H]`` per action, ``[B, H, A]`` per token. Functions of ``X`` are elementwise.

Sources: the clipped objective is equation 7 of Schulman et al. 2017 (arXiv:1707.06347). Its decoupled form, for data of
older versions, is Hilton, Cobbe and Schulman 2021 (arXiv:2110.00641): the clip is around the weights that the update
started from (the anchor), and a weight without gradient corrects from those to the weights that acted. The dual clip is
Ye et al. 2020 (arXiv:1912.09729), the mask by second moment M2PO (arXiv:2510.01161).

Two kinds of elements have no gradient. Those of actions that were not executed do not exist: they are not counted.
Those that a mask drops (a behaviour weight above its cap, M2PO) are counted, as in AReaL: else dropping some would make
the others weigh more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ebrl.train.options import BeyondCap, RatioLevel

# Ratios beyond e**20 are overflow, not information.
MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """Value of the clipped objective; all are scalars, and only `policy_loss` has a gradient.

    Attributes:
        policy_loss: To be minimised.
        approx_kl: From the anchor to the policy, the estimator k3 of Schulman 2020, with the weights of the loss: the
            sample is that of the weights that acted.
        clip_fraction: Share of ratios outside the clip range.
        behaviour_weight_mean: Of the weights, 0 where masked.
        masked_fraction: Share of weights that are 0.
    """

    policy_loss: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor
    behaviour_weight_mean: Tensor
    masked_fraction: Tensor


def at_level(log_prob_BHA: Tensor, executed_BH: Tensor, level: RatioLevel) -> Tensor:
    """Return the log-probabilities ``X`` of executed tokens, actions or decisions.

    Actions of a chunk that were not executed have had no effect, so they would only add variance. They are left out of
    the sum of a decision too: with a head that factorises over actions, that is the probability of what was executed.

    Args:
        log_prob_BHA: Un-summed.
        executed_BH: bool.
        level: Token: all elements; action: their sums over A; decision: their sums over H and A.
    """
    log_prob_BHA = log_prob_BHA.masked_fill(~executed_BH[..., None], 0.0)
    if level == "token":
        return log_prob_BHA
    return log_prob_BHA.sum(2) if level == "action" else log_prob_BHA.sum((1, 2))


def counted(executed_BH: Tensor, num_numbers: int, level: RatioLevel) -> Tensor:
    """Return which elements of ``X`` there are: every decision, and of the others those of executed actions.

    Args:
        executed_BH: bool.
        num_numbers: A.
        level: See `at_level`.
    """
    if level == "token":
        return executed_BH[..., None].expand(-1, -1, num_numbers)
    return executed_BH if level == "action" else torch.ones_like(executed_BH[:, 0])


def broadcast(x_B: Tensor, like_X: Tensor) -> Tensor:
    """Give a number per decision the dimensions of ``X``."""
    return x_B.reshape(-1, *[1] * (like_X.dim() - 1))


def mean_entropy(entropy_BHA: Tensor, executed_BH: Tensor, weight_B: Tensor) -> Tensor:
    """Return the mean over decisions, by weight, of the sum over what was executed: of the rest nothing was tried.

    Args:
        entropy_BHA: Un-summed.
        executed_BH: bool.
        weight_B: Of the decisions.
    """
    return (weight_B * at_level(entropy_BHA, executed_BH, "decision")).mean()


def behaviour_weight(anchor_X: Tensor, behaviour_X: Tensor, *, cap: float, beyond: BeyondCap = "clamp") -> Tensor:
    """Return ``w = pi_anchor / pi_behaviour``, without gradient; 1 at lag 0.

    Args:
        anchor_X: Log-probability under the weights that the clip is around.
        behaviour_X: Log-probability under the weights that acted.
        cap: Truncation, which trades variance for bias.
        beyond: What weights above the cap become: the cap (``clamp``), or 0 (``mask``).
    """
    weight_X = (anchor_X - behaviour_X).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weight_X.clamp(max=cap) if beyond == "clamp" else weight_X.masked_fill(weight_X > cap, 0.0)


def m2_mask(log_weight_X: Tensor, counted_X: Tensor, *, threshold: float) -> Tensor:
    """Return the largest set of elements whose log-weights have a mean square below a threshold; bool ``X``.

    Args:
        log_weight_X: Log of `behaviour_weight`.
        counted_X: See `counted`; the others are not in the set.
        threshold: Of the mean square.
    """
    squares = log_weight_X.detach().double().square().masked_fill(~counted_X, torch.inf)
    ordered, order = squares.flatten().sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    return torch.empty_like(means, dtype=torch.bool).scatter_(0, order, means < threshold).view_as(squares)


def clipped_surrogate(
    log_prob_X: Tensor,
    anchor_X: Tensor,
    advantage_X: Tensor,
    weight_X: Tensor,
    counted_X: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Surrogate:
    """Return minus the mean of ``w * min(u A, clip(u, 1 - eps, 1 + eps) A)``, where ``u = pi / pi_anchor``.

    Args:
        log_prob_X: Under the weights being trained, with gradient.
        anchor_X: Under the weights that the clip is around. (The behaviour's, with weights of 1: plain PPO.)
        advantage_X: May have dimensions of 1.
        weight_X: See `behaviour_weight`.
        counted_X: Elements that the mean is over, whatever their weight; see `counted`.
        clip_range: eps.
        clip_range_high: eps upward; None: the same.
        dual_clip: c: where A < 0, the term before the weight is at least ``c A``; None: it has no bound.
    """
    log_ratio_X = (log_prob_X - anchor_X).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_X = log_ratio_X.exp()
    high = clip_range if clip_range_high is None else clip_range_high
    clipped_X = ratio_X.clamp(1 - clip_range, 1 + high)
    objective_X = torch.minimum(ratio_X * advantage_X, clipped_X * advantage_X)
    if dual_clip is not None:
        bounded_X = torch.maximum(objective_X, dual_clip * advantage_X)
        objective_X = torch.where(advantage_X < 0, bounded_X, objective_X)

    def mean(x_X: Tensor) -> Tensor:
        return x_X.masked_fill(~counted_X, 0.0).sum() / counted_X.sum()

    with torch.no_grad():
        k3_X = ratio_X - 1 - log_ratio_X
        metrics = (weight_X * k3_X, (ratio_X != clipped_X).float(), weight_X, (weight_X == 0).float())
        means = [mean(x_X) for x_X in metrics]
    return Surrogate(-mean(weight_X * objective_X), *means)


def value_loss(value_B: Tensor, return_B: Tensor, weight_B: Tensor) -> Tensor:
    """Return half the mean of ``weight * (value - return)**2``."""
    return 0.5 * (weight_B * (value_B - return_B).square()).mean()


def effective_sample_size(log_weight_B: Tensor) -> Tensor:
    """Return ``(sum w)**2 / (B sum w**2)``: the part of a sample that it is worth (Kish 1965); 1 if all w are equal."""
    weight_B = log_weight_B.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weight_B.sum().square() / (len(weight_B) * weight_B.square().sum())


def explained_variance(value_B: Tensor, return_B: Tensor) -> Tensor:
    """Return ``1 - var(return - value) / var(return)``; NaN where all returns are equal."""
    variance = return_B.var(correction=0)
    return 1 - (return_B - value_B).var(correction=0) / variance.where(variance > 0, torch.nan)


def standardize(x_B: Tensor, weight_B: Tensor) -> Tensor:
    """Return zero mean and unit standard deviation over at least two rows, both as the weights have it."""
    share_B = weight_B / weight_B.sum()
    centred_B = x_B - (share_B * x_B).sum()
    variance = (share_B * centred_B.square()).sum() * len(x_B) / (len(x_B) - 1)
    return centred_B / (variance.sqrt() + 1e-8)
