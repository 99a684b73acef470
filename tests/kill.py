"""Trains CartPole in processes that are killed, again and again, and looks at what the next one finds.

``python -m tests.kill --kills 50`` prints one line of JSON, or fails. Half of the kills come at random moments,
from outside. The others are exact: a process kills itself when its n-th save makes its i-th call that touches the disk,
before that call or in the midst of it. Processes are forked from one that has imported everything and run nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ebrl
from ebrl.core.records import TrainBatch
from ebrl.core.saved import SavedExperience
from ebrl.train import folders

SPEC = ebrl.env_spec("CartPole-v1")
CONFIG = ebrl.PPOConfig(batch_size=32, minibatch_size=16, epochs=1)
NUM_ENVS = 4
KEEP = 2  # checkpoints
AFTER = 1  # saves of a process before the one in which it kills itself
MOST_LINES, MOST_S = 24, 0.02  # what a process that is killed from outside writes before, and how long it lives on
PATIENCE_S = 60


@dataclass(frozen=True)
class Plan:
    """When a process kills itself: in call number `at` of a save, before it or, if it writes, halfway through it."""

    at: int
    midway: bool = False


class Learner(ebrl.PPO):
    """Notes what it has trained on, which is part of its state."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy, CONFIG)
        self.trained: list[list[int]] = []
        self.parts["trained"] = self._Trained(self)

    class _Trained:
        def __init__(self, learner: Learner) -> None:
            self.learner = learner

        def state_dict(self) -> dict[str, Any]:
            return {"ids": np.array(self.learner.trained).reshape(-1, 2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.learner.trained = state["ids"].tolist()

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        self.trained += [[decision.env, decision.index] for decision in batch.decisions]
        return super().update(batch)


class Saboteur:
    """Counts the calls that touch the disk on the lane of the checkpoints, and ends the process in one of them."""

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan
        self._num_saves = 0
        self.calls: list[str] = []
        for module, name in (
            (os, "mkdir"),
            (os, "fsync"),
            (os, "rename"),
            (os, "unlink"),
            (os, "rmdir"),
            (folders, "save_file"),
            (Path, "write_text"),
        ):
            setattr(module, name, self._watched(name, getattr(module, name)))

    def _watched(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **options: Any) -> Any:
            if not threading.current_thread().name.endswith("checkpoints"):
                return fn(*args, **options)
            if name == "mkdir":
                self._num_saves += 1
                self.calls.clear()
            due = self._plan is not None and self._num_saves > AFTER and self._plan.at == len(self.calls)
            self.calls.append(name)
            if due and self._plan is not None and self._plan.midway:
                fn(*args, **options)
                path = Path(args[1] if name == "save_file" else args[0])
                os.truncate(path, path.stat().st_size // 2)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return fn(*args, **options)

        return call


class Journal:
    """Lines that survive the process that wrote them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **line: Any) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, (json.dumps(line) + "\n").encode())
        os.close(fd)

    def __len__(self) -> int:
        return self._path.read_bytes().count(b"\n") if self._path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []


async def train(folder: Path, journal: Journal, saboteur: Saboteur, updates: int) -> None:
    """Go on with whatever there is, and save after every update."""
    saves = ebrl.Checkpointer(folder / "saves", keep=KEEP)
    policy = ebrl.CategoricalPolicy.for_spec(SPEC, hidden=(16,))
    learner = Learner(policy)
    async with ebrl.Runtime(seed=0, tune=False) as rt:
        gen = rt.start(ebrl.Generator(policy))
        envs = rt.start(ebrl.EnvGroup(SPEC, actor=gen, count=NUM_ENVS, host="thread"))
        saved = saves.latest()
        trainer = rt.start(ebrl.Trainer(envs, learner, updates=10**9, resume=saved))
        ledger = envs.admission.ledger()
        journal.write(resumed=saved.update if saved is not None else 0, open=ledger.buffered + ledger.parked)
        check(envs, learner, 0 if saved is None else saved.update)
        if saved is not None:
            before = saved.experience.ledger
            assert ledger.started == before.started, "all that was started is accounted for"
            assert ledger.dropped.get("lost", 0) == before.dropped.get("lost", 0) + before.in_flight
        fresh = set() if saved is None else newest(saved.experience, saved.version)
        log_weight = math.nan
        async for report in trainer:
            check(envs, learner, report.update)
            assert report.lag_max <= 1, report
            if math.isnan(log_weight):  # no decision of lag 0 yet
                log_weight = report.metrics["max_abs_log_weight_at_lag_0"]
                num_saved = len(fresh & {(env, index) for env, index in learner.trained[-CONFIG.batch_size :]})
                journal.write(log_weight=log_weight, num=report.lag_counts[0], num_saved=num_saved)
                fresh.clear()  # in later updates they are of lag 1
            while len(newest(envs.save(), gen.weights.version)) < NUM_ENVS:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)  # without them a checkpoint has nothing for the next process to weigh
            journal.write(saving=report.update)
            await saves.save(trainer)
            journal.write(saved=report.update, calls=saboteur.calls)
            updates -= 1
            if not updates:
                break


def newest(kept: SavedExperience, version: int) -> set[tuple[int, int]]:
    """Return the decisions of the newest version that are finished, and not trained yet."""
    segments = [*kept.taken, *kept.segments, *kept.open]
    decisions = [decision for segment in segments for decision in segment.decisions]
    return {(decision.env, decision.index) for decision in decisions if decision.version == version}


def check(envs: ebrl.EnvGroup, learner: Learner, update: int) -> None:
    """The accounts are in order: every decision is somewhere, none was trained twice, and credit was kept."""
    ledger = envs.admission.ledger()
    assert ledger.balanced, ledger
    assert ledger.trained == update * CONFIG.batch_size == len(learner.trained), (ledger, update)
    assert len({tuple(place) for place in learner.trained}) == len(learner.trained), "trained twice"
    assert ledger.started - ledger.trained - sum(ledger.dropped.values()) <= 2 * CONFIG.batch_size, ledger


def spawn(folder: Path, journal: Journal, plan: Plan | None, updates: int) -> int:
    """Fork a process that trains until it is killed, or has done so many updates; return its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    signal.alarm(PATIENCE_S)  # ends it, should nobody be left to
    try:
        ebrl.run(train(folder, journal, Saboteur(plan), updates))
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


class Campaign:
    """Kills, and looks at what was left."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.journal = Journal(folder / "journal")
        self.rng = np.random.default_rng(seed)
        self.num_kills = 0
        self.num_in_saves = 0
        self.resumed: list[int] = []

    def measure(self) -> list[str]:
        """Return the calls of a save that also removes an old checkpoint."""
        self.run(updates=KEEP + 1)
        calls: list[str] = self.journal.read()[-1]["calls"]
        return calls

    def run(self, plan: Plan | None = None, *, updates: int = 10**9) -> None:
        """Run one process until it has done its updates, or is killed, and look at what it found at its start."""
        known, before = len(self.journal), self.expected()
        pid = spawn(self.folder, self.journal, plan, updates)
        by_chance = plan is None and updates == 10**9
        if by_chance:
            enough = known + int(self.rng.integers(MOST_LINES))
            until(lambda: len(self.journal) >= enough)
            time.sleep(self.rng.uniform(0, MOST_S))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]  # its alarm ends it in any case
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed == (by_chance or plan is not None), f"process ended with {status}"
        assert killed or not status, f"process ended with {status}"
        self.num_kills += killed
        lines = self.journal.read()[known:]
        self.num_in_saves += bool(killed and lines and "saving" in lines[-1])
        for line in lines:
            if "resumed" in line:
                assert line["resumed"] in before, f"resumed from {line['resumed']}, and not from {before}"
                self.resumed.append(line["resumed"])
            elif line.get("num"):
                assert line["log_weight"] < 1e-4, line

    def expected(self) -> set[int]:
        """Return from where the next process must go on: what was saved last, or what was about to be.

        Who is killed between a save and the line that says so leaves a checkpoint that only the next process tells of.
        """
        lines = self.journal.read()
        found = [line[key] for line in lines for key in ("saved", "resumed") if key in line]
        last = found[-1] if found else 0
        return {last, last + 1} if lines and "saving" in lines[-1] else {last}

    def kill_at(self, calls: list[str], plan: Plan) -> None:
        """Kill at one place, and see that the new checkpoint counts exactly if it had got its name."""
        self.run(plan)
        (last,) = (line["saving"] for line in self.journal.read()[-1:])
        named = plan.at > calls.index("rename")
        found = ebrl.Checkpointer(self.folder / "saves").latest()
        assert found is not None
        assert found.update == (last if named else last - 1), (plan, calls[plan.at], found.update, last)

    def summary(self) -> dict[str, Any]:
        weights = [line for line in self.journal.read() if line.get("num")]
        return {
            "kills": self.num_kills,
            "in saves": self.num_in_saves,
            "updates": self.expected().pop(),
            "resumed": len(self.resumed),
            "max log weight": max(line["log_weight"] for line in weights),
            "weighed": sum(line["num"] for line in weights),
            "of those saved": sum(line["num_saved"] for line in weights),  # acted by a process that was killed
        }


def warm_up() -> None:
    """Import what torch imports when it is first used, so that processes need not."""
    torch.set_num_threads(1)
    policy = ebrl.CategoricalPolicy.for_spec(SPEC, hidden=(16,))
    log_prob, value, _ = policy.evaluate({"state": torch.zeros(2, 4)}, {"index": torch.zeros(2, 1, dtype=torch.int64)})
    Learner(policy).step(log_prob.sum() + value.sum())


def until(condition: Callable[[], bool]) -> None:
    """Wait for another process to do something."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def plans(calls: list[str]) -> list[Plan]:
    """Return every place of a save: before each call, and within those that write."""
    writes = [Plan(i, midway=True) for i, name in enumerate(calls) if name in ("save_file", "write_text")]
    return [*(Plan(i) for i in range(len(calls))), *writes]


def campaign(folder: Path, *, kills: int, exact: int | None, seed: int) -> dict[str, Any]:
    """Kill so many processes, `exact` of them at places in a save (default: at all of them), in a random order."""
    run = Campaign(folder, seed)
    calls = run.measure()
    places = plans(calls)
    if exact is not None:
        places = [places[i] for i in run.rng.choice(len(places), exact, replace=False)]
    todo: list[Plan | None] = [*places, *[None] * (kills - len(places))]
    for i in run.rng.permutation(len(todo)):
        plan = todo[i]
        if plan is not None:
            run.kill_at(calls, plan)
        else:
            run.run()
    run.run(updates=3)
    assert run.num_kills == len(todo)
    return {**run.summary(), "places": len(places), "calls": calls}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--exact", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), kills=args.kills, exact=args.exact, seed=args.seed)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
