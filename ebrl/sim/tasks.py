"""Several tasks in one group of environments: which environment has which, and whether one policy serves them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ebrl.core.errors import ConfigError
from ebrl.core.records import ArraySpec, EnvSpec, Host
from ebrl.sim.awaited import check_awaited


def as_specs(spec: EnvSpec | Sequence[EnvSpec], *, batched: bool = False) -> tuple[EnvSpec, ...]:
    """Return one or several specs as a tuple, after a look at whether they go together.

    Args:
        spec: Or several.
        batched: Of batched simulators.

    Raises:
        ConfigError: There are none, or something else; several that differ in what they observe or how they act, or
            without a task; or they are of the other kind of simulators.
    """
    specs = tuple(spec) if isinstance(spec, Iterable) else (spec,)
    for each in specs:
        if not isinstance(each, EnvSpec):
            raise ConfigError(
                f"spec must be an EnvSpec, as env_spec(...) returns, or several of them, got {spec!r:.80}"
            )
        if each.num_slots and not batched:
            raise ConfigError(
                f"{each.id} is a batched simulator of {each.num_slots} slots, which no program of a single environment "
                "can drive: use VectorGroup"
            )
        if batched and not each.num_slots:
            raise ConfigError(f"{each.id} is no batched simulator: use EnvGroup, or env_spec(..., num_slots=8)")
    if not specs:
        raise ConfigError("no EnvSpec was given: give one, or a sequence of them")
    for index, other in enumerate(specs):
        if len(specs) > 1 and not other.task:
            raise ConfigError(
                f"spec {index} ({other.id}) has no task, by which several specs are told apart: "
                'env_spec(..., task="...")'
            )
        found = difference(specs[0], other)
        if found is not None:
            raise ConfigError(
                f"specs 0 ({specs[0].id}) and {index} ({other.id}) differ in {found}: "
                "one policy serves all of a group, so make them alike, or use a group each"
            )
    return specs


def spread(specs: Sequence[EnvSpec], count: int, group_size: int = 1) -> list[int]:
    """Return which spec each of `count` environments has: in turn, and the same for all of a group of `group_size`.

    Raises:
        ConfigError: Groups do not come out even, or a spec would have no environment.
    """
    if count % group_size:
        fits = count + -count % group_size
        raise ConfigError(f"count={count} is no multiple of group_size={group_size}: use count={fits}")
    if count < len(specs) * group_size:
        least = f"count must be at least {len(specs) * group_size}"
        raise ConfigError(f"count={count} leaves some of {len(specs)} specs without an environment: {least}")
    return [index // group_size % len(specs) for index in range(count)]


def chosen_host(specs: Sequence[EnvSpec], host: Host | None) -> Host:
    """Return where simulators run.

    Raises:
        ConfigError: They want different hosts and none is chosen, or the chosen one cannot run them.
    """
    for spec in specs:
        check_awaited(spec, host)
    if host == "auto" and any(spec.host == "inline" for spec in specs):
        host = None  # there is nothing to find out
    return host or common_host(specs)


def common_host(specs: Sequence[EnvSpec]) -> Host:
    """Return where all of them want to run.

    Raises:
        ConfigError: They do not agree.
    """
    for other in specs:
        if other.host != specs[0].host:
            raise ConfigError(
                f'{specs[0].id} wants host="{specs[0].host}", {other.id} host="{other.host}": give one to the group'
            )
    return specs[0].host


def check_even(tasks: Sequence[str]) -> None:
    """Check that equal shares of environments are equal shares of tasks.

    Raises:
        ConfigError: They are not.
    """
    counts = Counter(tasks)
    if len(set(counts.values())) > 1:
        (most, num), (least, few) = counts.most_common()[0], counts.most_common()[-1]
        raise ConfigError(
            f'sampling="quota" gives every environment the same share, but {most} has {num} of them and {least} {few}: '
            f"use a count that is a multiple of {len(counts)} tasks"
        )


def check_groups(name: str, group_size: int, quota: bool) -> None:
    """Check that a learner that compares episodes of groups can be served.

    Raises:
        ConfigError: There are no groups, or decisions are admitted one by one.
    """
    if group_size < 2:
        raise ConfigError(
            f"the learner compares episodes that begin alike, but every environment of {name} runs its own: give "
            "EnvGroup a group_size of at least 2"
        )
    if quota:
        raise ConfigError(
            'sampling="quota" counts decisions, but groups are admitted by episodes: use "weighted" or "arrival"'
        )


def difference(one: EnvSpec, other: EnvSpec) -> str | None:
    """Return in what two specs differ, as far as a policy is concerned; None if they are alike."""
    for name, form, found in (
        ("observation", one.observation, other.observation),
        ("action", one.action, other.action),
    ):
        parts, others = _parts(form), _parts(found)
        if parts.keys() != others.keys():
            return f"{name}: {_keys(form)} and {_keys(found)}"
        for key, part in parts.items():
            if part != others[key]:
                return f"{name}{f'[{key!r}]' if key else ''}: {_describe(part)} and {_describe(others[key])}"
    for name in ("low", "high"):
        bound, found_bound = getattr(one.action, name), getattr(other.action, name)
        if not np.array_equal(np.asarray(bound), np.asarray(found_bound)):
            return f"action.{name}: {bound} and {found_bound}"
    return None


def _parts(form: ArraySpec | Mapping[str, ArraySpec]) -> Mapping[str, ArraySpec]:
    return {"": form} if isinstance(form, ArraySpec) else form


def _keys(form: ArraySpec | Mapping[str, ArraySpec]) -> str:
    return "one array" if isinstance(form, ArraySpec) else f"a dictionary of {', '.join(sorted(form))}"


def _describe(spec: ArraySpec) -> str:
    values = "" if spec.num_values is None else f", {spec.num_values} values"
    return f"{spec.dtype} of shape {spec.shape}{values}"
