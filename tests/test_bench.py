"""Every benchmark runs, and says what it found in the agreed form; its bars are not looked at here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench import twin
from bench.runs import counted, pinned
from ebrl.core.errors import ConfigError
from tests.helpers import ROOT

SCRIPTS = sorted(path for path in (ROOT / "bench").glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
BENCHES = [path.stem for path in SCRIPTS]  # the others are what they share


def test_what_there_is() -> None:
    assert BENCHES == ["gates", "lag", "overhead", "quickstart", "rollout", "soak", "twin"]


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
        ("--suite drift --schedulers ver:1", "--suite drift has its own"),
        ("--plot /no/such/folder/a.png", "there is no folder /no/such/folder"),
        ("--plot a.xyz", "its ending must be one of .*png"),
    ],
)
def test_what_the_twin_cannot_do_is_said_before_it_works(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["twin", *line.split()])
    monkeypatch.setattr(twin, "SUITES", {"W": pytest.fail, "drift": pytest.fail})
    assert twin.main() == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("line", ["--seed -1", "--seeds 0", "--num-envs 0", "--chunk x"])
def test_numbers_out_of_range_are_no_arguments(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["twin", *line.split()])
    with pytest.raises(SystemExit):
        twin.main()
    assert f"argument {line.split()[0]}: invalid" in capsys.readouterr().err


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
