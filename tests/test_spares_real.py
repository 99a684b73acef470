"""Spare simulators in real threads and processes: the same trajectories, and failures that leave nothing behind."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ebrl.core.machine import LocalMachine
from ebrl.core.records import EnvSpec
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.group import EnvGroup
from ebrl.sim.process import ProcessHost
from tests.faulty import Slow, opened_at_the_end
from tests.helpers import assert_sound, scripted_spec, training
from tests.test_faults_real import HASTY, again, faulty, run
from tests.test_spares import Trajectories, assert_alike, trajectories, used

pytestmark = pytest.mark.slow
hosts = pytest.mark.parametrize("host", ["thread", "process"])


def specs(num: int) -> list[EnvSpec]:
    """Return as many tasks, which differ in what is a success."""
    return [scripted_spec(make=functools.partial(Slow, success_above=0.1 * k), task=f"{k}") for k in range(num)]


async def train(machine: Any, count: int, num_tasks: int, updates: int = 0, **group: Any) -> tuple[Trajectories, int]:
    """Run so many updates, or until spares have served everybody a few times."""
    async with training(specs(num_tasks), machine, count=count, batch_size=16, updates=10**6, **group) as stage:
        async for report in stage.trainer:
            assert_sound(stage.envs.admission.ledger())
            now = stage.envs.statistics()
            if report.update == updates or now["resets_ready"] + now["resets_waited"] > 3 * count:
                break
        assert stage.envs.faults["restarts"] == 0
        return trajectories(stage.learner.decisions), report.update


@hosts
@pytest.mark.parametrize(
    ("count", "spares", "num_tasks", "lanes"), [(16, 4, 1, 2), (16, 16, 3, 2), (8, 8, 2, 3), (2, 2, 2, None)]
)
def test_both_hosts_give_the_trajectories_of_none(
    host: Any, count: int, spares: int, num_tasks: int, lanes: int | None
) -> None:
    options = {"host": host, "spares": spares, "lanes": lanes}
    found, updates = asyncio.run(train(LocalMachine(4), count, num_tasks, **options))
    assert_alike(found, run_virtual(train(VirtualMachine({}), count, num_tasks, updates))[0])


def test_each_simulator_has_a_process_of_its_own_unless_the_user_says_how_many() -> None:
    async def places(spares: int, lanes: int | None) -> list[int]:
        envs = await run(scripted_spec(), lambda envs: True, count=3, host="process", spares=spares, lanes=lanes)
        return [len(host.slots) for host in envs._hosts]

    assert asyncio.run(places(0, None)) == [2, 1]
    assert asyncio.run(places(2, None)) == [1, 1, 1, 1, 1]
    assert asyncio.run(places(2, 1)) == [3, 2]


@pytest.mark.parametrize("how", ["raise", "exit", "crash"])
def test_resets_that_fail_in_a_process_with_spares(how: str, tmp_path: Path) -> None:
    spec = faulty(tmp_path, how, "reset")
    envs = asyncio.run(run(spec, again(1), count=4, spares=3, host="process", lanes=1))
    assert 1 <= envs.faults["restarts"] <= 4
    assert envs.statistics()["spares"] == 3
    assert sum(len(times) for times in envs.recovery._failures._of_env) <= 1, "at most the guilty one is charged"


@hosts
def test_a_reset_that_hangs_in_one_of_them(host: Any, tmp_path: Path) -> None:
    policy = HASTY if host == "thread" else FailurePolicy(build_s=20.0, reset_s=0.5, call_s=20.0, per_env=None)
    with opened_at_the_end():
        spec = faulty(tmp_path, "hang", "reset")
        envs = asyncio.run(run(spec, again(1), count=3, spares=2, host=host, failures=policy, lanes=2))
    assert envs.faults["leaked_threads"] >= (host == "thread")
    assert envs.statistics()["spares"] == 2


def kill_spares(envs: EnvGroup) -> None:
    for host in envs._hosts[1:]:
        assert isinstance(host, ProcessHost)
        assert host._link is not None
        assert host._link._process is not None
        os.kill(host._link._process.pid, signal.SIGKILL)


def test_a_process_of_spares_that_is_killed_is_started_again() -> None:
    spec = scripted_spec(make=functools.partial(Slow, 0.0))
    killed, again_after = list[bool](), again(1)

    def done(envs: EnvGroup) -> bool:
        if envs.statistics()["resets_ready"] > 5 and not killed:
            killed.append(True)
            kill_spares(envs)
        return bool(killed) and again_after(envs)

    envs = asyncio.run(run(spec, done, count=3, spares=3, host="process", lanes=1))
    assert 1 <= envs.faults["restarts"] <= 3 + 3
    assert envs.statistics()["spares"] == 3


@hosts
def test_a_storm_with_spares(host: Any) -> None:
    storm = {"raise": 0.015, "nan": 0.005} if host == "thread" else {"raise": 0.018, "exit": 0.002}
    spec = scripted_spec(make=functools.partial(Slow, 0.001, storm=storm))
    policy = FailurePolicy(per_env=None, backoff_s=0.001)
    numbers = itertools.count()
    options: dict[str, Any] = {"count": 9, "spares": 5, "lanes": 2, "failures": policy}
    envs = asyncio.run(run(spec, lambda envs: next(numbers) >= 60, host=host, **options))
    assert envs.faults["restarts"] > 0.005 * envs.admission.ledger().started
    assert used(envs) > 0.1
    assert envs.statistics()["spares"] == 5
