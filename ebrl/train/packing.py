"""Decisions and segments as columns of arrays, and back. Pure.

Fields of the records that are whole numbers, truths or labels are found by looking: a new one needs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np

from ebrl.core.errors import ConfigError
from ebrl.core.records import ActionOut, Array, BatchOut, Decision, Observation, Segment

NUMBERS: Final = {field.name: field.type for field in fields(Decision) if field.type in ("int", "bool")}
LABELS: Final = tuple(field.name for field in fields(Segment) if field.name not in ("decisions", "last_obs"))


def pack_segments(segments: Sequence[Segment]) -> dict[str, Any]:
    """Return columns: labels per segment, and rows of decisions, segment after segment.

    Raises:
        ConfigError: Observations or answers have several forms.
    """
    decisions = [decision for segment in segments for decision in segment.decisions]
    packed: dict[str, Any] = {
        "labels": {name: [getattr(segment, name) for segment in segments] for name in LABELS},
        "lengths": [len(segment.decisions) for segment in segments],
    }
    if not segments:
        return packed
    return packed | {
        "last_obs": stack([segment.last_obs for segment in segments]),
        "obs": stack([decision.obs for decision in decisions]),
        "version": np.array([decision.out.version for decision in decisions]),
        "numbers": {name: np.array([getattr(d, name) for d in decisions], kind) for name, kind in NUMBERS.items()},
        "executed": [decision.executed for decision in decisions],
        "num_rewards": np.array([len(decision.rewards) for decision in decisions]),
        "rewards": np.array([reward for decision in decisions for reward in decision.rewards], np.float64),
        "out": {field.name: _answers(decisions, field.name) for field in fields(BatchOut)},
    }


def unpack_segments(packed: dict[str, Any]) -> list[Segment]:
    """Return the segments that `pack_segments` was given; their answers are rows of one batch."""
    lengths = packed["lengths"]
    if not lengths:
        return []
    batch = BatchOut(**packed["out"])
    versions = packed["version"].tolist()
    rewards = np.split(packed["rewards"], np.cumsum(packed["num_rewards"])[:-1])
    numbers = {name: column.tolist() for name, column in packed["numbers"].items()}
    decisions = [
        Decision(
            obs=obs,
            out=ActionOut(batch.action[row], versions[row], batch, row),
            rewards=tuple(rewards[row].tolist()),
            executed=packed["executed"][row],
            **{name: column[row] for name, column in numbers.items()},
        )
        for row, obs in enumerate(unstack(packed["obs"]))
    ]
    ends = np.cumsum(lengths).tolist()
    labels = [dict(zip(packed["labels"], row, strict=True)) for row in zip(*packed["labels"].values(), strict=True)]
    return [
        Segment(decisions=decisions[end - length : end], last_obs=last_obs, **label)
        for length, end, last_obs, label in zip(lengths, ends, unstack(packed["last_obs"]), labels, strict=True)
    ]


def stack(observations: Sequence[Observation]) -> Observation:
    """Return observations as one, with a leading dimension.

    Raises:
        ConfigError: They have several forms.
    """
    first = observations[0]
    if not isinstance(first, dict):
        return _stack(observations, "observations")
    if any(not isinstance(obs, dict) or obs.keys() != first.keys() for obs in observations):
        raise ConfigError("observations of several forms cannot be saved: they differ in their keys")
    return {key: _stack([obs[key] for obs in observations], f"observations[{key!r}]") for key in first}


def unstack(rows: Observation) -> list[Observation]:
    """Return the observations that `stack` was given."""
    if isinstance(rows, dict):
        return [dict(zip(rows, parts, strict=True)) for parts in zip(*map(_unstack, rows.values()), strict=True)]
    return [*_unstack(rows)]


def _answers(decisions: Sequence[Decision], name: str) -> Any:
    values = [(getattr(decision.out.batch, name), decision.out.row) for decision in decisions]
    first = values[0][0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: _stack([value[key][row] for value, row in values], f"{name}[{key!r}]") for key in first}
    return _stack([value[row] for value, row in values], name)


def _stack(rows: Sequence[Any], name: str) -> Array:
    arrays = [np.asarray(row) for row in rows]
    forms = {(array.dtype, array.shape) for array in arrays}
    if len(forms) > 1:
        raise ConfigError(f"{name} of several forms cannot be saved: {', '.join(sorted(map(str, forms)))}")
    return np.stack(arrays)


def _unstack(rows: Array) -> list[Array]:
    return [rows[i, ...] for i in range(len(rows))]  # plain iteration would make scalars of what has no shape
