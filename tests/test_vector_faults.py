"""Batched simulators that fail, in virtual time: that one is built again, and the others notice nothing."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebrl.core.errors import CallTimeout, ConfigError, InvalidAction
from ebrl.core.records import EnvSpec, GroupRule
from ebrl.core.rng import episode_seed
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import CONSTRUCTION, ScriptedEnv, ScriptedFault
from ebrl.sim.programs import vector_rollout
from ebrl.sim.spec import in_turn
from ebrl.sim.vector import VectorGroup
from ebrl.sim.vector_context import VectorContext
from ebrl.train.evaluate import evaluate
from tests.helpers import assert_sound, the_failure
from tests.vectors import batched_spec, vector_training

LENGTH, SLOTS = 4, 3
POLICY = FailurePolicy(build_s=40.0, reset_s=20.0, call_s=10.0)


class Noted(ScriptedEnv):
    """Writes down the seeds of its resets."""

    def __init__(self, seeds: list[int], **options: Any) -> None:
        super().__init__(3, 2, length=LENGTH, **options)
        self.seeds = seeds

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed or 0)
        return super().reset(seed=seed)


class Fleet:
    """Makes batched simulators one after the other; the first slot of the first ones may have faults."""

    def __init__(self, *faults: Mapping[int, Any]) -> None:
        self.seeds: list[list[int]] = []
        self._faults = iter(faults)

    def spec(self) -> EnvSpec:
        return replace(batched_spec(SLOTS), make=self)

    def __call__(self) -> Any:
        slots = itertools.chain([next(self._faults, {})], itertools.repeat({}))

        def slot() -> Noted:
            log: list[int] = []
            self.seeds.append(log)
            return Noted(log, faults=next(slots))

        return in_turn(slot, SLOTS)


def machine(step_s: float = 1.0) -> VirtualMachine:
    return VirtualMachine({"sim": lambda n, rng: step_s if n else 0.0}, num_cores=64)


FAULTS: dict[str, dict[int, Any]] = {
    "raises in a reset": {0: "raise"},
    "raises in a later reset": {LENGTH + 1: "raise"},
    "raises in a step": {3: "raise"},
    "raises in its constructor": {CONSTRUCTION: "raise"},
    "NaN": {2: "nan"},
    "another shape": {2: "shape"},
    "hangs in a reset": {0: "hang"},
    "hangs in a step": {2: "hang"},
    "hangs in its constructor": {CONSTRUCTION: "hang"},
}


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_one_that_fails_is_built_again_and_the_others_go_on(name: str, num_groups: int) -> None:
    fleet = Fleet(FAULTS[name])

    async def main() -> VectorGroup:
        options: dict[str, Any] = {"num_groups": num_groups, "failures": POLICY, "updates": 12}
        batch_size = LENGTH * SLOTS * num_groups
        async with vector_training(fleet.spec(), machine(), batch_size=batch_size, max_lag=2, **options) as s:
            await s.run()
            assert_sound(s.envs.admission.ledger())
            assert {d.env for d in s.learner.decisions} == set(range(num_groups * SLOTS))
            return s.envs

    envs = run_virtual(main())
    hangs = "hangs" in name
    assert envs.faults == {"restarts": 1, "dropped_envs": 0, "leaked_threads": int(hangs)}
    assert envs.statistics()["restarts"] == 1
    begun = Counter(itertools.chain.from_iterable(fleet.seeds))
    assert set(begun.values()) == {1}, "an episode that has failed is not tried again"
    for env in range(num_groups * SLOTS):
        missing = [seed for episode in range(4) if (seed := episode_seed(0, env, episode)) not in begun]
        beside = (
            0 < env < SLOTS and "raises" in name and "reset" in name
        )  # a reset that fails does not come to the slots behind
        assert len(missing) == beside, env


def test_all_slots_of_one_that_fails_lose_what_is_in_flight() -> None:
    async def main() -> None:
        fleet = Fleet({2: "raise"})
        async with vector_training(fleet.spec(), machine(), batch_size=12, num_groups=1, failures=POLICY) as s:
            await s.run()
            ledger = s.envs.admission.ledger()
            assert ledger.dropped == {"lost": SLOTS}
        (first, *_) = s.learner.batches
        cut = [segment for segment in first.segments if segment.reason == "lost"]
        assert [[d.index for d in segment.decisions] for segment in cut] == [[0]] * SLOTS

    run_virtual(main())


def test_a_hang_ends_a_run_that_is_to_raise() -> None:
    async def main() -> None:
        policy = FailurePolicy("raise", call_s=10.0)
        async with vector_training(Fleet({2: "hang"}).spec(), machine(), num_groups=2, failures=policy) as s:
            await s.run()

    error = the_failure(main())
    assert isinstance(error, CallTimeout)
    assert "simulator 0 with envs 0 to 2" in error.__notes__[0]


def test_an_action_that_is_wrong_is_no_fault_of_the_simulator() -> None:
    groups: list[VectorGroup] = []

    async def program(env: VectorContext) -> None:
        obs, _ = await env.reset()
        await env.act(obs)
        await env.step(np.zeros((SLOTS, 7), np.float32))

    async def main() -> None:
        async with vector_training(batched_spec(SLOTS), machine(), program=program, num_groups=1, failures=POLICY) as s:
            groups.append(s.envs)
            await s.run()

    error = the_failure(main())
    assert isinstance(error, InvalidAction)
    assert "actions: expected float32 of shape (3, 2) or (3, H, 2), got float32 of shape (3, 7)" in str(error)
    assert groups[0].faults["restarts"] == 0


def test_a_budget_is_of_a_simulator() -> None:
    class Broken(ScriptedEnv):
        def step(self, action: Any) -> Any:
            raise ScriptedFault("always")

    async def main() -> None:
        spec = replace(batched_spec(2), make=functools.partial(in_turn, lambda: Broken(3, 2), 2))
        async with vector_training(spec, machine(), failures=FailurePolicy(per_env=2)) as s:
            await s.run()

    error = the_failure(main())
    assert isinstance(error, ScriptedFault)
    budget = "simulator 0 was restarted 2 times within an hour, which is its budget: see FailurePolicy.per_env"
    assert error.__notes__[1] == budget


def test_one_that_hangs_when_its_program_has_left_the_call_is_charged() -> None:
    async def program(env: VectorContext) -> None:
        try:
            async with asyncio.timeout(6.0):
                await vector_rollout(env)
        except TimeoutError:
            await asyncio.sleep(50.0)

    async def main() -> None:
        policy = FailurePolicy(per_env=0, call_s=10.0)
        async with vector_training(Fleet({2: "hang"}).spec(), machine(), program=program, failures=policy) as s:
            await s.run()

    assert isinstance(the_failure(main()), CallTimeout)


def test_one_that_is_dropped_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fleet, policy = Fleet({2: "raise"}), FailurePolicy("drop")
        async with vector_training(fleet.spec(), machine(), num_groups=2, updates=6, failures=policy) as s:
            await s.run()
            assert s.envs.reading().num_envs == 1
            assert s.envs.faults["dropped_envs"] == 1
        assert {d.env for d in s.learner.batches[-1].decisions} == {3, 4, 5}

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert "envs: simulator 0 is dropped, 1 go on" in caplog.text


@pytest.mark.parametrize("options", [{"sampling": "quota"}, {"rule": GroupRule(), "group_size": 3}])
def test_none_may_be_dropped_where_all_are_needed(options: dict[str, Any]) -> None:
    async def main() -> None:
        async with vector_training(batched_spec(3), batch_size=18, failures=FailurePolicy("drop"), **options) as s:
            await s.run()

    with pytest.raises(ConfigError, match=r'FailurePolicy\("drop"\) does not go with sampling="quota"'):
        raise the_failure(main())


@pytest.mark.parametrize("name", FAULTS)
def test_an_evaluation_counts_every_seed(name: str) -> None:
    async def main() -> None:
        fleet = Fleet(FAULTS[name])
        async with Runtime(machine()) as rt:
            gen = rt.start(Generator(ScriptedPolicy(fleet.spec())))
            envs = rt.start(VectorGroup(fleet.spec(), actor=gen, num_groups=2, failures=POLICY))
            report = await evaluate(envs, range(60))
            assert [episode.seed for episode in report.episodes] == list(range(60))
            assert {episode.num_steps for episode in report.episodes} == {LENGTH}
            assert envs.faults["restarts"] == 1

    run_virtual(main())


def test_groups_of_one_that_fails_are_given_up_whole() -> None:
    async def main() -> None:
        options: dict[str, Any] = {"rule": GroupRule(success_bounds=None), "group_size": 3, "num_groups": 2}
        fleet = Fleet({LENGTH + 3: "raise"})
        async with vector_training(fleet.spec(), machine(), batch_size=24, failures=POLICY, **options) as s:
            await s.run()
            ledger = s.envs.admission.ledger()
            assert_sound(ledger)
            assert ledger.dropped["incomplete"] + ledger.dropped["lost"] > 0
        for batch in s.learner.batches:
            whole = Counter((d.env // 3, d.episode) for d in batch.decisions)
            assert all(num == 3 * LENGTH for num in whole.values())

    run_virtual(main())


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    max_lag=st.integers(0, 2),
    num_groups=st.integers(1, 3),
    group_size=st.sampled_from([1, 3]),
    deterministic=st.booleans(),
)
def test_a_storm(seed: int, max_lag: int, num_groups: int, group_size: int, deterministic: bool) -> None:
    """Each call of a slot fails with a probability of 2 %, in one way or another."""
    rng = np.random.default_rng(seed)

    def faults() -> dict[int, Any]:
        hit = np.flatnonzero(rng.random(300) < 0.02)
        return {int(i): str(rng.choice(["raise", "nan", "hang", "shape"])) for i in hit}

    async def main() -> None:
        fleet = Fleet(*(faults() for _ in range(200)))
        policy = replace(POLICY, per_env=None, backoff_s=0.0)
        rule = GroupRule(success_bounds=None) if group_size > 1 else None
        options: dict[str, Any] = {"num_groups": num_groups, "group_size": group_size, "rule": rule, "updates": 10}
        options |= {"max_lag": max_lag, "deterministic": deterministic and max_lag == 0, "failures": policy}
        async with vector_training(fleet.spec(), machine(), batch_size=6 * SLOTS * num_groups, **options) as s:
            async for _ in s.trainer:
                assert_sound(s.envs.admission.ledger())
            begun = Counter(itertools.chain.from_iterable(fleet.seeds))
            assert max(begun.values()) == group_size

    run_virtual(main())
