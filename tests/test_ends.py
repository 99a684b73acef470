"""How runs end that host simulators in processes: in order, at once, with one traceback, and with what was learned."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ebrl
from ebrl import PPO, Checkpointer, EnvGroup, FailurePolicy, GaussianPolicy, Generator, PPOConfig, Runtime, Trainer
from ebrl.core.errors import CheckpointError
from ebrl.core.protocols import PolicyOut
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.sim.context import EnvContext
from ebrl.sim.fake import ScriptedEnv, ScriptedFault
from ebrl.sim.programs import rollout
from ebrl.train.checkpoint import Checkpoint
from tests.helpers import ROOT, assert_sound, leaves, scripted_spec, the_failure, training, virtually
from tests.pipeline import CountingLearner

SIGNALLED = """
import signal, time
import ebrl
from tests.helpers import scripted_spec
from ebrl.gen.fake import ScriptedPolicy
from tests.pipeline import CountingLearner

signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    spec = scripted_spec(length=20)
    policy = ScriptedPolicy(spec)
    async with ebrl.Runtime() as rt:
        gen = rt.start(ebrl.Generator(policy))
        envs = rt.start(ebrl.EnvGroup(spec, actor=gen, count=4, host="process", lanes=2))
        async for report in rt.start(ebrl.Trainer(envs, CountingLearner(policy, 40), updates=10**6)):
            if report.update == 3:
                print("ready", flush=True)

try:
    ebrl.run(main())
finally:
    print(time.monotonic(), flush=True)
"""
STUCK = """
import asyncio, functools
from ebrl.core.machine import LocalMachine
from ebrl.core.records import ArraySpec, EnvSpec
from ebrl.sim.process import ProcessHost
from tests.faulty import Stuck

async def main():
    make = functools.partial(Stuck, 3, 2)
    spec = EnvSpec("stuck", make, ArraySpec((3,), "float32"), ArraySpec((2,), "float32"))
    host = ProcessHost([spec], LocalMachine(), None, "host")
    await host.open()
    loop = asyncio.get_running_loop()
    host.slots[0].reset(future := loop.create_future(), 0)
    await future
    print(host._link._process.pid, flush=True)
    host.slots[0].step(future := loop.create_future(), [0.0, 0.0])
    await future

asyncio.run(main())
"""
PATIENCE_S = 30.0
END_S = 2.0


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_order_with_one_traceback(number: signal.Signals) -> None:
    process = start(SIGNALLED)
    assert line(process) == "ready\n"
    process.send_signal(number)
    sent_s = time.monotonic()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert float(out) - sent_s < END_S, "the clock is the same; what the interpreter's own end takes is not ours"
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.splitlines()[-1] == "KeyboardInterrupt" + (": SIGTERM" if number == signal.SIGTERM else "")


def test_a_second_sigterm_leaves_what_closes_because_of_the_first_alone() -> None:
    turns: list[int] = []

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGTERM)
            for turn in range(100):
                await asyncio.sleep(0)
                turns.append(turn)

    with pytest.raises(KeyboardInterrupt):
        ebrl.run(main())
    assert len(turns) == 100


def test_a_second_sigterm_ends_what_blocks_the_loop() -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGTERM)
        assert asyncio.current_task() is not None, "still here, since the loop has not come round"
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("not here")

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        ebrl.run(main())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_a_child_ends_with_a_parent_that_is_killed_whatever_it_does() -> None:
    """It holds its interpreter lock for ever, so that no thread of its own can look after the parent."""
    process = start(STUCK)
    child = os.pidfd_open(int(line(process)))
    try:
        assert line(process) == "stuck\n"
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        assert select.select([child], [], [], END_S)[0]
    finally:
        os.close(child)


class Breaks:
    """Raises from the `num`-th call on; on any thread, which a plain counter would not bear."""

    def __init__(self, num: int) -> None:
        self.num, self.calls = num, itertools.count(1)

    def __call__(self) -> None:
        if next(self.calls) >= self.num:
            raise ValueError("mine")


class BrokenPolicy(ScriptedPolicy):
    """Fails after a while."""

    breaks = Breaks(100)

    def act(self, batch: Any, noise: Any, deterministic: bool = False) -> PolicyOut:
        self.breaks()
        return super().act(batch, noise, deterministic)


class BrokenLearner(CountingLearner):
    """Fails after a while."""

    breaks = Breaks(5)

    def update(self, batch: Any) -> Mapping[str, float]:
        self.breaks()
        return {}


broken_program = Breaks(5)


async def breaking(env: EnvContext) -> None:
    await rollout(env)
    broken_program()


@pytest.mark.parametrize("who", ["program", "policy", "learner"])
def test_an_error_ends_a_run_with_one_readable_traceback(who: str) -> None:
    spec = scripted_spec(length=20)

    async def main() -> None:
        policy = BrokenPolicy(spec) if who == "policy" else ScriptedPolicy(spec)
        learner = (BrokenLearner if who == "learner" else CountingLearner)(policy, 40)
        program = breaking if who == "program" else rollout
        async with Runtime() as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(spec, actor=gen, count=4, host="process", lanes=2, program=program))
            try:
                async for _ in rt.start(Trainer(envs, learner, updates=10**6)):
                    pass
            finally:
                ended_s.append(time.monotonic())

    ended_s: list[float] = []
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert time.monotonic() - ended_s[0] < END_S
    errors = list(leaves(caught.value))
    assert len(errors) <= 4, "one for each environment, where all of them fail"
    assert all("mine" in str(error) for error in errors)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("ValueError: mine") == len(errors)
    assert text.count("CancelledError") == 0


# What is saved before a run ends because its simulators fail too often.

SPEC = scripted_spec(length=5)
CONFIG = PPOConfig(batch_size=16, minibatch_size=8, epochs=1)


class Numbered:
    """Makes simulators of which those from number `bad` on fail in their third call."""

    def __init__(self, bad: int) -> None:
        self.num, self.bad = 0, bad

    def __call__(self) -> ScriptedEnv:
        self.num += 1
        return ScriptedEnv(3, 2, length=5, faults={2: "raise"} if self.num >= self.bad else {9 * self.num: "raise"})


NETWORK = GaussianPolicy.for_spec(SPEC, hidden=(4,))
LEARNER = PPO(NETWORK, CONFIG)


async def train(
    saves: Checkpointer, policy: FailurePolicy, *, train_s: float = 0.0, bad: int = 5, save: bool = True
) -> None:
    spec = scripted_spec(make=Numbered(bad))
    machine = VirtualMachine({"sim": lambda n, rng: 1.0, "train": lambda n, rng: train_s})
    async with Runtime(machine) as rt:
        gen = rt.start(Generator(NETWORK))
        envs = rt.start(EnvGroup(spec, actor=gen, count=4, failures=policy))
        trainer = rt.start(Trainer(envs, LEARNER, updates=1000))
        if not save:
            saves.attach(trainer)
        async for report in trainer:
            if save and report.update == 1:
                await saves.save(trainer)


def saved_at_the_end(folder: Path, train_s: float) -> tuple[BaseException, Checkpoint]:
    saves = Checkpointer(folder)
    error = the_failure(train(saves, FailurePolicy(per_env=1), train_s=train_s))
    checkpoint = saves.latest()
    assert checkpoint is not None
    return error, checkpoint


@pytest.mark.parametrize("train_s", [0.0, 0.3, 50.0])
def test_a_run_whose_budget_is_spent_is_saved_between_two_updates(train_s: float, tmp_path: Path) -> None:
    error, checkpoint = saved_at_the_end(tmp_path / "run", train_s)
    assert isinstance(error, ScriptedFault)
    assert len(list((tmp_path / "run").iterdir())) == 2
    assert checkpoint.update >= 1
    assert checkpoint.experience.ledger.balanced
    assert len(error.__notes__) == 2


@pytest.mark.parametrize("bad", [1, 5])
def test_a_run_whose_budget_is_spent_before_its_first_save_is_saved_and_goes_on(bad: int, tmp_path: Path) -> None:
    saves = Checkpointer(tmp_path / "run")
    error = the_failure(train(saves, FailurePolicy(per_env=1), bad=bad, save=False))
    assert isinstance(error, ScriptedFault)
    assert len(error.__notes__) == 2
    checkpoint = saves.latest()
    assert checkpoint is not None
    assert (checkpoint.update == 0) == (bad == 1), "also before the first update"

    async def go_on() -> int:
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(NETWORK))
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=4))
            reports = [r async for r in rt.start(Trainer(envs, LEARNER, updates=9, resume=checkpoint))]
            assert_sound(envs.admission.ledger())
            return reports[0].update

    assert run_virtual(go_on()) == checkpoint.update + 1


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (CheckpointError("the disk is full"), "the disk is full"),
        (AttributeError("no such part"), "AttributeError('no such part')"),  # of a learner of somebody else
    ],
)
def test_a_run_that_cannot_be_saved_says_so_and_ends_with_what_ended_it(
    why: Exception, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Checkpointer(tmp_path / "run")
    write, num = saves._write, 0

    def once(checkpoint: Any) -> Path:
        nonlocal num
        num += 1
        if num > 1:
            raise why
        return write(checkpoint)

    monkeypatch.setattr(saves, "_write", once)
    error = the_failure(train(saves, FailurePolicy(per_env=1)))
    assert isinstance(error, ScriptedFault)
    assert error.__notes__[-1] == f"trainer could not be saved: {told}"


@virtually
async def test_who_waits_for_the_end_of_an_update_is_heard_before_the_next_begins() -> None:
    """Also where its data are there already, so that nothing comes between two updates."""
    machine = VirtualMachine({"sim": lambda n, rng: 0.001, "train": lambda n, rng: 1.0})
    updates: list[int] = []
    heard: list[int] = []
    async with training(SPEC, machine, updates=6, max_lag=50) as stage:

        async def wait() -> None:
            await asyncio.sleep(1.5)
            await stage.trainer.between_updates()
            heard.extend(updates)

        stage.runtime.spawn(wait(), "wait")
        async for report in stage.trainer:
            updates.append(report.update)  # noqa: PERF401 - it is read meanwhile
    assert heard == [1, 2]
