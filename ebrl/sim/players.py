"""`Players`: simulators that act at random and do nothing else; for measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from ebrl.core.errors import SimulatorError
from ebrl.core.records import EnvSpec, StepResult
from ebrl.core.rng import episode_seed
from ebrl.core.scope import Scope
from ebrl.sim.check import random_actions
from ebrl.sim.hosts import SimHost, Slot

WARM_UP_STEPS: Final = 3  # of each, or to the end of its first episode; what is made at first use is not measured
SLOWEST_CALL_S: Final = 30.0  # after which a call is given up

T = TypeVar("T")
Decide: TypeAlias = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class SimulationProbe:
    """What some simulators did at once.

    Attributes:
        num_simulators: Each on a lane of its own.
        num_steps: Of all of them.
        num_resets: Of all of them.
        elapsed_s: So long.
        steps_s: Seconds of steps where they ran, in order of arrival.
        resets_s: Seconds of resets where they ran.
    """

    num_simulators: int
    num_steps: int = 0
    num_resets: int = 0
    elapsed_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    resets_s: list[float] = field(default_factory=list)

    @property
    def steps_per_s(self) -> float:
        """Steps of all simulators per second, resets and the way to the lanes and back included."""
        return self.num_steps / self.elapsed_s if self.elapsed_s else 0.0

    def take(self, host: SimHost) -> None:
        """Take what a host has noted."""
        for noted, kept in ((host.times.steps, self.steps_s), (host.times.resets, self.resets_s)):
            while noted:
                kept.append(noted.popleft())


class Player:
    """One simulator and who plays it.

    Attributes:
        over: Whether a reset must come next.
    """

    def __init__(
        self, spec: EnvSpec, host: SimHost, slot: Slot, seed: int, index: int, decide: Decide | None = None
    ) -> None:
        self.over = True
        self.host = host
        self._slot = slot
        self._seed = seed
        self._index = index
        self._decide = decide
        self._actions = random_actions(spec, seed + index)
        self._loop = asyncio.get_running_loop()
        self._num_episodes = 0

    async def reset(self) -> None:
        """Begin the next episode."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._slot.reset(future, episode_seed(self._seed, self._index, self._num_episodes))
        await self._answer(future, "reset")
        self._num_episodes += 1
        self.over = False

    async def step(self) -> StepResult:
        """Do one step of the running episode."""
        if self._decide is not None:
            await self._decide()
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._slot.step(future, next(self._actions))
        result = await self._answer(future, "step")
        self.over = result.terminated or result.truncated
        return result

    async def warm_up(self) -> None:
        """Do whatever takes longer the first time."""
        await self.reset()
        for _ in range(WARM_UP_STEPS):
            if not self.over:
                await self.step()

    async def play(self, clock: Callable[[], float], until_s: float, found: SimulationProbe) -> None:
        """Go on until the time is over, at least through one step."""
        while True:
            if self.over:
                await self.reset()
                found.num_resets += 1
            result = await self.step()
            found.num_steps += result.num_steps
            found.take(self.host)
            if clock() >= until_s:
                return

    async def _answer(self, future: asyncio.Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(SLOWEST_CALL_S):
                return await future
        except TimeoutError:
            where = self._slot.lane_name
            raise SimulatorError(f"{what} of the simulator on {where} has no end after {SLOWEST_CALL_S:g} s") from None


class Players:
    """Simulators in hosts of their own. Whoever has opened them closes them, whatever came of it.

    Attributes:
        each: Of them, once they are there.
    """

    def __init__(
        self,
        specs: Sequence[EnvSpec],
        hosts: Sequence[SimHost],
        clock: Callable[[], float],
        seed: int = 0,
        *,
        decide: Decide | None = None,
    ) -> None:
        """Describe them.

        Args:
            specs: Of the simulators.
            hosts: From `ebrl.sim.placement.make_hosts`, of the same simulators, not started.
            clock: In seconds.
            seed: Of episodes and actions.
            decide: Awaited before each step, as a run awaits the answer of its policy.
        """
        self.each: list[Player] = []
        self._specs = specs
        self._hosts = hosts
        self._clock = clock
        self._seed = seed
        self._decide = decide

    async def open(self) -> None:
        """Build all of them, and let each do what takes longer the first time.

        Raises:
            ConfigError: A spec cannot be sent to a process.
            Exception: What a simulator raised, the first that did.
        """
        await _all(host.open() for host in self._hosts)
        num = len(self._hosts)
        for i, spec in enumerate(self._specs):
            host = self._hosts[i % num]
            self.each.append(Player(spec, host, host.slots[i // num], self._seed, i, self._decide))
        await _all(player.warm_up() for player in self.each)

    async def play(self, seconds: float, *, num: int | None = None, anew: bool = False) -> SimulationProbe:
        """Let them run at once.

        Args:
            seconds: How long; each does one step in any case.
            num: The first so many; None: all.
            anew: Each leaves its episode, so that it begins with a reset.

        Raises:
            SimulatorError: A simulator broke its interface, or a call does not end.
            Exception: What a simulator raised, the first that did.
        """
        players = self.each[:num]
        for host in self._hosts:
            SimulationProbe(0).take(host)  # and forget
        for player in players:
            player.over = player.over or anew
        found = SimulationProbe(len(players))
        began_s = self._clock()
        await _all(player.play(self._clock, began_s + seconds, found) for player in players)
        found.elapsed_s = self._clock() - began_s
        return found

    async def aclose(self, deadline_s: float) -> None:
        """Close all of them, whatever they do; never hangs."""
        await asyncio.gather(*(host.aclose(deadline_s) for host in self._hosts))


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    try:
        async with Scope() as scope:
            for task in [scope.start(call, f"player-{i}") for i, call in enumerate(calls)]:
                await task
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None
