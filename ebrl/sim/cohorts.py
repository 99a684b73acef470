"""`Cohorts`: groups of environments that run the same episodes; their data are handed over an episode of all at a time.

A group is some consecutive environments with one task. A cohort is one episode of it: every member runs it from the
same seed, at its own pace. Learners that compare its members (GRPO) train a cohort whole or not at all, for those who
have ended first are not a fair sample of all. With a `max_lag` of 0, where nothing can wait for the next batch, that
goes for cohorts too: all that were begun are handed over together, when the last of them has ended.

Credit is given to cohorts, not to decisions: one is opened while there is credit, and whatever its members then decide
may start. With credit per decision, fast members would use it up in episodes that their siblings could not begin, and
all would wait for ever. This way nothing stands still, however long episodes are, whatever the size of batches:

- who waits to begin an episode waits for its cohort to be opened, and an open one is never waited for;
- so while nobody runs, no cohort is open, and all decisions that hold credit have been handed over;
- and credit is used up only by ``(max_lag + 1) * B`` of them or more, of which the consumer can take a batch.

From its opening a cohort counts as long as episodes were lately. Otherwise all groups would begin as soon as there is
room for one, and much of what they do would be too old before its turn came. So all environments run at once where
``(max_lag + 1) * B`` is at least N times the decisions of an episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from ebrl.core.admission import Admission
from ebrl.core.records import Segment

logger = logging.getLogger("ebrl")

AHEAD = 1
"""Episodes that a member may be ahead of the slowest one of its group: what one group can hold back is bounded."""
RECENT = 100
"""Episodes over which their length is averaged."""
_TOO_MANY = "environments wait for each other, and groups that last for several updates will be too old to be trained"
_IN_WAVES = "in deterministic mode batches are larger then, since all groups have their share of each"


class _Cohort:
    """One episode of a group, not all of whose members have ended it."""

    __slots__ = ("ended", "segments", "whole")

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.segments: list[Segment] = []
        self.whole = True


class Cohorts:
    """The cohorts of one `EnvGroup`. Used on the loop only."""

    def __init__(
        self,
        admission: Admission,
        hand_over: Callable[[Segment], None],
        *,
        num_envs: int,
        size: int,
        batch_size: int,
        max_lag: int,
        in_waves: bool = False,
    ) -> None:
        """Begin, before `admission` is opened.

        Args:
            admission: Whose credit is given; its decisions are not admitted one by one.
            hand_over: Takes the segments of cohorts that are whole, one cohort after the other.
            num_envs: N.
            size: G, environments of a group.
            batch_size: B.
            max_lag: Versions that a decision may be behind when it is trained.
            in_waves: All groups begin their next episode when the last has ended its own, so that who is fast has no
                influence on the data; with a `max_lag` of 0.
        """
        self._admission = admission
        self._hand_over = hand_over
        self._num_envs = num_envs
        self._size = size
        self._limit = (max_lag + 1) * batch_size
        self._together = max_lag == 0  # hand over only while nobody runs
        self._in_waves = in_waves
        self._open: list[dict[int, _Cohort]] = [{} for _ in range(num_envs // size)]
        self._num_opened = [0] * (num_envs // size)
        self._finished: list[_Cohort] = []
        self._waiters: deque[tuple[int, int, asyncio.Future[None]]] = deque()
        self._num_running = 0  # episodes of members in open cohorts, begun or not
        self._num_held = 0  # decisions in segments that were not handed over
        self._num_ended = 0
        self._length = self._limit / num_envs  # decisions of an episode; at first as if all could run
        admission.on_credit = self._pump

    def resume(self, numbers: Sequence[int]) -> None:
        """Go on after an earlier run, whose open cohorts were given up; before anybody begins.

        Args:
            numbers: Of each group, that of its next episode.
        """
        self._num_opened = list(numbers)

    @property
    def num_waiting(self) -> int:
        """Environments that wait for their next cohort."""
        return sum(not future.done() for _, _, future in self._waiters)

    def must_wait(self, env: int, episode: int) -> bool:
        """Whether the cohort of an episode is yet to be opened."""
        return episode >= self._num_opened[env // self._size]

    async def begin(self, env: int, episode: int) -> None:
        """Wait until the cohort of an episode is open. Its end has to follow."""
        if self.must_wait(env, episode):
            await self.ask(env, episode)

    def ask(self, env: int, episode: int) -> asyncio.Future[None]:
        """Return what is done when the cohort of an episode is open. Its end has to follow."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((env // self._size, episode, future))
        self._pump()
        return future

    def add(self, segment: Segment) -> None:
        """Take a segment of an episode that goes on."""
        self._open[segment.env // self._size][segment.decisions[0].episode].segments.append(segment)
        self._num_held += len(segment.decisions)

    def end(self, env: int, episode: int, success: bool | None, *, lost: bool) -> None:
        """A member has ended an episode, and all of its segments were added; may be said again.

        Args:
            env: The member.
            episode: Its number.
            success: Of the episode.
            lost: How it went on is not known. A cohort with such a member, or with one that has no decision to train,
                is not whole: it is dropped as ``incomplete``.
        """
        group = env // self._size
        cohort = self._open[group].get(episode)
        if cohort is None or env in cohort.ended:
            return
        num = 0
        for segment in cohort.segments:
            if segment.env == env:
                segment.success = success
                num += len(segment.decisions)
        cohort.ended.add(env)
        cohort.whole &= num > 0 and not lost
        self._num_running -= 1
        self._learn(num)
        if len(cohort.ended) == self._size:
            self._finished.append(self._open[group].pop(episode))
        if not self._together or not self._num_running:
            self._settle()
        self._pump()

    def _settle(self) -> None:
        finished, self._finished = self._finished, []
        for cohort in sorted(finished, key=lambda cohort: not cohort.whole):  # a drop may open others: see all first
            for segment in cohort.segments:
                self._num_held -= len(segment.decisions)
                if cohort.whole:
                    self._hand_over(segment)
                else:
                    self._admission.drop(segment.env, "incomplete", "parked", len(segment.decisions))

    def _learn(self, num: int) -> None:
        """Take the length of an episode into the average."""
        self._num_ended += 1
        self._length += (num - self._length) / min(self._num_ended, RECENT)
        together = self._num_envs * self._length
        if self._num_ended == self._num_envs and together > self._limit:
            logger.warning(
                "episodes of %d environments have about %.0f decisions together, more than (max_lag + 1) * batch_size "
                "= %d: %s; raise batch_size or max_lag, or use fewer environments",
                self._num_envs, together, self._limit, _IN_WAVES if self._in_waves else _TOO_MANY,
            )  # fmt: skip

    def _has_room(self) -> bool:
        if self._in_waves:
            return not self._num_running and self._admission.missing > 0
        held = self._admission.num_buffered + self._num_held + self._num_running * self._length
        return held < self._limit

    def _pump(self) -> None:
        """Open what may be opened, and wake who has waited for it."""
        if not self._waiters or not self._has_room():
            return
        if self._in_waves:
            for group in range(len(self._open)):
                self._begin_next(group)
        for group, episode, _ in self._waiters:
            if episode == self._num_opened[group] and len(self._open[group]) <= AHEAD and self._has_room():
                self._begin_next(group)
        waiters, self._waiters = self._waiters, deque()
        for group, episode, future in waiters:
            if future.done():
                continue
            if episode < self._num_opened[group]:
                future.set_result(None)
            else:
                self._waiters.append((group, episode, future))

    def _begin_next(self, group: int) -> None:
        self._open[group][self._num_opened[group]] = _Cohort()
        self._num_opened[group] += 1
        self._num_running += self._size
