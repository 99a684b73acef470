"""Runs of a benchmark that takes hours, kept in a file as they end, so that it can be stopped and go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.report import git_version
from bench.runs import each_on_all_cores
from ebrl.core.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")
T = TypeVar("T", bound="DataclassInstance")


def on_all_cores_kept(fn: Callable[[S], T], jobs: Iterable[S], made: Callable[..., T], path: Path) -> list[T]:
    """Return ``fn(job)`` of all jobs, in order; those that the file has from this commit are not run again.

    Args:
        fn: Runs a job.
        jobs: Dataclasses of what JSON can hold.
        made: Makes a result of its fields; those are what JSON can hold.
        path: A line for each run; of other commits too, which are left alone.

    Raises:
        ConfigError: There are uncommitted changes, or no commit: nobody could say of what code the runs are.
    """
    commit, todo = git_version(), list(jobs)
    if not commit or commit.endswith("+"):
        raise ConfigError("runs are kept by commit: commit what has changed, or leave out --keep")
    try:
        done = {key: made(**fields) for key, fields in read(path, commit).items()}
        missing = [job for job in todo if key_of(job) not in done]
        print(f"{len(todo) - len(missing)} of {len(todo)} runs are in {path}", file=sys.stderr, flush=True)
        with path.open("a") as file:
            for job, result in zip(missing, each_on_all_cores(fn, missing), strict=True):
                done[key_of(job)] = result
                entry = {"git": commit, "job": asdict(job), "result": asdict(result)}
                file.write("\n" + json.dumps(entry))  # in front: the line before may have been cut off
                file.flush()
    except OSError as error:
        raise ConfigError(f"--keep {path}: {error.strerror}") from error
    return [done[key_of(job)] for job in todo]


def key_of(job: DataclassInstance) -> str:
    """Return what tells a job from others."""
    return json.dumps(asdict(job), sort_keys=True)


def read(path: Path, commit: str) -> dict[str, Mapping[str, Any]]:
    """Return the results of one commit by the keys of their jobs; a line that was cut off is none."""
    found = dict[str, Mapping[str, Any]]()
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["git"] == commit:
            found[json.dumps(entry["job"], sort_keys=True)] = entry["result"]
    return found
