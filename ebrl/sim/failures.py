"""What is done when a simulator fails: `FailurePolicy`, and the pure decision that follows from it.

Peers end the run, or wait for ever. A simulator that has failed once usually works when it is built again; one that
fails again and again does not, and should be looked at. So restarts are the default and have a budget, within a
sliding hour, and those that follow each other without a whole episode between them wait longer each time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Final, Literal, TypeAlias, get_args

from ebrl.core.errors import MOST, ConfigError, amount, is_a, whole

Phase: TypeAlias = Literal["build", "reset", "step", "call", "close"]
"""What a simulator does."""

Action: TypeAlias = Literal["restart", "drop", "raise"]

HOUR_S: Final = 3600.0
MAX_ROW: Final = 64  # a back-off that doubles this often is as good as endless


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What a group does about a simulator that raises, returns what it must not, hangs, or takes its process with it.

    Example:
        >>> FailurePolicy("drop", call_s=30.0).call_s
        30.0

    Attributes:
        action: ``"restart"``: that simulator is built again, and its environment goes on with its next episode.
            ``"drop"``: its environment ends, and the others go on. ``"raise"``: the run ends.
        build_s: Seconds that building may take. This and the other two are looked at now and then, so that a call is
            given up up to a quarter later. None: for ever.
        reset_s: Seconds that a reset may take.
        call_s: Seconds that a step (of a whole chunk), an `EnvContext.call`, or closing what failed may take.
        per_env: Restarts of one environment, or of one batched simulator, within an hour; with one more the run saves
            and ends. None: any number.
        per_hour: Likewise of all environments of the group.
        backoff_s: Seconds before the second restart in a row, which double with each further one; the first is at
            once. A whole episode ends a row.
        max_backoff_s: Most of them.
    """

    action: Action = "restart"
    _: KW_ONLY
    build_s: float | None = 600.0
    reset_s: float | None = 120.0
    call_s: float | None = 60.0
    per_env: int | None = 5
    per_hour: int | None = None
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: Another word for `action`, or a number out of range.
        """
        if self.action not in get_args(Action):
            raise ConfigError(f"FailurePolicy.action must be one of {get_args(Action)}, got {self.action!r}")
        for name in ("build_s", "reset_s", "call_s"):
            if (value := getattr(self, name)) is not None:
                amount(f"FailurePolicy.{name}", value)
        for name in ("per_env", "per_hour"):
            if (value := getattr(self, name)) is not None:
                whole(f"FailurePolicy.{name}", value, 0)
        for name in ("backoff_s", "max_backoff_s"):
            value = getattr(self, name)
            if not is_a(Real, value) or not 0 <= value <= MOST:
                raise ConfigError(f"FailurePolicy.{name} must be a number of at least 0, got {value!r}")

    def deadline_s(self, phase: Phase) -> float | None:
        """Return how long a call may take; None: for ever."""
        return {"build": self.build_s, "reset": self.reset_s}.get(phase, self.call_s)

    @property
    def shortest_s(self) -> float | None:
        """The shortest of the deadlines; None without any."""
        return min((s for s in (self.build_s, self.reset_s, self.call_s) if s is not None), default=None)


@dataclass(frozen=True, slots=True)
class Restart:
    """Build it again, in so many seconds."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Drop:
    """End the environment."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run; says why."""

    reason: str


Verdict: TypeAlias = Restart | Drop | Stop


class Failures:
    """Decides what is done about each failure. Pure: knows of time what it is told, which never goes back.

    Example:
        >>> failures = Failures(FailurePolicy(per_env=2), tasks=["", ""])
        >>> [failures.decide(0, now_s) for now_s in (0.0, 5.0)]
        [Restart(after_s=0.0), Restart(after_s=1.0)]
        >>> failures.decide(0, 9.0).reason
        'env 0 was restarted 2 times within an hour, which is its budget: see FailurePolicy.per_env'
    """

    def __init__(self, policy: FailurePolicy, tasks: list[str], what: str = "env") -> None:
        """Begin.

        Args:
            policy: Whose.
            tasks: Of each environment, or of each batched simulator.
            what: They are called in messages.
        """
        self._what = what
        self._policy = policy
        self.tasks = tasks
        self._row = [0] * len(tasks)  # restarts without a whole episode after them
        self._of_env: list[deque[float]] = [deque() for _ in tasks]
        self._of_all: deque[float] = deque()
        self.dropped: set[int] = set()
        self.num_restarts = 0

    def decide(self, env: int, now_s: float, *, charged: bool = True) -> Verdict:
        """Return what is done about a failure of `env`, and count it as done.

        Args:
            env: Which.
            now_s: Now.
            charged: False: it has lost its simulator through no fault of its own, and restarts at once.
        """
        policy = self._policy
        assert policy.action != "raise"  # nobody asks
        if not charged:
            self.num_restarts += 1
            return Restart(0.0)
        if policy.action == "drop":
            return self._drop(env)
        budgets = (
            (self._of_env[env], policy.per_env, f"{self._what} {env} was", "its budget", "per_env"),
            (self._of_all, policy.per_hour, f"{self._what}s were", "the budget of all", "per_hour"),
        )
        for times_s, budget, who, whose, name in budgets:
            while times_s and times_s[0] <= now_s - HOUR_S:
                times_s.popleft()
            if budget is not None and len(times_s) >= budget:
                return Stop(
                    f"{who} restarted {len(times_s)} times within an hour, which is {whose}: see FailurePolicy.{name}"
                )
        for times_s, budget, *_ in budgets:
            if budget is not None:
                times_s.append(now_s)
        self.num_restarts += 1
        row, self._row[env] = self._row[env], min(self._row[env] + 1, MAX_ROW)
        return Restart(min(policy.max_backoff_s, policy.backoff_s * 2.0 ** (row - 1)) if row else 0.0)

    def went_well(self, env: int) -> None:
        """An episode has ended as it should."""
        self._row[env] = 0

    def _drop(self, env: int) -> Verdict:
        self.dropped.add(env)
        task = self.tasks[env]
        if all(i in self.dropped for i, other in enumerate(self.tasks) if other == task):
            whose = f" of task {task!r}" if task else ""
            return Stop(f"{self._what} {env} was the last one{whose} that had not failed")
        return Drop()


def refuse_drop(policy: FailurePolicy, name: str, *, all_needed: bool) -> None:
    """Check that environments of a group may be dropped.

    Raises:
        ConfigError: They are to be, and the data need all of them.
    """
    if all_needed and policy.action == "drop":
        raise ConfigError(
            f'{name}: FailurePolicy("drop") does not go with sampling="quota", deterministic mode or groups: all '
            'environments are needed there; use "restart" or "raise"'
        )
