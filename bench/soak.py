"""Whether anything grows in a long run in which simulators keep failing.

Hypothesis: with one call in a thousand that raises or returns garbage, and in processes also some that end the process
or hang in it, ten million environment steps end with as many descriptors and threads as there were at the beginning,
and resident memory grows by less than 1 MiB per million steps, in either host, children included. What is compared
are the medians of the first and of the last third, after a tenth. So a run of weeks is limited by its simulators and
not by what their failures leave behind.

The simulators are `ScriptedEnv` in episodes of 100 steps, without latency; every failure is followed by a restart.
Half of the steps are done in threads and half in processes. Hangs are left out in threads, where each one leaks its
thread, as is told in the log. Samples are taken between updates. Not for machines without ``/proc``.

    python -m bench.soak --json
    python -m bench.soak --steps 300000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import uvloop

from bench.overhead import NoLearner
from bench.report import COUNT, Check, Number, at_most, command, finish, parser
from ebrl import EnvGroup, FailurePolicy, Generator, Runtime, Trainer, env_spec
from ebrl.gen.fake import ScriptedPolicy
from ebrl.sim.fake import ScriptedEnv

Host = Literal["thread", "process"]
STORMS: Mapping[Host, Mapping[str, float]] = {
    "thread": {"raise": 9e-4, "nan": 1e-4},
    "process": {"raise": 9e-4, "nan": 1e-4, "exit": 1e-5, "hang": 1e-6},
}
POLICY = FailurePolicy(build_s=60.0, reset_s=1.0, call_s=1.0, per_env=None, backoff_s=0.0)
NUM_ENVS, LANES, BATCH = 16, 2, 1024
SLOPE_BAR = 1.0
WARM_UP = 0.1


@dataclass(frozen=True)
class Sample:
    """What this process and its children hold."""

    steps: int
    memory_mib: float
    descriptors: int
    threads: int


def sample(steps: int) -> Sample:
    gc.collect()
    held = [held_by(Path("/proc") / pid) for pid in [str(os.getpid()), *children()]]
    pages, descriptors, threads = map(sum, zip(*held, strict=True))
    return Sample(steps, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, descriptors, threads)


def held_by(process: Path) -> tuple[int, int, int]:
    """Return resident pages, descriptors and threads; none of a process that has just ended."""
    try:
        pages = int((process / "statm").read_text().split()[1])
        return pages, len(os.listdir(process / "fd")), len(os.listdir(process / "task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0, 0


def children() -> list[str]:
    """Return the processes that were started here."""
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


async def soak(host: Host, steps: int, seed: int, num_samples: int) -> tuple[list[Sample], Mapping[str, int]]:
    """Run so many steps; return what there was on the way, and what was done about failures."""
    spec = env_spec(ScriptedEnv, storm=STORMS[host])
    policy = ScriptedPolicy(spec)
    samples: list[Sample] = []
    async with Runtime(seed=seed) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(spec, actor=gen, count=NUM_ENVS, host=host, lanes=LANES, failures=POLICY))
        async for report in rt.start(Trainer(envs, NoLearner(policy, BATCH), updates=steps)):
            if report.env_steps >= len(samples) * steps / num_samples:
                samples.append(sample(report.env_steps))
            if report.env_steps >= steps:
                return samples, report.faults
    raise AssertionError("the trainer ended early")


def slope(samples: list[Sample]) -> float:
    """Return MiB per million steps."""
    return growth([s.memory_mib for s in samples]) / growth([s.steps for s in samples]) * 1e6


def growth(values: Sequence[float]) -> float:
    """Return by how much the median of the last third exceeds that of the first."""
    third = len(values) // 3
    return float(np.median(values[-third:]) - np.median(values[:third]))


def judge(host: Host, samples: list[Sample]) -> tuple[list[Check], dict[str, float]]:
    """Return bars and numbers, both without the beginning."""
    kept = samples[int(WARM_UP * len(samples)) :]
    found = {
        "MiB per million steps": slope(kept),
        "descriptors more": growth([s.descriptors for s in kept]),
        "threads more": growth([s.threads for s in kept]),
    }
    bars = dict(zip(found, (SLOPE_BAR, 0, 0), strict=True))
    return [at_most(f"{host}: {name}", value, bars[name]) for name, value in found.items()], found


def main() -> int:
    return command(answer, arguments())


def answer(args: argparse.Namespace) -> int:
    logging.getLogger("ebrl").setLevel(logging.CRITICAL)  # that restarts are told is not the question
    steps, num_samples = (4_000, 9) if args.smoke else (args.steps // 2, args.samples)
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for host in STORMS:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            samples, faults = runner.run(soak(host, steps, args.seed, num_samples))
        judged, found = judge(host, samples)
        checks += judged
        numbers = ", ".join(f"{value:.3g} {name}" for name, value in found.items())
        print(f"{host}: {samples[-1].steps:,} steps, {faults['restarts']} restarts, {numbers}")
        data[host] = {**found, "faults": dict(faults), "samples": [asdict(s) for s in samples]}
    return finish("soak", args, checks, data)


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--steps", type=Number(int, 1, 1e9), default=10_000_000, help="environment steps, half in each host"
    )
    made.add_argument("--samples", type=COUNT, default=200, help="of memory, in each host")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
