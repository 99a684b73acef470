"""A group of batched simulators between two processes: what is kept, and how a new one goes on.

Running episodes are given up: what is finished of them is trained, and the next ones begin.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from ebrl.core.saved import SavedEnv, SavedExperience
from ebrl.sim.resume import align, check_alike

if TYPE_CHECKING:
    from ebrl.sim.vector import VectorGroup
    from ebrl.sim.vector_context import VectorContext


def save_vectors(group: VectorGroup) -> SavedExperience:
    """Return what is needed to go on with a group in another process."""
    segments = [recorder.open_segment for recorder in group.recorders] if group.cohorts is None else []
    return SavedExperience(
        seed=group.seed,
        name=group.name,
        ids=[spec.id for spec in group.specs],
        tasks=group.tasks,
        group_size=group.group_size,
        compared=group.cohorts is not None,
        ledger=group.admission.ledger(),
        ahead=group.admission.ahead,
        segments=list(group.segments),
        open=[segment for segment in segments if segment is not None],
        episodes=list(group.episodes),
        envs=[saved for context in group.contexts for saved in _save(context, group.admission.waiting)],
    )


def resume_vectors(group: VectorGroup, saved: SavedExperience) -> SavedExperience:
    """Give every slot what it goes on with, and return all of it.

    Raises:
        ConfigError: It is of another number of environments, of other ones, or of another seed.
    """
    check_alike(group, saved)
    saved = saved.settled(replay=False)
    envs = saved.envs if group.cohorts is None else align(saved.envs, group.group_size, group.cohorts)
    group.segments, group.episodes = list(saved.segments), list(saved.episodes)
    for recorder, env in zip(group.recorders, envs, strict=True):
        recorder.resume(env.num_decisions, None)
    for context in group.contexts:
        first = context.slots[0].index
        _go_on(context, envs[first : first + context.num_slots])
    return saved


def _save(context: VectorContext, waiting: Container[int]) -> list[SavedEnv]:
    state = context.rng.bit_generator.state
    return [
        SavedEnv(
            episode=slot.episode,
            num_decisions=slot.recorder.num_decisions,
            env_steps=slot.meter.env_steps,
            others={},
            rng=state,
            running=None,
            in_flight=context.deciding(slot) and slot.index not in waiting,
        )
        for slot in context.slots
    ]


def _go_on(context: VectorContext, envs: Sequence[SavedEnv]) -> None:
    context.rng.bit_generator.state = envs[0].rng
    for slot, env in zip(context.slots, envs, strict=True):
        slot.episode = env.episode
        slot.meter.steps_before = env.env_steps
