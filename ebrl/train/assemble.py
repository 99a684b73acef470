"""`Assembler`: segments in, batches of exactly B decisions out. Pure: no clock, no loop, no randomness.

The lag of a decision is the learner's version when its batch is taken minus the version that acted. Three rules
together bound it, and none does alone:

- **order**: batches take the oldest versions first, decision by decision;
- **cut**: with each batch, open segments that could not wait for the next are cut (`EnvGroup.take_segments`);
- **mask**: what is too old all the same is dropped here, decision by decision.

Segments are split so that a batch has exactly B: with whole segments, the credit of admission and the size of
batches would drift apart until nobody may start. Every dropped decision is reported with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ebrl.core.records import Decision, Segment, TrainBatch


@dataclass(frozen=True, slots=True)
class Dropped:
    """Decisions of one environment that will not be trained."""

    env: int
    reason: Literal["masked", "intervention", "lost", "filtered"]
    num: int


class Assembler:
    """Buffered segments of one group."""

    def __init__(self, batch_size: int, max_lag: int, *, canonical: bool = False) -> None:
        """Make an assembler.

        Args:
            batch_size: B.
            max_lag: Versions that a trained decision may be behind.
            canonical: Sort every batch by environment, episode and decision, so that its order does not depend on
                who was first (deterministic mode).
        """
        self._batch_size = batch_size
        self._max_lag = max_lag
        self._canonical = canonical
        self._segments: list[Segment] = []
        self._num_decisions = 0
        self._num_fresh = 0  # segments that are young enough for the version of the last `take`
        self._version = -1

    def __len__(self) -> int:
        return self._num_decisions

    @property
    def segments(self) -> list[Segment]:
        """What is buffered, in order."""
        return list(self._segments)

    def add(self, segment: Segment) -> list[Dropped]:
        """Buffer a segment; interventions are taken out, and what is around them becomes segments of its own."""
        pieces = split_at(segment, lambda decision: decision.intervened)
        for piece in pieces:
            self._segments.append(piece)
            self._num_decisions += len(piece.decisions)
        lost = len(segment.decisions) - sum(len(piece.decisions) for piece in pieces)
        return [Dropped(segment.env, "intervention", lost)] if lost else []

    def take(self, version: int) -> tuple[TrainBatch | None, list[Dropped]]:
        """Drop what is too old for `version`, and return a batch if B decisions are left.

        Returns:
            A batch or None, and what was dropped.
        """
        dropped = self._mask(version)
        if self._num_decisions < self._batch_size:
            return None, dropped
        if self._canonical:
            self._segments.sort(key=_place)
        else:
            self._segments.sort(key=_oldest)  # stable: segments of one environment stay in order
        return TrainBatch(self._take_exactly(self._batch_size), version), dropped

    def _take_exactly(self, num: int) -> list[Segment]:
        self._num_decisions -= num
        taken: list[Segment] = []
        rest: list[Segment] = []
        shares = self._shares(num)
        for segment, share in zip(self._segments, shares, strict=True):
            if share == len(segment.decisions):
                taken.append(segment)
            elif share:
                head, tail = cut_after(segment, share)
                taken.append(head)
                rest.append(tail)
            else:
                rest.append(segment)
        self._segments = rest
        self._num_fresh = len(rest)
        return taken

    def _shares(self, num: int) -> list[int]:
        """Return how many decisions each segment gives: all of the oldest versions, then of the first segments."""
        counts: Counter[int] = Counter()
        for segment in self._segments:
            first, last = _versions(segment)
            if first == last:
                counts[first] += len(segment.decisions)
            else:
                counts.update(decision.out.version for decision in segment.decisions)
        newest, left = 0, num
        for newest in sorted(counts):  # ends at the version of the youngest decision that is taken
            if counts[newest] >= left:
                break
            left -= counts[newest]
        shares = []
        for segment in self._segments:
            older, not_newer = _num_below(segment, newest), _num_below(segment, newest + 1)
            more = min(left, not_newer - older)
            left -= more
            shares.append(older + more)
        return shares

    def _mask(self, version: int) -> list[Dropped]:
        oldest = version - self._max_lag
        dropped: list[Dropped] = []
        num_fresh = self._num_fresh if version == self._version else 0
        kept = self._segments[:num_fresh]
        for segment in self._segments[num_fresh:]:
            if segment.decisions[0].out.version >= oldest:  # versions grow within a segment
                kept.append(segment)
                continue
            pieces = split_at(segment, lambda decision: decision.out.version < oldest)
            num = len(segment.decisions) - sum(len(piece.decisions) for piece in pieces)
            dropped.append(Dropped(segment.env, "masked", num))
            self._num_decisions -= num
            kept.extend(pieces)
        self._segments = kept
        self._num_fresh, self._version = len(kept), version
        return dropped


def cut_after(segment: Segment, num: int) -> tuple[Segment, Segment]:
    """Split into the first `num` decisions, which bootstrap from the observation that follows, and the rest."""
    head, tail = segment.decisions[:num], segment.decisions[num:]
    return replace(segment, decisions=head, last_obs=tail[0].obs, reason="split"), replace(segment, decisions=tail)


def split_at(segment: Segment, unwanted: Callable[[Decision], bool]) -> list[Segment]:
    """Return the runs of wanted decisions; each bootstraps from the observation that follows it."""
    flags = [unwanted(decision) for decision in segment.decisions]
    if not any(flags):
        return [segment]
    pieces: list[Segment] = []
    run: list[Decision] = []
    for decision, flag in zip(segment.decisions, flags, strict=True):
        if not flag:
            run.append(decision)
        elif run:
            pieces.append(replace(segment, decisions=run, last_obs=decision.obs, reason="split"))
            run = []
    if run:
        pieces.append(replace(segment, decisions=run))
    return pieces


def _oldest(segment: Segment) -> int:
    return segment.decisions[0].out.version


def _versions(segment: Segment) -> tuple[int, int]:
    """Return the oldest and the newest version; they grow within a segment."""
    return segment.decisions[0].out.version, segment.decisions[-1].out.version


def _num_below(segment: Segment, version: int) -> int:
    """Return how many decisions are older than `version`."""
    oldest, newest = _versions(segment)
    if newest < version:
        return len(segment.decisions)
    return sum(decision.out.version < version for decision in segment.decisions) if oldest < version else 0


def _place(segment: Segment) -> tuple[int, int, int]:
    first = segment.decisions[0]
    return first.env, first.episode, first.index
