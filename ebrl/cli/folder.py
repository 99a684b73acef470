"""The folder of a run: configuration, metrics as JSON lines and for TensorBoard, policy, profiles and checkpoints."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ebrl import __version__
from ebrl.cli.config import TrainConfig
from ebrl.core.errors import CheckpointError, ConfigError, in_short
from ebrl.train.folders import save_tensors

PROFILE = "profile.json"
EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
UPDATE = re.compile(r'{"update": (\d+),.*}')  # a line of metrics that is whole


def holds_run(folder: Path) -> bool:
    """Whether a run was kept there."""
    try:
        return (folder / "config.json").is_file()
    except OSError:  # no name that a folder can have
        return False


def refuse_existing(folder: Path) -> None:
    """Check that a run may be written there.

    Raises:
        ConfigError: The folder exists.
    """
    try:
        exists = folder.exists()
    except OSError as error:
        raise ConfigError(f"the run folder {folder} cannot be made: {error.strerror}") from error
    if exists:
        raise ConfigError(f"{folder} exists: remove it, or choose another folder with --run-dir")


def create(folder: Path, config: TrainConfig) -> None:
    """Make the folder and write the configuration.

    Raises:
        ConfigError: The operating system does not allow it.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"the run folder {folder} cannot be made: {error.strerror}") from error
    write_config(folder, config)


def write_config(folder: Path, config: TrainConfig) -> None:
    """Write the configuration, whole or not at all.

    Raises:
        ConfigError: The operating system does not allow it.
    """
    record: dict[str, Any] = {"ebrl": __version__, **dataclasses.asdict(config), "run_dir": folder}
    _replace(folder / "config.json", json.dumps(record, indent=2, default=str) + "\n")


def forget_after(folder: Path, update: int) -> None:
    """Remove metrics of updates after `update`, which a resumed run does again.

    Raises:
        ConfigError: The operating system does not allow it.
    """
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in lines if (found := UPDATE.match(line)) is not None and int(found[1]) <= update]
    _replace(path, "".join(f"{line}\n" for line in kept))


def save_policy(policy: torch.nn.Module, folder: Path) -> Path:
    """Write all weights and statistics of a policy, whole or not at all.

    Raises:
        CheckpointError: The operating system does not allow it.
    """
    path = folder / "policy.safetensors"
    try:
        with _whole(path) as partial:
            save_tensors(partial, {name: tensor.contiguous() for name, tensor in policy.state_dict().items()})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: the policy could not be saved: {error}") from error
    return path


def load_policy(policy: torch.nn.Module, folder: Path) -> None:
    """Read what `save_policy` wrote into a policy of the same form.

    Raises:
        ConfigError: There is no policy, or it has another form.
    """
    path = folder / "policy.safetensors"
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no policy.safetensors: give the folder of a run of `ebrl train` that has ended "
            f"(`ebrl train --resume {folder}` goes on with one that was killed)"
        )
    try:
        policy.load_state_dict(load_file(path))
    except (RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{path} does not fit the policy of its config.json: {in_short(error)}") from error


def _replace(path: Path, text: str) -> None:
    try:
        with _whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Give the name under which a file is written until it is whole, and leave nothing there."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a run.

    Raises:
        ConfigError: There is none.
    """
    path = folder / "config.json"
    if not holds_run(folder):
        raise ConfigError(f"{folder} holds no config.json: give the folder of a run of `ebrl train`")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not what `ebrl train` wrote: {error}") from error
    if not isinstance(record, dict) or not {"env", "hidden"} <= record.keys():
        raise ConfigError(f"{path} is not what `ebrl train` wrote: it describes no environment and policy")
    return record
