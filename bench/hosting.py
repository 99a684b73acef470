"""One simulator in threads and in processes, for `bench.sims`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.hosted import own_memory_mib
from bench.troupe import Troupe
from ebrl.core.errors import ConfigError
from ebrl.core.lateness import Lateness
from ebrl.core.machine import LocalMachine
from ebrl.core.records import EnvSpec, Place
from ebrl.core.run import run
from ebrl.core.runtime import Runtime
from ebrl.core.scope import Scope, finish
from ebrl.sim.auto import Choice, choose
from ebrl.sim.hosts import SimHost
from ebrl.sim.placement import make_hosts
from ebrl.sim.players import Player, Players
from ebrl.sim.spec import env_spec

CLOSE_S = 20.0
RATES: Mapping[str, tuple[Place, int]] = {
    "1 thread": ("thread", 1),
    "2 threads": ("thread", 2),
    "2 processes": ("process", 2),
}
"""What is compared: a place, and how many simulators work there at once."""
PLACES: tuple[Place, ...] = ("thread", "process")


@dataclass(frozen=True)
class Case:
    """A simulator.

    Attributes:
        env: For `ebrl.env_spec`, as are the options.
        horizon: Short, so that each measurement has resets.
        options: Others.
    """

    env: str | Callable[..., Any]
    horizon: int = 100
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What was measured.

    Attributes:
        rates: Steps per second, one per repetition, by what is compared.
        lags_ms: How late the loop was beside one simulator, by place and by what it did: median and 99th percentile.
        process_mib: Memory of a process with one simulator.
        further_mib: That a second one in it takes.
        choice: What ``host="auto"`` is here.
    """

    rates: Mapping[str, list[float]]
    lags_ms: Mapping[Place, Mapping[str, tuple[float, float]]]
    process_mib: float
    further_mib: float
    choice: Choice


def measure(case: Case, seconds: float, repeats: int, seed: int) -> Found | str:
    """Measure a simulator; call it in a fresh process.

    Args:
        case: Which.
        seconds: Of each measurement.
        repeats: Of each rate.
        seed: Of episodes and actions.

    Returns:
        Why it is left out, if it cannot be built here, or not often enough.
    """
    try:
        spec = env_spec(case.env, horizon=case.horizon, **case.options)
    except ConfigError as error:
        return str(error)
    num, memory_mib = sum(num for _, num in RATES.values()), LocalMachine().memory_mib
    if num * spec.memory_mib > memory_mib:
        return f"{num} simulators of {spec.memory_mib} MiB do not fit into {memory_mib} MiB"
    return run(_measure(spec, seconds, repeats, seed))


async def _measure(spec: EnvSpec, seconds: float, repeats: int, seed: int) -> Found:
    async with Runtime(seed=seed, tune=False) as rt:
        choice = await choose(rt, [spec, spec], name="sims")
        async with _hosted(rt, spec, "process", 1) as alone, _hosted(rt, spec, "process", 2) as pair:
            process_mib, pair_mib = [await _memory_mib(players.each[0].host) for players in (alone, pair)]
        lags_ms: dict[Place, Mapping[str, tuple[float, float]]] = {}
        for place in PLACES:
            async with _hosted(rt, spec, place, 1) as players:
                lags_ms[place] = await _lags_ms(players.each[0], seconds)
    return Found(await _rates(spec, seconds, repeats, seed), lags_ms, process_mib, pair_mib - process_mib, choice)


async def _rates(spec: EnvSpec, seconds: float, repeats: int, seed: int) -> dict[str, list[float]]:
    """Let all play in turn, so that whatever else this computer does is shared; the first round is thrown away."""
    rates: dict[str, list[float]] = {name: [] for name in RATES}
    async with Runtime(seed=seed, tune=False) as rt, Scope() as scope:
        troupes = {name: Troupe(rt, scope, spec, place, num) for name, (place, num) in RATES.items()}
        for troupe in troupes.values():
            await troupe.play(0.0)
        names = list(RATES)
        for repeat in range(repeats):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                rates[name].append(await troupes[name].play(seconds))
    return rates


@asynccontextmanager
async def _hosted(rt: Runtime, spec: EnvSpec, place: Place, num: int) -> AsyncIterator[Players]:
    """Simulators in one thread or one process."""
    specs = [spec] * num
    name = f"{num}-in-{place}"
    hosts = make_hosts(specs, host=place, lanes=1, machine=rt.machine, pool=rt.claim("sim"), name=name)
    players = Players(specs, hosts, rt.clock, rt.seed)
    try:
        await players.open()
        yield players
    finally:
        await finish(players.aclose(CLOSE_S), "close")


async def _lags_ms(player: Player, seconds: float) -> dict[str, tuple[float, float]]:
    """Play whole episodes, at least one; resets and steps are watched apart."""
    late = {"step": Lateness(), "reset": Lateness()}
    until_s = time.monotonic() + seconds
    while True:
        with late["reset"]:
            await player.reset()
        with late["step"]:
            while not player.over:
                await player.step()
        if time.monotonic() >= until_s:
            return {name: (1e3 * each.quantile(0.5), 1e3 * each.quantile(0.99)) for name, each in late.items()}


async def _memory_mib(host: SimHost) -> float:
    """Return what the process of a host has for itself, and its part of what it shares."""
    future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    host.slots[0].call(future, own_memory_mib)
    return await future
