"""The learner on batches built by hand: what it reads, what must not matter, and what must."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebrl.core.errors import ConfigError, PolicyError
from ebrl.core.protocols import Learner
from ebrl.core.records import ArraySpec, EnvSpec, Segment, TrainBatch
from ebrl.gen.policies import CategoricalPolicy, GaussianPolicy
from ebrl.train.advantages import Targets, gae
from ebrl.train.fake import ScriptedLearner
from ebrl.train.grpo import GRPO, GRPOConfig
from ebrl.train.learner import Layout, Rollout, time_major
from ebrl.train.normalizer import ReturnNormalizer
from ebrl.train.ppo import PPO, PPOConfig
from tests.learning import SPEC, hand_learner, make_ppo, outputs, rollout_of, same, segment, weights

torch.set_num_threads(1)


def targets_of(*segments: Segment, **options: Any) -> Targets:
    """Return advantages and returns ``[B]``, sorted by environment and time."""
    learner = hand_learner(sum(len(s.decisions) for s in segments), **options)
    rollout = learner.collate(TrainBatch(list(segments), 0))
    layout = Layout(rollout.ends)
    targets = gae(time_major(rollout, layout, learner.score(rollout), rollout.reward), lam=learner.config.gae_lambda)
    return Targets(*(layout.flat(x) for x in targets))


@pytest.mark.parametrize(
    ("end", "advantage"),
    [("", [23 / 16, 7 / 4, 3]), ("truncated", [23 / 16, 7 / 4, 3]), ("terminated", [21 / 16, 5 / 4, 1])],
)
def test_only_termination_stops_the_bootstrap_from_the_last_observation(end: str, advantage: list[float]) -> None:
    targets = targets_of(segment([1, 2, 2], [1, 2, 3], last=4, end=end))
    assert targets.advantage_TS.tolist() == advantage
    assert targets.return_TS.tolist() == [v + a for v, a in zip([1, 2, 2], advantage, strict=True)]


def test_segments_of_all_lengths_in_any_order() -> None:
    """The truncated example of the tests of the recursion, as the two segments that it really is, and a third."""
    a = segment([1, 2], [1, 2], last=6, end="truncated")
    b = segment([2], [3], last=4, end="terminated", first=2)
    c = segment([1, 2, 2], [1, 2, 3], last=4, env=1)
    for order in ([a, b, c], [c, b, a], [b, c, a]):
        assert targets_of(*order).advantage_TS.tolist() == [7 / 4, 3, 1, 23 / 16, 7 / 4, 3]


def test_the_discount_counts_steps_or_decisions() -> None:
    chunks = segment([1, 2], [[1, 2], [4]], last=9, end="terminated")
    assert targets_of(chunks, discount_unit="step").advantage_TS.tolist() == [7 / 4, 2]
    # Sums 3 and 4, one gamma each: deltas 3 + 1/2 * 2 - 1 and 4 - 2.
    assert targets_of(chunks, discount_unit="decision").advantage_TS.tolist() == [3.5, 2]


def test_layout_goes_there_and_back() -> None:
    layout = Layout(torch.tensor([2, 3, 7]))
    x = torch.arange(8.0) + 1
    table = layout.pad(x)
    assert table.T.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8]]
    assert torch.equal(layout.flat(table), x)


def test_ppo_is_a_learner_and_says_what_it_measured() -> None:
    ppo = make_ppo()
    learner: Learner = ppo
    metrics = learner.update(rollout_of(ppo.policy))
    names = "policy_loss value_loss entropy approx_kl clip_fraction grad_norm explained_variance learning_rate"
    lag = "behaviour_weight_mean masked_fraction behaviour_weight_ess log_weight_sq_mean max_abs_log_weight_at_lag_0"
    assert set(metrics) == {*names.split(), *lag.split()}
    assert all(np.isfinite(x) for x in metrics.values())
    assert learner.batch_size == 64


@pytest.mark.parametrize("discrete", [False, True])
def test_at_lag_zero_the_first_ratio_is_exactly_one(discrete: bool) -> None:
    spec = EnvSpec("Toy-v0", lambda: None, SPEC.observation, ArraySpec((), "int64", num_values=3))
    policy = CategoricalPolicy.for_spec(spec) if discrete else GaussianPolicy.for_spec(SPEC)
    ppo = make_ppo(policy, epochs=1, minibatch_size=64)
    for seed in range(3):
        metrics = ppo.update(rollout_of(policy, seed=seed))
        assert metrics["approx_kl"] == 0
        assert metrics["clip_fraction"] == 0
        assert metrics["behaviour_weight_mean"] == pytest.approx(1, abs=1e-5)


def test_same_data_same_weights() -> None:
    a, b = make_ppo(), make_ppo()
    for seed in range(3):
        batch = rollout_of(a.policy, seed=seed)
        a.update(batch)
        b.update(batch)
    assert same(weights(a), weights(b))
    other = make_ppo(seed=1)
    other.update(rollout_of(other.policy))
    c = make_ppo()
    c.update(rollout_of(c.policy))
    assert not same(weights(other), weights(c))


def test_the_order_of_arrival_does_not_matter() -> None:
    a, b = make_ppo(), make_ppo()
    batch = rollout_of(a.policy)
    shuffled = random.Random(0).sample(batch.segments, len(batch.segments))
    a.update(batch)
    b.update(TrainBatch(shuffled, 0))
    assert same(weights(a), weights(b))


def test_every_epoch_of_every_update_has_an_order_of_its_own() -> None:
    ppo = make_ppo()
    rollout = ppo.collate(rollout_of(ppo.policy))
    orders: set[tuple[int, ...]] = set()
    for num_updates in range(2):
        ppo.num_updates = num_updates
        epochs = torch.cat(list(ppo.minibatches(rollout, 2))).reshape(2, 64)
        assert (epochs.sort().values == torch.arange(64)).all()
        orders |= {tuple(rows.tolist()) for rows in epochs}
    assert len(orders) == 4


def test_it_learns() -> None:
    ppo = make_ppo(learning_rate=3e-3, epochs=8)
    rewards = []
    for seed in range(40):
        batch = rollout_of(ppo.policy, seed=seed)
        rewards.append(np.mean([d.rewards[0] for d in batch.decisions]))
        ppo.update(batch)
    assert np.mean(rewards[-5:]) > 0.75 * np.mean(rewards[:5])
    assert np.mean(rewards[-5:]) > -0.9


def test_old_data_are_weighted_and_the_weight_is_capped() -> None:
    ppo = make_ppo()
    batch = rollout_of(ppo.policy)
    for out in outputs(batch):
        out.log_prob = out.log_prob - np.float32(1.0)
    assert ppo.update(batch)["behaviour_weight_mean"] == 2


def test_how_much_of_the_returns_values_explain() -> None:
    """Values 1 and 2, returns 1 and 5: of a variance of 4, that of what is wrong by 0 and 3 remains."""
    parts = [segment([1 + env], [1 + 4 * env], last=0, end="terminated", env=env) for env in range(2)]
    assert hand_learner(2, epochs=1).update(TrainBatch(parts, 0))["explained_variance"] == 1 - (9 / 4) / 4


def test_observations_are_counted_after_the_last_step() -> None:
    ppo = make_ppo()
    batch = rollout_of(ppo.policy)
    ppo.update(batch)
    assert ppo.policy.features.normalizer.count == 64
    mean = np.mean([np.asarray(d.obs) for d in batch.decisions], 0)
    np.testing.assert_allclose(ppo.policy.features.normalizer.mean.numpy(), mean, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (lambda log_prob, value, entropy: (log_prob[:, 0], value, entropy), r"\[\(16, 2\), \(16,\), \(16, 1, 2\)\]"),
        (lambda log_prob, value, entropy: (log_prob, value[:, None], entropy), r"\[\(16, 1, 2\), \(16, 1\), "),
        (lambda log_prob, value, entropy: (log_prob, value, entropy.sum((1, 2))), r"\(16,\), \(16,\)\]"),
        (lambda log_prob, value, entropy: (log_prob.repeat(1, 2, 1), value, entropy), r"\[\(16, 2, 2\)"),
        (lambda log_prob, value, entropy: (log_prob, value), r"\[\(16, 1, 2\), \(16,\)\]"),
        (lambda log_prob, value, entropy: (log_prob[:-1], value[:-1], entropy[:-1]), r"\[\(15, 1, 2\), \(15,\)"),
    ],
)
def test_what_a_policy_scores_has_the_form_that_is_asked_for(form: Callable[..., Any], told: str) -> None:
    class Odd(GaussianPolicy):
        def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> Any:
            return form(*super().evaluate(batch, aux))

    ppo = make_ppo(Odd.for_spec(SPEC))
    with pytest.raises(PolicyError, match=rf"Odd\.evaluate must return log_prob and entropy \(1., 1, 2\) .*{told}"):
        ppo.update(rollout_of(GaussianPolicy.for_spec(SPEC)))


def test_annealing_ends_at_zero() -> None:
    ppo = make_ppo(anneal_updates=2, learning_rate=1e-3)
    rates, moved = [], []
    for seed in range(3):
        before = copy.deepcopy(ppo.parameters)
        rates.append(ppo.update(rollout_of(ppo.policy, seed=seed))["learning_rate"])
        moved.append(not same(before, ppo.parameters))
    assert rates == [1e-3, 5e-4, 0]
    assert moved == [True, True, False]


def test_frozen_parameters_stay() -> None:
    policy = GaussianPolicy.for_spec(SPEC)
    policy.log_std.requires_grad_(False)
    make_ppo(policy).update(rollout_of(policy))
    assert (policy.log_std == -0.5).all()


def test_a_batch_of_the_wrong_size_is_a_bug() -> None:
    ppo = make_ppo()
    with pytest.raises(AssertionError, match="48 decisions, not 64"):
        ppo.update(rollout_of(ppo.policy, num_steps=12))


def collated(*segments: Segment) -> Rollout:
    return hand_learner(sum(len(s.decisions) for s in segments)).collate(TrainBatch(list(segments), 0))


def test_the_running_return_goes_on_across_batches_and_ends_with_the_episode() -> None:
    normalizer = ReturnNormalizer(eps=0.0)
    first = collated(segment([0, 0], [1, 2], last=0), segment([0], [8], last=0, env=1))
    second = collated(segment([0], [4], last=0, end="terminated", first=2))
    third = collated(segment([0], [3], last=0, first=3))
    third.segments[0].decisions[0].episode = 1
    fourth = collated(segment([0], [6], last=0, env=1))
    for rollout in (first, second, third, fourth):
        normalizer.update(rollout.segments, rollout.reward, rollout.discount)
    # Running returns with gamma 1/2: 1, 2.5; 8; 4 + 2.5 / 2; 3 of a new episode; and 6 of one of another trainer.
    returns = np.array([1, 2.5, 8, 5.25, 3, 6])
    assert normalizer.mean == pytest.approx(returns.mean())
    assert normalizer.var == pytest.approx(returns.var())
    rewards = np.array([2.0, 1e6])
    np.testing.assert_allclose(normalizer.normalize(rewards), [2 / returns.std(), 10])


def test_the_running_return_is_discounted_by_the_steps_that_lie_between() -> None:
    """Chunks of 4, 1 and 1 steps of reward 1, with gamma 1/2 per step; the last in a batch of its own."""
    learner = hand_learner(1, discount_unit="step")
    normalizer = ReturnNormalizer(eps=0.0)
    for part in (segment([0, 0], [[1, 1, 1, 1], [1]], last=0), segment([0], [[1]], last=0, first=2)):
        rollout = learner.collate(TrainBatch([part], 0))
        normalizer.update(rollout.segments, rollout.reward, rollout.discount)
    returns = np.array([15 / 8, 15 / 8 / 16 + 1, (15 / 8 / 16 + 1) / 2 + 1])
    assert normalizer.mean == pytest.approx(returns.mean())
    assert normalizer.var == pytest.approx(returns.var())


@pytest.mark.parametrize(
    ("value_coef", "entropy_coef", "gradient"),
    [(0.0, 0.0, 0.5), (1.0, 0.0, -0.5), (0.0, 1.0, 1.0), (0.75, 0.25, -0.125)],
)
def test_what_the_loss_is_made_of(value_coef: float, entropy_coef: float, gradient: float) -> None:
    """A log-probability, and entropy, of -1/2 times the one parameter; a value of 1 times it, where 2 came of it.

    So the gradients are 1/2 of the policy loss, -1 of the value loss, and -1/2 of the entropy.
    """
    one = segment([1], [2], last=0, end="terminated", acted=[-0.5], now=[-0.5])
    options = {"value_coef": value_coef, "entropy_coef": entropy_coef, "epochs": 1}
    for bound, factor in ((9.0, 1.0), (0.05, 0.05 / abs(gradient))):
        learner = hand_learner(1, max_grad_norm=bound, **options)
        metrics = learner.update(TrainBatch([one], 0))
        assert metrics["grad_norm"] == pytest.approx(abs(gradient)), "before it is clipped"
        assert learner.policy.scale.grad.item() == pytest.approx(gradient * factor, rel=1e-4)
        assert learner.policy.scale.item() == pytest.approx(1 - math.copysign(5e-4, gradient), abs=1e-6)


def test_the_scale_of_rewards_matters_unless_returns_are_normalised() -> None:
    one = segment([1], [2], last=0, end="terminated")
    assert hand_learner(1, epochs=1, reward_scale=3.0).update(TrainBatch([one], 0))["policy_loss"] == -(3 * 2 - 1)
    a, b = make_ppo(), make_ppo(reward_scale=1024.0)
    batch = rollout_of(a.policy)
    a.update(batch)
    b.update(batch)
    for x, y in zip(weights(a), weights(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "PPOConfig.batch_size=0: must be at least 1"),
        ({"minibatch_size": 100}, "minibatch_size=100: must be at least 1 and a divisor of batch_size=1024"),
        ({"minibatch_size": 1}, "minibatch_size=1: must be at least 2 where advantages are normalised"),
        ({"gamma": 1.5}, "gamma=1.5: must be in 0..1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan: must be above 0"),
        ({"discount_unit": "chunk"}, r"discount_unit='chunk': must be one of \('step', 'decision'\)"),
        ({"behaviour_weight_cap": 0.5}, "behaviour_weight_cap=0.5: must be at least 1"),
        ({"anneal_updates": 0}, "anneal_updates=0: must be None or at least 1"),
        ({"clip_range_high": 0.0}, "clip_range_high=0.0: must be None or above 0"),
        ({"dual_clip": 1.0}, "dual_clip=1.0: must be None or above 1"),
        ({"m2_threshold": float("inf")}, "m2_threshold=inf: must be None or above 0"),
        ({"objective": "aipo"}, r"objective='aipo': must be one of \('decoupled', 'ppo', 'uncorrected'\)"),
        ({"ratio_level": "chunk"}, r"ratio_level='chunk': must be one of \('token', 'action', 'decision'\)"),
        ({"behaviour_weight": "drop"}, r"behaviour_weight='drop': must be one of \('clamp', 'mask'\)"),
        ({"behaviour_weight": "mask", "objective": "ppo"}, "must be 'clamp' unless objective is 'decoupled'"),
        ({"proximal": "ewma", "objective": "ppo"}, "proximal='ewma': must be 'start' unless objective is 'decoupled'"),
        ({"proximal_decay": 1.0}, "proximal_decay=1.0: must be at least 0 and below 1"),
        ({"targets": "td"}, r"targets='td': must be one of \('gae', 'vtrace'\)"),
        ({"rho_bar": 0.0}, "rho_bar=0.0: must be above 0"),
        ({"c_bar": -1.0}, "c_bar=-1.0: must be above 0"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**options)


def test_the_fake_remembers_what_it_consumed() -> None:
    policy = GaussianPolicy.for_spec(SPEC)
    a, b, c = (ScriptedLearner(64) for _ in range(3))
    for learner, seed in ((a, 0), (b, 0), (c, 1)):
        fake: Learner = learner
        assert fake.update(rollout_of(policy, seed=seed)) == {"num_updates": 1}
        assert fake.policy.tolist() == [1.0] * 8
    assert a.hexdigest == b.hexdigest != c.hexdigest


@pytest.mark.parametrize("learner", [PPO, GRPO])
def test_the_entropy_bonus_asks_nothing_of_actions_that_were_not_executed(learner: Any) -> None:
    """Of chunks of three the first action is executed alone: the others have no gradient, so that they stay."""
    policy = GaussianPolicy.for_spec(SPEC, horizon=3)
    batch = rollout_of(policy)
    for part in batch.segments:
        part.advantage = 1.0
        for decision in part.decisions:
            decision.executed = (0,)
    before = policy.log_std.detach().clone()
    config = {PPO: PPOConfig, GRPO: GRPOConfig}[learner]
    learner(policy, config(batch_size=64, minibatch_size=16, entropy_coef=0.1)).update(batch)
    moved = (policy.log_std.detach() - before).abs().reshape(3, -1).amax(1)
    assert moved[0] > 0
    assert moved[1:].tolist() == [0, 0]


def test_a_policy_without_anything_to_train_is_refused() -> None:
    policy = GaussianPolicy.for_spec(SPEC).requires_grad_(False)
    with pytest.raises(PolicyError, match="GaussianPolicy has no parameter with requires_grad: nothing can be trained"):
        make_ppo(policy)
