"""The mechanics that algorithms share: decisions to tensors, scoring, time-major layout, minibatches, gradient steps.

Shape suffixes: ``B`` decisions, ``S`` segments, ``T`` decisions of a segment, ``H`` actions in a chunk, ``A`` numbers
in an action. Flat rows are segment after segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebrl.core.records import Array, BatchOut, Decision, Segment, TrainBatch
from ebrl.core.rng import Domain, stream
from ebrl.train.advantages import Steps, chunk_reward
from ebrl.train.sequences import Sequences

DiscountUnit: TypeAlias = Literal["step", "decision"]
Tensors: TypeAlias = dict[str, Tensor]


@dataclass(slots=True)
class Rollout:
    """A `TrainBatch` as tensors.

    Attributes:
        segments: In the order of the rows: by environment, then time, however they arrived.
        observations: ``[B + S]``: of the decisions, then the last one of each segment.
        aux: ``[B + S]`` from acting; the rows of last observations repeat the segment's last decision.
        log_prob: ``[B, H, A]`` under the weights that acted.
        reward: ``[B]`` float64 numpy, per decision, as the simulator gave it.
        discount: ``[B]`` float64 numpy, from each decision to the next.
        terminated: ``[B]`` bool, on the CPU.
        ends: ``[S]`` last row of each segment, on the CPU.
        sequences: Over which a policy with memory is unrolled; None without memory, where rows are scored one by one.
    """

    segments: list[Segment]
    observations: Tensors
    aux: Tensors
    log_prob: Tensor
    reward: NDArray[np.float64]
    discount: NDArray[np.float64]
    terminated: Tensor
    ends: Tensor
    sequences: Sequences | None


@dataclass(slots=True)
class Scores:
    """What the learner's current weights say about a rollout.

    Attributes:
        log_prob: ``[B, H, A]``.
        value: ``[B]``.
        last_value: ``[S]`` at the last observation of each segment.
    """

    log_prob: Tensor
    value: Tensor
    last_value: Tensor


class TorchLearner:
    """Base of the recipes. Called on the training lane only.

    Args:
        policy: Trained in place, on the device where its parameters are.
        batch_size: B, decisions per update.
        minibatch_size: Rows per gradient step, and per forward pass without gradients.
        learning_rate: Of Adam.
        adam_eps: Of Adam.
        max_grad_norm: Gradients are scaled down to it.
        gamma: Discount per `discount_unit`.
        discount_unit: Whether gamma counts simulator steps or decisions.
        seed: Of the order of minibatches.
    """

    def __init__(
        self,
        policy: Any,
        *,
        batch_size: int,
        minibatch_size: int,
        learning_rate: float,
        adam_eps: float,
        max_grad_norm: float,
        gamma: float,
        discount_unit: DiscountUnit,
        seed: int,
    ) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.minibatch_size = minibatch_size
        self.max_grad_norm = max_grad_norm
        self.gamma = gamma
        self.discount_unit = discount_unit
        self.seed = seed
        self.num_updates = 0
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        # fused: 70 us a step for two small networks on a CPU, against 190 (foreach) and 230 (one tensor at a time).
        self.optimizer = torch.optim.Adam(self.parameters, lr=learning_rate, eps=adam_eps, fused=True)

    def collate(self, batch: TrainBatch) -> Rollout:
        """Turn a batch into tensors, in an order that does not depend on how its segments arrived."""
        segments = sorted(batch.segments, key=lambda s: (s.env, s.decisions[0].index))
        decisions = [decision for segment in segments for decision in segment.decisions]
        assert len(decisions) == self.batch_size, f"{len(decisions)} decisions, not {self.batch_size}"
        ends = np.cumsum([len(segment.decisions) for segment in segments]) - 1
        observations = [decision.obs for decision in decisions] + [segment.last_obs for segment in segments]
        source, row_B = _gather(decisions)
        row_of_all = np.concatenate([row_B, row_B[ends]])
        reward, discount = self.returns(decisions)
        return Rollout(
            segments=segments,
            observations=self.to_device(self.policy.collate(observations)),
            aux=self.to_device({name: _pick([b.aux[name] for b in source], row_of_all) for name in source[0].aux}),
            log_prob=_pick([b.log_prob for b in source], row_B).to(self.device),
            reward=reward,
            discount=discount,
            terminated=torch.tensor([decision.terminated for decision in decisions]),
            ends=torch.from_numpy(ends),
            sequences=Sequences(segments) if self.policy.memory_size else None,
        )

    def returns(self, decisions: Sequence[Decision]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return reward and discount ``[B]`` of decisions.

        Per step: ``sum gamma**i r_i`` and ``gamma**n``. Per decision: the plain sum, and gamma, however long it was.
        """
        if self.discount_unit == "decision":
            reward = np.array([sum(decision.rewards) for decision in decisions], np.float64)
            return reward, np.full(len(decisions), self.gamma)
        reward = np.array([chunk_reward(decision.rewards, self.gamma) for decision in decisions], np.float64)
        return reward, self.gamma ** np.array([decision.num_steps for decision in decisions], np.float64)

    @torch.no_grad()
    def score(self, rollout: Rollout) -> Scores:
        """Score a rollout with the current weights, a minibatch at a time."""
        num, size, sequences = self.batch_size, self.minibatch_size, rollout.sequences
        if sequences is None:
            groups = list(torch.split(torch.arange(num + len(rollout.segments)), size))
        else:
            groups = sequences.all_rows(size)
        parts = [self.evaluate(rollout, rows.to(self.device))[:2] for rows in groups]
        back = torch.cat(groups).argsort().to(self.device)
        log_prob, value = (torch.cat(part)[back] for part in zip(*parts, strict=True))
        return Scores(log_prob[:num], value[:num], value[num:])

    def minibatches(self, rollout: Rollout, epochs: int) -> Iterator[Tensor]:
        """Yield rows, every row once per epoch, in an order keyed by the number of the update.

        A minibatch has `minibatch_size` rows; with memory about so many, since a sequence is not cut.
        """
        size, sequences = self.minibatch_size, rollout.sequences
        rng = stream(self.seed, Domain.LEARNER, self.num_updates)
        for _ in range(epochs):
            if sequences is None:
                groups = list(torch.split(torch.from_numpy(rng.permutation(self.batch_size)), size))
            else:
                groups = sequences.minibatches(size, rng)
            yield from (rows.to(self.device) for rows in groups)

    def evaluate(self, rollout: Rollout, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score rows of a rollout with the current weights; see `ebrl.core.protocols.Policy.evaluate`."""
        observations, aux = take(rollout.observations, rows), take(rollout.aux, rows)
        if rollout.sequences is None:
            return self.policy.evaluate(observations, aux)  # type: ignore[no-any-return]
        return self.policy.unroll(observations, aux, rollout.sequences.lengths(rows))  # type: ignore[no-any-return]

    def step(self, loss: Tensor) -> Tensor:
        """Take one gradient step.

        Returns:
            Norm of the gradient before it was clipped.
        """
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        return norm

    def set_learning_rate(self, learning_rate: float) -> None:
        """Change the learning rate from the next step on."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def to_device(self, tensors: Tensors) -> Tensors:
        """Return tensors on the policy's device."""
        return {name: x.to(self.device) for name, x in tensors.items()}


class Layout:
    """Where flat rows sit in the padded time-major table ``[T, S]`` of the recursion; on the CPU."""

    def __init__(self, ends: Tensor) -> None:
        lengths = torch.diff(ends, prepend=ends.new_tensor([-1]))
        self.segment = torch.repeat_interleave(lengths)
        self.time = torch.arange(len(self.segment)) - (ends - lengths + 1)[self.segment]
        self.shape = (int(lengths.max()), len(lengths))

    def pad(self, x_B: Tensor, fill: float = 0.0) -> Tensor:
        """Spread ``[B]`` over ``[T, S]``."""
        table = x_B.new_full(self.shape, fill)
        table[self.time, self.segment] = x_B
        return table

    def flat(self, x_TS: Tensor) -> Tensor:
        """Collect ``[B]`` from ``[T, S]``."""
        return x_TS[self.time, self.segment]


def time_major(rollout: Rollout, layout: Layout, scores: Scores, reward_B: NDArray[np.float64]) -> Steps:
    """Lay a rollout out for the recursion, on the CPU, where a loop over T is cheapest.

    Args:
        rollout: The data.
        layout: Of its segments.
        scores: Of the current critic.
        reward_B: As scaled for training.
    """
    value_B = scores.value.cpu()
    next_value_B = value_B.roll(-1)
    next_value_B[rollout.ends] = scores.last_value.cpu()
    cut_B = torch.zeros(len(value_B), dtype=torch.bool).index_fill_(0, rollout.ends, True)
    return Steps(
        layout.pad(torch.from_numpy(reward_B).to(value_B.dtype)),
        layout.pad(torch.from_numpy(rollout.discount).to(value_B.dtype)),
        layout.pad(value_B),
        layout.pad(next_value_B),
        layout.pad(rollout.terminated),
        layout.pad(cut_B, True),
    )


def take(tensors: Tensors, rows: Tensor) -> Tensors:
    """Return some rows of every tensor."""
    return {name: x.index_select(0, rows) for name, x in tensors.items()}


def _gather(decisions: Sequence[Decision]) -> tuple[list[BatchOut], NDArray[np.int64]]:
    """Return the batches of generation that decisions came from, and each one's row in all of them end to end.

    Copying whole batches and picking rows once is several times faster than a view per decision and array.
    """
    start: dict[int, int] = {}
    batches: list[BatchOut] = []
    total = 0
    rows = []
    for decision in decisions:
        out = decision.out
        first = start.get(id(out.batch))
        if first is None:
            first = start[id(out.batch)] = total
            batches.append(out.batch)
            total += len(out.batch.value)
        rows.append(first + out.row)
    return batches, np.array(rows, np.int64)


def _pick(arrays: Sequence[Array], rows: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)[rows])
