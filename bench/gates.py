"""Learning gates: does the learner learn, at every lag, what others publish for the same settings?

Hypothesis: asynchrony costs no score. With the settings that others publish, CartPole-v1 reaches a greedy mean of 475
over 20 episodes after 100,000 steps (rl-baselines3-zoo: 500 +- 0) and InvertedPendulum-v5 one of 950 after 150,000
(CleanRL after a million: 963 +- 22), at `max_lag` 0, 1 and 2, for each of three seeds; and on CartPole the area under
the return curve at lag 1 and 2 is at least 0.8 of that at lag 0, over five seeds.

With ``--full`` also CartPole with hidden velocities, where the policy has to remember (400 after 100,000; the zoo's
recurrent PPO: 500 +- 0), Reacher-v5 (-6 after 300,000), HalfCheetah-v5 (CleanRL's 1442 after a million), Meta-World
push-v3 (success 0.85 on 100 seeds) and all ten tasks of MT10 with one policy, whose rates are printed.
Stable-Baselines3 runs beside them with the same settings and seeds, where it has the algorithm; all have five seeds
then, and are compared by interquartile means with 95 % bootstrap intervals (Agarwal et al. 2021, arXiv:2108.13264).
That needs ``pip install 'ebrl[bench,metaworld]'``, and hours.

The environment, policy and learner are real; the machine is virtual, with latencies that make one environment differ
from the next, so that the order of arrival is that of an asynchronous run, however busy the computer is. An update
takes longer than its rollout: so nearly all that is trained is as old as `max_lag` lets it be, at 2 as at 1.

The area is the mean over updates of the mean return of the last 20 episodes (of success: 100); a score is reached when
the mean of so many first does.

    python -m bench.gates --json
    python -m bench.gates --only cartpole --json
    python -m bench.gates --full --keep gates.jsonl --json   # stop it when you like; the same command goes on
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import sb3
from bench.keeping import on_all_cores_kept
from bench.report import Check, at_least, at_most, command, finish, interquartile_mean, interval, parser, show, spread
from bench.runs import on_all_cores
from bench.tasks import GATES, SMOKE, Gate
from ebrl import PPO, EnvGroup, EnvSpec, Generator, Runtime, Trainer, VirtualMachine, evaluate, run_virtual
from ebrl.core.records import Episode
from ebrl.gen.policies import TorchPolicy, default_policy

EVAL_SEED = 10_000
COMPARED_SEEDS = 5  # over which areas are compared, and systems
AREA = 0.8  # of that at lag 0
OLD = 0.9  # mean lag over `max_lag`: less would be a gate for fresher data than it says


@dataclass(frozen=True)
class Job:
    """One training run; without a `max_lag` it is Stable-Baselines3's."""

    gate: str
    max_lag: int | None
    seed: int
    smoke: bool

    @property
    def task(self) -> Gate:
        """What is trained."""
        return (SMOKE if self.smoke else GATES)[self.gate]

    @property
    def system(self) -> str:
        """By whom."""
        return "Stable-Baselines3" if self.max_lag is None else f"max_lag {self.max_lag}"


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        seed: Of the run.
        score: Of the greedy policy after training.
        task_scores: The same for each task.
        area: Mean of the curve.
        decisions_to_score: Trained when the curve first was at the bar.
        lag_mean: Versions, over all that was trained.
        lag_max: Versions.
        masked: Share that was too old to be trained.
        cpu_s: CPU time, evaluation included.
    """

    seed: int
    score: float
    task_scores: dict[str, float]
    area: float
    decisions_to_score: int | None
    lag_mean: float
    lag_max: int
    masked: float
    cpu_s: float


class Curve:
    """What is seen of a run: the mean score of the latest episodes after each update, and how old data were.

    Attributes:
        lags: Trained decisions by versions behind.
        masked: Decisions that were too old, as a part of those that were trained.
    """

    def __init__(self, gate: Gate) -> None:
        self.lags: Counter[int] = Counter()
        self.masked = 0.0
        self._gate = gate
        self._latest: deque[float] = deque(maxlen=gate.latest)
        self._points: list[tuple[int, float]] = []
        self._reached: int | None = None

    def add(self, decisions: int, episodes: Iterable[Episode | sb3.Finished]) -> None:
        """Take what has ended by the update that made it so many trained decisions."""
        for episode in episodes:
            self._latest.append(float(bool(episode.success)) if self._gate.success else episode.total_reward)
        if self._latest:
            mean, bar = float(np.mean(self._latest)), self._gate.bar
            self._points.append((decisions, mean))
            whole = len(self._latest) == self._gate.latest  # a few lucky ones are no score
            if self._reached is None and whole and bar is not None and mean >= bar:
                self._reached = decisions

    @property
    def area(self) -> float:
        return float(np.mean([mean for _, mean in self._points])) if self._points else 0.0

    @property
    def reached(self) -> int | None:
        return self._reached


def machine(seed: int) -> VirtualMachine:
    """A step takes 5 ms with heavy tails, a batch 2 ms, and an update longer than its rollout."""
    return VirtualMachine(
        {
            "sim": lambda n, rng: 0.005 * rng.lognormal(-0.5, 1.0),
            "gen": lambda n, rng: 0.002 + 0.0001 * n,
            "train": lambda n, rng: 0.0016 * n,
        },
        num_cores=16,
        seed=seed,
    )


def run_job(job: Job) -> Outcome:
    """Train on one core, ours in virtual time, and evaluate greedily."""
    torch.set_num_threads(1)
    began, gate, specs, curve = time.process_time(), job.task, job.task.specs(), Curve(job.task)
    if job.max_lag is None:
        policy = train_sb3(gate, specs[0], job.seed, curve)
    else:
        policy = run_virtual(train(gate, specs, job.seed, job.max_lag, curve))
    score, task_scores = run_virtual(judge_greedily(gate, specs, policy, job.seed))
    return Outcome(
        seed=job.seed,
        score=score,
        task_scores=task_scores,
        area=curve.area,
        decisions_to_score=curve.reached,
        lag_mean=sum(lag * num for lag, num in curve.lags.items()) / max(1, curve.lags.total()),
        lag_max=max((lag for lag, num in curve.lags.items() if num), default=0),
        masked=curve.masked,
        cpu_s=time.process_time() - began,
    )


async def train(gate: Gate, specs: Sequence[EnvSpec], seed: int, max_lag: int, curve: Curve) -> TorchPolicy:
    """Train with EBRL."""
    policy = default_policy(specs[0], memory_size=gate.memory_size, normalize=gate.normalize_obs, seed=seed)
    async with Runtime(machine(seed), seed=seed) as rt:
        gen = rt.start(Generator(policy))
        envs = rt.start(EnvGroup(specs, actor=gen, count=gate.num_envs))
        learner = PPO(policy, gate.config(gate.updates, seed))
        async for report in rt.start(Trainer(envs, learner, updates=gate.updates, max_lag=max_lag)):
            trained = report.update * report.num_decisions
            curve.add(trained, report.episodes)
            curve.lags.update(dict(enumerate(report.lag_counts)))
            curve.masked = report.dropped.get("masked", 0) / trained
    return policy


def train_sb3(gate: Gate, spec: EnvSpec, seed: int, curve: Curve) -> TorchPolicy:
    """Train with Stable-Baselines3."""
    config = gate.config(gate.updates, seed)
    model = sb3.Reference(spec, config, num_envs=gate.num_envs, normalize_obs=gate.normalize_obs, seed=seed)

    def on_update(update: int) -> None:
        curve.add(update * config.batch_size, model.finished)
        model.finished.clear()

    model.learn(gate.updates, on_update)
    model.close()
    return model.policy()


async def judge_greedily(
    gate: Gate, specs: Sequence[EnvSpec], policy: TorchPolicy, seed: int
) -> tuple[float, dict[str, float]]:
    """Return the score, and that of each task."""
    async with Runtime(machine(seed), seed=seed) as rt:
        gen = rt.start(Generator(policy, deterministic=True))
        envs = rt.start(EnvGroup(specs, actor=gen, count=gate.num_envs))
        found = await evaluate(envs, range(EVAL_SEED, EVAL_SEED + gate.episodes))
    if gate.success:
        return found.success_rate, found.task_success_rates
    return found.mean_return, found.task_returns


def jobs_of(name: str, args: argparse.Namespace) -> list[Job]:
    """Return the runs of a gate."""
    gate = (SMOKE if args.smoke else GATES)[name]
    systems: list[int | None] = [*gate.lags[:2]] if args.smoke else [*gate.lags]
    num = COMPARED_SEEDS if gate.area or (args.full and gate.peer) else gate.seeds
    if args.full and gate.peer:
        systems.append(None)
    seeds = range(args.seed, args.seed + (1 if args.smoke else num))
    return [Job(name, system, seed, args.smoke) for system in systems for seed in seeds]


def judge(gate: Gate, results: Sequence[tuple[Job, Outcome]]) -> tuple[list[Check], dict[str, Any]]:
    """Print the numbers of a gate; return its bars, and the numbers."""
    checks, data = list[Check](), dict[str, Any]()
    areas = dict[int, float]()
    for system in dict.fromkeys(job.system for job, _ in results):
        runs = [run for job, run in results if job.system == system]
        job = next(job for job, _ in results if job.system == system)
        label = f"{job.gate} {system}"
        data[f"{job.gate} {system}"] = numbers = summary(runs, job.seed)
        print(describe(label, gate, runs, numbers))
        if job.max_lag is None:
            continue
        areas[job.max_lag] = float(np.mean([run.area for run in runs]))
        if gate.bar is not None:
            lowest = min(run.score for run in runs)
            checks.append(at_least(f"{label}: lowest score of {len(runs)}", lowest, gate.bar))
        if gate.bar is not None and job.max_lag:
            mean_lag = min(run.lag_mean for run in runs)
            checks.append(at_least(f"{label}: lowest mean lag", mean_lag, OLD * job.max_lag))
        checks.append(at_most(f"{label}: highest lag", max(run.lag_max for run in runs), job.max_lag))
        if gate.area and job.max_lag:
            ratio = areas[job.max_lag] / areas[0]
            checks.append(at_least(f"{label}: area over that at lag 0, {len(runs)} seeds", ratio, AREA))
    return checks, data


def summary(runs: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """Return what is kept of the runs of one system."""
    scores, areas = [run.score for run in runs], [run.area for run in runs]
    return {
        "score": spread(scores),
        "score_iqm": asdict(interval(interquartile_mean, scores, seed=seed)),
        "area_iqm": asdict(interval(interquartile_mean, areas, seed=seed)),
        "runs": [asdict(run) for run in runs],
    }


def describe(label: str, gate: Gate, runs: Sequence[Outcome], numbers: dict[str, Any]) -> str:
    """Return a line, and one for each task where there are several."""
    steps = [run.decisions_to_score for run in runs if run.decisions_to_score is not None]
    scored = f"{show(spread(steps)) if steps else 'never'} ({len(steps)} of {len(runs)})"
    lags = f"lag mean {np.mean([run.lag_mean for run in runs]):.2f} max {max(run.lag_max for run in runs)}"
    text = (
        f"{label}: greedy {'success' if gate.success else 'return'} {show(numbers['score'])}, "
        f"area {np.mean([run.area for run in runs]):.4g}, decisions to score {scored}, {lags}, "
        f"masked {np.mean([run.masked for run in runs]):.2%}, CPU {show(spread([run.cpu_s for run in runs]), ' s')}"
    )
    if len(runs) >= COMPARED_SEEDS:
        text += f"\n  interquartile means of {len(runs)}:"
        for name in ("score", "area"):
            mean = numbers[f"{name}_iqm"]
            text += f" {name} {mean['value']:.4g} [{mean['low']:.4g} .. {mean['high']:.4g}]"
    if len(runs[0].task_scores) > 1:
        for task in runs[0].task_scores:
            text += f"\n  {task}: {show(spread([run.task_scores[task] for run in runs]))}"
    return text


def names(args: argparse.Namespace) -> list[str]:
    """Return the gates that are asked for; look whether they can be run, before a long run.

    Raises:
        ConfigError: A package is missing.
    """
    table = SMOKE if args.smoke else GATES
    wanted = [
        name
        for name, gate in table.items()
        if args.only == name or (args.only is None and (args.full or args.smoke or not gate.full))
    ]
    if args.full:
        sb3.require()
    for name in wanted:
        table[name].specs()
    return wanted


def main() -> int:
    return command(answer, arguments())


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--only", choices=sorted(GATES), help="one gate instead of all")
    made.add_argument("--full", action="store_true", help="those too that take longer, and Stable-Baselines3")
    made.add_argument("--keep", metavar="FILE", help="of runs that have ended: do not run those again")
    return made.parse_args()


def answer(args: argparse.Namespace) -> int:
    wanted = names(args)
    jobs = [job for name in wanted for job in jobs_of(name, args)]
    kept = args.keep and Path(args.keep)
    ended = on_all_cores_kept(run_job, jobs, Outcome, kept) if kept else on_all_cores(run_job, jobs)
    outcomes = list(zip(jobs, ended, strict=True))
    checks, data = list[Check](), dict[str, Any]()
    for name in wanted:
        results = [(job, run) for job, run in outcomes if job.gate == name]
        more, numbers = judge(results[0][0].task, results)
        checks += more
        data |= numbers
    return finish("gates", args, checks, data)


if __name__ == "__main__":
    sys.exit(main())
