"""Sequences: the decisions over which a policy with memory is unrolled.

A segment may hold decisions of several versions, and what a policy remembers was computed by the version that acted.
So a sequence ends where the segment ends and where the version changes, and long ones are cut, so that minibatches are
of one size. Each begins with the memory that was stored with its first decision. What older weights left in that memory
is data, as the observation is; from there on memory is computed anew, with gradients. At lag 0 the ratio is then 1,
wherever a segment was cut.

Prior art: the stored states of R2D2 (Kapturowski et al. 2019), and of recurrent PPO in Stable-Baselines3 contrib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebrl.core.records import Segment, num_decisions

Rows = NDArray[np.int64]


class Sequences:
    """Where the sequences of a rollout lie in its rows: B decisions, then the last observation of each of S segments.

    Args:
        segments: Their decisions are the rows, in this order.
        longest: Decisions of a sequence; longer ones are cut into parts that are about equal.
    """

    def __init__(self, segments: Sequence[Segment], longest: int) -> None:
        num = num_decisions(segments)
        self._first = np.zeros(num + len(segments), np.bool_)
        self._decisions: list[Rows] = []
        self._whole: list[Rows] = []  # with the last observation, where the segment ends with the sequence
        row = 0
        for number, segment in enumerate(segments):
            for _, run in groupby(segment.decisions, lambda decision: decision.version):
                length = sum(1 for _ in run)
                for rows in np.array_split(np.arange(row, row + length), -(-length // longest)):
                    self._first[rows[0]] = True
                    self._decisions.append(rows)
                    self._whole.append(rows)
                row += length
            self._whole[-1] = np.append(self._whole[-1], num + number)

    def minibatches(self, size: int, rng: np.random.Generator) -> list[Tensor]:
        """Return rows of decisions, about `size` each: every sequence is in one of them, whole.

        With sequences of at most half of `size`, each has more than half of an equal share, and at most one and a half.
        """
        return _join(self._decisions, rng.permutation(len(self._decisions)), size)

    def all_rows(self, size: int) -> list[Tensor]:
        """Return all rows, about `size` at a time, with each last observation behind the sequence that it follows."""
        return _join(self._whole, range(len(self._whole)), size)

    def lengths(self, rows: Tensor) -> list[int]:
        """Return how long each sequence is in rows that came from the methods above."""
        starts = np.flatnonzero(self._first[rows.cpu().numpy()])
        lengths: list[int] = np.diff(starts, append=len(rows)).tolist()
        return lengths


def deal(lengths: Sequence[int], order: Iterable[int], size: int) -> list[list[int]]:
    """Deal sequences out, each to the group that has the fewest rows so far.

    There are as many groups as with `size` rows in each, if there are as many sequences. They differ by no more rows
    than the longest sequence has.

    Args:
        lengths: Rows of each sequence.
        order: In which they are dealt out.
        size: Rows that a group should have.

    Returns:
        Numbers of sequences; no group is empty.

    Example:
        >>> deal([2, 1, 1, 2, 2], [0, 1, 2, 3, 4], 4)
        [[0, 3], [1, 2, 4]]
    """
    num_groups = min(len(lengths), max(1, sum(lengths) // size))
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    num_rows = [0] * num_groups
    for number in order:
        fewest = num_rows.index(min(num_rows))
        groups[fewest].append(number)
        num_rows[fewest] += lengths[number]
    return groups


def _join(rows: Sequence[Rows], order: Iterable[int], size: int) -> list[Tensor]:
    groups = deal([len(some) for some in rows], order, size)
    return [torch.from_numpy(np.concatenate([rows[number] for number in group])) for group in groups]
