"""Schedulers of other systems, modelled on the same hardware: what EBRL is compared with.

Each is an ``async def run(hardware, ...)`` that rolls out, and trains where the workload says so, until it is
cancelled. Each models one published system as its code has it, and leaves out costs of that system where in doubt; the
docstring of each module says what is as there, what is kinder, and where the code is.

================================== ==========================================================================
``lockstep``                       all units step, then one batch of all; updates in between (RLinf, default)
``pipeline:K``                     the same in K stages that overlap (RLinf, ``pipeline_stage_num``)
``async-train[:K[,G]]``            the same beside training, which has all but G of the SM units (RLinf, asynchronous)
``size-timeout:B,T[,G]``           batches of B environments or after T seconds, barrier after every rollout (RL-VLA3)
``size-timeout-free:B,T[,G]``      the same without the barrier
``wait-num:K``                     batches of the first K units that are ready (EnvPool)
``tianshou:K``                     the same with resets that all wait for (tianshou)
``ver[:W]``                        W inference workers with thresholds that set themselves (VER)
``ver-overlap[:W]``                the same beside training
================================== ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bench.baselines import async_train, lockstep, pipeline, size_timeout, ver, wait_num
from bench.hardware import Hardware
from bench.workload import Workload
from ebrl.core.errors import ConfigError

Scheduler: TypeAlias = Callable[[Hardware], Coroutine[Any, Any, None]]
"""Runs until it is cancelled, which is when ``hardware.tally.done`` is set."""

OFF_S = 1e3  # a timeout that never matters


@dataclass(frozen=True)
class Family:
    """A scheduler and the settings that its name may be followed by.

    Attributes:
        run: With the hardware first, and then the settings in order.
        kinds: Of the settings: int, at least 1, or float, at least 0.
        least: How many of them must be given.
        form: To show.
        fixed: Settings that belong to the name.
    """

    run: Callable[..., Coroutine[Any, Any, None]]
    kinds: tuple[type[int | float], ...]
    least: int
    form: str
    fixed: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "lockstep": Family(lockstep.run, (), 0, "lockstep"),
    "pipeline": Family(pipeline.run, (int,), 1, "pipeline:K"),
    "async-train": Family(async_train.run, (int, int), 0, "async-train[:K[,G]]"),
    "size-timeout": Family(size_timeout.run, (int, float, int), 2, "size-timeout:B,T[,G]"),
    "size-timeout-free": Family(
        size_timeout.run, (int, float, int), 2, "size-timeout-free:B,T[,G]", {"epoch_barrier": False}
    ),
    "wait-num": Family(wait_num.run, (int,), 1, "wait-num:K"),
    "tianshou": Family(wait_num.run, (int,), 1, "tianshou:K", {"blocking_reset": True}),
    "ver": Family(ver.run, (int,), 0, "ver[:W]"),
    "ver-overlap": Family(ver.run, (int,), 0, "ver-overlap[:W]", {"overlap": True}),
}


def parse(text: str) -> Scheduler:
    """Return the scheduler of a name with its settings, such as ``pipeline:2``.

    Raises:
        ConfigError: There is none of that name, or the settings are not those that it takes.
    """
    name, _, rest = text.partition(":")
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(f"there is no scheduler {text!r}; there are {_forms()}")
    words = rest.split(",") if rest else []
    try:
        values = [_value(kind, word) for kind, word in zip(family.kinds, words, strict=False)]
    except ValueError:
        values = []
    if not family.least <= len(words) <= len(family.kinds) or len(values) < len(words):
        raise ConfigError(f"{text!r} is not of the form {family.form}; there are {_forms()}")
    return _scheduler(family, values)


def _scheduler(family: Family, values: list[float]) -> Scheduler:
    def scheduler(hardware: Hardware) -> Coroutine[Any, Any, None]:
        return family.run(hardware, *values, **family.fixed)

    return scheduler


def _value(kind: type[int | float], word: str) -> float:
    value = kind(word)
    if not (1 if kind is int else 0) <= value < float("inf"):
        raise ValueError(word)
    return value


def _forms() -> str:
    return ", ".join(family.form for family in FAMILIES.values())


def settings(name: str, workload: Workload) -> list[str]:
    """Return the settings of a family that are worth trying on a workload, at most twelve, each for `parse`.

    Raises:
        ConfigError: There is no such family.
    """
    num, slots = workload.num_units, workload.simulator.slots_per_unit
    shares = _quarters(workload.machine.sm_units) if workload.training else []
    match name:
        case "lockstep":
            return [name]
        case "pipeline":
            return [f"{name}:{k}" for k in (1, 2, 4) if k <= num]
        case "async-train":
            return [f"{name}:{k}{share}" for k in (1, 2, 4) if k <= num for share in ("", *shares)]
        case "size-timeout" | "size-timeout-free":
            share = shares[len(shares) // 2 : len(shares) // 2 + 1]
            return [
                f"{name}:{size * slots},{time_s:g}{g}" for size, time_s in _sizes(num, not share) for g in ("", *share)
            ]
        case "wait-num" | "tianshou":
            return [f"{name}:{k}" for k in _distinct(num // 8, num // 4, num // 2, 3 * num // 4, num)]
        case "ver" | "ver-overlap":
            return [f"{name}:{workers}" for workers in (1, 2, 4) if workers <= num]
        case _:
            raise ConfigError(f"there is no scheduler {name!r}; there are {', '.join(FAMILIES)}")


def _quarters(units: int) -> list[str]:
    return [f",{share}" for share in _distinct(units // 4, units // 2, 3 * units // 4) if share < units]


def _distinct(*numbers: int) -> list[int]:
    return sorted({max(1, number) for number in numbers})


def _sizes(num: int, many: bool) -> list[tuple[int, float]]:
    # Sizes with the timeout off, then timeouts with sizes that are hardly reached.
    sizes = [
        (size, OFF_S) for size in (_distinct(1, 2, 4, 8, num // 4, num // 2) if many else _distinct(2, 8, num // 4))
    ]
    times = [(num, 0.0005), (num, 0.02), (num, 0.2)]
    times += [(num, 0.1), (num // 2, 0.02), (num // 8, 0.02)] if many else []
    return [(size, time_s) for size, time_s in dict.fromkeys([*sizes, *times]) if 1 <= size <= num]
