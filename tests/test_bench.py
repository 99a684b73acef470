"""Every benchmark runs, and says what it found in the agreed form; its bars are not looked at here."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bench import convergence, quickstart, rollout, twin
from bench.report import Number
from bench.runs import counted, pinned
from ebrl.core.errors import ConfigError
from tests.helpers import ROOT

SCRIPTS = sorted(path for path in (ROOT / "bench").glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
BENCHES = [path.stem for path in SCRIPTS]  # the others are what they share


def test_what_there_is() -> None:
    assert BENCHES == [
        "convergence",
        "gates",
        "lag",
        "overhead",
        "pipelining",
        "quickstart",
        "rollout",
        "sims",
        "soak",
        "spares",
        "twin",
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", BENCHES)
def test_a_smoke_run_ends_well_and_prints_its_record(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--smoke", "--json", "--seed", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record.keys() == {"bench", "git", "seed", "machine", "checks", "data"}
    assert (record["bench"], record["seed"], record["checks"]) == (name, 3, [])
    assert record["data"]
    if name == "twin":
        assert_runs_say_all(record["data"])


def assert_runs_say_all(data: dict[str, Any]) -> None:
    """Every suite of the twin has its runs, and those that are compared have histograms."""
    drawn = {f"draw {number}": draw for number, draw in enumerate(data.pop("random")["draws"])}
    assert data.keys() == {"W", "drift", "paper"}
    cases = {**drawn, **{case: found for suite in data.values() for case, found in suite.items()}}
    for case, found in cases.items():
        assert found["runs"].keys() > {"ebrl"}, case
        for run in found["runs"].values():
            assert run["rates"].keys() == {"env_steps", "chunks", "episodes", "samples"}
            assert run["busy"].keys() == {"cores", "gen", "train"}
            assert run["of_bound"] is None or 0 < run["of_bound"] < 2
        assert found["runs"]["ebrl"]["batches"]
    (pair,) = data["paper"].values()
    assert pair["runs"]["ebrl"]["rates"]["samples"] > 0
    assert pair["runs"]["ebrl"]["lags"]


@pytest.mark.parametrize(
    ("num", "told"), [(49, []), (50, ["13 of 50 runs", "23 of 50 runs", "33 of 50 runs", "43 of 50 runs"])]
)
def test_many_runs_are_counted_on_stderr(num: int, told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0

    def results() -> Iterator[int]:
        nonlocal now_s
        for number in range(num):
            now_s += 1.0 if number > 2 else 0.0
            yield number

    assert list(counted(results(), num, lambda: now_s)) == list(range(num))
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in told))


@pytest.mark.parametrize("name", BENCHES)
def test_its_docstring_states_a_hypothesis_and_a_command(name: str) -> None:
    text = (ROOT / "bench" / f"{name}.py").read_text()
    doc = text.split('"""')[1]
    assert "Hypothesis:" in doc
    assert f"python -m bench.{name}" in doc
    assert "--json" in doc


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--schedulers piepline:2", "there is no scheduler 'piepline:2'.*; and EBRL's own: ebrl, greedy, fixed:T"),
        ("--schedulers lockstep,fixed:abc", "'fixed:abc' is not of the form fixed:T"),
        ("--schedulers fixed:0", "'fixed:0' is not of the form fixed:T"),
        ("--suite drift --schedulers ver:1", "--schedulers is for --suite W and --profile, not for --suite drift"),
        ("--suite random --schedulers ver:1", "--schedulers is for --suite W and --profile"),
        ("--num-envs 8", "--num-envs is for --profile, not for --suite W"),
        ("--suite drift --chunk 4", "--chunk is for --profile, not for --suite drift"),
        ("--seeds 2", "--seeds is for --suite random, not for --suite W"),
        ("--profile p.json --suite W", "--suite is for the workloads of bench/profiles, not for --profile"),
        ("--profile p.json --seeds 3", "--seeds is for --suite random, not for --profile"),
        ("--plot /no/such/folder/a.png", "it cannot be written: No such file or directory"),
        (f"--plot {'x' * 250}.png", "it cannot be written: File name too long"),
        ("--plot a.xyz", "its ending must be one of .*png"),
    ],
)
def test_what_the_twin_cannot_do_is_said_before_it_works(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["twin", *line.split()])
    monkeypatch.setattr(twin, "SUITES", dict.fromkeys(twin.SUITES, pytest.fail))
    assert twin.main() == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", BENCHES)
def test_every_number_is_checked_by_one_type(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser) -> None:
        made.append(parser)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", keep)
        importlib.import_module(f"bench.{name}").arguments()
    for action in made[0]._actions:
        assert not isinstance(action.default, int | float) or action.type is not None or action.nargs == 0, action.dest
        assert action.type is None or isinstance(action.type, Number), action.dest
        for text in ("nan", "inf", "-3", "x", "", "1e999") if action.type else ():
            with pytest.raises(SystemExit):
                made[0].parse_args([f"{action.option_strings[0]}={text}"])
            assert f"argument {action.option_strings[0]}: must be a" in capsys.readouterr().err


def test_a_number_has_both_ends() -> None:
    assert [Number(int, 1, 3)(text) for text in ("1", "3")] == [1, 3]
    assert Number(float, 0, 1)("0.5") == 0.5
    for number, text in ((Number(int, 1, 3), "0"), (Number(int, 1, 3), "2.0"), (Number(float, 0, 1), "1.1")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"from {number.least:g} to {number.most:g}, got '{text}'"):
            number(text)


@pytest.mark.parametrize(
    ("bench", "line", "message"),
    [
        (rollout, "--suite cpu --burn", "--burn and --policy are for --suite W"),
        (quickstart, "--updates 3 --every 4", "--every 4 keeps none of 3 updates"),
        (convergence, "--real --plot a.png", "--plot is not for --real"),
        (convergence, "--plot /no/such/folder/a.png", "--plot /no/such/folder/a.png: it cannot be written"),
    ],
)
def test_what_would_not_be_looked_at_is_refused(
    bench: Any, line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *line.split()])
    assert bench.main() == 2
    assert re.fullmatch(f"error: {message}.*\n", capsys.readouterr().err)


def test_settings_of_schedulers_may_have_commas() -> None:
    assert twin.SEPARATOR.split("size-timeout:2,0.01,fixed:3,async-train:1,2") == [
        "size-timeout:2,0.01",
        "fixed:3",
        "async-train:1,2",
    ]
    with pytest.raises(ConfigError, match="with T from 1 to 4, the units there are"):
        pinned("fixed:5", 4)


ORPHAN = """
import os, signal, time
from concurrent.futures import ProcessPoolExecutor
from bench.runs import end_with_parent

pool = ProcessPoolExecutor(1, initializer=end_with_parent)
pool.submit(int).result()
pool.submit(time.sleep, 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_whoever_asked_for_them() -> None:
    """The output ends only when the last process that could write to it has ended."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], cwd=ROOT, capture_output=True, timeout=50, check=False)
    assert done.returncode == -9
