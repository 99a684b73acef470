"""`Profiles`: those of one runtime; each begins with what a file says of its stage, and together they fill the next."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ebrl.core.errors import ConfigError
from ebrl.core.profile import StageProfile, StageRecord
from ebrl.core.profile_file import SavedProfiles, check_writable, load, save
from ebrl.core.protocols import Machine

logger = logging.getLogger("ebrl")


class Profiles:
    """What services learn about their stages while a runtime is open, and after it."""

    def __init__(self, machine: Machine, saved: SavedProfiles | None = None) -> None:
        """Begin; warns if the file was measured on another machine.

        Args:
            machine: That the services run on.
            saved: What is known; None: nothing.

        Raises:
            ConfigError: `saved` is something else.
        """
        if saved is not None and not isinstance(saved, SavedProfiles):
            raise ConfigError(f"profile must be a file, or what `load` found in one, got a {type(saved).__name__}")
        self._machine = machine
        self._saved = saved
        self._profiles: dict[tuple[str, str], StageProfile] = {}
        if saved is not None and saved.machine != (here := describe(machine)):
            logger.warning("the profiles were measured on another machine (%s; this one: %s)", saved.machine, here)

    def add(self, *profiles: StageProfile) -> None:
        """Begin them with what is known of their name and group; called when a service opens, before they see a call.

        A later one takes the place of an earlier one of the same name and group.
        """
        for profile in profiles:
            self._profiles[profile.name, profile.group] = profile
            if self._saved is not None and self._saved.warm_start([profile]):
                logger.info("%s of %s begins with the profile of an earlier run", profile.name, profile.group)

    @property
    def known(self) -> Mapping[tuple[str, str], StageProfile]:
        """By name and group; to be read only."""
        return MappingProxyType(self._profiles)

    def save(self, path: Path) -> bool:
        """Write what is known of the stages that have done something, whole or not at all.

        Returns:
            Whether there was anything to write.

        Raises:
            ConfigError: The operating system does not allow it.
        """
        used = [profile for profile in self._profiles.values() if profile.fits or len(profile.latency)]
        if used:
            save(path, used, describe(self._machine))
        return bool(used)


def describe(machine: Machine) -> str:
    """Return what times depend on, for people and to tell machines apart."""
    if not machine.real:
        return f"{machine.num_cores} virtual cores"
    return f"{machine.num_cores} cores, {processor()}"


def processor() -> str:
    """Return the name of the CPU."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            text = file.read(4096)  # the first processor's part; all of them would take milliseconds
    except OSError:  # not on this operating system
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine() or "unknown processor"


def update(path: Path, records: Iterable[StageRecord], machine: Machine) -> None:
    """Write records into a file, beside what it says of other stages.

    Args:
        path: Made if there is none.
        records: Replace those of the same name and group.
        machine: That they were measured on.

    Raises:
        ConfigError: See `check_update`, or the operating system does not allow it.
    """
    new = {(record.name, record.group): record for record in records}
    kept = [record for record in check_update(path, machine) if (record.name, record.group) not in new]
    save(path, [*kept, *new.values()], describe(machine))


def check_update(path: Path, machine: Machine) -> tuple[StageRecord, ...]:
    """Return what a file says, if there is one, and see whether `update` may write it.

    Raises:
        ConfigError: It is no file of profiles, or was measured on another machine, or the operating system does not
            allow it.
    """
    check_writable(path)
    if not path.exists():
        return ()
    saved, here = load(path), describe(machine)
    if saved.machine != here:
        raise ConfigError(f"{path} was measured on another machine ({saved.machine}; this one: {here}): choose another")
    return saved.stages
