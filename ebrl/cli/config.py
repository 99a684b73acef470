"""What ``ebrl train`` can be told; the same records that the library takes."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from ebrl.core.errors import ConfigError
from ebrl.core.records import Host
from ebrl.sim.failures import FailurePolicy
from ebrl.train.ppo import PPOConfig
from ebrl.train.sampling import Sampling

NESTED: Final[dict[str, Any]] = {"ppo": PPOConfig, "failures": FailurePolicy}
"""Options that are records of options."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a policy with PPO while its environments run.

    Attributes:
        env: Environment id, as in gymnasium; ``Meta-World/MT10`` and ``Meta-World/MT50`` have many tasks. Not
            needed where a run is resumed.
        env_kwargs: Passed to the environment; values are read as Python literals where they are some.
        horizon: Simulator steps after which an episode is truncated; default: the environment's own.
        action_repeat: Simulator steps for which each action is applied.
        num_envs: Environments.
        host: Where they run, or ``auto``: where they do more steps, which is tried out; default: what the environment
            wants.
        lanes: Threads or processes that share them; default: one thread each, or one process per core.
        spares: Further simulators that are reset ahead, at most as many as there are environments: for slow resets.
        hidden: Widths of the policy's hidden layers.
        memory_size: Numbers that actor and critic remember each within an episode; 0: none.
        normalize_obs: Scale observations by running statistics.
        ppo: Options of the learner.
        updates: Updates at most, those before a resume included; default: 200, or what the resumed run was told.
        max_lag: Versions that a trained decision may be behind; 0: synchronous.
        sampling: What is done about environments of different speed; default: weighted where there are several tasks.
        target_success: Stop when the greedy policy reaches this success rate on `eval_episodes` fixed seeds.
        target_return: Stop when the greedy policy reaches this mean return on them.
        eval_every: Updates between two evaluations, which are made where there is a target.
        eval_episodes: Episodes of an evaluation; of each task where there are several.
        seed: Of everything.
        deterministic: With ``--max-lag 0``: a run that depends on the seed alone.
        run_dir: Folder of this run; must not exist. Default: ``runs/<env>-<seed>``.
        trace: Write ``trace.json`` for ui.perfetto.dev.
        record: Write ``events.jsonl``, with which ``ebrl replay`` repeats the run.
        profile: Begin with what a file of profiles says: of ``ebrl probe``, or ``profile.json`` of an earlier run.
        checkpoint_every: Updates between two checkpoints, of which the last three are kept; 0: none.
        failures: What is done about a simulator that raises, hangs or dies.
        resume: Folder of a run to go on with, from its newest checkpoint and with its configuration.
    """

    env: str = ""
    env_kwargs: dict[str, str] = field(default_factory=dict)
    horizon: int | None = None
    action_repeat: int = 1
    num_envs: int = 16
    host: Host | None = None
    lanes: int | None = None
    spares: int = 0
    hidden: tuple[int, ...] = (64, 64)
    memory_size: int = 0
    normalize_obs: bool = True
    ppo: PPOConfig = field(default_factory=PPOConfig)
    updates: int | None = None
    max_lag: int = 1
    sampling: Sampling | None = None
    target_success: float | None = None
    target_return: float | None = None
    eval_every: int = 10
    eval_episodes: int = 100
    seed: int = 0
    deterministic: bool = False
    run_dir: Path | None = None
    trace: bool = False
    record: bool = False
    profile: Path | None = None
    checkpoint_every: int = 10
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    resume: Path | None = None

    def __post_init__(self) -> None:
        if not self.env and self.resume is None:
            raise ConfigError("no environment '': name one with --env, or a run to go on with: --resume FOLDER")
        for name in ("num_envs", "lanes", "updates", "horizon", "eval_every", "eval_episodes", "action_repeat"):
            at_least(name, getattr(self, name), 1)
        for name in ("max_lag", "memory_size", "seed", "checkpoint_every", "spares"):
            at_least(name, getattr(self, name), 0)
        if self.spares > self.num_envs:
            raise ConfigError(f"--spares {self.spares} are more than environments: --num-envs {self.num_envs}")
        for name in sorted({"action_repeat", "horizon", "host", "task"} & self.env_kwargs.keys()):
            raise ConfigError(
                f"--env-kwargs {name}: that is no option of the environment; use --{name.replace('_', '-')}"
            )
        for width in self.hidden:
            at_least("hidden", width, 1)
        if self.target_success is not None and not 0 < self.target_success <= 1:
            raise ConfigError(f"--target-success must be between 0 and 1, got {self.target_success}")
        if self.target_return is not None and not math.isfinite(self.target_return):
            raise ConfigError(f"--target-return must be a finite number, got {self.target_return}")
        if self.seed >= 2**63:
            raise ConfigError(f"--seed must be below 2**63, got {self.seed}")
        if self.deterministic and self.max_lag:
            raise ConfigError("--deterministic needs --max-lag 0: with lag, data depend on who was ready first")
        equal = "--deterministic" if self.deterministic else "--sampling quota" if self.sampling == "quota" else None
        if equal and self.failures.action == "drop":
            raise ConfigError(f"{equal} needs all environments: use --failures.action restart or raise")
        if equal and self.ppo.batch_size % self.num_envs:
            raise ConfigError(
                f"{equal} shares a batch equally: --ppo.batch-size {self.ppo.batch_size} is no multiple of "
                f"--num-envs {self.num_envs}"
            )

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        if self.run_dir is not None:
            return self.run_dir
        name = "-".join([self.env, *self.env_kwargs.values(), str(self.seed)])
        return Path("runs") / "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in name)

    @property
    def num_updates(self) -> int:
        """Updates at most."""
        return 200 if self.updates is None else self.updates

    def of_resumed(self, record: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of the run that this one resumes.

        Args:
            record: As `ebrl.cli.folder.write_config` wrote it.

        Raises:
            ConfigError: The record is not ours.
        """
        assert self.resume is not None
        saved = config_of(record, self.resume)
        updates = self.updates or saved.updates
        return replace(saved, resume=self.resume, run_dir=self.resume, updates=updates, record=False)

    @property
    def evaluates(self) -> bool:
        """Whether there is a target to look for."""
        return self.target_success is not None or self.target_return is not None

    def parsed_env_kwargs(self) -> dict[str, Any]:
        """`env_kwargs` with Python literals read."""
        return {name: _literal(text) for name, text in self.env_kwargs.items()}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluate the policy of a run greedily, on fixed seeds; every episode that starts counts.

    Attributes:
        run: Folder of a run of ``ebrl train``.
        episodes: How many.
        seed: Of the list of episodes.
    """

    run: tyro.conf.Positional[Path]
    episodes: int = 100
    seed: int = 1

    def __post_init__(self) -> None:
        at_least("episodes", self.episodes, 1)
        at_least("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Repeat a run that was recorded, offline and without its timing, and compare every decision and all weights.

    Attributes:
        run: Folder of a run of ``ebrl train --record``.
    """

    run: tyro.conf.Positional[Path]


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Measure an environment or a policy on this machine, and write the profile that runs and the twin begin with.

    Attributes:
        target: Folder of a run of ``ebrl train``: its policy is measured. Anything else is the id of an environment.
        env_kwargs: Passed to the environment; values are read as Python literals where they are some.
        horizon: Simulator steps after which an episode is truncated; default: the environment's own.
        host: Where simulators run, or ``auto``, as for ``ebrl train``; default: what the environment wants.
        policy: Measure also the policy that ``ebrl train`` would begin with in this environment.
        hidden: Widths of the hidden layers of that policy; default: those of ``ebrl train``.
        memory_size: Numbers that its actor and critic remember each; default: none.
        max_batch: Most rows of a batch; default: 64.
        seconds: That simulators are measured for, and so long the policy.
        seed: Of episodes, actions and observations.
        out: File to write. What it says of other stages stays.
    """

    target: tyro.conf.Positional[str]
    env_kwargs: dict[str, str] = field(default_factory=dict)
    horizon: int | None = None
    host: Host | None = None
    policy: bool = False
    hidden: tuple[int, ...] | None = None
    memory_size: int | None = None
    max_batch: int | None = None
    seconds: float = 5.0
    seed: int = 0
    out: Path = Path("profile.json")

    def __post_init__(self) -> None:
        at_least("max_batch", self.max_batch, 1)
        at_least("memory_size", self.memory_size, 0)
        at_least("seed", self.seed, 0)
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"--seconds must be a number above 0, got {self.seconds}")

    def as_run(self) -> TrainConfig:
        """Return what a run in this environment would be told."""
        return TrainConfig(
            env=self.target,
            env_kwargs=self.env_kwargs,
            horizon=self.horizon,
            host=self.host,
            hidden=TrainConfig.hidden if self.hidden is None else self.hidden,
            memory_size=self.memory_size or 0,
            seed=self.seed,
        )


def config_of(record: Mapping[str, Any], folder: Path, names: Iterable[str] | None = None) -> TrainConfig:
    """Return the configuration of a run.

    Args:
        record: As `ebrl.cli.folder.write_config` wrote it.
        folder: Of the run, for messages.
        names: Options that are read, if they are there; default: all.

    Raises:
        ConfigError: The record is not ours.
    """
    hints = get_type_hints(TrainConfig)
    wanted = hints.keys() - {"resume", "run_dir"} if names is None else set(names)
    values = {name: value for name, value in record.items() if name in wanted}
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ConfigError(f"config.json in {folder} is not what `ebrl train` wrote: {name} is {value!r}")
    try:
        for name, kind in NESTED.items():
            if name in values:
                values[name] = kind(**values[name])
        if values.get("profile") is not None:
            values["profile"] = Path(values["profile"])
        return TrainConfig(**{**values, "hidden": tuple(values["hidden"])})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"config.json in {folder} is of another version of EBRL: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether JSON of this form is that of a field."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):  # a union with a Literal is the former
        return any(_fits(value, part) for part in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint in NESTED.values():
        return isinstance(value, dict)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is {Path: str}.get(hint, hint)


def at_least(name: str, value: int | None, bound: int) -> None:
    """Check an option.

    Raises:
        ConfigError: It is too small; None is not.
    """
    if value is not None and value < bound:
        raise ConfigError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
