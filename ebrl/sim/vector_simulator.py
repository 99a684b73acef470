"""`VectorSimulator`: one batched simulator with EBRL's checks at its border; runs on a lane.

It is a ``gymnasium.vector.VectorEnv`` of M slots that never resets a slot by itself (``AutoresetMode.DISABLED``) and
resets some of them when asked (``options={"reset_mask": mask}``), as gymnasium 1.1 and later have it. So the last
observation of an episode is never lost, and whoever drives it says which episode comes next.

A batched simulator steps all slots or none. A slot whose episode has ended before the others' chunk has, or that has no
episode to run, is carried along: it is reset where the simulator would not be stepped otherwise, and nobody sees what
it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from ebrl.core.errors import ConfigError, InvalidAction, InvalidData, SimulatorError
from ebrl.core.records import Array, ArraySpec, EnvSpec, Observation
from ebrl.sim.border import (
    MOST_REWARD,
    SUCCESS,
    ActionReader,
    as_actions,
    as_flag,
    describe,
    observation_reader,
    within,
)
from ebrl.sim.simulator import construction_lock

SLOT_SEEDS = "slot_seeds"
"""Entry of ``metadata``: False where a reset takes one seed, and not one per slot."""
CARRIED = 0
"""Seed of the episodes that nobody sees."""


@dataclass(slots=True)
class VectorStep:
    """What a batched simulator returned for one chunk.

    Attributes:
        obs: ``[M, ...]`` after the last step that each slot executed; the true final one where its episode ended.
        rewards: Of each slot one per executed step; none where it was only carried along.
        terminated: ``[M]`` bool, as in `ebrl.core.records.StepResult`.
        truncated: ``[M]`` bool.
        success: Of each slot what ``info`` said, True if it did in any of the steps; None if it did not say.
        info: Of the last step, as gymnasium has it.
        num_steps: Of the simulator.
    """

    obs: Observation
    rewards: list[tuple[float, ...]]
    terminated: Array
    truncated: Array
    success: list[bool | None]
    info: dict[str, Any]
    num_steps: int


class VectorSimulator:
    """One batched simulator. Not thread-safe: one lane owns it for life."""

    def __init__(self, spec: EnvSpec) -> None:
        """Build it; waits for other constructions of this process.

        Args:
            spec: What to build, and what to expect of it. Whatever ``spec.make`` raises leaves unchanged.

        Raises:
            ConfigError: It is no batched simulator of that many slots, or resets slots by itself.
        """
        self.spec = spec
        num = spec.num_slots
        self._actions = _ChunkReader(spec.action, num)
        self._read = observation_reader(stacked(spec.observation, num))
        self._left = np.zeros(num, np.int64)  # steps until the horizon
        self._running = np.zeros(num, np.bool_)  # slots whose episode goes on
        self._over = np.zeros(num, np.bool_)  # slots that the simulator would not step before their reset
        self._last: Any = None  # what the simulator has returned; never handed out, so that nobody else works in it
        self._instead: list[tuple[Array, Observation]] = []  # what some slots saw instead; likewise
        self._why = "step before reset: call reset first"
        with construction_lock:
            self._env: Any = spec.make()
        if accept(self._env, spec.id) != num:
            raise ConfigError(f"{spec.id}: expected {num} slots, got {self._env.num_envs}")

    def reset(self, seeds: Mapping[int, int]) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in some slots; the others go on where they are.

        Args:
            seeds: By slot; at least one.

        Returns:
            What all slots see now, and ``info`` as gymnasium has it. Of slots whose episodes have ended and that are
            not reset, anything.
        """
        mask = np.zeros(self.spec.num_slots, np.bool_)
        mask[list(seeds)] = True
        running, self._running = self._running, np.zeros_like(mask)
        self._why = "step after an error: call reset first"
        others = running & ~mask  # a masked reset may return anything for them, and overwrite what was there
        instead = [(others, self._seen())] if others.any() else []
        self._last, info = self._reset(mask, seeds)
        self._instead = instead
        seen = self._seen()
        self._left[mask] = np.iinfo(np.int64).max if self.spec.horizon is None else self.spec.horizon
        self._running = running | mask
        return seen, dict(info)

    def step(self, actions: Array, finite: bool = False) -> VectorStep:
        """Execute a chunk in every slot until its end or the end of the slot's episode, whichever is first.

        Args:
            actions: ``[M, H, *action.shape]``, or ``[M, *action.shape]`` for one; each is applied `action_repeat`
                times.
            finite: They are said to be finite; here that is looked at in any case.

        Raises:
            InvalidAction: Actions contradict the spec.
            InvalidData: Observations, rewards or success contradict it.
            SimulatorError: No episode is running, or the simulator broke its interface.
        """
        if not self._running.any():
            raise SimulatorError(self._why)
        chunk = self._actions.chunk(actions)
        run, self._running = self._running, np.zeros_like(self._running)
        self._why = "step after an error: call reset first"
        played = self._execute(chunk, run)
        self._running = run & ~(played.terminated | played.truncated)
        self._why = "step after the end of all episodes: call reset first"
        return played

    def call(self, fn: Callable[[Any], Any]) -> Any:
        """Return ``fn(env)``, where `env` is what ``spec.make`` returned."""
        return fn(self._env)

    def close(self) -> None:
        """Close it."""
        self._running = np.zeros_like(self._running)
        self._why = "step after close"
        self._env.close()

    def _execute(self, chunk: Array, run: Array) -> VectorStep:
        rewards: list[Array] = []
        ran: list[Array] = []
        ended: list[tuple[Array, Observation]] = []  # slots, and what all saw when their episodes ended
        terminated, truncated = np.zeros_like(run), np.zeros_like(run)
        success = np.full(len(run), -1, np.int8)
        for action in _repeated(chunk, self.spec.action_repeat):
            self._revive()
            obs, reward, term, trunc, info = self._once(action, run)
            rewards.append(reward)
            ran.append(run)
            _note_success(success, info, run)
            self._left[run] -= 1
            self._over = term | trunc
            over = run & (self._over | (self._left <= 0))
            if over.any():
                terminated |= run & term
                truncated |= over & ~term
                ended.append((over, self._read(obs)))
                run = run & ~over
                if not run.any():
                    break
        self._last, self._instead = obs, ended
        said = [None if known < 0 else bool(known) for known in success.tolist()]
        return VectorStep(self._seen(), _by_slot(rewards, ran), terminated, truncated, said, dict(info), len(rewards))

    def _seen(self) -> Observation:
        """Return what all slots see, in a copy of its own."""
        seen = self._read(self._last)
        for mask, obs in self._instead:
            _put(seen, mask, obs)
        return seen

    def _once(self, action: Array, run: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        result = self._env.step(action)
        if type(result) is not tuple or len(result) != 5:
            raise SimulatorError(
                f"step: expected (observations, rewards, terminated, truncated, info), got {_form(result)}"
            )
        obs, reward, term, trunc, info = result
        if not isinstance(info, dict):
            raise SimulatorError(f"info: expected a dictionary, got {type(info).__name__}")
        num = len(run)
        return obs, _rewards(reward, run), _flags("terminated", term, num), _flags("truncated", trunc, num), info

    def _reset(self, mask: Array, seeds: Mapping[int, int]) -> tuple[Any, dict[str, Any]]:
        """Reset the slots of a mask, or all of them the first time."""
        num, first = len(mask), self._last is None
        everything = mask if not first else np.ones_like(mask)
        if self.spec.slot_seeds:
            seed: Any = [seeds.get(slot, CARRIED) if everything[slot] else None for slot in range(num)]
        else:
            seed = next(iter(seeds.values()), None)
        result = self._env.reset(seed=seed, options=None if first else {"reset_mask": mask.copy()})
        if type(result) is not tuple or len(result) != 2 or not isinstance(result[1], dict):
            raise SimulatorError(f"reset: expected (observations, info), got {_form(result)}")
        self._over = self._over & ~everything
        return result

    def _revive(self) -> None:
        """Reset the slots that are carried along, where the simulator would not be stepped before."""
        if self._over.any():
            self._reset(self._over, {})


class _ChunkReader:
    """Brings actions into the form ``[H, M, *action.shape]``."""

    def __init__(self, spec: ArraySpec, num_slots: int) -> None:
        self._spec = spec
        self._num_slots = num_slots
        self._dtype = np.dtype(spec.dtype)
        self._numbers = ActionReader(spec)

    def chunk(self, actions: Any) -> Array:
        """Return the chunk, step by step.

        Raises:
            InvalidAction: Other shape, or numbers that the space does not have.
        """
        shape, num = self._spec.shape, self._num_slots
        array = as_actions(actions)
        if array.shape == (num, *shape):
            array = array[:, np.newaxis]
        fits = array.ndim == 2 + len(shape) and array.shape[0] == num and array.shape[2:] == shape and array.shape[1]
        if not fits or not np.can_cast(array.dtype, self._dtype, "same_kind"):
            one, many = ", ".join(map(str, (num, *shape))), ", ".join(map(str, (num, "H", *shape)))
            raise InvalidAction(
                f"actions: expected {self._dtype} of shape ({one}) or ({many}), "
                f"got {describe(array.dtype, array.shape)}"
            )
        chunk: Array = array.astype(self._dtype, copy=False).swapaxes(0, 1)
        self._numbers.check(chunk)
        return chunk


def accept(env: Any, name: str) -> int:
    """Return the number of slots of a batched simulator, after a look at whether it can be driven.

    Raises:
        ConfigError: It is none, or resets slots by itself, or does not say that it does not.
    """
    if not isinstance(env, VectorEnv):
        raise ConfigError(
            f"{name}: expected the function to make a gymnasium.vector.VectorEnv, got {type(env).__name__}"
        )
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise ConfigError(
            f"{name}: its metadata have no autoreset_mode, so that nobody knows whether it resets slots by itself: "
            'where it does not, say so: metadata["autoreset_mode"] = gymnasium.vector.AutoresetMode.DISABLED'
        )
    if mode not in (AutoresetMode.DISABLED, AutoresetMode.DISABLED.value):
        raise ConfigError(
            f"{name}: its autoreset_mode is {mode}, so that it would reset slots by itself, and final observations "
            "would be lost: make it with autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED"
        )
    return int(env.num_envs)


def stacked(form: ArraySpec | Mapping[str, ArraySpec], num: int) -> ArraySpec | dict[str, ArraySpec]:
    """Return the form of `num` observations in one."""
    if isinstance(form, ArraySpec):
        return ArraySpec((num, *form.shape), form.dtype)
    return {key: ArraySpec((num, *part.shape), part.dtype) for key, part in form.items()}


def rows(obs: Observation, num: int) -> list[Observation]:
    """Return the observations of `num` slots one by one; views."""
    if isinstance(obs, dict):
        return [{key: part[slot] for key, part in obs.items()} for slot in range(num)]
    return list(obs)


def _put(obs: Observation, mask: Array, other: Observation) -> None:
    """Write the rows of a mask."""
    if isinstance(obs, dict):
        assert isinstance(other, dict)
        for key, part in obs.items():
            part[mask] = other[key][mask]
    else:
        assert not isinstance(other, dict)
        obs[mask] = other[mask]


def _repeated(chunk: Array, times: int) -> Iterator[Array]:
    for action in chunk:
        for _ in range(times):
            # A copy each: simulators clip and scale in place, and this is part of the recorded decisions.
            yield action.copy()


def _by_slot(rewards: list[Array], ran: list[Array]) -> list[tuple[float, ...]]:
    if len(rewards) == 1:
        return [(reward,) if on else () for reward, on in zip(rewards[0].tolist(), ran[0].tolist(), strict=True)]
    executed = np.stack(ran).sum(0).tolist()
    return [tuple(own[:num]) for own, num in zip(np.stack(rewards, 1).tolist(), executed, strict=True)]


def _rewards(value: Any, run: Array) -> Array:
    """Return ``[M]`` float64.

    Raises:
        InvalidData: Another shape, or no finite number in a slot whose episode runs.
    """
    array = np.asarray(value)
    if array.size != len(run) or array.dtype.kind not in "fiub":
        raise InvalidData(f"rewards: expected {len(run)} numbers, got {describe(array.dtype, array.shape)}")
    numbers: Array = array.reshape(len(run)).astype(np.float64)
    bad = np.flatnonzero(run & ~(np.abs(numbers) <= MOST_REWARD))
    if len(bad):
        number = float(numbers[bad[0]])
        raise InvalidData(f"rewards: expected {within(number)} each, got {number} in slot {bad[0]}")
    return numbers


def _flags(name: str, value: Any, num: int) -> Array:
    """Return ``[M]`` bool.

    Raises:
        InvalidData: Another shape or type.
    """
    array = np.asarray(value)
    if array.size != num or array.dtype.kind not in "biu":
        raise InvalidData(f"{name}: expected {num} flags, got {describe(array.dtype, array.shape)}")
    flags: Array = array.reshape(num).astype(np.bool_)
    return flags


def _form(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


def _note_success(success: Array, info: Mapping[str, Any], run: Array) -> None:
    """Look for success in the `info` of a step, where ``_success`` says for which slots it is there.

    Raises:
        InvalidData: Another shape, or no flags.
    """
    key = next((key for key in SUCCESS if key in info), None)
    if key is None:
        return
    known = run & np.asarray(info.get(f"_{key}", True), np.bool_)
    said = np.asarray(info[key])
    if said.size != run.size or said.dtype.kind not in "fiubO":
        raise InvalidData(f"info[{key!r}]: expected one flag per slot, got {describe(said.dtype, said.shape)}")
    said = said.reshape(run.shape)
    if said.dtype.kind == "O":  # so gymnasium gathers flags of numpy, and None where a slot has none
        said = np.array([as_flag(key, flag) for flag in said], np.float64)  # None becomes NaN
    known &= said == said  # NaN says nothing
    success[known] = np.maximum(success[known], said[known].astype(np.bool_))
