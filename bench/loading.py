"""Workloads from files: which fields a profile of each kind has, and how profiles are joined."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.profiles import PROFILES, Rule, names, read, rules
from bench.workload import MachineProfile, PolicyProfile, SimulatorProfile, TrainingProfile, Workload, consistent

_EVERY = {
    "simulator": rules(SimulatorProfile),
    "policy": rules(PolicyProfile),
    "training": rules(TrainingProfile),
    "machine": rules(MachineProfile),
}
_W = {
    "simulator": ("step_s", "step_cv", "reset_s", "shortest_episode", "horizon"),
    "policy": ("fixed_s", "per_sample_s"),
}
_CONVERGENCE = {
    "simulator": (
        "num_envs", "step_s", "step_cv", "burst_share", "burst_factor", "burst_steps",
        "stall_probability", "stall_factor", "reset_s", "reset_cv",
    ),
    "policy": ("chunk", "fixed_s", "per_sample_s"),
    "training": ("samples_per_s", "epochs"),
}  # fmt: skip


def _some(fields: Mapping[str, Collection[str]]) -> Mapping[str, Mapping[str, Rule]]:
    return {section: {name: _EVERY[section][name] for name in names} for section, names in fields.items()}


SCHEMA: Mapping[str, Mapping[str, Mapping[str, Rule]]] = {
    "simulators": {"simulator": _EVERY["simulator"]},
    "policies": {"policy": _EVERY["policy"], "training": _EVERY["training"]},
    "machines": {"machine": _EVERY["machine"]},
    "w": _some(_W),
    "convergence": _some(_CONVERGENCE),
}
"""What a file of each kind holds: sections, their fields, and what these may be."""


def pairs(folder: Path = PROFILES) -> list[tuple[str, str]]:
    """Return all pairs of a simulator and a policy."""
    return [(simulator, policy) for simulator in names("simulators", folder) for policy in names("policies", folder)]


def load_pair(simulator: str, policy: str, machine: str, folder: Path = PROFILES) -> Workload:
    """Join a simulator, a policy and a machine.

    Raises:
        ConfigError: There is no such profile, or something in its file is wrong.
    """
    files = [
        read(kind, name, SCHEMA[kind], folder)
        for kind, name in (("simulators", simulator), ("policies", policy), ("machines", machine))
    ]
    records = {section: record for file in files for section, record in file.records.items()}
    workload = Workload(
        name=f"{simulator}+{policy}@{machine}",
        simulator=SimulatorProfile(**records["simulator"]),
        policy=PolicyProfile(**records["policy"]),
        training=TrainingProfile(**records["training"]),
        machine=MachineProfile(**records["machine"]),
        sources={path: source for file in files for path, source in file.sources.items()},
    )
    return consistent(workload, f"simulators/{simulator}.json")


def load_w(name: str, num_envs: int, folder: Path = PROFILES) -> Workload:
    """Return one of the workloads W1 to W5b: simulators that sleep, a core for each, and nothing trained.

    Raises:
        ConfigError: There is no such profile, or something in its file is wrong.
    """
    file = read("w", name, SCHEMA["w"], folder)
    where, label = f"w/{name}.json", f"{name} N={num_envs}"
    return untrained(where, label, num_envs, file.records, num_cores=num_envs, sources=file.sources)


def load_convergence(name: str, folder: Path = PROFILES) -> Workload:
    """Return latencies for real learning: a core for each simulator, a device each for generation and training.

    How long episodes are is up to the environment that learns, and what an update trains on up to its learner.

    Raises:
        ConfigError: There is no such profile, or something in its file is wrong.
    """
    file = read("convergence", name, SCHEMA["convergence"], folder)
    simulator: dict[str, Any] = file.records["simulator"] | {"shortest_episode": 1, "horizon": 1}
    num_envs, records = simulator.pop("num_envs"), file.records | {"simulator": simulator}
    where = f"convergence/{name}.json"
    workload = untrained(where, name, num_envs, records, num_cores=num_envs, sources=file.sources)
    alone: dict[str, Any] = {"rollout_epochs": 1, "linearity": 1.0, "bandwidth": 0.0}
    return replace(workload, training=TrainingProfile(**alone | file.records["training"]))


def untrained(
    where: str,
    name: str,
    num_envs: int,
    records: Mapping[str, Mapping[str, Any]],
    *,
    num_cores: int,
    sources: Mapping[str, str],
) -> Workload:
    """Return simulators on cores and a policy on a device of its own, and nothing that is trained.

    Args:
        where: File, for errors.
        name: For reports.
        num_envs: Environments.
        records: What is known of ``simulator`` and ``policy``; the rest is plain.
        num_cores: For the simulators.
        sources: Of what is known.

    Raises:
        ConfigError: Numbers that contradict each other.
    """
    simulator: dict[str, Any] = {
        "kind": "cpu", "num_envs": num_envs, "slots_per_unit": 1, "cores_per_unit": 1, "slot_s": 0.0,
        "burst_share": 0.0, "burst_factor": 1.0, "burst_steps": 1.0, "stall_probability": 0.0, "stall_factor": 1.0,
        "reset_cv": 0.0, "episode_law": "uniform", "success_rate": 0.0, "sm_share": 0.0, "bandwidth": 0.0,
    }  # fmt: skip
    policy: dict[str, Any] = {"chunk": 1, "linearity": 1.0, "bandwidth": 0.0}
    speeds = ("core_speed", "generation_speed", "training_speed", "simulation_speed", "memory_bandwidth")
    workload = Workload(
        name=name,
        simulator=SimulatorProfile(**simulator | dict(records["simulator"])),
        policy=PolicyProfile(**policy | dict(records["policy"])),
        training=None,
        machine=MachineProfile(num_cores=num_cores, sm_units=1, **dict.fromkeys(speeds, 1.0)),
        sources=sources,
    )
    return consistent(workload, where)
