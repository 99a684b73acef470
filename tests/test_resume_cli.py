"""``ebrl train --resume``: a run goes on from its folder, or one line says why it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ebrl.cli import main

SMALL = ["--num-envs", "4", "--ppo.batch-size", "32", "--ppo.minibatch-size", "16", "--ppo.epochs", "1"]
RUN = [
    "train",
    "--env",
    "CartPole-v1",
    *SMALL,
    "--hidden",
    "8",
    "--record",
    "--checkpoint-every",
    "2",
    "--updates",
    "5",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.blocks("environments are built before anything runs"),
    pytest.mark.hogs("commands import what they use when it is used"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five updates, saved after 2, 4 and 5. Tests work on a copy."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main([*RUN, "--run-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "elsewhere")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def updates(folder: Path) -> list[int]:
    return [json.loads(line)["update"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that is bad input, and return its line."""
    capsys.readouterr()
    assert main(list(args)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_is_saved_now_and_then_and_at_its_end(run: Path) -> None:
    assert names(run) == ["000001-update-2", "000002-update-4", "000003-update-5"]
    assert updates(run) == [1, 2, 3, 4, 5]


def test_a_run_goes_on_in_a_folder_that_was_moved_and_remembers_how_far_it_shall_go(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, log = ((folder / name).read_bytes() for name in ("policy.safetensors", "events.jsonl"))
    assert main(["train", "--resume", str(folder), "--updates", "8"]) == 0
    assert "the event log ends where the run did: what is resumed is not recorded" in capsys.readouterr().out
    assert (folder / "events.jsonl").read_bytes() == log
    assert updates(folder) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert names(folder) == ["000003-update-5", "000004-update-6", "000005-update-8"]
    assert (folder / "policy.safetensors").read_bytes() != before
    config = json.loads((folder / "config.json").read_text())
    assert config["updates"] == 8
    assert config["hidden"] == [8]
    assert config["run_dir"] == str(folder)


def test_what_was_done_after_the_last_save_is_done_again_and_listed_once(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints" / "000003-update-5")
    (folder / "checkpoints" / "000002-update-4" / "learner.safetensors").write_bytes(b"torn")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"update": 6, "env_st')  # killed while it wrote
    assert main(["train", "--resume", str(folder)]) == 0
    assert updates(folder) == [1, 2, 3, 4, 5]
    assert names(folder)[-2:] == ["000003-update-4", "000004-update-5"]


def test_without_checkpoints_nothing_is_kept_and_nothing_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main([*RUN, "--checkpoint-every", "0", "--updates", "1", "--run-dir", str(folder)]) == 0
    assert not (folder / "checkpoints").exists()
    line = refused(capsys, "train", "--resume", str(folder), "--updates", "9")
    assert line == f"error: {folder} holds no checkpoint to go on with: it ended before the first one was due"


def test_what_cannot_be_resumed_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = ["train", "--resume", str(folder)]
    assert refused(capsys, *resume) == f"error: {folder} has done its 5 updates: ask for more in all with --updates"
    assert refused(capsys, *resume, "--seed", "3", "--num-envs", "4") == (
        "error: --resume goes on with the configuration of the run: leave out --num-envs, --seed"
    )
    nowhere = folder / "nowhere"
    assert "holds no config.json" in refused(capsys, "train", "--resume", str(nowhere))
    assert "name one with --env, or a run to go on with: --resume FOLDER" in refused(capsys, "train")
    assert "--checkpoint-every must be at least 0" in refused(capsys, *RUN, "--checkpoint-every", "-1")

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden": [9], "updates": 9}))
    assert "000003-update-5 does not fit this PPO: " in refused(capsys, *resume)
    (folder / "config.json").write_text(json.dumps({**config, "ppo": {"lambda": 1}}))
    assert "is of another version of EBRL" in refused(capsys, *resume)
    (folder / "config.json").write_text(json.dumps({**config, "updates": 9}))
    for path in (folder / "checkpoints").iterdir():
        (path / "manifest.json").write_text("{}")
    line = refused(capsys, *resume)
    assert f"no checkpoint in {folder / 'checkpoints'} can be used; the newest: " in line
    assert "manifest.json is not of EBRL" in line
    assert updates(folder) == [1, 2, 3, 4, 5], "nothing was written"
