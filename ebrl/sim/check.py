"""`check_env`: a conformance check for your own environment, to be run before a training run depends on it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np

from ebrl.core.errors import ConfigError, SimulatorError
from ebrl.core.records import Array, EnvSpec, Observation, StepResult
from ebrl.core.rng import Domain, episode_seed, stream
from ebrl.sim.awaited import Apart, AwaitedSimulator
from ebrl.sim.link import unsendable
from ebrl.sim.simulator import Simulator
from ebrl.sim.spec import is_numeric

MAX_STEPS = 10_000
"""Simulator steps without an end after which an episode counts as endless."""


def check_env(spec: EnvSpec, *, episodes: int = 2, seed: int = 0) -> None:
    """Play some episodes and look for what would go wrong in a run.

    Checked: spaces, dtypes and numbers of every step; that every episode ends; that a seed reproduces an episode bit
    for bit, in another instance and after other episodes; that the environment can be closed, and sent to a process
    where `spec` asks for one. (An observation buffer that is used again does no harm: `Simulator` copies.)

    Args:
        spec: From `ebrl.env_spec`.
        episodes: How many to play.
        seed: From which their seeds and random actions are keyed.

    Raises:
        ConfigError: `episodes` below 1, a batched simulator, or it cannot be sent to a process.
        SimulatorError: The first violation, in one line.
    """
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1, got {episodes}")
    if spec.num_slots:
        raise ConfigError(f"{spec.id} is a batched simulator: use check_vector_env")
    if spec.host == "process":
        _check_transfer(spec)
    with ExitStack() as stack:
        make: Callable[[], Simulator | _Blocking] = partial(Simulator, spec)
        if spec.host == "inline":
            make = partial(_Blocking, spec, stack.enter_context(Apart()))
        first = stack.enter_context(closing(make()))
        seeds = [episode_seed(seed, 0, index) for index in range(episodes)]
        played = [_play(first, spec, each) for each in seeds]
        _compare(spec, played[0], _play(first, spec, seeds[0]), "when played again, after other episodes")
        second = stack.enter_context(closing(make()))
        _compare(spec, played[-1], _play(second, spec, seeds[-1]), "in another instance")


class _Blocking:
    """A simulator that is awaited, for those who cannot."""

    def __init__(self, spec: EnvSpec, apart: Apart) -> None:
        self._run = apart.run
        self._simulator = apart.run(AwaitedSimulator.build(spec))

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        return self._run(self._simulator.reset(seed))

    def step(self, actions: Array) -> StepResult:
        return self._run(self._simulator.step(actions))

    def close(self) -> None:
        self._run(self._simulator.close())


def _play(sim: Simulator | _Blocking, spec: EnvSpec, seed: int) -> list[Any]:
    obs, info = sim.reset(seed)
    _check_info(spec, info)
    trace: list[Any] = [obs]
    num_steps = 0
    for action in random_actions(spec, seed):
        result = sim.step(action)
        trace += [(result.rewards, result.terminated, result.truncated, _numbers(spec, result)), result.obs]
        num_steps += result.num_steps
        if result.terminated or result.truncated:
            return trace
        if num_steps >= MAX_STEPS:
            break
    raise SimulatorError(f"{spec.id}: no end after {num_steps} steps: give env_spec(..., horizon=...)")


def random_actions(spec: EnvSpec, seed: int) -> Iterator[Array]:
    """Yield legal actions ``[1, *shape]`` for ever, uniform where the space has bounds."""
    rng = stream(seed, Domain.PROGRAM)
    form = spec.action
    while True:
        if form.num_values is not None:
            yield np.array([rng.integers(form.num_values)], form.dtype)
            continue
        low = -1.0 if form.low is None else np.maximum(form.low, -1e3)
        high = 1.0 if form.high is None else np.minimum(form.high, 1e3)
        yield rng.uniform(low, high, (1, *form.shape)).astype(form.dtype)


def _compare(spec: EnvSpec, expected: list[Any], found: list[Any], when: str) -> None:
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if not _equal(one, other):
            what = "observation" if index % 2 == 0 else "reward, flags or info"
            raise SimulatorError(
                f"{spec.id}: the same seed and actions gave another {what} at step {(index + 1) // 2} {when}: "
                "draw everything random from self.np_random, seeded in reset"
            )
    if len(expected) != len(found):
        raise SimulatorError(f"{spec.id}: the same seed and actions gave an episode of another length {when}")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _numbers(spec: EnvSpec, result: StepResult) -> dict[str, float]:
    _check_info(spec, result.info)
    return {key: float(result.info[key]) for key in spec.info_keys if key in result.info}


def _check_info(spec: EnvSpec, info: dict[str, Any]) -> None:
    for key in spec.info_keys:
        if key in info and not is_numeric(key, info[key]):
            raise SimulatorError(f"{spec.id}: info[{key!r}] was a number in the first step, now {info[key]!r:.60}")
    success = info.get("success", False)
    if not is_numeric("success", success):
        raise SimulatorError(f"{spec.id}: info['success'] must be a bool, got {success!r:.60}")


def _check_transfer(spec: EnvSpec) -> None:
    try:
        pickle.loads(pickle.dumps(spec))
    except (pickle.PicklingError, AttributeError, TypeError, ImportError) as error:
        raise unsendable(f"{spec.id}: make={spec.make!r}", error) from error
