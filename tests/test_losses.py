"""Losses against numbers that can be checked by hand, and where their gradients go."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ebrl.train.losses import (
    behaviour_weight,
    clipped_surrogate,
    decision_log_prob,
    explained_variance,
    standardize,
    value_loss,
)

# Probabilities of one decision: when acting, when the update starts, now. So u = 1.5 and w = 2.
BEHAVIOUR, ANCHOR, NOW = (torch.tensor([math.log(p)], dtype=torch.float64) for p in (0.2, 0.4, 0.6))


def loss_of(now: Tensor, anchor: Tensor, advantage: float, weight: Tensor) -> Tensor:
    return clipped_surrogate(now, anchor, torch.tensor([advantage]), weight, clip_range=0.2).loss


@pytest.mark.parametrize(
    ("advantage", "cap", "objective"), [(1, 10.0, 2.4), (1, 1.5, 1.8), (-1, 10.0, -3.0), (-1, 1.5, -2.25)]
)
def test_decoupled_objective(advantage: float, cap: float, objective: float) -> None:
    weight = behaviour_weight(ANCHOR, BEHAVIOUR, cap=cap)
    assert float(loss_of(NOW, ANCHOR, advantage, weight)) == pytest.approx(-objective, abs=1e-12)


@pytest.mark.parametrize(("advantage", "objective"), [(1, 1.2), (-1, -3.0)])
def test_plain_ppo_is_the_same_with_the_behaviour_as_anchor(advantage: float, objective: float) -> None:
    weight = behaviour_weight(BEHAVIOUR, BEHAVIOUR, cap=2.0)
    assert weight.item() == 1
    assert float(loss_of(NOW, BEHAVIOUR, advantage, weight)) == pytest.approx(-objective, abs=1e-12)


def test_at_lag_zero_the_first_minibatch_is_a_policy_gradient() -> None:
    now = ANCHOR.clone().requires_grad_()
    surrogate = clipped_surrogate(
        now, ANCHOR, torch.tensor([3.0]), behaviour_weight(ANCHOR, ANCHOR, cap=2.0), clip_range=0.2
    )
    (gradient,) = torch.autograd.grad(surrogate.loss, now)
    assert surrogate.loss.item() == -3
    assert gradient.tolist() == [-3]
    assert surrogate.approx_kl == 0
    assert surrogate.clip_fraction == 0


@pytest.mark.parametrize("cap", [1.5, 10.0])
def test_beyond_the_clip_range_nothing_pulls_further(cap: float) -> None:
    now = NOW.clone().requires_grad_()
    loss = loss_of(now, ANCHOR, 1.0, behaviour_weight(ANCHOR, BEHAVIOUR, cap=cap))
    assert torch.autograd.grad(loss, now)[0].tolist() == [0]


def test_beyond_the_clip_range_the_way_back_is_open() -> None:
    now = NOW.clone().requires_grad_()
    loss = loss_of(now, ANCHOR, -1.0, behaviour_weight(ANCHOR, BEHAVIOUR, cap=10.0))
    assert torch.autograd.grad(loss, now)[0].tolist() == pytest.approx([3.0])


def test_the_behaviour_weight_has_no_gradient() -> None:
    assert not behaviour_weight(ANCHOR.clone().requires_grad_(), BEHAVIOUR, cap=2.0).requires_grad


def test_weights_and_ratios_do_not_overflow() -> None:
    far = torch.tensor([-1e4])
    assert behaviour_weight(-far, far, cap=2.0).item() == 2
    surrogate = clipped_surrogate(-far, far, torch.tensor([-1.0]), torch.ones(1), clip_range=0.2)
    assert torch.isfinite(torch.stack(list(surrogate))).all()


def test_metrics_of_the_surrogate() -> None:
    ratio = torch.tensor([1.0, 1.1, 1.5, 0.5])
    surrogate = clipped_surrogate(ratio.log(), torch.zeros(4), torch.ones(4), torch.ones(4), clip_range=0.2)
    assert surrogate.clip_fraction.item() == 0.5
    assert surrogate.approx_kl.item() == pytest.approx(float((ratio - 1 - ratio.log()).mean()), abs=1e-6)


def test_other_levels_fit_in() -> None:
    """Two actions of two tokens: 1 of 4 tokens, 1 of 2 actions and the whole chunk are clipped at 0.2."""
    log_ratio = torch.tensor([[[0.1, 0.1], [-0.1, 0.2]]])
    clipped = []
    for now in (log_ratio, log_ratio.sum(2), decision_log_prob(log_ratio)):
        ones = torch.ones_like(now)
        clipped.append(clipped_surrogate(now, 0 * now, ones, ones, clip_range=0.2).clip_fraction.item())
    assert clipped == [0.25, 0.5, 1.0]
    assert decision_log_prob(log_ratio).exp().item() == pytest.approx(1.3499, abs=1e-4)


def test_value_loss_is_half_the_squared_error() -> None:
    value = torch.tensor([1.0, 3.0], requires_grad=True)
    loss = value_loss(value, torch.tensor([0.0, 0.0]))
    assert loss.item() == 2.5
    assert torch.autograd.grad(loss, value)[0].tolist() == [0.5, 1.5]


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(torch.zeros(3), returns).item() == 0
    assert math.isnan(explained_variance(returns, torch.ones(3)).item())


def test_standardize() -> None:
    x = standardize(torch.tensor([1.0, 2.0, 3.0]))
    assert x.tolist() == pytest.approx([-1, 0, 1])
    assert standardize(torch.ones(4)).tolist() == [0, 0, 0, 0]
