"""A batch of the first K units that are ready, one batch at a time; updates alternate with that.

Models of EnvPool (sail-sg/envpool, README: ``batch_size`` of ``num_envs``, ``recv``, policy, ``send``) and of tianshou
(thu-ml/tianshou 2.0, tianshou/env/venvs.py, tianshou/env/worker/subproc.py, ``AsyncCollector`` in
tianshou/data/collector.py), each in the loop of one thread.

As there:

- EnvPool returns exactly K, the first to be ready, and resets inside its pool while others go on.
- tianshou returns all that are ready once there are K (``wait_num``), and its collector resets those whose episode has
  ended in a call that waits for the resets: nothing is generated meanwhile (``blocking_reset``; their issue 579).
- An update follows when there are decisions for it. Units that are in flight go on, and theirs are one version behind.

Kinder than there: a reset in EnvPool takes no action of its own; tianshou's scans of lists cost nothing. Its
``timeout`` is left out: the default is none.
"""

from __future__ import annotations

import asyncio

from bench.baselines.parts import Learner, Requests, answer, together
from bench.hardware import Hardware
from ebrl.core.errors import ConfigError


async def run(hardware: Hardware, num_ready: int, *, blocking_reset: bool = False, exactly: bool | None = None) -> None:
    """Collect and update until cancelled.

    Args:
        hardware: To run on.
        num_ready: K, units of a batch.
        blocking_reset: Reset in the loop that collects, before the next batch.
        exactly: Take the first K only, not all that are ready; default: as EnvPool without `blocking_reset`, as
            tianshou with it.
    """
    if not 1 <= num_ready <= hardware.num_units:
        raise ConfigError(f"{num_ready} of {hardware.num_units} units are never ready, only 1 to {hardware.num_units}")
    exactly = not blocking_reset if exactly is None else exactly
    learner, requests = Learner(hardware), Requests()
    async with asyncio.TaskGroup() as group:
        for unit in range(hardware.num_units):
            group.create_task(_play(hardware, learner, requests, unit, blocking_reset), name=f"unit-{unit}")
        group.create_task(_collect(hardware, learner, requests, num_ready, exactly), name="collector")


async def _collect(hardware: Hardware, learner: Learner, requests: Requests, num_ready: int, exactly: bool) -> None:
    while True:
        await requests.bell.until(lambda: len(requests) >= num_ready)
        asked = requests.take(num_ready if exactly else len(requests))
        await together(hardware.reset(request.unit) for request in asked if request.ended)
        if learner.full:
            await learner.update()
        await answer(hardware, learner, asked)


async def _play(hardware: Hardware, learner: Learner, requests: Requests, unit: int, blocking_reset: bool) -> None:
    await hardware.reset(unit)
    ended = False
    while True:
        version = await requests.ask(unit, ended)
        _, ended = await hardware.step(unit)
        learner.add(version, hardware.slots)
        if ended and not blocking_reset:
            await hardware.reset(unit)
            ended = False
