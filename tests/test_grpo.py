"""GRPO: the same policy loss, with advantages that whoever completes groups gives, and no critic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebrl.core.errors import ConfigError
from ebrl.core.protocols import Learner
from ebrl.core.records import GroupRule, TrainBatch
from ebrl.gen.policies import GaussianPolicy
from ebrl.train.advantages import group_advantages
from ebrl.train.grpo import GRPO, GRPOConfig
from tests.learning import SPEC, Ruler, made_old, rollout_of, same, segment, weights

torch.set_num_threads(1)


def make_grpo(**options: Any) -> GRPO:
    policy = GaussianPolicy.for_spec(SPEC, hidden=(16,))
    return GRPO(policy, GRPOConfig(**{"batch_size": 64, "minibatch_size": 16} | options))


def with_advantages(batch: TrainBatch) -> TrainBatch:
    """Make one group of all segments, by their rewards."""
    totals = [sum(sum(d.rewards) for d in part.decisions) / len(part.decisions) for part in batch.segments]
    for part, advantage in zip(batch.segments, group_advantages(totals), strict=True):
        part.advantage = advantage
    return batch


def values(learner: GRPO) -> list[Tensor]:
    return [p.clone() for p in learner.policy.value.parameters()]


def test_it_is_a_learner_without_a_critic() -> None:
    grpo = make_grpo()
    learner: Learner = grpo
    before = values(grpo), [p.clone() for p in grpo.policy.mean.parameters()]
    metrics = learner.update(with_advantages(rollout_of(grpo.policy)))
    assert same(before[0], values(grpo))
    assert not same(before[1], list(grpo.policy.mean.parameters()))
    assert not {"value_loss", "explained_variance"} & metrics.keys()
    assert all(np.isfinite(x) for x in metrics.values())
    assert (learner.batch_size, grpo.num_updates) == (64, 1)


@pytest.mark.parametrize("rule", [{}, {"success_bounds": (0.1, 0.9), "success_return": 0.5}])
def test_it_asks_for_the_groups_that_its_options_say(rule: dict[str, Any]) -> None:
    assert make_grpo(**rule).groups == GroupRule(**rule)


def test_rewards_and_values_do_not_matter() -> None:
    a, b = make_grpo(), make_grpo()
    batch = with_advantages(rollout_of(a.policy))
    a.update(batch)
    for decision in batch.decisions:
        decision.rewards = (7.0,)
    with torch.no_grad():
        for p in b.policy.value.parameters():
            p.add_(1.0)
    b.update(batch)
    assert same(list(a.policy.mean.parameters()), list(b.policy.mean.parameters()))


def test_the_loss_is_minus_the_weighted_advantage_at_first() -> None:
    grpo = make_grpo(minibatch_size=64)
    batch = with_advantages(rollout_of(grpo.policy))
    of_decisions = np.array([s.advantage for s in batch.segments for _ in s.decisions])
    weight = np.linspace(0.5, 1.5, 64)
    plain = make_grpo(minibatch_size=64).update(batch)["policy_loss"]
    weighted = grpo.update(TrainBatch(batch.segments, 0, weight))["policy_loss"]
    assert plain == pytest.approx(-of_decisions.mean(), abs=1e-5)
    assert weighted == pytest.approx(-(weight * of_decisions).mean(), abs=1e-5)


def test_groups_in_which_all_are_equal_change_nothing() -> None:
    grpo = make_grpo()
    batch = rollout_of(grpo.policy)
    for part in batch.segments:
        part.advantage = 0.0
    before = [p.clone() for p in grpo.parameters]
    grpo.update(batch)
    assert same(before, grpo.parameters)


def test_an_episode_in_no_group_is_an_error() -> None:
    grpo = make_grpo()
    batch = with_advantages(rollout_of(grpo.policy))
    batch.segments[-1].advantage = None
    with pytest.raises(ConfigError, match="episodes of environment 3 are in no group: make groups with EnvGroup"):
        grpo.update(batch)
    assert grpo.num_updates == 0


def test_it_has_the_options_of_the_policy_loss() -> None:
    """Clip-higher by default; and old data are weighted."""
    config = GRPOConfig()
    assert (config.clip_range, config.clip_range_high, config.objective) == (0.2, 0.28, "decoupled")
    batch = made_old(with_advantages(rollout_of(make_grpo().policy)))
    seen = []
    for options in ({}, {"objective": "ppo"}, {"behaviour_weight": "mask"}, {"ratio_level": "token"}):
        learner = make_grpo(**options)
        learner.update(batch)
        seen.append(weights(learner))
    assert not any(same(a, b) for i, a in enumerate(seen) for b in seen[:i])
    with pytest.raises(ConfigError, match=r"GRPOConfig.epochs=0: must be at least 1"):
        GRPOConfig(epochs=0)


@pytest.mark.parametrize(("entropy_coef", "gradient"), [(0.0, 1.0), (0.5, 1.25)])
def test_what_the_loss_is_made_of(entropy_coef: float, gradient: float) -> None:
    """A log-probability, and entropy, of -1/2 times the one parameter; an advantage of 2."""
    one = segment([1], [0], last=0, acted=[-0.5], now=[-0.5])
    one.advantage = 2.0
    for bound, factor in ((9.0, 1.0), (0.05, 0.05 / gradient)):
        config = GRPOConfig(batch_size=1, minibatch_size=1, entropy_coef=entropy_coef, max_grad_norm=bound)
        grpo = GRPO(Ruler(), config)
        assert grpo.update(TrainBatch([one], 0))["grad_norm"] == pytest.approx(gradient)
        assert grpo.policy.scale.grad.item() == pytest.approx(gradient * factor, rel=1e-4)


def test_batches_may_be_larger_and_minibatches_share_them() -> None:
    """Groups are whole: of 64 decisions where 30 were asked for, all are learned from, in parts of about ten."""
    grpo = make_grpo(batch_size=30, minibatch_size=10)
    batch = with_advantages(rollout_of(grpo.policy))
    parts = [rows.tolist() for rows in grpo.minibatches(grpo.collate(batch), 1)]
    assert sorted(map(len, parts)) == [10, 10, 11, 11, 11, 11]
    assert sorted(row for rows in parts for row in rows) == list(range(64))
    grpo.update(batch)
    assert grpo.policy.features.normalizer.count == 64


def test_it_learns() -> None:
    grpo = make_grpo(learning_rate=5e-3, epochs=4)
    rewards = []
    for seed in range(20):
        batch = with_advantages(rollout_of(grpo.policy, seed=seed))
        rewards.append(np.mean([d.rewards[0] for d in batch.decisions]))
        grpo.update(batch)
    assert np.mean(rewards[-5:]) > -0.5, "without learning it is about -1.3"
