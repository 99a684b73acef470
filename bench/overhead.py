"""What the runtime itself costs per environment step.

Hypothesis: with an environment that takes no time and a policy that costs nothing, everything that EBRL does for a
step - coroutine, request, batch, fan-out, lane, cores pool, record, ledger, segment, training batch - costs the loop
thread at most 5 us at 64 and 1024 environments and 7 us at 4096 under uvloop, and the whole process at most 12 us.
So one loop carries 150,000 steps per second, and is no limit for simulators that take 0.1 ms or more.

Two lanes share the environments (``EnvGroup(lanes=2)``): with a thread each, the cost of waking threads would be
measured, which simulators that take no time at all do not need. The trace is off, as by default, and so is the event
log, unless ``--record`` asks for what that costs. CPU time is thread and process time, so that other load matters
little; repetitions of all settings are interleaved.

    python -m bench.overhead --json
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
import numpy as np
import torch
import uvloop
from gymnasium import spaces
from torch import Tensor

from bench.report import COUNT, SECONDS, at_most, command, finish, parser, show, spread
from ebrl import EnvGroup, Generator, Policy, PolicyOut, Runtime, TorchPolicy, Trainer, env_spec
from ebrl.core.records import Array, EnvSpec, TrainBatch

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
BARS_US = {64: 5.0, 1024: 5.0, 4096: 7.0}
PROCESS_BAR_US = 12.0
DECISION_BAR_MS = 5.0
TUNER_BAR = 0.01


class NoLatencyEnv(gymnasium.Env[Array, Array]):
    """Takes no time: the same observation for ever."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (8,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self._obs = np.zeros(8, np.float32)
        self._info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        return self._obs, self._info

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        return self._obs, 0.0, False, False, self._info


class NoCostPolicy(TorchPolicy):
    """Costs nothing: slices of zeros."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(horizon=1, noise_dim=2)
        self._action = torch.zeros(4096, 1, 2)
        self._value = torch.zeros(4096)

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        num = len(noise)
        return PolicyOut(self._action[:num], self._action[:num], self._value[:num], {})

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("nothing is learned here")


class NoLearner:
    """Consumes batches."""

    def __init__(self, policy: Policy, batch_size: int) -> None:
        self.policy = policy
        self.batch_size = batch_size

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True)
class Cost:
    """Per environment step, in microseconds of CPU time; steps per second of wall time; and what the tuner takes.

    Attributes:
        decision_ms: CPU time of a decision of the tuner.
        tuner_part: Of the loop's thread, in decisions.
    """

    loop_us: float
    process_us: float
    steps_per_s: float
    decision_ms: float
    tuner_part: float


async def measure(num_envs: int, seconds: float, lanes: int, seed: int, log: Path | None = None) -> Cost:
    """Run the whole pipeline, recorded or not, and return what a step cost after the first updates."""
    spec = env_spec(NoLatencyEnv)
    policy = NoCostPolicy(spec)
    async with Runtime(seed=seed, record=log) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(spec, actor=gen, count=num_envs, lanes=lanes))
        trainer = Trainer(envs, NoLearner(policy, 16 * num_envs), updates=1_000_000)
        began: tuple[float, float, float, int, float] | None = None
        async for report in rt.start(trainer):
            if report.update == 3:
                began = time.perf_counter(), time.thread_time(), time.process_time(), report.env_steps, rt.tuning.cpu_s
            elif began is not None and time.perf_counter() - began[0] >= seconds:
                steps = report.env_steps - began[3]
                return Cost(
                    (time.thread_time() - began[1]) / steps * 1e6,
                    (time.process_time() - began[2]) / steps * 1e6,
                    steps / (time.perf_counter() - began[0]),
                    1e3 * rt.tuning.cpu_s / max(rt.tuning.num_decisions, 1),
                    (rt.tuning.cpu_s - began[4]) / (time.perf_counter() - began[0]),
                )
    raise AssertionError("the trainer ended early")


def idle_memory_kib(num_envs: int) -> float:
    """Return resident memory per environment that has done a step and waits, in KiB, measured in a fresh process."""
    code = f"""
import asyncio, resource
from bench.overhead import *
def rss(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1024
async def main():
    spec = env_spec(NoLatencyEnv)
    policy = NoCostPolicy(spec)
    before = rss()
    async with Runtime() as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(spec, actor=gen, count={num_envs}, lanes=2))
        trainer = rt.start(Trainer(envs, NoLearner(policy, 2 * {num_envs}), updates=2))
        async for report in trainer: pass
        print((rss() - before) / {num_envs})
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> int:
    return command(answer, arguments())


def answer(args: argparse.Namespace) -> int:
    counts = [8] if args.smoke else [64, 1024, 4096]
    seconds, repeats = (0.05, 1) if args.smoke else (args.seconds, args.repeats)
    costs: dict[tuple[str, int], list[Cost]] = {}
    for _ in range(repeats):
        for count in counts:
            for name, factory in LOOPS.items():
                with asyncio.Runner(loop_factory=factory) as runner, TemporaryDirectory() as folder:
                    log = Path(folder) / "events.jsonl" if args.record else None
                    cost = runner.run(measure(count, seconds, args.lanes, args.seed, log))
                    costs.setdefault((name, count), []).append(cost)
    checks, data = [], {}
    for (name, count), runs in costs.items():
        loop, process = spread([run.loop_us for run in runs]), spread([run.process_us for run in runs])
        rate = spread([run.steps_per_s for run in runs])
        print(
            f"{name:8} {count:5} envs: loop {show(loop, ' us')}, "
            f"process {show(process, ' us')}, {show(rate, ' steps/s')}"
        )
        tuner_ms, tuner_part = spread([run.decision_ms for run in runs]), spread([run.tuner_part for run in runs])
        data[f"{name}-{count}"] = {
            "loop_us": loop,
            "process_us": process,
            "steps_per_s": rate,
            "decision_ms": tuner_ms,
            "tuner_part": tuner_part,
        }
        if name == "uvloop" and count in BARS_US and not args.record:
            checks.append(at_most(f"loop us per step, {count} envs", loop["median"], BARS_US[count]))
            checks.append(at_most(f"process us per step, {count} envs", process["median"], PROCESS_BAR_US))
            checks.append(at_most(f"ms of a decision of the tuner, {count} envs", tuner_ms["median"], DECISION_BAR_MS))
            checks.append(at_most(f"part of a core for the tuner, {count} envs", tuner_part["median"], TUNER_BAR))
    memory = idle_memory_kib(counts[-1])
    print(f"memory per idle environment: {memory:.1f} KiB")
    return finish("overhead", args, checks, {**data, "idle_memory_kib": memory, "lanes": args.lanes})


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--seconds", type=SECONDS, default=2.0, help="of each measurement")
    made.add_argument("--repeats", type=COUNT, default=5, help="of each setting, interleaved")
    made.add_argument("--lanes", type=COUNT, default=2, help="threads that share the environments")
    made.add_argument("--record", action="store_true", help="write an event log; the bars are not for that")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
