"""`LocalMachine`: this computer's CPU cores, as thread lanes.

A CUDA backend makes stream lanes behind the same `ebrl.core.protocols.Machine`; `ebrl.core.virtual` models one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

from ebrl.core.errors import ConfigError, whole
from ebrl.core.lanes import Completions, ThreadLane
from ebrl.core.leases import Lender
from ebrl.core.protocols import Lane


class LocalMachine:
    """The computer we run on. Lanes belong to the loop that asks for them, and end before another one does."""

    real = True
    on_cores = frozenset({"sim", "gen", "train"})
    sm_units = 0

    def __init__(self, num_cores: int | None = None) -> None:
        """Describe the machine.

        Args:
            num_cores: Simulator calls that may run at once; default: the cores this process may use.

        Raises:
            ConfigError: `num_cores` is no whole number of at least 1.
        """
        self.num_cores = available_cores() if num_cores is None else whole("num_cores", num_cores)
        self.memory_mib = physical_memory_mib()
        self._completions: Completions | None = None
        self._lanes: list[ThreadLane] = []

    def divide(self, units: Mapping[str, int] | None) -> None:
        """Refuse: there is nothing to divide.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("this machine has no GPU whose units could be divided")

    def lane(self, kind: str, name: str, pool: Lender | None = None, units: int = 1) -> ThreadLane:
        """Start a thread; see `ebrl.core.protocols.Machine.lane`. `kind` makes no difference here."""
        lane = ThreadLane(self._here(), name, pool, units)
        self._lanes.append(lane)
        return lane

    def give_up(self, lane: Lane, last: Callable[[], None]) -> str:
        """Forget a lane; see `ebrl.core.protocols.Machine.give_up`."""
        chosen = next(own for own in self._lanes if own is lane)
        self._lanes.remove(chosen)
        return chosen.give_up(last)

    def foresee(self, seconds: float, call: Callable[[], None]) -> bool:
        """Nobody knows beforehand how long a call takes."""
        return False

    async def aclose(self, lanes: Sequence[Lane] | None = None, *, deadline_s: float) -> list[str]:
        """End lanes behind their running calls, all under one deadline; return the names of those given up."""
        self._here()
        chosen = [lane for lane in self._lanes if lanes is None or lane in lanes]
        ended = await asyncio.gather(*(lane.aclose(deadline_s) for lane in chosen))
        self._lanes = [lane for lane in self._lanes if lane not in chosen]  # all are still there if this was cancelled
        return [lane.name for lane, ok in zip(chosen, ended, strict=True) if not ok]

    def _here(self) -> Completions:
        # Those of the running loop; lanes of another one cannot be told to end from here.
        loop = asyncio.get_running_loop()
        if self._completions is None or self._completions.loop is not loop:
            self._completions, self._lanes = Completions(loop), []
        return self._completions


def physical_memory_mib() -> int:
    """Memory of this computer, in MiB; a very large number where nobody says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    except (AttributeError, ValueError, OSError):  # not on this operating system
        return 2**40


def available_cores() -> int:
    """Cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this operating system
        return os.cpu_count() or 1
