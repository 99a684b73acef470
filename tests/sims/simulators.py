"""The simulators under test, how a slot is played, and the same episodes without EBRL."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ebrl.core.machine import LocalMachine
from ebrl.core.records import Array, EnvSpec
from ebrl.core.scope import finish
from ebrl.sim.hosts import SimHost, ThreadHost
from ebrl.sim.process import ProcessHost
from ebrl.sim.simulator import Simulator
from ebrl.sim.spec import env_spec

STEPS = 3
SEEDS = (3, 4)
STATES: dict[str, dict[str, Any]] = {
    "Meta-World/MT1": {"env_name": "drawer-open-v3"},
    "LIBERO/libero_spatial": {"task_id": 2},
    "ManiSkill/PickCube-v1": {},
    "robosuite/Lift": {},
}


@functools.cache
def spec_of(name: str) -> EnvSpec:
    """Return the description of a simulator without pictures; made once, since that builds one."""
    return env_spec(name, horizon=STEPS, **STATES[name])


def actions(spec: EnvSpec, seed: int) -> Array:
    """Return ``[STEPS, *shape]``."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, (STEPS, *spec.action.shape)).astype(np.float32)


@contextmanager
def built(spec: EnvSpec) -> Iterator[Simulator]:
    sim = Simulator(spec)
    try:
        yield sim
    finally:
        sim.close()


def played(sim: Simulator, seed: int) -> list[Any]:
    """Return what an episode shows."""
    trace: list[Any] = [sim.reset(seed)[0]]
    for action in actions(sim.spec, seed):
        result = sim.step(action)
        trace += [result.obs, result.rewards, result.terminated, result.truncated, result.info["success"]]
    return trace


def in_host(kind: str, pair: Sequence[EnvSpec]) -> list[list[Any]]:
    """Play one seed in each of two simulators at once: two threads, or one process, whose thread both share."""

    async def main() -> list[list[Any]]:
        machine = LocalMachine()
        host: SimHost = (
            ThreadHost(pair, machine, None, 2) if kind == "thread" else ProcessHost(pair, machine, None, "h")
        )
        try:
            await host.open()
            return await asyncio.gather(*map(_play, host.slots, pair, SEEDS))
        finally:
            assert await finish(host.aclose(20.0), "close") == []
            await machine.aclose(deadline_s=5.0)

    return asyncio.run(main())


async def _play(slot: Any, spec: EnvSpec, seed: int) -> list[Any]:
    loop = asyncio.get_running_loop()
    started: asyncio.Future[Any] = loop.create_future()
    slot.reset(started, seed)
    trace: list[Any] = [(await started)[0]]
    for action in actions(spec, seed):
        stepped: asyncio.Future[Any] = loop.create_future()
        slot.step(stepped, action)
        result = await stepped
        trace += [result.obs, result.rewards, result.terminated, result.truncated, result.info["success"]]
    return trace


def same(one: Any, other: Any) -> bool:
    """Whether two traces are equal, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return np.array_equal(one, other)
