"""The errors that EBRL raises; every message names the thing that is wrong and the way out.

::

    EbrlError
    ├── ConfigError (also ValueError)      a value that cannot work: option, count, folder
    ├── UnknownEnv (also LookupError)      no environment of that id
    ├── SpaceError (also TypeError)        spaces that a policy or a host cannot serve
    ├── ProgramError (also RuntimeError)   an environment program misused its context
    ├── SimulatorError (also RuntimeError) a simulator broke its contract; what it raised itself stays what it was
    │   ├── InvalidData                    shape, dtype, NaN against the declared space
    │   │   └── InvalidAction              likewise what a simulator was given
    │   ├── CallTimeout                    a call of a simulator has not ended by its deadline
    │   └── HostDied                       the process of a simulator is gone
    ├── PolicyError (also RuntimeError)    a policy or a batched function failed, or returned what cannot be used
    ├── CheckpointError (also RuntimeError) a checkpoint that cannot be written, read or continued
    ├── PoolError (also RuntimeError)      more units asked or returned than a pool has
    ├── Closed (also RuntimeError)         a call on a service that has ended
    └── Deadlock (also RuntimeError)       virtual time: everybody waits and nothing is scheduled

`whole`, `amount`, `flag`, `word` and `as_path` check what users give.
"""

from __future__ import annotations

import logging
import os
import reprlib
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

logger = logging.getLogger("ebrl")

MOST = 2**53
"""Units of anything: floats count that far."""

LEAST = 1e-9
"""Of an amount."""

IN_CHILD = "EBRL_IN_CHILD"
"""Environment variable that is set in processes which host simulators."""

UNGUARDED = (
    "this script starts processes while one of its own processes imports it: put what it runs behind "
    'if __name__ == "__main__", or move the environment to a module of its own'
)


class EbrlError(Exception):
    """Base of every error that EBRL raises on purpose."""


class ConfigError(EbrlError, ValueError):
    """A value that cannot work; the message says which values do."""


class UnknownEnv(EbrlError, LookupError):
    """No environment of that id; the message lists the nearest names."""


class SpaceError(EbrlError, TypeError):
    """Observation or action spaces that the chosen policy or host cannot serve."""


class ProgramError(EbrlError, RuntimeError):
    """An environment program broke a rule of `EnvContext`."""


class SimulatorError(EbrlError, RuntimeError):
    """A simulator did something that its interface forbids. What it raised itself stays what it was, with a note."""


class InvalidData(SimulatorError):
    """An observation, action or reward that contradicts the declared space, or is not a number."""


class InvalidAction(InvalidData):
    """An action that contradicts the declared space, or is not a number: the fault of whoever chose it."""


class CallTimeout(SimulatorError):
    """A call of a simulator has not ended by its deadline, and is not waited for any longer."""


class HostDied(SimulatorError):
    """The process in which a simulator ran has ended by itself."""


class PolicyError(EbrlError, RuntimeError):
    """A policy, or the function of a batch service, failed or returned what cannot be used."""


class CheckpointError(EbrlError, RuntimeError):
    """A checkpoint that cannot be written, that is torn or not ours, or that does not fit what it is to continue."""


class PoolError(EbrlError, RuntimeError):
    """More units were asked of a pool, or given back to it, than it has."""


class Closed(EbrlError, RuntimeError):
    """The service has ended, or its runtime has."""


class Deadlock(EbrlError, RuntimeError):
    """In virtual time: every task waits and no timer is armed. Carries a who-waits-for-what table."""


def is_a(kind: type, value: Any) -> bool:
    """Whether `value` is a number of that kind (`numbers.Integral`, `numbers.Real`); True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def whole(what: str, value: Any, least: int = 1, most: int = MOST) -> int:
    """Return a number of things.

    Args:
        what: It is, for the message.
        value: What the user gave.
        least: That it may be.
        most: That it may be.

    Raises:
        ConfigError: It is no whole number, or out of range.
    """
    if not is_a(Integral, value) or not least <= value <= most:
        to = f"from {least} to {most}" if most != MOST else f"of at least {least}"
        raise ConfigError(f"{what} must be a whole number {to}, got {reprlib.repr(value)}")
    return int(value)


def amount(what: str, value: Any) -> float:
    """Return a positive number with which arithmetic is safe.

    Args:
        what: It is, for the message.
        value: What the user gave.

    Raises:
        ConfigError: It is no number above 0, or too small or too large for one.
    """
    if not is_a(Real, value) or not value > 0:
        raise ConfigError(f"{what} must be a number above 0, got {reprlib.repr(value)}")
    if not LEAST <= value <= MOST:
        raise ConfigError(f"{what} must be from {LEAST:g} to {MOST:g}, got {reprlib.repr(value)}")
    return float(value)


def flag(what: str, value: Any) -> bool:
    """Return an option that is on or off.

    Args:
        what: It is, for the message.
        value: What the user gave; words are not taken, since all of them would be on.

    Raises:
        ConfigError: It is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be True or False, got {reprlib.repr(value)}")
    return value


def as_path(what: str, value: Any) -> Path:
    """Return where a file or folder is.

    Args:
        what: It is, for the message.
        value: What the user gave.

    Raises:
        ConfigError: It is no path.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{what} must be a path, got {reprlib.repr(value)}")
    return Path(value)


def word(what: str, value: object, known: Any) -> None:
    """Check an option that is one of a few words, or None.

    Args:
        what: It is, for the message.
        value: What the user gave.
        known: A ``Literal`` of them.

    Raises:
        ConfigError: It is another one.
    """
    if value is not None and value not in get_args(known):
        raise ConfigError(f"{what} must be one of {get_args(known)} or None, got {value!r}")


def in_short(error: BaseException) -> str:
    """Return one line for an error of another library that may have many: what it is about, and the first of what."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or repr(error)


def note(error: BaseException, text: str) -> None:
    """Say more about an error: in a note, or in the log where it takes none (a frozen dataclass does not)."""
    try:
        error.add_note(text)
    except Exception:  # the border: an exception is user code, too
        logger.error("%r takes no notes, so here: %s", error, text)
