"""Simulators that fail in real threads and processes: nothing hangs, leaks or stays behind, and all go on."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebrl.core.errors import CallTimeout, ConfigError, HostDied
from ebrl.core.machine import LocalMachine
from ebrl.core.records import EnvSpec
from ebrl.core.runtime import Runtime
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.group import EnvGroup
from ebrl.sim.process import ProcessHost
from ebrl.train.trainer import Trainer
from tests.faulty import Faulty, opened_at_the_end
from tests.helpers import assert_sound, leaves, scripted_spec
from tests.pipeline import CountingLearner

pytestmark = pytest.mark.slow
POLICY = FailurePolicy(build_s=60.0, reset_s=60.0, call_s=60.0, backoff_s=0.01)
HASTY = FailurePolicy(build_s=0.4, reset_s=0.4, call_s=0.4, per_env=None, backoff_s=0.01)
SHUTDOWN_S = 2.0


def again(num: int, episodes: int = 3) -> Callable[[EnvGroup], bool]:
    """Whether so many simulators were built again, and everybody has gone on since."""
    began: list[list[int]] = []

    def done(envs: EnvGroup) -> bool:
        now = [context.episode for context in envs._contexts]
        if envs.faults["restarts"] >= num and not began:
            began.append(now)
        return bool(began) and all(a + episodes <= b for a, b in zip(began[0], now, strict=True))

    return done


async def run(
    spec: EnvSpec,
    done: Callable[[EnvGroup], bool],
    act: Callable[[EnvGroup], None] = lambda envs: None,
    *,
    count: int = 3,
    ends_well: bool = True,
    **group: Any,
) -> EnvGroup:
    """Train until `done`; `act` is called after the first update."""
    async with Runtime(LocalMachine(2)) as rt:
        policy = ScriptedPolicy(spec)
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(spec, actor=gen, count=count, **{"failures": POLICY, **group}))
        learner = CountingLearner(policy, 4 * count)
        async for report in rt.start(Trainer(envs, learner, updates=10**6, max_lag=4)):
            assert_sound(envs.admission.ledger())
            if report.update == 1:
                act(envs)
            if done(envs):
                break
        ended_s = time.monotonic()
    assert time.monotonic() - ended_s < SHUTDOWN_S
    assert not ends_well or all(pool.free == pool.units for pool in rt.resources.statistics())
    return envs


def faulty(tmp_path: Path, how: str, where: str) -> EnvSpec:
    make = functools.partial(Faulty, str(tmp_path / "token"), how, where)
    return scripted_spec(make=make)


def test_only_the_guilty_one_is_charged(tmp_path: Path) -> None:
    policy = FailurePolicy(per_env=1, build_s=None, reset_s=None, call_s=None)
    spec = faulty(tmp_path, "crash", "step")
    envs = asyncio.run(run(spec, again(3), host="process", lanes=1, failures=policy))
    assert sorted(len(times) for times in envs.recovery._failures._of_env) == [0, 0, 1]


@pytest.mark.parametrize("where", ["build", "reset", "step"])
def test_what_hangs_in_a_thread_is_named_and_its_lane_replaced(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ebrl")
    with opened_at_the_end():
        envs = asyncio.run(run(faulty(tmp_path, "hang", where), again(1), host="thread", failures=HASTY))
    assert envs.faults["leaked_threads"] >= 1
    assert envs.faults["restarts"] == envs.faults["leaked_threads"]
    (told, *_) = [record.getMessage() for record in caplog.records if "leaks" in record.getMessage()]
    assert told.startswith("env ")
    assert "has not ended within 0.4 s. Lane envs-" in told
    assert "is given up and its thread leaks, the 1. of this group; it runs here:" in told
    assert "in come" in told
    assert "GATE.wait()" in told


@pytest.mark.blocks("looks for a file between two updates")
@pytest.mark.parametrize("host", ["thread", "process"])
def test_a_run_ends_although_one_hangs_that_has_time_left(host: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    with opened_at_the_end():
        spec = faulty(tmp_path, "hang", "step")
        envs = asyncio.run(run(spec, lambda envs: token.exists(), host=host, ends_well=False))
    assert envs.faults["restarts"] == 0


def failure(spec: EnvSpec, **group: Any) -> list[BaseException]:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run(spec, lambda envs: False, **group))
    return list(leaves(caught.value))


def test_a_process_that_always_dies_spends_its_budget() -> None:
    policy = FailurePolicy(per_env=1, backoff_s=0.01)
    (error,) = failure(scripted_spec(faults={2: "crash"}), host="process", count=1, failures=policy)
    assert isinstance(error, HostDied)
    assert str(error) == "the process of envs-process-0 ended by itself: signal SIGSEGV"
    where, why = error.__notes__
    assert where.startswith("env 0 episode 1 decision 3 seed ")
    assert why.startswith("env 0 was restarted 1 times within an hour")


def test_raising_ends_the_run_at_the_deadline_too(tmp_path: Path) -> None:
    policy = FailurePolicy("raise", build_s=20.0, call_s=0.3)
    errors = failure(faulty(tmp_path, "hang", "step"), host="process", count=1, failures=policy)
    assert [type(error) for error in errors] == [CallTimeout]


def test_what_cannot_be_sent_to_a_process_is_no_failure() -> None:
    spec = scripted_spec(make=lambda: ScriptedEnv(3, 2))
    errors = failure(spec, host="process", count=4, lanes=2)
    assert len(errors) == 1
    assert isinstance(errors[0], ConfigError)
    assert 'pass host="thread"' in str(errors[0])


def read_stdin(env: Any) -> tuple[str, str]:
    try:
        return os.readlink("/proc/self/fd/0"), input("(y|n) ")
    except EOFError:
        return os.readlink("/proc/self/fd/0"), "nobody answers"


def test_nobody_is_asked_anything() -> None:
    async def main() -> None:
        machine = LocalMachine()
        host = ProcessHost([scripted_spec()], machine, None, "host")
        try:
            await host.open()
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            host.slots[0].call(future, read_stdin)
            assert await future == ("/dev/null", "nobody answers")
        finally:
            await host.aclose(10.0)
            await machine.aclose(deadline_s=1.0)

    asyncio.run(main())
