"""Learning with memory: wherever segments are cut, sequences give back what the policy said when it acted."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebrl.core.protocols import MEMORY
from ebrl.core.records import ActionOut, ArraySpec, BatchOut, Decision, EnvSpec, Segment, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.generator import Generator
from ebrl.gen.policies import RecurrentPolicy
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.train.ppo import PPO, PPOConfig
from ebrl.train.sequences import Sequences, deal
from ebrl.train.trainer import Trainer
from tests.helpers import make_segment, scripted_spec

torch.set_num_threads(1)

BOX = EnvSpec("Toy-v0", lambda: None, ArraySpec((3,), "float32"), ArraySpec((2,), "float32"))
CHOICE = EnvSpec("Toy-v0", lambda: None, BOX.observation, ArraySpec((), "int64", num_values=3))


def make_policy(spec: EnvSpec = BOX, *, seed: int = 0, **options: Any) -> RecurrentPolicy:
    policy = RecurrentPolicy.for_spec(spec, memory_size=5, hidden=(4,), seed=seed, **options)
    with torch.no_grad():  # so that memory says something about actions from the start
        for p in policy.head.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    return policy


def make_ppo(policy: RecurrentPolicy, batch_size: int, **options: Any) -> PPO:
    return PPO(policy, PPOConfig(**{"batch_size": batch_size, "minibatch_size": batch_size, "epochs": 1} | options))


def episode(policies: Sequence[RecurrentPolicy], versions: Sequence[int] | None = None, *, env: int = 0) -> Segment:
    """Act once with each policy; versions are 0 unless given."""
    rng = np.random.default_rng(env)
    obs = rng.standard_normal((len(policies) + 1, 3)).astype(np.float32)
    memory = np.zeros((1, policies[0].memory_size), np.float32)
    decisions = []
    for t, policy in enumerate(policies):
        noise = torch.from_numpy(rng.standard_normal((1, policy.noise_dim), np.float32))
        with torch.no_grad():
            out = policy.act(policy.collate([obs[t]]) | {MEMORY: torch.from_numpy(memory)}, noise)
        aux = {name: x.numpy() for name, x in out.aux.items()} | {MEMORY: memory}
        assert out.memory is not None
        memory = out.memory.numpy()
        batch = BatchOut(out.action.numpy(), out.log_prob.numpy(), out.value.numpy(), aux, memory)
        answer = ActionOut(batch.action[0], versions[t] if versions is not None else 0, batch, 0)
        decisions.append(Decision(env, 0, t, obs[t], answer, (float(rng.standard_normal()),), 1))
    return Segment(env, "", decisions, obs[-1], "end")


def cut(segment: Segment, places: Sequence[int]) -> list[Segment]:
    """Cut a segment in front of some of its decisions."""
    bounds = [0, *sorted({p for p in places if 0 < p < len(segment.decisions)}), len(segment.decisions)]
    pieces = []
    for a, b in itertools.pairwise(bounds):
        last_obs = segment.decisions[b].obs if b < len(segment.decisions) else segment.last_obs
        pieces.append(Segment(segment.env, "", segment.decisions[a:b], last_obs, "split"))
    return pieces


# Where the same weights acted.


@pytest.mark.parametrize("spec", [BOX, CHOICE], ids=["box", "choice"])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    places=st.lists(st.integers(0, 8), max_size=6),
    size=st.integers(2, 12),
)
@settings(max_examples=25)
def test_any_cut_gives_what_was_said_when_acting(
    spec: EnvSpec, lengths: list[int], places: list[int], size: int
) -> None:
    policy = make_policy(spec)
    whole = [episode([policy] * n, env=env) for env, n in enumerate(lengths)]
    segments = [piece for segment in whole for piece in cut(segment, places)]
    num = sum(lengths)
    ppo = make_ppo(policy, num, minibatch_size=num if num % size else size, normalize_advantage=False)
    rollout = ppo.collate(TrainBatch(segments[::-1], 0))
    scores = ppo.score(rollout)
    torch.testing.assert_close(scores.log_prob, rollout.log_prob, rtol=0, atol=1e-5)
    said = torch.tensor([d.out.value for segment in rollout.segments for d in segment.decisions])
    torch.testing.assert_close(scores.value, said, rtol=0, atol=1e-5)
    # What follows a piece is valued as the decision that was made there.
    of_next = {(d.env, d.index): d.out.value for segment in whole for d in segment.decisions}
    for segment, value in zip(rollout.segments, scores.last_value.tolist(), strict=True):
        last = segment.decisions[-1]
        assert value == pytest.approx(of_next.get((last.env, last.index + 1), value), abs=1e-5)


def test_the_last_observation_is_valued_with_what_was_remembered_until_then() -> None:
    policy = make_policy()
    segment = episode([policy] * 4)
    ppo = make_ppo(policy, 4)
    rollout = ppo.collate(TrainBatch([segment], 0))
    memory = torch.from_numpy(np.array([segment.decisions[-1].out.memory]))
    batch = policy.collate([segment.last_obs]) | {MEMORY: memory}
    expected = policy.act(batch, torch.zeros(1, policy.noise_dim)).value
    torch.testing.assert_close(ppo.score(rollout).last_value, expected.detach())


def test_versions_end_sequences_and_what_older_ones_remembered_is_data() -> None:
    old, new = make_policy(seed=0), make_policy(seed=1)
    segment = episode([old, old, new, new, new], [3, 3, 4, 4, 4])
    rollout = make_ppo(new, 5).collate(TrainBatch([segment], 4))
    log_w = make_ppo(new, 5).score(rollout).log_prob - rollout.log_prob
    assert log_w[:2].abs().min() > 1e-3
    assert log_w[2:].abs().max() < 1e-5, "of the version that is trained, all is as it was"
    assert rollout.sequences is not None
    (rows,) = rollout.sequences.all_rows(100)
    assert rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert rollout.sequences.lengths(rows) == [2, 2, 2], "at most half of a minibatch, and the last observation"


def test_gradients_go_through_memory_as_far_as_a_sequence() -> None:
    policy = make_policy(normalize=False)
    segment = episode([policy] * 4, [0, 0, 1, 1])
    ppo = make_ppo(policy, 4)
    rollout = ppo.collate(TrainBatch([segment], 1))
    state = rollout.observations["state"].requires_grad_()
    log_prob, _, _ = ppo.evaluate(rollout, torch.arange(4))
    (gradient,) = torch.autograd.grad(log_prob[3].sum(), state)
    assert (gradient.abs().sum(1) > 0).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("spec", [BOX, CHOICE], ids=["box", "choice"])
def test_actor_and_critic_remember_apart(spec: EnvSpec) -> None:
    policy = make_policy(spec)
    segment = episode([policy] * 4)
    ppo = make_ppo(policy, 4)
    rollout = ppo.collate(TrainBatch([segment], 0))
    observations, aux = ({name: x[:1] for name, x in y.items()} for y in (rollout.observations, rollout.aux))
    for log_prob, value, _ in (ppo.evaluate(rollout, torch.arange(4)), policy.evaluate(observations, aux)):
        for x, mine, others in (
            (log_prob, policy.actor_unit, policy.critic_unit),
            (value, policy.critic_unit, policy.actor_unit),
        ):
            policy.zero_grad()
            x.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
            assert all(p.grad is None for p in others.parameters()), "what one learns leaves the other alone"
            assert any(p.grad is not None and p.grad.abs().max() > 0 for p in mine.parameters())


# Minibatches.


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20), size=st.integers(2, 100), seed=st.integers(0, 9))
def test_minibatches_are_as_many_as_without_memory_however_long_episodes_are(
    lengths: list[int], size: int, seed: int
) -> None:
    num = sum(lengths)
    sequences = Sequences([make_segment(n, env=env) for env, n in enumerate(lengths)], size // 2)
    groups = sequences.minibatches(size, np.random.default_rng(seed))
    assert sorted(row for rows in groups for row in rows.tolist()) == list(range(num))
    assert len(groups) == max(1, num // size)
    share, sizes = num / len(groups), [len(rows) for rows in groups]
    assert max(sizes) - min(sizes) <= size // 2
    assert share / 2 < min(sizes) <= max(sizes) < 1.5 * share
    assert min(sizes) >= min(2, num), "an advantage can be standardised"


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), size=st.integers(1, 100), seed=st.integers(0, 9))
def test_sequences_are_dealt_out_evenly(lengths: list[int], size: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    groups = deal(lengths, order, size)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    assert all(groups)
    assert len(groups) == min(len(lengths), max(1, sum(lengths) // size))
    rows = [sum(lengths[number] for number in group) for group in groups]
    assert max(rows) - min(rows) <= max(lengths)


def test_long_sequences_are_cut_into_equal_parts() -> None:
    sequences = Sequences([make_segment(9, env=0), make_segment(3, env=1, version=[0, 1, 1])], 4)
    (rows,) = sequences.all_rows(100)
    assert sequences.lengths(rows) == [3, 3, 4, 1, 3]
    assert rows.tolist() == [*range(9), 12, 9, 10, 11, 13]


def test_minibatches_hold_whole_sequences_and_every_row_once() -> None:
    segments = [make_segment(4, env=0), make_segment(5, env=1, version=[0] * 3 + [1] * 2), make_segment(3, env=2)]
    sequences = Sequences([*segments, make_segment(4, env=3)], 4)
    whole = [[0, 1, 2, 3], [4, 5, 6], [7, 8], [9, 10, 11], [12, 13, 14, 15]]
    seen = []
    for seed in range(20):
        groups = sequences.minibatches(8, np.random.default_rng(seed))
        assert [len(rows) for rows in groups] in ([6, 10], [7, 9], [8, 8], [9, 7], [10, 6])
        parts = [part.tolist() for rows in groups for part in torch.split(rows, sequences.lengths(rows))]
        assert sorted(parts) == whole
        seen.append(parts)
    assert len({str(parts) for parts in seen}) > 10, "in an order that is drawn"
    again = sequences.minibatches(8, np.random.default_rng(0))
    assert [row for rows in again for row in rows.tolist()] == list(itertools.chain(*seen[0]))


def test_last_observations_follow_the_sequences_that_they_end() -> None:
    segments = [make_segment(3, env=0, version=[0, 1, 1]), make_segment(2, env=1)]
    sequences = Sequences(segments, 8)
    (rows,) = sequences.all_rows(100)
    assert rows.tolist() == [0, 1, 2, 5, 3, 4, 6]
    assert sequences.lengths(rows) == [1, 3, 3]


# In a run.


class Watching(PPO):
    """Looks at the weights of every batch before it learns from it."""

    def __init__(self, policy: RecurrentPolicy, config: PPOConfig) -> None:
        super().__init__(policy, config)
        self.log_w: dict[int, list[float]] = {}
        self.batches: list[TrainBatch] = []

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        self.batches.append(batch)
        rollout = self.collate(batch)
        log_w = self.log_weight(rollout, self.score(rollout))
        lags = TrainBatch(rollout.segments, batch.version).lags
        for lag, x in zip(lags.tolist(), log_w.tolist(), strict=True):
            self.log_w.setdefault(lag, []).append(abs(x))
        return super().update(batch)


async def wild(env: EnvContext) -> None:
    """Leave decisions unexecuted, intervene, and run an action in parts."""
    obs, _ = await env.reset()
    while not env.done:
        out, chance = await env.act(obs), env.rng.random()
        if chance < 0.1:
            await env.act(obs)
        elif chance < 0.2:
            obs = (await env.intervene(0 * out.action)).obs
        else:
            obs = (await env.step(out.action)).obs


@pytest.mark.parametrize("num_actions", [None, 3])
@pytest.mark.parametrize("max_lag", [0, 2])
def test_at_lag_zero_every_ratio_is_one(max_lag: int, num_actions: int | None) -> None:
    spec = scripted_spec(num_actions=num_actions, length=lambda rng: 5 + int(rng.integers(20)))
    config = PPOConfig(batch_size=22, minibatch_size=11, epochs=2, learning_rate=1e-2)
    learner = Watching(RecurrentPolicy.for_spec(spec, memory_size=5, hidden=(4,)), config)
    laws = {"sim": lambda n, rng: float(rng.exponential()), "train": lambda n, rng: 5 * float(rng.exponential())}

    async def main() -> None:
        async with Runtime(VirtualMachine(laws, num_cores=4)) as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(spec, actor=gen, count=4, program=wild, segment_length=9))
            async for report in rt.start(Trainer(envs, learner, updates=12, max_lag=max_lag)):
                assert report.metrics["behaviour_weight_mean"] == pytest.approx(1, abs=0.2)

    run_virtual(main())
    assert max(learner.log_w[0]) < 1e-5
    assert len(learner.log_w[0]) > 50
    assert set(learner.log_w) == set(range(max_lag + 1))
    assert all(max(log_w) > 1e-3 for lag, log_w in learner.log_w.items() if lag), "weights do move"
    segments = [segment for batch in learner.batches for segment in batch.segments]
    mixed = [s for s in segments if len({d.version for d in s.decisions}) > 1]
    assert bool(mixed) == (max_lag > 0)
    assert {s.reason for s in segments} >= {"end", "full", "split"}


@pytest.mark.hogs("updates are real, and run on the loop's thread in virtual time")
def test_a_deterministic_run_depends_on_the_seed_alone() -> None:
    spec = scripted_spec(length=lambda rng: 3 + int(rng.integers(10)))

    def train(latency_seed: int, *, gen_lanes: int = 1, seed: int = 0) -> str:
        policy = RecurrentPolicy.for_spec(spec, memory_size=5, hidden=(4,), seed=seed)
        learner = PPO(policy, PPOConfig(batch_size=24, minibatch_size=8, epochs=2))
        laws = {"sim": lambda n, rng: float(rng.lognormal()), "gen": lambda n, rng: 0.1 * float(rng.exponential())}

        async def main() -> None:
            async with Runtime(VirtualMachine(laws, seed=latency_seed), seed=seed, deterministic=True) as rt:
                gen = rt.start(Generator(policy, lanes=gen_lanes))
                envs = rt.start(EnvGroup(spec, actor=gen, count=6))
                async for _ in rt.start(Trainer(envs, learner, updates=6, max_lag=0)):
                    pass

        run_virtual(main())
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in policy.parameters())).hexdigest()

    first = train(0)
    assert train(1) == train(2, gen_lanes=2) == first
    assert train(0, seed=1) != first


def recall(policy: RecurrentPolicy, seed: int, *, deterministic: bool = False) -> tuple[TrainBatch, float]:
    """Show a number at first, and ask for it two decisions later; return the mean squared error as well."""
    rng = np.random.default_rng(seed)
    cue = rng.uniform(-1, 1, 64).astype(np.float32)
    memory = torch.zeros(64, policy.memory_size)
    segments = [Segment(env, "", [], np.zeros(3, np.float32), "end") for env in range(64)]
    for t in range(3):
        obs = np.zeros((64, 3), np.float32)
        obs[:, 0], obs[:, 1] = cue * (t == 0), t
        noise = torch.from_numpy(rng.standard_normal((64, policy.noise_dim), np.float32))
        with torch.no_grad():
            out = policy.act(policy.collate(list(obs)) | {MEMORY: memory}, noise, deterministic)
        aux = {"u": out.aux["u"].numpy(), MEMORY: memory.numpy()}
        batch = BatchOut(out.action.numpy(), out.log_prob.numpy(), out.value.numpy(), aux)
        assert out.memory is not None
        memory = out.memory
        error = (batch.action[:, 0, 0] - cue) ** 2
        for env, segment in enumerate(segments):
            answer = ActionOut(batch.action[env], 0, batch, env)
            reward = -float(error[env]) if t == 2 else 0.0
            segment.decisions.append(Decision(env, seed, t, obs[env], answer, (reward,), 1, terminated=t == 2))
    return TrainBatch(segments, 0), float(error.mean())


@pytest.mark.slow
def test_it_learns_to_remember() -> None:
    policy = RecurrentPolicy.for_spec(BOX, memory_size=8, hidden=(16,), normalize=False)
    ppo = make_ppo(policy, 192, minibatch_size=96, epochs=8, learning_rate=1e-2)
    assert recall(policy, 1000, deterministic=True)[1] > 0.3, "a constant has an error of a third"
    for seed in range(30):
        ppo.update(recall(policy, seed)[0])
    assert recall(policy, 1000, deterministic=True)[1] < 0.1
