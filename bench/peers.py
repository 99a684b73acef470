"""Vector environments of other libraries on the same simulators and the same policy, in real time.

Each has a process per environment and one policy in the process that steps them. Gymnasium's `AsyncVectorEnv` steps in
lock-step and resets within a step. tianshou's `SubprocVectorEnv` returns what is ready once half of the environments
are, or after 5 ms: of the settings that were tried its best; a reset is a call that everything waits for.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeAlias

import gymnasium
import numpy as np
import torch

from bench.hardware import Conditions, Unit
from bench.real import Measured, Setting, Span
from bench.rig import UnitEnv, Work
from bench.runs import Job, load
from ebrl.core.errors import ConfigError

TIMEOUT_S = 0.005
Makers: TypeAlias = Sequence[Callable[[], UnitEnv]]
Generate: TypeAlias = Callable[[int], None]
Run: TypeAlias = Callable[[Job, Span, Setting], Measured]


class Peer(Protocol):
    """A vector environment with its policy."""

    def turn(self) -> int:
        """Act once and step; return how many environments have stepped."""

    def close(self) -> None:
        """End its processes."""


class Gymnasium:
    """All act, all step, all wait."""

    def __init__(self, makers: Makers, generate: Generate) -> None:
        vector = gymnasium.vector
        self._envs = vector.AsyncVectorEnv(
            makers, shared_memory=True, context="fork", autoreset_mode=vector.AutoresetMode.SAME_STEP
        )
        self._generate = generate
        self._actions = np.zeros((len(makers), 1), np.float32)
        self._envs.reset()

    def turn(self) -> int:
        self._generate(len(self._actions))
        self._envs.step(self._actions)
        return len(self._actions)

    def close(self) -> None:
        self._envs.close()


class Tianshou:
    """Those that are ready act and step."""

    def __init__(self, makers: Makers, generate: Generate) -> None:
        from tianshou.env import SubprocVectorEnv

        self._envs = SubprocVectorEnv(makers, wait_num=max(1, len(makers) // 2), timeout=TIMEOUT_S, context="fork")
        self._generate = generate
        self._actions = np.zeros((len(makers), 1), np.float32)
        self._ready = np.arange(len(makers))
        self._envs.reset()

    def turn(self) -> int:
        self._generate(len(self._ready))
        _, _, terminated, truncated, infos = self._envs.step(self._actions[self._ready], self._ready)
        self._ready = np.array([info["env_id"] for info in infos])
        ended = self._ready[np.logical_or(terminated, truncated)]
        if len(ended):
            self._envs.reset(ended)  # there is no other way: it waits for them
        return len(self._ready)

    def close(self) -> None:
        self._envs.close()


PEERS: Mapping[str, Callable[[Makers, Generate], Peer]] = {"gymnasium": Gymnasium, "tianshou": Tianshou}


def require() -> None:
    """Look whether all are there, before a long run.

    Raises:
        ConfigError: One is not installed.
    """
    if importlib.util.find_spec("tianshou") is None:
        raise ConfigError("tianshou, which EBRL is compared with, is not installed: pip install 'ebrl[bench]'")


@contextmanager
def running() -> Iterator[Run]:
    """Give a function that measures a peer in a process of its own.

    The process starts afresh and has one thread: forking a process that has more is not safe.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        def measure(job: Job, span: Span, setting: Setting) -> Measured:
            return pool.submit(run, job, span, setting).result()

        yield measure


def run(job: Job, span: Span, setting: Setting) -> Measured:
    """Measure the peer that a job names as its scheduler."""
    torch.set_num_threads(1)
    conditions, work = Conditions(load(job)), setting.work()
    makers = [partial(make, conditions, index, job.seed, work) for index in range(conditions.workload.num_units)]
    peer = PEERS[job.scheduler](makers, partial(work.generate, conditions))
    try:
        _turns(peer, span.warmup_s)
        return _turns(peer, span.seconds)
    finally:
        peer.close()


def make(conditions: Conditions, index: int, seed: int, work: Work) -> UnitEnv:
    """Make an environment, in the process that will step it."""
    return UnitEnv(Unit(conditions, index, seed), work)


def _turns(peer: Peer, seconds: float) -> Measured:
    began_s = time.perf_counter()
    steps = turns = 0
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        steps += peer.turn()
        turns += 1
    return Measured(steps / elapsed_s, steps / max(turns, 1))
