"""Every benchmark runs, and says what it found in the agreed form; its bars are not looked at here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.runs import counted
from tests.helpers import ROOT

SCRIPTS = sorted(path for path in (ROOT / "bench").glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
BENCHES = [path.stem for path in SCRIPTS]  # the others are what they share


def test_what_there_is() -> None:
    assert BENCHES == ["convergence", "gates", "lag", "overhead", "quickstart", "rollout", "twin"]


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
