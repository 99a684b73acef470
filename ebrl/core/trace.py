"""`Trace`: what happened when, per environment, batch and update; viewable in Perfetto (ui.perfetto.dev).

A service that finds no trace in its runtime records nothing and pays for one ``is None`` test.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from ebrl.core.errors import ConfigError

logger = logging.getLogger("ebrl")


class Span(NamedTuple):
    """One thing that took time; seconds on the loop's clock."""

    track: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


class Trace:
    """A list of spans."""

    def __init__(self, max_spans: int = 1_000_000) -> None:
        """Make a trace.

        Args:
            max_spans: Later ones are not kept, which is logged once.
        """
        self.spans: list[Span] = []
        self._max_spans = max_spans

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record one span.

        Args:
            track: Row of the picture, such as ``"env-3"``.
            name: What it was.
            start_s: Loop time.
            end_s: Loop time.
            args: JSON values shown on click.
        """
        if len(self.spans) < self._max_spans:
            self.spans.append(Span(track, name, start_s, end_s, args))
            if len(self.spans) == self._max_spans:
                logger.warning("the trace is full: spans after the first %d are not kept", self._max_spans)

    def digest(self) -> str:
        """Hash of all spans in order; equal for two runs in virtual time exactly if they did the same."""
        hasher = hashlib.sha256()
        for span in self.spans:
            hasher.update(repr(span).encode())
        return hasher.hexdigest()

    def save(self, path: Path) -> None:
        """Write Chrome trace JSON.

        Raises:
            ConfigError: The operating system does not allow it.
        """
        tracks = {track: number for number, track in enumerate(dict.fromkeys(span.track for span in self.spans))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        events.extend(
            {
                "ph": "X",
                "name": span.name,
                "pid": 0,
                "tid": tracks[span.track],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": span.args,
            }
            for span in self.spans
        )
        try:
            path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise ConfigError(f"{path}: the trace cannot be written: {error.strerror}") from error
