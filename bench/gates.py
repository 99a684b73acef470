"""Learning gates: does the learner learn, at every lag, what others publish for the same settings?

Hypothesis: asynchrony costs no score. With the settings that others publish, CartPole-v1 reaches a greedy mean of 475
over 20 episodes after 100,000 steps (rl-baselines3-zoo: 500 +- 0) and InvertedPendulum-v5 one of 950 after 150,000
(CleanRL after a million: 963 +- 22), at `max_lag` 0, 1 and 2, for each of three seeds; and on CartPole the area under
the return curve at lag 1 and 2 is at least 0.8 of that at lag 0, over five seeds. With ``--full`` also Reacher-v5
(-6 after 300,000), HalfCheetah-v5 (CleanRL's 1442 after a million), and CartPole with hidden velocities, where the
policy has to remember (400 after 100,000; the zoo's recurrent PPO: 500 +- 0, with the same settings).

The environment, policy and learner are real; the machine is virtual, with latencies that make one environment differ
from the next, so that the order of arrival and the lag are those of an asynchronous run, and every number here can be
reproduced exactly. The area is the mean over updates of the mean return of the last 20 episodes; a score is reached
when that mean first does.

    python -m bench.gates --json
    python -m bench.gates --only cartpole --json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation

from bench.report import Check, at_least, at_most, finish, parser, show, spread
from bench.runs import on_all_cores
from ebrl import PPO, EnvGroup, Generator, PPOConfig, Runtime, Trainer, VirtualMachine, env_spec, evaluate, run_virtual
from ebrl.gen.policies import TorchPolicy, default_policy

EVAL_EPISODES = 20
LATEST = 20  # episodes that a point of the return curve is the mean of
LAGS = (0, 1, 2)
SEEDS, AREA_SEEDS = 3, 5  # that must all pass, and over which areas are compared
AREA = 0.8  # of that at lag 0


@dataclass(frozen=True)
class Gate:
    """A task, its settings, and the score that it must reach.

    Attributes:
        steps: Environment steps of a run.
        bar: Greedy mean return after them.
        memory_size: Of the policy.
        full: Only with ``--full``, or when asked for by name.
        area: Whether the return curves of the lags are compared.
    """

    env: str | Callable[[], gymnasium.Env[Any, Any]]
    num_envs: int
    steps: int
    bar: float
    normalize_obs: bool
    config: Callable[[int, int], PPOConfig]
    memory_size: int = 0
    full: bool = False
    area: bool = False


@dataclass(frozen=True)
class Job:
    """One training run."""

    gate: str
    max_lag: int
    seed: int
    steps: int


def no_velocity() -> gymnasium.Env[Any, Any]:
    """CartPole-v1 of which only the positions are seen."""
    env = gymnasium.make("CartPole-v1")
    full = env.observation_space
    assert isinstance(full, spaces.Box)
    seen = [0, 2]
    space = spaces.Box(full.low[seen], full.high[seen], dtype=np.float32)
    return TransformObservation(env, lambda obs: obs[seen], space)


def zoo_cartpole(updates: int, seed: int) -> PPOConfig:
    """rl-baselines3-zoo, hyperparams/ppo.yml: 8 environments, 32 steps each per update."""
    return PPOConfig(
        batch_size=256,
        minibatch_size=256,
        epochs=20,
        learning_rate=1e-3,
        gamma=0.98,
        gae_lambda=0.8,
        clip_range=0.2,
        normalize_return=False,
        anneal_updates=updates,
        seed=seed,
    )


def zoo_no_velocity(updates: int, seed: int) -> PPOConfig:
    """The same in hyperparams/ppo_lstm.yml; the zoo's published policy was trained with all normalised."""
    return replace(zoo_cartpole(updates, seed), normalize_return=True)


def cleanrl_continuous(updates: int, seed: int) -> PPOConfig:
    """CleanRL, ppo_continuous_action.py, with 8 environments of 256 steps per update and not one of 2048."""
    return PPOConfig(
        batch_size=2048,
        minibatch_size=64,
        epochs=10,
        learning_rate=3e-4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        anneal_updates=updates,
        seed=seed,
    )


GATES = {
    "cartpole": Gate("CartPole-v1", 8, 100_000, 475.0, False, zoo_cartpole, area=True),
    "pendulum": Gate("InvertedPendulum-v5", 8, 150_000, 950.0, True, cleanrl_continuous),
    "recurrent": Gate(no_velocity, 8, 100_000, 400.0, True, zoo_no_velocity, memory_size=64, full=True),
    "reacher": Gate("Reacher-v5", 8, 300_000, -6.0, True, cleanrl_continuous, full=True),
    "halfcheetah": Gate("HalfCheetah-v5", 8, 1_000_000, 1442.0, True, cleanrl_continuous, full=True),
}


def machine(seed: int) -> VirtualMachine:
    """A step takes 5 ms with heavy tails, a batch 2 ms, an update about as long as its rollout."""
    return VirtualMachine(
        {
            "sim": lambda n, rng: 0.005 * rng.lognormal(-0.5, 1.0),
            "gen": lambda n, rng: 0.002 + 0.0001 * n,
            "train": lambda n, rng: 0.0008 * n,
        },
        num_cores=16,
        seed=seed,
    )


def run_job(job: Job) -> dict[str, Any]:
    """Train in virtual time, on one core."""
    torch.set_num_threads(1)
    began, gate = time.process_time(), GATES[job.gate]
    policy = default_policy(
        env_spec(gate.env), memory_size=gate.memory_size, normalize=gate.normalize_obs, seed=job.seed
    )
    run = run_virtual(train(gate, policy, job))
    return {**run, "max_lag": job.max_lag, "seed": job.seed, "cpu_s": time.process_time() - began}


async def train(gate: Gate, policy: TorchPolicy, job: Job) -> dict[str, Any]:
    """Train, then evaluate greedily."""
    spec, seed = env_spec(gate.env), job.seed
    updates = max(1, job.steps // gate.config(1, seed).batch_size)
    counts: Counter[int] = Counter()
    latest: deque[float] = deque(maxlen=LATEST)
    curve: list[tuple[int, float]] = []
    async with Runtime(machine(seed), seed=seed) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(spec, actor=gen, count=gate.num_envs))
        learner = PPO(policy, gate.config(updates, seed))
        async for report in rt.start(Trainer(envs, learner, updates=updates, max_lag=job.max_lag)):
            counts.update(dict(enumerate(report.lag_counts)))
            latest.extend(episode.total_reward for episode in report.episodes)
            if latest:
                curve.append((report.env_steps, float(np.mean(latest))))
        masked = report.dropped.get("masked", 0) / (report.update * report.num_decisions)
    async with Runtime(machine(seed), seed=seed) as rt:
        gen = rt.start(Generator(policy, deterministic=True))
        envs = rt.start(EnvGroup(spec, actor=gen, count=gate.num_envs))
        result = await evaluate(envs, range(10_000, 10_000 + EVAL_EPISODES))
    reached = [steps for steps, mean in curve if mean >= gate.bar]
    return {
        "greedy_return": result.mean_return,
        "area": float(np.mean([mean for _, mean in curve])) if curve else 0.0,
        "steps_to_score": reached[0] if reached else None,
        "lag_mean": sum(lag * num for lag, num in counts.items()) / counts.total(),
        "lag_max": max(lag for lag, num in counts.items() if num),
        "masked": masked,
        "updates": updates,
    }


def jobs_of(name: str, args: argparse.Namespace) -> list[Job]:
    """Return the runs of a gate."""
    gate = GATES[name]
    if args.smoke:
        return [Job(name, max_lag, args.seed, 2_000) for max_lag in LAGS[:2]]
    seeds = range(args.seed, args.seed + (AREA_SEEDS if gate.area else SEEDS))
    return [Job(name, max_lag, seed, gate.steps) for max_lag in LAGS for seed in seeds]


def judge(name: str, runs: Sequence[dict[str, Any]]) -> tuple[list[Check], dict[str, Any]]:
    """Return the bars of a gate, and its numbers."""
    gate, checks, data, areas = GATES[name], [], {}, {}
    for max_lag in LAGS:
        mine = [run for run in runs if run["max_lag"] == max_lag]
        if not mine:
            continue
        scores, areas[max_lag] = [run["greedy_return"] for run in mine], np.mean([run["area"] for run in mine])
        steps = [run["steps_to_score"] for run in mine if run["steps_to_score"] is not None]
        label = f"{name} max_lag {max_lag}"
        print(
            f"{label}: greedy return {show(spread(scores))}, area {areas[max_lag]:.4g}, steps to score "
            f"{show(spread(steps)) if steps else 'never'} ({len(steps)} of {len(mine)}), lag mean "
            f"{np.mean([run['lag_mean'] for run in mine]):.2f} max {max(run['lag_max'] for run in mine)}, "
            f"masked {np.mean([run['masked'] for run in mine]):.2%}"
        )
        checks.append(at_least(f"{label}: lowest greedy return of {SEEDS}", min(scores[:SEEDS]), gate.bar))
        checks.append(at_most(f"{label}: highest lag", max(run["lag_max"] for run in mine), max_lag))
        if gate.area and max_lag:
            ratio = float(areas[max_lag] / areas[0])
            checks.append(at_least(f"{label}: area over that at lag 0, {len(mine)} seeds", ratio, AREA))
        data[f"{name}-lag-{max_lag}"] = {"greedy_return": spread(scores), "runs": mine}
    return checks, data


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", choices=sorted(GATES), help="one gate instead of all")
    made.add_argument("--full", action="store_true", help="those too that take longer")
    args = made.parse_args()
    checks: list[Check] = []
    data: dict[str, Any] = {}
    names = [n for n, gate in GATES.items() if args.only == n or (args.only is None and (args.full or not gate.full))]
    jobs = [job for name in names for job in jobs_of(name, args)]
    runs = on_all_cores(run_job, jobs)
    for name in names:
        more, numbers = judge(name, [run for job, run in zip(jobs, runs, strict=True) if job.gate == name])
        checks += more
        data |= numbers
    return finish("gates", args, checks, data)


if __name__ == "__main__":
    sys.exit(main())
