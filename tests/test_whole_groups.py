"""Groups are trained whole or not at all, at every lag, and all have their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from ebrl.core.records import Array, Segment
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.train.assemble import Dropped
from ebrl.train.groups import GroupAssembler
from tests.helpers import make_segment, scripted_spec, training
from tests.test_asynchrony import exponential, one_second
from tests.test_groups import ALL, Key, exhaust, key_of


def group_of(number: int, length: int = 2, *, version: int | Sequence[int] = 0, episode: int = 0) -> list[Segment]:
    """Return two members, of `length` decisions each."""
    return [make_segment(length, env=2 * number + i, version=version, episode=episode, end="truncated") for i in (0, 1)]


def taken(assembler: GroupAssembler, version: int) -> tuple[list[Key] | None, list[Dropped]]:
    batch, dropped = assembler.take(version)
    if batch is None:
        return None, dropped
    assert batch.version == version
    places = [(segment.env, segment.decisions[0].index) for segment in batch.segments]
    assert places == sorted(places)
    return list(dict.fromkeys(key_of(segment, 2) for segment in batch.segments)), dropped


def filled(batch_size: int, max_lag: int, *groups: list[Segment]) -> GroupAssembler:
    assembler = GroupAssembler(batch_size, max_lag, 2)
    for segment in (segment for group in groups for segment in group):
        assert assembler.add(segment) == []
    return assembler


def test_a_batch_has_whole_groups_and_what_is_left_waits() -> None:
    assembler = filled(6, 2, group_of(1), group_of(0), group_of(2))
    assert taken(assembler, 1) == ([(0, 0), (1, 0)], [])
    assert (len(assembler), taken(assembler, 1)) == (4, (None, []))
    assert {segment.env for segment in assembler.segments} == {4, 5}


def test_a_group_is_as_old_as_its_oldest_decision() -> None:
    old, young, late = group_of(0, version=[0, 2]), group_of(1, version=1), group_of(2, version=[0, 3])
    assert taken(filled(1, 9, young, old), 2) == ([(0, 0)], [])
    assembler = filled(1, 2, young, late)
    assert taken(assembler, 3) == ([(1, 0)], [Dropped(4, "masked", 2), Dropped(5, "masked", 2)])
    assert len(assembler) == 0


def test_a_batch_has_all_that_could_not_wait_for_the_next() -> None:
    groups = [group_of(number, version=number // 2) for number in range(4)]
    assert taken(filled(4, 1, *groups), 1) == ([(0, 0), (1, 0)], []), "two in place of one"
    assert taken(filled(4, 0, *groups[:2]), 0) == ([(0, 0), (1, 0)], [])


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    batch_size=st.integers(1, 20),
    max_lag=st.integers(0, 3),
    data=st.data(),
)
def test_every_group_is_in_one_batch_or_dropped(
    lengths: list[int], batch_size: int, max_lag: int, data: st.DataObject
) -> None:
    assembler, version = GroupAssembler(batch_size, max_lag, 2), 0
    ended: list[int] = []
    num_of: list[int] = []
    num_dropped = 0
    for episode, length in enumerate(lengths):
        first = data.draw(st.integers(max(0, version - 4), version))
        for segment in group_of(0, length, version=sorted([first] + [version] * (length - 1)), episode=episode):
            assembler.add(segment)
        num_of.append(2 * length)
        batch, dropped = assembler.take(version)
        trained = Counter(segment.decisions[0].episode for segment in batch.segments) if batch is not None else {}
        assert set(trained.values()) <= {2}
        if batch is not None:
            assert len(batch.decisions) >= batch_size
            assert batch.lags.max() <= max_lag
            version += 1
        assert not dropped or first < version - max_lag, "nothing becomes too old by waiting"
        ended += trained
        num_dropped += sum(drop.num for drop in dropped)
        assert sum(num_of) == sum(num_of[number] for number in ended) + num_dropped + len(assembler)
    assert len(ended) == len(set(ended))


# In a run.


class Race(gymnasium.Env[Array, Array]):
    """The first action decides: success after five steps, failure after twenty."""

    observation_space = spaces.Box(-9.0, 9.0, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self.num, self.good = 0, False
        return np.zeros(3, np.float32), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.good |= self.num == 0 and bool(action[0] > 0)
        self.num += 1
        end = self.num == (5 if self.good else 20)
        return np.zeros(3, np.float32), float(end and self.good), end, False, {"success": end and self.good}


@pytest.mark.parametrize(("max_lag", "batch_size"), [(0, 250), (1, 250), (1, 90), (2, 250)])
def test_who_succeeds_early_is_trained_no_more_than_who_fails_late(max_lag: int, batch_size: int) -> None:
    """Of groups that were trained and of groups that ended too late, all; at lag 0 there are no others."""
    spec = scripted_spec(make=Race)
    options: dict[str, Any] = {"count": 16, "group_size": 4, "batch_size": batch_size, "max_lag": max_lag}

    async def main() -> dict[str, int]:
        machine = VirtualMachine({"sim": one_second, "train": one_second}, num_cores=32)
        async with training(spec, machine, rule=ALL, updates=12, **options) as stage:
            reports = await exhaust(stage)  # groups are whole: that is what is checked in there
        return dict(reports[-1].dropped)

    dropped = run_virtual(main())
    assert set(dropped) <= {"masked"}
    if max_lag != 2:  # there it depends on whether three updates fall into one group
        assert bool(dropped) == (max_lag == 1), "at lag 1 a group that lasts for two updates is too old"


@pytest.mark.parametrize("batch_size", [20, 40, 150])
def test_in_deterministic_mode_all_environments_and_tasks_have_their_share(batch_size: int) -> None:
    """However small a batch is asked for: it holds an episode of every group, or several."""

    async def main() -> None:
        specs = [scripted_spec(length=10, task="a"), scripted_spec(length=10, task="b")]
        machine = VirtualMachine({"sim": exponential, "train": one_second}, num_cores=5)
        options: dict[str, Any] = {"count": 8, "group_size": 2, "batch_size": batch_size, "updates": 3, "max_lag": 0}
        async with training(specs, machine, rule=ALL, deterministic=True, **options) as stage:
            reports = await exhaust(stage)
        waves = -(-batch_size // 80)
        for batch in stage.learner.batches:
            assert Counter(d.env for d in batch.decisions) == dict.fromkeys(range(8), 10 * waves)
            assert Counter(s.task for s in batch.segments for _ in s.decisions) == {"a": 40 * waves, "b": 40 * waves}
        assert reports[-1].dropped == {}

    run_virtual(main())
