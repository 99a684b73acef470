"""Which episodes the slots of a batched simulator run, and how they end. The other half of `VectorContext`.

A slot that has none to run is idle: the list of an evaluation is at its end, or the rest of its group still runs the
episode before. Its simulator waits only when all of its slots are idle. In another process running episodes are given
up: what is finished of them is trained, and the next ones begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ebrl.core.saved import SavedEnv
from ebrl.sim.slots import Slot

if TYPE_CHECKING:
    from ebrl.sim.vector_context import VectorContext


def may_begin(env: VectorContext, slot: Slot) -> bool:
    """Whether there is an episode for a slot now."""
    plan, cohorts, assigned = env._group.plan, env._group.feed.cohorts, slot.meter.assigned
    if assigned is not None and plan.wants(assigned[0]):
        return True
    return not plan.must_wait(slot.index) and (cohorts is None or not cohorts.must_wait(slot.index, slot.episode + 1))


async def assign(env: VectorContext, chosen: Sequence[Slot]) -> dict[int, int]:
    """Give each chosen or idle slot its next episode, as far as there are any; wait for one if no slot has any.

    Returns:
        Seeds by slot.
    """
    for slot in chosen:
        slot.state = "idle"
    while True:
        seeds = {slot.number: _next(env, slot) for slot in env.slots if slot.state == "idle" and may_begin(env, slot)}
        _ask_for_cohorts(env)
        if seeds or any(slot.state == "running" for slot in env.slots):
            return seeds
        if not any(may_begin(env, slot) for slot in env.slots):
            await _wait(env)


def leave(env: VectorContext, slot: Slot) -> None:
    """Close the episode of a slot, which may still run, or have been lost."""
    if not slot.meter.counted:
        end_episode(env, slot)
    if slot.state == "over":
        slot.recorder.end()
        if env._group.feed.cohorts is not None:
            env._group.feed.cohorts.end(slot.index, slot.episode, slot.meter.success, lost=slot.meter.lost)


def end_episode(env: VectorContext, slot: Slot) -> None:
    """The episode is over, and counts, unless its simulator has failed."""
    slot.state = "over"
    failed, now_s = env.fault is not None, env._loop.time()
    env._group.feed.finish(slot.recorder, slot.meter, now_s, env.version, failed=failed)


def lose_all(env: VectorContext) -> None:
    """A call failed, or its program was cancelled while it ran: nobody knows where the simulator is now."""
    for slot in env.slots:
        if slot.state == "running":
            if slot.recorder.current is not None:
                slot.recorder.drop_current("lost")
            slot.recorder.cut("lost")
            slot.meter.lost = True
            slot.state = "over"  # it counts when its program leaves it: what ends the program may end the run


def lose_assigned(env: VectorContext, numbers: Iterable[int]) -> None:
    """A reset has failed: the episodes that were to begin came to nothing, and the next of the same streams follow."""
    for number in numbers:
        slot = env.slots[number]
        assert slot.meter.assigned is not None
        env._group.plan.give_back(slot.index, slot.meter.assigned)
        slot.episode += 1
        slot.meter.fail(env._loop.time(), slot.recorder.num_decisions)


def save_slots(context: VectorContext, waiting: Container[int]) -> Iterator[SavedEnv]:
    """Yield what is needed to go on with each slot of a simulator in another process.

    Args:
        context: Its program's.
        waiting: Environments that wait for a credit.
    """
    state = context.rng.bit_generator.state
    for slot in context.slots:
        yield SavedEnv(
            episode=slot.episode,
            num_decisions=slot.recorder.num_decisions,
            env_steps=slot.meter.env_steps,
            others={},
            rng=state,
            running=None,
            in_flight=context.deciding(slot) and slot.index not in waiting,
        )


def go_on(context: VectorContext, envs: Sequence[SavedEnv]) -> None:
    """Give every slot of a simulator what it goes on with, of all environments of its group."""
    context.rng.bit_generator.state = envs[context.slots[0].index].rng
    for slot in context.slots:
        slot.episode = envs[slot.index].episode
        slot.meter.steps_before = envs[slot.index].env_steps


def _next(env: VectorContext, slot: Slot) -> int:
    """Take the next episode of a slot; one that it was given before stays its own until it has begun."""
    plan, meter = env._group.plan, slot.meter
    if meter.assigned is None or not plan.wants(meter.assigned[0]):
        meter.assigned = plan.next(slot.index, slot.episode + 1)
    slot.state = "over"
    env.asked_cohorts.pop(slot.number, None)
    return meter.assigned[1]


def _ask_for_cohorts(env: VectorContext) -> None:
    """Say of each idle slot that it waits for its group, where episodes of groups are compared."""
    cohorts, plan = env._group.feed.cohorts, env._group.plan
    if cohorts is None:
        return
    for slot in env.slots:
        if slot.state == "idle" and slot.number not in env.asked_cohorts and not plan.must_wait(slot.index):
            env.asked_cohorts[slot.number] = cohorts.ask(slot.index, slot.episode + 1)


async def _wait(env: VectorContext) -> None:
    for slot in env.slots:
        slot.request.answered_s = 0.0  # the time since then says nothing about the simulator
    if env.asked_cohorts:
        await asyncio.wait(env.asked_cohorts.values(), return_when=asyncio.FIRST_COMPLETED)
    else:
        await env._group.plan.wait(env.slots[0].index)
