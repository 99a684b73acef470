"""A checkpoint is whole or it is not used, and says why; the one before it is."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebrl.core.admission import Ledger
from ebrl.core.errors import CheckpointError, ConfigError
from ebrl.core.records import Episode
from ebrl.core.rng import Domain, stream
from ebrl.core.saved import SavedEnv, SavedEpisode, SavedExperience
from ebrl.gen.policies import GaussianPolicy
from ebrl.train import folders
from ebrl.train.checkpoint import Checkpoint, Checkpointer, load, store
from ebrl.train.fake import ScriptedLearner
from ebrl.train.ppo import PPO, PPOConfig
from ebrl.train.tree import copied
from tests.helpers import make_batch, make_segment, scripted_spec
from tests.test_packing import plain, same

SPEC = scripted_spec()


def experience() -> SavedExperience:
    running = SavedEpisode(
        actions=[np.zeros((1, 2), np.float32), np.ones((3, 2), np.float32)],
        last_obs={"state": np.arange(3.0)},
        memory=np.ones(2, np.float32),
        first_decision=4,
        num_steps=4,
        total_reward=0.1 + 0.2,
        success=None,
        duration_s=2.5,
        dropped=["unexecuted"],
        rng=stream(0, Domain.PROGRAM, 2).bit_generator.state,
        others={"a": (8, 3, np.ones(2, np.float32))},
    )
    rng = stream(0, Domain.PROGRAM, 1).bit_generator.state
    envs = [
        SavedEnv(3, 9, 40, {"a": (7, 3, None), "b": (2, 1, np.zeros(3, np.float32))}, rng, running, in_flight=True),
        SavedEnv(0, 2, 2, {}, rng, replace(running, actions=[], memory=None, success=True)),
        SavedEnv(-1, 0, 0, {}, rng, None),
    ]
    return SavedExperience(
        seed=7,
        name="envs",
        ids=["scripted"] * 3,
        tasks=["a", "a", "b"],
        group_size=1,
        compared=False,
        ledger=Ledger(21, 8, {"masked": 1}, 5, 3, 4, 1),
        ahead=[1, -1, 0],
        segments=[make_segment(4, version=[1, 2, 2, 3])],
        open=[make_segment(3, env=1, first=4)],
        episodes=[Episode(0, 2, 11, 0.3, 5, 5, True, 1.5, 3, "a")],
        envs=envs,
        taken=[make_segment(1, env=2)],
    )


def learner(seed: int = 0) -> PPO:
    policy = GaussianPolicy.for_spec(SPEC, hidden=(4,), seed=seed)
    return PPO(policy, PPOConfig(batch_size=8, minibatch_size=8, epochs=1))


def batch(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return make_batch(2, 4, aux={"u": rng.normal(size=(1, 1, 2)).astype(np.float32)}, rewards=(float(rng.normal()),))


def saved(update: int) -> Checkpoint:
    return Checkpoint(update, update, 0.5 * update, copied(learner().state_dict()), experience())


def all_of(checkpoint: Checkpoint) -> Any:
    """Return everything in a checkpoint in a form that `same` compares."""
    e = checkpoint.experience
    envs = [vars_of(env) | {"running": env.running and vars_of(env.running)} for env in e.envs]
    records = [vars_of(e.ledger), list(map(vars_of, e.episodes)), envs]
    segments = [[plain(segment) for segment in part] for part in (e.segments, e.open, e.taken)]
    return [checkpoint.update, checkpoint.elapsed_s, e.seed, e.tasks, e.ahead, records, segments, checkpoint.learner]


def vars_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def test_everything_comes_back(tmp_path: Path) -> None:
    before = saved(12)
    path = store(before, tmp_path)
    assert path.name == "000001-update-12"
    assert sorted(file.name for file in path.iterdir()) == [
        "experience.safetensors",
        "learner.safetensors",
        "manifest.json",
    ]
    after = load(path)
    assert after.path == path
    assert same(all_of(after), all_of(before))


def test_a_learner_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    one = learner()
    one.update(batch(0))
    one.update(batch(1))
    torch.rand(3)
    store(Checkpoint(2, 2, 1.0, one.state_dict(), experience()), tmp_path)
    expected = one.update(batch(2)), torch.rand(2)

    other = learner(seed=1)
    found = Checkpointer(tmp_path).latest()
    assert found is not None
    found.restore(other)
    assert other.num_updates == 2
    assert other.policy.features.normalizer.count == 16
    assert other.return_normalizer.count == 16
    assert (other.update(batch(2)), torch.rand(2).tolist()) == (expected[0], expected[1].tolist())
    assert same(dict(other.policy.state_dict()), dict(one.policy.state_dict()))
    assert same(found.learner, load(tmp_path / "000001-update-2").learner), "training has not written to the checkpoint"


def test_a_learner_of_another_form_is_refused(tmp_path: Path) -> None:
    store(saved(3), tmp_path)
    wide = PPO(GaussianPolicy.for_spec(SPEC, hidden=(5,)), PPOConfig(batch_size=8, minibatch_size=8))
    found = Checkpointer(tmp_path).latest()
    assert found is not None
    with pytest.raises(CheckpointError, match=r"000001-update-3 does not fit this PPO: .*Gaussian"):
        found.restore(wide)
    averaging = PPO(learner().policy, PPOConfig(batch_size=8, minibatch_size=8, proximal="ewma"))
    with pytest.raises(CheckpointError, match=r"lacks \['proximal'\] \(epochs 1 -> 8, proximal start -> ewma\)"):
        found.restore(averaging)
    store(Checkpoint(4, 4, 0.0, averaging.state_dict(), experience()), tmp_path)
    found = Checkpointer(tmp_path).latest()
    assert found is not None
    with pytest.raises(CheckpointError, match=r"does not fit this PPO: it also has \['proximal'\]"):
        found.restore(learner())
    with pytest.raises(ConfigError, match="ScriptedLearner cannot be saved"):
        found.restore(ScriptedLearner(8))


def test_who_goes_on_with_other_options_has_those_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(saved(3), tmp_path)
    found = Checkpointer(tmp_path).latest()
    assert found is not None
    found.restore(learner())
    assert caplog.messages == []
    other = PPO(learner().policy, replace(learner().config, gamma=0.5, adam_eps=1e-3))
    found.restore(other)
    assert caplog.messages == [
        "goes on with other options than those of the checkpoint: adam_eps 1e-05 -> 0.001, gamma 0.98 -> 0.5"
    ]
    other.update(batch(2))
    assert other.optimizer.param_groups[0]["eps"] == 1e-3


def test_a_learner_that_refuses_is_as_it_was(tmp_path: Path) -> None:
    trained = learner()
    trained.update(batch(0))
    checkpoint = Checkpoint(1, 1, 0.0, copied(trained.state_dict()), experience())
    wide = PPO(GaussianPolicy.for_spec(SPEC, hidden=(5,)), PPOConfig(batch_size=8, minibatch_size=8))
    wide.update(batch(1))
    before = copied(wide.state_dict())
    with pytest.raises(CheckpointError, match="does not fit this PPO"):
        checkpoint.restore(wide)
    assert same(copied(wide.state_dict()), before)


# What is no good.


def damage(path: Path, at: float) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rewrite(path: Path, **changes: Any) -> None:
    """Change the body of a manifest, with its hash."""
    body = {**json.loads(path.read_text())["body"], **changes}
    path.write_text(json.dumps({"sha256": folders._hash(json.dumps(body)), "body": body}))


TENSORS = "learner.safetensors"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest.json is missing"),
    "torn manifest": (lambda path: truncate(path / "manifest.json"), r"manifest.json is damaged, or not ours"),
    "no text": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"), r"manifest.json is damaged, or not"),
    "no tensors": (lambda path: (path / TENSORS).unlink(), r"learner.safetensors is missing"),
    "torn tensors": (lambda path: truncate(path / TENSORS), r"learner.safetensors is damaged"),
    "foreign JSON": (lambda path: (path / "manifest.json").write_text('{"epoch": 3}'), r"manifest.json is not of EBRL"),
    "foreign list": (lambda path: (path / "manifest.json").write_text("[1]"), r"manifest.json is not of EBRL"),
    "foreign format": (lambda path: rewrite(path / "manifest.json", format="other"), r"manifest.json is not of EBRL"),
    "newer schema": (lambda path: rewrite(path / "manifest.json", schema=9), r"has schema 9, and .* reads 4: use the"),
    "deep JSON": (lambda path: (path / "manifest.json").write_text("[" * 200000), r"manifest.json is damaged, or not"),
    "no files": (lambda path: rewrite(path / "manifest.json", files={}), r"is damaged, or not ours: KeyError"),
    "a list of files": (lambda path: rewrite(path / "manifest.json", files=["a"]), r"is damaged, or not ours: Attribu"),
    "no experience": (lambda path: rewrite(path / "manifest.json", experience={}), r"is damaged, or not ours: KeyErr"),
    "no update": (lambda path: rewrite(path / "manifest.json", update=None), r"is damaged, or not ours: TypeError"),
    "other numbers": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"started": 21', '"started": 22')
        ),
        r"manifest.json is damaged",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_says_why_and_the_one_before_is_used(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, words = BAD[case]
    saves = Checkpointer(tmp_path)
    store(saved(1), tmp_path)
    bad = store(saved(2), tmp_path)
    spoil(bad)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(bad)
    assert str(bad) in str(caught.value)
    with caplog.at_level(logging.WARNING, logger="ebrl"):
        found = saves.latest()
    assert found is not None
    assert found.update == 1
    (message,) = caplog.messages
    assert message.startswith("checkpoint 000002-update-2 is not used: ")
    shutil.rmtree(tmp_path / "000001-update-1")
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path} can be used; the newest: .*{words}"):
        saves.latest()


@pytest.mark.parametrize("name", ["manifest.json", "learner.safetensors", "experience.safetensors"])
def test_no_flipped_bit_goes_unseen(name: str, tmp_path: Path) -> None:
    path = store(saved(1), tmp_path)
    whole, expected = (path / name).read_bytes(), all_of(load(path))
    for at in np.linspace(0, 1, 24):
        damage(path / name, at)
        try:
            found = load(path)
        except CheckpointError:
            pass
        else:  # white space between JSON tokens says nothing
            assert name == "manifest.json"
            assert same(all_of(found), expected)
        (path / name).write_bytes(whole)


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    store(saved(1), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "000009-update-9").write_text("a file")
    (tmp_path / "best-000001-update-1").mkdir()
    (tmp_path / ".000004-update-4.partial").mkdir()
    (tmp_path / ".000004-update-4.partial" / TENSORS).write_text("torn")
    saves = Checkpointer(tmp_path, keep=1)
    found = saves.latest()
    assert found is not None
    assert found.update == 1
    saves._write(saved(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000002-update-2",
        "000009-update-9",
        "best-000001-update-1",
        "notes.txt",
    ]


def test_the_last_ones_are_kept_and_the_newest_is_the_one_written_last(tmp_path: Path) -> None:
    saves = Checkpointer(tmp_path / "deep" / "down", keep=2)
    assert saves.latest() is None
    for update in (10, 20, 30, 15):  # 15: somebody went back to 10 and on from there
        saves._write(saved(update))
    assert [path.name for path in folders.complete(saves.folder)] == ["000003-update-30", "000004-update-15"]
    found = saves.latest()
    assert found is not None
    assert found.update == 15


def test_a_damaged_one_is_not_one_of_the_last_that_are_kept(tmp_path: Path) -> None:
    saves = Checkpointer(tmp_path, keep=2)
    for update in (1, 2, 3):
        saves._write(saved(update))
    (tmp_path / "000003-update-3" / "manifest.json").write_text("")
    again = Checkpointer(tmp_path, keep=2)
    found = again.latest()
    assert found is not None
    assert found.update == 2
    again._write(saved(3))
    names = [path.name for path in folders.complete(tmp_path)]
    assert names == ["000002-update-2", "000003-update-3", "000004-update-3"]
    again._write(saved(4))
    assert [path.name for path in folders.complete(tmp_path)] == ["000004-update-3", "000005-update-4"]


def test_files_may_be_read_by_whom_other_files_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    path = store(saved(1), tmp_path)
    assert {file.stat().st_mode for file in path.iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saves = Checkpointer(tmp_path / "file" / "saves")
    with pytest.raises(CheckpointError, match=r"no checkpoint could be written: .*Not a directory"):
        saves._write(saved(1))
    with pytest.raises(CheckpointError, match="file cannot be read: Not a directory"):
        Checkpointer(tmp_path / "file").latest()
    with pytest.raises(ConfigError, match="keep must be a whole number of at least 1, got 0"):
        Checkpointer(tmp_path, keep=0)


def test_checkpoints_of_an_earlier_run_are_not_removed_unseen(tmp_path: Path) -> None:
    store(saved(9), tmp_path)
    saves = Checkpointer(tmp_path, keep=1)
    with pytest.raises(
        ConfigError, match=r"holds checkpoints of an earlier run, or of one that runs: go on with Trainer\(resume=saves"
    ):
        saves._write(saved(1))
    assert [path.name for path in folders.complete(tmp_path)] == ["000001-update-9"]
    saves.latest()
    saves._write(saved(10))
    assert [path.name for path in folders.complete(tmp_path)] == ["000002-update-10"]


@pytest.mark.parametrize("begun", [False, True])
def test_of_two_runs_in_one_folder_one_goes_on(begun: bool, tmp_path: Path) -> None:
    if begun:
        store(saved(1), tmp_path)
    one, two = Checkpointer(tmp_path), Checkpointer(tmp_path)
    one.latest()
    two.latest()
    one._write(saved(2))
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds checkpoints of an earlier run, or of one that runs: go on with"):
            two._write(saved(2))
    one._write(saved(3))
    assert [path.name.split("-")[-1] for path in folders.complete(tmp_path)] == ["1", "2", "3"][not begun :]


def test_two_runs_do_not_write_into_a_folder_at_once(tmp_path: Path) -> None:
    with folders.locked(tmp_path), pytest.raises(ConfigError, match=f"{tmp_path} is in use: another run writes there"):
        Checkpointer(tmp_path)._write(saved(1))
    Checkpointer(tmp_path)._write(saved(1))
    with (
        pytest.raises(ConfigError, match="nowhere cannot be opened: No such file"),
        folders.locked(tmp_path / "nowhere"),
    ):
        pass


def test_where_there_are_no_locks_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    Checkpointer(tmp_path)._write(saved(1))
    assert caplog.messages == [f"{tmp_path} cannot be locked (Function not implemented): let no other run write there"]


def test_a_checkpoint_that_was_moved_and_linked_back_is_a_checkpoint(tmp_path: Path) -> None:
    saves = Checkpointer(tmp_path / "saves", keep=1)
    path = saves._write(saved(1))
    moved = shutil.move(path, tmp_path / "moved")
    path.symlink_to(moved)
    found = saves.latest()
    assert found is not None
    assert found.update == 1
    saves._write(saved(2))
    assert [path.name for path in saves.folder.iterdir()] == ["000002-update-2"]
    assert load(tmp_path / "moved").update == 1, "what it was linked to is left alone"


def test_what_cannot_be_removed_is_told_once_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = shutil.rmtree

    def rmtree(path: Path) -> None:
        if path.name.startswith(".000001"):
            raise PermissionError(13, "Permission denied")
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    saves = Checkpointer(tmp_path, keep=1)
    for update in range(1, 5):
        assert saves._write(saved(update)).name == f"00000{update}-update-{update}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".000001-update-1.partial", "000004-update-4"]
    assert caplog.messages == [
        f"an old checkpoint stays: {tmp_path / '000001-update-1'} could not be removed: [Errno 13] Permission denied"
    ]


def test_what_cannot_be_saved_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learner/rng: Random cannot be saved"):
        store(replace(saved(1), learner={"rng": type("Random", (), {})()}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_file_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = folders.sync, Path.rename

    def watched_sync(path: Path) -> None:
        events.append(path.name)
        sync(path)

    def watched_rename(path: Path, to: Path) -> Path:
        events.append(f"-> {to.name}")
        return rename(path, to)

    monkeypatch.setattr(folders, "sync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    folder = tmp_path / "saves"
    store(saved(5), folder)
    assert events == [
        tmp_path.name,
        "learner.safetensors",
        "experience.safetensors",
        "manifest.json",
        ".000001-update-5.partial",
        "-> 000001-update-5",
        "saves",
    ]
