"""`CallTimes`: how long calls of simulators took; noted where they run, and read on the loop now and then."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Final

from ebrl.core.meters import Latencies
from ebrl.core.profile import SimulationProfile
from ebrl.core.records import Array, Observation

if TYPE_CHECKING:
    from ebrl.sim.hosts import Blocking

SAMPLE_EVERY: Final = 17
"""Of the steps in a thread host, one in so many is timed. No divisor of usual numbers of simulators or lengths of
episodes, so that each of them and every part of an episode has its turn."""

_KEPT: Final = 256
_OLD: Final = 0.98  # weight of what was known, for each call that is added


class CallTimes:
    """Of one host. Those who note only append, which needs no lock; one reader takes.

    Attributes:
        due: Says whether the next step is to be timed. An iterator, since nothing that counts costs less.
        steps: Seconds per simulator step, of some calls.
        resets: Seconds of resets.
        parts: Seconds of some calls that step, and those in which they computed.
    """

    __slots__ = ("_all_s", "_cpu_s", "_every", "due", "parts", "resets", "steps")

    def __init__(self, sample_every: int = SAMPLE_EVERY) -> None:
        """Make an empty one.

        Args:
            sample_every: One in so many steps is due; 0: none, and no reset is timed either.
        """
        self._every = sample_every
        self.due: Iterator[bool] = itertools.cycle([False] * (sample_every - 1) + [sample_every > 0])
        self.steps: deque[float] = deque(maxlen=_KEPT)
        self.resets: deque[float] = deque(maxlen=_KEPT)
        self.parts: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._all_s = self._cpu_s = 0.0

    def cpu_part(self) -> float:
        """Return the part of the time of recent calls that step in which they computed and did not wait; 1: unknown."""
        while self.parts:
            all_s, cpu_s = self.parts.popleft()
            self._all_s, self._cpu_s = _OLD * self._all_s + all_s, _OLD * self._cpu_s + cpu_s
        return min(1.0, self._cpu_s / self._all_s) if self._all_s else 1.0

    def step(self, simulator: Blocking, actions: Array, finite: bool) -> Any:
        """Step a simulator, and note the time of one step of the chunk; called on its lane."""
        began_s, began_cpu_s = perf_counter(), thread_time()
        result = simulator.step(actions, finite)
        took_s = perf_counter() - began_s
        self.steps.append(took_s / result.num_steps)
        self.parts.append((took_s, thread_time() - began_cpu_s))
        return result

    def reset(self, simulator: Blocking, seed: Any) -> tuple[Observation, dict[str, Any]]:
        """Reset a simulator, and note the time; called on its lane."""
        began_s = perf_counter()
        result = simulator.reset(seed)
        if self._every:
            self.resets.append(perf_counter() - began_s)
        return result

    def move(self, profile: SimulationProfile) -> None:
        """Hand everything over to a profile."""
        _move(self.steps, profile.step.latency)
        _move(self.resets, profile.reset.latency)


def _move(times_s: deque[float], latency: Latencies) -> None:
    while times_s:
        latency.add(times_s.popleft())
