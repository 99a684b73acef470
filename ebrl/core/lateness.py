"""`Lateness`: how long the running loop keeps waiting whoever wants it."""

from __future__ import annotations

import asyncio
from time import perf_counter
from types import TracebackType
from typing import Final, Self

import numpy as np

TICK_S: Final = 0.002


class Lateness:
    """Notes inside a ``with`` block how late a timer comes that is due every 2 ms.

    Whatever would have been due while the loop was held up counts, each time with its own wait: else a stop of 200 ms
    would be one sample among hundreds. Loops round timers up to a millisecond, so that even an idle one is late.

    Attributes:
        waits_s: Of everything that was due.
    """

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self._due_s = 0.0
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._note()  # a timer that is late already

    def quantile(self, q: float) -> float:
        """Seconds below which a share `q` of the waits lies; 0 where nothing was due."""
        return float(np.quantile(self.waits_s, q)) if self.waits_s else 0.0

    def _arm(self) -> None:
        self._due_s = perf_counter() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._note()
        self._arm()

    def _note(self) -> None:
        wait_s = perf_counter() - self._due_s
        while wait_s >= 0.0:
            self.waits_s.append(wait_s)
            wait_s -= TICK_S
