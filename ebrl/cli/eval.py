"""``ebrl eval``: how good the policy of a run is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ebrl.cli import folder as run_folder
from ebrl.cli.config import EvalConfig, TrainConfig, config_of
from ebrl.cli.train import build
from ebrl.core.records import by_task
from ebrl.core.rng import Domain, stream
from ebrl.core.run import run
from ebrl.core.runtime import Runtime
from ebrl.gen.generator import Generator
from ebrl.sim.group import EnvGroup
from ebrl.train.evaluate import EvalReport, evaluate


def eval_run(config: EvalConfig) -> int:
    """Run the command.

    Raises:
        EbrlError: The folder holds no run.
    """
    trained = read_config(config.run)
    specs, policy = build(trained)
    run_folder.load_policy(policy, config.run)

    async def main() -> EvalReport:
        async with Runtime(seed=config.seed) as rt:
            gen = rt.start(Generator(policy, deterministic=True))
            count = min(trained.num_envs, config.episodes * len(specs))
            envs = rt.start(EnvGroup(specs, actor=gen, count=count, lanes=trained.lanes))
            seeds = stream(config.seed, Domain.EVAL).integers(2**31, size=config.episodes)
            return await evaluate(envs, [int(seed) for seed in seeds])

    report, console = run(main()), Console()
    console.print(report.describe(), soft_wrap=True, highlight=False)
    if len(specs) > 1:
        for task, episodes in by_task(report.episodes).items():
            console.print(f"  {task}: {EvalReport(tuple(episodes)).describe()}", soft_wrap=True, highlight=False)
    return 0


def read_config(folder: Path, *more: str) -> TrainConfig:
    """Return the configuration of a run, as far as it describes environment and policy.

    Args:
        folder: Of the run.
        more: Further options to read.

    Raises:
        ConfigError: It holds none, or not ours.
    """
    names = {"env", "env_kwargs", "horizon", "action_repeat", "num_envs", "host", "lanes"}
    names |= {"hidden", "memory_size", "normalize_obs", *more}
    return config_of(run_folder.load_config(folder), folder, names)
