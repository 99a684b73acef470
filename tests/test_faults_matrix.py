"""Every fault in both hosts, in 1, 2, 19 and 257 environments: real threads and processes, all go on, none is left."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.group import EnvGroup
from ebrl.sim.process import ProcessHost
from ebrl.sim.programs import rollout
from tests.faulty import GATE, BuiltSlowly, opened_at_the_end
from tests.helpers import scripted_spec
from tests.test_faults_real import HASTY, POLICY, again, faulty, run

pytestmark = pytest.mark.slow
LANES = 2  # threads or processes, which the environments share
COUNTS = (1, 2, 19, 257)
HOSTS = ("thread", "process")

QUICK = FailurePolicy(build_s=20.0, reset_s=0.5, call_s=0.5, per_env=None)
SLOW = FailurePolicy(build_s=5.0, per_env=None)  # a process imports before it builds

# Host, what happens, where, and in how many environments.
CELLS = [
    *[(host, "raise", where, COUNTS) for host in HOSTS for where in ("build", "reset", "step")],
    *[(host, how, where, COUNTS) for host in HOSTS for how, where in (("nan", "reset"), ("nan", "step"))],
    *[(host, how, where, COUNTS) for host in HOSTS for how, where in (("shape", "reset"), ("dtype", "step"))],
    *[("process", "exit", where, COUNTS) for where in ("build", "reset", "step")],
    *[("process", "crash", where, counts) for where, counts in (("build", (2,)), ("reset", (2,)), ("step", COUNTS))],
    ("process", "memory", "step", COUNTS),
    *[("thread", "hang", where, COUNTS) for where in ("build", "reset", "step")],
    *[("process", "hang", where, counts) for where, counts in (("build", (19,)), ("reset", (2,)), ("step", COUNTS))],
]


def sharing(count: int) -> tuple[int, int]:
    """Return how many environments share a thread or process, at least and at most."""
    return max(1, count // LANES), -(-count // LANES)


def expected(host: str, how: str, count: int) -> tuple[int, float]:
    """Return how many restarts there are, at least and at most."""
    least, most = sharing(count)
    if how in ("exit", "crash"):
        return least, most  # all that shared the process
    if how == "memory":
        return 1, 2 * most  # it may take its process with it, which has little left
    if how == "hang":
        return (least if host == "process" else 1), math.inf  # what is built again may be late as well
    return 1, 1


@pytest.mark.parametrize(
    ("host", "how", "where", "count"), [(*cell, count) for *cell, counts in CELLS for count in counts]
)
def test_all_go_on_after_a_fault(host: Any, how: Any, where: str, count: int, tmp_path: Path) -> None:
    policy = POLICY
    if how == "hang":
        policy = HASTY if host == "thread" else SLOW if where == "build" else QUICK
    least, most = expected(host, how, count)
    with opened_at_the_end():
        envs = asyncio.run(
            run(faulty(tmp_path, how, where), again(least), host=host, count=count, lanes=LANES, failures=policy)
        )
    assert (tmp_path / "token").exists()
    assert least <= envs.faults["restarts"] <= most
    assert (envs.faults["leaked_threads"] > 0) == ((host, how) == ("thread", "hang"))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("host", HOSTS)
def test_what_raises_when_it_is_closed_ends_as_it_should(
    host: Any, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = faulty(tmp_path, "raise", "close")
    asyncio.run(run(spec, lambda envs: True, host=host, count=count, lanes=LANES))
    assert caplog.messages == ["a simulator could not be closed: ScriptedFault('in close')"]


@pytest.mark.parametrize("count", [1, 257])
@pytest.mark.parametrize("host", HOSTS)
def test_what_hangs_when_it_is_closed_is_given_up(
    host: Any, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened_at_the_end():
        spec = faulty(tmp_path, "hang", "close")
        asyncio.run(run(spec, lambda envs: True, host=host, count=count, lanes=LANES, ends_well=False))
    (told,) = [message for message in caplog.messages if "is lost" in message or "did not close" in message]
    assert told.startswith("lane envs-" if host == "thread" else "envs-process-")


def kill_child(envs: EnvGroup) -> None:
    host = envs._hosts[0]
    assert isinstance(host, ProcessHost)
    assert host._link is not None
    assert host._link._process is not None
    os.kill(host._link._process.pid, signal.SIGKILL)


@pytest.mark.parametrize("count", COUNTS)
def test_a_process_that_is_killed_from_outside_is_started_again(count: int) -> None:
    _, most = sharing(count)
    spec = scripted_spec(length=4)
    envs = asyncio.run(run(spec, again(most), kill_child, host="process", count=count, lanes=LANES))
    assert envs.faults["restarts"] == most, "those of the other process noticed nothing"


def test_a_process_that_ends_between_two_episodes_counts() -> None:
    async def program(env: EnvContext) -> None:
        await rollout(env)
        if env.episode == 1:
            exited = env._group._hosts[0]._link._exited  # type: ignore[attr-defined]
            kill_child(env._group)
            await asyncio.wait([exited])

    def done(envs: EnvGroup) -> bool:
        return envs._contexts[0].episode > 3

    envs = asyncio.run(run(scripted_spec(length=4), done, host="process", count=1, program=program))
    assert envs.faults["restarts"] == 1
    assert [len(times) for times in envs.recovery._failures._of_env] == [1]


@pytest.mark.blocks("waits until a constructor waits")
@pytest.mark.parametrize("host", HOSTS)
def test_a_constructor_that_takes_long_holds_up_whoever_shares_its_thread_or_process(host: Any, tmp_path: Path) -> None:
    token, gate = tmp_path / "token", tmp_path / "gate"
    os.mkfifo(gate)
    seen: list[list[int]] = []

    def gained(envs: EnvGroup) -> list[int]:
        return sorted(env.episode - before for env, before in zip(envs._contexts, seen[-1], strict=True))

    def done(envs: EnvGroup) -> bool:
        if not seen and envs.faults["restarts"]:
            seen.append([env.episode for env in envs._contexts])
        if len(seen) == 1 and gained(envs)[-2] >= 3:
            first, second, *_ = gained(envs)
            assert first <= second <= 1, "a reset may have run before"
            os.close(os.open(gate, os.O_WRONLY))
            seen.append([env.episode for env in envs._contexts])
        return len(seen) == 2 and gained(envs)[0] >= 3

    spec = scripted_spec(make=functools.partial(BuiltSlowly, str(token), str(gate)))
    envs = asyncio.run(run(spec, done, host=host, count=4, lanes=LANES))
    assert envs.faults["restarts"] == 1


STORMS: dict[str, dict[str, float]] = {
    "thread": {"raise": 0.0145, "nan": 0.005, "hang": 0.0005},
    "process": {"raise": 0.014, "nan": 0.005, "exit": 0.0004, "crash": 0.0003, "hang": 0.0003},
}


@pytest.mark.parametrize(("count", "updates"), [(1, 400), (2, 200), (19, 20), (257, 3)])
@pytest.mark.parametrize("host", HOSTS)
def test_a_storm_in_which_two_calls_of_a_hundred_fail(count: int, updates: int, host: Any) -> None:
    gate = GATE if host == "thread" else None  # a process is killed, and needs none
    spec = scripted_spec(length=20, storm=STORMS[host], gate=gate)
    policy = FailurePolicy(build_s=20.0, reset_s=0.5, call_s=0.5, per_env=None, backoff_s=0.001)
    numbers = itertools.count()
    with opened_at_the_end():
        envs = asyncio.run(
            run(spec, lambda envs: next(numbers) >= updates, host=host, count=count, lanes=LANES, failures=policy)
        )
    assert envs.faults["restarts"] > 0.005 * envs.admission.ledger().started
