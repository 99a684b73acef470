"""Ctrl-C and SIGTERM on the command line: whenever it comes, the command ends well, and says no more than that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from ebrl.cli import main
from ebrl.core.errors import ConfigError
from ebrl.core.run import run
from tests.helpers import ROOT
from tests.test_errors_end_to_end import SMALL, assert_whole

CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background of a shell has it ignored
from ebrl.cli import main
print("ready", flush=True)
sys.exit(main(sys.argv[1:]))
"""
PATIENCE_S = 30.0


def start(folder: Path) -> subprocess.Popen[str]:
    args = ["train", "--env", "CartPole-v1", *SMALL, "--updates", "1000000", "--run-dir", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupt(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> list[str]:
    """Press Ctrl-C, or send another signal, and return what the process wrote on stderr."""
    process.send_signal(number)
    began = time.monotonic()
    try:
        _, err = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert time.monotonic() - began < 2.0
    assert process.returncode == 128 + number, err
    return err.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_saves_what_was_learned_and_ends_a_run_within_two_seconds(
    number: signal.Signals, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):  # it is another process
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert interrupt(process, number) == [said]
    assert_whole(folder)
    assert (folder / "profile.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.05, 0.3, 0.7, 1.1, 1.5])
def test_ctrl_c_while_a_run_starts_ends_it(delay_s: float, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay_s)
    assert interrupt(process) == ["interrupted"]
    if folder.exists():
        assert json.loads((folder / "config.json").read_text())
        assert load_file(folder / "policy.safetensors")


IMPORT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Library:
    def find_spec(self, name, path=None, target=None):
        if name == "tyro":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise TypeError("expected a message argument")

sys.meta_path.insert(0, Library())
from ebrl.cli import main
sys.exit(main(["train"]))
"""


def test_a_ctrl_c_that_an_import_makes_an_error_of_its_own_ends_it_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


def interrupted_in_a_callback(args: object) -> int:
    """Press Ctrl-C where the interpreter forgets it: in the callback of a weak reference, as imports have many."""
    pressed = []

    class Thing:
        pass

    def callback(_: object) -> None:
        pressed.append(True)
        signal.raise_signal(signal.SIGINT)

    thing = Thing()
    reference = weakref.ref(thing, callback)
    del thing
    assert pressed
    assert reference() is None
    threading.Event().wait(PATIENCE_S)
    return 0


async def signalled(number: signal.Signals) -> int:
    signal.raise_signal(number)
    await asyncio.Event().wait()
    return 0


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_the_status_says_which_signal_ended_a_run(
    number: signal.Signals,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    monkeypatch.setattr("ebrl.cli._dispatch", lambda args: run(signalled(number)))
    assert main([]) == status
    assert capsys.readouterr().err == said


def test_a_ctrl_c_that_python_forgets_arrives_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    before = sys.unraisablehook
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    monkeypatch.setattr("ebrl.cli._dispatch", interrupted_in_a_callback)
    assert main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert sys.unraisablehook is before


IMPATIENT = """
import atexit, os, signal
import ebrl.cli

signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(3)])
ebrl.cli.main = lambda: 130
ebrl.cli.command()
"""


def test_a_ctrl_c_when_all_is_done_is_not_heard() -> None:
    """Else it is a traceback of the interpreter, which closes libraries then."""
    done = subprocess.run([sys.executable, "-c", IMPATIENT], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_run_says_the_way_out_where_a_loop_runs() -> None:
    async def main() -> None:
        raise AssertionError("not run")

    async def notebook() -> None:
        with pytest.raises(ConfigError, match=r"as in a notebook: await main\(\) instead of ebrl.run\(main\(\)\)"):
            run(main())

    asyncio.run(notebook())
