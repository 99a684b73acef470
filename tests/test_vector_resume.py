"""Groups of batched simulators that go on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ebrl.core.errors import ConfigError
from ebrl.core.records import Episode
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.generator import Generator
from ebrl.sim.vector import VectorGroup
from ebrl.train.checkpoint import Checkpoint
from ebrl.train.trainer import Trainer
from tests.helpers import VersionedPolicy, assert_sound, the_failure, virtually
from tests.test_resume import SavedLearner
from tests.vectors import batched_spec, lengths, vector_training

VARIED = lengths(3, 9)
PER_SLOT = {"sim": lambda n, rng: 0.01 * n, "gen": lambda n, rng: 0.01 * n, "train": lambda n, rng: 0.05}


@virtually
async def test_a_run_goes_on_from_a_checkpoint() -> None:
    spec = batched_spec(4, length=VARIED)
    saved: Checkpoint | None = None
    episodes: list[Episode] = []
    for updates in (3, 6):
        learner = SavedLearner(VersionedPolicy(spec), 32)
        async with Runtime(VirtualMachine(PER_SLOT)) as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(VectorGroup(spec, actor=gen))
            trainer = rt.start(Trainer(envs, learner, updates=updates, resume=saved))
            async for report in trainer:
                episodes += report.episodes
                assert envs.admission.ledger().balanced
            saved = await trainer.snapshot()
    assert saved is not None
    assert saved.experience.ledger.trained == 6 * 32
    starts = [(e.env, e.episode) for e in episodes]
    assert len(set(starts)) == len(starts) > 20  # no episode twice
    assert {env for env, _ in starts} == set(range(8))


@virtually
async def test_what_is_in_flight_is_lost_whenever_it_is_saved() -> None:
    """Decisions whose outcome is not known yet are no decisions of the run that goes on, and all others are."""
    seen = set()
    async with vector_training(batched_spec(4, length=VARIED), VirtualMachine(PER_SLOT), updates=12) as s:
        async for _ in s.trainer:
            saved = s.envs.save()
            settled = saved.settled(replay=False)
            assert_sound(settled.ledger)
            in_flight = sum(env.in_flight for env in saved.envs)
            assert in_flight == saved.ledger.in_flight
            assert settled.ledger.dropped.get("lost", 0) == in_flight
            assert settled.ledger.started == saved.ledger.started
            seen.add(in_flight)
    assert len(seen) > 1, "saved at moments of several kinds"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "other: the checkpoint is of a group 'envs': use name='envs'"),
        ({"num_groups": 3}, "envs: the checkpoint is of 8 environments, not 12: use as many"),
        ({"group_size": 2}, "envs: the checkpoint is of groups of 1: use group_size=1"),
        ({"seed": 1}, "envs: the checkpoint is of seed 0: use Runtime(seed=0)"),
        ({"id": "x/y"}, "envs: the checkpoint is of 'scripted' in env 0, not 'x/y': use the same specs"),
        ({"task": "t"}, "envs: the checkpoint is of task '' in env 0, not 't': use the same specs"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_group_is_refused(change: dict[str, Any], message: str) -> None:
    async def save() -> Any:
        async with vector_training(batched_spec(4, length=VARIED), updates=2) as s:
            await s.run()
            return s.envs.save()

    async def go_on(saved: Any) -> None:
        spec = batched_spec(4, length=VARIED)
        options = dict(change)
        for key in ("id", "task"):
            if key in options:
                spec = replace(spec, **{key: options.pop(key)})
        seed, compares = options.pop("seed", 0), options.pop("compares", False)
        async with Runtime(VirtualMachine({}), seed=seed) as rt:
            gen = rt.start(Generator(VersionedPolicy(spec)))
            envs = rt.start(VectorGroup(spec, actor=gen, **options))
            envs.open_training(16, 1, groups=compares, saved=saved)

    saved = run_virtual(save())
    error = the_failure(go_on(saved))
    assert isinstance(error, ConfigError)
    assert str(error) == message
