"""`ScriptedLearner`: learns nothing, and remembers exactly what it was given."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ebrl.core.records import TrainBatch


class ScriptedLearner:
    """A `Learner` without a network, for tests of determinism and for measuring the runtime around it.

    Args:
        batch_size: B, decisions per update.

    Attributes:
        batch_size: B, decisions per update.
        policy: ``[8]`` "weights", all equal to the number of updates; written in place, as a module would be.
        num_updates: So far.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.policy: NDArray[np.float64] = np.zeros(8)
        self.num_updates = 0
        self._hash = hashlib.sha256()

    @property
    def hexdigest(self) -> str:
        """Of environment, index, version and action of every decision so far, in the order of consumption."""
        return self._hash.hexdigest()

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        """Consume a batch."""
        decisions = batch.decisions
        assert len(decisions) == self.batch_size, f"{len(decisions)} decisions, not {self.batch_size}"
        for decision in decisions:
            self._hash.update(f"{decision.env},{decision.index},{decision.version};".encode())
            self._hash.update(decision.out.action.tobytes())
        self.num_updates += 1
        self.policy += 1.0
        return {"num_updates": float(self.num_updates)}
