"""Every unit by itself; a batch is launched when it has a size, or after a time.

Model of RL-VLA3 (arXiv 2602.05765; Haoran0301/RL-VLA3, commit 0dad3d41) with its "greedy" router: any unit that is
ready may be next. Its default router serves the units in a fixed order, and would let all wait for the slowest.

As there (rlinf/workers/rollout/hf/flexible_per_env_async_rollout_worker.py, rlinf/runners/embodied_runner.py):

- The timer starts when the batcher becomes free, not with the oldest request: after an idle gap longer than the
  timeout, the first request goes alone. The size is in environments; a unit that overshoots it is taken whole.
- ``epoch_barrier``: a rollout is a batch of decisions, the same number from every environment. All environments and
  the learner end it before the next begins, so training overlaps only with the rollout that it learns from, and no
  decision is a version behind. Between the epochs of one rollout nobody waits (``__epoch_done__`` is sent per unit).
- The learner computes gradients whenever an environment has done an epoch (its "streamer", ``streaming_mode``).

Kinder than there: a batch does not wait for units that cannot ask, since they are at a barrier; episodes go on across
rollouts, where RL-VLA3 resets all; shares of SMs, which it has not; everything that costs nothing in
`bench.baselines.lockstep`.

Without the barrier this is what the same batcher does at its best: rollout never stops but for `staleness`, and
training is as in `bench.baselines.async_train`. AcceRL (arXiv 2603.18464) is close to that; it bounds no staleness.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from bench.baselines.parts import Learner, Requests, answer, decide, share, together
from bench.hardware import Hardware


async def run(
    hardware: Hardware,
    size: int,
    timeout_s: float,
    gen_share: int | None = None,
    *,
    epoch_barrier: bool = True,
    staleness: int = 1,
) -> None:
    """Roll out and train until cancelled.

    Args:
        hardware: To run on.
        size: Environments of a batch that is launched at once.
        timeout_s: After which a smaller one is.
        gen_share: SM units for generation, the others for training; None: they take turns.
        epoch_barrier: End every rollout for all, and its update, before the next.
        staleness: Versions that a decision may be behind when it is trained; without the barrier.
    """
    share(hardware, gen_share)
    learner, requests = Learner(hardware, staleness), Requests()
    async with asyncio.TaskGroup() as group:
        group.create_task(batch(hardware, learner, requests, size, timeout_s), name="batcher")
        if epoch_barrier:
            group.create_task(_in_rollouts(hardware, learner, requests), name="rollouts")
        else:
            group.create_task(learner.learn(), name="learner")
            for unit in range(hardware.num_units):
                group.create_task(_freely(hardware, learner, requests, unit), name=f"unit-{unit}")


async def batch(hardware: Hardware, learner: Learner, requests: Requests, size: int, timeout_s: float) -> None:
    """Answer requests for ever."""
    num, loop = math.ceil(size / hardware.slots), asyncio.get_running_loop()
    while True:
        late_s = loop.time() + timeout_s
        await requests.bell.until(lambda: len(requests) > 0)
        if loop.time() < late_s:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(late_s):
                    await requests.bell.until(lambda: len(requests) >= min(num, requests.playing))
            asked = requests.take(num)
        else:
            asked = requests.take(1)
        await answer(hardware, learner, asked)


async def _in_rollouts(hardware: Hardware, learner: Learner, requests: Requests) -> None:
    units = range(hardware.num_units)
    await together(hardware.reset(unit) for unit in units)
    while True:
        jobs = [_epochs(hardware, learner, requests, unit) for unit in units]
        await together([*jobs, learner.stream()])


async def _epochs(hardware: Hardware, learner: Learner, requests: Requests, unit: int) -> None:
    workload = hardware.workload
    num = math.ceil(workload.simulator.horizon / workload.policy.chunk)
    requests.playing += 1
    for _ in range(workload.training.rollout_epochs if workload.training else 1):
        for _ in range(num):
            version = await decide(hardware, requests, unit)
        learner.add(version, num * hardware.slots)
        learner.bell.ring()
    requests.playing -= 1
    requests.bell.ring()


async def _freely(hardware: Hardware, learner: Learner, requests: Requests, unit: int) -> None:
    requests.playing += 1
    await hardware.reset(unit)
    while True:
        if not learner.room(hardware.slots):
            requests.playing -= 1
            requests.bell.ring()
            await learner.bell.until(lambda: learner.room(hardware.slots))
            requests.playing += 1
        await learner.begin(hardware.slots)
        learner.add(await decide(hardware, requests, unit), hardware.slots)
