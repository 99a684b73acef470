"""Cores that stages share, in real time: HalfCheetah-v5 in both hosts, with a torch policy and PPO beside it.

The tuner knows nothing at its start and may turn everything; a static split fixes how many simulator calls run at once
and how many threads generation and training have, and launches whatever waits. Each runs from a cold start, in turn,
and the medians are compared. Then stages that always have work, each more of it than it may do, contend for quotas that
nobody changes: core-seconds that they held are compared with what they were promised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.real import Ask
from bench.report import Check, at_least, at_most, show, spread
from bench.suites import Result
from ebrl import PPO, Batcher, EnvGroup, GaussianPolicy, Generator, PPOConfig, Runtime, Trainer, env_spec
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import Lane
from ebrl.core.records import EnvSpec, Host
from ebrl.core.run import run
from ebrl.core.tokens import TokenBucket

ENV, NUM_ENVS = "HalfCheetah-v5", 16
HOSTS: tuple[Host, ...] = ("thread", "process")
QUOTAS = {"sim": 0.5, "gen": 0.2, "train": 0.3}  # parts of the cores
LANES = {"sim": 8, "gen": 4, "train": 4}  # that contend: more than a stage may use
CALL_S = 0.002  # of work per call, roughly


@dataclass(frozen=True)
class Split:
    """A static split of the cores; None everywhere: the tuner's."""

    sims: int | None = None
    gen_threads: int = 1
    train_threads: int = 1

    def __str__(self) -> str:
        if self.sims is None:
            return "tuner"
        return f"{self.sims} simulators, {self.gen_threads} + {self.train_threads} threads"


def suite(ask: Ask) -> Result:
    """Compare splits in both hosts, then quotas with what was used."""
    num_cores = LocalMachine().num_cores
    spec = env_spec(ENV, horizon=100)
    splits = [Split(), *statics(num_cores)] if not ask.smoke else [Split(), Split(1)]
    hosts = HOSTS[:1] if ask.smoke else HOSTS
    speeds: dict[tuple[Host, Split], list[float]] = {}
    for repeat in range(ask.repeats):
        for host in hosts:
            for split in splits[repeat % len(splits) :] + splits[: repeat % len(splits)]:
                speeds.setdefault((host, split), []).append(run(measure(spec, host, split, ask)))
    checks, lines, data = [], [], {}
    for host in hosts:
        medians = {split: spread(speeds[host, split]) for split in splits}
        if not ask.smoke:  # whose runs may be too short for a single step
            best = max(numbers["median"] for split, numbers in medians.items() if split.sims is not None)
            ratio = medians[Split()]["median"] / best
            checks.append(at_least(f"{host}: tuner / best static split", ratio, 0.95))
        lines += [f"{host:8} {split!s:36} {show(numbers, ' steps/s')}" for split, numbers in medians.items()]
        data[host] = {str(split): numbers for split, numbers in medians.items()}
    more, text, used = contention(spec, num_cores, ask)
    return Result(checks + more, data | {"quotas": used}, lines + text)


def statics(num_cores: int) -> list[Split]:
    """Return what the sweep tries: one, half and all of the cores for each."""
    sizes = sorted({1, max(1, num_cores // 2), num_cores})
    return [Split(*sizes_) for sizes_ in product(sizes, repeat=3)]


async def measure(spec: EnvSpec, host: Host, split: Split, ask: Ask) -> float:
    """Return environment steps per second."""
    torch.manual_seed(ask.seed)
    policy = GaussianPolicy.for_spec(spec)
    static = split.sims is not None
    async with Runtime(seed=ask.seed, tune=not static) as rt:
        sims = rt.claim("sim")
        assert sims is not None
        if split.sims is not None:
            sims.set(ceiling=split.sims)
        batcher = Batcher() if static else None
        gen = rt.start(Generator(policy, batcher=batcher, threads=split.gen_threads))
        envs = rt.start(EnvGroup(spec, actor=gen, count=NUM_ENVS, host=host))
        config = PPOConfig(batch_size=1024, minibatch_size=256, epochs=4, seed=ask.seed)
        trainer = rt.start(Trainer(envs, PPO(policy, config), updates=1_000_000, threads=split.train_threads))
        updating = rt.spawn(_consume(trainer), "updates")
        await asyncio.sleep(ask.span.warmup_s)
        began_s, began = time.perf_counter(), envs.env_steps
        await asyncio.sleep(ask.span.seconds)
        speed = (envs.env_steps - began) / (time.perf_counter() - began_s)
        updating.cancel()
    return speed


async def _consume(trainer: Trainer) -> None:
    async for _ in trainer:
        pass


# Quotas.


def contention(spec: EnvSpec, num_cores: int, ask: Ask) -> tuple[list[Check], list[str], dict[str, Any]]:
    """Let stages that always have work contend, and compare what they used with what they were promised."""
    used = run(contend(spec, num_cores, ask))
    total = sum(used.values())
    checks, lines = [], []
    for kind, part in QUOTAS.items():
        ratio = used[kind] / total / part
        checks.append(at_most(f"{kind}: core-seconds off its quota", abs(ratio - 1), 0.1))
        lines.append(f"{kind:5} promised {part * num_cores:.2f} cores, used {used[kind] / total * num_cores:.2f}")
    return checks, lines, {kind: seconds / total for kind, seconds in used.items()}


async def contend(spec: EnvSpec, num_cores: int, ask: Ask) -> dict[str, float]:
    """Return the core-seconds that each stage held while all of them wanted more."""
    async with Runtime(seed=ask.seed, tune=False) as rt:
        claims = {kind: _claim(rt, kind, part * num_cores) for kind, part in QUOTAS.items()}
        works = {"sim": _simulate(spec), "gen": _generate(spec), "train": _train(spec)}
        tasks = []
        for kind, num in LANES.items():
            for number in range(num):
                lane = rt.machine.lane(kind, f"{kind}-{number}", claims[kind])
                tasks.append(rt.spawn(_for_ever(lane, works[kind]), lane.name))
        await asyncio.sleep(ask.span.warmup_s)
        before = {kind: claim.statistics().used for kind, claim in claims.items()}
        await asyncio.sleep(ask.span.seconds)
        used = {kind: claim.statistics().used - before[kind] for kind, claim in claims.items()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return used


def _claim(rt: Runtime, kind: str, rate: float) -> TokenBucket:
    claim = rt.claim(kind)
    assert claim is not None
    claim.set(rate=rate)
    return claim


async def _for_ever(lane: Lane, make: Callable[[], Callable[[], None]]) -> None:
    work = await lane.run(make)
    pending: set[asyncio.Future[None]] = set()
    while True:  # two calls are always there, so that the lane wants its core again as soon as it gives it back
        while len(pending) < 2:
            pending.add(lane.run(work))
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


def _simulate(spec: EnvSpec) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        env = spec.make()
        env.reset(seed=0)
        action = np.zeros(spec.action.shape, np.float32)

        def work() -> None:
            until_s = time.perf_counter() + CALL_S
            while time.perf_counter() < until_s:
                env.step(action)

        return work

    return make


def _generate(spec: EnvSpec) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        torch.set_num_threads(1)
        policy = GaussianPolicy.for_spec(spec)
        assert not isinstance(spec.observation, dict)
        batch = policy.collate([np.zeros(spec.observation.shape, np.float32)] * NUM_ENVS)  # type: ignore[union-attr]
        noise = torch.zeros(NUM_ENVS, policy.noise_dim)

        def work() -> None:
            until_s = time.perf_counter() + CALL_S
            with torch.inference_mode():
                while time.perf_counter() < until_s:
                    policy.act(batch, noise)

        return work

    return make


def _train(spec: EnvSpec) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        torch.set_num_threads(1)
        policy = GaussianPolicy.for_spec(spec)
        batch = policy.collate([np.zeros(spec.observation.shape, np.float32)] * 256)  # type: ignore[union-attr]
        with torch.no_grad():
            aux = policy.act(batch, torch.zeros(256, policy.noise_dim)).aux
        optimizer = torch.optim.Adam(policy.parameters())

        def work() -> None:
            until_s = time.perf_counter() + 5 * CALL_S
            while time.perf_counter() < until_s:
                log_prob, value, _ = policy.evaluate(batch, aux)
                optimizer.zero_grad()
                (value.square().mean() - log_prob.mean()).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

        return work

    return make
