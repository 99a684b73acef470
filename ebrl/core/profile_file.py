"""The file of profiles: what one run knew of its stages, for the next one on the same machine to begin with.

JSON; seconds throughout::

    {
      "version": 1,
      "machine": "16 cores, NVIDIA H200",               free text
      "stages": [
        {
          "name": "gen",
          "group": "policy",                            (name, group) is unique
          "fits": [                                     t(n) = a_s + b_s * n, one for each share, which is unique
            {"share": 4.0, "a_s": 0.004, "b_s": 0.0005, "num": 99.3}
          ],
          "mean_s": 0.0071,                             of the latencies, between their ends; 0 where there are none
          "quantiles_s": [0.0042, 0.0043, 0.0196],      at equal distances from 0 to 1, rising: none, or at least two
          "num": 52000                                  requests, steps or resets that were served in all
        }
      ]
    }

All of these fields must be there; others are not looked at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ebrl.core.errors import ConfigError
from ebrl.core.profile import FitRecord, StageProfile, StageRecord

VERSION = 1
ROUNDING = 1e-9  # of a mean of equal numbers, which is not quite what they are
HUGE = 1e12  # more than any number of seconds, calls or units; so infinity and NaN are refused


@dataclass(frozen=True, slots=True)
class SavedProfiles:
    """What `load` found.

    Attributes:
        machine: It was measured on; free text.
        stages: In the order of the file.
    """

    machine: str
    stages: tuple[StageRecord, ...]

    def find(self, name: str, group: str) -> StageRecord | None:
        """Return the record of one stage, if there is one."""
        return next((stage for stage in self.stages if (stage.name, stage.group) == (name, group)), None)

    def warm_start(self, profiles: Iterable[StageProfile]) -> int:
        """Begin each profile with the record of its name and group.

        Returns:
            How many had one.
        """
        found = [(profile, self.find(profile.name, profile.group)) for profile in profiles]
        known = [(profile, record) for profile, record in found if record is not None]
        for profile, record in known:
            profile.warm_start(record)
        return len(known)


def save(path: Path, profiles: Iterable[StageProfile | StageRecord], machine: str = "") -> None:
    """Write the file, whole or not at all.

    Args:
        path: Replaced if it exists; its folder must exist.
        profiles: Or what is kept of them; no two with the same name and group.
        machine: Description.

    Raises:
        ConfigError: The operating system does not allow it.
    """
    records = [asdict(item.record() if isinstance(item, StageProfile) else item) for item in profiles]
    assert len({(record["name"], record["group"]) for record in records}) == len(records), "two profiles of one stage"
    text = json.dumps({"version": VERSION, "machine": machine, "stages": records}, indent=1, allow_nan=False)
    with _partial(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)


def check_writable(path: Path) -> None:
    """See that `save` can write a file, before what it would hold is measured.

    Raises:
        ConfigError: The operating system does not allow it.
    """
    with _partial(path) as partial:
        partial.touch()


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Give the name under which a file is written before it is whole, and leave nothing there."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two runs may save at once
    try:
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:  # of the removal, if that fails too, which it does for the same reason
        raise ConfigError(f"{path}: the profiles cannot be written: {error.strerror}") from error


def load(path: Path) -> SavedProfiles:
    """Read what `save` wrote.

    Raises:
        ConfigError: There is no such file, or one of its fields is not what the module says; names file and field.
    """
    try:
        root = _Node(path, "", json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: the profiles cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; remove the file to begin without it") from error
    version = root.field("version")
    if version.number() != VERSION:
        raise version.wrong(f"{VERSION} (or remove the file to begin without it)")
    machine = root.field("machine").text()
    stages = root.field("stages").unique(_stage, lambda stage: (stage.name, stage.group), "name and group")
    return SavedProfiles(machine, stages)


def _stage(node: _Node) -> StageRecord:
    quantiles = node.field("quantiles_s")
    values = tuple(item.number() for item in quantiles.items())
    if len(values) == 1 or list(values) != sorted(values):
        raise quantiles.wrong("empty, or two or more rising numbers")
    mean_s = node.field("mean_s")
    low_s, high_s = (values[0], values[-1]) if values else (0.0, 0.0)
    if not low_s * (1 - ROUNDING) <= mean_s.number() <= high_s * (1 + ROUNDING):
        raise mean_s.wrong(f"between the ends of quantiles_s, {low_s:g} and {high_s:g}")
    return StageRecord(
        name=node.field("name").text(),
        group=node.field("group").text(),
        fits=node.field("fits").unique(_fit, lambda fit: fit.share, "share"),
        mean_s=mean_s.number(),
        quantiles_s=values,
        num=node.field("num").number(),
    )


def _fit(node: _Node) -> FitRecord:
    return FitRecord(
        share=node.field("share").number(above=0.0),
        a_s=node.field("a_s").number(),
        b_s=node.field("b_s").number(),
        num=node.field("num").number(),
    )


@dataclass(frozen=True, slots=True)
class _Node:
    """A value of the file, and where it stands."""

    path: Path
    where: str
    value: Any

    def wrong(self, expected: str) -> ConfigError:
        """Return the error that this value deserves, in one line."""
        return ConfigError(f"{self.path}: {self.where or 'the file'} must be {expected}, got {short(self.value)}")

    def field(self, name: str) -> _Node:
        """Return a field of an object."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        where = f"{self.where}.{name}" if self.where else name
        if name not in self.value:
            there = ", ".join(sorted(map(str, self.value))) or "nothing"
            raise ConfigError(f"{self.path}: {where} is missing; there is {there}")
        return _Node(self.path, where, self.value[name])

    def items(self) -> Iterator[_Node]:
        """Yield the items of a list."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        for index, value in enumerate(self.value):
            yield _Node(self.path, f"{self.where}[{index}]", value)

    def unique(self, read: Callable[[_Node], Any], key: Callable[[Any], Any], what: str) -> tuple[Any, ...]:
        """Read the items of a list, of which no two may have the same key."""
        found: dict[Any, Any] = {}
        for item in self.items():
            record = read(item)
            if key(record) in found:
                raise ConfigError(f"{self.path}: {item.where} repeats the {what} of an earlier one: {key(record)!r}")
            found[key(record)] = record
        return tuple(found.values())

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def number(self, above: float | None = None) -> float:
        """Return a finite number that is not negative, or above a bound."""
        value, low = self.value, 0.0 if above is None else above
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= HUGE
        if not fits or value == above:
            raise self.wrong("a number of at least 0" if above is None else f"a number above {above:g}")
        return float(value)
