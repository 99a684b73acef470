"""What a consumer keeps of a group of environments in a checkpoint, and gives back to the group that continues it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ebrl.core.admission import Ledger
from ebrl.core.records import Array, Episode, Observation, Segment


@dataclass(frozen=True, slots=True)
class SavedEpisode:
    """An episode that runs, told so that it can be run again up to the same point.

    Attributes:
        actions: ``[h, *action.shape]`` of each call that stepped the simulator.
        last_obs: What came of the last one, or of the reset; running again must end there.
        memory: ``[M]`` what the group's policy remembers; None at the start of the episode, and without memory.
        first_decision: Of the episode; see `ebrl.core.records.Decision.index`.
        num_steps: Simulator steps.
        total_reward: Of them.
        success: Whether one of them reported it.
        duration_s: Loop time that it has taken.
        reported: It was at its end, and counted as an episode; only its last decision was still in flight.
    """

    actions: list[Array]
    last_obs: Observation
    memory: Array | None
    first_decision: int
    num_steps: int
    total_reward: float
    success: bool | None
    duration_s: float
    reported: bool = False


@dataclass(frozen=True, slots=True)
class SavedEnv:
    """One environment.

    Attributes:
        episode: Number of the episode that began last; -1: none.
        num_decisions: Over all episodes.
        env_steps: Over all episodes.
        others: Of each further actor, in the order in which they were first asked: how often it was, in which episode
            last, and what it remembers of that.
        rng: State of the program's generator.
        running: The episode, where the group notes what is needed to run it again.
    """

    episode: int
    num_decisions: int
    env_steps: int
    others: tuple[tuple[int, int, Array | None], ...]
    rng: Mapping[str, Any]
    running: SavedEpisode | None


@dataclass(frozen=True, slots=True)
class SavedExperience:
    """A group at one moment. Holds references: records are never written to once they were handed on.

    Attributes:
        seed: Of the run; keys the seeds of episodes to come.
        tasks: Of each environment.
        ledger: As of the moment.
        ahead: Of each environment, decisions that were trained beyond its quota; zeros without quotas.
        segments: Finished, and not taken by the consumer yet.
        open: Of environments, not finished; cut for this record. None of groups, whose open ones are given up.
        episodes: Ended, and not reported yet.
        envs: In order.
        taken: Finished, taken by the consumer, and not trained yet; the consumer adds them.
    """

    seed: int
    tasks: list[str]
    ledger: Ledger
    ahead: list[int]
    segments: list[Segment]
    open: list[Segment]
    episodes: list[Episode]
    envs: list[SavedEnv]
    taken: list[Segment] = field(default_factory=list)

    @property
    def held(self) -> list[int]:
        """Decisions of each environment that are finished and not trained."""
        counts = [0] * len(self.envs)
        for segment in [*self.taken, *self.segments, *self.open]:
            counts[segment.env] += len(segment.decisions)
        return counts

    def settled(self, *, replay: bool) -> SavedExperience:
        """Return what a group goes on with; nothing is in flight in it.

        Args:
            replay: Run episodes again where that is possible: what was in flight is made again, and so was never
                started. Otherwise running ones are given up: their open segments end where they are, and bootstrap from
                what was seen last; what was in flight is lost.
        """
        ledger, dropped = self.ledger, Counter(self.ledger.dropped)
        envs = self.envs if replay else [replace(env, running=None) for env in self.envs]
        cut = [segment for segment in self.open if envs[segment.env].running is None]
        left = [segment for segment in self.open if envs[segment.env].running is not None]
        lost = ledger.in_flight if all(env.running is None for env in envs) else 0
        dropped["lost"] += lost
        dropped["incomplete"] += ledger.parked - _count(self.open)
        settled = Ledger(
            started=ledger.started - ledger.in_flight + lost,
            trained=ledger.trained,
            dropped={reason: num for reason, num in dropped.items() if num},
            buffered=ledger.buffered + _count(cut),
            parked=_count(left),
            in_flight=0,
            num_waiting=0,
        )
        return replace(self, ledger=settled, envs=envs, segments=[*self.segments, *cut], open=left)


def _count(segments: Iterable[Segment]) -> int:
    return sum(len(segment.decisions) for segment in segments)
