"""Keyed random streams: what is drawn depends on who draws, never on when.

``SeedSequence(seed, spawn_key=(domain, env, ...))`` gives independent streams that stay the same when
environments are added, lanes change or batches differ.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


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
