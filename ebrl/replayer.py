"""`replay`: repeats a recorded run offline, without its timing, and compares what comes out with the log.

It drives the real pieces: simulators and programs in an `EnvGroup`, a `Generator` that infers in padded batches as
while recording, and the learner. Only the order is the log's: every environment makes exactly the decisions that it
made with each version of the weights, and every update gets exactly the pieces that it got. So whatever differs differs
because of a simulator, the policy, the learner, or the software and hardware under them, and never because of timing.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ebrl.core.errors import ConfigError, Deadlock
from ebrl.core.events import Checks, RecordedRun, Taken, Update, checksums
from ebrl.core.protocols import Learner, Request
from ebrl.core.records import Decision, EnvSpec, Observation, Segment, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.core.weights import WeightStore
from ebrl.gen.generator import Generator
from ebrl.sim.group import EnvGroup
from ebrl.sim.requests import ActRequest
from ebrl.train.journal import parameter_digest, software

Runs = dict[int, deque[list[int]]]
"""Per environment: versions in the order in which they acted, and how many decisions each."""

CAUSES = (
    "its reset showed another observation: the simulator is not deterministic, or not the one of the run",
    "the policy gave another action or log-probability, though it saw the same",
    "the simulator made something else of the same action: it is not deterministic, or not the one of the run",
)


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


def replay(log: Path | str, spec: EnvSpec, learner: Learner, **group: Any) -> ReplayReport:
    """Repeat a run that ``Runtime(record=log)`` recorded, and compare every decision and all weights with the log.

    Runs to its end, in virtual time, and must not be called inside an event loop. Programs must be deterministic: the
    stock ones are, as are those that use nothing but their environment, its `rng` and their own actor.

    Args:
        log: The file. If it is torn at its end, the complete updates are repeated.
        spec: Of the environments, as in the run.
        learner: Made as for the run, before its first update. It is trained.
        group: Arguments of the `EnvGroup` of the run that decide what happens: ``program``, ``observe``.

    Raises:
        ConfigError: The file is no such log, or it is that of another environment or learner.
    """
    return _Replay(RecordedRun(Path(log)), spec, learner, group).run()


class _Gate:
    """Lets a request through as soon as the weights that answered it in the run are in front; an `Actor`."""

    def __init__(self, gen: Generator, runs: Runs) -> None:
        self.name = gen.name
        self._gen = gen
        self._runs = runs
        self._held: dict[int, list[Request]] = defaultdict(list)

    @property
    def weights(self) -> WeightStore[Any]:
        return self._gen.weights

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

    def withdraw(self) -> None:
        self._gen.withdraw()

    async def publish(self, policy: Any) -> None:
        version = await self._gen.publish(policy)
        for request in self._held.pop(version, []):
            self._gen.request(request)


class _Made(NamedTuple):
    """A decision that was made here, and what follows it."""

    decision: Decision
    next_obs: Observation
    task: str
    checks: Checks


class _Replay:
    """One replay."""

    def __init__(self, recorded: RecordedRun, spec: EnvSpec, learner: Learner, group: dict[str, Any]) -> None:
        header = recorded.header
        self._recorded = recorded
        self._learner = learner
        ((self._group, facts),) = header["groups"].items()
        ((_, self._trainer),) = header["trainers"].items()
        self._generator = header["generators"].get(facts["actor"])
        self._refuse_other(spec, facts)
        self._make_group: Callable[[_Gate], EnvGroup] = lambda gate: EnvGroup(
            spec, actor=gate, count=facts["count"], host="thread", name=self._group, **group
        )
        self._made: dict[tuple[int, int], _Made] = {}
        self._untrained: dict[tuple[int, int], int] = {}  # of those that the log has handed over: their versions
        self._num_decisions = 0
        self._num_updates = 0
        self._mismatch: Mismatch | None = None

    def run(self) -> ReplayReport:
        with _threads(self._generator["threads"]):
            try:
                run_virtual(self._main())
            except Deadlock:
                what = "the program asked for fewer decisions than in the run: it is not deterministic"
                self._mismatch = Mismatch(self._num_updates + 1, what)
        theirs, ours = self._recorded.header, software()
        return ReplayReport(
            updates=self._num_updates,
            decisions=self._num_decisions,
            mismatch=self._mismatch,
            end=self._recorded.end,
            software=tuple(f"{n}: recorded {theirs.get(n)}, here {v}" for n, v in ours.items() if theirs.get(n) != v),
            parameters=parameter_digest(self._learner.policy),
        )

    def _refuse_other(self, spec: EnvSpec, facts: dict[str, Any]) -> None:
        path, learner = self._recorded.path, self._learner
        if self._generator is None:
            raise ConfigError(f"{path}: {facts['actor']}, who acted in {self._group}, was no Generator: no replay can")
        if facts["specs"] != [spec.id]:
            raise ConfigError(f"{path} was recorded with {facts['specs']}, not with {spec.id}: give the same spec")
        if learner.batch_size != self._trainer["batch_size"]:
            raise ConfigError(
                f"{path} was recorded with batches of {self._trainer['batch_size']} decisions, and the learner takes "
                f"{learner.batch_size}: give it the same options"
            )
        if parameter_digest(learner.policy) != self._trainer["parameters"]:
            raise ConfigError(
                f"{path}: the policy does not begin with the weights of the run: make policy and learner anew, with "
                "the same options and seeds"
            )

    async def _main(self) -> None:
        runs, num_until = _index(self._recorded.updates())
        async with Runtime(VirtualMachine({}), seed=self._recorded.header["seed"], deterministic=True) as rt:
            gen = rt.start(Generator(self._learner.policy, deterministic=self._generator["deterministic"]))
            gate = _Gate(gen, runs)
            envs = rt.start(self._make_group(gate))
            envs.open_training(self._learner.batch_size, sys.maxsize)
            for update in self._recorded.updates():
                envs.admission.open(num_until[update.version], sys.maxsize)  # ready when all of them are finished
                await envs.admission.ready()
                self._keep(envs.take_segments(stale=update.version))
                self._mismatch = self._compare(update) or self._update(update)
                if self._mismatch is not None:
                    return
                self._forget(update.version + 1 - self._trainer["max_lag"])
                await gate.publish(self._learner.policy)
                envs.take_episodes()
                rt.boundary()

    def _keep(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            decisions = segment.decisions
            following = [*(decision.obs for decision in decisions[1:]), segment.last_obs]
            for decision, next_obs, checks in zip(decisions, following, checksums(segment), strict=True):
                self._made[decision.env, decision.index] = _Made(decision, next_obs, segment.task, checks)

    def _compare(self, update: Update) -> Mismatch | None:
        for taken in update.taken:
            for index, version, checks in _decisions(taken):
                made = self._made.get((taken.env, index))
                if made is None or made.decision.episode != taken.episode:
                    what = "the program did something else in this place: it is not deterministic"
                    return Mismatch(update.update, what, taken.env, taken.episode, index)
                for ours, theirs, cause in zip(made.checks, checks, CAUSES, strict=True):
                    if ours != theirs:
                        return Mismatch(update.update, cause, taken.env, taken.episode, index)
                self._untrained[taken.env, index] = version
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
        made = [self._made.pop(key) for key in keys]
        for key in keys:
            del self._untrained[key]
        return Segment(env, made[0].task, [one.decision for one in made], made[-1].next_obs, reason, advantage)

    def _forget(self, oldest: int) -> None:
        """Drop what is too old to be trained any more, as the trainer did."""
        for key in [key for key, version in self._untrained.items() if version < oldest]:
            del self._made[key], self._untrained[key]


def _index(updates: Iterable[Update]) -> tuple[Runs, list[int]]:
    """Read a log once, and return who acted with which version, and how many decisions were made until each."""
    runs: Runs = defaultdict(deque)
    nums: Counter[int] = Counter()
    last = -1
    for update in updates:
        last = update.version
        for taken in update.taken:
            own = runs[taken.env]
            for version, num in taken.versions:
                nums[version] += num
                if own and own[-1][0] == version:
                    own[-1][1] += num
                else:
                    own.append([version, num])
    return runs, np.cumsum([nums[version] for version in range(last + 1)]).tolist()


def _decisions(taken: Taken) -> Iterator[tuple[int, int, Checks]]:
    """Yield index, version and checks of each."""
    versions: Sequence[int] = [version for version, num in taken.versions for _ in range(num)]
    return zip(range(taken.first, taken.first + len(versions)), versions, taken.checks, strict=True)


@contextmanager
def _threads(num: int) -> Iterator[None]:
    """Use so many threads of torch: their number changes the bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
