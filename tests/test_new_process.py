"""Runs that end in one process, by themselves or because they are killed, and go on in another."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ebrl
from ebrl.core.records import EnvSpec, TrainBatch
from ebrl.gen.policies import default_policy
from tests.helpers import run_python
from tests.kill import Campaign

N = 2
CONFIG = ebrl.PPOConfig(batch_size=64, minibatch_size=32, epochs=2)
CARTPOLE = ebrl.env_spec("CartPole-v1")
TASKS = [replace(CARTPOLE, task="short", horizon=9), replace(CARTPOLE, task="long")]
CASES: dict[str, dict[str, Any]] = {"plain": {}, "recurrent": {"memory_size": 4}, "tasks": {"specs": TASKS}}


class Hashed(ebrl.PPO):
    """Keeps what it consumed: places, versions and actions."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy, CONFIG)
        self.consumed: list[str] = []

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        places = [(d.env, d.episode, d.index, d.version, d.out.action.tolist()) for d in batch.decisions]
        self.consumed.append(hashlib.sha256(json.dumps(places).encode()).hexdigest())
        return super().update(batch)


def run(
    updates: int,
    folder: Path | None = None,
    *,
    host: Any = "thread",
    memory_size: int = 0,
    specs: Sequence[EnvSpec] = (CARTPOLE,),
) -> dict[str, Any]:
    """Train CartPole on this computer; with a folder, go on with what is there, and save at the end."""
    torch.set_num_threads(1)
    policy = default_policy(specs[0], hidden=(16,), memory_size=memory_size)
    learner = Hashed(policy)
    saves = None if folder is None else ebrl.Checkpointer(folder)
    saved = None if saves is None else saves.latest()

    async def main() -> int:
        async with ebrl.Runtime(seed=3, deterministic=True) as rt:
            gen = rt.start(ebrl.Generator(policy))
            envs = rt.start(ebrl.EnvGroup(specs, actor=gen, count=8, host=host))
            trainer = rt.start(ebrl.Trainer(envs, learner, updates=updates, max_lag=0, resume=saved))
            async for report in trainer:
                assert report.dropped == {}
            if saves is not None:
                await saves.save(trainer)
            return report.env_steps

    env_steps = ebrl.run(main())
    weights = b"".join(x.numpy().tobytes() for x in policy.state_dict().values())
    return {
        "consumed": learner.consumed,
        "weights": hashlib.sha256(weights).hexdigest(),
        "env_steps": env_steps,
        "updates": learner.num_updates,
    }


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.blocks("files are looked at before the run")
@pytest.mark.hogs("the first update of a process imports parts of torch")
def test_twice_n_updates_are_n_then_n_in_a_new_process(tmp_path: Path) -> None:
    expected = {}
    for name, case in CASES.items():
        whole = run(2 * N, **case)
        expected[name] = {**whole, "consumed": whole["consumed"][N:]}
        assert run(N, tmp_path / name, **case)["consumed"] == whole["consumed"][:N]
    assert len({part["weights"] for part in expected.values()}) == len(CASES)
    code = f"import pathlib; from tests.test_new_process import go_on; go_on(pathlib.Path({str(tmp_path)!r}))"
    done = run_python(code, timeout_s=170)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def go_on(folder: Path) -> None:
    """Run in the other process."""
    sys.stdout.write(json.dumps({name: run(2 * N, folder / name, **case) for name, case in CASES.items()}))


@pytest.mark.slow
@pytest.mark.blocks("files are looked at before the run")
@pytest.mark.hogs("the first update of a process imports parts of torch")
def test_episodes_are_run_again_in_a_process_host_too(tmp_path: Path) -> None:
    whole = run(2)
    run(1, tmp_path)
    assert run(2, tmp_path, host="process") == {**whole, "consumed": whole["consumed"][1:]}


def killed(*args: str, timeout_s: float) -> dict[str, Any]:
    code = f"import sys; from tests.kill import main; sys.argv[1:] = {args!r}; main()"
    done = run_python(code, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["weighed"] > 0
    return found


@pytest.mark.parametrize(
    ("lines", "updates"),
    [
        ([], {0}),
        ([{"resumed": 0}], {0}),
        ([{"resumed": 0}, {"saving": 1}], {0, 1}),
        ([{"saving": 1}, {"saved": 1}], {1}),
        ([{"saved": 1}, {"saving": 2}, {"resumed": 2}], {2}),  # killed between the save and the line of it
        ([{"saved": 1}, {"saving": 2}, {"resumed": 2}, {"saving": 3}], {2, 3}),  # and again
        ([{"saved": 1}, {"saving": 2}, {"resumed": 1}, {"saving": 2}], {1, 2}),
    ],
)
def test_what_a_killed_process_leaves(tmp_path: Path, lines: list[dict[str, int]], updates: set[int]) -> None:
    campaign = Campaign(tmp_path, seed=0)
    for line in lines:
        campaign.journal.write(**line)
    assert campaign.expected() == updates


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_that_is_killed_in_training_and_in_a_save_goes_on() -> None:
    found = killed("--kills", "2", "--exact", "1", timeout_s=170)
    assert (found["kills"], found["places"]) == (2, 1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_fifty_times_goes_on_every_time() -> None:
    """At every place of a save that touches the disk, and at random moments."""
    found = killed("--kills", "50", timeout_s=1700)
    assert found["kills"] == 50
    assert found["of those saved"] > 0, "probabilities of a process that was killed are scored by the next one"
    assert 0 < found["places"] < 30
    assert found["calls"].count("save_file") == 2
