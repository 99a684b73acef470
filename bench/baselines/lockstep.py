"""Lock-step rollout in fixed stages, and the synchronous scheduler that alternates it with updates.

Model of RLinf's default mode, commit a3816b59, ``pipeline_stage_num`` 1, all on one GPU
(rlinf/workers/env/env_worker.py, rlinf/workers/rollout/hf/huggingface_worker.py, rlinf/runners/embodied_runner.py);
with chunks of one action it is gymnasium's ``AsyncVectorEnv`` or any other vectorised environment.

As there:

- One batch holds all units, and all step before the next.
- Environments on cores wait for each other after every action of a chunk (``chunk_step`` in
  rlinf/envs/libero/libero_env.py), and for the resets at its end. A batched simulator keeps time by itself.
- An update follows after ``horizon / chunk * rollout_epochs`` decisions of every environment; nothing overlaps.

Kinder than there: an environment that is done is not stepped to the end of its chunk; values for bootstrapping cost
nothing; no data is copied; episodes go on across updates.
"""

from __future__ import annotations

import itertools

from bench.baselines.parts import Learner, together
from bench.hardware import Hardware
from bench.workload import Workload
from ebrl.core.errors import ConfigError


def split(num_units: int, num_stages: int) -> list[list[int]]:
    """Divide the units into stages, as evenly as possible."""
    if not 1 <= num_stages <= num_units:
        raise ConfigError(f"{num_stages} stages cannot be made of {num_units} units, only 1 to {num_units}")
    return [list(range(stage, num_units, num_stages)) for stage in range(num_stages)]


def num_rounds(workload: Workload) -> int | None:
    """Return how many decisions of every environment make a batch; None, for ever, where nothing is trained."""
    return workload.batch_size // workload.simulator.num_envs or None


async def rollout(
    hardware: Hardware, learner: Learner, stages: list[list[int]], rounds: int | None, per_action: bool
) -> None:
    """Let every stage take turns between one batch and one chunk; stages go on beside each other."""
    per_action = per_action and hardware.workload.simulator.kind == "cpu"
    jobs = [_stage(hardware, learner, units, rounds, lane, per_action) for lane, units in enumerate(stages)]
    await together(jobs)


async def _stage(
    hardware: Hardware, learner: Learner, units: list[int], rounds: int | None, lane: int, per_action: bool
) -> None:
    for _ in itertools.count() if rounds is None else range(rounds):
        version = learner.version
        await hardware.generate(len(units), lane % hardware.num_lanes)
        if per_action:
            await _step_by_action(hardware, units)
        else:
            await together(_step(hardware, unit) for unit in units)
        learner.add(version, len(units) * hardware.slots)


async def _step(hardware: Hardware, unit: int) -> None:
    _, ended = await hardware.step(unit)
    if ended:
        await hardware.reset(unit)


async def _step_by_action(hardware: Hardware, units: list[int]) -> None:
    going, ended = units, list[int]()
    for action in range(hardware.workload.policy.chunk):
        done = await together(hardware.step(unit, 1, chunk=action == 0) for unit in going)
        ended += [unit for unit, (_, has_ended) in zip(going, done, strict=True) if has_ended]
        going = [unit for unit, (_, has_ended) in zip(going, done, strict=True) if not has_ended]
    await together(hardware.reset(unit) for unit in ended)


async def run(hardware: Hardware, num_stages: int = 1, *, per_action: bool = True) -> None:
    """Alternate rollout and updates until cancelled.

    Args:
        hardware: To run on.
        num_stages: Groups of units that go on beside each other: 1 here, more in `bench.baselines.pipeline`.
        per_action: Wait for all after every action, not only after every chunk; on cores only.
    """
    learner, stages = Learner(hardware), split(hardware.num_units, num_stages)
    await together(hardware.reset(unit) for unit in range(hardware.num_units))
    while True:
        await rollout(hardware, learner, stages, num_rounds(hardware.workload), per_action)
        await learner.update()
