"""Losses against numbers that can be checked by hand, and where their gradients go."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebrl.train.losses import (
    Surrogate,
    at_level,
    behaviour_weight,
    broadcast,
    clipped_surrogate,
    counted,
    effective_sample_size,
    explained_variance,
    m2_mask,
    mean_entropy,
    standardize,
    value_loss,
)
from ebrl.train.options import BeyondCap, RatioLevel

# Probabilities of one decision: when acting, when the update starts, now. So u = 1.5 and w = 2.
BEHAVIOUR, ANCHOR, NOW = (torch.tensor([math.log(p)], dtype=torch.float64) for p in (0.2, 0.4, 0.6))
LEVELS: list[RatioLevel] = ["token", "action", "decision"]


def surrogate(
    now: Tensor, anchor: Tensor, advantage: Any, weight: Tensor, *, there: Tensor | None = None, **options: Any
) -> Surrogate:
    there = torch.ones_like(now, dtype=torch.bool) if there is None else there
    advantage = torch.as_tensor(advantage, dtype=now.dtype)
    return clipped_surrogate(now, anchor, advantage, weight, there, **{"clip_range": 0.2} | options)


def decoupled(now: Tensor, advantage: float, cap: float, beyond: BeyondCap = "clamp", **options: Any) -> Tensor:
    weight = behaviour_weight(ANCHOR, BEHAVIOUR, cap=cap, beyond=beyond)
    return surrogate(now, ANCHOR, [advantage], weight, **options).policy_loss


@pytest.mark.parametrize(
    ("advantage", "cap", "beyond", "objective"),
    [
        (1, 10.0, "clamp", 2.4),
        (1, 1.5, "clamp", 1.8),
        (1, 10.0, "mask", 2.4),
        (1, 1.5, "mask", 0.0),
        (-1, 10.0, "clamp", -3.0),
        (-1, 1.5, "clamp", -2.25),
        (-1, 1.5, "mask", 0.0),
    ],
)
def test_decoupled_objective(advantage: float, cap: float, beyond: BeyondCap, objective: float) -> None:
    assert float(decoupled(NOW, advantage, cap, beyond)) == pytest.approx(-objective, abs=1e-12)


@pytest.mark.parametrize(("advantage", "objective"), [(1, 1.2), (-1, -3.0)])
def test_plain_ppo_is_the_same_with_the_behaviour_as_anchor(advantage: float, objective: float) -> None:
    weight = behaviour_weight(BEHAVIOUR, BEHAVIOUR, cap=2.0)
    assert weight.item() == 1
    loss = surrogate(NOW, BEHAVIOUR, [advantage], weight).policy_loss
    assert float(loss) == pytest.approx(-objective, abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "objective"), [(-1, 3.0, -3.0), (-1, 1.2, -2.4), (1, 1.2, 2.4), (1, 1.01, 2.4)]
)
def test_the_dual_clip_comes_before_the_weight(advantage: float, dual_clip: float, objective: float) -> None:
    """With w = 2 the bound is 2 c: -3 stays with c = 3, and c = 1.2 gives -2.4. A positive advantage knows no bound."""
    loss = decoupled(NOW, advantage, 10.0, dual_clip=dual_clip)
    assert float(loss) == pytest.approx(-objective, abs=1e-12)


def test_the_dual_clip_stops_the_gradient_of_what_it_bounds() -> None:
    now = NOW.clone().requires_grad_()
    assert torch.autograd.grad(decoupled(now, -1.0, 10.0, dual_clip=1.2), now)[0].tolist() == [0]


def test_clip_higher_opens_the_way_up_only() -> None:
    ratio = torch.tensor([1.25, 0.75], dtype=torch.float64)
    options: dict[str, Any] = {"clip_range": 0.2, "clip_range_high": 0.28}
    up, down = (surrogate(u.log(), 0 * u, a, 0 * u + 1, **options) for u, a in zip(ratio, (1.0, -1.0), strict=True))
    assert up.policy_loss.item() == pytest.approx(-1.25)
    assert down.policy_loss.item() == pytest.approx(0.8)
    assert (up.clip_fraction.item(), down.clip_fraction.item()) == (0, 1)


def test_at_lag_zero_the_first_minibatch_is_a_policy_gradient() -> None:
    now = ANCHOR.clone().requires_grad_()
    found = surrogate(now, ANCHOR, [3.0], behaviour_weight(ANCHOR, ANCHOR, cap=2.0))
    (gradient,) = torch.autograd.grad(found.policy_loss, now)
    assert found.policy_loss.item() == -3
    assert gradient.tolist() == [-3]
    assert found.approx_kl == 0
    assert found.clip_fraction == 0


@pytest.mark.parametrize("cap", [1.5, 10.0])
def test_beyond_the_clip_range_nothing_pulls_further(cap: float) -> None:
    now = NOW.clone().requires_grad_()
    assert torch.autograd.grad(decoupled(now, 1.0, cap), now)[0].tolist() == [0]


def test_beyond_the_clip_range_the_way_back_is_open() -> None:
    now = NOW.clone().requires_grad_()
    assert torch.autograd.grad(decoupled(now, -1.0, 10.0), now)[0].tolist() == pytest.approx([3.0])


def test_what_is_masked_has_no_gradient_and_still_counts() -> None:
    now = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([0.0, -3.0, 0.0, 0.0], dtype=torch.float64)
    weight = behaviour_weight(now, behaviour, cap=2.0, beyond="mask")
    assert weight.tolist() == [1, 0, 1, 1]
    found = surrogate(now, now.detach(), [1.0, 1.0, 1.0, 1.0], weight)
    assert torch.autograd.grad(found.policy_loss, now)[0].tolist() == [-0.25, 0, -0.25, -0.25]
    assert found.masked_fraction == 0.25
    assert found.behaviour_weight_mean == 0.75


def test_what_was_not_executed_has_no_gradient_and_does_not_count() -> None:
    now = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    there = torch.tensor([True, False, True, True])
    odd = torch.tensor([0.0, 9.0, 0.0, 0.0])
    found = surrogate(now, now.detach() + odd, [1.0, 1.0, 1.0, 1.0], 1 + odd, there=there)
    assert torch.autograd.grad(found.policy_loss, now)[0].tolist() == pytest.approx([-1 / 3, 0, -1 / 3, -1 / 3])
    assert found.policy_loss.item() == pytest.approx(-1)
    assert [x.item() for x in found[1:]] == [0, 0, 1, 0]


def test_the_behaviour_weight_has_no_gradient() -> None:
    assert not behaviour_weight(ANCHOR.clone().requires_grad_(), BEHAVIOUR, cap=2.0).requires_grad


def test_weights_and_ratios_do_not_overflow() -> None:
    far = torch.tensor([-1e4])
    assert behaviour_weight(-far, far, cap=2.0).item() == 2
    assert behaviour_weight(-far, far, cap=2.0, beyond="mask").item() == 0
    found = surrogate(-far, far, [-1.0], torch.ones(1))
    assert torch.isfinite(torch.stack(list(found))).all()
    assert effective_sample_size(torch.tensor([1e4, 0.0])).item() == pytest.approx(0.5)


def test_metrics_of_the_surrogate() -> None:
    ratio = torch.tensor([1.0, 1.1, 1.5, 0.5])
    found = surrogate(ratio.log(), torch.zeros(4), torch.ones(4), torch.tensor([1.0, 2.0, 0.0, 0.0]))
    assert found.clip_fraction.item() == 0.5
    k3 = ratio - 1 - ratio.log()
    assert found.approx_kl.item() == pytest.approx(float((k3[0] + 2 * k3[1]) / 4), abs=1e-6)
    assert (found.behaviour_weight_mean.item(), found.masked_fraction.item()) == (0.75, 0.5)


def test_the_divergence_of_data_of_older_weights() -> None:
    """Two actions, acted on evenly and each seen once: weights turn the sample into one of the anchor."""
    acted, anchor, now = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1]), torch.tensor([0.8, 0.2])
    weight = behaviour_weight(anchor.log(), acted.log(), cap=9.0)
    found = surrogate(now.log(), anchor.log(), torch.ones(2), weight)
    assert found.approx_kl.item() == pytest.approx(float((anchor * (anchor / now).log()).sum()), abs=1e-6)
    assert not any(x.requires_grad for x in found)


def test_levels() -> None:
    """Two actions of two tokens: 1 of 4 tokens, 1 of 2 actions and the whole chunk are clipped at 0.2."""
    log_ratio = torch.tensor([[[0.1, 0.1], [-0.1, 0.2]]])
    everything = torch.ones(1, 2, dtype=torch.bool)
    ratios, clipped = [], []
    for level in LEVELS:
        now = at_level(log_ratio, everything, level)
        advantage = broadcast(torch.ones(1), now)
        ratios.append([round(x, 4) for x in now.exp().flatten().tolist()])
        found = surrogate(now, 0 * now, advantage, 0 * now + 1, there=counted(everything, 2, level))
        clipped.append(found.clip_fraction.item())
    assert ratios == [[1.1052, 1.1052, 0.9048, 1.2214], [1.2214, 1.1052], [1.3499]]
    num = counted(everything, 2, "token").sum()
    assert at_level(log_ratio, everything, "decision").div(num).exp().item() == pytest.approx(1.0779, abs=1e-4)
    assert clipped == [0.25, 0.5, 1.0]


def test_unexecuted_actions_are_in_no_level() -> None:
    """Done flags 0, 1, 0: the third action was not executed."""
    executed = torch.tensor([[True, True, False]])
    log_prob = torch.tensor([[[1.0, 2.0], [4.0, 8.0], [torch.nan, 32.0]]], requires_grad=True)
    sums = [at_level(log_prob, executed, level) for level in LEVELS]
    assert [x.tolist() for x in sums] == [[[[1, 2], [4, 8], [0, 0]]], [[3, 12, 0]], [15]]
    there = [counted(executed, 2, level).int().tolist() for level in LEVELS]
    assert there == [[[[1, 1], [1, 1], [0, 0]]], [[1, 1, 0]], [1]]
    for x in sums:
        gradient = torch.autograd.grad(x.sum(), log_prob, retain_graph=True)[0]
        assert gradient.tolist() == [[[1, 1], [1, 1], [0, 0]]]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_second_moment_drops_the_largest_first(order: list[int], sign: int) -> None:
    """Squares 0, .01, .04, .36 have prefix means 0, .005, .0167, .1025: with 0.04 three stay."""
    log_weight = sign * torch.tensor([0.0, 0.1, 0.2, 0.6])[order]
    kept = m2_mask(log_weight, torch.ones(4, dtype=torch.bool), threshold=0.04)
    assert kept.tolist() == [number != 3 for number in order]


def test_the_second_moment_is_of_what_is_there() -> None:
    log_weight = torch.tensor([[0.0, 0.0], [0.4, 0.0]])
    everything = torch.ones(2, 2, dtype=torch.bool)
    assert m2_mask(log_weight, everything, threshold=0.05).tolist() == [[True, True], [True, True]]
    there = torch.tensor([[True, False], [True, False]])
    assert m2_mask(log_weight, there, threshold=0.05).tolist() == [[True, False], [False, False]]
    assert not m2_mask(log_weight + 1, everything, threshold=0.05).any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_no_larger_set_stays_below_the_second_moment(log_weights: list[float], threshold: float) -> None:
    kept = m2_mask(torch.tensor(log_weights), torch.ones(len(log_weights), dtype=torch.bool), threshold=threshold)
    inside = sorted(x * x for x, stays in zip(log_weights, kept.tolist(), strict=True) if stays)
    outside = sorted(x * x for x, stays in zip(log_weights, kept.tolist(), strict=True) if not stays)
    assert not inside or sum(inside) / len(inside) < threshold
    if outside:
        assert not inside or inside[-1] <= outside[0]
        assert (sum(inside) + outside[0]) / (len(inside) + 1) >= threshold * (1 - 1e-9)


def test_effective_sample_size() -> None:
    assert effective_sample_size(torch.full((7,), -0.3)).item() == pytest.approx(1)
    assert effective_sample_size(torch.tensor([1.0, 3.0]).log()).item() == pytest.approx(0.8)
    assert effective_sample_size(torch.tensor([0.0, -50.0, -50.0, -50.0])).item() == pytest.approx(0.25)


def test_value_loss_is_half_the_squared_error() -> None:
    value = torch.tensor([1.0, 3.0], requires_grad=True)
    loss = value_loss(value, torch.tensor([0.0, 0.0]), torch.ones(2))
    assert loss.item() == 2.5
    assert torch.autograd.grad(loss, value)[0].tolist() == [0.5, 1.5]
    assert value_loss(value, torch.zeros(2), torch.tensor([1.5, 0.5])).item() == 0.5 * (1.5 + 4.5) / 2


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(torch.zeros(3), returns).item() == 0
    assert math.isnan(explained_variance(returns, torch.ones(3)).item())


def test_standardize() -> None:
    x = standardize(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))
    assert x.tolist() == pytest.approx([-1, 0, 1])
    assert standardize(torch.ones(4), torch.ones(4)).tolist() == [0, 0, 0, 0]


# A number is 0 or far above the 1e-8 that `standardize` adds to the deviation.
@given(st.lists(st.tuples(st.floats(-9, 9).map(lambda x: round(x, 3)), st.floats(0.25, 4)), min_size=2, max_size=30))
def test_standardize_as_weights_have_it(rows: list[tuple[float, float]]) -> None:
    x_B, weight_B = torch.tensor(rows, dtype=torch.float64).unbind(1)
    weight_B = weight_B / weight_B.mean()
    z_B = standardize(x_B, weight_B)
    assert float((weight_B * z_B).mean()) == pytest.approx(0, abs=1e-6), "no task is pushed up at the cost of none"
    square = len(rows) - 1 if len(set(x_B.tolist())) > 1 else 0
    assert float((weight_B * z_B.square()).sum()) == pytest.approx(square, rel=0.01, abs=1e-6)


def test_the_entropy_is_that_of_what_was_executed_by_weight() -> None:
    executed = torch.tensor([[True, False], [True, True]])
    entropy = torch.tensor([[[1.0, 2.0], [70.0, math.nan]], [[3.0, 4.0], [5.0, 6.0]]], requires_grad=True)
    mean = mean_entropy(entropy, executed, torch.tensor([0.5, 1.5]))
    assert mean.item() == (0.5 * 3 + 1.5 * 18) / 2
    mean.backward()  # type: ignore[no-untyped-call]
    assert entropy.grad is not None
    assert entropy.grad[0, 1].tolist() == [0, 0], "of an action that did not happen nothing is asked"
