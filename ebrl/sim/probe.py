"""What a simulator takes: steps and resets under random actions, in the hosts of a run, alone and in company."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

from ebrl.core.errors import SimulatorError
from ebrl.core.profile import StageProfile, StageRecord
from ebrl.core.records import EnvSpec, Host, StepResult
from ebrl.core.rng import episode_seed
from ebrl.core.runtime import Runtime
from ebrl.core.scope import Scope
from ebrl.sim.check import random_actions
from ebrl.sim.hosts import SimHost, Slot
from ebrl.sim.placement import make_hosts

WARM_UP_STEPS = 3  # of each simulator, or to the end of its first episode; what is made at first use is not measured
MAX_FIT = 512  # calls that the line of a step rests on
CLOSE_S = 5.0
SLOWEST_CALL_S = 120.0  # after which a call is given up

T = TypeVar("T")


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


async def probe_simulators(
    runtime: Runtime, spec: EnvSpec, count: int, *, seconds: float, host: Host | None = None, seed: int = 0
) -> SimulationProbe:
    """Let simulators run at once, each as fast as it can.

    Args:
        runtime: An open one, on a real machine, with nothing else in it.
        spec: From `ebrl.env_spec`.
        count: How many simulators, each with a thread or a process of its own.
        seconds: How long; every simulator does one reset and one step in any case.
        host: Where they run; None: where the spec wants.
        seed: Of episodes and actions.

    Raises:
        ConfigError: The spec cannot be sent to a process.
        SimulatorError: A simulator broke its interface, or a call does not end.
    """
    found = SimulationProbe(count)
    hosts = make_hosts(
        [spec] * count,
        host=host or spec.host,
        lanes=count,
        machine=runtime.machine,
        pool=runtime.claim("sim"),
        name=f"probe-{count}",
        sample_every=1,
    )
    try:
        await _all(each.open() for each in hosts)
        places = [(each, slot) for each in hosts for slot in each.slots]
        clock = runtime.clock
        players = [_Player(spec, *place, clock, seed, i) for i, place in enumerate(places)]
        await _all(player.warm_up() for player in players)
        for each in hosts:
            SimulationProbe(count).take(each)  # and forget
        began_s = clock()
        await _all(player.play(began_s + seconds, found) for player in players)
        found.elapsed_s = clock() - began_s
    finally:
        await asyncio.gather(*(each.aclose(CLOSE_S) for each in hosts))
    return found


def records(probes: Sequence[SimulationProbe], group: str) -> tuple[StageRecord, ...]:
    """Return what a file keeps: latencies where most simulators ran at once, and steps as a line in their number.

    Args:
        probes: By number of simulators, smallest first.
        group: Name of the environments that the file will be used for.
    """
    crowd = probes[-1]
    step, reset = (_stage(name, group, times) for name, times in (("step", crowd.steps_s), ("reset", crowd.resets_s)))
    step.num, reset.num = crowd.num_steps, crowd.num_resets
    line = StageProfile("step", group, forgetting=1.0)
    parts = [[(probe.num_simulators, seconds) for seconds in _some(probe.steps_s)] for probe in probes]
    for calls in zip_longest(*parts):  # in turn: all of one kind after all of another would look like a change
        for call in calls:
            if call is not None:
                line.observe(*call)
    step.warm_start(StageRecord("step", group, line.record().fits))
    return step.record(), reset.record()


def _stage(name: str, group: str, times_s: list[float]) -> StageProfile:
    made = StageProfile(name, group, num_samples=max(1, len(times_s)))
    made.latency.extend(times_s)
    return made


def _some(times_s: list[float]) -> list[float]:
    return times_s[:: max(1, len(times_s) // MAX_FIT)]


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with Scope() as scope:
        for task in [scope.start(call, f"probe-{i}") for i, call in enumerate(calls)]:
            await task


class _Player:
    """One simulator and who plays it."""

    def __init__(
        self, spec: EnvSpec, host: SimHost, slot: Slot, clock: Callable[[], float], seed: int, index: int
    ) -> None:
        self._host = host
        self._slot = slot
        self._clock = clock
        self._seed = seed
        self._index = index
        self._actions = random_actions(spec, seed + index)
        self._loop = asyncio.get_running_loop()
        self._num_episodes = 0
        self._over = True

    async def warm_up(self) -> None:
        await self._reset()
        for _ in range(WARM_UP_STEPS):
            if not self._over:
                await self._step()
        self._over = True

    async def play(self, until_s: float, found: SimulationProbe) -> None:
        """Run until the time is over, at least through one reset and one step."""
        while True:
            if self._over:
                await self._reset()
                found.num_resets += 1
            result = await self._step()
            found.num_steps += result.num_steps
            found.take(self._host)
            if self._clock() >= until_s:
                return

    async def _reset(self) -> None:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._slot.reset(future, episode_seed(self._seed, self._index, self._num_episodes))
        await self._answer(future, "reset")
        self._num_episodes += 1
        self._over = False

    async def _step(self) -> StepResult:
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._slot.step(future, next(self._actions))
        result = await self._answer(future, "step")
        self._over = result.terminated or result.truncated
        return result

    async def _answer(self, future: asyncio.Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(SLOWEST_CALL_S):
                return await future
        except TimeoutError:
            where = self._slot.lane_name
            raise SimulatorError(f"{what} of the simulator on {where} has no end after {SLOWEST_CALL_S:g} s") from None
