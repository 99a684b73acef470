"""`evaluate`: how good a policy is, on a fixed list of seeds.

Every episode that starts counts. Counting those that finish first turned a true success rate of 0.50 into 0.91 when
successes are quick.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ebrl.core.errors import ConfigError
from ebrl.core.records import Episode, by_task, mean_return, success_rate


class EpisodeRunner(Protocol):
    """Runs one episode per seed and task; `ebrl.EnvGroup` is one."""

    async def run_episodes(self, seeds: Iterable[int]) -> list[Episode]:
        """Return the episodes in the order of the seeds, and for each seed in the order of tasks."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """What came of an evaluation.

    Attributes:
        episodes: In the order of the seeds; of several tasks, all episodes of the first seed come first.
    """

    episodes: tuple[Episode, ...]

    @property
    def mean_return(self) -> float:
        """Undiscounted, per episode."""
        return mean_return(self.episodes)

    @property
    def success_rate(self) -> float:
        """Share of episodes in which success was reported at any step; NaN if it never is."""
        return success_rate(self.episodes)

    @property
    def success_interval(self) -> tuple[float, float]:
        """95 % Wilson interval of `success_rate`."""
        known = sum(episode.success is not None for episode in self.episodes)
        return wilson(self.success_rate, known) if known else (math.nan, math.nan)

    @property
    def task_returns(self) -> dict[str, float]:
        """`mean_return` of every task."""
        return {task: mean_return(part) for task, part in by_task(self.episodes).items()}

    @property
    def task_success_rates(self) -> dict[str, float]:
        """`success_rate` of every task."""
        return {task: success_rate(part) for task, part in by_task(self.episodes).items()}

    def describe(self) -> str:
        """Return one line."""
        text = f"return {self.mean_return:.2f}"
        if not math.isnan(self.success_rate):
            low, high = self.success_interval
            text += f", success {self.success_rate:.0%} [{low:.0%}, {high:.0%}]"
        return f"{text} over {len(self.episodes)} episodes"


async def evaluate(envs: EpisodeRunner, seeds: Iterable[int]) -> EvalReport:
    """Run one episode per seed, and task if there are several, and report on all of them.

    Args:
        envs: A started `EnvGroup` that is not used for training, usually with a ``Generator(deterministic=True)`` of
            its own. That acts with the weights it was made with until it is given others: while a run trains,
            ``await gen.publish(policy)`` first.
        seeds: One per episode; the same list gives the same starts. Every task runs all of them, so that who is fast
            has no influence on what is counted. Two evaluations of the same weights are equal with a deterministic
            generator, but for ``duration_s``; one that samples draws for each episode what the environment has that
            happens to run it.

    Raises:
        ConfigError: There is no seed, or one is out of range; the group is none, or used for training.
        Closed: The group was not started, or has ended.
    """
    if not callable(getattr(envs, "run_episodes", None)):
        raise ConfigError(f"evaluate runs the environments of a started EnvGroup, got {reprlib.repr(envs)}")
    if isinstance(seeds, int):
        raise ConfigError(f"evaluate takes the seeds of its episodes, not their number: give range({seeds})")
    if not isinstance(seeds, Iterable):
        raise ConfigError(f"evaluate takes the seeds of its episodes, range(20) say, got {reprlib.repr(seeds)}")
    chosen = list(seeds)
    if not chosen:
        raise ConfigError("evaluate needs at least one seed: give range(20), say")
    return EvalReport(tuple(await envs.run_episodes(chosen)))


def wilson(rate: float, num: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a rate over `num` trials (E. B. Wilson, 1927).

    Example:
        >>> low, high = wilson(0.95, 100)
        >>> round(low, 3), round(high, 3)
        (0.888, 0.978)
    """
    centre = rate + z * z / (2 * num)
    spread = z * math.sqrt(rate * (1 - rate) / num + z * z / (4 * num * num))
    scale = 1 + z * z / num
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
