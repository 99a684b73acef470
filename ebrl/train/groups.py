"""Groups of episodes that began alike: what each is worth within its group, and which groups are trained. Pure.

The arithmetic is in `ebrl.train.advantages`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ebrl.core.errors import ConfigError
from ebrl.core.records import GroupRule, Segment
from ebrl.train.advantages import group_advantages, tells_apart
from ebrl.train.assemble import Dropped

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

    def admit(self, segments: Sequence[Segment]) -> tuple[list[Segment], list[Dropped]]:
        """Write advantages, and take out groups that the rule does not want.

        A member's return is the sum of the rewards of all its decisions, those that are not trained included.

        Args:
            segments: All of each cohort, in any order.

        Returns:
            Segments to train, and what was ``filtered``.

        Raises:
            ConfigError: The rule asks for successes, and there is no word of any.
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
                    segment.advantage = advantage
                    if wanted:
                        kept.append(segment)
                    else:
                        dropped.append(Dropped(segment.env, "filtered", len(segment.decisions)))
        return kept, dropped

    def _wants(self, successes: Sequence[bool | None], returns: Sequence[float]) -> bool:
        rule = self._rule
        if rule.success_bounds is None:
            return True
        if rule.success_return is not None:
            successes = [total >= rule.success_return for total in returns]
        known = [success for success in successes if success is not None]
        if len(known) < len(successes):
            raise ConfigError(
                "success_bounds filter groups by their success rate, but the environments report no success in their "
                "info: say from which return an episode is one with success_return, or success_bounds=None"
            )
        low, high = rule.success_bounds
        wanted = tells_apart(known, lowest=low, highest=high)
        if self._num_futile < FUTILE:
            self._num_futile = 0 if wanted else self._num_futile + 1
            self._warn(sum(known) / self._size)
        return wanted

    def _warn(self, rate: float) -> None:
        if self._num_futile == FUTILE and self._rule.success_bounds is not None:
            logger.warning(
                "%d groups in a row were filtered, the last with a success rate of %.2f, outside of %g .. %g: nothing "
                "is trained; begin with an easier task or a better policy, or set success_bounds=None",
                FUTILE, rate, *self._rule.success_bounds,
            )  # fmt: skip


def _total_reward(parts: Sequence[Segment]) -> float:
    return float(sum(sum(decision.rewards) for segment in parts for decision in segment.decisions))
