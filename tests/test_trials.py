"""Trials of ``host="auto"`` that several groups ask for: who makes them, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ebrl.core.machine import LocalMachine
from ebrl.core.records import EnvSpec
from ebrl.core.run import run
from ebrl.core.runtime import Runtime
from ebrl.core.testing import settle
from ebrl.core.virtual import run_virtual
from ebrl.sim import auto
from ebrl.sim.auto import Choice, choose
from tests.helpers import scripted_spec

GIVEN = Choice("thread", "a test says so")


class Trials:
    """Stands in for trials: notes what is tried, and goes on when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[tuple[str, ...]] = []
        self.proceed = asyncio.Event()
        monkeypatch.setattr(auto, "_try", self._try)

    async def _try(self, runtime: Runtime, specs: Sequence[EnvSpec], name: str) -> Choice:
        self.tried.append(tuple(spec.task for spec in specs))
        await self.proceed.wait()
        return GIVEN


A, B, C = (scripted_spec(task=task) for task in "abc")


def test_every_kind_is_tried_once_in_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[list[EnvSpec]] = [[A, B], [A, C], [A, B], [B, A, A, B, A], [replace(B, host="process"), A]]

    async def begin(trials: Trials) -> None:
        for _ in range(2):
            async with Runtime(LocalMachine(3)) as rt:
                for specs in groups:
                    assert await choose(rt, specs, name="envs") == GIVEN

    trials = Trials(monkeypatch)
    trials.proceed.set()
    run(begin(trials))
    assert trials.tried == [("a", "b"), ("a", "c")] * 2


def test_groups_that_begin_together_share_a_trial_and_others_wait_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(trials: Trials) -> None:
        async with Runtime(LocalMachine(2)) as rt:
            groups = ([A] * 2, [A] * 16, [B] * 2, [A] * 3)
            choices = [rt.spawn(choose(rt, specs, name="envs"), f"choose-{i}") for i, specs in enumerate(groups)]
            await settle()
            assert trials.tried == [("a", "a")]
            trials.proceed.set()
            assert await asyncio.gather(*choices) == [GIVEN] * 4

    trials = Trials(monkeypatch)
    run_virtual(begin(trials))  # in which it is known when everybody waits
    assert trials.tried == [("a", "a"), ("b", "b")]


@pytest.mark.parametrize("turns", [0, 1])  # until the second is cancelled too: while it waits, and where it is next
def test_a_trial_that_is_cancelled_is_made_by_the_next_group(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(trials: Trials) -> None:
        async with Runtime(LocalMachine(2)) as rt:
            choices = [asyncio.ensure_future(choose(rt, [A] * 2, name="envs")) for _ in range(3)]
            await settle()
            choices[0].cancel()
            for _ in range(turns):
                await asyncio.sleep(0)
            assert choices[0].done() == bool(turns)
            choices[1].cancel()
            await settle()
            assert trials.tried == [("a", "a")] * 2
            trials.proceed.set()
            assert await choices[2] == GIVEN
            assert [choice.cancelled() for choice in choices] == [True, True, False]

    trials = Trials(monkeypatch)
    run_virtual(begin(trials))  # in which it is known when everybody waits
    assert len(trials.tried) == 2
