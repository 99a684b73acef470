"""What a person sees while a run goes on: a live table in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ebrl.core.records import Episode, UpdateReport

LINE_EVERY_S = 5.0


class RunProgress:
    """Shows reports as they come."""

    def __init__(self, console: Console, title: str, updates: int) -> None:
        """Prepare a display.

        Args:
            console: Where to.
            title: What is trained.
            updates: How many there will be at most.
        """
        self._console = console
        self._title = title
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task(title, total=updates)
        self._live = Live(self._bar, console=console, refresh_per_second=8, transient=False)
        self._episodes: deque[Episode] = deque(maxlen=100)
        self._num_episodes = 0
        self._note = ""
        self._last: tuple[float, int, dict[str, float]] = (0.0, 0, {})
        self._printed_s = -math.inf

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(f"training {self._title}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, report: UpdateReport, statistics: Mapping[str, Mapping[str, float]]) -> None:
        """Show one update."""
        self._episodes.extend(report.episodes)
        self._num_episodes += len(report.episodes)
        rows = self._rows(report, statistics)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=report.update)
            table = Table.grid(padding=(0, 2))
            for label, text in rows.items():
                table.add_row(f"[dim]{label}", text)
            self._live.update(Group(self._bar, table))
        elif report.elapsed_s - self._printed_s >= LINE_EVERY_S:
            self._printed_s = report.elapsed_s
            line = " | ".join(f"{label} {text}" for label, text in rows.items() if text)
            self._console.print(f"update {report.update} | {line}", soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        """Show a remark that stays."""
        self._note = text
        if not self._console.is_terminal:
            self._console.print(text, soft_wrap=True, highlight=False)

    def _rows(self, report: UpdateReport, statistics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        busy = {name: numbers["busy_s"] for name, numbers in statistics.items() if "busy_s" in numbers}
        before_s, before_steps, before_busy = self._last
        span_s = max(report.elapsed_s - before_s, 1e-9)
        self._last = report.elapsed_s, report.env_steps, busy
        shares = {name: (value - before_busy.get(name, 0.0)) / span_s for name, value in busy.items()}
        returns = [episode.total_reward for episode in self._episodes]
        known = [episode.success for episode in self._episodes if episode.success is not None]
        return {
            "env steps/s": f"{(report.env_steps - before_steps) / span_s:,.0f} ({report.env_steps:,} in all)",
            "episodes": f"{self._num_episodes:,}",
            "return": f"{sum(returns) / len(returns):.2f} (last {len(returns)})" if returns else "no episode has ended",
            "success": f"{sum(known) / len(known):.0%} (last {len(known)})" if known else "",
            "lag": f"mean {report.lag_mean:.2f}, max {report.lag_max}",
            "busy": "  ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005),
            "evaluation": self._note,
        }
