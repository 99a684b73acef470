"""`Admission`: who may start a decision, and the ledger that says where every started one went.

The ledger holds, always::

    started = trained + dropped.total() + buffered + parked + in_flight

``in_flight``: started, its outcome not known yet. ``parked``: finished, in an open segment. ``buffered``: in a segment
handed to the consumer. A decision may start when ``started + 1 <= trained + dropped.total() + (max_lag + 1) * B``.
With quotas that holds for each environment alone, which may start B / N decisions per version and is not waited for any
the less: of its own, ``started + 1 <= dropped + (version + max_lag + 1) * B / N``.

The M slots of a batched simulator decide together: M may start when one may, so that the last to start exceed the count
by M - 1 at most. If they waited until there is credit for all, they could wait for ever: for what another one holds, or
for the rest of a batch that is no multiple of M.

Where episodes of groups are compared, credit is given to episodes instead, and decisions in them always may start
(`ebrl.sim.cohorts`).

That count bounds memory and the mean lag; order, cut and mask bound the lag of each decision (`ebrl.train.assemble`).
The consumer is `ready` as soon as B decisions are finished, parked or buffered: it then has open segments cut as it
needs them. So nothing can stand still with all credit in open segments, no straggler holds up the others, and segments
are as long as they can be, which matters: advantages that end in a bootstrap every twenty decisions cost PPO a factor
of two in sample efficiency where an episode has 75.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ebrl.core.errors import Closed, ConfigError, logger

if TYPE_CHECKING:
    from ebrl.core.saved import SavedExperience

ENDED = "the environments or their trainer have ended: no further batch will come"
ENDLESS = 32
"""Times as many decisions of groups as credit is for lie in open episodes: then a warning says so."""
ENDLESS_EPISODES = (
    "%d decisions lie in episodes of groups that have not ended, and batches of %d wait for them: do episodes end at "
    "all? A horizon ends them: env_spec(..., horizon=...)"
)

Drop = Literal["masked", "intervention", "unexecuted", "cancelled", "lost", "incomplete", "filtered"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where all started decisions are (see the module), and how many environments wait for credit."""

    started: int
    trained: int
    dropped: Mapping[str, int]
    buffered: int
    parked: int
    in_flight: int
    num_waiting: int

    @property
    def balanced(self) -> bool:
        """Whether every started decision is accounted for, once."""
        ended = self.trained + sum(self.dropped.values())
        places = (self.buffered, self.parked, self.in_flight)
        return self.started == ended + sum(places) and min(places) >= 0


def check_terms(num_envs: int, batch_size: int, max_lag: int, *, per_env: bool) -> None:
    """Check what `Admission.open` is to be given.

    Raises:
        ConfigError: B is not positive, `max_lag` negative, or B no multiple of N where it must be.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    if max_lag < 0:
        raise ConfigError(f"max_lag must be at least 0, got {max_lag}")
    if per_env and batch_size % num_envs:
        raise ConfigError(
            f'deterministic mode and sampling="quota" share a batch equally: batch_size {batch_size} is no '
            f"multiple of {num_envs} environments"
        )


class Admission:
    """The credit of one group of environments. Closed until a consumer opens it. Used on the loop only.

    Attributes:
        on_credit: Called when credit may have come back; of whoever gives it by something else than decisions.
    """

    def __init__(self, num_envs: int) -> None:
        self.on_credit: Callable[[], None] | None = None
        self._whole = False
        self._num_envs = num_envs
        self._held = [0] * num_envs  # per environment, with a quota: started - dropped - version * quota
        self._ahead = [0] * num_envs  # likewise: trained - version * quota
        self._quota: int | None = None
        self._limit = 0
        self._endless = sys.maxsize
        self._batch_size = 0
        self._max_lag = 0
        self._closed = False
        self._ready: asyncio.Future[None] | None = None
        self._waiters: deque[tuple[tuple[int, ...], asyncio.Future[None]]] = deque()
        self._started = 0
        self._ended = 0  # trained + dropped
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._buffered = 0
        self._parked = 0
        self._in_flight = 0

    def open(
        self,
        batch_size: int,
        max_lag: int,
        *,
        per_env: bool = False,
        whole: bool = False,
        saved: SavedExperience | None = None,
    ) -> None:
        """Give credit.

        Args:
            batch_size: B, decisions that the consumer takes at once.
            max_lag: Versions that a decision may be behind when it is trained.
            per_env: Every environment may start B / N decisions per version, by a counter of its own, so that who is
                fast has no influence on its share of the data; and with `max_lag` 0, on no data (deterministic mode).
            whole: Open segments cannot be cut: the consumer can use decisions once they were handed to it. Any decision
                may start, since credit is given by others (`ebrl.sim.cohorts`).
            saved: The run to go on with, `SavedExperience.settled`. What it has finished and not trained uses up credit
                as if it had been started here, whatever the version.

        Raises:
            ConfigError: As `check_terms`.
        """
        check_terms(self._num_envs, batch_size, max_lag, per_env=per_env)
        self._batch_size = batch_size
        self._max_lag = max_lag
        self._quota = batch_size // self._num_envs if per_env else None
        self._whole = whole
        self._limit = sys.maxsize if whole else (max_lag + 1) * batch_size
        self._endless = ENDLESS * (max_lag + 1) * batch_size
        if saved is not None:
            ledger = saved.ledger
            assert ledger.balanced, ledger
            self._started, self._trained, self._dropped = ledger.started, ledger.trained, Counter(ledger.dropped)
            self._ended = ledger.trained + sum(ledger.dropped.values())
            self._buffered, self._parked = ledger.buffered, ledger.parked
            self._ahead = list(saved.ahead)
            self._held = [ahead + held for ahead, held in zip(saved.ahead, saved.held, strict=True)]
        self._pump()

    def close(self) -> None:
        """Give no more credit, and no more batches."""
        self._limit = 0
        self._closed = True
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(Closed(ENDED))

    # Who starts a decision.

    def try_start(self, *envs: int) -> bool:
        """Take a credit for an environment, or for each of some that decide together, if there is one.

        Who waits already is served before, except where everybody has credit of its own.
        """
        if (self._waiters and self._quota is None) or not self._may(envs):
            return False
        _begin(self, envs)
        return True

    async def start(self, *envs: int) -> None:
        """Wait until `try_start` takes credit, first come first served. Cancellation gives it back."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (envs, future)
        self._waiters.append(entry)
        self._pump()
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # credit came in this very turn: nothing was begun with it
                _begin(self, envs, -1)
                self._pump()
            elif entry in self._waiters:
                self._waiters.remove(entry)
                self._pump()
            raise

    # Where decisions go.

    def next(self, env: int) -> bool:
        """`park` the last decision of `env`, then `try_start` its next, in one call."""
        self._parked += 1
        if self._ready is not None:
            self._look()
        if self._quota is None and not self._waiters and self._started - self._ended < self._limit:
            self._started += 1
            return True
        self._in_flight -= 1
        return self.try_start(env)

    def park(self) -> None:
        """One decision in flight is finished, and lies in an open segment."""
        self._in_flight -= 1
        self._parked += 1
        if self._ready is not None:
            self._look()

    def emit(self, num: int) -> None:
        """`num` parked decisions were handed to the consumer."""
        self._parked -= num
        self._buffered += num
        if self._ready is not None:
            self._look()

    def drop(self, env: int, reason: Drop, place: Literal["in_flight", "parked", "buffered"], num: int = 1) -> None:
        """`num` decisions of `env` end here without being trained."""
        if place == "in_flight":
            self._in_flight -= num
        elif place == "parked":
            self._parked -= num
        else:
            self._buffered -= num
        self._dropped[reason] += num
        self._ended += num
        if self._quota is not None:
            self._held[env] -= num
        self._pump()

    def train(self, shares: Iterable[tuple[int, int]]) -> None:
        """Buffered decisions were trained, and the new version is published.

        Args:
            shares: ``(environment, decisions)``; one environment may come several times.
        """
        for env, num in shares:
            self._buffered -= num
            self._trained += num
            self._ended += num
            self._ahead[env] += num
        if self._quota is not None:
            self._held = [held - self._quota for held in self._held]
            self._ahead = [ahead - self._quota for ahead in self._ahead]
        self._pump()

    # The consumer.

    async def ready(self) -> None:
        """Let the one consumer wait until B decisions are finished: in open segments, where they can be cut, or not.

        Raises:
            Closed: The environments have ended, or their trainer.
        """
        if not self._closed:
            self._ready = asyncio.get_running_loop().create_future()
            self._look()
            try:
                await self._ready
            finally:
                self._ready = None
        if self._closed:  # perhaps since then
            raise Closed(ENDED)

    @property
    def missing(self) -> int:
        """Decisions that the buffered ones lack to a batch."""
        return self._batch_size - self._buffered

    @property
    def ahead(self) -> list[int]:
        """Decisions of each environment that were trained beyond its quota; zeros without quotas."""
        return list(self._ahead) if self._quota is not None else [0] * self._num_envs

    @property
    def waiting(self) -> set[int]:
        """Environments that wait for a credit."""
        return {env for envs, _ in self._waiters for env in envs}

    @property
    def num_buffered(self) -> int:
        """Decisions in segments that were handed to the consumer."""
        return self._buffered

    def ledger(self) -> Ledger:
        """Where all started decisions are."""
        return Ledger(
            started=self._started,
            trained=self._trained,
            dropped=dict(self._dropped),
            buffered=self._buffered,
            parked=self._parked,
            in_flight=self._in_flight,
            num_waiting=sum(len(envs) for envs, _ in self._waiters),
        )

    def _may(self, envs: Sequence[int]) -> bool:
        if self._quota is None:
            return self._started - self._ended < self._limit
        most = (self._max_lag + 1) * self._quota
        return self._limit > 0 and any(self._held[env] < most for env in envs)

    def _pump(self) -> None:
        if self.on_credit is not None:
            self.on_credit()
        if not self._waiters:
            return
        rest: deque[tuple[tuple[int, ...], asyncio.Future[None]]] = deque()
        while self._waiters:
            envs, future = self._waiters.popleft()
            if future.done():
                continue
            if self._may(envs):
                _begin(self, envs)
                future.set_result(None)
            else:
                rest.append((envs, future))
                if self._quota is None:
                    break
        rest.extend(self._waiters)
        self._waiters = rest

    def _look(self) -> None:
        ready, usable = self._ready, self._buffered if self._whole else self._parked + self._buffered
        if ready is not None and not ready.done() and usable >= self._batch_size:
            ready.set_result(None)
        elif self._whole and self._parked > self._endless:
            self._endless = sys.maxsize  # said once
            logger.warning(ENDLESS_EPISODES, self._parked, self._batch_size)


def _begin(admission: Admission, envs: Sequence[int], sign: int = 1) -> None:
    """Take credit for each, or give it back."""
    admission._started += sign * len(envs)
    admission._in_flight += sign * len(envs)
    if admission._quota is not None:
        for env in envs:
            admission._held[env] += sign
