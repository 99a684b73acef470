"""Advantages and value targets: one recursion for GAE, V-trace, chunks, truncation and padding; and those of groups.

Shape suffixes: ``T`` decisions of a segment in time order, ``S`` segments. Every function also takes ``[T]`` alone.

Sources: GAE is equation 16 of Schulman et al. 2016 (arXiv:1506.02438); V-trace is equation 1 and section 4.2 of
Espeholt et al. 2018 (arXiv:1802.01561). Chunks only change the discount of a decision, as options do in Sutton, Precup
and Singh 1999; bootstrapping at truncation is Pardo et al. 2018 (arXiv:1712.00378). Advantages within a group are GRPO
(Shao et al. 2024, arXiv:2402.03300).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """What the recursion runs over. All are ``[T, S]``; pad with zeros and ``cut``.

    Attributes:
        reward_TS: Of the whole decision, see `chunk_reward`.
        discount_TS: From this decision to the next.
        value_TS: Current critic, at the observation that was acted on.
        next_value_TS: Current critic, at the observation that really followed (never that of a reset).
        terminated_TS: bool; nothing follows, whatever `next_value_TS` says.
        cut_TS: bool; the next row is no continuation: end of an episode or of a segment.
    """

    reward_TS: Tensor
    discount_TS: Tensor
    value_TS: Tensor
    next_value_TS: Tensor
    terminated_TS: Tensor
    cut_TS: Tensor


class Targets(NamedTuple):
    """What to learn from, ``[T, S]``."""

    advantage_TS: Tensor
    return_TS: Tensor


def chunk_reward(rewards: Sequence[float], gamma: float) -> float:
    """Return R = sum of ``gamma**i * rewards[i]`` over the executed steps of one decision."""
    total = 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
    return total


def gae(steps: Steps, *, lam: float) -> Targets:
    """Generalised advantage estimation; lambda counts decisions."""
    acc_TS = _accumulate(_td_error(steps), _decay(steps, lam))
    return Targets(acc_TS, steps.value_TS + acc_TS)


def vtrace(steps: Steps, weight_TS: Tensor, *, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0) -> Targets:
    """V-trace targets, and the advantage that belongs to them.

    IMPALA's policy gradient multiplies this advantage by ``min(rho_bar, w)``. It is left out here: the losses weigh
    decisions of older versions themselves, and would do so twice.

    Args:
        steps: As for `gae`.
        weight_TS: w, probability of the decision now over that when it was made.
        lam: As in GAE.
        rho_bar: Cap of the weights that decide which policy is valued.
        c_bar: Cap of the weights that decide how far corrections travel.
    """
    decay_TS = _decay(steps, lam) * weight_TS.clamp(max=c_bar)
    acc_TS = _accumulate(weight_TS.clamp(max=rho_bar) * _td_error(steps), decay_TS)
    return_TS = steps.value_TS + acc_TS
    follow_TS = torch.cat([return_TS[1:], steps.next_value_TS[-1:]])
    follow_TS = torch.where(steps.cut_TS, steps.next_value_TS, follow_TS)
    return Targets(_td_error(steps._replace(next_value_TS=follow_TS)), return_TS)


def group_advantages(returns_G: Sequence[float], *, eps: float = 1e-6) -> list[float]:
    """Return the advantage of each episode of a group over the group (GRPO).

    ``(R - mean) / (std + eps)``, with the sample deviation (G - 1), as in SimpleVLA-RL and RLinf. All zero where all
    returns are equal. The group must be complete: whoever normalises over the members that have arrived favours those
    that end early.

    Args:
        returns_G: Of all its episodes, at least two.
        eps: Keeps equal returns finite.
    """
    assert len(returns_G) >= 2, "nothing is better or worse in a group of one"
    mean, std = statistics.fmean(returns_G), statistics.stdev(returns_G)
    return [(total - mean) / (std + eps) for total in returns_G]


def tells_apart(successes_G: Sequence[bool], *, lowest: float = 0.1, highest: float = 0.9) -> bool:
    """Whether a group says something: its success rate is within bounds, inclusive.

    Where nearly all or nearly none succeed, advantages are noise (SimpleVLA-RL, with these bounds). Who leaves a
    group out must count it as dropped: this selects data.

    Args:
        successes_G: Of all its episodes.
        lowest: Success rate.
        highest: Success rate.
    """
    return lowest <= sum(successes_G) / len(successes_G) <= highest


def _td_error(steps: Steps) -> Tensor:
    """Return ``r + discount * V(next) - V``, with nothing after termination."""
    next_value_TS = steps.next_value_TS.masked_fill(steps.terminated_TS, 0.0)
    return torch.addcmul(steps.reward_TS - steps.value_TS, steps.discount_TS, next_value_TS)


def _decay(steps: Steps, lam: float) -> Tensor:
    return (lam * steps.discount_TS).masked_fill(steps.cut_TS | steps.terminated_TS, 0.0)


def _accumulate(delta_TS: Tensor, decay_TS: Tensor) -> Tensor:
    """Run ``acc_t = delta_t + decay_t * acc_{t+1}`` backwards."""
    acc_S = torch.zeros_like(delta_TS[0])
    rows = []
    for delta_S, decay_S in zip(reversed(delta_TS.unbind()), reversed(decay_TS.unbind()), strict=True):
        acc_S = torch.addcmul(delta_S, decay_S, acc_S)
        rows.append(acc_S)
    return torch.stack(rows[::-1])
