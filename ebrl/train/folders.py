"""Folders of tensors that appear whole or not at all, and that tell when they are damaged.

A folder is written under a hidden name, every file and the folder itself are brought to the disk, and only then it gets
its name, which is atomic. What a crash leaves under a hidden name is a `leftover`. The manifest has the hash of every
file, and its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ebrl.core.errors import CheckpointError, ConfigError
from ebrl.train.tree import Tensors

logger = logging.getLogger("ebrl")

FORMAT: Final = "ebrl checkpoint"
SCHEMA: Final = 4
MANIFEST: Final = "manifest.json"
NAME: Final = re.compile(r"(\d{6,})-update-\d+")
PARTIAL: Final = re.compile(rf"\.{NAME.pattern}\.partial")


def complete(folder: Path) -> list[Path]:
    """Return what was written into `folder`, the newest last; nothing if it does not exist.

    Raises:
        CheckpointError: It cannot be read.
    """
    return [path for _, path in sorted((number_of(path), path) for path in _matches(folder, NAME))]


def leftovers(folder: Path) -> list[Path]:
    """Return what a crash, or a removal that failed, has left in `folder`.

    Raises:
        CheckpointError: It cannot be read.
    """
    return _matches(folder, PARTIAL)


def number_of(path: Path) -> int:
    """Return the number of one that is complete, or left over; a later one has a higher number."""
    return int(path.name.lstrip(".").split("-")[0])


def make(folder: Path) -> None:
    """Make a folder if it does not exist; its name is on the disk when this returns.

    Raises:
        CheckpointError: The operating system does not allow it.
    """
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder}: no checkpoint could be written: {error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others out of a folder who lock it as well; the end of this process, however it comes, opens it.

    Raises:
        ConfigError: Somebody else is in it, or it is not there.
    """
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder} is in use: another run writes there; wait for its end, or choose another folder"
            ) from None
        except OSError as error:  # some file systems have no locks
            logger.warning("%s cannot be locked (%s): let no other run write there", folder, error.strerror)
        yield
    finally:
        os.close(fd)


def write(folder: Path, update: int, files: Mapping[str, Tensors], content: Mapping[str, Any]) -> Path:
    """Write a new folder into `folder`; it is on the disk when this returns.

    Args:
        folder: Made if it does not exist; nobody else writes into it meanwhile.
        update: For its name.
        files: Tensors by the name of the file.
        content: JSON of the manifest.

    Raises:
        CheckpointError: The operating system does not allow it.
    """
    make(folder)
    try:
        last = max(map(number_of, [*complete(folder), *leftovers(folder)]), default=0)
        target = folder / f"{last + 1:06d}-update-{update}"
        partial = folder / f".{target.name}.partial"
        partial.mkdir()
        hashes = {name: _write_tensors(partial / name, tensors) for name, tensors in files.items()}
        body = {"format": FORMAT, "schema": SCHEMA, "files": hashes, **content}
        text = json.dumps(body)
        _write_text(partial / MANIFEST, f'{{"sha256": "{_hash(text)}", "body": {text}}}\n')
        sync(partial)
        partial.rename(target)
        sync(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: no checkpoint could be written: {error}") from error
    return target


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """Return content and tensors, after looking at every byte.

    Raises:
        CheckpointError: Something is missing, damaged, not ours, or of a version to come; says what.
    """
    body = _read_manifest(path / MANIFEST)
    try:
        for name, digest in body["files"].items():
            with (path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise CheckpointError(f"{path / name} is damaged: its hash is not the one in {MANIFEST}")
        return body, {name: load_file(path / name) for name in body["files"]}
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def discard(path: Path) -> None:
    """Remove a folder, complete or left over, so that a crash leaves nothing that looks complete.

    Where it is a link to one that was moved elsewhere, the link alone is removed.

    Raises:
        CheckpointError: The operating system does not allow it.
    """
    try:
        hidden = path if PARTIAL.fullmatch(path.name) else path.rename(path.with_name(f".{path.name}.partial"))
        if hidden.is_symlink():
            hidden.unlink()
        else:
            shutil.rmtree(hidden)
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error}") from error


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _matches(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        paths = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    return [path for path in paths if name.fullmatch(path.name) is not None]


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write a file of tensors that others may read where they may read other new files; safetensors makes it private.

    Raises:
        OSError, SafetensorError: It could not be written.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path)
    path.chmod(mode)


def _write_tensors(path: Path, tensors: Tensors) -> str:
    save_tensors(path, tensors)
    sync(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, so this is no checkpoint of EBRL") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or not ours: it is no JSON ({error})") from error
    body = manifest.get("body") if isinstance(manifest, dict) else None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not of EBRL")
    if body.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} has schema {body.get('schema')}, and this version of EBRL reads {SCHEMA}: "
            "use the version that wrote it"
        )
    if manifest.get("sha256") != _hash(json.dumps(body)):
        raise CheckpointError(f"{path} is damaged: its content does not have its hash")
    return body


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
