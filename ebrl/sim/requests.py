"""What an environment asks of an actor; see `ebrl.core.protocols.Request`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ebrl.core.records import ActionOut, Observation
from ebrl.core.rng import NoiseStream

if TYPE_CHECKING:
    from ebrl.sim.context import EnvContext


class ActRequest:
    """`act`: the answer goes to the program."""

    __slots__ = ("context", "future", "noise", "obs")

    def __init__(self, context: EnvContext, future: asyncio.Future[Any], obs: Observation, noise: NoiseStream) -> None:
        self.context = context
        self.future = future
        self.obs = obs
        self.noise = noise

    def cancelled(self) -> bool:
        """Whether the program was cancelled while it waited."""
        return self.future.done()

    def deliver(self, out: ActionOut) -> None:
        """Begin a decision and wake the program."""
        if not self.future.done():
            self.context.recorder.begin(self.context.episode, self.obs, out)
            self.future.set_result(out)

    def fail(self, error: BaseException) -> None:
        """Raise in the program."""
        if not self.future.done():
            self.future.set_exception(error)

    def where(self) -> str:
        """Name the environment, episode and decision."""
        return self.context.where()


class ActStepRequest(ActRequest):
    """`act_step`: the answer goes straight to the simulator's lane, and the outcome to the program."""

    __slots__ = ()

    def deliver(self, out: ActionOut) -> None:
        """Begin a decision and step the simulator."""
        if not self.future.done():
            context = self.context
            context.recorder.begin(context.episode, self.obs, out)
            context.slot.step(self.future, out.action)


class OtherRequest(ActRequest):
    """`act(obs, actor=other)`: opens no decision."""

    __slots__ = ()

    def deliver(self, out: ActionOut) -> None:
        """Wake the program."""
        if not self.future.done():
            self.future.set_result(out)
