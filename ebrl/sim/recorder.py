"""`Recorder`: turns what one environment does into decisions and segments, and books each of them in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ebrl.core.admission import Admission, Drop
from ebrl.core.records import ActionOut, Array, Decision, Observation, Reason, Segment, same
from ebrl.sim.border import as_reward

if TYPE_CHECKING:
    from ebrl.sim.resume import EpisodeLog


class Recorder:
    """Decisions and the open segment of one environment.

    A decision is ``current`` from the policy's answer until the observation that follows its outcome is known: the
    next `act`, or the end of the episode. Then it joins the open segment, which bootstraps from that observation.
    In an evaluation (no admission) decisions are followed but not kept.
    """

    __slots__ = (
        "_last_obs",
        "_num_decisions",
        "_open",
        "action_repeat",
        "admission",
        "altered",
        "current",
        "emit",
        "env",
        "foreign",
        "log",
        "place",
        "seen",
        "segment_length",
        "task",
    )

    def __init__(
        self, env: int, task: str, action_repeat: int, segment_length: int, emit: Callable[[Segment], None]
    ) -> None:
        """Make a recorder.

        Args:
            env: Index of its environment.
            task: Of its environment.
            action_repeat: Simulator steps for which each action is applied.
            segment_length: Decisions after which a segment is cut.
            emit: Takes finished segments; their decisions are parked still.
        """
        self.env = env
        self.task = task
        self.admission: Admission | None = None
        self.action_repeat = action_repeat
        self.segment_length = segment_length
        self.current: Decision | None = None
        self.log: EpisodeLog | None = None  # kept where episodes can be run again
        self.foreign = False  # a step that counts had an action that is none of the chunk's
        self.altered = False  # the policy was shown something else than what the simulator had shown
        self.seen: Observation = {}  # in the running episode, last; never written to
        self.place = 0  # index of the decision that was started last
        self.emit = emit
        self._open: list[Decision] = []
        self._last_obs: Observation = {}
        self._num_decisions = 0

    @property
    def num_decisions(self) -> int:
        """Decisions so far, over all episodes; also those that were cancelled before their answer."""
        return self._num_decisions

    @property
    def oldest_version(self) -> int | None:
        """Of the decisions in the open segment; None if it is empty."""
        return self._open[0].out.version if self._open else None

    def must_wait(self, obs: Observation) -> bool:
        """Close the decision before `obs` and start one; return whether its credit has to be waited for."""
        decision, admission = self.current, self.admission
        self.place = self._num_decisions
        if admission is None:
            self.current = None
            return False
        if decision is None or not decision.num_steps or len(self._open) + 1 >= self.segment_length:
            self.park(obs)
            may_start = admission.try_start(self.env)
        else:
            self.current = None  # as in park(), with one call for both
            self._last_obs = obs
            self._open.append(decision)
            may_start = admission.next(self.env)
        if self.log is not None:
            self.log.decide()
        return not may_start

    def begin(self, episode: int, obs: Observation, out: ActionOut) -> None:
        """The policy answered."""
        if obs is not self.seen and not self.altered and self.admission is not None:
            self.altered = not same(obs, self.seen)
        self.current = Decision(self.env, episode, self._num_decisions, obs, out, (), action_repeat=self.action_repeat)
        self._num_decisions += 1

    def note_executed(self, decision: Decision, action: Any, num_steps: int) -> None:
        """Note which actions of its chunk a step of a decision has executed; before its rewards are added.

        Args:
            decision: The current one.
            action: What the simulator was told; see `EnvContext.step`.
            num_steps: Simulator steps that it took.
        """
        chunk, repeat = decision.out.action, decision.action_repeat
        before = range(min(decision.num_actions, len(chunk))) if decision.executed is None else decision.executed
        following = max(before, default=-1) + 1
        places = _places(chunk, action, following)
        if places is None:
            self.foreign = self.foreign or not decision.intervened
            places = range(following, following + num_steps)
        places = places[: -(-num_steps // repeat)]
        executed = tuple(sorted({*before, *(place for place in places if place < len(chunk))}))
        usual = range(min(-(-(decision.num_steps + num_steps) // repeat), len(chunk)))
        decision.executed = None if executed == tuple(usual) else executed

    def add_reward(self, value: Any) -> bool:
        """Add to the reward of the last executed step of the current decision.

        Returns:
            Whether there is one.

        Raises:
            InvalidData: `value`, or the sum, is no reward that a simulator may return.
        """
        decision = self.current
        if decision is None or not decision.rewards:
            return False
        total = as_reward(decision.rewards[-1] + as_reward(value))
        decision.rewards = (*decision.rewards[:-1], total)
        return True

    def park(self, next_obs: Observation) -> None:
        """The outcome of the current decision is complete, and `next_obs` follows it."""
        decision = self.current
        if decision is None:
            return
        self.current = None
        self._last_obs = next_obs
        admission = self.admission
        if admission is None:
            return
        if not decision.num_steps:
            self._drop("unexecuted")
            return
        self._open.append(decision)
        admission.park()
        if len(self._open) >= self.segment_length:
            self.cut("full")

    def end(self) -> None:
        """The episode is over: nothing that comes belongs to the open segment, and what was seen last ends it."""
        self.park(self.seen)
        self.cut("end")

    def drop_current(self, reason: Drop) -> None:
        """The decision that was started ends here: it was not answered, or what came of it is not known."""
        if self.current is None:
            self._num_decisions += 1  # not answered: its number, which is that of its noise, is not given again
        self.current = None
        if self.admission is not None:
            self._drop(reason)

    def _drop(self, reason: Drop) -> None:
        assert self.admission is not None
        self.admission.drop(self.env, reason, "in_flight")
        if self.log is not None:
            self.log.dropped.append(reason)

    @property
    def open_segment(self) -> Segment | None:
        """A copy of the open segment as it is; None if it is empty."""
        return Segment(self.env, self.task, list(self._open), self._last_obs, "taken") if self._open else None

    def resume(self, num_decisions: int, segment: Segment | None) -> None:
        """Go on after so many decisions, with an open segment if its episode goes on."""
        self._num_decisions = self.place = num_decisions
        if segment is not None:
            self._open, self._last_obs = list(segment.decisions), segment.last_obs

    def cut(self, reason: Reason) -> None:
        """Hand the open segment on, if there is one; a current decision stays."""
        decisions = self._open
        if not decisions or self.admission is None:
            return
        self._open = []
        self.emit(Segment(self.env, self.task, decisions, self._last_obs, reason))


def _places(chunk: Array, action: Any, following: int) -> Sequence[int] | None:
    """Return where in a chunk some actions lie: in memory, else those that are equal, at best the following ones."""
    part = np.asarray(action)
    part = part[None] if part.ndim < chunk.ndim else part
    num, stride = len(part), chunk.strides[0]
    start = part.__array_interface__["data"][0] - chunk.__array_interface__["data"][0]
    offsets = [start + i * part.strides[0] for i in range(num)]
    if stride and all(not offset % stride and 0 <= offset // stride < len(chunk) for offset in offsets):
        return [offset // stride for offset in offsets]
    for first in (following, *range(len(chunk))):
        if np.array_equal(chunk[first : first + num], part):
            return range(first, first + num)
    return None


def cut_stale(recorders: Iterable[Recorder], admission: Admission, stale: int) -> None:
    """Cut open segments for the next batch of the consumer.

    Args:
        recorders: Of all environments.
        admission: Their ledger.
        stale: All that hold a decision of this version or an older one are cut, since it could not wait for the batch
            after; then, while the batch is not complete, those with the oldest versions.
    """
    started = [recorder for recorder in recorders if recorder.oldest_version is not None]
    for recorder in sorted(started, key=lambda recorder: recorder.oldest_version or 0):
        if (recorder.oldest_version or 0) > stale and admission.missing <= 0:
            break
        recorder.cut("taken")
