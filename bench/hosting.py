"""One simulator in threads and in processes, for `bench.sims`. Imported by the processes of hosts, and so light."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebrl.core.errors import ConfigError
from ebrl.core.lateness import Lateness
from ebrl.core.records import EnvSpec, Place
from ebrl.core.run import run
from ebrl.core.runtime import Runtime
from ebrl.core.scope import finish
from ebrl.sim.auto import Choice, choose
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.hosts import SimHost
from ebrl.sim.placement import make_hosts
from ebrl.sim.players import Player, Players
from ebrl.sim.spec import env_spec

BURN_S = 0.001
CLOSE_S = 20.0
RATES: Mapping[str, tuple[Place, int]] = {
    "1 thread": ("thread", 1),
    "2 threads": ("thread", 2),
    "2 processes": ("process", 2),
}
"""What is compared: a place, and how many simulators work there at once."""


class Burning(ScriptedEnv):
    """Each step is a millisecond of Python that never lets go of the interpreter by itself."""

    def step(self, action: Any) -> Any:
        until_s = time.perf_counter() + BURN_S
        while time.perf_counter() < until_s:
            pass
        return super().step(action)


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
        Why it is left out, if it cannot be built here.
    """
    try:
        spec = env_spec(case.env, horizon=case.horizon, **case.options)
    except ConfigError as error:
        return str(error)
    return run(_measure(spec, seconds, repeats, seed))


async def _measure(spec: EnvSpec, seconds: float, repeats: int, seed: int) -> Found:
    rates: dict[str, list[float]] = {name: [] for name in RATES}
    async with Runtime(seed=seed, tune=False) as rt:
        choice = await choose(rt, [spec, spec], name="sims")
        async with _hosted(rt, spec, "process", 1, 1) as (_, alone), _hosted(rt, spec, "process", 2, 1) as (_, pair):
            process_mib, pair_mib = [await _memory_mib(hosts[0]) for hosts in (alone, pair)]
        async with _hosted(rt, spec, "thread", 2, 2) as (threads, _), _hosted(rt, spec, "process", 2, 2) as (others, _):
            players: Mapping[Place, Players] = {"thread": threads, "process": others}
            names = list(RATES)
            for repeat in range(repeats):
                for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                    place, num = RATES[name]
                    rates[name].append((await players[place].play(seconds, num=num)).steps_per_s)
            lags_ms = {place: await _lags_ms(each.each[0], seconds) for place, each in players.items()}
    return Found(rates, lags_ms, process_mib, pair_mib - process_mib, choice)


@asynccontextmanager
async def _hosted(
    rt: Runtime, spec: EnvSpec, place: Place, num: int, lanes: int
) -> AsyncIterator[tuple[Players, list[SimHost]]]:
    specs = [spec] * num
    hosts = make_hosts(
        specs,
        host=place,
        lanes=lanes,
        machine=rt.machine,
        pool=rt.claim("sim"),
        name=f"{num}-in-{lanes}-{place}",
    )
    players = Players(specs, hosts, rt.clock, rt.seed)
    try:
        await players.open()
        yield players, hosts
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
    host.slots[0].call(future, _own_memory_mib)
    return await future


def _own_memory_mib(env: object) -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return kib / 1024
