"""Groups that play by turns in a run that trains: what `bench.sims` measures hosts with."""

from __future__ import annotations

import pytest

from bench import troupe
from bench.troupe import Troupe
from ebrl.core.runtime import Runtime
from ebrl.core.scope import Scope
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from tests.helpers import scripted_spec

CALL_S = 0.125
LENGTH = 7
RATE = LENGTH / (CALL_S * (LENGTH + 1))  # of one environment, with its resets


@pytest.mark.hogs("a learner computes on the loop where time is virtual")
def test_they_train_and_play_whole_episodes_when_it_is_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troupe, "BATCH_SIZE", 10)
    spec = scripted_spec(length=LENGTH)

    async def begin() -> None:
        machine = VirtualMachine({"sim": lambda n, rng: CALL_S})
        async with Runtime(machine, tune=False) as rt, Scope() as scope:

            def done(what: str) -> list[float]:
                names = ("1-in-thread", "2-in-thread") if what == "env_steps" else ("trainer", "trainer-2")
                return [rt.statistics()[name][what] for name in names]

            one, two = (Troupe(rt, scope, spec, "thread", num) for num in (1, 2))
            assert await one.play(0.0) == pytest.approx(RATE)
            assert done("env_steps") == [LENGTH, 0]
            assert await two.play(0.0) == pytest.approx(2 * RATE)
            assert done("env_steps") == [LENGTH, 2 * LENGTH]
            assert done("updates") == [0, 1]
            began_s = rt.clock()
            assert await one.play(1.5) == pytest.approx(RATE)  # which is in the second episode
            assert rt.clock() - began_s == pytest.approx(2.0)
            assert done("env_steps") == [3 * LENGTH, 2 * LENGTH]
            assert done("updates") == [2, 1]

    run_virtual(begin())
