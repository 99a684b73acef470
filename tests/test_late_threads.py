"""A call that was given up and returns after all: its thread closes what it owns, and leaves its successor alone."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest

from ebrl.core.errors import CallTimeout
from ebrl.core.machine import LocalMachine
from ebrl.core.pools import Pool
from ebrl.core.records import ArraySpec, EnvSpec
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine, spend
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.hosts import ThreadHost, ThreadSlot
from ebrl.sim.simulator import Simulator
from ebrl.sim.spec import in_turn
from ebrl.sim.vector_simulator import VectorSimulator

Place: TypeAlias = Literal["build", "reset", "step", "call", "close"]
SLOTS = 2
WAIT_S = 10.0
LATE = CallTimeout("late")


class World:
    """Makes simulators, which are numbered, and stops the first one at one place until the gate is opened."""

    def __init__(self, place: Place, batched: bool = False) -> None:
        self.place = place
        self.entered, self.gate = threading.Event(), threading.Event()
        self.num_made = 0
        self.closed: list[tuple[int, str]] = []  # which, and by which thread
        self.kind: Any = VectorSimulator if batched else Simulator
        self.seed: Any = dict.fromkeys(range(SLOTS), 1) if batched else 1
        self.actions = np.zeros((SLOTS if batched else 1, 2), np.float32)
        form = ArraySpec((3,), "float32"), ArraySpec((2,), "float32")
        self.spec = EnvSpec("numbered", self.make, *form, num_slots=SLOTS * batched)

    def make(self) -> Any:
        one = functools.partial(Numbered, self, self.num_made)
        self.num_made += 1
        return in_turn(one, SLOTS) if self.spec.num_slots else one()

    def come(self, number: int, place: Place) -> None:
        if number == 0 and place == self.place and not self.entered.is_set():
            self.entered.set()
            assert self.gate.wait(WAIT_S)

    def do(self, slot: ThreadSlot, place: Place) -> asyncio.Future[Any]:
        if place in ("build", "close"):  # what is there is closed before
            return slot.build()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if place == "reset":
            slot.reset(future, self.seed)
        elif place == "step":
            slot.step(future, self.actions)
        else:
            slot.call(future, look)
        return future


class Numbered(ScriptedEnv):
    def __init__(self, world: World, number: int) -> None:
        super().__init__(3, 2)
        self.world, self.number = world, number
        world.come(number, "build")

    def reset(self, **options: Any) -> Any:
        self.world.come(self.number, "reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.world.come(self.number, "step")
        return super().step(action)

    def close(self) -> None:
        self.world.closed.append((self.number, threading.current_thread().name))
        self.world.come(self.number, "close")


def look(env: Any) -> None:
    one = getattr(env, "envs", [env])[0]
    one.world.come(one.number, "call")


@asynccontextmanager
async def opened(world: World, count: int = 1) -> AsyncIterator[ThreadHost]:
    machine, pool = LocalMachine(), Pool("cores", 1)
    host = ThreadHost([world.spec] * count, machine, pool, 1, kind=world.kind)
    try:
        yield host
    finally:
        assert await host.aclose(WAIT_S) == []
        await machine.aclose(deadline_s=WAIT_S)
        assert pool.statistics().free == 1


async def given_up(host: ThreadHost, world: World) -> threading.Thread:
    """Give up the call that hangs now; return its thread."""
    assert await asyncio.to_thread(world.entered.wait, WAIT_S)
    (running,) = host.running()
    assert running.slot is host.slots[0]
    assert running.phase == world.place
    host.give_up(running, LATE)
    return hung_thread()


def hung_thread() -> threading.Thread:
    (thread,) = [each for each in threading.enumerate() if each.name == "ebrl-sim-0"]
    return thread


async def let_return(world: World, thread: threading.Thread) -> None:
    world.gate.set()
    await asyncio.to_thread(thread.join, WAIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("place", ["build", "reset", "step", "call", "close"])
def test_it_leaves_its_successor_alone_and_closes_what_it_owns(place: Place, batched: bool) -> None:
    world = World(place, batched)
    num = len(world.actions)

    async def main() -> None:
        async with opened(world) as host:
            (slot,) = host.slots
            if place != "build":
                await slot.build()
            if place not in ("build", "reset"):
                await world.do(slot, "reset")
            hanging = world.do(slot, place)
            thread = await given_up(host, world)
            with pytest.raises(CallTimeout, match="late"):
                await hanging
            assert (slot.built, slot.innocent) == (False, False)
            await slot.build()
            await world.do(slot, "reset")
            await let_return(world, thread)
            assert slot.built
            await world.do(slot, "step")
            assert world.closed == [(0, "ebrl-sim-0")] * num
        assert world.num_made == 2
        assert world.closed[num:] == [(1, "ebrl-sim-0+1")] * num

    asyncio.run(main())


def test_its_neighbours_are_closed_with_it_and_what_waited_behind_it_does_not_happen() -> None:
    world = World("step")

    async def main() -> None:
        async with opened(world, 2) as host:
            slot, other = host.slots
            for each in (slot, other):
                await each.build()
                await world.do(each, "reset")
            hanging = world.do(slot, "step")
            assert await asyncio.to_thread(world.entered.wait, WAIT_S)
            behind = world.do(other, "step")
            slot.retire()
            thread = await given_up(host, world)
            assert (slot.innocent, other.innocent) == (False, True)
            for future in (hanging, behind):
                with pytest.raises(CallTimeout, match="late"):
                    await future
            await other.build()
            await let_return(world, thread)
            assert world.closed == [(0, "ebrl-sim-0"), (1, "ebrl-sim-0")]
            assert (slot.built, other.built) == (False, True)
        assert world.closed[2:] == [(2, "ebrl-sim-0+1")]

    asyncio.run(main())


def test_who_hangs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for batched, name in ((False, "env 0 hangs: late."), (True, "simulator 0 with envs 0 to 1 hangs: late.")):
        world = World("call", batched)

        async def main(world: World = world) -> None:
            async with opened(world) as host:
                await host.slots[0].build()
                hanging = world.do(host.slots[0], "call")
                thread = await given_up(host, world)
                await asyncio.wait([hanging])
                await let_return(world, thread)

        asyncio.run(main())
        assert name in caplog.text


def test_a_call_of_a_simulator_that_was_replaced_meanwhile_is_nobodys() -> None:
    world = World("call")

    async def main() -> None:
        async with opened(world) as host:
            (slot,) = host.slots
            await slot.build()
            building, hanging = slot.build(), world.do(slot, "call")
            await building
            assert await asyncio.to_thread(world.entered.wait, WAIT_S)
            (running,) = host.running()
            assert (running.phase, running.slot) == ("call", None)
            thread = hung_thread()
            host.give_up(running, LATE)
            with pytest.raises(CallTimeout, match="late"):
                await hanging
            assert slot.innocent
            await let_return(world, thread)

    asyncio.run(main())


def test_in_virtual_time_likewise() -> None:
    closed: list[float] = []

    class Slow(ScriptedEnv):
        def step(self, action: Any) -> Any:
            spend(100.0)
            return super().step(action)

        def close(self) -> None:
            closed.append(asyncio.get_running_loop().time())

    async def main() -> None:
        world = World("step")
        host = ThreadHost([replace(world.spec, make=lambda: Slow(3, 2))], VirtualMachine({}), None, 1)
        (slot,) = host.slots
        await slot.build()
        await world.do(slot, "reset")
        hanging = world.do(slot, "step")
        await asyncio.sleep(10.0)
        host.give_up(host.running()[0], LATE)
        with pytest.raises(CallTimeout, match="late"):
            await hanging
        await slot.build()
        await asyncio.sleep(200.0)
        assert closed == [100.0]
        assert slot.built
        assert await host.aclose(1.0) == []

    run_virtual(main())
    assert closed == [100.0, 210.0]
