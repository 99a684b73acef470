"""The event log of a run: what happened in which order, so that `ebrl.replay` can repeat a real-time run offline.

JSON lines. The first one, the header, says what ran: schema, software, seed, and what each service says of itself. Then
comes a line for each update, written when the update has ended::

    {
      "update": 3, "version": 2,                                    of the weights before it
      "taken": [[env, episode, first, [[version, num]], checks]],   what was handed over for it: all executed decisions
      "batch": [[env, first, num, reason, advantage]],              what was trained, in this order
      "weights": null,                                              of the decisions of the batch, if they have any
      "dropped": {"masked": 4},                                     decisions since the run began, by reason
      "parameters": "9f86d081"                                      SHA-256 of the weights after it
    }

`first` and `num` count decisions of the environment; ``checks`` is what `checksums` says of each, in hexadecimal. A
last line ``{"unreplayable": why}`` says that something happened which no log can repeat.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Final, Self, TextIO, TypeAlias, get_args
from zlib import crc32

import numpy as np

from ebrl.core.errors import ConfigError, logger
from ebrl.core.records import Observation, Reason, Segment, TrainBatch

SCHEMA = 1
MAGIC = "ebrl_events"

FACTS: Final[Mapping[str, Mapping[str, type]]] = {
    "groups": {"specs": list, "count": int, "group_size": int, "actor": str},
    "trainers": {"batch_size": int, "max_lag": int, "threads": int, "parameters": str},
    "generators": {"threads": int, "deterministic": bool},
}
"""What a header says of each service, by kind."""

Checks: TypeAlias = tuple[int, int, int]
"""CRC-32 of what a decision saw, of what the policy answered, and of what came of it."""

Runs: TypeAlias = dict[int, deque[list[int]]]
"""Per environment: versions in the order in which they acted, and how many decisions each."""


def checksums(segment: Segment) -> list[Checks]:
    """Return the checks of each decision.

    Saw: its observation. Did: action and log-probability. Got: rewards, the end of the episode, the next observation.
    """
    decisions = segment.decisions
    saw = [_crc(decision.obs) for decision in decisions]
    found = []
    for decision, before, after in zip(decisions, saw, [*saw[1:], _crc(segment.last_obs)], strict=True):
        out = decision.out
        did = crc32(out.log_prob.tobytes(), crc32(out.action.tobytes()))
        end = 2 * decision.terminated + decision.truncated
        got = crc32(array("d", (*decision.rewards, end)), after)
        found.append((before, did, got))
    return found


def _crc(obs: Observation) -> int:
    if not isinstance(obs, dict):
        return crc32(obs.tobytes())
    value = 0
    for name in sorted(obs):
        value = crc32(obs[name].tobytes(), value)
    return value


@dataclass(frozen=True, slots=True)
class Taken:
    """Consecutive decisions of one environment that were handed to the consumer.

    Attributes:
        env: Whose.
        episode: Of all of them.
        first: Index of the first.
        versions: That acted, and how many decisions each.
        checks: Of each.
    """

    env: int
    episode: int
    first: int
    versions: tuple[tuple[int, int], ...]
    checks: list[Checks]

    @classmethod
    def of(cls, segment: Segment) -> Self:
        """Describe a segment."""
        runs = groupby(decision.out.version for decision in segment.decisions)
        first = segment.decisions[0]
        versions = tuple((version, len(list(run))) for version, run in runs)
        return cls(first.env, first.episode, first.index, versions, checksums(segment))

    def to_json(self) -> list[Any]:
        """Return the form that lines have."""
        return [self.env, self.episode, self.first, self.versions, np.array(self.checks, "<u4").tobytes().hex()]

    def rows(self) -> Iterator[tuple[int, int, int, int, Checks]]:
        """Yield environment, episode, index, version and checks of each decision."""
        versions = [version for version, num in self.versions for _ in range(num)]
        for index, (version, checks) in enumerate(zip(versions, self.checks, strict=True), self.first):
            yield self.env, self.episode, index, version, checks

    @classmethod
    def from_json(cls, env: int, episode: int, first: int, versions: list[list[int]], checks: str) -> Self:
        """Read what `to_json` returned."""
        rows = np.frombuffer(bytes.fromhex(checks), "<u4").reshape(-1, 3).tolist()
        found = cls(env, episode, first, tuple((v, n) for v, n in versions), [(a, b, c) for a, b, c in rows])
        numbers = [env, episode, first, *(number for run in found.versions for number in run)]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"env, episode, first decision and versions are {numbers}")
        if any(num < 1 for _, num in found.versions) or sum(num for _, num in found.versions) != len(rows):
            raise ValueError(f"{len(rows)} checks of decisions {first} and on of env {env}, which are not as many")
        return found


@dataclass(frozen=True, slots=True)
class Update:
    """One line; see the module."""

    update: int
    version: int
    taken: list[Taken]
    batch: list[tuple[int, int, int, Any, float | None]]
    weights: list[float] | None
    dropped: Mapping[str, int]
    parameters: str

    @classmethod
    def of(
        cls, number: int, batch: TrainBatch, taken: Iterable[Segment], dropped: Mapping[str, int], parameters: str
    ) -> Self:
        """Describe an update."""
        pieces = [(s.env, s.decisions[0].index, len(s.decisions), s.reason, s.advantage) for s in batch.segments]
        weights = None if batch.weights is None else batch.weights.tolist()
        return cls(number, batch.version, list(map(Taken.of, taken)), pieces, weights, dropped, parameters)

    def to_json(self) -> dict[str, Any]:
        """Return the form that lines have."""
        record = {name: getattr(self, name) for name in self.__slots__}
        return {**record, "taken": [taken.to_json() for taken in self.taken]}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Read what `to_json` returned."""
        taken = [Taken.from_json(*item) for item in record["taken"]]
        batch = [(env, first, num, reason, worth) for env, first, num, reason, worth in record["batch"]]
        for env, first, num, reason, worth in batch:
            if any(type(number) is not int for number in (env, first, num)) or num < 1:
                raise ValueError(f"a piece of the batch is {[env, first, num]}")
            if reason not in get_args(Reason) or not (worth is None or type(worth) in (int, float)):
                raise ValueError(f"a piece of the batch has {reason!r} and {worth!r}")
        weights = record["weights"]
        if weights is not None and [type(weight) for weight in weights] != [float] * sum(piece[2] for piece in batch):
            raise ValueError("the weights are not one for each decision of the batch")
        return cls(**{**record, "taken": taken, "batch": batch})


class EventLog:
    """The log of a run that is being written. Made by `Runtime`."""

    def __init__(self, path: Path) -> None:
        """Describe a log.

        Args:
            path: A new file in a folder that exists.
        """
        self.path = path
        self.facts: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._file: TextIO | None = None

    def describe(self, kind: str, name: str, **facts: Any) -> None:
        """Say what runs; part of the header. Called when a service opens.

        Args:
            kind: ``"generators"``, ``"groups"`` or ``"trainers"``.
            name: Of the service.
            facts: JSON values.
        """
        self.facts.setdefault(kind, {})[name] = facts

    def open(self) -> None:
        """Make the file.

        Raises:
            ConfigError: It exists, or cannot be made.
        """
        try:
            self._file = self.path.open("x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"{self.path} exists: remove it, or record to another file") from None
        except OSError as error:
            raise ConfigError(f"{self.path}: the event log cannot be written: {error.strerror}") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line, so that it is in the file even if this process dies next. Called on the training lane.

        Raises:
            ConfigError: The operating system does not allow it.
        """
        assert self._file is not None, "the log is not open"
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self.path}: the event log cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; where what is left cannot be written, the log of the program says so."""
        assert self._file is not None, "the log is not open"
        try:
            self._file.close()
        except OSError as error:
            logger.warning("%s is not complete: %s", self.path, error.strerror)


class _Books:
    """What a log says became of each decision; whoever reads its lines in order finds out whether that can be."""

    def __init__(self, count: int, batch_size: int, max_lag: int) -> None:
        self._count = count
        self._batch_size = batch_size
        self._max_lag = max_lag
        self._next: Counter[int] = Counter()  # of each environment
        self._untrained: dict[tuple[int, int], tuple[int, int]] = {}  # version and episode

    def read(self, update: Update) -> None:
        """Follow one line.

        Raises:
            ValueError: It contradicts the header or a line before.
        """
        for taken in update.taken:
            if taken.env >= self._count:
                raise ValueError(f"env {taken.env} of {self._count} environments")
            if taken.first != self._next[taken.env]:
                raise ValueError(f"decision {taken.first} of env {taken.env} comes after {self._next[taken.env] - 1}")
            for env, episode, index, version, _ in taken.rows():
                if version > update.version:
                    raise ValueError(f"decision {index} of env {env} was made with version {version}")
                self._untrained[env, index] = version, episode
            self._next[taken.env] += len(taken.checks)
        num = sum(piece[2] for piece in update.batch)
        if num != self._batch_size:
            raise ValueError(f"the batch has {num} decisions, not {self._batch_size}")
        for env, first, length, _, _ in update.batch:
            known = [self._untrained.pop((env, index), None) for index in range(first, first + length)]
            if len({None if entry is None else entry[1] for entry in known}) != 1 or known[0] is None:
                raise ValueError(
                    f"decisions {first} to {first + length - 1} of env {env} are trained, which are not those of one "
                    "episode, not known, too old or trained before"
                )
        oldest = update.version + 1 - self._max_lag
        self._untrained = {key: entry for key, entry in self._untrained.items() if entry[0] >= oldest}


class RecordedRun:
    """A log that is read, as often as one likes and a line at a time.

    Attributes:
        path: Of the file.
        header: Its first line.
        end: Why there are no more updates than `updates` gave, where that was no ordinary end.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ConfigError: There is no such file, it is no event log, one of another schema, or its header is damaged.
        """
        self.path = path
        self.end = ""
        line = next(self._lines(), None)
        if line is None:
            raise ConfigError(f"{path} is empty: its run ended before the first update")
        if not isinstance(line, dict) or MAGIC not in line:
            raise self._foreign()
        if line[MAGIC] != SCHEMA:
            raise ConfigError(
                f"{path} has schema {line[MAGIC]} of EBRL {line.get('ebrl', '(unknown)')}, and this EBRL reads schema "
                f"{SCHEMA}: replay it with the version that wrote it"
            )
        self.header: dict[str, Any] = line
        self._check_header()

    def updates(self) -> Iterator[Update]:
        """Yield all updates that are complete.

        Raises:
            ConfigError: A line before the last is damaged, or one is missing.
        """
        lines = self._lines()
        next(lines)
        for version, line in enumerate(lines):
            if isinstance(line, dict) and "unreplayable" in line:
                self.end = f"what follows cannot be repeated: {line['unreplayable']}"
                return
            try:
                update = Update.from_json(line)
            except (KeyError, TypeError, ValueError) as error:
                raise self._damaged(version + 2, error) from error
            if update.version != version:
                raise ConfigError(
                    f"{self.path}: line {version + 2} is the update of version {update.version}, not {version}: "
                    "a log is replayed from the beginning of its run"
                )
            yield update

    def who_acted(self) -> tuple[Runs, list[int]]:
        """Read the whole log, and return who acted with which version, and how many decisions were made until each.

        Raises:
            ConfigError: A line is damaged, or contradicts the header or a line before.
        """
        ((_, group),), ((_, trainer),) = self.header["groups"].items(), self.header["trainers"].items()
        books = _Books(group["count"], trainer["batch_size"], trainer["max_lag"])
        runs: Runs = defaultdict(deque)
        nums: Counter[int] = Counter()
        last = -1
        for update in self.updates():
            last = update.version
            try:
                books.read(update)
            except ValueError as error:
                raise self._damaged(update.version + 2, error) from error
            for taken in update.taken:
                own = runs[taken.env]
                for version, num in taken.versions:
                    nums[version] += num
                    if own and own[-1][0] == version:
                        own[-1][1] += num
                    else:
                        own.append([version, num])
        return runs, list(accumulate(nums[version] for version in range(last + 1)))

    def _check_header(self) -> None:
        for kind, form in FACTS.items():
            services = self.header.get(kind, {})
            if not isinstance(services, dict) or (kind != "generators" and len(services) != 1):
                raise self._damaged(1, f"{kind} is {services!r}")
            for name, facts in services.items():
                wrong = [key for key in form if not _tells(facts, key, form[key])]
                if wrong:
                    raise self._damaged(1, f"of {name} ({kind}) it does not tell {', '.join(wrong)}")
        seed = self.header.get("seed")
        if type(seed) is not int or seed < 0:
            raise self._damaged(1, "it does not tell the seed")
        for name, facts in self.header["groups"].items():
            if facts["count"] % facts["group_size"]:
                raise self._damaged(1, f"{name} has {facts['count']} environments in groups of {facts['group_size']}")

    def _damaged(self, line: int, why: object) -> ConfigError:
        text = str(why) if isinstance(why, str | ValueError) else repr(why)
        return ConfigError(f"{self.path}: line {line} is damaged: {text}")

    def _foreign(self) -> ConfigError:
        return ConfigError(f"{self.path} is no event log: give a file that Runtime(record=...) wrote")

    def _lines(self) -> Iterator[Any]:
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                for number, text in enumerate(file, 1):
                    try:
                        line = json.loads(text)
                    except (ValueError, RecursionError):
                        if number == 1:
                            raise self._foreign() from None
                        if next(file, None) is not None:
                            raise ConfigError(f"{self.path}: line {number} is damaged") from None
                        self.end = f"line {number} is torn: the run was killed"
                        return
                    yield line
        except OSError as error:
            raise ConfigError(f"{self.path}: the event log cannot be read: {error}") from error


def _tells(facts: Any, key: str, form: type) -> bool:
    """Whether a header says this of a service."""
    value = facts.get(key) if isinstance(facts, dict) else None
    if form is not int:
        return type(value) is form
    return type(value) is int and (0 if key == "max_lag" else 1) <= value < 2**32
