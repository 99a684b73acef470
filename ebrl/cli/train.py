"""``ebrl train``: from an environment id to a trained policy on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from rich.console import Console

from ebrl.cli import folder as run_folder
from ebrl.cli.config import TrainConfig
from ebrl.cli.progress import RunProgress
from ebrl.core.errors import ConfigError, EbrlError
from ebrl.core.profile_file import SavedProfiles, load
from ebrl.core.records import EnvSpec, UpdateReport
from ebrl.core.rng import Domain, stream
from ebrl.core.run import run
from ebrl.core.runtime import Runtime
from ebrl.core.trace import Trace
from ebrl.gen.generator import Generator
from ebrl.gen.policies import TorchPolicy, default_policy
from ebrl.sim.group import EnvGroup
from ebrl.sim.spec import env_specs
from ebrl.sim.tasks import check_even, spread
from ebrl.train.checkpoint import Checkpoint, Checkpointer
from ebrl.train.evaluate import EvalReport, evaluate
from ebrl.train.folders import locked
from ebrl.train.metrics import MetricsWriter, flatten, task_scalars
from ebrl.train.ppo import PPO
from ebrl.train.trainer import Trainer


def train(config: TrainConfig) -> int:
    """Run the command.

    Args:
        config: Of the run.

    Returns:
        Exit status: 0, or 3 when a target was set and not reached.

    Raises:
        EbrlError: The configuration cannot work; nothing was written.
    """
    console = Console()
    with ExitStack() as stack:  # the folder of the run stays locked
        if config.resume is None:
            run_folder.refuse_existing(config.folder)
        else:
            config = config.of_resumed(run_folder.load_config(config.resume))
            stack.enter_context(locked(config.folder))
        saves = Checkpointer(config.folder / run_folder.CHECKPOINTS)
        saved = newest(saves, config) if config.resume is not None else None
        known = profiles(config, console)
        specs, policy = build(config)
        if config.sampling == "quota":
            check_even([specs[i].task for i in spread(specs, config.num_envs)])
        if config.record and len(specs) > 1:
            raise ConfigError(f"{config.env} has {len(specs)} tasks, and a recorded run has one: leave out --record")
        learner = build_learner(config, policy)
        if saved is None:
            run_folder.create(config.folder, config)
            stack.enter_context(locked(config.folder))
        else:
            go_back(config, saved, learner, console)
        metrics = stack.enter_context(MetricsWriter(config.folder))
        session = Session(config, console, specs, policy, learner, metrics, saves, known, saved)
        with saving(session, config, console):
            run(session.main())
    return 0 if session.reached or not config.evaluates else 3


def profiles(config: TrainConfig, console: Console) -> SavedProfiles | None:
    """Return what the stages begin with.

    Raises:
        ConfigError: There is no such file, or it is not ours.
    """
    if config.profile is None:
        return None
    if config.resume is not None and not config.profile.exists():
        console.print(f"{config.profile} is gone: stages begin without profiles", soft_wrap=True, highlight=False)
        return None
    return load(config.profile)


def go_back(config: TrainConfig, saved: Checkpoint, learner: PPO, console: Console) -> None:
    """Bring learner and folder of a run to where its checkpoint is.

    Raises:
        CheckpointError: The learner has another form; nothing was written.
    """
    saved.restore(learner)
    run_folder.write_config(config.folder, config)
    run_folder.forget_after(config.folder, saved.update)
    if (config.folder / run_folder.EVENTS).is_file():
        console.print("the event log ends where the run did: what is resumed is not recorded", highlight=False)


def newest(saves: Checkpointer, config: TrainConfig) -> Checkpoint:
    """Return the checkpoint to go on with.

    Raises:
        ConfigError: There is none, or the run is complete.
        CheckpointError: None of them can be used.
    """
    saved = saves.latest()
    if saved is None:
        raise ConfigError(f"{config.folder} holds no checkpoint to go on with: it ended before the first one was due")
    if saved.update >= config.num_updates:
        raise ConfigError(f"{config.folder} has done its {saved.update} updates: ask for more in all with --updates")
    return saved


def describe(config: TrainConfig) -> tuple[EnvSpec, ...]:
    """Make the environment's description, or those of all tasks of a benchmark."""
    return env_specs(
        config.env,
        horizon=config.horizon,
        action_repeat=config.action_repeat,
        host=config.host,
        **config.parsed_env_kwargs(),
    )


def build(config: TrainConfig) -> tuple[tuple[EnvSpec, ...], TorchPolicy]:
    """Make the description of what is trained in, and an untrained policy for it."""
    specs = describe(config)
    return specs, new_policy(config, specs[0])


def new_policy(config: TrainConfig, spec: EnvSpec) -> TorchPolicy:
    """Make an untrained policy for an environment."""
    return default_policy(
        spec,
        hidden=config.hidden,
        memory_size=config.memory_size,
        normalize=config.normalize_obs,
        seed=config.seed,
    )


def build_learner(config: TrainConfig, policy: TorchPolicy) -> PPO:
    """Make the learner of a policy."""
    return PPO(policy, replace(config.ppo, seed=config.ppo.seed or config.seed))


@contextmanager
def saving(session: Session, config: TrainConfig, console: Console) -> Iterator[None]:
    """Save what was learned, however the run ends; that this fails hides no other error."""
    failed = True
    try:
        yield
        failed = False
    finally:
        try:
            path = run_folder.save_policy(session.learned(), config.folder)
            console.print(f"policy saved to {path}", soft_wrap=True, highlight=False, markup=False)
            session.save_notes()
        except EbrlError as error:
            if not failed:
                raise
            console.print(str(error), soft_wrap=True, highlight=False, markup=False)


class Session:
    """One run of the command."""

    def __init__(
        self,
        config: TrainConfig,
        console: Console,
        specs: Sequence[EnvSpec],
        policy: TorchPolicy,
        learner: PPO,
        metrics: MetricsWriter,
        saves: Checkpointer,
        known: SavedProfiles | None = None,
        saved: Checkpoint | None = None,
    ) -> None:
        self.reached = False
        self._config = config
        self._console = console
        self._specs = specs
        self._policy = policy
        self._learner = learner
        self._metrics = metrics
        self._saved = saved
        self._saves = saves
        self._trace = Trace() if config.trace else None
        self._runtime = Runtime(
            seed=config.seed,
            deterministic=config.deterministic,
            trace=self._trace,
            profile=known,
            record=config.folder / run_folder.EVENTS if config.record else None,
        )
        self._actor: Generator | None = None
        self._num_moves = 0
        self._told_host = False
        self._last = "no evaluation"
        self._evaluation: tuple[Generator, EnvGroup] | None = None

    def learned(self) -> torch.nn.Module:
        """The newest published version: whole even where an update was cut off."""
        if self._actor is None:
            return self._policy
        with self._actor.weights.lease() as lease:
            weights: torch.nn.Module = lease.weights
            return weights

    def save_notes(self) -> None:
        """Write what was found out about the stages, for the next run, and the trace if there is one."""
        self._runtime.profiles.save(self._config.folder / run_folder.PROFILE)
        if self._trace is not None:
            self._trace.save(self._config.folder / "trace.json")

    async def main(self) -> None:
        """Train until a target is reached or all updates are done."""
        config = self._config
        name = config.env if len(self._specs) > 1 else self._specs[0].id
        if self._saved is not None:
            name += f" from update {self._saved.update}"
        progress = RunProgress(self._console, name, config.num_updates)
        async with self._runtime as rt:
            self._actor = gen = rt.start(Generator(self._policy))
            envs = rt.start(self._group(gen, config.num_envs, "envs", spares=config.spares))
            io = rt.machine.lane("io", "metrics")
            trainer = rt.start(
                Trainer(
                    envs,
                    self._learner,
                    updates=config.num_updates,
                    max_lag=config.max_lag,
                    sampling=config.sampling,
                    resume=self._saved,
                )
            )
            if config.checkpoint_every:
                self._saves.attach(trainer)
            with progress:
                async for report in trainer:
                    statistics = rt.statistics()
                    scalars = flatten(report) | {f"tuner/{k}": v for k, v in statistics["tuner"].items()}
                    await io.run(self._metrics.write, report.env_steps, scalars, self._new_moves(rt))
                    progress.show(report, statistics)
                    self._tell_host(envs)
                    if config.evaluates and self._due(report, config.eval_every):
                        result = await self._evaluate(rt)
                        await io.run(self._metrics.write, report.env_steps, evaluation_scalars(report, result))
                        self._last = f"after update {report.update}, greedy: {result.describe()}"
                        progress.note(self._last)
                        self.reached = self._meets_target(result)
                    # After the evaluation: who is killed in it goes on before it, and does it again.
                    if config.checkpoint_every and self._due(report, config.checkpoint_every):
                        await self._saves.save(trainer)
                    if self.reached:
                        break
        self._say_how_it_ended(report)

    def _new_moves(self, rt: Runtime) -> list[str]:
        """Return what the tuner did since this was asked last."""
        num, self._num_moves = rt.tuning.num_moves - self._num_moves, rt.tuning.num_moves
        return [f"{move.time_s:.1f} s {move}" for move in rt.tuning.moves[-num:]] if num else []

    def _tell_host(self, envs: EnvGroup) -> None:
        """Say once where simulators run, if that was found out."""
        if envs.choice is not None and not self._told_host:
            self._told_host = True
            self._console.print(f"simulators run in {envs.choice}", soft_wrap=True, highlight=False, markup=False)

    def _group(self, actor: Generator, count: int, name: str, spares: int = 0) -> EnvGroup:
        lanes, failures = self._config.lanes, self._config.failures
        return EnvGroup(self._specs, actor=actor, count=count, spares=spares, lanes=lanes, failures=failures, name=name)

    def _due(self, report: UpdateReport, every: int) -> bool:
        return report.update % every == 0 or report.update == self._config.num_updates

    async def _evaluate(self, rt: Runtime) -> EvalReport:
        config = self._config
        if self._evaluation is None:
            gen = rt.start(Generator(self._policy, deterministic=True, name="eval-gen"))
            count = min(config.num_envs, config.eval_episodes * len(self._specs))
            envs = rt.start(self._group(gen, count, "eval-envs"))
            self._evaluation = gen, envs
        gen, envs = self._evaluation
        await gen.publish(self._policy)
        seeds = stream(config.seed, Domain.EVAL).integers(2**31, size=config.eval_episodes)
        result = await evaluate(envs, [int(seed) for seed in seeds])
        if config.target_success is not None and all(episode.success is None for episode in result.episodes):
            raise ConfigError(f"{self._specs[0].id} reports no success in its info: use --target-return instead")
        return result

    def _meets_target(self, result: EvalReport) -> bool:
        config = self._config
        success = config.target_success is None or result.success_rate >= config.target_success
        return success and (config.target_return is None or result.mean_return >= config.target_return)

    def _say_how_it_ended(self, report: UpdateReport) -> None:
        what = f"{report.update} updates, {report.env_steps:,} env steps in {report.elapsed_s:.1f} s"
        if self._config.evaluates:
            what = f"target {'reached' if self.reached else 'NOT reached'} after {what} ({self._last})"
        self._console.print(what, highlight=False)


def evaluation_scalars(report: UpdateReport, result: EvalReport) -> dict[str, float]:
    """Return what is written of an evaluation."""
    return {
        "update": report.update,
        "env_steps": report.env_steps,
        "elapsed_s": report.elapsed_s,
        "eval/return": result.mean_return,
        "eval/success_rate": result.success_rate,
        "eval/episodes": len(result.episodes),
        **task_scalars("eval", result),
    }
