"""Groups of episodes that began alike: what each is worth within its group, and which groups make a batch. Pure.

The arithmetic is in `ebrl.train.advantages`. A group is trained whole or not at all: whoever trains the decisions that
are there favours episodes that end early (finish-order bias).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ebrl.core.errors import ConfigError
from ebrl.core.records import GroupRule, Segment, TrainBatch, num_decisions
from ebrl.train.advantages import group_advantages, tells_apart
from ebrl.train.assemble import Dropped, place, without_interventions

logger = logging.getLogger("ebrl")

FUTILE = 100
"""Groups filtered in a row, after which a warning says that nothing is trained."""


class Groups:
    """Turns cohorts into segments that have an advantage."""

    def __init__(self, size: int, rule: GroupRule) -> None:
        """Make one.

        Args:
            size: G, members of a group.
            rule: Which groups are trained.
        """
        self._size = size
        self._rule = rule
        self._num_futile = 0  # in a row; stays at the limit once it was said
        self._told = False  # an episode has said whether it is a success

    def admit(self, segments: Sequence[Segment]) -> tuple[list[Segment], list[Dropped]]:
        """Give segments their advantages, and take out groups that the rule does not want.

        A member's return is the sum of the rewards of all its decisions, those that are not trained included. What came
        before the first one (`EnvContext.intervene`) is not in it: the policy has no part in that.

        Args:
            segments: All of each cohort, in any order.

        Returns:
            Segments to train, and what was ``filtered``.

        Raises:
            ConfigError: The rule asks for successes, and there was no word of any so far. Later an episode without one
                is none: a horizon has ended it, say, of an environment that tells only at an end of its own.
        """
        cohorts: dict[tuple[int, int], dict[int, list[Segment]]] = {}
        for segment in segments:
            members = cohorts.setdefault((segment.env // self._size, segment.decisions[0].episode), {})
            members.setdefault(segment.env, []).append(segment)
        kept: list[Segment] = []
        dropped: list[Dropped] = []
        for members in cohorts.values():
            assert len(members) == self._size, f"{len(members)} members of {self._size} are no group"
            returns = [_total_reward(parts) for parts in members.values()]
            wanted = self._wants([parts[0].success for parts in members.values()], returns)
            for parts, advantage in zip(members.values(), group_advantages(returns), strict=True):
                for segment in parts:
                    if wanted:
                        kept.append(replace(segment, advantage=advantage))
                    else:
                        dropped.append(Dropped(segment.env, "filtered", len(segment.decisions)))
        return kept, dropped

    def _wants(self, successes: Sequence[bool | None], returns: Sequence[float]) -> bool:
        rule = self._rule
        if rule.success_bounds is None:
            return True
        if rule.success_return is not None:
            successes = [total >= rule.success_return for total in returns]
        self._told = self._told or any(success is not None for success in successes)
        if not self._told:
            raise ConfigError(
                "success_bounds filter groups by their success rate, but the environments report no success in their "
                "info: say from which return an episode is one with success_return, or success_bounds=None"
            )
        low, high = rule.success_bounds
        succeeded = [bool(success) for success in successes]
        wanted = tells_apart(succeeded, lowest=low, highest=high)
        if self._num_futile < FUTILE:
            self._num_futile = 0 if wanted else self._num_futile + 1
            self._warn(sum(succeeded) / self._size)
        return wanted

    def _warn(self, rate: float) -> None:
        if self._num_futile == FUTILE and self._rule.success_bounds is not None:
            logger.warning(
                "%d groups in a row were filtered, the last with a success rate of %.2f, outside of %g .. %g: nothing "
                "is trained; begin with an easier task or a better policy, or set success_bounds=None",
                FUTILE, rate, *self._rule.success_bounds,
            )  # fmt: skip


class GroupAssembler:
    """Buffered groups: segments in, batches of whole groups out, of B decisions or more.

    The lag of a group is that of its oldest decision. A batch has the groups that could not wait for the next one, then
    the oldest others until it has B decisions. So no group that is here becomes too old: only those that come too late
    are dropped, with all of their decisions.
    """

    def __init__(self, batch_size: int, max_lag: int, group_size: int) -> None:
        """Make an assembler.

        Args:
            batch_size: B.
            max_lag: Versions that a trained decision may be behind.
            group_size: G.
        """
        self._batch_size = batch_size
        self._max_lag = max_lag
        self._group_size = group_size
        self._groups: dict[tuple[int, int], list[Segment]] = {}  # by group and episode, in order of arrival

    def __len__(self) -> int:
        return num_decisions(self.segments)

    @property
    def segments(self) -> list[Segment]:
        """What is buffered, in order."""
        return [segment for group in self._groups.values() for segment in group]

    def add(self, segment: Segment) -> list[Dropped]:
        """Buffer a segment, of which interventions are taken out; all of its group must come before the next `take`."""
        pieces, dropped = without_interventions(segment)
        for piece in pieces:
            key = piece.env // self._group_size, piece.decisions[0].episode
            self._groups.setdefault(key, []).append(piece)
        return dropped

    def take(self, version: int) -> tuple[TrainBatch | None, list[Dropped]]:
        """Drop groups that are too old for `version`, and return a batch if those that are left have B decisions.

        Returns:
            A batch, in the order of environments and time, or None; and what was dropped.
        """
        oldest = version - self._max_lag
        dropped = self._mask(oldest)
        if len(self) < self._batch_size:
            return None, dropped
        taken: list[Segment] = []
        for key in sorted(self._groups, key=lambda key: _oldest_version(self._groups[key])):
            group = self._groups[key]
            if num_decisions(taken) >= self._batch_size and _oldest_version(group) > oldest:
                break
            taken += self._groups.pop(key)
        return TrainBatch(sorted(taken, key=place), version), dropped

    def _mask(self, oldest: int) -> list[Dropped]:
        late = [key for key, group in self._groups.items() if _oldest_version(group) < oldest]
        lost = [segment for key in late for segment in self._groups.pop(key)]
        return [Dropped(segment.env, "masked", len(segment.decisions)) for segment in lost]


def _oldest_version(group: Sequence[Segment]) -> int:
    return min(segment.decisions[0].out.version for segment in group)  # versions grow within a segment


def _total_reward(parts: Sequence[Segment]) -> float:
    return float(sum(sum(decision.rewards) for segment in parts for decision in segment.decisions))
