"""`Trainer`: the loop that turns segments into versions, while environments and generator go on.

Consumes a batch of B decisions, or of whole groups with at least B; waits for enough admissible ones; is woken by the
recorders. After each update it publishes the weights and gives the credit of the batch back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ebrl.core.admission import Admission
from ebrl.core.errors import Closed, ConfigError, ProgramError, logger, note, whole, word
from ebrl.core.profile import StageProfile
from ebrl.core.protocols import Actor, Experience, GroupLearner, Lane, Learner
from ebrl.core.readings import TrainReading
from ebrl.core.records import TrainBatch, UpdateReport
from ebrl.core.runtime import LEAST_S, Runtime
from ebrl.core.underway import Underway
from ebrl.train.assemble import Assembler, Dropped
from ebrl.train.checkpoint import Checkpoint, stateful
from ebrl.train.groups import GroupAssembler, Groups
from ebrl.train.journal import Journal
from ebrl.train.options import check_learner
from ebrl.train.sampling import Sampling, share_metrics, weighted
from ebrl.train.tree import copied

Result: TypeAlias = asyncio.Future[tuple[Mapping[str, float], NDArray[np.int64]]]
"""What comes of an update on the lane: metrics, and how old the data were."""


class Trainer:
    """A service, and an async iterator of one report per update.

    The updates are made for the caller's ``async for``: while its body runs no update does, so `learner.policy` may be
    read there; rollouts go on, within their credit. Who is cancelled while an update runs does not undo it: it ends,
    and the next report is of that one.

    It has its generator and the policy of its learner alone: another trainer may have them when all updates are done,
    or after ``await rt.stop(trainer)``.

    Example::

        learner = ebrl.PPO(policy, ebrl.PPOConfig())
        async for report in rt.start(ebrl.Trainer(envs, learner, updates=100)):
            print(report.update, report.mean_return)
    """

    def __init__(
        self,
        envs: Experience,
        learner: Learner,
        *,
        updates: int,
        max_lag: int = 1,
        sampling: Sampling | None = None,
        threads: int = 1,
        resume: Checkpoint | None = None,
        name: str = "trainer",
    ) -> None:
        """Describe a trainer.

        Args:
            envs: A started `EnvGroup`; its actor receives the weights.
            learner: Does the updates. One with an attribute `groups` (`ebrl.core.protocols.GroupLearner`) is given
                whole groups only, in batches of at least as many decisions as it wants.
            updates: How many, those of the run that is continued included.
            max_lag: Versions that a trained decision may be behind; 0 waits for the data of each version.
            sampling: What is done about environments of different speed. ``"arrival"``: nothing. ``"quota"``: each may
                start B / N decisions per version. ``"weighted"``: decisions count so that tasks do equally
                (`ebrl.train.sampling`). None: ``"weighted"`` where there are several tasks, else ``"arrival"``.
            threads: Of torch, within an update.
            resume: Go on from there: with the learner's state, which is loaded when the service starts, the number of
                the version, the ledger, and decisions that were not trained. None begins anew.
            name: Of the service.

        Raises:
            ConfigError: A number or `sampling` that cannot be, no learner or checkpoint, or an actor that takes modes.
        """
        _check(envs.actor, learner, sampling, resume)
        self.name = name
        self.updates = whole("updates", updates)
        self.max_lag = whole("max_lag", max_lag, 0)
        self._envs = envs
        self._learner = learner
        self._tasks = tuple(dict.fromkeys(envs.tasks))
        self._sampling = sampling or ("weighted" if len(self._tasks) > 1 else "arrival")
        self._groups = Groups(envs.group_size, learner.groups) if isinstance(learner, GroupLearner) else None
        self._threads = whole("Trainer.threads", threads)
        self._resume = resume
        self._current = Underway[Callable[[], UpdateReport]](f"an update of {name}")
        self._asked = False  # somebody waits for a report
        self._assembler: Assembler | GroupAssembler = Assembler(learner.batch_size, max_lag)
        self._runtime: Runtime | None = None
        self._lane: Lane | None = None
        self._journal: Journal | None = None
        self._failed = False  # the last update
        self._heir = ""  # the trainer that goes on with its generator or policy
        self._num_updates = self._num_trained = 0
        self._profile = StageProfile("train", name)
        self._update_s = self._updated_s = self._began_s = 0.0

    def open(self, runtime: Runtime) -> None:
        """Take a lane and open the group's credit; called by `Runtime.start`.

        Raises:
            EbrlError: It shares what it may not, has too many threads, or environments, generator or checkpoint do not
                fit. Then nothing has changed, and the group may have another trainer.
        """
        saved, weights = self._resume, self._envs.actor.weights
        version = weights.version and weights.version + 1  # the policy may have been changed since that one
        finished = _refuse(self, runtime)
        self._assembler = _make_assembler(self, runtime)
        _open_group(self)
        if saved is not None:
            version, self._num_updates = saved.version, saved.update
            for segment in saved.experience.taken:
                self._assembler.add(segment)
        weights.begin(version)  # nobody has decided anything in this turn of the loop: all is of this version
        _succeed(self, finished, runtime)
        self._journal = _journal(self, runtime)
        self._lane = runtime.machine.lane("train", f"{self.name}-0", runtime.claim("train"), self._threads)
        if runtime.machine.real:
            self._lane.run(torch.set_num_threads, self._threads, n=0)
        self._runtime = runtime
        self._updated_s = runtime.clock()
        self._began_s = self._updated_s - (saved.elapsed_s if saved is not None else 0.0)
        self._profile = StageProfile("train", self.name)
        runtime.profiles.add(self._profile)
        self._read()
        runtime.tuning.add_trainer(self)

    @property
    def runtime(self) -> Runtime:
        """Where it runs.

        Raises:
            Closed: It was not started, or has ended.
        """
        if self._runtime is None or self._lane is None:
            raise Closed(f"{self.name} is not running: start it with rt.start(trainer), inside its runtime")
        return self._runtime

    @property
    def actor(self) -> Actor:
        """Whom it publishes to."""
        return self._envs.actor

    def reading(self) -> TrainReading:
        """What the tuner needs to know; see `ebrl.core.tuning.TunedTrainer`."""
        return TrainReading(
            name=self.name,
            gen="",
            num_updates=self._num_updates,
            num_decisions=self._num_trained,
            update_s=self._update_s,
            updated_s=self._updated_s,
        )

    async def serve(self) -> None:
        """Nothing to do of its own accord: the updates run in the caller's ``async for``."""
        await asyncio.get_running_loop().create_future()

    def statistics(self) -> Mapping[str, float]:
        """Updates, trained decisions per second, lane time, and which part of it is used."""
        return {"updates": self._num_updates, "buffered": len(self._assembler), **self._read()}

    def _read(self) -> dict[str, float]:
        busy_s = self._lane.busy_s if self._lane is not None else 0.0
        assert self._runtime is not None
        return {"busy_s": busy_s, **self._profile.read(self._runtime.clock(), self._num_trained, busy_s)}

    async def snapshot(self) -> Checkpoint:
        """Return the run as it is now; between two updates, while rollouts go on.

        Raises:
            ConfigError: An update runs, or the last one came to no end, or another trainer goes on with what this one
                has done, or the learner is not `ebrl.core.protocols.Stateful`.
            Closed: The trainer is not running.
        """
        elapsed_s = self.runtime.clock() - self._began_s
        lane, learner, update = self._lane, stateful(self._learner), self._num_updates
        version = self._envs.actor.weights.version
        assert lane is not None
        _refuse_to_save(self)
        saved = self._envs.save()
        saved = replace(saved, taken=self._assembler.segments)
        # Queued in the same turn of the loop: no update comes between.
        state = await lane.run(lambda: copied(learner.state_dict()), n=0)
        return Checkpoint(update, version, elapsed_s, state, saved)

    async def between_updates(self) -> None:
        """Wait until no update runs; in the same turn of the loop `snapshot` may be called."""
        await self._current.idle()

    async def aclose(self, deadline_s: float) -> None:
        """Wait for a running update, up to the deadline. Its environments get no more credit."""
        lane, self._lane = self._lane, None
        if self._runtime is not None and lane is not None:
            self._envs.admission.close()
            ended = await self._current.aclose(deadline_s)
            if not await self._runtime.machine.aclose([lane], deadline_s=deadline_s if ended else LEAST_S):
                self._runtime.tuning.forget(self)  # else its thread may still change the policy
            self._runtime.before_failing.pop(self.name, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> UpdateReport:
        """Do one update.

        Raises:
            StopAsyncIteration: All updates are done.
            Closed: The trainer was not started, or has been stopped.
            ProgramError: Somebody else waits for the same report.
        """
        if self._num_updates >= self.updates and not self._current.begun:
            raise StopAsyncIteration
        if self._asked:
            raise ProgramError(f"two tasks iterate over {self.name} at once: each report is for one `async for` alone")
        self._asked = True
        try:
            return await self._next_update()
        finally:
            self._asked = False

    async def _next_update(self) -> UpdateReport:
        lane, runtime = self._lane, self._runtime
        if not self._current.begun:
            if lane is None or runtime is None:
                raise Closed(f"{self.name} is not running: iterate over rt.start(trainer) inside its runtime")
            hungry_s = runtime.clock()
            await self._current.before()
            batch = await self._next_batch()
            shares = [(segment.env, len(segment.decisions)) for segment in batch.segments]
            result = lane.run(self._update, batch, n=sum(num for _, num in shares))
            del batch  # the lane frees its thousands of records, and not the loop
            self._current.begin(self._end_update(runtime, lane, result, shares, runtime.clock() - hungry_s))
        return (await self._current.result())()

    async def _end_update(
        self, runtime: Runtime, lane: Lane, result: Result, shares: list[tuple[int, int]], rollout_s: float
    ) -> Callable[[], UpdateReport]:
        num_decisions, update_s = sum(num for _, num in shares), runtime.clock()
        try:
            metrics, lags = await result
            version = await self._envs.actor.weights.publish(self._learner.policy, lane)
            self._failed = False
        except BaseException as error:  # also when it is given up: its data are used up, and must be booked
            self._failed = True
            note(error, f"in update {self._num_updates + 1} of {self.name}")
            _book(self._envs.admission, [Dropped(env, "lost", num) for env, num in shares])
            raise
        done_s = runtime.clock()
        self._envs.admission.train(shares)
        self._num_updates += 1
        self._num_trained += num_decisions
        self._update_s, self._updated_s = done_s - update_s, done_s
        self._profile.observe(num_decisions, self._update_s)
        if runtime.trace is not None:
            runtime.trace.span(lane.name, "update", update_s, done_s, version=version)
        runtime.boundary()
        return partial(_report, self, lags, metrics, rollout_s, done_s - update_s, done_s)

    def _update(self, batch: TrainBatch) -> tuple[Mapping[str, float], NDArray[np.int64]]:
        if self._sampling == "weighted":
            batch = weighted(batch, len(self._tasks))
        metrics = (self._journal or self._learner).update(batch)
        _check_metrics(type(self._learner).__name__, metrics)
        return {**metrics, **share_metrics(batch, self._tasks)}, batch.lags

    async def _next_batch(self) -> TrainBatch:
        envs, assembler = self._envs, self._assembler
        while True:
            await envs.admission.ready()
            version = envs.actor.weights.version
            dropped: list[Dropped] = []
            segments = envs.take_segments(stale=version - self.max_lag)
            if self._groups is not None:
                segments, dropped = self._groups.admit(segments)
            for segment in segments:
                dropped += assembler.add(segment)
            batch, too_old = assembler.take(version)
            dropped += too_old
            _book(envs.admission, dropped)
            if self._journal is not None:
                self._journal.take(segments, envs.admission.ledger().dropped, failed=self._failed)
            if batch is not None:
                return batch
            assert dropped, "a batch is finished by the ledger, and not in the assembler"


def _refuse(trainer: Trainer, runtime: Runtime) -> list[Trainer]:
    """Look whether a trainer can begin, and return those that have ended with what it goes on with."""
    _refuse_to_record(trainer, runtime)
    if trainer.actor.weights.publishing:
        raise ConfigError(f"somebody publishes to {trainer.actor.name}: start {trainer.name} when that is done")
    if (claim := runtime.claim("train")) is not None:
        claim.expect(trainer._threads, trainer.name)
    saved = trainer._resume
    if saved is not None and saved.update >= trainer.updates:
        logger.warning("%s has done its %d updates: none is left of %d", trainer.name, saved.update, trainer.updates)
    actor, policy = trainer.actor, trainer._learner.policy
    trainers = [other for other in runtime.tuning.trainers if isinstance(other, Trainer)]
    before = [other for other in trainers if other.actor is actor or other._learner.policy is policy]
    for other in before:
        if other._lane is None:
            why = "did not end its last update in time, and may still be in it: give it one of its own"
        elif other._num_updates < other.updates:
            why = "has not done its updates: give it one of its own, or end that one with await rt.stop(trainer)"
        else:
            continue
        shared = "policy" if other._learner.policy is policy else "generator"
        raise ConfigError(f"{trainer.name} has the {shared} of {other.name}, which {why}")
    return before


def _open_group(trainer: Trainer) -> None:
    """Let the environments begin, last of all that may refuse."""
    saved, learner, envs = trainer._resume, trainer._learner, trainer._envs
    undo = saved.restore(learner) if saved is not None else None
    try:
        envs.actor.weights.stage(learner.policy)
        envs.open_training(
            learner.batch_size,
            trainer.max_lag,
            quota=trainer._sampling == "quota",
            groups=trainer._groups is not None,
            saved=saved.experience if saved is not None else None,
        )
    except BaseException:
        if undo is not None:
            undo()
        raise


def _succeed(trainer: Trainer, finished: list[Trainer], runtime: Runtime) -> None:
    for other in finished:
        other._heir = trainer.name
        runtime.before_failing.pop(other.name, None)


def _journal(trainer: Trainer, runtime: Runtime) -> Journal | None:
    if runtime.events is None:
        return None
    learner = trainer._learner
    return Journal(runtime.events, learner, seed=runtime.seed, name=trainer.name, max_lag=trainer.max_lag)


def _refuse_to_save(trainer: Trainer) -> None:
    if trainer._current.runs:
        raise ConfigError(f"{trainer.name} is in an update: save in the body of `async for report in trainer`")
    if trainer._failed:
        raise ConfigError(f"the last update of {trainer.name} failed: do one before you save")
    if trainer._heir:
        raise ConfigError(f"{trainer._heir} goes on with what {trainer.name} has done: save that one")


def _refuse_to_record(trainer: Trainer, runtime: Runtime) -> None:
    if runtime.events is None:
        return
    if trainer._groups is not None or len(trainer._tasks) > 1:
        raise ConfigError("a recorded run has one task and no groups: leave out Runtime(record=...)")
    if trainer._resume is not None:
        raise ConfigError("a run is recorded from its beginning: leave out Runtime(record=...), or resume=...")
    if "trainers" in runtime.events.facts:
        raise ConfigError(f"{runtime.events.path} records a trainer already: give every trainer a runtime of its own")


def _check(actor: Actor, learner: object, sampling: object, resume: object) -> None:
    if actor.deterministic:
        raise ConfigError(
            f"{actor.name} takes the mode of its policy (deterministic=True), from which nothing is learnt: "
            "train with an EnvGroup whose Generator samples, and evaluate with another"
        )
    check_learner(learner)
    word("sampling", sampling, Sampling)
    if resume is not None and not isinstance(resume, Checkpoint):
        raise ConfigError(
            f"resume must be a checkpoint, as Checkpointer(folder).latest() returns, or None: "
            f"this is a {type(resume).__name__}"
        )


def _check_metrics(kind: str, metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{kind}.update() must return metrics by name, {{}} if it has none: got {metrics!r}")
    for name, value in metrics.items():
        if not isinstance(value, Real):
            what = f"metric {name!r} is a {type(value).__name__}"
            raise ConfigError(f"{kind}.update() must return numbers, but {what}: give float(value)")


def _make_assembler(trainer: Trainer, runtime: Runtime) -> Assembler | GroupAssembler:
    batch_size, max_lag = trainer._learner.batch_size, trainer.max_lag
    if runtime.deterministic and max_lag and runtime.machine.real:
        raise ConfigError(
            f"a deterministic run needs Trainer(max_lag=0), got {max_lag}: with lag, data depend on who was ready first"
        )
    if trainer._groups is not None:
        return GroupAssembler(batch_size, max_lag, trainer._envs.group_size)
    return Assembler(batch_size, max_lag, canonical=runtime.deterministic and max_lag == 0)


def _report(
    trainer: Trainer,
    lags: NDArray[np.int64],
    metrics: Mapping[str, float],
    rollout_s: float,
    update_s: float,
    now_s: float,
) -> UpdateReport:
    """Report an update when somebody takes it: what has ended by then belongs to it, or to a checkpoint made before."""
    return UpdateReport(
        update=trainer._num_updates,
        num_decisions=len(lags),
        env_steps=trainer._envs.env_steps,
        elapsed_s=now_s - trainer._began_s,
        rollout_s=rollout_s,
        update_s=update_s,
        lag_mean=float(lags.mean()),
        lag_max=int(lags.max()),
        lag_counts=tuple(np.bincount(lags).tolist()),
        metrics=metrics,
        episodes=tuple(trainer._envs.take_episodes()),
        dropped=dict(trainer._envs.admission.ledger().dropped),
        tasks=trainer._tasks,
        faults=trainer._envs.faults,
    )


def _book(admission: Admission, dropped: list[Dropped]) -> None:
    for drop in dropped:
        admission.drop(drop.env, drop.reason, "buffered", drop.num)
