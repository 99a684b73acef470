"""Builders with defaults, so that a test shows only what it is about."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ebrl.core.records import (
    ActionOut,
    Array,
    ArraySpec,
    BatchOut,
    Decision,
    EnvSpec,
    Observation,
    Reason,
    Segment,
    TrainBatch,
)
from ebrl.core.virtual import run_virtual

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]


def make_batch_out(
    num_rows: int = 1,
    *,
    horizon: int = 1,
    action_shape: tuple[int, ...] = (2,),
    log_prob: float = -1.0,
    value: float | Sequence[float] = 0.0,
    aux: dict[str, Array] | None = None,
) -> BatchOut:
    """Return one batch of generation; row ``i`` acts with the constant ``i``."""
    rows = np.arange(num_rows, dtype=np.float32)
    column = rows.reshape(-1, *[1] * (1 + len(action_shape)))
    action = np.broadcast_to(column, (num_rows, horizon, *action_shape)).copy()
    size = int(np.prod(action_shape, dtype=np.int64))
    return BatchOut(
        action=action,
        log_prob=np.full((num_rows, horizon, size), log_prob, np.float32),
        value=np.broadcast_to(np.asarray(value, np.float32), (num_rows,)).copy(),
        aux=aux if aux is not None else {"raw": action.reshape(num_rows, horizon, size).copy()},
    )


def make_action_out(version: int = 0, **kwargs: Any) -> ActionOut:
    """Return the only row of `make_batch_out`."""
    batch = make_batch_out(1, **kwargs)
    return ActionOut(action=batch.action[0], version=version, batch=batch, row=0)


def make_decision(
    env: int = 0,
    index: int = 0,
    *,
    episode: int = 0,
    version: int = 0,
    rewards: Sequence[float] = (1.0,),
    terminated: bool = False,
    truncated: bool = False,
    intervened: bool = False,
    obs: Observation | None = None,
    out: ActionOut | None = None,
    **kwargs: Any,
) -> Decision:
    """Return a finished decision; `kwargs` go to `make_batch_out`."""
    return Decision(
        env=env,
        episode=episode,
        index=index,
        obs=obs if obs is not None else np.full(3, index, np.float32),
        out=out if out is not None else make_action_out(version, **kwargs),
        rewards=list(rewards),
        num_steps=len(rewards),
        terminated=terminated,
        truncated=truncated,
        intervened=intervened,
    )


def make_segment(
    length: int = 4,
    *,
    env: int = 0,
    first: int = 0,
    episode: int = 0,
    version: int | Sequence[int] = 0,
    rewards: Sequence[float] = (1.0,),
    end: str = "",
    reason: Reason | None = None,
    task: str = "",
    last_obs: Observation | None = None,
    decisions: list[Decision] | None = None,
    **kwargs: Any,
) -> Segment:
    """Return consecutive decisions of one environment.

    Args:
        length: Decisions.
        env: Whose.
        first: Index of the first one.
        episode: They belong to.
        version: Of all, or of each.
        rewards: Of every decision.
        end: ``"terminated"`` or ``"truncated"``: how the last one ended.
        reason: Default: ``"end"`` where the episode ended, else ``"full"``.
        task: Of the environment.
        last_obs: Default: the index that would come next.
        decisions: Instead of those made from the other arguments.
        kwargs: For `make_decision`.
    """
    versions = [version] * length if isinstance(version, int) else list(version)
    if decisions is None:
        decisions = [
            make_decision(env, first + i, episode=episode, version=versions[i], rewards=rewards, **kwargs)
            for i in range(length)
        ]
        decisions[-1].terminated = end == "terminated"
        decisions[-1].truncated = end == "truncated"
    return Segment(
        env=env,
        task=task,
        decisions=decisions,
        last_obs=last_obs if last_obs is not None else np.full(3, first + len(decisions), np.float32),
        reason=reason or ("end" if end else "full"),
    )


def make_batch(num_envs: int = 2, length: int = 4, *, version: int = 0, **kwargs: Any) -> TrainBatch:
    """Return a batch of one segment per environment; `kwargs` go to `make_segment`."""
    return TrainBatch([make_segment(length, env=env, **kwargs) for env in range(num_envs)], version)


def make_spec(make: Callable[[], Any], **kwargs: Any) -> EnvSpec:
    """Return the description of a simulator with three numbers to see and two to move."""
    defaults: dict[str, Any] = {
        "id": "test",
        "observation": ArraySpec((3,), "float32"),
        "action": ArraySpec((2,), "float32", np.full(2, -1.0), np.full(2, 1.0)),
    }
    return EnvSpec(make=make, **{**defaults, **kwargs})


def virtually(test: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], T]:
    """Turn a coroutine function into a test that runs in virtual time."""

    def wrapper() -> T:
        return run_virtual(test())

    wrapper.__name__ = test.__name__
    wrapper.__doc__ = test.__doc__
    return wrapper


def run_python(code: str, *, timeout_s: float = 50.0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that finds the library."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
