"""Keyed random streams: what is drawn depends on who draws, never on when.

``SeedSequence(seed, spawn_key=(domain, env, ...))`` gives independent streams that stay the same when
environments are added, lanes change or batches differ.
"""

from __future__ import annotations

import zlib
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Domain(IntEnum):
    """First key of a stream. The numbers are part of reproducibility: append, never renumber."""

    ENV = 0
    NOISE = 1
    LATENCY = 2
    LEARNER = 3
    EVAL = 4
    PROGRAM = 5


def stream(seed: int, domain: Domain, *key: int) -> np.random.Generator:
    """Return the generator of one domain and key.

    Args:
        seed: Of the run.
        domain: What it is for.
        key: For example the environment's index.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(domain), *key)))


def episode_seed(seed: int, env: int, episode: int) -> int:
    """Return the seed (below 2**31) with which episode `episode` of environment `env` is reset."""
    state = np.random.SeedSequence(seed, spawn_key=(int(Domain.ENV), env, episode)).generate_state(1)
    return int(state[0] >> 1)


def name_key(name: str) -> int:
    """Return a key for a named service, so that two groups of environments have different streams."""
    return zlib.crc32(name.encode())


class NoiseStream:
    """Standard normal noise of one environment: its k-th decision sees the same numbers whenever it is made.

    Drawn in blocks, since one call of numpy costs more than the numbers.
    """

    __slots__ = ("_block", "_next", "_rng", "_size")

    BLOCK = 64

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._size = 0
        self._block: NDArray[np.float32] = np.empty((self.BLOCK, 0), np.float32)
        self._next = 0

    def draw(self, size: int) -> NDArray[np.float32]:
        """Return the next ``[size]`` float32 numbers; `size` is the same for all decisions of one policy."""
        number = self._next
        if number == self.BLOCK or size != self._size:
            self._block = self._rng.standard_normal((self.BLOCK, size), np.float32)
            self._size, number = size, 0
        self._next = number + 1
        row: NDArray[np.float32] = self._block[number]
        return row
