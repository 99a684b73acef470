"""`Journal`: does the updates of a recorded run, and writes to its event log what they were made of."""

from __future__ import annotations

import hashlib
import logging
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from ebrl.core.events import MAGIC, SCHEMA, EventLog, Update
from ebrl.core.protocols import Learner
from ebrl.core.records import Segment, TrainBatch

logger = logging.getLogger("ebrl")


class Journal:
    """Used by one trainer: `take` on the loop, `update` on the training lane, never both at once."""

    def __init__(self, events: EventLog, learner: Learner, *, seed: int, name: str, max_lag: int) -> None:
        """Begin; the header is written with the first update.

        Args:
            events: Where to write.
            learner: Does the updates.
            seed: Of the run.
            name: Of the trainer.
            max_lag: Of the trainer.
        """
        events.describe("trainers", name)
        self._events = events
        self._learner = learner
        self._seed = seed
        self._name = name
        self._max_lag = max_lag
        self._num_updates = 0
        self._taken: list[Segment] = []
        self._dropped: Mapping[str, int] = {}
        self._next: dict[int, int] = {}  # per environment: index of the decision that must come next
        self._begun = False  # the log
        self._failed = False
        self._broken = False

    def take(self, segments: Sequence[Segment], dropped: Mapping[str, int], *, failed: bool) -> None:
        """Note what was handed over for the next batch.

        Args:
            segments: As they came.
            dropped: Decisions since the run began, by reason.
            failed: The last update came to no end, or what came of it was not published.
        """
        self._failed |= failed
        if not self._broken:
            self._taken += segments
            self._dropped = dropped

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        """Do one update, and write its line."""
        if not self._begun:
            self._begun = True
            self._write_header()
        taken, self._taken = self._taken, []
        metrics = self._learner.update(batch)
        self._num_updates += 1
        why = "an update before this one failed" if self._failed else self._unreplayable(batch, taken)
        if why and not self._broken:
            self._broken = True
            self._events.write({"unreplayable": why})
            logger.warning("%s ends at update %d: %s", self._events.path, self._num_updates, why)
        if not self._broken:
            parameters = parameter_digest(self._learner.policy)
            line = Update.of(self._num_updates, batch, taken, self._dropped, parameters)
            self._events.write(line.to_json())
        return metrics

    def _write_header(self) -> None:
        learner = self._learner
        self._events.describe(
            "trainers",
            self._name,
            batch_size=learner.batch_size,
            max_lag=self._max_lag,
            threads=torch.get_num_threads(),
            parameters=parameter_digest(learner.policy),
        )
        self._events.write({MAGIC: SCHEMA, **software(), "seed": self._seed, **self._events.facts})

    def _unreplayable(self, batch: TrainBatch, segments: Iterable[Segment]) -> str:
        if batch.version != self._num_updates - 1:
            return f"version {batch.version} was published by somebody else"
        for segment in segments:
            env, index = segment.env, self._next.get(segment.env, 0)
            for decision in segment.decisions:
                if decision.index != index:
                    return f"decision {index} of env {env} was cancelled, lost or not executed"
                if decision.intervened:
                    return f"the program replaced the action of decision {index} of env {env}"
                index += 1
            self._next[env] = index
        return ""


def parameter_digest(module: torch.nn.Module) -> str:
    """Return the SHA-256 of all that is published: parameters and buffers, by name."""
    hasher = hashlib.sha256()
    for name, tensor in sorted([*module.named_parameters(), *module.named_buffers()]):
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def software() -> dict[str, str]:
    """Return what the bits of a result depend on, beside the log: versions, and what the processor can do."""
    return {
        "ebrl": vars(sys.modules["ebrl"])["__version__"],  # a stage imports nothing above it
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
