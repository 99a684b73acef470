"""Variable experience: inference workers with thresholds that set themselves, rollouts of whoever is faster.

Model of VER (arXiv 2210.05064; facebookresearch/habitat-lab, habitat_baselines/rl/ver/inference_worker.py,
environment_worker.py and ver_trainer.py).

As there:

- A worker takes a batch when ``num_units / num_workers / 1.5`` requests wait, or when more time has passed since its
  last batch than half of what its last 128 took on average (10 ms at first); at most ``num_units / num_workers * 1.5``.
- A rollout ends after a batch of decisions in total. Nothing is generated during the update; steps that are in flight
  end meanwhile, and count in the next rollout, one version behind.
- ``overlap`` (``overlap_rollouts_and_learn``): the next rollout goes on during the update, and no further.

Kinder than there: workers share one queue and hold no requests back from each other; they notice a timeout at once,
not within 5 ms; the last batch of a rollout is not generated again. Its preemption is for several GPUs only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from statistics import fmean

from bench.baselines.parts import Learner, Requests, answer, decide
from bench.hardware import Hardware

FIRST_WAIT_S = 0.01
WINDOW = 128  # batches


async def run(hardware: Hardware, num_workers: int = 2, *, overlap: bool = False) -> None:
    """Roll out and update until cancelled.

    Args:
        hardware: To run on. Workers share its generation lanes.
        num_workers: Inference workers.
        overlap: Roll out during updates.
    """
    learner, requests = Learner(hardware), Requests()
    requests.bell = learner.bell  # workers wait for both
    async with asyncio.TaskGroup() as group:
        for unit in range(hardware.num_units):
            group.create_task(_play(hardware, learner, requests, unit), name=f"unit-{unit}")
        for worker in range(num_workers):
            inference = infer(hardware, learner, requests, num_workers, worker % hardware.num_lanes, overlap=overlap)
            group.create_task(inference, name=f"inference-{worker}")
        group.create_task(learner.learn(), name="learner")


def thresholds(num_units: int, num_workers: int) -> tuple[int, int]:
    """Return how many requests launch a batch, and how many it takes at most."""
    each = num_units / num_workers
    return max(1, int(each / 1.5)), max(1, int(each * 1.5))


async def infer(
    hardware: Hardware, learner: Learner, requests: Requests, num_workers: int, lane: int = 0, *, overlap: bool = False
) -> None:
    """Be one inference worker."""
    least, most = thresholds(hardware.num_units, num_workers)
    loop, took_s = asyncio.get_running_loop(), deque[float](maxlen=WINDOW)
    wait_s, last_s = FIRST_WAIT_S, loop.time()

    def may_launch(num: int) -> bool:
        return len(requests) >= num and not learner.full and (overlap or not learner.updating)

    while True:
        await requests.bell.until(lambda: may_launch(1))
        with suppress(TimeoutError):
            async with asyncio.timeout_at(last_s + wait_s):
                await requests.bell.until(lambda: may_launch(least))
        if not may_launch(1):  # another worker was faster, or the rollout has ended
            continue
        began_s = loop.time()
        await answer(hardware, learner, requests.take(most), lane)
        last_s = loop.time()
        took_s.append(last_s - began_s)
        wait_s = fmean(took_s) / 2


async def _play(hardware: Hardware, learner: Learner, requests: Requests, unit: int) -> None:
    await hardware.reset(unit)
    while True:
        version = await decide(hardware, requests, unit)
        learner.add(version, hardware.slots)
