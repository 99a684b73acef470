"""Builders with defaults, so that a test shows only what it is about."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from ebrl.core.admission import Ledger
from ebrl.core.protocols import GroupLearner, Machine, PolicyOut
from ebrl.core.records import (
    ActionOut,
    Array,
    ArraySpec,
    BatchOut,
    Decision,
    EnvSpec,
    GroupRule,
    Observation,
    Reason,
    Segment,
    TrainBatch,
)
from ebrl.core.runtime import Runtime
from ebrl.core.trace import Trace
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.batcher import Batcher
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.group import EnvGroup, EnvProgram
from ebrl.train.sampling import Sampling
from ebrl.train.trainer import Trainer

T = TypeVar("T")
PATIENT = FailurePolicy(build_s=None, reset_s=None, call_s=None)  # for laws with which a call may take for ever
ROOT = Path(__file__).resolve().parents[1]
STEP_S = 1.0


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
        rewards=tuple(rewards),
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


def scripted_spec(
    *,
    obs_dim: int = 3,
    action_dim: int = 2,
    num_actions: int | None = None,
    horizon: int | None = None,
    task: str = "",
    make: Callable[[], Any] | None = None,
    **options: Any,
) -> EnvSpec:
    """Return the description of a `ScriptedEnv`; `options` are its own, `make` replaces it."""
    action = (
        ArraySpec((action_dim,), "float32", np.full(action_dim, -1.0), np.full(action_dim, 1.0))
        if num_actions is None
        else ArraySpec((), "int64", num_values=num_actions)
    )
    env = functools.partial(ScriptedEnv, obs_dim, action_dim, num_actions=num_actions, **options)
    return EnvSpec("scripted", make or env, ArraySpec((obs_dim,), "float32"), action, horizon, 1, task)


class VersionedPolicy(ScriptedPolicy):
    """Its log-probability is its version at the time of acting."""

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        out.log_prob = out.log_prob.clone()  # not a view of the weight
        return out


class RecordingLearner:
    """Keeps its batches, and makes the policy's one weight the number of updates."""

    def __init__(self, policy: ScriptedPolicy, batch_size: int) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.batches: list[TrainBatch] = []

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        num = len(batch.decisions)
        assert num >= self.batch_size if isinstance(self, GroupLearner) else num == self.batch_size
        self.batches.append(batch)
        with torch.no_grad():
            self.policy.weight.add_(1.0)
        return {}

    @property
    def decisions(self) -> list[Decision]:
        """All that were trained, in the order of consumption."""
        return [decision for batch in self.batches for decision in batch.decisions]


class ComparingLearner(RecordingLearner):
    """Asks for groups."""

    groups = GroupRule()


@dataclass
class Stage:
    """A pipeline that runs."""

    runtime: Runtime
    gen: Generator
    envs: EnvGroup
    trainer: Trainer
    learner: RecordingLearner


@asynccontextmanager
async def training(
    spec: EnvSpec | Sequence[EnvSpec],
    machine: Machine | None = None,
    *,
    count: int = 4,
    batch_size: int = 8,
    updates: int = 4,
    max_lag: int = 1,
    sampling: Sampling | None = None,
    horizon: int = 1,
    seed: int = 0,
    gen_lanes: int = 1,
    batcher: Batcher | None = None,
    trace: Trace | None = None,
    rule: GroupRule | None = None,
    deterministic: bool = False,
    **group: Any,
) -> AsyncIterator[Stage]:
    """Start everything, by default on a machine on which nothing takes time; `group` goes to `EnvGroup`."""
    first = spec if isinstance(spec, EnvSpec) else spec[0]
    policy = VersionedPolicy(first, horizon=horizon)
    learner = RecordingLearner(policy, batch_size)
    if rule is not None:
        learner = ComparingLearner(policy, batch_size)
        learner.groups = rule
    machine = machine or VirtualMachine({})
    async with Runtime(machine, seed=seed, trace=trace, deterministic=deterministic) as rt:
        gen = rt.start(Generator(learner.policy, lanes=gen_lanes, batcher=batcher))
        envs = rt.start(EnvGroup(spec, actor=gen, count=count, **group))
        trainer = rt.start(Trainer(envs, learner, updates=updates, max_lag=max_lag, sampling=sampling))
        yield Stage(rt, gen, envs, trainer, learner)


@asynccontextmanager
async def recording(
    program: EnvProgram,
    *,
    spec: EnvSpec | Sequence[EnvSpec] | None = None,
    count: int = 1,
    horizon: int = 1,
    batch_size: int = 100,
    machine: Machine | None = None,
    seed: int = 0,
    **group: Any,
) -> AsyncIterator[EnvGroup]:
    """Run a program with a consumer that takes segments by hand and trains nothing."""
    spec = spec or scripted_spec(length=4)
    first = spec if isinstance(spec, EnvSpec) else spec[0]
    machine = machine or VirtualMachine({"sim": lambda n, rng: STEP_S})
    async with Runtime(machine, seed=seed) as rt:
        gen = rt.start(Generator(ScriptedPolicy(first, horizon=horizon)))
        envs = rt.start(EnvGroup(spec, actor=gen, count=count, program=program, **group))
        envs.open_training(batch_size, max_lag=1)
        yield envs


async def take(envs: EnvGroup, num: int) -> list[Segment]:
    """Return the first `num` segments; the ledger is checked on the way."""
    segments: list[Segment] = []
    while len(segments) < num:
        segments += await next_segments(envs)
        assert_sound(envs.admission.ledger())
    return segments[:num]


async def next_segments(envs: EnvGroup) -> list[Segment]:
    """Return the next segments that end by themselves; a trainer would have them cut."""
    while not (segments := envs.take_segments()):  # noqa: ASYNC110 - nothing in the library tells
        await asyncio.sleep(0.001)
    return segments


def assert_sound(ledger: Ledger) -> None:
    assert ledger.balanced, ledger
    places = (ledger.started, ledger.trained, ledger.buffered, ledger.parked, ledger.in_flight)
    assert min(places) >= 0, ledger


def the_failure(main: Coroutine[Any, Any, Any]) -> BaseException:
    """Run a program that must fail in virtual time, and return the one error that it ends with."""
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main)
    (error,) = leaves(caught.value)
    return error


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what is inside an exception group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
