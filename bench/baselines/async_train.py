"""Lock-step rollout that goes on while the last batch is trained.

Model of RLinf's asynchronous PPO (commit a3816b59, examples/embodiment/train_async.py,
rlinf/workers/env/async_env_worker.py, rlinf/workers/rollout/hf/async_huggingface_worker.py,
rlinf/workers/actor/async_ppo_fsdp_worker.py).

As there: rollout keeps all its barriers, see `bench.baselines.lockstep`; new weights count from the next batch on;
decisions that are more than `staleness` versions behind are not trained.

Kinder than there:

- Rollout waits where its decisions would become too old, as in ``wait_if_stale``, which its generate loop called until
  commit 207625910. Without it, a slow learner discards what was generated for nothing.
- RLinf places stages on whole GPUs and knows no shares of one. Here they take turns on one, or have fixed shares of
  which, as of whole GPUs, nothing is lent; but a half is worth more than half, as SM partitions are.
- Stages may simulate at once, see `bench.baselines.pipeline`. Weights take no time to arrive.
"""

from __future__ import annotations

import asyncio

from bench.baselines.lockstep import num_rounds, rollout, split
from bench.baselines.parts import Learner, share, together
from bench.hardware import Hardware


async def run(
    hardware: Hardware,
    num_stages: int = 1,
    gen_share: int | None = None,
    *,
    staleness: int = 1,
    per_action: bool = True,
) -> None:
    """Roll out and train beside each other until cancelled.

    Args:
        hardware: To run on.
        num_stages: Groups of units that go on beside each other.
        gen_share: SM units for generation, the others for training; None: they take turns.
        staleness: Versions that a decision may be behind when it is trained.
        per_action: Wait for all after every action, not only after every chunk; on cores only.
    """
    share(hardware, gen_share)
    learner, stages = Learner(hardware, staleness), split(hardware.num_units, num_stages)

    async def roll_out() -> None:
        await together(hardware.reset(unit) for unit in range(hardware.num_units))
        while True:
            await learner.begin(learner.batch_size)
            await rollout(hardware, learner, stages, num_rounds(hardware.workload), per_action)

    async with asyncio.TaskGroup() as group:
        group.create_task(learner.learn(), name="learner")
        group.create_task(roll_out(), name="rollout")
