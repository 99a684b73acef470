"""``ebrl replay``: repeats a recorded run offline."""

from __future__ import annotations

from rich.console import Console

from ebrl.cli import folder as run_folder
from ebrl.cli.config import ReplayConfig
from ebrl.cli.eval import read_config
from ebrl.cli.train import build, build_learner
from ebrl.core.errors import ConfigError
from ebrl.replayer import replay


def replay_run(config: ReplayConfig) -> int:
    """Run the command.

    Returns:
        Exit status: 0, or 1 when something was not as recorded.

    Raises:
        EbrlError: The folder holds no recorded run.
    """
    trained = read_config(config.run, "seed", "ppo")
    log = config.run / run_folder.EVENTS
    if not log.is_file():
        raise ConfigError(f"{config.run} was not recorded: train with --record")
    specs, policy = build(trained)
    report = replay(log, specs[0], build_learner(trained, policy))  # only runs of one task are recorded
    Console().print(report.describe(), soft_wrap=True, highlight=False, markup=False)
    return 0 if report.mismatch is None else 1
