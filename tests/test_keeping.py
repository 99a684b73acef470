"""A benchmark of hours goes on where it was stopped, and takes nothing from other code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import keeping
from bench.keeping import on_all_cores_kept
from ebrl.core.errors import ConfigError


@dataclass(frozen=True)
class Job:
    number: int
    path: str


@dataclass(frozen=True)
class Result:
    square: int


def run(job: Job) -> Result:
    """Note that it ran."""
    with Path(job.path).open("a") as file:
        file.write(f"{job.number} ")
    if job.number < 0:
        raise RuntimeError("stopped")
    return Result(job.number**2)


def ran(path: Path) -> list[int]:
    """Return which ran since this was asked."""
    numbers = sorted(int(number) for number in path.read_text().split()) if path.exists() else []
    path.unlink(missing_ok=True)
    return numbers


@pytest.fixture
def commit(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What git says."""
    says = ["a" * 40]
    monkeypatch.setattr(keeping, "git_version", lambda: says[0])
    return says


def test_runs_that_have_ended_are_not_run_again(tmp_path: Path, commit: list[str]) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept.jsonl"
    jobs = [Job(number, str(log)) for number in (3, 1, 2)]
    assert on_all_cores_kept(run, jobs[:2], Result, kept) == [Result(9), Result(1)]
    assert ran(log) == [1, 3]
    assert on_all_cores_kept(run, jobs, Result, kept) == [Result(9), Result(1), Result(4)]
    assert ran(log) == [2]
    commit[0] = "b" * 40
    assert on_all_cores_kept(run, jobs[:1], Result, kept) == [Result(9)]
    assert ran(log) == [3]


def test_what_ended_before_a_stop_is_kept_and_a_torn_line_is_run_again(tmp_path: Path, commit: list[str]) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept.jsonl"
    good, bad = Job(2, str(log)), Job(-1, str(log))
    with pytest.raises(RuntimeError, match="stopped"):
        on_all_cores_kept(run, [good, bad], Result, kept)
    ran(log)
    assert on_all_cores_kept(run, [good], Result, kept) == [Result(4)]
    assert ran(log) == []
    kept.write_text(kept.read_text()[:-10])
    assert on_all_cores_kept(run, [good], Result, kept) == [Result(4)]
    assert ran(log) == [2]
    assert on_all_cores_kept(run, [good], Result, kept) == [Result(4)]
    assert ran(log) == []


@pytest.mark.parametrize("says", ["", "a" * 40 + "+"])
def test_runs_of_no_commit_are_not_kept(tmp_path: Path, commit: list[str], says: str) -> None:
    commit[0] = says
    with pytest.raises(ConfigError, match="commit what has changed, or leave out --keep"):
        on_all_cores_kept(run, [Job(1, str(tmp_path / "log"))], Result, tmp_path / "kept.jsonl")
    assert ran(tmp_path / "log") == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, commit: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--keep .*: Is a directory"):
        on_all_cores_kept(run, [Job(1, str(tmp_path / "log"))], Result, tmp_path)
