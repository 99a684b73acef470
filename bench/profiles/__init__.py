"""Reading and checking profiles: JSON files in which every number says where it comes from (see README.md)."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from ebrl.core.errors import ConfigError

PROFILES = Path(__file__).parent
Rule: TypeAlias = "Within | tuple[str, ...]"
"""What a field may be: a range, or words."""


@dataclass(frozen=True)
class Within:
    """What a number of a profile may be.

    Attributes:
        unit: Of the number; ``1`` for a share, a factor or a count.
        low: Lowest value that is allowed.
        high: Highest value that is allowed.
        whole: Only whole numbers.
    """

    unit: str
    low: float
    high: float
    whole: bool = False

    def __str__(self) -> str:
        return f"{'whole numbers ' if self.whole else ''}from {self.low:g} to {self.high:g}"

    def clip(self, value: float) -> float:
        """Return the nearest value that is allowed."""
        clipped = max(self.low, min(self.high, value))
        return round(clipped) if self.whole else float(clipped)


@dataclass(frozen=True)
class Profile:
    """What one file says.

    Attributes:
        records: The values, by section and field.
        sources: Where each number comes from, by dotted path: ``policy.fixed_s``.
    """

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def rules(record: type) -> dict[str, Rule]:
    """Return the rules that the annotations of a dataclass give its fields: ``Annotated[_, Within]`` or ``Literal``."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: get_args(hint) if get_origin(hint) is Literal else hint.__metadata__[0] for name, hint in hints.items()
    }


def names(kind: str, folder: Path = PROFILES) -> list[str]:
    """Return the names of the profiles of a kind."""
    return sorted(path.stem for path in (folder / kind).glob("*.json"))


def read(kind: str, name: str, schema: Mapping[str, Mapping[str, Rule]], folder: Path = PROFILES) -> Profile:
    """Read one file.

    Args:
        kind: The folder in which it is.
        name: Of the file, without ``.json``.
        schema: The rules of its fields, by section.
        folder: Where the kinds are.

    Raises:
        ConfigError: There is no such profile, or something in it is wrong: one line that names file, field and what
            is allowed.
    """
    known, where = names(kind, folder), f"{kind}/{name}.json"
    if name not in known:
        raise ConfigError(f"no profile {name!r} in {kind}; there are: {', '.join(known)}")
    try:
        raw = json.loads((folder / where).read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} is no JSON that can be read: {error}") from error
    profile = Profile()
    for section, fields in schema.items():
        values = _object(_object(raw, schema, where)[section], fields, f"{where}: {section}")
        record = profile.records[section] = {}
        for key, rule in fields.items():
            path, at = f"{section}.{key}", f"{where}: {section}.{key}"
            if isinstance(rule, Within):
                entry = _object(values[key], ("value", "source"), at)
                record[key] = _number(entry["value"], rule, at)
                profile.sources[path] = _source(entry["source"], at)
            elif values[key] in rule:
                record[key] = values[key]
            else:
                raise ConfigError(f"{at} is {reprlib.repr(values[key])}; allowed: {', '.join(rule)}")
    return profile


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in items]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"an object has {key!r} twice")
    return dict(items)


def _object(raw: object, keys: Collection[str], where: str) -> dict[str, Any]:
    allowed = ", ".join(keys)
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} is {reprlib.repr(raw)}; needed: an object with {allowed}")
    for key in raw:
        if key not in keys:
            raise ConfigError(f"{where} has an unknown field {reprlib.repr(key)}; allowed: {allowed}")
    for key in keys:
        if key not in raw:
            raise ConfigError(f"{where} has no field {key!r}; needed: {allowed}")
    return raw


def _number(raw: object, rule: Within, where: str) -> float:
    kinds = (int,) if rule.whole else (int, float)
    if isinstance(raw, kinds) and not isinstance(raw, bool) and rule.low <= raw <= rule.high:
        return raw if rule.whole else float(raw)
    raise ConfigError(f"{where} is {reprlib.repr(raw)}; allowed: {rule}, in {rule.unit}")


def _source(raw: object, where: str) -> str:
    if not isinstance(raw, str) or not re.fullmatch(r"\S.{6,}\S", raw):
        raise ConfigError(f"{where} has the source {reprlib.repr(raw)}; needed: one line that says where it comes from")
    if raw.lower().startswith("assum") and not re.match(r"assumed: \S.{8}", raw):
        raise ConfigError(f"{where} has the source {reprlib.repr(raw)}; needed: 'assumed: ' and the reason")
    return raw
