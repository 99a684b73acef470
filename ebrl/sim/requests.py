"""What an environment asks of an actor; see `ebrl.core.protocols.Request`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ebrl.core.records import ActionOut, Array, Observation
from ebrl.core.rng import NoiseStream

if TYPE_CHECKING:
    from ebrl.sim.context import EnvContext


class ActRequest:
    """`act`: the answer goes to the program.

    Attributes:
        index: See `ebrl.core.protocols.Request`.
        answered_s: See `ebrl.core.protocols.Request`.
        memory: See there.
    """

    __slots__ = ("answered_s", "context", "future", "index", "memory", "noise", "obs")

    def __init__(
        self,
        context: EnvContext,
        noise: NoiseStream,
        index: int,
        obs: Observation,
        future: asyncio.Future[Any],
        answered_s: float = 0.0,
        memory: Array | None = None,
    ) -> None:
        self.answered_s = answered_s
        self.memory = memory
        self.context = context
        self.noise = noise
        self.index = index
        self.obs = obs
        self.future = future

    def cancelled(self) -> bool:
        """Whether the program was cancelled while it waited."""
        return self.future.done()

    def deliver(self, out: ActionOut) -> None:
        """Wake the program."""
        if not self.future.done():
            self.future.set_result(out)

    def fail(self, error: BaseException) -> None:
        """Raise in the program."""
        if not self.future.done():
            self.future.set_exception(error)

    def where(self) -> str:
        """Name the environment, episode and decision."""
        return self.context.where()


class ActStepRequest(ActRequest):
    """`act_step`: the answer goes straight to the simulator's lane, and the outcome to the program.

    One object per environment serves all its requests, one after the other, and keeps what `act` needs as well: when
    the last answer came, and what the policy remembers.

    Attributes:
        out: The last answer.
    """

    __slots__ = ("out",)

    def __init__(self, context: EnvContext, noise: NoiseStream) -> None:
        self.answered_s = 0.0
        self.memory = None
        self.context = context
        self.noise = noise
        self.out: ActionOut

    def deliver(self, out: ActionOut) -> None:
        """Step the simulator."""
        if not self.future.done():
            self.out = out
            self.context.slot.step(self.future, out.action, True)
