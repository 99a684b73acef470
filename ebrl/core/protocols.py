"""The seams: what a stage may ask of another, who calls it, when, and on which thread.

Stages never import each other. They meet in these protocols and in `ebrl.core.records`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ebrl.core.records import ActionOut, Array, Episode, GroupRule, Observation, Segment, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

    from ebrl.core.admission import Admission
    from ebrl.core.lanes import Call
    from ebrl.core.leases import Lender
    from ebrl.core.rng import NoiseStream
    from ebrl.core.runtime import Runtime
    from ebrl.core.saved import SavedExperience
    from ebrl.core.weights import WeightStore

T = TypeVar("T")

MEMORY = "memory"
"""Where a policy with memory finds what it remembers: in the batch of `Policy.act`, and in `aux` when scoring."""


class Lane(Protocol):
    """Where work runs in order, one call at a time. Made by `Machine.lane`; all methods are called on the loop."""

    @property
    def name(self) -> str:
        """For traces, logs and thread names."""

    def run(self, fn: Callable[..., T], *args: Any, n: int = 1) -> asyncio.Future[T]:
        """Queue ``fn(*args)``; the only way work leaves the loop.

        A queued call whose future is cancelled before it starts does not run. A running call cannot be stopped.

        Args:
            fn: Blocking function, called on the lane.
            args: Its arguments.
            n: Units of work in it (rows of a batch, decisions of an update); latency models need it. 0: bookkeeping.
        """

    def submit(self, future: asyncio.Future[Any], fn: Callable[..., Any], *args: Any, n: int = 1) -> None:
        """As `run`, but completes a future that the caller made."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in calls so far."""

    @property
    def current(self) -> Call | None:
        """The call that runs now: the same object for as long as it does."""

    @property
    def ident(self) -> int | None:
        """Of the thread that it is; None if it is none."""


class Machine(Protocol):
    """What there is to run on: this computer, a GPU behind it, or a model of one."""

    @property
    def num_cores(self) -> int:
        """CPU cores that simulators may use at once."""

    @property
    def real(self) -> bool:
        """False for a model: no threads or processes exist, and time is virtual."""

    @property
    def memory_mib(self) -> int:
        """Memory for simulators."""

    @property
    def sm_units(self) -> int:
        """Units of the GPU that can be given to one kind of lane or another; 0: it has none, or cannot divide it."""

    def divide(self, units: Mapping[str, int] | None) -> None:
        """Give each kind of lane its units from now on, those of a kind that does not run to the others.

        Args:
            units: Per kind, adding up to `sm_units`; None: kinds take turns.
        """

    @property
    def on_cores(self) -> frozenset[str]:
        """Kinds of lanes whose work takes CPU cores."""

    def lane(self, kind: str, name: str, pool: Lender | None = None, units: int = 1) -> Lane:
        """Make a lane; called when a service opens.

        Args:
            kind: ``"sim"``, ``"gen"``, ``"train"`` or ``"io"``; a model has one latency law per kind.
            name: Unique name.
            pool: Must lend units for as long as the lane works: what `Runtime.claim` returns; None asks nobody.
            units: How many; the threads that its calls use.
        """

    def give_up(self, lane: Lane, last: Callable[[], None]) -> str:
        """Forget a lane whose running call does not end, with all that waits behind it, and give its units back.

        Futures are left as they are: whoever made them says what became of them.

        Args:
            lane: Which.
            last: Called on it should the call end after all, for what belongs to its thread; nothing else is.

        Returns:
            Where the call runs: its stack.
        """

    def foresee(self, seconds: float, call: Callable[[], None]) -> bool:
        """Have `call` called whenever a call begins that will take longer than `seconds`.

        Returns:
            False: nobody knows that beforehand here.
        """

    async def aclose(self, lanes: Sequence[Lane] | None = None, *, deadline_s: float) -> list[str]:
        """End lanes (all of them by default) behind their running calls.

        Returns:
            Names of lanes that were still running after `deadline_s` and were given up.
        """


class Service(Protocol):
    """Something with a life of its own inside a `Runtime`.

    Attributes:
        name: For traces and task names; `Runtime.start` appends a number if another service has it.
    """

    name: str

    def open(self, runtime: Runtime) -> None:
        """Take lanes and pools. Called once by `Runtime.start`, on the loop; must not block."""

    async def serve(self) -> None:
        """Run until cancelled. Called once, as a task of the runtime; an exception here ends the run."""

    def statistics(self) -> Mapping[str, float]:
        """Numbers about now. Called on the loop, at any time after `open`."""

    async def aclose(self, deadline_s: float) -> None:
        """Give everything back. Called once, after `serve` was cancelled."""


class Request(Protocol):
    """One question to an actor. Made by the asking stage; the methods are called on the loop, by the actor.

    Attributes:
        obs: What is to be acted on.
        index: Of the decision: which row of `noise` is its own.
        noise: The stream of the environment that asks.
        memory: ``[M]`` what a policy with memory remembers of the episode; None at its start. Read by the actor.
        answered_s: Loop time at which the environment got its last answer, 0 where it has waited for something else
            since (credit, its first episode). The actor writes it before it delivers.
    """

    obs: Observation
    index: int
    noise: NoiseStream
    memory: Array | None
    answered_s: float

    def cancelled(self) -> bool:
        """Nobody waits for the answer any more; the actor was told by `Actor.withdraw`."""

    def deliver(self, out: ActionOut) -> None:
        """The answer."""

    def fail(self, error: BaseException) -> None:
        """There will be no answer."""

    def where(self) -> str:
        """Who asks, for messages."""


class Actor(Protocol):
    """Answers requests in batches; `ebrl.Generator` is one.

    Attributes:
        name: Of the service.
    """

    name: str

    @property
    def weights(self) -> WeightStore[Any]:
        """What it acts with; the trainer publishes into it."""

    @property
    def deterministic(self) -> bool:
        """Whether it takes the mode of the policy: a trainer refuses it then, since it tries no other actions."""

    @property
    def request(self) -> Callable[[Request], None]:
        """Takes a request; called on the loop, returns at once."""

    def request_all(self, requests: Sequence[Request]) -> None:
        """Take the requests of a batched simulator, one per slot; they are answered by one batch, and cancelled as one.

        A generator launches no more of them at once than its threshold says, so that one simulator steps while the
        actions of the next are chosen.
        """

    def withdraw(self) -> None:
        """Some request has been cancelled: look for it before the next launch."""


class Experience(Protocol):
    """What a trainer consumes; `ebrl.EnvGroup` is one. All methods are called on the loop."""

    @property
    def admission(self) -> Admission:
        """Its ledger."""

    @property
    def actor(self) -> Actor:
        """Who decides in it."""

    @property
    def env_steps(self) -> int:
        """Simulator steps since it started."""

    @property
    def tasks(self) -> Sequence[str]:
        """Of each environment."""

    @property
    def group_size(self) -> int:
        """G: environments that run the same episodes; 1: all run their own."""

    @property
    def faults(self) -> Mapping[str, int]:
        """What was done about simulators that failed, since it started, by name."""

    def open_training(
        self,
        batch_size: int,
        max_lag: int,
        *,
        quota: bool = False,
        groups: bool = False,
        saved: SavedExperience | None = None,
    ) -> None:
        """Begin to produce segments; called once, when the consumer opens.

        Args:
            batch_size: B.
            max_lag: See `ebrl.core.admission.Admission.open`.
            quota: Every environment may start the same number of decisions per version.
            groups: Hand over the segments of an episode when all of its group have ended it, and no others.
            saved: Go on from there.
        """

    def save(self) -> SavedExperience:
        """Return what is needed to go on from here: references, taken at one moment, while everything goes on."""

    def take_segments(self, stale: int | None = None) -> list[Segment]:
        """Hand over all segments that are ready.

        Args:
            stale: First cut every open segment with a decision of this version or an older one; then, while a batch
                is not complete, those with the oldest versions. None: cut nothing.
        """

    def take_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call."""


@dataclass(slots=True)
class PolicyOut:
    """What `Policy.act` returns, as tensors; shapes as in `ebrl.core.records.BatchOut`."""

    action: Tensor
    log_prob: Tensor
    value: Tensor
    aux: dict[str, Tensor]
    memory: Tensor | None = None


class Policy(Protocol):
    """A ``torch.nn.Module`` that acts and can score again what it did. `ebrl.TorchPolicy` fills in the defaults."""

    @property
    def horizon(self) -> int:
        """H: actions in one chunk."""

    @property
    def noise_dim(self) -> int:
        """Standard normal numbers that one decision consumes."""

    @property
    def memory_size(self) -> int:
        """M: numbers that it remembers from one decision of an episode to the next; 0: none."""

    def collate(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        """Stack B observations. Called on a generation lane, and on the training lane."""

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        """Choose actions. Called on a generation lane, without gradients, on a copy of the module.

        Rows must not depend on each other, so that a decision does not depend on who shared its batch.

        Args:
            batch: From `collate`. With memory, ``batch["memory"]`` ``[B, M]`` float32 is what each row's environment
                got as `PolicyOut.memory` from the decision before, and zeros at the start of an episode.
            noise: ``[B, noise_dim]`` float32 standard normal, from the streams of the environments; the only
                randomness that may be used.
            deterministic: Ignore `noise` and take the mode.
        """

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Score samples again, with gradients. Called on the training lane.

        Args:
            batch: From `collate`.
            aux: From `act`. With memory, ``aux["memory"]`` ``[B, M]`` is what was remembered before each decision.

        Returns:
            log-probability ``[B, H, A]`` (un-summed), value ``[B]``, entropy ``[B, H, A]``.
        """

    def observe(self, batch: dict[str, Tensor]) -> None:
        """Take trained observations into the running statistics, if there are any.

        Called once per update on the training lane, after the last gradient step: until the next version is
        published, acting and scoring then use the same statistics, and the ratio at lag 0 is exactly 1.
        """


class MemoryPolicy(Policy, Protocol):
    """A policy whose `memory_size` is not 0: it is trained on sequences, and gradients go through what it remembers."""

    def unroll(
        self, batch: dict[str, Tensor], aux: dict[str, Tensor], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score sequences of consecutive decisions again, with gradients. Called on the training lane.

        Args:
            batch: From `collate`: one sequence after the other, each in the order of time.
            aux: As for `evaluate`. Only the memory before the first decision of each sequence may be used; from there
                on it is computed anew.
            lengths: Rows of each sequence.

        Returns:
            As `evaluate`, in the order of the rows.
        """


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold, as torch does it; a learner, or a part of one.

    States are dictionaries, lists and tuples of tensors, arrays, numbers, strings and None.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on, the published weights included. Called on the training lane."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Go on from there. Called before anything else."""


@runtime_checkable
class Learner(Protocol):
    """Turns batches into better weights; knows nothing of asyncio. One that is also `Stateful` can be saved."""

    @property
    def batch_size(self) -> int:
        """B: decisions per update; exactly, or of a `GroupLearner` at least so many, since groups are not split."""

    @property
    def policy(self) -> Any:
        """What is published after each update (a module); written by `update` only."""

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        """One update. Called on the training lane.

        Returns:
            Metrics by name.
        """


@runtime_checkable
class GroupLearner(Learner, Protocol):
    """A learner that compares episodes that began alike: its batches are whole groups, with `Segment.advantage`."""

    @property
    def groups(self) -> GroupRule:
        """Which groups it learns from."""
