"""How much each task counts where some are faster than others.

Environments that run at their own pace give data in proportion to their speed: of two tasks with steps of 1 s and 4 s,
the slow one has 20 % of the decisions. There are three answers:

- ``arrival``: train what arrives. For one task that is right: its environments are alike.
- ``quota``: every environment starts the same number of decisions per version, so that shares are equal over the run
  (over each batch where `max_lag` is 0), and the fast ones wait (`ebrl.core.admission`).
- ``weighted``: train what arrives, and let a decision count with the equal share of its task over its real one. The
  weights are those of VER (Wijmans et al. 2022, arXiv:2210.05064), there per environment and at most 1; here per task,
  within `BOUNDS`, and with mean 1, so that the learning rate means what it says. Shares are of decisions: at the ratio
  levels ``action`` and ``token`` a decision has as many terms in the loss as it executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from ebrl.core.records import TrainBatch

Sampling: TypeAlias = Literal["arrival", "quota", "weighted"]

BOUNDS = (0.25, 4.0)
"""Of a weight, before weights are scaled to mean 1: a large one would multiply the noise of few decisions."""


def task_weights(counts: Mapping[str, int], num_tasks: int, bounds: tuple[float, float] = BOUNDS) -> dict[str, float]:
    """Return what a decision of each task counts, with mean 1 over all decisions.

    Example:
        >>> task_weights({"fast": 16, "slow": 4}, 2)
        {'fast': 0.625, 'slow': 2.5}

    Args:
        counts: Decisions of each task that has some.
        num_tasks: Tasks that there are, whether or not they have some.
        bounds: Lowest and highest of ``(B / num_tasks) / n``, before the mean is made 1.
    """
    num = sum(counts.values())
    low, high = bounds
    raw = {task: min(max(num / num_tasks / count, low), high) for task, count in counts.items()}
    mean = sum(raw[task] * count for task, count in counts.items()) / num
    return {task: weight / mean for task, weight in raw.items()}


def weighted(batch: TrainBatch, num_tasks: int) -> TrainBatch:
    """Return the batch with weights per task."""
    of_task = task_weights(count(batch), num_tasks)
    lengths = [len(segment.decisions) for segment in batch.segments]
    return replace(batch, weights=np.repeat([of_task[segment.task] for segment in batch.segments], lengths))


def count(batch: TrainBatch) -> Counter[str]:
    """Return the decisions of each task."""
    counts: Counter[str] = Counter()
    for segment in batch.segments:
        counts[segment.task] += len(segment.decisions)
    return counts


def share_metrics(batch: TrainBatch, tasks: tuple[str, ...]) -> dict[str, float]:
    """Return each task's part of the decisions, and what they are worth under their weights; nothing of one task.

    Returns:
        ``share/<task>``, before weighting; ``task_weight_ess``, ``(sum w)**2 / (B sum w**2)`` (Kish 1965): 1 where all
        weigh the same.
    """
    if len(tasks) < 2:
        return {}
    counts, num = count(batch), len(batch.decisions)
    metrics = {f"share/{task}": counts[task] / num for task in tasks}
    if batch.weights is not None:
        metrics["task_weight_ess"] = float(batch.weights.sum() ** 2 / (num * np.square(batch.weights).sum()))
    return metrics
