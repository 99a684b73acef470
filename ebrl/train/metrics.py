"""Where the numbers of a run go: JSON lines, and TensorBoard event files."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ebrl.core.errors import ConfigError
from ebrl.core.records import UpdateReport
from ebrl.train.evaluate import EvalReport

logger = logging.getLogger("ebrl")


def flatten(report: UpdateReport) -> dict[str, float]:
    """Return the scalars of a report, by the name they have in files; NaN for what is not known."""
    episodes = report.episodes
    lengths = [episode.num_steps for episode in episodes]
    return {
        "update": report.update,
        "env_steps": report.env_steps,
        "elapsed_s": report.elapsed_s,
        "rollout/return": report.mean_return,
        "rollout/success_rate": report.success_rate,
        "rollout/episodes": len(episodes),
        "rollout/episode_length": sum(lengths) / len(lengths) if lengths else math.nan,
        "time/rollout_s": report.rollout_s,
        "time/update_s": report.update_s,
        "lag/mean": report.lag_mean,
        "lag/max": report.lag_max,
        **{f"lag/share_of_{lag}": num / report.num_decisions for lag, num in enumerate(report.lag_counts) if num},
        **task_scalars("rollout", report),
        **{f"train/{name}": value for name, value in report.metrics.items()},
        **{f"dropped/{reason}": num for reason, num in report.dropped.items()},
        **{f"faults/{name}": num for name, num in report.faults.items() if num},
    }


def task_scalars(prefix: str, report: UpdateReport | EvalReport) -> dict[str, float]:
    """Return what there is to say of each task, where there are several."""
    returns = report.task_returns
    if len(returns) < 2:
        return {}
    scalars = {f"{prefix}/return/{task}": value for task, value in returns.items()}
    return scalars | {f"{prefix}/success_rate/{task}": value for task, value in report.task_success_rates.items()}


class MetricsWriter:
    """Writes scalars to ``metrics.jsonl`` and to TensorBoard event files of one folder, line by line."""

    def __init__(self, folder: Path) -> None:
        """Open the files; what TensorBoard has of steps after the last line, of a run that is resumed, is not shown.

        Args:
            folder: Exists.
        """
        from tensorboardX.event_file_writer import EventsWriter  # slow to import; only runs with a folder need it
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        path = folder / "metrics.jsonl"
        written = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self._lines = path.open("a", encoding="utf-8")
        # Not SummaryWriter, which writes from a thread: where that dies, of a full disk, whoever adds waits for ever.
        self._board = EventsWriter(str(folder / "events"), f".{len(written)}")
        self._event = lambda step, name, value: Event(wall_time=time.time(), step=step, summary=scalar(name, value))
        if written:
            start, resumed_at = SessionLog(status=SessionLog.START), json.loads(written[-1])["env_steps"] + 1
            self._board.write_event(Event(wall_time=time.time(), step=resumed_at, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float], moves: Sequence[str] = ()) -> None:
        """Write one line; values that are not finite become null there, and are left out of TensorBoard.

        Args:
            step: Horizontal axis in TensorBoard: env steps.
            scalars: By name.
            moves: Of the tuner since the last line, with their reasons; in the JSON line only.

        Raises:
            ConfigError: The operating system does not allow it.
        """
        line: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        if moves:
            line["moves"] = list(moves)
        try:
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()
            for name, value in scalars.items():
                if math.isfinite(value):
                    self._board.write_event(self._event(step, name, value))  # type: ignore[no-untyped-call]
            self._board.flush()
        except OSError as error:
            raise ConfigError(f"{self._lines.name}: metrics cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the files; where the last lines cannot be written, the log says so."""
        for file in (self._lines, self._board):
            try:
                file.close()
            except OSError as error:
                logger.warning("%s is not complete: %s", self._lines.name, error.strerror)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
