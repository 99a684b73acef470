"""What an environment asks of an actor; see `ebrl.core.protocols.Request`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ebrl.core.protocols import Actor
from ebrl.core.records import ActionOut, Array, Observation
from ebrl.core.rng import NoiseStream, name_key

if TYPE_CHECKING:
    from ebrl.sim.context import EnvContext


class ActRequest:
    """`act`: the answer goes to the program.

    Attributes:
        index: See `ebrl.core.protocols.Request`.
        answered_s: See `ebrl.core.protocols.Request`.
        memory: See there.
        refusal: What the actor failed with: no fault of the simulator.
    """

    __slots__ = ("answered_s", "context", "future", "index", "memory", "noise", "obs", "refusal")

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
        self.refusal: BaseException | None = None
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
        self.refusal = error
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
        self.refusal = None
        self.context = context
        self.noise = noise
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.out: ActionOut

    def deliver(self, out: ActionOut) -> None:
        """Step the simulator."""
        if not self.future.done():
            self.out = out
            self.context.slot.step(self.future, out.action, True)


class Other:
    """What an environment keeps for an actor that is not its group's.

    Attributes:
        noise: Its stream.
        num_asked: So far.
        episode: In which `memory` was made.
        memory: What it remembers; see `ebrl.core.protocols.Request`.
    """

    __slots__ = ("episode", "memory", "noise", "num_asked")

    def __init__(self, noise: NoiseStream, num_asked: int = 0, episode: int = -1, memory: Array | None = None) -> None:
        self.noise = noise
        self.num_asked = num_asked
        self.episode = episode
        self.memory = memory


def noise_of(env: EnvContext, actor: str) -> NoiseStream:
    """Return the stream of another actor than the group's own."""
    return NoiseStream(env._group.seed, *env._key, name_key(actor))


async def ask_other(env: EnvContext, obs: Observation, actor: Actor) -> ActionOut:
    """Ask an actor that is not the group's own: no decision is opened, and no credit needed."""
    others, episode = env.others, env.episode
    other = others.get(actor.name)
    if other is None:
        other = others[actor.name] = Other(noise_of(env, actor.name))
    env.num_calls += 1
    future: asyncio.Future[ActionOut] = env._loop.create_future()
    memory = other.memory if other.episode == episode else None
    request = ActRequest(env, other.noise, other.num_asked, obs, future, memory=memory)
    other.num_asked += 1
    actor.request(request)
    try:
        out = await future
    except asyncio.CancelledError:
        actor.withdraw()
        raise
    if episode >= other.episode:  # not an answer that comes after those of a later episode
        other.episode, other.memory = episode, out.memory
    return out
