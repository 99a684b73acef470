"""Lock-step in fixed stages that overlap: while the units of one step, the batch of another is generated.

Model of RLinf's ``pipeline_stage_num: k`` (commit a3816b59, rlinf/workers/env/env_worker.py, lines 1087 to 1215), with
synchronous training; see `bench.baselines.lockstep` for the rest.

There, the stages of one environment worker simulate one after the other, and only with several workers can two stages
simulate at once. Here they always may, as far as there are cores: kinder than one worker, and no worse than any number.
For the same reason a batch is generated when its stage is there, in whatever order; RLinf's rollout worker takes the
stages in turn. So this also stands for its decoupled mode (``runner.enable_decoupled_mode``) with `k` workers.
"""

from __future__ import annotations

from bench.baselines import lockstep
from bench.hardware import Hardware


async def run(hardware: Hardware, num_stages: int = 2, *, per_action: bool = True) -> None:
    """Alternate rollout and updates until cancelled; see `bench.baselines.lockstep.run`."""
    await lockstep.run(hardware, num_stages, per_action=per_action)
