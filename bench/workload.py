"""Workloads: profiles of a simulator, a policy and a machine, joined to the one record that the twin runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np

from bench.profiles import Within, rules
from ebrl.core.errors import ConfigError

PositiveSeconds: TypeAlias = Annotated[float, Within("s", 1e-6, 3600)]
Seconds: TypeAlias = Annotated[float, Within("s", 0, 3600)]
Share: TypeAlias = Annotated[float, Within("1", 0, 1)]
Minority: TypeAlias = Annotated[float, Within("1", 0, 0.5)]
Variation: TypeAlias = Annotated[float, Within("1", 0, 10)]
Slowdown: TypeAlias = Annotated[float, Within("1", 1, 1000)]
Ratio: TypeAlias = Annotated[float, Within("1", 0.001, 1000)]
Rate: TypeAlias = Annotated[float, Within("1/s", 0.001, 1e6)]
Count: TypeAlias = Annotated[int, Within("1", 1, 1e6, whole=True)]


@dataclass(frozen=True, kw_only=True)
class SimulatorProfile:
    """How long a simulator takes, and how long its episodes are.

    A **unit** is what one call steps: one environment (``cpu``), or the ``slots_per_unit`` slots of a batched
    simulator (``gpu-batched``).

    Attributes:
        kind: Whether calls run on cores or on the GPU.
        num_envs: Environments, or slots of all units together.
        slots_per_unit: 1 for ``cpu``.
        cores_per_unit: Cores that a running call holds.
        step_s: Mean time of one environment step of a unit without slots, bursts and stalls included.
        slot_s: Time that every slot of the unit adds to it.
        step_cv: Coefficient of variation of the lognormal time of a step, outside bursts and stalls.
        burst_share: Minority of all steps that belong to a burst (two-state Markov chain).
        burst_factor: How many times longer the steps of a burst take.
        burst_steps: Mean number of steps of a burst, which ends after each of them with the same probability.
        stall_probability: Of a step, to be a stall; independent of bursts.
        stall_factor: How many times longer a stall takes.
        reset_s: Mean time of a reset of a unit, of one slot or of all.
        reset_cv: Coefficient of variation of the lognormal time of a reset.
        episode_law: ``uniform``: U[shortest_episode, horizon]. ``success``: after ``shortest_episode`` steps every
            step ends the episode with the same probability, such that ``success_rate`` of them end by the horizon.
        shortest_episode: In environment steps.
        horizon: Longest episode, in environment steps.
        success_rate: Unused by ``uniform``.
        sm_share: Share of the SMs that a call needs for its full speed; 0 for ``cpu``.
        bandwidth: Share of the reference machine's memory bandwidth that a call draws; 0 for ``cpu``.
    """

    kind: Literal["cpu", "gpu-batched"]
    num_envs: Count
    slots_per_unit: Count
    cores_per_unit: Count
    step_s: PositiveSeconds
    slot_s: Seconds
    step_cv: Variation
    burst_share: Minority
    burst_factor: Slowdown
    burst_steps: Annotated[float, Within("1", 1, 1e6)]
    stall_probability: Minority
    stall_factor: Slowdown
    reset_s: Seconds
    reset_cv: Variation
    episode_law: Literal["uniform", "success"]
    shortest_episode: Count
    horizon: Count
    success_rate: Annotated[float, Within("1", 0, 0.99)]
    sm_share: Share
    bandwidth: Share

    @property
    def calm_factor(self) -> float:
        """Mean time of a step outside bursts and stalls, as a share of the mean time of all steps."""
        bursts = 1 + self.burst_share * (self.burst_factor - 1)
        return 1 / (bursts * (1 + self.stall_probability * (self.stall_factor - 1)))

    @property
    def success_hazard(self) -> float:
        """Probability that a step past the shortest episode is the last (law ``success``)."""
        left = self.horizon - self.shortest_episode
        return float(1 - (1 - self.success_rate) ** (1 / left)) if left else 0.0

    @property
    def mean_episode(self) -> float:
        """Mean length of an episode, in environment steps."""
        if self.episode_law == "uniform":
            return (self.shortest_episode + self.horizon) / 2
        hazard = self.success_hazard
        return self.shortest_episode + self.success_rate / hazard if hazard else float(self.horizon)

    def draw_episode(self, rng: np.random.Generator) -> int:
        """Draw the length of an episode, in environment steps."""
        if self.episode_law == "uniform":
            return int(rng.integers(self.shortest_episode, self.horizon + 1))
        hazard = self.success_hazard
        return min(self.horizon, self.shortest_episode + int(rng.geometric(hazard))) if hazard else self.horizon


@dataclass(frozen=True, kw_only=True)
class PolicyProfile:
    """How long generation takes on the reference machine, alone on all its SMs: ``fixed_s + per_sample_s * rows``.

    Attributes:
        chunk: Environment steps of one decision.
        fixed_s: Time of a batch without rows.
        per_sample_s: Time that every row adds.
        linearity: ``k`` of `speedup`.
        bandwidth: Share of the reference machine's memory bandwidth that it draws.
    """

    chunk: Count
    fixed_s: PositiveSeconds
    per_sample_s: Seconds
    linearity: Ratio
    bandwidth: Share


@dataclass(frozen=True, kw_only=True)
class TrainingProfile:
    """How long an update takes on the reference machine, alone on all its SMs.

    Attributes:
        samples_per_s: Decisions per second, forward and backward.
        epochs: Times that an update goes over its batch.
        rollout_epochs: Size of the batch: decisions of that many longest episodes of every environment.
        linearity: ``k`` of `speedup`.
        bandwidth: Share of the reference machine's memory bandwidth that it draws.
    """

    samples_per_s: Rate
    epochs: Count
    rollout_epochs: Count
    linearity: Ratio
    bandwidth: Share


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """One node with one GPU. Factors are relative to the reference machine, an H200.

    Attributes:
        num_cores: For simulators.
        core_speed: Of calls that run on cores.
        sm_units: Groups of SMs that stages may be given.
        generation_speed: Of generation.
        training_speed: Of updates.
        simulation_speed: Of calls of a batched simulator.
        memory_bandwidth: Of the GPU.
    """

    num_cores: Count
    core_speed: Ratio
    sm_units: Count
    generation_speed: Ratio
    training_speed: Ratio
    simulation_speed: Ratio
    memory_bandwidth: Ratio


def speedup(share: float, linearity: float) -> float:
    """Return the speed of a stage that has a share of the SMs, relative to its speed on all of them.

    ``share * (1 + k) / (share + k)``: close to the share for large `k`, saturating early for small `k`.

    Args:
        share: Of the SMs, above 0 and at most 1.
        linearity: `k`.
    """
    assert 0 < share <= 1, share
    return share * (1 + linearity) / (share + linearity)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All that the twin needs to know. Times that its methods return are those on its own machine.

    Attributes:
        name: For reports.
        training: None where nothing is trained.
        sources: Where each number that was read comes from, by dotted path: ``policy.fixed_s``.
    """

    name: str
    simulator: SimulatorProfile
    policy: PolicyProfile
    training: TrainingProfile | None
    machine: MachineProfile
    sources: Mapping[str, str] = field(repr=False, compare=False)

    @property
    def num_units(self) -> int:
        """What the simulators step with a call each."""
        return self.simulator.num_envs // self.simulator.slots_per_unit

    @property
    def batch_size(self) -> int:
        """Decisions of one update; 0 where nothing is trained."""
        decisions = math.ceil(self.simulator.horizon / self.policy.chunk)
        return self.simulator.num_envs * decisions * self.training.rollout_epochs if self.training else 0

    @property
    def simulator_speed(self) -> float:
        """Of simulator calls on this machine."""
        return self.machine.core_speed if self.simulator.kind == "cpu" else self.machine.simulation_speed

    @property
    def call_s(self) -> float:
        """Mean time of one environment step of a unit, bursts and stalls included."""
        simulator = self.simulator
        return (simulator.step_s + simulator.slot_s * simulator.slots_per_unit) / self.simulator_speed

    @property
    def reset_s(self) -> float:
        """Mean time of a reset of a unit."""
        return self.simulator.reset_s / self.simulator_speed

    @property
    def decision_s(self) -> float:
        """``E[S]``: mean simulator time of one decision of a unit, a chunk of steps and its part of a reset.

        Slots of a batched simulator reset together here, which is the least that they can cost.
        """
        return self.policy.chunk * (self.call_s + self.reset_s / self.simulator.mean_episode)

    def generation_s(self, num_rows: int, share: float = 1.0) -> float:
        """Return the time of a batch of so many rows on a share of the SMs."""
        policy = self.policy
        speed = self.machine.generation_speed * speedup(share, policy.linearity)
        return (policy.fixed_s + policy.per_sample_s * num_rows) / speed

    def update_s(self, share: float = 1.0) -> float:
        """Return the time of an update on a share of the SMs; 0 where nothing is trained."""
        training = self.training
        if training is None:
            return 0.0
        speed = self.machine.training_speed * speedup(share, training.linearity)
        return self.batch_size * training.epochs / (training.samples_per_s * speed)

    def bandwidth(self, stage: Literal["simulation", "generation", "training"]) -> float:
        """Return the share of the machine's memory bandwidth that a stage draws at its full speed."""
        machine = self.machine
        drawn = {
            "simulation": self.simulator.bandwidth * machine.simulation_speed,
            "generation": self.policy.bandwidth * machine.generation_speed,
            "training": self.training.bandwidth * machine.training_speed if self.training else 0.0,
        }
        return min(1.0, drawn[stage] / machine.memory_bandwidth)

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers that were read, by dotted path."""
        fields = (path.split(".") for path in self.sources)
        return {f"{section}.{name}": getattr(getattr(self, section), name) for section, name in fields}

    def assumed(self) -> list[str]:
        """Return the dotted paths of the numbers that no source gives."""
        return [path for path, source in self.sources.items() if source.startswith("assumed")]

    def scaled(self, factors: Mapping[str, float]) -> Workload:
        """Return the same workload with some numbers multiplied.

        Args:
            factors: By dotted path, above 0. What leaves the range of its field becomes the end of that range; whole
                numbers are rounded.

        Raises:
            ConfigError: A path that was not read, a factor that is not above 0, or numbers that contradict each other.
        """
        numbers = self.numbers
        changed: dict[str, dict[str, float]] = {}
        for path, factor in factors.items():
            if path not in numbers:
                raise ConfigError(f"{self.name} has no number {path!r}; it has {', '.join(numbers)}")
            if not 0 < factor < math.inf:
                raise ConfigError(f"{self.name}: {path} cannot be multiplied by {factor}, only by factors above 0")
            section, name = path.split(".")
            within = rules(type(getattr(self, section)))[name]
            assert isinstance(within, Within)
            changed.setdefault(section, {})[name] = within.clip(numbers[path] * factor)
        records: dict[str, Any] = {name: replace(getattr(self, name), **values) for name, values in changed.items()}
        return consistent(replace(self, **records), self.name)


@dataclass(frozen=True)
class Limits:
    """What no schedule exceeds, in environment steps per second, by cause.

    Attributes:
        simulation: Cores, or SMs for a batched simulator: ``C / E[S]``.
        generation: The policy alone on the GPU, at its best batch size: ``max n / t(n)``.
        latency: The units, spares included, each of which waits for its own simulator and its own action:
            ``N / (E[S] + t(1))``.
        training: Updates alone on the GPU; infinite where nothing is trained.
    """

    simulation: float
    generation: float
    latency: float
    training: float


def limits(workload: Workload) -> Limits:
    """Return what limits a workload on its own machine, each cause alone; ``E[S]`` is `Workload.decision_s`."""
    simulator, policy, num_envs = workload.simulator, workload.policy, workload.simulator.num_envs
    at_once: float = workload.machine.num_cores // simulator.cores_per_unit
    if simulator.kind == "gpu-batched":
        at_once = min(at_once, 1 / simulator.sm_share)
    slots, update_s = simulator.slots_per_unit, workload.update_s()
    return Limits(  # t(n) is affine, so the best batch is the largest
        simulation=policy.chunk * slots * at_once / workload.decision_s,
        generation=policy.chunk * num_envs / workload.generation_s(num_envs),
        latency=policy.chunk * num_envs / (workload.decision_s + workload.generation_s(slots)),
        training=policy.chunk * workload.batch_size / update_s if update_s else math.inf,
    )


def bound(workload: Workload) -> float:
    """Return the most environment steps per second that rollout alone can reach: the least of its three limits."""
    limit = limits(workload)
    return min(limit.simulation, limit.generation, limit.latency)


def consistent(workload: Workload, where: str) -> Workload:
    """Return a workload whose numbers do not contradict each other.

    Args:
        workload: To look at.
        where: It comes from, for errors.

    Raises:
        ConfigError: They do.
    """
    simulator, num_cores = workload.simulator, workload.machine.num_cores
    batched = simulator.kind == "gpu-batched"
    demands = {
        "num_envs; allowed: at least 1": simulator.num_envs >= 1,
        f"shortest_episode; allowed: at most the horizon, {simulator.horizon}": (
            simulator.shortest_episode <= simulator.horizon
        ),
        f"num_envs; allowed: a multiple of slots_per_unit, {simulator.slots_per_unit}": (
            simulator.num_envs % simulator.slots_per_unit == 0
        ),
        "slots_per_unit; allowed for kind cpu: 1": batched or simulator.slots_per_unit == 1,
        "slot_s; allowed for kind cpu: 0": batched or simulator.slot_s == 0,
        "sm_share; allowed for kind cpu: 0": batched or simulator.sm_share == 0,
        "sm_share; allowed for kind gpu-batched: above 0": not batched or simulator.sm_share > 0,
        "bandwidth; allowed for kind cpu: 0": batched or simulator.bandwidth == 0,
        f"cores_per_unit; allowed: at most the {num_cores} of the machine": simulator.cores_per_unit <= num_cores,
    }
    for demand, holds in demands.items():
        if not holds:
            name = demand.split(";")[0]
            raise ConfigError(f"{where}: simulator.{name} is {getattr(simulator, name)}{demand.removeprefix(name)}")
    return workload
