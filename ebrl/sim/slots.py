"""The slots of a batched simulator: what each of them is counted and recorded as, and its row of a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from ebrl.core.records import ActionOut, Array, Observation
from ebrl.core.rng import NoiseStream
from ebrl.sim.episodes import EpisodeMeter
from ebrl.sim.recorder import Recorder

if TYPE_CHECKING:
    from ebrl.sim.vector_context import VectorContext


class Asked:
    """One request of M rows, from which its program awaits all answers at once.

    Attributes:
        future: Gets the answers by slot, or the first error.
    """

    __slots__ = ("_left", "_outs", "future")

    def __init__(self, future: asyncio.Future[list[ActionOut]], num_rows: int) -> None:
        self.future = future
        self._left = num_rows
        self._outs: dict[int, ActionOut] = {}

    def take(self, slot: int, out: ActionOut) -> None:
        """One of the answers."""
        self._outs[slot] = out
        self._left -= 1
        if not self._left and not self.future.done():
            self.future.set_result([self._outs[i] for i in range(len(self._outs))])

    def fail(self, error: BaseException) -> None:
        """One of the answers will not come, and so none does."""
        if not self.future.done():
            self.future.set_exception(error)


class RowRequest:
    """The row of one slot, used again for each request; see `ebrl.core.protocols.Request`.

    Attributes:
        obs: See there; so are the others.
    """

    __slots__ = ("_context", "_number", "answered_s", "asked", "index", "memory", "noise", "obs")

    def __init__(self, context: VectorContext, number: int, noise: NoiseStream) -> None:
        self._context = context
        self._number = number
        self.noise = noise
        self.index = 0
        self.obs: Observation = {}
        self.memory: Array | None = None
        self.answered_s = 0.0
        self.asked: Asked

    def again(self) -> RowRequest:
        """Return one for the same slot: the actor may still hold this one, which nobody waits for."""
        other = RowRequest(self._context, self._number, self.noise)
        other.memory = self.memory
        return other

    def cancelled(self) -> bool:
        """Whether nobody waits for the answers of this request."""
        return self.asked.future.done()

    def deliver(self, out: ActionOut) -> None:
        """Add an answer to those of the other slots."""
        self.asked.take(self._number, out)

    def fail(self, error: BaseException) -> None:
        """Raise in the program."""
        self.asked.fail(error)

    def where(self) -> str:
        """Name the slot, its episode and its decision."""
        return self._context.where(self._number)


class Slot:
    """One slot.

    Attributes:
        index: Of the environment that it is in its group.
        number: Of the slot in its simulator.
        recorder: Of its decisions.
        meter: Of its running episode.
        episode: Number of that; -1 before the first.
        request: Its row.
        state: ``"running"``: what it does belongs to an episode that somebody wants. ``"over"``: it has ended, or there
            was none yet. ``"idle"``: there is none to run, and it is carried along.
    """

    __slots__ = ("episode", "index", "meter", "number", "recorder", "request", "state")

    def __init__(self, number: int, recorder: Recorder, request: RowRequest) -> None:
        self.index = recorder.env
        self.number = number
        self.recorder = recorder
        self.meter = EpisodeMeter()
        self.episode = -1
        self.request = request
        self.state: Literal["running", "over", "idle"] = "over"
