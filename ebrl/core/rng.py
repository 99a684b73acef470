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
    """Standard normal noise of one environment: a function of the decision's number, and of nothing else.

    There is no position that a request could advance: one that is cancelled, before its batch or in it, tried again,
    or answered without noise leaves that of all others as it is. Made in keyed blocks, since a generator per decision
    would cost more than the numbers. May be read by two lanes at once.

    Example:
        >>> noise = NoiseStream(0, 7)
        >>> late = noise.row(1000, 2)
        >>> bool((late == NoiseStream(0, 7).row(1000, 2)).all()), bool((late == noise.row(1001, 2)).all())
        (True, False)
    """

    __slots__ = ("_block", "_key", "_seed")

    BLOCK = 64

    def __init__(self, seed: int, *key: int) -> None:
        """Make a stream.

        Args:
            seed: Of the run.
            key: Of the environment, and of whom it asks.
        """
        self._seed = seed
        self._key = key
        self._block: tuple[int, NDArray[np.float32]] = (-1, np.empty((0, 0), np.float32))

    def row(self, index: int, size: int) -> NDArray[np.float32]:
        """Return the ``[size]`` float32 numbers of decision `index`; `size` is the same for all of one policy."""
        number, offset = index // self.BLOCK, index % self.BLOCK
        known, rows = self._block
        if number != known or rows.shape[1] != size:
            rows = stream(self._seed, Domain.NOISE, *self._key, number).standard_normal((self.BLOCK, size), np.float32)
            self._block = number, rows
        row: NDArray[np.float32] = rows[offset]
        return row
