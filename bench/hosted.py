"""What `bench.sims` has the processes of hosts run. They import this file, so it is light."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ebrl.sim.fake import ScriptedEnv

BURN_S = 0.001


class Burning(ScriptedEnv):
    """Each step is a millisecond of Python that never lets go of the interpreter by itself."""

    def step(self, action: Any) -> Any:
        until_s = time.perf_counter() + BURN_S
        while time.perf_counter() < until_s:
            pass
        return super().step(action)


def own_memory_mib(env: object) -> float:
    """Return what this process has for itself, and its part of what it shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return kib / 1024
