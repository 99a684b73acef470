"""What data of exactly four versions ago cost a learner, and what the correction for their age gives back.

Hypothesis: at lag 4 decoupled PPO has at least 0.85 of the area under the return curve that it has at lag 0, and the
same loss without a correction at most 0.6, over 10 seeds. (Measured once before with a script of its own, over 3 seeds:
0.93 and 0.40.) Plain PPO, whose ratio is to the weights that acted, is shown beside them.

CartPole-v1 for 60,000 steps: batches of 512 (8 environments, 64 decisions each), 4 epochs of 2 minibatches, learning
rate 5e-4 throughout, gamma 0.98, lambda 0.95, clip 0.2; neither observations nor returns are normalised. Policy and
learner are the library's. The loop between them is not: it takes turns, and acts with the weights of exactly so many
versions ago (of the first ones at the beginning), so that nothing but the age of data differs. The area is the mean
over updates of the mean return of the last 20 episodes. Intervals are 95 % bootstrap intervals of the ratio of means,
seeds drawn in pairs.

    python -m bench.lag --json
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.barrier import World, collect
from bench.report import COUNT, Check, at_least, at_most, command, finish, parser, show, spread
from bench.runs import on_all_cores
from bench.survival import ratio
from ebrl import PPO, CategoricalPolicy, EnvSpec, PPOConfig, env_spec
from ebrl.core.records import TrainBatch
from ebrl.core.rng import NoiseStream
from ebrl.sim.simulator import Simulator
from ebrl.train.options import Objective

NUM_ENVS, LENGTH, UPDATES, LAG = 8, 64, 117, 4
LATEST = 20  # episodes
DECOUPLED_BAR, UNCORRECTED_BAR = 0.85, 0.6
CONFIG = PPOConfig(
    batch_size=NUM_ENVS * LENGTH,
    minibatch_size=256,
    epochs=4,
    learning_rate=5e-4,
    gamma=0.98,
    gae_lambda=0.95,
    value_coef=1.0,  # of half the squared error
    normalize_return=False,
)


@dataclass(frozen=True)
class Job:
    """One run."""

    objective: Objective
    lag: int
    seed: int
    updates: int


@dataclass(frozen=True)
class Curve:
    """What came of a run.

    Attributes:
        area: Mean over updates of the mean return of the latest episodes.
        tail: The same over the last fifth of the updates.
        ess: Mean effective sample size, as a part of the batch.
        square: Mean of ``(log w)**2``.
    """

    area: float
    tail: float
    ess: float
    square: float


def make_worlds(spec: EnvSpec, seed: int) -> tuple[list[World], deque[float]]:
    returns: deque[float] = deque(maxlen=LATEST)
    worlds = [World(index, seed, Simulator(spec), NoiseStream(seed, index), returns) for index in range(NUM_ENVS)]
    for world in worlds:
        world.reset()
    return worlds, returns


def run(job: Job) -> Curve:
    """Train with data of exactly one age."""
    torch.set_num_threads(1)
    logging.getLogger("ebrl").setLevel(logging.ERROR)  # that data are old is no news here
    spec = env_spec("CartPole-v1")
    policy, acting = (CategoricalPolicy.for_spec(spec, normalize=False, seed=job.seed) for _ in range(2))
    learner = PPO(policy, replace(CONFIG, objective=job.objective, seed=job.seed))
    worlds, returns = make_worlds(spec, job.seed)
    versions: deque[dict[str, torch.Tensor]] = deque(maxlen=job.lag + 1)
    curve: list[float] = []
    metrics = []
    for version in range(job.updates):
        versions.append({name: x.clone() for name, x in policy.state_dict().items()})
        acting.load_state_dict(versions[0])
        segments = collect(acting, worlds, version - len(versions) + 1, LENGTH)
        metrics.append(learner.update(TrainBatch(segments, version)))
        if returns:
            curve.append(float(np.mean(returns)))
    for world in worlds:
        world.simulator.close()
    ess, square = (
        float(np.mean([m[name] for m in metrics])) for name in ("behaviour_weight_ess", "log_weight_sq_mean")
    )
    return Curve(float(np.mean(curve)), float(np.mean(curve[-max(1, len(curve) // 5) :])), ess, square)


def main() -> int:
    return command(answer, arguments())


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--num-seeds", type=COUNT, default=10, help="of each system, from --seed on")
    return made.parse_args()


def answer(args: argparse.Namespace) -> int:
    seeds = range(args.seed, args.seed + (1 if args.smoke else args.num_seeds))
    systems: list[tuple[Objective, int]] = [("decoupled", 0), ("decoupled", LAG), ("uncorrected", LAG), ("ppo", LAG)]
    jobs = [Job(objective, lag, seed, 6 if args.smoke else UPDATES) for objective, lag in systems for seed in seeds]
    curves = on_all_cores(run, jobs)
    data: dict[str, Any] = {}
    areas: dict[Objective, float] = {}
    fresh = np.array([curve.area for curve in curves[: len(seeds)]])
    for number, (objective, lag) in enumerate(systems):
        ours = curves[number * len(seeds) : (number + 1) * len(seeds)]
        against = ratio(np.array([curve.area for curve in ours]), fresh, args.seed)
        areas[objective] = against.value
        area, tail = spread([curve.area for curve in ours]), spread([curve.tail for curve in ours])
        runs = [asdict(curve) for curve in ours]
        data[f"{objective}-lag-{lag}"] = {"area": area, "tail": tail, "of_lag_0": vars(against), "runs": runs}
        print(
            f"{objective} at lag {lag}: area {show(area)}, last fifth {show(tail)}, of lag 0 {against}, "
            f"ESS {np.mean([c.ess for c in ours]):.2f}, (log w)^2 {np.mean([c.square for c in ours]):.3f}"
        )
    checks: list[Check] = [
        at_least("decoupled at lag 4: area, of lag 0", areas["decoupled"], DECOUPLED_BAR),
        at_most("uncorrected at lag 4: area, of lag 0", areas["uncorrected"], UNCORRECTED_BAR),
    ]
    return finish("lag", args, checks, data)


if __name__ == "__main__":
    sys.exit(main())
