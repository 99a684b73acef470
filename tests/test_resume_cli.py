"""``ebrl train --resume``: a run goes on from its folder, or one line says why it cannot."""

from __future__ import annotations

import errno
import json
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from tensorboardX.proto.event_pb2 import Event, SessionLog

from ebrl.cli import folder as run_folder
from ebrl.cli import main, train
from ebrl.cli.config import TrainConfig, config_of
from ebrl.core.errors import ConfigError
from ebrl.core.events import EventLog
from ebrl.core.trace import Trace
from ebrl.sim.failures import FailurePolicy
from ebrl.train import folders
from ebrl.train.evaluate import EvalReport
from ebrl.train.folders import locked
from ebrl.train.metrics import MetricsWriter

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
    out = capsys.readouterr().out
    assert "the event log ends where the run did: what is resumed is not recorded" in out
    assert "training CartPole-v1 from update 5" in out
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


def test_a_resumed_run_fails_and_spares_as_it_was_told(tmp_path: Path) -> None:
    failures = FailurePolicy("drop", build_s=None, call_s=5.0, per_hour=7)
    told = TrainConfig(env="CartPole-v1", spares=2, failures=failures)
    run_folder.create(tmp_path / "run", told)
    assert config_of(run_folder.load_config(tmp_path / "run"), tmp_path / "run") == told


def test_what_cannot_be_resumed_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = ["train", "--resume", str(folder)]
    assert refused(capsys, *resume) == f"error: {folder} has done its 5 updates: ask for more in all with --updates"
    assert refused(capsys, *resume, "--seed", "3", "--num-envs", "4") == (
        "error: --resume goes on with the configuration of the run: leave out --seed, --num-envs"
    )
    for own in (
        ["--max-lag", "1"],
        ["--num_envs=16"],
        ["--ppo.batch-size", "32"],
        ["--no-record"],
    ):
        assert refused(capsys, *resume, *own).endswith(f": leave out {own[0].split('=')[0]}")
    nowhere = folder / "nowhere"
    assert "holds no config.json" in refused(capsys, "train", "--resume", str(nowhere))
    assert "name one with --env, or a run to go on with: --resume FOLDER" in refused(capsys, "train")
    assert "--checkpoint-every must be at least 0" in refused(capsys, *RUN, "--checkpoint-every", "-1")

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden": [9], "updates": 9}))
    assert "000003-update-5 does not fit this PPO: " in refused(capsys, *resume)
    (folder / "config.json").write_text(json.dumps({**config, "ppo": {"lambda": 1}}))
    assert "is of another version of EBRL" in refused(capsys, *resume)
    for name, value in {"env_kwargs": None, "max_lag": None, "hidden": 5, "host": "boat", "num_envs": "8"}.items():
        (folder / "config.json").write_text(json.dumps({**config, name: value}))
        for command in (resume, ["eval", str(folder)], ["replay", str(folder)]):
            if name == "max_lag" and command is not resume:
                continue  # they do not read it
            line = refused(capsys, *command)
            assert line == f"error: config.json in {folder} is not what `ebrl train` wrote: {name} is {value!r}"
    (folder / "config.json").write_text(json.dumps({**config, "updates": 9}))
    for path in (folder / "checkpoints").iterdir():
        (path / "manifest.json").write_text("{}")
    line = refused(capsys, *resume)
    assert f"no checkpoint in {folder / 'checkpoints'} can be used; the newest: " in line
    assert "manifest.json is not of EBRL" in line
    assert updates(folder) == [1, 2, 3, 4, 5], "nothing was written"


def test_a_run_that_goes_on_is_not_resumed_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "metrics.jsonl").read_bytes()
    with locked(folder):
        line = refused(capsys, "train", "--resume", str(folder), "--updates", "9")
    assert line == f"error: {folder} is in use: another run writes there; wait for its end, or choose another folder"
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_folder_is_locked_while_its_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, messages = tmp_path / "run", list[str]()

    async def main_of(session: train.Session) -> None:
        with pytest.raises(ConfigError, match="is in use") as caught, locked(folder):
            pass
        messages.append(str(caught.value))

    monkeypatch.setattr(train.Session, "main", main_of)
    assert main([*RUN, "--run-dir", str(folder)]) == 0
    assert len(messages) == 1
    with locked(folder):
        pass


def test_a_profile_that_is_gone_is_no_reason_not_to_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    profile = folder / "gone.json"
    (folder / "config.json").write_text(json.dumps({**config, "profile": str(profile)}))
    assert main(["train", "--resume", str(folder), "--updates", "6"]) == 0
    assert f"{profile} is gone: stages begin without profiles" in capsys.readouterr().out


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save_file(tensors: Any, path: Path) -> None:
        path.write_bytes(b"torn")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(folders, "save_file", save_file)
    folder = tmp_path / "run"
    assert main([*RUN, "--run-dir", str(folder)]) == 1
    shown = capsys.readouterr()
    assert shown.err == f"error: {folder / 'checkpoints'}: no checkpoint could be written: No space left on device\n"
    assert f"{folder / 'policy.safetensors'}: the policy could not be saved: No space left on device" in shown.out
    assert main([*RUN, "--checkpoint-every", "0", "--updates", "1", "--run-dir", str(tmp_path / "other")]) == 2
    shown = capsys.readouterr()
    assert shown.err.endswith("policy.safetensors: the policy could not be saved: No space left on device\n")
    assert not list(tmp_path.glob("*/policy*"))


def shown(folder: Path) -> list[int]:
    """Return the steps of the scalar `update` that TensorBoard shows: what a restart purges is gone."""
    steps: list[int] = []
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                steps = [step for step in steps if step < event.step]
            steps += [event.step for each in event.summary.value if each.tag == "update"]
    return steps


def test_tensorboard_shows_every_update_once(folder: Path) -> None:
    assert len(shown(folder)) == 5
    shutil.rmtree(folder / "checkpoints" / "000003-update-5")
    assert main(["train", "--resume", str(folder), "--updates", "6"]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert shown(folder) == [line["env_steps"] for line in lines]


def test_who_is_killed_in_the_last_evaluation_goes_on_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def killed(*_: object) -> EvalReport:
        raise ConfigError("killed")

    folder = tmp_path / "run"
    options = ["--updates", "4", "--eval-every", "4", "--eval-episodes", "3", "--target-return", "499"]
    with monkeypatch.context() as patch:
        patch.setattr(train.Session, "_evaluate", killed)
        assert main([*RUN, *options, "--run-dir", str(folder)]) == 1
    assert names(folder) == ["000001-update-2"]
    assert main(["train", "--resume", str(folder)]) == 3
    assert "target NOT reached after 4 updates" in capsys.readouterr().out
    assert names(folder)[-1].endswith("update-4")


def test_a_full_disk_is_one_line_and_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with MetricsWriter(tmp_path) as metrics:
        assert threading.active_count() == threads, "no thread that may die, and leave others waiting"
        monkeypatch.setattr(metrics._board, "write_event", full)
        with pytest.raises(ConfigError, match=r"metrics\.jsonl: metrics cannot be written: No space left on device"):
            metrics.write(1, {"update": 1})
    log = EventLog(tmp_path / "events.jsonl")
    log._file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(ConfigError, match=r"events\.jsonl: the event log cannot be written: No space left on device"):
        log.write({"update": 1})
    log.close()
    trace = Trace()
    trace.span("gen-0", "batch", 0.0, 1.0)
    with pytest.raises(ConfigError, match="/dev/full: the trace cannot be written: No space left on device"):
        trace.save(Path("/dev/full"))
