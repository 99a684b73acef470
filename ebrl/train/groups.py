"""Groups of episodes that began alike: what each is worth within its group, and which groups are trained. Pure.

Source: GRPO is Shao et al. 2024 (arXiv:2402.03300). The deviation of the sample (G - 1), and groups filtered by their
success rate, bounds included, are those of SimpleVLA-RL (arXiv:2509.09674).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ebrl.core.errors import ConfigError
from ebrl.core.records import GroupRule, Segment
from ebrl.train.assemble import Dropped

logger = logging.getLogger("ebrl")

FUTILE = 100
"""Groups filtered in a row, after which a warning says that nothing is trained."""


def group_advantages(returns: Sequence[float]) -> NDArray[np.float64]:
    """Return ``(R - mean) / (std + 1e-6)``, with the deviation of the sample; zeros where all are equal.

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, 0.0]).round(4).tolist()
        [1.5, -0.5, -0.5, -0.5]

    Args:
        returns: ``[G]`` of all members of a group.
    """
    values = np.asarray(returns, np.float64)
    result: NDArray[np.float64] = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    return result


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
                    segment.advantage = float(advantage)
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
        rate = sum(known) / self._size
        wanted = low <= rate <= high
        if self._num_futile < FUTILE:
            self._num_futile = 0 if wanted else self._num_futile + 1
            self._warn(rate)
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
