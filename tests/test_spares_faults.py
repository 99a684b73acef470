"""An environment that fails while its spare is ready, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from ebrl.core.rng import episode_seed
from ebrl.core.virtual_machine import spend
from ebrl.sim.context import EnvContext
from tests.helpers import recording, scripted_spec, virtually
from tests.test_spares import POLICY, RESET_S, Slow, World, machine

pytestmark = pytest.mark.slow
BUILD_S = 30.0


@virtually
async def test_it_takes_the_spare_over_and_waits_for_no_other_to_be_built() -> None:
    world, waits = World(), list[float]()

    def make() -> Slow:
        if world.num_built == 2:
            spend(BUILD_S)
        env = world.make()
        env._faults = {12: "raise"} if world.num_built == 1 else {}
        return env

    async def program(env: EnvContext) -> None:
        began_s = asyncio.get_running_loop().time()
        obs, _ = await env.reset()
        waits.append(asyncio.get_running_loop().time() - began_s)
        while not env.done:
            obs = (await env.act_step(obs)).obs

    spec = scripted_spec(make=make)
    async with recording(program, spec=spec, spares=1, machine=machine(), batch_size=999, failures=POLICY) as envs:
        await asyncio.sleep(100.0)
        assert waits[:2] == [RESET_S, 0.0]
        assert envs.faults == {"restarts": 1, "dropped_envs": 0, "leaked_threads": 0}
        assert world.num_built == 3, "the spare has another one"
        assert envs.spares._all[0].slot.built
        assert len(set(world.resets)) == len(world.resets) > 4


@virtually
async def test_what_was_taken_over_and_called_before_its_episode_is_reset_again() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            obs = (await env.act_step(obs)).obs
        if env.episode == 1:
            assert env._group.spares.take_over(env)  # as a reset does that is cancelled while it waits for credit
            await env.call(lambda sim: sim.reset(seed=7))

    world = World()
    spec = scripted_spec(make=lambda: Slow(world, length=9))
    async with recording(program, spec=spec, spares=1, machine=machine(), batch_size=999) as envs:
        await asyncio.sleep(60.0)
        assert world.resets.count(episode_seed(0, 0, 1)) == 1
        assert world.resets.count(episode_seed(0, 0, 2)) == 2
        assert envs._contexts[0].episode > 2
