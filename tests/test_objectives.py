"""What each option of the policy loss changes in an update, and what it does not."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ebrl.core.records import TrainBatch
from ebrl.gen.policies import GaussianPolicy
from ebrl.train.options import RatioLevel
from ebrl.train.ppo import PPO
from tests.learning import (
    SPEC,
    Ruler,
    hand_learner,
    made_exact,
    made_old,
    make_ppo,
    outputs,
    rollout_of,
    same,
    segment,
    weights,
)

torch.set_num_threads(1)
LEVELS: list[RatioLevel] = ["token", "action", "decision"]


def updated(batch: TrainBatch, *, horizon: int = 1, **options: Any) -> tuple[PPO, dict[str, float]]:
    """Return a new learner after one update with this batch, and its metrics."""
    learner = make_ppo(policy_of(horizon), **options)
    return learner, dict(learner.update(batch))


def policy_of(horizon: int) -> GaussianPolicy:
    return GaussianPolicy.for_spec(SPEC, hidden=(16,), horizon=horizon)


def fresh_batch(horizon: int = 1) -> TrainBatch:
    learner = make_ppo(policy_of(horizon))
    return made_exact(rollout_of(learner.policy, executed=lambda env, t: horizon), learner)


def old_batch(horizon: int = 1) -> TrainBatch:
    return made_old(fresh_batch(horizon))


def agree(batch: TrainBatch, *options: dict[str, Any]) -> bool:
    """Whether learners with these options are the same to the last bit after an update."""
    learners = [updated(batch, **some)[0] for some in options]
    return all(same(weights(learners[0]), weights(other)) for other in learners[1:])


def differ(batch: TrainBatch, *options: dict[str, Any]) -> bool:
    learners = [weights(updated(batch, **some)[0]) for some in options]
    return not any(same(a, b) for i, a in enumerate(learners) for b in learners[:i])


OBJECTIVES: list[dict[str, Any]] = [{"objective": name} for name in ("decoupled", "ppo", "uncorrected")]


def test_at_lag_zero_all_objectives_are_one_to_the_last_bit() -> None:
    assert agree(fresh_batch(), *OBJECTIVES)


def test_for_old_data_they_are_not() -> None:
    assert differ(old_batch(), *OBJECTIVES)


@pytest.mark.parametrize(
    ("options", "objective"),
    [
        ({"behaviour_weight_cap": 10.0}, 2.0),  # u = 1 in the first minibatch
        ({"behaviour_weight_cap": 1.5}, 1.5),
        ({"behaviour_weight_cap": 1.5, "behaviour_weight": "mask"}, 0.0),
        ({"objective": "ppo"}, 1.2),
        ({"objective": "ppo", "clip_range_high": 0.5}, 1.5),
        ({"objective": "uncorrected"}, 1.0),
    ],
)
def test_by_hand(options: dict[str, Any], objective: float) -> None:
    """One decision with advantage 1, whose probability was 0.2 when it was made and is 0.4 now."""
    one = segment([1], [2], last=0, end="terminated", acted=[math.log(0.2)], now=[math.log(0.4)])
    metrics = hand_learner(1, epochs=1, **options).update(TrainBatch([one], 0))
    assert metrics["policy_loss"] == pytest.approx(-objective, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "reward", "objective"),
    [
        ({"objective": "ppo"}, 2, 1.1),
        ({"objective": "ppo", "clip_range_high": 0.5}, 2, 1.25),
        ({"objective": "ppo", "dual_clip": 1.5}, 0, -1.5),
        ({"behaviour_weight_cap": 1.5}, 2, 1.5),
    ],
)
def test_clip_ranges_are_annealed_and_bounds_are_not(options: dict[str, Any], reward: float, objective: float) -> None:
    """Half of the updates are done, so half of the range is left."""
    one = segment([1], [reward], last=0, end="terminated", acted=[math.log(0.2)], now=[math.log(0.4)])
    learner = hand_learner(1, epochs=1, anneal_updates=2, **options)
    learner.num_updates = 1
    assert learner.update(TrainBatch([one], 0))["policy_loss"] == pytest.approx(-objective, rel=1e-6)


def test_clip_ranges_may_stay_where_they_are() -> None:
    one = segment([1], [2], last=0, end="terminated", acted=[math.log(0.2)], now=[math.log(0.4)])
    learner = hand_learner(1, epochs=1, objective="ppo", anneal_updates=2, anneal_clip_range=False)
    learner.num_updates = 1
    metrics = learner.update(TrainBatch([one], 0))
    assert metrics["policy_loss"] == pytest.approx(-1.2, rel=1e-6)
    assert metrics["learning_rate"] == learner.config.learning_rate / 2


def test_the_dual_clip_by_hand() -> None:
    """Probabilities of 0.2 and 1 with advantage -1: plain PPO has -5, and no more than c with the dual clip."""
    one = segment([1], [0], last=0, end="terminated", acted=[math.log(0.2)])
    losses = [
        hand_learner(1, epochs=1, objective="ppo", dual_clip=dual_clip).update(TrainBatch([one], 0))["policy_loss"]
        for dual_clip in (None, 6.0, 3.0)
    ]
    assert losses == pytest.approx([5.0, 5.0, 3.0])


def test_masked_decisions_still_count() -> None:
    """Two decisions with advantage 1: with a cap of 1.5, one of them is dropped, and the mean is over both."""
    acted, now = [math.log(0.2), math.log(0.4)], [math.log(0.4), math.log(0.4)]
    two = [
        segment([1], [2], last=0, end="terminated", env=env, acted=acted[env : env + 1], now=now[env : env + 1])
        for env in range(2)
    ]
    learner = hand_learner(2, epochs=1, behaviour_weight="mask", behaviour_weight_cap=1.5)
    metrics = learner.update(TrainBatch(two, 0))
    assert metrics["policy_loss"] == pytest.approx(-0.5)
    assert metrics["masked_fraction"] == 0.5


def test_the_cap_matters_only_above_it() -> None:
    batch = made_old(fresh_batch(), scale=0.1)
    assert agree(batch, {}, {"behaviour_weight": "mask"}, {"behaviour_weight_cap": 9.0})
    assert differ(old_batch(), {}, {"behaviour_weight": "mask"}, {"behaviour_weight_cap": 9.0})


def test_options_at_the_end_of_their_range_are_off() -> None:
    off = [{"dual_clip": 1e6}, {"m2_threshold": 1e6}, {"clip_range_high": 0.2}]
    assert agree(old_batch(), {}, *off)


def test_a_strict_second_moment_leaves_the_policy_alone() -> None:
    learner, metrics = updated(old_batch(), m2_threshold=1e-12)
    before = make_ppo()
    assert metrics["policy_loss"] == 0
    assert metrics["masked_fraction"] == 1
    assert metrics["behaviour_weight_mean"] == 0
    assert same(list(learner.policy.mean.parameters()), list(before.policy.mean.parameters()))
    assert not same(list(learner.policy.value.parameters()), list(before.policy.value.parameters()))


def test_the_second_moment_is_taken_over_the_batch() -> None:
    """The square log-weight of one decision in four is 0.36: with 0.11 all stay, though not if its half were alone."""
    num = 4
    log_weight = [0.0, 0.1, 0.2, 0.6]
    parts = [
        segment([1], [2], last=0, end="terminated", env=env, acted=[-log_weight[env]], now=[0.0]) for env in range(num)
    ]
    for threshold, masked in ((0.11, 0.0), (0.04, 0.25)):
        options = {"m2_threshold": threshold, "objective": "uncorrected", "normalize_advantage": False}
        learner = make_ppo(Ruler(), batch_size=num, minibatch_size=num // 2, epochs=1, **options)
        assert learner.update(TrainBatch(parts, 0))["masked_fraction"] == masked


def test_levels_are_one_where_a_decision_is_one_number() -> None:
    parts = [
        segment([1, 2], [1, 0], last=3, env=env, acted=[-0.5 * env, 0.3], now=[-0.7, -0.2 * env]) for env in range(2)
    ]
    batch = TrainBatch(parts, 0)
    learners = [hand_learner(4, ratio_level=level, epochs=3) for level in LEVELS]
    metrics = [dict(learner.update(batch)) for learner in learners]
    for learner, found in zip(learners, metrics, strict=True):
        assert same(weights(learner), weights(learners[0]))
        assert {k: v for k, v in found.items() if not math.isnan(v)} == {
            k: v for k, v in metrics[0].items() if not math.isnan(v)
        }


def test_levels_differ_where_there_are_several() -> None:
    assert differ(old_batch(), {"ratio_level": "token"}, {"ratio_level": "decision"})
    assert agree(old_batch(), {"ratio_level": "action"}, {"ratio_level": "decision"})  # one action in a chunk
    batch, options = old_batch(horizon=3), {"horizon": 3}
    assert differ(batch, *({**options, "ratio_level": level} for level in LEVELS))


def half_executed(env: int, t: int) -> int:
    return 1 + (env + t) % 6


@pytest.mark.parametrize("level", LEVELS)
def test_actions_that_were_not_executed_change_nothing(level: RatioLevel) -> None:
    """Chunks of three actions, each applied twice: 1 to 6 simulator steps are 1 to 3 actions."""
    policy = policy_of(3)
    one, other = (rollout_of(policy, executed=half_executed) for _ in range(2))
    for batch in (one, other):
        for decision in batch.decisions:
            decision.action_repeat = 2
    for out in outputs(other):  # other samples with other log-probabilities, but only where nothing was executed
        out.aux["u"] = out.aux["u"].copy()
        out.log_prob = out.log_prob.copy()
    for decision in other.decisions:
        rows, row = decision.out.batch, decision.out.row
        rows.aux["u"][row, decision.num_actions :] += 0.5
        rows.log_prob[row, decision.num_actions :] -= 7.0
    a, b = (updated(batch, horizon=3, ratio_level=level) for batch in (one, other))
    assert same(weights(a[0]), weights(b[0]))
    assert a[1]["log_weight_sq_mean"] == b[1]["log_weight_sq_mean"] < 1e-9
    counts = {decision.num_actions for decision in one.decisions}
    assert counts == {1, 2, 3}


def test_executed_actions_do_matter() -> None:
    policy = policy_of(3)
    batch = rollout_of(policy, executed=half_executed)
    whole = rollout_of(policy, executed=half_executed)
    for decision in whole.decisions:
        decision.num_steps = 3
    assert not same(weights(updated(batch, horizon=3)[0]), weights(updated(whole, horizon=3)[0]))


def test_weights_of_one_change_nothing_and_others_follow_their_decisions() -> None:
    batch = old_batch()
    ones = TrainBatch(batch.segments, 0, np.ones(64))
    plain = updated(batch)[0]
    assert same(weights(plain), weights(updated(ones)[0]))

    per_decision = [0.5 if d.env == 0 else 1.0 + d.index / 16 for d in batch.decisions]
    weighted = updated(TrainBatch(batch.segments, 0, np.array(per_decision)))[0]
    assert not same(weights(plain), weights(weighted))

    turned = batch.segments[::-1]
    numbers = [0.5 if d.env == 0 else 1.0 + d.index / 16 for s in turned for d in s.decisions]
    assert same(weights(weighted), weights(updated(TrainBatch(turned, 0, np.array(numbers)))[0]))


def test_weights_multiply_both_losses() -> None:
    parts = [segment([1], [2 + env], last=0, end="terminated", env=env) for env in range(2)]
    plain, weighted = (
        hand_learner(2, epochs=1).update(TrainBatch(parts, 0, weight)) for weight in (None, np.array([0.5, 1.5]))
    )
    assert plain["policy_loss"] == pytest.approx(-(1 + 2) / 2)
    assert weighted["policy_loss"] == pytest.approx(-(0.5 * 1 + 1.5 * 2) / 2)
    assert plain["value_loss"] == pytest.approx(0.5 * (1 + 4) / 2)
    assert weighted["value_loss"] == pytest.approx(0.5 * (0.5 * 1 + 1.5 * 4) / 2)
    assert plain["entropy"] == weighted["entropy"], "both have the same, so that it does not matter who weighs more"


def test_weights_multiply_the_entropy_bonus() -> None:
    """The loss of two halves of a batch with entropies of their own is the weighted mean of what each alone has."""
    parts = [segment([1], [1], last=0, end="terminated", env=env, now=[-1.0 - env]) for env in range(2)]
    alone = [hand_learner(1, epochs=1).update(TrainBatch([part], 0))["entropy"] for part in parts]
    assert alone[0] != alone[1]
    both = hand_learner(2, epochs=1).update(TrainBatch(parts, 0, np.array([0.5, 1.5])))["entropy"]
    assert both == pytest.approx((0.5 * alone[0] + 1.5 * alone[1]) / 2)


@pytest.mark.parametrize(
    ("weight", "objective"), [(None, math.sqrt(1 / 2) / 2), (np.array([0.5, 1.5]), math.sqrt(3 / 2) / 4)]
)
def test_advantages_are_normalised_as_weights_have_it(weight: Any, objective: float) -> None:
    """Advantages 1 and 3, the second twice as probable now. Their mean and variance: 2 and 2, or by weight 5/2 and 3/2.

    So they become -1 and 1 times the root of 1/2, or -1 and 1/3 times the root of 3/2.
    """
    parts = [
        segment([1], [2 + 2 * env], last=0, end="terminated", env=env, acted=[-math.log(2) * env]) for env in range(2)
    ]
    learner = hand_learner(2, epochs=1, normalize_advantage=True)
    assert learner.update(TrainBatch(parts, 0, weight))["policy_loss"] == pytest.approx(-objective)


def targets_of(learner: PPO, batch: TrainBatch) -> tuple[list[float], list[float]]:
    rollout = learner.collate(batch)
    scores = learner.score(rollout)
    advantage_B, return_B = learner.targets(rollout, scores, learner.log_weight(rollout, scores))
    return advantage_B.tolist(), return_B.tolist()


def logs(*probabilities: float) -> Sequence[float]:
    return [math.log(p) for p in probabilities]


def test_targets_over_mixed_versions() -> None:
    """Versions 3, 3, 4, 5 in one segment at version 5; weights 1/2, 3/2, 1, 1."""
    mixed = segment(
        [0.5] * 4,
        [0, 0, 0, 1],
        last=9,
        end="terminated",
        versions=[3, 3, 4, 5],
        acted=logs(1 / 2, 1 / 2, 1 / 2, 1 / 4),
        now=logs(1 / 4, 3 / 4, 1 / 2, 1 / 4),
    )
    batch = TrainBatch([mixed], 5)
    assert batch.lags.tolist() == [2, 2, 1, 0]
    assert (batch.lags.max(), batch.lags.mean()) == (2, 5 / 4)
    learner = hand_learner(4, gamma=1.0, gae_lambda=1.0, targets="vtrace", epochs=1, behaviour_weight_cap=9.0)
    rollout = learner.collate(batch)
    weight = learner.log_weight(rollout, learner.score(rollout)).exp()
    assert weight.tolist() == pytest.approx([1 / 2, 3 / 2, 1, 1])
    advantages, returns = targets_of(learner, batch)
    assert returns == pytest.approx([3 / 4, 1, 1, 1])
    assert (weight.clamp(max=1) * torch.tensor(advantages)).tolist() == pytest.approx([1 / 4, 1 / 2, 1 / 2, 1 / 2])
    metrics = learner.update(batch)
    assert metrics["behaviour_weight_mean"] == pytest.approx(1)
    assert metrics["policy_loss"] == pytest.approx(-(1 / 2 * 1 / 2 + 3 / 2 * 1 / 2 + 1 / 2 + 1 / 2) / 4)
    assert metrics["max_abs_log_weight_at_lag_0"] == pytest.approx(0, abs=1e-6)


def test_vtrace_on_fresh_data_values_as_gae_does() -> None:
    batch, returns = fresh_batch(), {}
    for targets in ("gae", "vtrace"):
        learner = make_ppo(targets=targets, gae_lambda=1.0)
        advantages, returns[targets] = targets_of(learner, batch)
        returns[f"{targets} advantages"] = advantages
    assert returns["vtrace"] == pytest.approx(returns["gae"], abs=1e-5)
    assert returns["vtrace advantages"] == pytest.approx(returns["gae advantages"], abs=1e-5)
    assert differ(old_batch(), {"targets": "gae"}, {"targets": "vtrace"}, {"targets": "vtrace", "rho_bar": 3.0})
    assert differ(old_batch(), {"targets": "vtrace"}, {"targets": "vtrace", "c_bar": 0.5})


@pytest.mark.parametrize(
    ("options", "corrections"),
    [
        ({}, [1 + 5 / 8, 1 / 2 + 3 / 4, 3]),
        ({"rho_bar": 2.0}, [2 + 5 / 8, 1 / 2 + 3 / 4, 3]),
        ({"c_bar": 2.0}, [1 + 5 / 4, 1 / 2 + 3 / 4, 3]),
        ({"gae_lambda": 0.5}, [1 + 7 / 32, 1 / 2 + 3 / 8, 3]),
    ],
)
def test_caps_and_lambda_of_vtrace(options: dict[str, Any], corrections: list[float]) -> None:
    """Rewards 1, 2, 3 and values 1, 2, 2 with gamma 1/2: temporal differences of 1, 1, 3; weights 2, 1/2, 1."""
    three = segment([1, 2, 2], [1, 2, 3], last=4, acted=logs(0.2, 0.4, 0.5), now=logs(0.4, 0.2, 0.5))
    learner = hand_learner(3, **{"targets": "vtrace", "gae_lambda": 1.0} | options)
    returns = targets_of(learner, TrainBatch([three], 1))[1]
    assert [x - v for x, v in zip(returns, [1, 2, 2], strict=True)] == pytest.approx(corrections, abs=1e-5)


def test_gae_does_not_look_at_weights() -> None:
    fresh, old = (targets_of(make_ppo(), batch) for batch in (fresh_batch(), old_batch()))
    assert fresh == old


def test_the_moving_average_is_one() -> None:
    """With a decay of 1/2 the shares of the newest weights are 2/3, 4/7 and 8/15, and 1/2 in the end."""
    learner = make_ppo(proximal="ewma", proximal_decay=0.5, epochs=1, minibatch_size=64)
    assert learner.proximal is not None
    average = copy.deepcopy(learner.parameters)
    for seed, share in enumerate((2 / 3, 4 / 7, 8 / 15)):
        learner.update(rollout_of(learner.policy, seed=seed))
        average = [torch.lerp(a, w.detach(), share) for a, w in zip(average, learner.parameters, strict=True)]
        for a, mine in zip(average, learner.proximal.module.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), a.detach())
    # It scales observations as the policy does: only weights are averaged.
    assert same(list(learner.proximal.module.buffers()), list(learner.policy.buffers()))
    assert learner.policy.features.normalizer.count == 3 * 64


def test_the_clip_is_around_the_moving_average() -> None:
    options: dict[str, Any] = {"minibatch_size": 64, "learning_rate": 3e-3, "proximal": "ewma"}
    closest, far = (updated(old_batch(), epochs=8, proximal_decay=decay, **options)[1] for decay in (0.0, 0.99))
    # Without memory the average is the policy itself: every ratio is 1, and the weight does all of the correction.
    assert closest["approx_kl"] == 0
    assert closest["clip_fraction"] == 0
    assert far["approx_kl"] > 1e-3
    # One step from the first weights, both anchors are those weights.
    assert agree(old_batch(), *({"epochs": 1, "minibatch_size": 64, "proximal": p} for p in ("start", "ewma")))
    assert differ(old_batch(), {"proximal": "start"}, {"proximal": "ewma"})


def test_the_second_moment_of_the_moving_average_is_of_the_weights_that_are_used() -> None:
    """Acted as the update starts, but the average is behind: log-weights of 1/2 and 1, or none."""
    learner = hand_learner(2, epochs=1, m2_threshold=0.3, proximal="ewma", behaviour_weight_cap=9.0)
    assert learner.proximal is not None
    two = segment([1, 1], [2, 2], last=0, end="terminated", acted=[-1.0, -2.0], now=[-1.0, -2.0])
    for scale, masked, weight in ((0.5, 0.5, math.exp(0.5) / 2), (1.0, 0.0, 1.0)):
        with torch.no_grad():
            learner.policy.scale.fill_(1.0)
            learner.proximal.module.get_parameter("scale").fill_(scale)
        metrics = learner.update(TrainBatch([two], 0))
        assert metrics["masked_fraction"] == masked
        assert metrics["behaviour_weight_mean"] == pytest.approx(weight)


def test_without_it_there_is_no_second_policy() -> None:
    assert make_ppo().proximal is None
