"""What flows between the stages: plain records of numpy arrays, with shapes and units.

Shape letters: ``H`` actions in a chunk, ``A`` numbers in one action, ``B`` rows of a batch, ``n`` executed steps.

Records of the hot path have slots and are not frozen, since frozen construction costs half a microsecond each;
nobody writes to them after the stage that made them has handed them on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ebrl.core.errors import ConfigError, is_a

Array: TypeAlias = NDArray[Any]
Observation: TypeAlias = "Array | dict[str, Array]"
Place: TypeAlias = Literal["thread", "process", "inline"]
"""Where a simulator runs."""

Host: TypeAlias = Literal["thread", "process", "inline", "auto"]
"""Where it is to run: ``"auto"`` is a thread or a process, whichever is found to be better (`ebrl.sim.auto`)."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Form of one array.

    Attributes:
        shape: Without batch dimension; ``()`` for a discrete action.
        dtype: numpy name, such as ``"float32"``.
        low: Lower bounds, broadcastable to `shape`; None where unbounded or unknown.
        high: Upper bounds likewise.
        num_values: Set for a discrete space: legal values are ``0 .. num_values - 1``.
    """

    shape: tuple[int, ...]
    dtype: str
    low: Array | None = field(default=None, compare=False)
    high: Array | None = field(default=None, compare=False)
    num_values: int | None = None

    @property
    def size(self) -> int:
        """Numbers in one array."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """How to make a simulator, and what it looks like from outside. Made by `ebrl.env_spec`.

    Attributes:
        id: Name for messages and run folders.
        make: Builds one simulator, a ``gymnasium.Env``; called on the lane, or in the process, that will own it.
            Must be picklable for the process host.
        observation: One array, or a flat dictionary of named arrays.
        action: One action (not a chunk).
        horizon: Simulator steps after which an episode is truncated; None leaves it to the simulator.
        action_repeat: Simulator steps for which each action is applied.
        task: What the policy is asked to do (language instruction, or task name).
        host: Where it runs unless the user says otherwise.
        info_keys: Numeric entries of ``info`` that a process host passes on.
        memory_mib: That one simulator takes, taken from the ``memory`` pool before it is built; 0: not known.
        num_slots: M: `make` builds a batched simulator, a ``gymnasium.vector.VectorEnv`` of so many; 0: a single one.
        slot_seeds: Of a batched simulator, whether a reset gives every slot a seed of its own.
        crashes: It is known to take its process with it now and then: ``host="auto"`` is a process then.
    """

    id: str
    make: Callable[[], Any]
    observation: ArraySpec | Mapping[str, ArraySpec]
    action: ArraySpec
    horizon: int | None = None
    action_repeat: int = 1
    task: str = ""
    host: Host = "thread"
    info_keys: tuple[str, ...] = ()
    memory_mib: int = 0
    num_slots: int = 0
    slot_seeds: bool = True
    crashes: bool = False


@dataclass(slots=True)
class StepResult:
    """What the simulator returned for one chunk.

    Attributes:
        obs: Observation after the last executed step; the true final one when the episode ended.
        rewards: ``[n]`` one reward per executed step.
        terminated: The task ended the episode: nothing follows.
        truncated: The horizon ended the episode: bootstrap from `obs`.
        info: ``info`` of the last executed step; ``success`` and ``is_success`` are true if they were so in any.
    """

    obs: Observation
    rewards: tuple[float, ...]
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def reward(self) -> float:
        """Undiscounted sum of `rewards`."""
        return sum(self.rewards)

    @property
    def num_steps(self) -> int:
        """Simulator steps that ran."""
        return len(self.rewards)


@dataclass(slots=True)
class BatchOut:
    """What one batch of generation returned, as numpy; rows of it are views.

    Attributes:
        action: ``[B, H, *action.shape]`` in the simulator's units.
        log_prob: ``[B, H, A]`` float32, un-summed, of what was sampled (before clipping).
        value: ``[B]`` float32.
        aux: Leading dimension B: all that `Policy.evaluate` needs to score the same sample again.
        memory: ``[B, M]`` float32 of a policy with memory: what it remembers after these decisions. What it remembered
            before them is ``aux["memory"]``, so that a segment may be cut anywhere.
    """

    action: Array
    log_prob: Array
    value: Array
    aux: dict[str, Array]
    memory: Array | None = None


@dataclass(slots=True)
class ActionOut:
    """One row of a batch: the answer to one `act`.

    Attributes:
        action: ``[H, *action.shape]`` in the simulator's units.
        version: Of the weights that chose it.
    """

    action: Array
    version: int
    batch: BatchOut = field(repr=False)
    row: int = field(repr=False)

    @property
    def log_prob(self) -> Array:
        """``[H, A]`` float32, un-summed."""
        log_prob: Array = self.batch.log_prob[self.row]
        return log_prob

    @property
    def value(self) -> float:
        """The critic's estimate when acting."""
        return float(self.batch.value[self.row])

    @property
    def memory(self) -> Array | None:
        """``[M]`` what a policy with memory remembers from here on; None without."""
        return None if self.batch.memory is None else self.batch.memory[self.row]

    @property
    def aux(self) -> dict[str, Array]:
        """What `Policy.evaluate` needs, for this row."""
        return {name: rows[self.row] for name, rows in self.batch.aux.items()}


@dataclass(slots=True)
class Decision:
    """One `act` and every simulator step until the next `act` or the end of the episode.

    Attributes:
        env: Index in its group.
        episode: Of that environment, from 0.
        index: Decisions that its environment had started before this one, over all episodes; keys its noise.
        obs: What the policy saw.
        out: What it answered.
        rewards: ``[n]`` one per executed step; what the program adds goes into the last of them.
        num_steps: Executed simulator steps.
        intervened: The program replaced the action: kept in data, never trained on.
        action_repeat: Simulator steps for which each action was applied.
        executed: Which actions of the chunk were, in ascending order; None: the first `num_actions`.
    """

    env: int
    episode: int
    index: int
    obs: Observation
    out: ActionOut
    rewards: tuple[float, ...]
    num_steps: int = 0
    terminated: bool = False
    truncated: bool = False
    intervened: bool = False
    action_repeat: int = 1
    executed: tuple[int, ...] | None = None

    @property
    def version(self) -> int:
        """Of the weights that acted."""
        return self.out.version

    @property
    def num_actions(self) -> int:
        """Actions that were executed, counting one that the end of the episode interrupted."""
        return -(-self.num_steps // self.action_repeat)


Reason: TypeAlias = Literal["end", "full", "taken", "split", "lost"]


@dataclass(slots=True)
class Segment:
    """Consecutive decisions of one environment within one episode.

    Only the last decision can be terminated or truncated.

    The observation that follows ``decisions[t]`` is ``decisions[t + 1].obs``, and `last_obs` for the last:
    the true final observation where the episode was truncated there, never a reset one.

    Attributes:
        reason: Why it was cut here.
        advantage: Of its episode relative to its group, for algorithms that learn from that; None without groups.
        success: Of its episode, where groups are collected; None elsewhere, or if ``info`` never said.
    """

    env: int
    task: str
    decisions: list[Decision]
    last_obs: Observation
    reason: Reason
    advantage: float | None = None
    success: bool | None = None


def same(a: Observation, b: Observation) -> bool:
    """Whether two observations are equal in every number."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    return not isinstance(a, dict) and not isinstance(b, dict) and np.array_equal(a, b)


def num_decisions(segments: Iterable[Segment]) -> int:
    """Return how many decisions segments have together."""
    return sum(len(segment.decisions) for segment in segments)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRule:
    """Which groups of episodes that began alike are trained.

    Attributes:
        success_bounds: Lowest and highest success rate of a group, inclusive; others are dropped as ``filtered``, since
            where all members do equally well there is nothing to compare. None: all groups are trained.
        success_return: Sum of the rewards of its decisions from which an episode counts as a success; None: what
            ``info`` says.
    """

    success_bounds: tuple[float, float] | None = None
    success_return: float | None = None

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: Bounds that are no part of 0 .. 1; or a return from which an episode is a success that is no
                finite number, or that nothing asks for.
        """
        bounds: Any = (0.0, 1.0) if self.success_bounds is None else self.success_bounds
        pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(is_a(Real, bound) for bound in bounds)
        if not pair or not 0 <= bounds[0] <= bounds[1] <= 1:
            raise ConfigError(f"success_bounds must be two numbers in 0 .. 1, the lower one first, got {bounds!r}")
        if self.success_return is not None:
            if not is_a(Real, self.success_return) or not math.isfinite(self.success_return):
                raise ConfigError(f"success_return must be a finite number or None, got {self.success_return!r}")
            if self.success_bounds is None:
                raise ConfigError("success_return says which episodes success_bounds counts: give those too")


@dataclass(slots=True)
class TrainBatch:
    """Exactly B decisions, in segments; or whole groups that have at least B.

    Attributes:
        version: Of the learner when the batch was taken; ``lag = version - decision.version``.
        weights: ``[B]`` that decisions count with, mean 1, in the order of `decisions`: whoever puts segments into
            another order takes the weights along. None: all the same.
    """

    segments: list[Segment]
    version: int
    weights: NDArray[np.float64] | None = None

    @property
    def decisions(self) -> list[Decision]:
        """All of them, segment by segment."""
        return [decision for segment in self.segments for decision in segment.decisions]

    @property
    def lags(self) -> NDArray[np.int64]:
        """``[B]`` versions behind, per decision."""
        return np.array([self.version - d.version for d in self.decisions], np.int64)


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode.

    Attributes:
        env: Index of the environment that ran it.
        episode: Its number there; in an evaluation, the position of its seed in the list.
        seed: What the simulator was reset with.
        total_reward: Undiscounted sum of the simulator's rewards.
        num_steps: Simulator steps.
        num_decisions: Decisions.
        success: Whether ``info`` reported success at any step; None if it never said.
        duration_s: Loop time from reset to end.
        version: Of the weights that made its last decision.
        task: What the policy was asked to do.
    """

    env: int
    episode: int
    seed: int
    total_reward: float
    num_steps: int
    num_decisions: int
    success: bool | None
    duration_s: float
    version: int
    task: str = ""


def mean_return(episodes: Iterable[Episode]) -> float:
    """Return the mean over episodes; NaN of none."""
    returns = [episode.total_reward for episode in episodes]
    return math.fsum(returns) / len(returns) if returns else math.nan  # whatever the order in which they came


def success_rate(episodes: Iterable[Episode]) -> float:
    """Return the share of successes among episodes that report success; NaN when none does."""
    known = [episode.success for episode in episodes if episode.success is not None]
    return sum(known) / len(known) if known else math.nan


def by_task(episodes: Iterable[Episode], tasks: Iterable[str] = ()) -> dict[str, list[Episode]]:
    """Return episodes by task, tasks in the order in which they are first named.

    Args:
        episodes: Of any tasks.
        tasks: That are there whether or not one of their episodes is.
    """
    parts: dict[str, list[Episode]] = {task: [] for task in tasks}
    for episode in episodes:
        parts.setdefault(episode.task, []).append(episode)
    return parts


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update of the learner, and what the runtime did meanwhile.

    Attributes:
        update: Number of this update, from 1; the version that it published, if nobody else has published.
        num_decisions: Trained in this update.
        env_steps: Simulator steps recorded since the run began.
        elapsed_s: Loop time since the trainer started.
        rollout_s: Of this update: waiting for the batch.
        update_s: Of this update: in the learner, and until the new weights are in front.
        lag_mean: Versions, over the batch.
        lag_max: Versions, over the batch.
        lag_counts: Decisions of the batch by lag: of entry i, those that were i versions behind.
        metrics: What the learner measured (losses, ratios, gradients).
        episodes: Finished since the last report.
        dropped: Decisions dropped since the run began, by reason (`ebrl.core.admission.Drop`).
        tasks: That the environments have.
        faults: What was done about simulators that failed, since this process began: ``restarts``, ``dropped_envs`` and
            ``leaked_threads``.
    """

    update: int
    num_decisions: int
    env_steps: int
    elapsed_s: float
    rollout_s: float
    update_s: float
    lag_mean: float
    lag_max: int
    lag_counts: tuple[int, ...]
    metrics: Mapping[str, float]
    episodes: tuple[Episode, ...]
    dropped: Mapping[str, int]
    tasks: tuple[str, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Return one line."""
        num, rate = len(self.episodes), self.success_rate
        score = f"return {self.mean_return:.2f} of {num} episodes" if num else "no episode has ended"
        success = "" if math.isnan(rate) else f", success {rate:.0%}"
        return (
            f"update {self.update}: {score}{success}, lag {self.lag_mean:.2f} (max {self.lag_max}), "
            f"{self.env_steps:,} env steps in {self.elapsed_s:.1f} s; waited {self.rollout_s:.2f} s, "
            f"updated {self.update_s:.2f} s"
        )

    @property
    def mean_return(self) -> float:
        """Over `episodes`; NaN when none ended."""
        return mean_return(self.episodes)

    @property
    def success_rate(self) -> float:
        """Over those of `episodes` that report success; NaN when none does."""
        return success_rate(self.episodes)

    @property
    def task_returns(self) -> dict[str, float]:
        """`mean_return` of every task."""
        return {task: mean_return(part) for task, part in by_task(self.episodes, self.tasks).items()}

    @property
    def task_success_rates(self) -> dict[str, float]:
        """`success_rate` of every task."""
        return {task: success_rate(part) for task, part in by_task(self.episodes, self.tasks).items()}
