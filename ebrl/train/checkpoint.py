"""`Checkpointer`: a run on disk between two updates, so that another process goes on where this one was killed.

What is kept: the learner (weights, statistics with their counts, optimiser, generators), the ledger, finished decisions
that are not trained yet, each with the version that acted, and per environment its counters, from which its random
numbers follow. Decisions in flight are not: they are counted as lost, or made again (see `ebrl.EnvGroup`,
`on_resume`). Weights of older versions are not either, since decisions hold the probability with which they were made.

A snapshot is taken at one moment on the loop, and consists of references; the learner is copied on the training lane;
files are written on a lane of their own. So nobody waits for a checkpoint but who awaits it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ebrl.core.admission import Ledger
from ebrl.core.errors import CheckpointError, ConfigError, as_path, in_short, whole
from ebrl.core.protocols import Lane, Learner, Stateful
from ebrl.core.records import Episode
from ebrl.core.runtime import Runtime
from ebrl.core.saved import SavedEnv, SavedEpisode, SavedExperience
from ebrl.train.folders import complete, discard, leftovers, locked, make, number_of, read, write
from ebrl.train.packing import pack_segments, unpack_segments
from ebrl.train.tree import Tensors, copied, pack, unpack

if TYPE_CHECKING:
    from ebrl.train.trainer import Trainer

logger = logging.getLogger("ebrl")

SEGMENTS: Final = ("segments", "open", "taken")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run between two updates; pass it to ``Trainer(resume=...)``.

    Attributes:
        update: Updates done.
        version: Of the weights that acted; more than `update` where somebody had published before this run did.
        elapsed_s: Loop time of the run so far.
        learner: What its `state_dict` returned; on the CPU.
        experience: Of the environments.
        path: Where it was read from.
    """

    update: int
    version: int
    elapsed_s: float
    learner: Mapping[str, Any] = field(repr=False)
    experience: SavedExperience = field(repr=False)
    path: Path | None = None

    def restore(self, learner: Learner) -> Callable[[], None]:
        """Give a learner of the same form the state of the one that was saved.

        Returns:
            What takes it back.

        Raises:
            ConfigError: It has no `load_state_dict`.
            CheckpointError: It has another form; it is as it was then.
        """
        holder = stateful(learner)
        before = copied(holder.state_dict())
        try:
            holder.load_state_dict(copied(self.learner))
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            holder.load_state_dict(before)
            raise CheckpointError(
                f"{self.path or 'the checkpoint'} does not fit this {type(learner).__name__}: {in_short(error)}; make "
                "policy and learner with the options of that run"
            ) from error
        return partial(holder.load_state_dict, before)


class Checkpointer:
    """Writes the checkpoints of a run into a folder, and finds the newest that is whole.

    Example::

        saves = ebrl.Checkpointer("runs/reach")
        trainer = rt.start(ebrl.Trainer(envs, learner, updates=1000, resume=saves.latest()))
        saves.attach(trainer)
        async for report in trainer:
            if report.update % 10 == 0:
                await saves.save(trainer)
    """

    def __init__(self, folder: Path | str, *, keep: int = 3) -> None:
        """Describe it; nothing is touched.

        Args:
            folder: Of this run alone.
            keep: Checkpoints that stay; older ones are removed.

        Raises:
            ConfigError: `folder` is no path, or `keep` is below 1.
        """
        self.folder = as_path("folder", folder)
        self.keep = whole("keep", keep)
        self._lane: tuple[Runtime, Lane] | None = None
        self._last = 0  # number of the newest checkpoint that was read or written here
        self._stuck: set[int] = set()  # those that could not be removed
        self._damaged: set[int] = set()  # those that `latest` could not use: they do not count as kept

    async def save(self, trainer: Trainer) -> Path:
        """Write a checkpoint; it is on the disk when this returns.

        Rollouts go on, within their credit. Call it in the body of ``async for report in trainer``: the next update
        begins after it. Does what `attach` does, too.

        Returns:
            Its folder.

        Raises:
            ConfigError: An update runs, or the learner is not `Stateful`; or the folder holds checkpoints of another
                run, at which nobody has looked with `latest`: they would be removed in time.
            CheckpointError: It could not be written; those before it are as they were. That older ones cannot be
                removed is no error, and logged once.
        """
        snapshot = await trainer.snapshot()
        path = await self._lane_of(trainer).run(self._write, snapshot)
        self.attach(trainer)
        return path

    def attach(self, trainer: Trainer) -> None:
        """Have a run saved before it ends because simulators have failed too often (`ebrl.FailurePolicy`).

        Args:
            trainer: That was started.

        Raises:
            Closed: It was not started, or has ended.
        """
        trainer.runtime.before_failing[trainer.name] = partial(self._save_last, trainer)

    async def _save_last(self, trainer: Trainer) -> None:
        await trainer.between_updates()
        await self.save(trainer)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None if there are none. Reads files: call it before the run.

        What cannot be used is logged with its reason, and the one before it is tried.

        Raises:
            CheckpointError: There are some, and none of them can be used.
        """
        first: CheckpointError | None = None
        for path in reversed(complete(self.folder)):
            self._last = max(self._last, number_of(path))
            try:
                return load(path)
            except CheckpointError as error:
                logger.warning("checkpoint %s is not used: %s", path.name, error)
                self._damaged.add(number_of(path))
                first = first or error
        if first is not None:
            raise CheckpointError(f"no checkpoint in {self.folder} can be used; the newest: {first}") from first
        return None

    def _write(self, checkpoint: Checkpoint) -> Path:
        make(self.folder)  # before there is something to lock
        with locked(self.folder):
            before = complete(self.folder)
            if before and number_of(before[-1]) > self._last:
                raise ConfigError(
                    f"{self.folder} holds checkpoints of an earlier run, or of one that runs: go on with "
                    "Trainer(resume=saves.latest()), or choose another folder"
                )
            self._discard(leftovers(self.folder))
            path = store(checkpoint, self.folder)
            self._last = number_of(path)
            whole = [number_of(each) for each in [*before, path] if number_of(each) not in self._damaged]
            self._discard(each for each in before if number_of(each) < whole[-self.keep :][0])
        return path

    def _discard(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                discard(path)
            except CheckpointError as error:
                if number_of(path) not in self._stuck:
                    self._stuck.add(number_of(path))
                    logger.warning("an old checkpoint stays: %s", error)

    def _lane_of(self, trainer: Trainer) -> Lane:
        runtime = trainer.runtime
        if self._lane is None or self._lane[0] is not runtime:
            self._lane = runtime, runtime.machine.lane("io", f"{trainer.name}-checkpoints")
        return self._lane[1]


def stateful(learner: Learner) -> Stateful:
    """Return the learner as what a checkpoint can hold.

    Raises:
        ConfigError: It cannot be held.
    """
    if not isinstance(learner, Stateful):
        raise ConfigError(
            f"{type(learner).__name__} cannot be saved: give it state_dict() and load_state_dict(state), as a "
            "TorchLearner has them"
        )
    return learner


def store(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint into a folder of checkpoints.

    Raises:
        CheckpointError: The operating system does not allow it.
        ConfigError: It holds something that cannot be written.
    """
    learner: Tensors = {}
    experience: Tensors = {}
    content = {
        "update": checkpoint.update,
        "version": checkpoint.version,
        "elapsed_s": checkpoint.elapsed_s,
        "learner": pack(checkpoint.learner, learner, "learner"),
        "experience": pack(_columns(checkpoint.experience), experience, "experience"),
    }
    return write(
        folder,
        checkpoint.update,
        {"learner.safetensors": learner, "experience.safetensors": experience},
        content,
    )


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: It is damaged, not ours, or of a version to come.
    """
    try:
        content, files = read(path)
        return Checkpoint(
            update=int(content["update"]),
            version=int(content["version"]),
            elapsed_s=float(content["elapsed_s"]),
            learner=unpack(content["learner"], files["learner.safetensors"]),
            experience=_experience(unpack(content["experience"], files["experience.safetensors"])),
            path=path,
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or not ours: {error!r}") from error


def _columns(saved: SavedExperience) -> dict[str, Any]:
    return {
        **_fields(saved),
        "ledger": _fields(saved.ledger),
        **{name: pack_segments(getattr(saved, name)) for name in SEGMENTS},
        "episodes": [_fields(episode) for episode in saved.episodes],
        "envs": [_env_columns(env) for env in saved.envs],
    }


def _experience(columns: dict[str, Any]) -> SavedExperience:
    parts = {
        "ledger": Ledger(**columns["ledger"]),
        **{name: unpack_segments(columns[name]) for name in SEGMENTS},
        "episodes": [Episode(**episode) for episode in columns["episodes"]],
        "envs": [_env(env) for env in columns["envs"]],
    }
    return SavedExperience(**(columns | parts))


def _env_columns(env: SavedEnv) -> dict[str, Any]:
    running = env.running
    if running is None:
        return _fields(env)
    lengths = [len(action) for action in running.actions]
    actions = np.concatenate(running.actions) if lengths else None
    return _fields(env) | {"running": _fields(running) | {"actions": actions, "lengths": lengths}}


def _env(columns: dict[str, Any]) -> SavedEnv:
    episode = columns["running"]
    if episode is None:
        return SavedEnv(**columns)
    ends = np.cumsum(episode.pop("lengths"))[:-1]
    actions = [] if episode["actions"] is None else np.split(episode["actions"], ends)
    return SavedEnv(**{**columns, "running": SavedEpisode(**{**episode, "actions": actions})})


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
