"""``host="auto"``: what is tried, what follows from it, and that it changes nothing but the place."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebrl.cli import main
from ebrl.core.errors import ConfigError
from ebrl.core.machine import LocalMachine
from ebrl.core.records import ArraySpec, EnvSpec, Host, Place
from ebrl.core.run import run
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim import auto, comparison
from ebrl.sim.adapters import Wanted
from ebrl.sim.auto import AHEAD, LATE_S, LATER, Choice, choose, decide
from ebrl.sim.comparison import (
    DECISION_S,
    Comparison,
    Crowd,
    Measured,
    Played,
    Processes,
    Threads,
    compare,
    draws,
    per_s,
)
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.group import EnvGroup
from tests.helpers import leaves, make_spec, scripted_spec, training
from tests.hosting import STEP_S, Holding, OnlyAlone, OnlyInCompany, refuse

KINDS: tuple[Place, ...] = ("thread", "process")
GIVEN = Choice("thread", "a test says so")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try for a short time, and be content with what a busy machine measures."""
    monkeypatch.setattr(comparison, "ALONE_S", 0.05)
    monkeypatch.setattr(comparison, "LEAST_S", 0.1)
    monkeypatch.setattr(auto, "AHEAD", 1.5)
    monkeypatch.setattr(auto, "LATE_S", 10.0)


def chosen(specs: Sequence[EnvSpec], machine: Any = None, **options: Any) -> Choice:
    async def find() -> Choice:
        async with Runtime(machine or LocalMachine(2)) as rt:
            choice = await choose(rt, specs, name="envs", **options)
            assert all(pool.free == pool.units for pool in rt.resources.statistics())
        return choice

    return run(find())


# What follows from a trial.


@pytest.mark.parametrize(
    ("threads", "processes", "host", "why"),
    [
        ((200, 0.001), (100, 0.001), "thread", "faster"),
        ((200, 0.900), (100, 0.001), "thread", "faster"),
        ((100, 0.001), (200, 0.001), "process", "faster"),
        ((98, 0.001), (100, 0.001), "thread", "as fast, and need less"),
        ((102, 0.001), (100, 0.001), "thread", "as fast, and need less"),
        ((98, 0.020), (100, 0.001), "process", "keep the loop waiting"),
        ((102, 0.020), (100, 0.001), "process", "keep the loop waiting"),
        ((102, 0.020), (100, 0.015), "thread", "as fast, and need less"),
        ((102, 0.004), (100, 0.0001), "thread", "as fast, and need less"),
    ],
)
def test_what_follows(
    threads: tuple[float, float],
    processes: tuple[float, float],
    host: Host,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "AHEAD", AHEAD)
    monkeypatch.setattr(auto, "LATE_S", LATE_S)
    tried = Comparison(2, Measured(*threads), Measured(*processes))
    choice = decide(tried)
    assert (choice.host, choice.comparison) == (host, tried)
    assert why in choice.reason


def test_the_reason_has_the_numbers() -> None:
    tried = Comparison(4, Measured(12345.6, 0.0101), Measured(12.34, 0.0004), draws=True)
    assert str(decide(tried)) == (
        "threads, since they are faster: 4 with pictures do 12,346 and 12.3 steps/s in threads and processes, "
        "one delays the loop by 10.1 and 0.4 ms (p99)"
    )


rates = st.floats(0.1, 1e5)
lags = st.floats(0.0, 1.0)


@given(rates, rates, lags, lags, st.floats(1.0, 10.0))
def test_a_choice_costs_little_and_follows_what_is_measured(
    threads: float, processes: float, lag_s: float, other_s: float, more: float
) -> None:
    def in_threads(rate: float, late_s: float) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auto, "AHEAD", AHEAD)
            patch.setattr(auto, "LATE_S", LATE_S)
            return decide(Comparison(2, Measured(rate, late_s), Measured(processes, other_s))).host == "thread"

    found = in_threads(threads, lag_s)
    ours, theirs = (threads, processes) if found else (processes, threads)
    assert ours * AHEAD >= theirs, "what is chosen is hardly slower"
    assert in_threads(more * threads, lag_s) >= found, "faster threads are no reason for processes"
    assert in_threads(threads, more * lag_s) <= found, "later ones are none for threads"
    if lag_s <= max(LATE_S, LATER * other_s):
        assert found == (threads * AHEAD > processes), "where nobody is late, speed decides"


# What is known without a trial.


def test_what_needs_no_trial(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ebrl")
    monkeypatch.setattr(auto, "_try", pytest.fail)

    async def virtually() -> Choice:
        async with Runtime(VirtualMachine({})) as rt:
            return await choose(rt, [scripted_spec()], name="envs")

    assert run_virtual(virtually()) == Choice("thread", "a modelled machine has no processes")
    assert chosen([scripted_spec(), replace(scripted_spec(), crashes=True)]) == Choice(
        "process", "scripted is known to crash"
    )
    choice = chosen([scripted_spec(make=lambda: ScriptedEnv(3, 2))])
    assert choice.host == "thread"
    assert choice.reason.startswith("scripted: make=<function")
    assert "cannot be sent to a process" in choice.reason
    levels = [(record.levelname, record.getMessage().split(", since")[0]) for record in caplog.records]
    assert levels == [
        ("INFO", "envs: simulators run in threads"),
        ("WARNING", "envs: simulators run in processes"),
        ("WARNING", "envs: simulators run in threads"),
    ]


@pytest.mark.parametrize(
    ("count", "cores", "lanes", "memory_mib", "num"),
    [
        (1, 8, None, 0, 2),
        (5, 8, None, 0, 5),
        (20, 8, None, 0, 8),
        (20, 8, 3, 0, 3),
        (20, 1, None, 0, 2),
        (20, 8, None, 120, 4),
        (20, 8, None, 500, 1),
    ],
)
def test_as_many_are_tried_as_can_work_at_once(
    count: int, cores: int, lanes: int | None, memory_mib: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    async def take(runtime: Runtime, specs: Sequence[EnvSpec], name: str) -> Choice:
        tried.append(len(specs))
        held = runtime.resources.pool("memory").units - runtime.resources.pool("memory").free
        assert held == 2 * num * memory_mib
        return GIVEN

    monkeypatch.setattr(auto, "_try", take)
    machine = LocalMachine(cores)
    machine.memory_mib = 1000
    assert chosen([replace(scripted_spec(), memory_mib=memory_mib)] * count, machine, lanes=lanes) == GIVEN
    assert tried == [num]


@pytest.mark.parametrize(("held", "num"), [(0, 4), (100, 4), (400, 3), (800, 1), (801, 0)])
def test_a_trial_has_the_memory_that_is_left(
    held: int, num: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    async def take(runtime: Runtime, specs: Sequence[EnvSpec], name: str) -> Choice:
        tried.append(len(specs))
        return GIVEN

    async def begin() -> Choice:
        machine = LocalMachine(4)
        machine.memory_mib = 1000
        async with Runtime(machine) as rt:
            memory = rt.resources.pool("memory")
            with await memory.acquire(held, "a group that keeps it") if held else nullcontext():
                found = await choose(rt, [replace(scripted_spec(), memory_mib=100)] * 4, name="envs")
                assert memory.free == 1000 - held
        return found

    monkeypatch.setattr(auto, "_try", take)
    found = run(begin())
    assert tried == [num] * bool(num)
    if num:
        assert found == GIVEN
    else:
        assert found == Choice("process", "199 MiB of memory are free, too few for a trial")
        assert caplog.messages == [f"envs: simulators run in {found}"]


def test_a_trial_does_not_wait_behind_whoever_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_try", pytest.fail)

    async def begin() -> Choice:
        machine = LocalMachine(4)
        machine.memory_mib = 1000
        async with Runtime(machine) as rt:
            memory = rt.resources.pool("memory")
            with await memory.acquire(500, "a group that keeps it"):
                waiting = asyncio.ensure_future(memory.acquire(600, "a group that waits for it"))
                await asyncio.sleep(0)
                found = await choose(rt, [replace(scripted_spec(), memory_mib=100)] * 2, name="envs")
                assert memory.statistics().waiting == ("a group that waits for it",)
            (await waiting).release()
        return found

    assert run(begin()) == Choice("process", "500 MiB of memory are free, too few for a trial")


@pytest.mark.parametrize(
    ("name", "kwargs", "gl", "crashes"),
    [
        ("LIBERO/libero_spatial", {"cameras": "agentview"}, "osmesa", True),
        ("robosuite/Lift", {"cameras": "frontview"}, "osmesa", True),
        ("LIBERO/libero_spatial", {"cameras": "agentview"}, "egl", False),
        ("LIBERO/libero_spatial", {}, "osmesa", False),
        ("Meta-World/MT1", {"cameras": "corner2"}, "osmesa", False),
    ],
)
def test_adapters_know_what_crashes(
    name: str, kwargs: dict[str, Any], gl: str, crashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", gl)
    assert Wanted(name, kwargs).spec(name, ScriptedEnv, 10, "task").crashes == crashes


def test_pictures_are_seen() -> None:
    picture, row = ArraySpec((8, 8, 3), "uint8"), ArraySpec((3,), "uint8")
    assert not draws(scripted_spec())
    assert not draws(make_spec(ScriptedEnv, observation={"state": row}))
    assert draws(make_spec(ScriptedEnv, observation={"state": row, "images/front": picture}))


# Trials.


@dataclass
class Scripted:
    """Stands in for simulators: says what they do, and notes what it was asked for."""

    place: Place
    specs: Sequence[EnvSpec]
    step_s: float
    reset_s: float
    asked: list[tuple[Place, float, bool]]

    async def play(self, seconds: float, *, alone: bool = False, anew: bool = False) -> Played:
        self.asked.append((self.place, round(seconds, 6), anew))
        num = 1 if alone else 10 * len(self.asked)
        return Played(num, 2 * anew, 2.0, self.step_s, self.reset_s, 0.25 if alone else 9.0)


@pytest.mark.parametrize(
    ("horizon", "step_s", "reset_s", "seconds"),
    [
        (None, 0.001, 0.5, 0.6),  # the least
        (None, 0.050, 0.5, 1.0),  # 20 steps of the slower place
        (100, 0.020, 0.5, 2.5),  # an episode
        (100, 0.020, 5.0, 4.0),  # the most
    ],
)
def test_all_play_by_turns_for_as_long_as_they_need(
    horizon: int | None, step_s: float, reset_s: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "LEAST_S", 0.6)
    specs, asked = [scripted_spec(horizon=horizon)] * 2, list[tuple[Place, float, bool]]()
    places: list[Any] = [
        Scripted("thread", specs, step_s, reset_s, asked),
        Scripted("process", specs, step_s / 2, reset_s, asked),
    ]
    found = asyncio.run(compare(*places))
    assert asked[:2] == [("thread", 0.05, True), ("process", 0.05, True)]
    turns = ["process", "thread", "thread", "process", "process", "thread"]
    assert [place for place, _, _ in asked[2:]] == turns
    assert [each for _, each, _ in asked[2:]] == [pytest.approx(seconds / 3, abs=1e-5)] * 6
    assert [anew for _, _, anew in asked[2:]] == [True] * 2 + [False] * 4
    threads, processes = (sum(10 * (i + 3) for i in range(6) if turns[i] == place) for place in KINDS)
    played = Played(threads, 2, 6.0, 0.0, reset_s, 0.0), Played(processes, 2, 6.0, 0.0, reset_s, 0.0)
    rates = [pytest.approx(per_s([each], 2, horizon)) for each in played]
    assert [found.threads.steps_per_s, found.processes.steps_per_s] == rates
    assert (found.num, found.threads.lag_s, found.processes.lag_s) == (2, 0.25, 0.25)


@pytest.mark.parametrize(
    ("num", "num_steps", "num_resets", "elapsed_s", "horizon", "rate"),
    [
        (1, 50, 1, 1.0, 100, 100 / 1.5),  # half of an episode
        (1, 100, 1, 1.5, 100, 100 / 1.5),
        (1, 150, 2, 2.5, 100, 100 / 1.5),
        (2, 100, 2, 1.0, 100, 200 / 1.5),
        (2, 250, 6, 2.75, 500, 2 * 62.5 / (0.625 + 0.5)),  # they end before the horizon
        (2, 250, 6, 2.75, None, 2 * 62.5 / (0.625 + 0.5)),
        (1, 50, 1, 1.0, None, 50.0),
    ],
)
def test_the_rate_is_that_of_whole_episodes(
    num: int, num_steps: int, num_resets: int, elapsed_s: float, horizon: int | None, rate: float
) -> None:
    first = Played(num_steps - 10, num, elapsed_s - 0.1, 0.01, 0.5, 0.0)  # a step takes 10 ms
    further = Played(10, num_resets - num, 0.1, 0.01, 0.5, 0.0)
    assert per_s([first, further], num, horizon) == pytest.approx(rate)


def test_cores_are_held_while_simulators_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[str, int]] = []

    async def main() -> None:
        async with Runtime(LocalMachine(3)) as rt:
            pool = rt.resources.pool("cores")

            async def opening(self: Any) -> None:
                held.append((self.place, pool.units - pool.free))

            async def comparing(*_: Any) -> Comparison:
                held.append(("both", pool.units - pool.free))
                return Comparison(2, Measured(1.0, 0.0), Measured(2.0, 0.0))

            monkeypatch.setattr(Threads, "open", opening)
            monkeypatch.setattr(Processes, "open", opening)
            monkeypatch.setattr(auto, "compare", comparing)
            assert (await choose(rt, [scripted_spec()] * 2, name="envs")).host == "process"
            assert pool.free == pool.units

    run(main())
    assert held == [("thread", 0), ("process", 0), ("both", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "host", "ahead"),
    [(Holding, "process", 1.05), (functools.partial(ScriptedEnv, latency_s=STEP_S), "thread", 3.0)],
    ids=["holds the lock", "sleeps"],
)
def test_simulators_that_hold_the_lock_get_processes(
    make: Any, host: Host, ahead: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ebrl")
    monkeypatch.setattr(auto, "AHEAD", ahead)  # they are as fast as each other, or twice as fast: far from the bound
    monkeypatch.setattr(comparison, "LEAST_STEPS", 6)
    choice = chosen([scripted_spec(make=functools.partial(make, 3, 2), horizon=5)] * 3)
    assert choice.host == host, choice
    assert choice.comparison is not None
    assert choice.comparison.num == 2
    assert f"envs: simulators run in {choice}" in caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "host", "words"),
    [
        (functools.partial(OnlyAlone, "crash"), "process", "in a trial of threads: HostDied.*SIGSEGV"),
        (functools.partial(OnlyAlone, "raise"), "process", "in a trial of threads: ScriptedFault.*another one"),
        (functools.partial(OnlyInCompany, "crash"), "process", "threads cannot be ended: HostDied.*SIGSEGV"),
        (functools.partial(OnlyInCompany, "raise"), "thread", "in a process, and none did in a thread: ScriptedFault"),
    ],
)
def test_a_simulator_that_fails_in_a_trial_harms_nobody(
    make: Any, host: Host, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ebrl")
    choice = chosen([scripted_spec(make=make)] * 2)
    assert choice.host == host
    assert re.search(words, choice.reason), choice
    assert caplog.messages[-1] == f"envs: simulators run in {choice}"


@pytest.mark.slow
def test_a_simulator_that_hangs_in_a_trial_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LIMIT_S", 2.0)
    choice = chosen([scripted_spec(make=functools.partial(OnlyAlone, "hang"))] * 2)
    assert choice.host == "process"
    assert "in a trial of threads: CallTimeout('a trial has not ended within 2 s')" in choice.reason


@pytest.mark.slow
def test_what_cannot_be_built_anywhere_ends_the_run() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        chosen([scripted_spec(make=refuse)] * 2)
    (error,) = leaves(caught.value)
    assert isinstance(error, ConfigError)
    assert str(error) == "pictures need a display"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["open", "play"])
@pytest.mark.parametrize("place", [Threads, Processes])
def test_a_run_that_ends_in_a_trial_ends_soon(place: Any, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    real = getattr(place, when)

    async def tell(*args: Any, **options: Any) -> Any:
        begun.set()
        return await real(*args, **options)

    monkeypatch.setattr(place, when, tell)
    monkeypatch.setattr(comparison, "ALONE_S", 30.0)
    spec = scripted_spec(length=1000, latency_s=0.01)

    async def begin() -> float:
        async with Runtime(LocalMachine(2)) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            envs = rt.start(EnvGroup(spec, actor=gen, count=2, host="auto"))
            await begun.wait()
            assert envs.choice is None
            ended_s = time.monotonic()
        assert all(pool.free == pool.units for pool in rt.resources.statistics())
        return time.monotonic() - ended_s

    assert run(begin()) < 2.0


def test_for_every_step_of_a_trial_something_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed_s = [0.0]

    def tick() -> float:
        computed_s[0] += DECISION_S / 8
        return computed_s[0]

    monkeypatch.setattr(comparison, "thread_time", tick)
    crowd, interval_s = Crowd([scripted_spec(length=10**6)]), sys.getswitchinterval()
    try:
        crowd.open()
        computed_s[0] = 0.0
        played = crowd.play(0.01, False, False)
    finally:
        crowd.close()
        sys.setswitchinterval(interval_s)
    assert 1.0 <= computed_s[0] / (DECISION_S * played.num_steps) <= 1.3


def test_a_crowd_that_was_never_opened_is_closed() -> None:
    Crowd([scripted_spec()]).close()


def test_one_that_plays_alone_begins_with_a_reset() -> None:
    crowd, interval_s = Crowd([scripted_spec(length=10**6)] * 2), sys.getswitchinterval()
    try:
        crowd.open()
        both, alone = crowd.play(1e-9, False, False), crowd.play(1e-9, True, True)
    finally:
        crowd.close()
        sys.setswitchinterval(interval_s)
    assert (both.num_steps, both.reset_s, alone.num_steps) == (2, 0.0, 1)
    assert alone.reset_s > 0.0


# Groups.


@pytest.mark.slow
def test_the_place_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [scripted_spec(length=5, task="a"), scripted_spec(length=7, task="b")]

    async def train(host: Host) -> tuple[Any, Choice | None]:
        machine = LocalMachine(2)
        async with training(specs, machine, batch_size=32, max_lag=0, deterministic=True, host=host) as stage:
            async for _ in stage.trainer:
                pass
            assert stage.envs.reading().num_envs == 4
        rows = [
            (d.env, d.episode, d.index, d.obs.tobytes(), d.out.action.tobytes(), d.rewards, d.terminated, d.truncated)
            for d in stage.learner.decisions
            if not isinstance(d.obs, dict)
        ]
        return rows, stage.envs.choice

    hosts: tuple[Host, ...] = ("thread", "process", "auto")
    found = {host: run(train(host)) for host in hosts}
    assert len(found["thread"][0]) == 128
    assert found["thread"][0] == found["process"][0] == found["auto"][0]
    choice = found["auto"][1]
    assert choice is not None
    assert choice.comparison is not None
    assert found["thread"][1] is None


@pytest.mark.parametrize("kind", [LocalMachine, lambda cores: VirtualMachine({}, num_cores=cores)])
def test_a_group_waits_for_its_place(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = scripted_spec(length=4)

    async def choosing(runtime: Runtime, specs: Sequence[EnvSpec], *, lanes: int | None, name: str) -> Choice:
        assert (len(specs), lanes, name) == (3, 1, "mine")
        await proceed.wait()
        return GIVEN

    proceed = asyncio.Event()
    monkeypatch.setattr("ebrl.sim.group.choose", choosing)

    async def begin() -> None:
        async with Runtime(kind(2)) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            envs = rt.start(EnvGroup(spec, actor=gen, count=3, lanes=1, host="auto", name="mine"))
            running = rt.spawn(envs.run_episodes([1, 2, 3]), "episodes")
            await asyncio.sleep(0.0)
            await asyncio.sleep(0.0)
            assert (envs.reading().num_envs, envs.reading().cpu_part, envs.choice) == (0, 1.0, None)
            assert envs.statistics()["busy_s"] == 0.0
            with pytest.raises(ConfigError, match="still being built"):
                envs.save()
            proceed.set()
            assert [episode.num_steps for episode in await running] == [4, 4, 4]
            assert envs.choice == GIVEN

    if kind is LocalMachine:
        run(begin())
    else:
        run_virtual(begin())


# On the command line.


@pytest.mark.slow
def test_commands_say_what_was_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def take(runtime: Runtime, specs: Sequence[EnvSpec], name: str) -> Choice:
        return GIVEN

    monkeypatch.setattr(auto, "_try", take)
    gymnasium.register("AutoTest-v0", ScriptedEnv)  # type: ignore[arg-type]  # a class is a creator too
    monkeypatch.delitem(gymnasium.registry, "AutoTest-v0")  # afterwards
    gymnasium.register("AutoTest-v0", ScriptedEnv)  # type: ignore[arg-type]
    line = ["--num-envs", "2", "--ppo.batch-size", "16", "--ppo.minibatch-size", "16", "--updates", "2"]
    folder = str(tmp_path / "run")
    assert main(["train", "--env", "AutoTest-v0", "--host", "auto", *line, "--run-dir", folder]) == 0
    told = "simulators run in threads, since a test says so"
    assert capsys.readouterr().out.count(told) == 1
    assert main(["train", "--resume", folder, "--updates", "3"]) == 0
    assert capsys.readouterr().out.count(told) == 1
    assert main(["probe", "AutoTest-v0", "--host", "auto", "--seconds", "0.02", "--out", str(tmp_path / "p.json")]) == 0
    shown = capsys.readouterr().out
    assert told in shown
    assert "AutoTest-v0: random actions, a thread for each simulator" in shown
