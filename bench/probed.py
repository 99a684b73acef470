"""A file of profiles as a workload: what ``ebrl probe`` or a run has measured on a machine, for the twin."""

from __future__ import annotations

from pathlib import Path

from bench.loading import SCHEMA, untrained
from bench.profiles import Within
from bench.workload import Workload
from ebrl.core.errors import ConfigError
from ebrl.core.machine import available_cores
from ebrl.core.meters import Latencies
from ebrl.core.profile import StageRecord
from ebrl.core.profile_file import SavedProfiles, load

ENDLESS = 1000  # steps of an episode where the file says nothing of resets


def load_probed(path: Path, num_envs: int, chunk: int = 1) -> Workload:
    """Return simulators and a policy as a file has them, on the cores of this computer, and nothing that is trained.

    Steps and resets are lognormal, with the mean of the file and the variation of its quantiles. The slowest 1/32
    counts as one value there, so that tails are lighter than they were: a lognormal of variation 2 becomes one of 1.6,
    and if one step in 200 takes 50 times as long, 2.8 becomes 1.0. Episodes are between half and one and a half times
    as long as there were steps for each reset.

    Args:
        path: Written by ``ebrl probe``, or ``profile.json`` of a run.
        num_envs: Environments.
        chunk: Environment steps of a decision; files do not say.

    Raises:
        ConfigError: There is no such file, it says nothing of simulators or of a policy, or numbers are out of range.
    """
    saved = load(path)
    step = find(saved, "step", "envs")
    if step is None:
        raise ConfigError(f"{path} knows no simulator: measure one with `ebrl probe ENV --out {path}`")
    gen = find(saved, "gen", "gen")
    if gen is None or not gen.fits:
        raise ConfigError(
            f"{path} knows no policy: measure that of a run with `ebrl probe FOLDER --out {path}`, or one that begins "
            f"with `ebrl probe ENV --policy --out {path}`"
        )
    reset = saved.find("reset", step.group)
    records = {
        "simulator": _clipped("simulator", simulator(step, reset)),
        "policy": _clipped("policy", {"fixed_s": gen.fits[0].a_s, "per_sample_s": gen.fits[0].b_s, "chunk": chunk}),
    }
    sources = {
        f"{section}.{name}": f"measured on {saved.machine}" for section, values in records.items() for name in values
    }
    name = f"{path.name} N={num_envs}"
    return untrained(str(path), name, num_envs, records, num_cores=available_cores(), sources=sources)


def find(saved: SavedProfiles, name: str, group: str) -> StageRecord | None:
    """Return the stage of that name and group, else the first of that name, of those that something is known of."""
    known = [stage for stage in saved.stages if stage.name == name and stage.quantiles_s]
    return next((stage for stage in known if stage.group == group), known[0] if known else None)


def simulator(step: StageRecord, reset: StageRecord | None) -> dict[str, float]:
    """Return what a simulator takes, by field of its profile."""
    found: dict[str, float] = {"step_s": step.mean_s, "step_cv": variation(step), "reset_s": 0.0, "reset_cv": 0.0}
    length: float = ENDLESS
    if reset is not None and reset.quantiles_s and reset.num and step.num:
        found |= {"reset_s": reset.mean_s, "reset_cv": variation(reset)}
        length = step.num / reset.num
    return {**found, "shortest_episode": round(max(1.0, 0.5 * length)), "horizon": round(max(1.0, 1.5 * length))}


def variation(record: StageRecord) -> float:
    """Return standard deviation over mean, as far as the quantiles show it."""
    latencies = Latencies()
    latencies.warm_start(record.quantiles_s, record.mean_s)
    return latencies.cv


def _clipped(section: str, values: dict[str, float]) -> dict[str, float]:
    rules = SCHEMA["simulators" if section == "simulator" else "policies"][section]
    return {name: rule.clip(value) for name, value in values.items() if isinstance(rule := rules[name], Within)}
