"""What is said about simulators that fail, how often, and what closing them costs the others."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ebrl.core.errors import ProgramError, note
from ebrl.core.virtual import run_virtual
from ebrl.sim.child import failure, unpack
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import CLOSE, CONSTRUCTION, ScriptedEnv
from ebrl.sim.group import EnvGroup
from ebrl.sim.programs import rollout
from ebrl.sim.vector_context import VectorContext
from tests.faulty import ClosesBadly, opened_at_the_end
from tests.helpers import recording, scripted_spec, the_failure
from tests.test_faults import Fleet, machine
from tests.test_faults_real import again, faulty, run
from tests.vectors import batched_spec, vector_training

CLOSED_LATE = {2: "raise", CLOSE: "hang"}
PATIENT = FailurePolicy(call_s=10.0, per_env=None)  # 600 s for building


async def failing(make: Callable[[], Any], count: int = 1, seconds: float = 100.0, **group: Any) -> EnvGroup:
    async with recording(
        rollout, spec=scripted_spec(make=make), machine=machine(), count=count, batch_size=9999, **group
    ) as envs:
        await asyncio.sleep(seconds)
        return envs


def test_what_hangs_when_it_is_closed_after_a_failure_has_the_time_of_a_call(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(CLOSED_LATE)
    envs = run_virtual(failing(fleet, 2, lanes=1, failures=PATIENT))
    assert [env.episode > 5 for env in envs._contexts] == [True, True]
    assert envs.faults == {"restarts": 3, "dropped_envs": 0, "leaked_threads": 1}
    assert "env 0 hangs: a close has not ended within 10 s. Lane envs-0 is given up" in caplog.text


def test_what_is_dropped_and_does_not_close_likewise() -> None:
    fleet = Fleet(CLOSED_LATE)
    envs = run_virtual(failing(fleet, 2, lanes=1, failures=FailurePolicy("drop", call_s=10.0)))
    assert envs.faults == {"restarts": 1, "dropped_envs": 1, "leaked_threads": 1}
    assert [env.episode > 5 for env in envs._contexts] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["thread", "process"])
def test_in_real_threads_and_processes_too(host: Any, tmp_path: Path) -> None:
    spec = scripted_spec(make=functools.partial(ClosesBadly, str(tmp_path / "token"), "hang"))
    policy = FailurePolicy(call_s=0.5, per_env=None, backoff_s=0.01)
    with opened_at_the_end():
        envs = asyncio.run(run(spec, again(3), count=2, host=host, lanes=1, failures=policy))
    assert envs.faults["restarts"] >= 3, "it raised, it did not close, and its neighbour was lost with it"


@pytest.mark.slow
@pytest.mark.parametrize("host", ["thread", "process"])
def test_what_raises_when_it_is_closed_for_good_is_told_once(
    host: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = scripted_spec(make=functools.partial(ClosesBadly, str(tmp_path / "token"), "raise"))

    def done(envs: EnvGroup) -> bool:
        return envs.faults["dropped_envs"] == 1

    asyncio.run(run(spec, done, count=2, host=host, lanes=1, failures=FailurePolicy("drop")))
    told = [text for text in caplog.messages if "could not be closed" in text]
    assert told == ["a simulator could not be closed: ScriptedFault('in close')"]


class Elsewhere(ScriptedEnv):
    """Raises one of two kinds of errors in turn."""

    def __init__(self, number: int) -> None:
        super().__init__(3, 2, length=4)
        self.number = number

    def step(self, action: Any) -> Any:
        raise ValueError("joint limit") if self.number % 2 else RuntimeError("no contact")


def test_the_stack_of_each_kind_of_error_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ebrl")
    numbers = itertools.count()
    policy = FailurePolicy(per_env=None, backoff_s=0.1)
    envs = run_virtual(failing(lambda: Elsewhere(next(numbers)), seconds=20.0, failures=policy))
    assert envs.faults["restarts"] >= 6
    told = [record for record in caplog.records if "restart" in record.getMessage()]
    assert [record.exc_info is not None for record in told[:6]] == [True, True, False, False, False, False]
    assert caplog.text.count("Traceback (most recent call last)") == 2


@pytest.mark.slow
def test_that_of_a_process_is_the_one_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(run(faulty(tmp_path, "raise", "step"), again(1), host="process", count=1))
    assert "in the simulator's process:" in caplog.text
    assert "in come" in caplog.text


def test_where_a_build_failed_is_no_episode() -> None:
    policy = FailurePolicy(per_env=0)
    error = the_failure(failing(Fleet({CONSTRUCTION: "raise"}), failures=policy))
    assert error.__notes__[0] == "env 0, while it was built"
    error = the_failure(failing(Fleet({CONSTRUCTION: "raise"}), failures=FailurePolicy("raise")))
    assert error.__notes__ == ["env 0, while it was built"]


@dataclass(frozen=True)
class Refuses(Exception):
    """Takes no notes, as nothing can be set on it."""

    joint: int


class Refusing(ScriptedEnv):
    def step(self, action: Any) -> Any:
        raise Refuses(3)


def test_an_error_that_takes_no_notes_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for policy in (FailurePolicy("raise"), FailurePolicy(per_env=0)):
        caplog.clear()
        error = the_failure(failing(lambda: Refusing(3, 2), failures=policy))
        assert error == Refuses(3)
        assert "Refuses(joint=3) takes no notes, so here: env 0 episode 0 decision 0 " in caplog.text
    assert "which is its budget" in caplog.text


class RefusesPickled(Exception):
    """Takes no notes either, and can be sent from a process."""

    def add_note(self, note: str) -> None:
        raise AttributeError(note)


def test_likewise_on_its_way_from_a_process(caplog: pytest.LogCaptureFixture) -> None:
    value, error = unpack(pickle.dumps(failure(RefusesPickled(3))))
    assert (value, type(error)) == (None, RefusesPickled)
    assert "RefusesPickled(3) takes no notes, so here: in the simulator's process:" in caplog.text
    plain = ValueError("plain")
    note(plain, "more")
    assert plain.__notes__ == ["more"]


def test_a_batched_program_that_only_resets_is_an_error() -> None:
    async def program(env: VectorContext) -> None:
        await env.reset()

    async def main() -> None:
        async with vector_training(batched_spec(2), machine(), num_groups=1, program=program) as stage:
            async with asyncio.timeout(1000.0):  # no segment ever comes
                await stage.run()

    error = the_failure(main())
    assert isinstance(error, ProgramError)
    assert "100 times in a row" in str(error)


def test_a_program_that_catches_the_errors_of_its_steps_is_not_idle() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        try:
            await env.act_step(obs)
        except RuntimeError:
            return

    async def main() -> None:
        policy = FailurePolicy(per_env=None, backoff_s=0.0)
        spec = scripted_spec(faults={1: "raise"})
        async with recording(program, spec=spec, machine=machine(), batch_size=9999, failures=policy) as envs:
            await asyncio.sleep(500.0)
            assert envs.faults["restarts"] > 150

    run_virtual(main())
