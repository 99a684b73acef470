"""Sampling: what speed does to the shares of tasks, and what is done about it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.errors import ConfigError
from ebrl.core.records import TrainBatch, UpdateReport
from ebrl.core.virtual import run_virtual
from ebrl.train.sampling import BOUNDS, Sampling, count, share_metrics, task_weights, weighted
from tests.helpers import make_segment, scripted_spec, the_failure, training, virtually
from tests.test_tasks import slow_machine

UNBOUNDED = (0.0, np.inf)
VER = (0.0, 1.0)
TASKS = [scripted_spec(length=25, task="fast"), scripted_spec(length=25, task="slow")]


def shares(counts: dict[str, int], bounds: tuple[float, float]) -> dict[str, float]:
    weights = task_weights(counts, len(counts), bounds)
    return {task: weights[task] * num / sum(counts.values()) for task, num in counts.items()}


@pytest.mark.parametrize(
    ("counts", "bounds", "expected"),
    [
        ((16, 4), (1.0, 1.0), (0.8, 0.2)),
        ((16, 4), VER, (0.714, 0.286)),
        ((16, 4), UNBOUNDED, (0.5, 0.5)),
        ((16, 4), BOUNDS, (0.5, 0.5)),
        ((18, 1, 1), (1.0, 1.0), (0.9, 0.05, 0.05)),
        ((18, 1, 1), VER, (0.769, 0.115, 0.115)),
        ((18, 1, 1), UNBOUNDED, (1 / 3, 1 / 3, 1 / 3)),
        ((18, 1, 1), BOUNDS, (0.455, 0.273, 0.273)),
        ((10, 10), BOUNDS, (0.5, 0.5)),
    ],
)
def test_the_vectors_of_ver(counts: tuple[int, ...], bounds: tuple[float, float], expected: tuple[float, ...]) -> None:
    found = shares({str(i): num for i, num in enumerate(counts)}, bounds)
    assert tuple(found.values()) == pytest.approx(expected, abs=5e-4)


def test_tasks_without_a_decision_have_their_share_too() -> None:
    assert task_weights({"a": 16, "b": 4}, 10) == pytest.approx({"a": 0.25 / 0.3, "b": 0.5 / 0.3})


@given(counts=st.lists(st.integers(1, 1000), min_size=1, max_size=8), absent=st.integers(0, 3))
def test_weights_have_mean_one_and_stay_within_their_bounds_of_each_other(counts: list[int], absent: int) -> None:
    weights = task_weights({str(i): num for i, num in enumerate(counts)}, len(counts) + absent)
    values = [weights[str(i)] for i in range(len(counts))]
    assert np.average(values, weights=counts) == pytest.approx(1.0)
    assert max(values) / min(values) <= BOUNDS[1] / BOUNDS[0] * (1 + 1e-9)
    assert all(one >= other for num, one in zip(counts, values, strict=True)
               for more, other in zip(counts, values, strict=True) if num <= more)  # fmt: skip


def test_weights_are_in_the_order_of_decisions() -> None:
    segments = [make_segment(3, task="a"), make_segment(1, env=1, task="b"), make_segment(4, env=2, task="a")]
    batch = weighted(TrainBatch(segments, 0), 2)
    assert batch.weights is not None
    light, heavy = 4 / 7, 4.0
    assert batch.weights.tolist() == pytest.approx([light] * 3 + [heavy] + [light] * 4)
    assert batch.weights.mean() == pytest.approx(1.0)
    metrics = share_metrics(batch, ("a", "b", "c"))
    assert metrics == pytest.approx(
        {"share/a": 7 / 8, "share/b": 1 / 8, "share/c": 0.0, "task_weight_ess": 64 / (8 * (7 * light**2 + heavy**2))}
    )
    assert share_metrics(batch, ("a",)) == {}


# In a run: steps of the slow task take four times as long.


async def run_for(sampling: Sampling | None, **options: Any) -> tuple[list[TrainBatch], list[UpdateReport]]:
    async with training(TASKS, slow_machine(), updates=14, sampling=sampling, **options) as stage:
        reports = [report async for report in stage.trainer]
        assert stage.envs.admission.ledger().balanced
    return stage.learner.batches, reports


def share_of_slow(batches: list[TrainBatch]) -> float:
    counts = sum((count(batch) for batch in batches), Counter())
    return counts["slow"] / counts.total()


def weighted_share_of_slow(batches: list[TrainBatch]) -> float:
    slow = total = 0.0
    for batch in batches:
        assert batch.weights is not None
        assert batch.weights.shape == (len(batch.decisions),)
        for weight, decision in zip(batch.weights, batch.decisions, strict=True):
            total += weight
            slow += weight * (decision.env % 2)
    return slow / total


def test_what_arrives_is_of_the_fast_and_weights_make_up_for_it() -> None:
    options: dict[str, Any] = {"count": 4, "batch_size": 40}
    batches, reports = run_virtual(run_for("arrival", **options))
    assert share_of_slow(batches) == pytest.approx(0.2, abs=0.03)
    assert all(batch.weights is None for batch in batches)
    assert "task_weight_ess" not in reports[0].metrics
    batches, reports = run_virtual(run_for(None, **options))
    assert share_of_slow(batches) == pytest.approx(0.2, abs=0.03)
    assert weighted_share_of_slow(batches) == pytest.approx(0.5, abs=0.01)
    last = reports[-1].metrics
    assert last["share/fast"] + last["share/slow"] == 1.0
    assert 0.5 < last["task_weight_ess"] < 0.75


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_quota_gives_tasks_equal_shares_and_costs_the_fast_their_speed(max_lag: int) -> None:
    batches, reports = run_virtual(run_for("quota", count=4, batch_size=40, max_lag=max_lag))
    assert share_of_slow(batches[6:]) == pytest.approx(0.5, abs=0.02)
    assert reports[-1].elapsed_s == pytest.approx(14 * 10 * 4.0, rel=0.15), "each of the slow makes 10 per version"
    if max_lag == 0:
        assert all(share_of_slow([batch]) == 0.5 for batch in batches)


@virtually
async def test_one_task_is_trained_as_it_arrives_unless_somebody_says_otherwise() -> None:
    for sampling, weighs in ((None, False), ("arrival", False), ("weighted", True)):
        async with training(TASKS[0], updates=2, sampling=sampling) as stage:  # type: ignore[arg-type]
            reports = [report async for report in stage.trainer]
        assert [batch.weights is not None for batch in stage.learner.batches] == [weighs] * 2
        assert not any("share" in name for report in reports for name in report.metrics)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "x"}, r"sampling must be one of ('arrival', 'quota', 'weighted') or None, got 'x'"),
        (
            {"count": 5, "batch_size": 10},
            "but fast has 3 of them and slow 2: use a count that is a multiple of",
        ),
        ({"batch_size": 9}, "share a batch equally: batch_size 9 is no multiple of 4 environments"),
    ],
)
def test_samplings_that_cannot_work(options: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with training(TASKS, **{"count": 4, "sampling": "quota", **options}):
            pass

    error = the_failure(main())
    assert isinstance(error, ConfigError)
    assert message in str(error)
