"""`replay`: repeats a recorded run offline, without its timing, and compares what comes out with the log.

It drives the real pieces: simulators and programs in an `EnvGroup`, a `Generator` that infers in padded batches as
while recording, and the learner. Only the order is the log's: every environment makes exactly the decisions that it
made with each version of the weights, and every update gets exactly the pieces that it got. So whatever differs differs
because of a simulator, the policy, the learner, or the software and hardware under them, and never because of timing.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebrl.core.errors import ConfigError, Deadlock, as_path
from ebrl.core.events import Checks, RecordedRun, Runs, Update, checksums
from ebrl.core.protocols import GroupLearner, Learner, Request
from ebrl.core.records import EnvSpec, Observation, Segment, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.core.weights import WeightStore
from ebrl.gen.generator import Generator
from ebrl.sim.group import EnvGroup, EnvProgram
from ebrl.sim.requests import ActRequest
from ebrl.train.journal import parameter_digest, software
from ebrl.train.options import check_learner

CAUSES = (
    "its reset showed another observation: the simulator is not deterministic, or not the one of the run",
    "the policy gave another action or log-probability, though it saw the same",
    "the simulator made something else of the same action: it is not deterministic, or not the one of the run",
)
"""Of a difference in each of the checks, where those before it are equal."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first thing that was not as in the log.

    Attributes:
        update: In whose line of the log it is, from 1.
        what: In words.
        env: Whose decision it is; None: it is the update itself that differs.
        episode: Of that environment.
        decision: Its index there.
    """

    update: int
    what: str
    env: int | None = None
    episode: int | None = None
    decision: int | None = None

    def __str__(self) -> str:
        where = "" if self.env is None else f", env {self.env} episode {self.episode} decision {self.decision}"
        return f"update {self.update}{where}: {self.what}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of a replay.

    Attributes:
        updates: That gave the recorded weights.
        decisions: That were made and were as recorded, also those that were never trained.
        mismatch: The first difference, where the replay ended; None: there is none.
        end: Why the log ends before its run did; empty if it does not.
        software: What is of another version here than where it was recorded.
        parameters: SHA-256 of the weights after the last update.
    """

    updates: int
    decisions: int
    mismatch: Mismatch | None
    end: str
    software: tuple[str, ...]
    parameters: str

    def describe(self) -> str:
        """Return one line, and one for each thing that may explain it."""
        text = f"{self.updates} updates and {self.decisions} decisions are as recorded"
        if self.mismatch is not None:
            text = f"DIFFERENT at {self.mismatch}; before that, {text}"
        return "\n".join([text, *([self.end] if self.end else []), *self.software])


def replay(
    log: Path | str,
    spec: EnvSpec,
    learner: Learner,
    *,
    program: EnvProgram | None = None,
    observe: Callable[[Observation], Observation] | None = None,
) -> ReplayReport:
    """Repeat a run that ``Runtime(record=log)`` recorded, and compare every decision and all weights with the log.

    Runs to its end, in virtual time, and must not be called inside an event loop. Programs must be deterministic: the
    stock ones are, as are those that use nothing but their environment, its `rng` and their own actor.

    Args:
        log: The file. If it is torn at its end, the complete updates are repeated; one that was cut between two lines
            is that of a shorter run.
        spec: Of the environments, as in the run.
        learner: Made as for the run, before its first update. It is trained.
        program: Of the `EnvGroup` of the run, where it had one; how many environments there were is in the log.
        observe: The same.

    Raises:
        ConfigError: The file is no such log, or it is that of another environment or learner; an argument of another
                type; or an event loop runs.
    """
    if asyncio._get_running_loop() is not None:
        raise ConfigError("an event loop runs here: await asyncio.to_thread(ebrl.replay, log, spec, learner)")
    if not isinstance(spec, EnvSpec):
        raise ConfigError(f"replay takes the one spec of the recorded run, got a {type(spec).__name__}")
    check_learner(learner)
    group = {"program": program, "observe": observe}
    given = {name: value for name, value in group.items() if value is not None}
    return _Replay(RecordedRun(as_path("log", log)), spec, learner, given).run()


class _Gate:
    """Lets a request through as soon as the weights that answered it in the run are in front; an `Actor`."""

    def __init__(self, gen: Generator, runs: Runs) -> None:
        self.name = gen.name
        self.withdraw = gen.withdraw
        self._gen = gen
        self._runs = runs
        self._held: dict[int, list[Request]] = defaultdict(list)

    @property
    def weights(self) -> WeightStore[Any]:
        return self._gen.weights

    @property
    def deterministic(self) -> bool:
        return self._gen.deterministic

    def request(self, request: Request) -> None:
        assert isinstance(request, ActRequest)
        runs = self._runs[request.context.index]
        if not runs:
            return  # the log does not know of this decision: it was not finished
        version, left = runs[0]
        runs[0][1] -= 1
        if left == 1:
            runs.popleft()
        if version == self.weights.version:
            self._gen.request(request)
        else:
            self._held[version].append(request)

    def request_all(self, requests: Sequence[Request]) -> None:
        raise AssertionError("a recorded run has no batched simulators")

    async def publish(self, policy: Any) -> None:
        version = await self._gen.publish(policy)
        for request in self._held.pop(version, []):
            self._gen.request(request)


class _Replay:
    """One replay."""

    def __init__(self, recorded: RecordedRun, spec: EnvSpec, learner: Learner, group: dict[str, Any]) -> None:
        header = recorded.header
        ((name, facts),) = header["groups"].items()
        ((_, self._trainer),) = header["trainers"].items()
        self._recorded = recorded
        self._learner = learner
        form = {"count": facts["count"], "group_size": facts["group_size"]}
        self._options = {"spec": spec, **form, "host": "thread", "name": name, **group}
        self._generator = header.get("generators", {}).get(facts["actor"])
        self._made: dict[tuple[int, int], tuple[Segment, Checks]] = {}  # every decision alone, with what follows it
        self._untrained: dict[tuple[int, int], int] = {}  # of those that the log has handed over: their versions
        self._num_decisions = 0
        self._num_updates = 0
        self._refuse_other(spec, facts)

    def run(self) -> ReplayReport:
        mismatch = None
        with _threads(self._generator["threads"]):
            try:
                mismatch = run_virtual(self._main())
            except Deadlock:
                what = "the program asked for fewer decisions than in the run: it is not deterministic"
                mismatch = Mismatch(self._num_updates + 1, what)
        theirs, ours = self._recorded.header, software()
        return ReplayReport(
            updates=self._num_updates,
            decisions=self._num_decisions,
            mismatch=mismatch,
            end=self._recorded.end,
            software=tuple(f"{n}: recorded {theirs.get(n)}, here {v}" for n, v in ours.items() if theirs.get(n) != v),
            parameters=parameter_digest(self._learner.policy),
        )

    def _refuse_other(self, spec: EnvSpec, facts: dict[str, Any]) -> None:
        path, trainer, learner = self._recorded.path, self._trainer, self._learner
        if self._generator is None:
            raise ConfigError(f"{path}: {facts['actor']}, who acted there, was no Generator: no replay can")
        for what, theirs, ours in (
            ("environments", facts["specs"], [spec.id]),
            ("batches of", trainer["batch_size"], learner.batch_size),
        ):
            if theirs != ours:
                raise ConfigError(f"{path} was recorded with {what} {theirs}, not with {ours}: give the same")
        if isinstance(learner, GroupLearner):
            raise ConfigError(f"{path}: a recorded run has no groups, which {type(learner).__name__} learns from")
        if parameter_digest(learner.policy) != trainer["parameters"]:
            raise ConfigError(
                f"{path}: the policy does not begin with the weights of the run: make policy and learner anew, with "
                "the same options and seeds"
            )

    async def _main(self) -> Mismatch | None:
        runs, num_until = self._recorded.who_acted()
        async with Runtime(VirtualMachine({}), seed=self._recorded.header["seed"], deterministic=True) as rt:
            gen = rt.start(Generator(self._learner.policy, deterministic=self._generator["deterministic"]))
            gate = _Gate(gen, runs)
            envs = rt.start(EnvGroup(actor=gate, **self._options))
            envs.open_training(self._learner.batch_size, sys.maxsize)
            for update in self._recorded.updates():
                envs.admission.open(num_until[update.version], sys.maxsize)  # ready when all of them are finished
                await envs.admission.ready()
                self._keep(envs.take_segments(stale=update.version))
                mismatch = self._compare(update) or self._update(update)
                if mismatch is not None:
                    return mismatch
                self._forget(update.version + 1 - self._trainer["max_lag"])
                await gate.publish(self._learner.policy)
                envs.take_episodes()
                rt.boundary()
        return None

    def _keep(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            following = [*(decision.obs for decision in segment.decisions[1:]), segment.last_obs]
            for decision, obs, checks in zip(segment.decisions, following, checksums(segment), strict=True):
                alone = replace(segment, decisions=[decision], last_obs=obs)
                self._made[decision.env, decision.index] = alone, checks

    def _compare(self, update: Update) -> Mismatch | None:
        for env, episode, index, version, theirs in (row for taken in update.taken for row in taken.rows()):
            alone, ours = self._made.get((env, index), (None, theirs))
            if alone is None or alone.decisions[0].episode != episode:
                what = "the program did something else in this place: it is not deterministic"
                return Mismatch(update.update, what, env, episode, index)
            for mine, wanted, cause in zip(ours, theirs, CAUSES, strict=True):
                if mine != wanted:
                    return Mismatch(update.update, cause, env, episode, index)
            self._untrained[env, index] = version
            self._num_decisions += 1
        return None

    def _update(self, update: Update) -> Mismatch | None:
        weights = None if update.weights is None else np.array(update.weights)
        batch = TrainBatch([self._piece(*piece) for piece in update.batch], update.version, weights)
        with _threads(self._trainer["threads"]):
            self._learner.update(batch)
        if parameter_digest(self._learner.policy) != update.parameters:
            return Mismatch(update.update, "the learner made other weights of the same batch")
        self._num_updates += 1
        return None

    def _piece(self, env: int, first: int, num: int, reason: Any, advantage: float | None) -> Segment:
        keys = [(env, index) for index in range(first, first + num)]
        alone = [self._made.pop(key)[0] for key in keys]
        for key in keys:
            del self._untrained[key]
        decisions = [segment.decisions[0] for segment in alone]
        return replace(alone[-1], decisions=decisions, reason=reason, advantage=advantage)

    def _forget(self, oldest: int) -> None:
        """Drop what is too old to be trained any more, as the trainer did."""
        for key in [key for key, version in self._untrained.items() if version < oldest]:
            del self._made[key], self._untrained[key]


@contextmanager
def _threads(num: int) -> Iterator[None]:
    """Use so many threads of torch: their number changes the bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
