"""``ebrl probe``: what an environment or a policy takes on this machine, as a table and as a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from ebrl.cli import folder as run_folder
from ebrl.cli.config import ProbeConfig
from ebrl.cli.eval import read_config
from ebrl.cli.train import build, describe, new_policy
from ebrl.core.errors import ConfigError, UnknownEnv
from ebrl.core.machine import LocalMachine
from ebrl.core.profile import StageRecord
from ebrl.core.profiles import check_update, update
from ebrl.core.profiles import describe as describe_machine
from ebrl.core.records import EnvSpec
from ebrl.core.run import run
from ebrl.core.runtime import Runtime
from ebrl.gen.probe import PolicyProbe, probe_policy
from ebrl.sim.auto import Choice, choose
from ebrl.sim.players import SimulationProbe
from ebrl.sim.probe import probe_simulators, records

ENVS, GEN = "envs", "gen"  # the names that services have unless they are given others
MAX_BATCH = 64
OF_POLICIES = ("hidden", "memory_size")  # options that a run has already decided


@dataclass
class Plan:
    """What is to be measured.

    Attributes:
        spec: Of the environment.
        simulators: Whether they are measured.
        policy: Is measured, if there is one.
        title: Of the policy.
    """

    spec: EnvSpec
    simulators: bool = True
    policy: torch.nn.Module | None = None
    title: str = ""


def probe(config: ProbeConfig) -> int:
    """Run the command.

    Raises:
        EbrlError: It cannot be measured, or the file not be written; nothing was written.
    """
    machine = LocalMachine()
    check_update(config.out, machine)
    plan = make_plan(config)
    found, batches, choice = run(measure(config, plan, machine))
    console = Console()
    stages: list[StageRecord] = []
    if found:
        stages += records(found, ENVS)
        say(console, *simulation_lines(plan.spec, found, choice))
    if batches is not None:
        stages.append(batches.record(GEN))
        say(console, *policy_lines(plan.title, batches, stages[-1]))
    update(config.out, stages, machine)
    say(console, f"profile written to {config.out} ({describe_machine(machine)})")
    return 0


def make_plan(config: ProbeConfig) -> Plan:
    """Find out what the target is: a folder that holds a run, or else the id of an environment.

    Raises:
        EbrlError: It is neither, or options make no sense for it.
    """
    folder = Path(config.target)
    if run_folder.holds_run(folder):
        for name in given(config, "env_kwargs", "horizon", "host", "policy", *OF_POLICIES):
            raise ConfigError(f"{name} is not for a run, and {folder} is one: its policy is measured as it is")
        specs, policy = build(read_config(folder))
        run_folder.load_policy(policy, folder)
        return Plan(specs[0], False, policy, f"the policy of {folder}")
    for name in () if config.policy else given(config, "max_batch", *OF_POLICIES):
        raise ConfigError(f"{name} is about a policy: add --policy to measure the one that a run would begin with")
    try:
        spec, *others = describe(config.as_run())
    except UnknownEnv as error:
        error.add_note("nor is it the folder of a run, which holds a config.json")
        raise
    if others:
        raise ConfigError(
            f"{config.target} has {1 + len(others)} tasks: probe one of them, with Meta-World/MT1 "
            f"--env-kwargs env_name {spec.task}"
        )
    if not config.policy:
        return Plan(spec)
    return Plan(spec, True, new_policy(config.as_run(), spec), "a policy that begins")


def given(config: ProbeConfig, *names: str) -> list[str]:
    """Return those options that were given, whatever their value."""
    bare = ProbeConfig(target=config.target)
    return [f"--{name.replace('_', '-')}" for name in names if getattr(config, name) != getattr(bare, name)]


async def measure(
    config: ProbeConfig, plan: Plan, machine: LocalMachine
) -> tuple[list[SimulationProbe], PolicyProbe | None, Choice | None]:
    """Measure simulators alone and as many as there are cores, then the policy; the last: where, if that was open."""
    found: list[SimulationProbe] = []
    batches = choice = None
    spec = plan.spec
    async with Runtime(machine, seed=config.seed, tune=False) as rt:
        if plan.simulators:
            if spec.host == "auto":
                choice = await choose(rt, [spec] * machine.num_cores, name=ENVS)
                place = choice.host
            else:
                place = spec.host
            counts = sorted({1, machine.num_cores})
            seconds = config.seconds / len(counts)
            found = [
                await probe_simulators(rt, spec, num, seconds=seconds, host=place, seed=config.seed) for num in counts
            ]
        if plan.policy is not None:
            batches = await probe_policy(
                rt,
                plan.policy,
                plan.spec,
                max_batch=config.max_batch or MAX_BATCH,
                seconds=config.seconds,
                seed=config.seed,
            )
    return found, batches, choice


def simulation_lines(spec: EnvSpec, found: list[SimulationProbe], choice: Choice | None) -> list[str]:
    """Return the table of the simulators."""
    place = spec.host if choice is None else choice.host
    where = "the loop" if place == "inline" else f"a {place}"
    lines = [
        *([] if choice is None else [f"simulators run in {choice}"]),
        f"{spec.id}: random actions, {where} for each simulator",
        f"{'simulators':>10} {'step ms':>9} {'median':>9} {'p99':>9} {'reset ms':>9} {'steps/s':>10}",
    ]
    for probed in found:
        p50, p99 = 1e3 * np.quantile(probed.steps_s, (0.5, 0.99))
        step, reset = 1e3 * np.mean(probed.steps_s), 1e3 * np.mean(probed.resets_s)
        lines.append(
            f"{probed.num_simulators:10} {step:9.4f} {p50:9.4f} {p99:9.4f} {reset:9.4f} {probed.steps_per_s:10,.0f}"
        )
    return lines


def policy_lines(title: str, batches: PolicyProbe, record: StageRecord) -> list[str]:
    """Return the table of the policy."""
    lines = [f"{title}: batches on one thread", f"{'rows':>10} {'ms':>9} {'rows/s':>10}"]
    lines += [f"{num:10} {1e3 * s:9.4f} {num / max(s, 1e-12):10,.0f}" for num, s in batches.medians_s.items()]
    (fit,) = record.fits
    return [*lines, f"a batch of n takes {1e3 * fit.a_s:.4g} + {1e3 * fit.b_s:.4g} n ms"]


def say(console: Console, *lines: str) -> None:
    """Print as it is."""
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
