"""What a consumer keeps of a group of environments in a checkpoint, and gives back to the group that continues it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ebrl.core.admission import Ledger
from ebrl.core.records import Array, Episode, Observation, Segment, num_decisions

Others: TypeAlias = Mapping[str, tuple[int, int, Array | None]]
"""Of each further actor, by name: how often it was asked, in which episode last, and what it remembers of that."""


@dataclass(frozen=True, slots=True)
class SavedEpisode:
    """An episode that runs, told so that it can be run again up to the observation that its program saw last.

    Where a decision is in flight that is the one before it, and `rng` and `others` are those with which it began: what
    a program draws and asks before it decides, it draws and asks again. What it does of that after a step, it does not;
    so whoever goes on has these from its first decision on.

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
        called: The program has called the simulator in it, so that actions alone do not lead to the same point.
        dropped: Why decisions that began after that observation have ended; they are made again, too.
        rng: State of the program's generator when the decision in flight began; None if there was none.
        others: Likewise, what further actors were asked.
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
    called: bool = False
    dropped: list[str] = field(default_factory=list)
    rng: Mapping[str, Any] | None = None
    others: Others = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedEnv:
    """One environment.

    Attributes:
        episode: Number of the episode that began last; -1: none.
        num_decisions: Over all episodes.
        env_steps: Over all episodes.
        others: What further actors were asked.
        rng: State of the program's generator.
        running: The episode, where the group notes what is needed to run it again; then all is as of its moment.
        in_flight: Whether a decision was.
    """

    episode: int
    num_decisions: int
    env_steps: int
    others: Others
    rng: Mapping[str, Any]
    running: SavedEpisode | None
    in_flight: bool = False

    def settled(self, *, replay: bool) -> SavedEnv:
        """Return it without its decision in flight, and without an episode that is not or cannot be run again."""
        again = replay and self.running is not None and not self.running.called
        return replace(self, running=self.running if again else None, in_flight=False)


@dataclass(frozen=True, slots=True)
class SavedExperience:
    """A group at one moment. Holds references: records are never written to once they were handed on.

    Attributes:
        seed: Of the run; keys the seeds of episodes to come.
        name: Of the group; likewise.
        ids: Of each environment's spec.
        tasks: Of each environment.
        group_size: Environments that run the same episodes.
        compared: Whether the consumer takes the episodes of whole groups.
        ledger: As of the moment.
        ahead: Of each environment, decisions that were trained beyond its quota; zeros without quotas.
        segments: Finished, and not taken by the consumer yet.
        open: Of environments, not finished; cut for this record. None of groups, whose open ones are given up.
        episodes: Ended, and not reported yet.
        envs: In order.
        taken: Finished, taken by the consumer, and not trained yet; the consumer adds them.
    """

    seed: int
    name: str
    ids: list[str]
    tasks: list[str]
    group_size: int
    compared: bool
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
                started. The other running ones are given up: their open segments end where they are, and bootstrap from
                what was seen last; what was in flight is lost.
        """
        ledger, dropped = self.ledger, Counter(self.ledger.dropped)
        envs = [env.settled(replay=replay) for env in self.envs]
        cut = [segment for segment in self.open if envs[segment.env].running is None]
        left = [segment for segment in self.open if envs[segment.env].running is not None]
        lost = sum(before.in_flight and env.running is None for before, env in zip(self.envs, envs, strict=True))
        again = [reason for env in envs if env.running is not None for reason in env.running.dropped]
        dropped["lost"] += lost
        dropped.subtract(again)
        dropped["incomplete"] += ledger.parked - num_decisions(self.open)
        settled = Ledger(
            started=ledger.started - ledger.in_flight + lost - len(again),
            trained=ledger.trained,
            dropped={reason: num for reason, num in dropped.items() if num},
            buffered=ledger.buffered + num_decisions(cut),
            parked=num_decisions(left),
            in_flight=0,
            num_waiting=0,
        )
        return replace(self, ledger=settled, envs=envs, segments=[*self.segments, *cut], open=left)
