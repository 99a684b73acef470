"""Learning gates: does the learner learn, at every lag, what others publish for the same settings?

Hypothesis: asynchrony costs no score. With the settings of rl-baselines3-zoo, CartPole-v1 reaches a greedy mean of 475
over 20 episodes after 100,000 steps (the zoo reports 500 +- 0), with data of the same version and with data one
version old, for every seed. With ``--full`` also where velocities are hidden and the policy has to remember: a greedy
mean of 400 after 100,000 steps (the zoo's recurrent PPO: 500 +- 0, with the same settings).

The environment, policy and learner are real; the machine is virtual, with latencies that make one environment differ
from the next, so that the order of arrival and the lag are those of an asynchronous run, and every number here can be
reproduced exactly.

    python -m bench.gates --only cartpole --json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation

from bench.report import Check, at_least, finish, parser, spread
from ebrl import PPO, EnvGroup, Generator, PPOConfig, Runtime, Trainer, VirtualMachine, env_spec, evaluate, run_virtual
from ebrl.gen.policies import TorchPolicy, default_policy

EVAL_EPISODES = 20


@dataclass(frozen=True)
class Gate:
    """A task, its settings, and the score that it must reach.

    Attributes:
        steps: Environment steps of a run.
        bar: Greedy mean return after them.
        memory_size: Of the policy.
        full: Only with ``--full``, or when asked for by name.
    """

    env: str | Callable[[], gymnasium.Env[Any, Any]]
    num_envs: int
    steps: int
    bar: float
    normalize_obs: bool
    config: Callable[[int, int], PPOConfig]
    memory_size: int = 0
    full: bool = False


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


GATES = {
    "cartpole": Gate("CartPole-v1", 8, 100_000, 475.0, False, zoo_cartpole),
    "recurrent": Gate(no_velocity, 8, 100_000, 400.0, True, zoo_no_velocity, memory_size=64, full=True),
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


async def train(gate: Gate, policy: TorchPolicy, max_lag: int, steps: int, seed: int) -> dict[str, Any]:
    """Train, then evaluate greedily."""
    spec = env_spec(gate.env)
    updates = max(1, steps // gate.config(1, seed).batch_size)
    lags: list[float] = []
    returns: list[float] = []
    async with Runtime(machine(seed), seed=seed) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(spec, actor=gen, count=gate.num_envs))
        learner = PPO(policy, gate.config(updates, seed))
        async for report in rt.start(Trainer(envs, learner, updates=updates, max_lag=max_lag)):
            lags.append(report.lag_mean)
            returns += [episode.total_reward for episode in report.episodes]
    async with Runtime(machine(seed), seed=seed) as rt:
        gen = rt.start(Generator(policy, deterministic=True))
        envs = rt.start(EnvGroup(spec, actor=gen, count=gate.num_envs))
        result = await evaluate(envs, range(10_000, 10_000 + EVAL_EPISODES))
    return {
        "greedy_return": result.mean_return,
        "sampled_return": float(np.mean(returns[-20:])) if returns else 0.0,
        "lag_mean": float(np.mean(lags)),
        "updates": updates,
    }


def run_gate(name: str, gate: Gate, args: argparse.Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Run all seeds at all lags."""
    checks, data = [], {}
    steps = 2_000 if args.smoke else gate.steps
    for max_lag in (0, 1):
        runs = []
        for seed in range(args.seed, args.seed + (1 if args.smoke else 3)):
            began = time.process_time()
            policy = default_policy(
                env_spec(gate.env), memory_size=gate.memory_size, normalize=gate.normalize_obs, seed=seed
            )
            run = run_virtual(train(gate, policy, max_lag, steps, seed))
            runs.append({**run, "seed": seed, "cpu_s": time.process_time() - began})
            print(f"{name} max_lag {max_lag} seed {seed}: " + ", ".join(f"{k} {v:.4g}" for k, v in run.items()))
        scores = [run["greedy_return"] for run in runs]
        checks.append(at_least(f"{name} max_lag {max_lag}: lowest greedy return of {len(runs)}", min(scores), gate.bar))
        data[f"{name}-lag-{max_lag}"] = {"greedy_return": spread(scores), "runs": runs}
    return checks, data


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", choices=sorted(GATES), help="one gate instead of all")
    made.add_argument("--full", action="store_true", help="those too that take longer")
    args = made.parse_args()
    torch.set_num_threads(1)
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for name, gate in GATES.items():
        if args.only == name or (args.only is None and (args.full or not gate.full)):
            more, numbers = run_gate(name, gate, args)
            checks += more
            data |= numbers
    return finish("gates", args, checks, data)


if __name__ == "__main__":
    sys.exit(main())
