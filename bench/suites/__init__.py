"""What the twin and the real thing are asked: one module per suite, whose function returns checks, data and lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.plot import Picture
from bench.report import Check


@dataclass(frozen=True)
class Result:
    """What a suite found.

    Attributes:
        checks: One per bar.
        data: For the JSON line.
        lines: For people.
        pictures: What the plot shows.
    """

    checks: list[Check]
    data: dict[str, Any]
    lines: list[str]
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True)
class Ask:
    """How a suite is to be run.

    Attributes:
        seed: Of everything.
        smoke: Tiny.
        seeds: Draws of the random suite.
        schedulers: Besides those that the suite needs.
        profile: File of profiles, for the suite that reads one.
        num_envs: Environments of that suite.
        chunk: Environment steps of a decision in that suite.
    """

    seed: int
    smoke: bool
    seeds: int = 40
    schedulers: tuple[str, ...] = ()
    profile: str = ""
    num_envs: int = 16
    chunk: int = 1


Suite = Callable[[Ask], Result]
