"""`Border`: what passes between a simulator and those who use it, with every check; and the readers that it is made of.

What a simulator returns is checked here once, so that everything behind it may trust shapes, dtypes and numbers; what
it is given is checked too, since a NaN action makes most physics engines silently useless for the rest of the run.
Observations are always copied: many simulators return the buffer that their next step overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from typing import Any, Final, TypeAlias

import numpy as np

from ebrl.core.errors import InvalidAction, InvalidData, SimulatorError
from ebrl.core.records import Array, ArraySpec, EnvSpec, Observation, StepResult

SUCCESS: Final = ("success", "is_success")
"""Where `info` says whether an episode is one."""
MOST_REWARD: Final = 1e38
"""Larger ones are no float32, and their squares spoil every statistic that they enter."""
SCALARS: Final = (float, int, np.floating, np.integer, np.bool_)
_FOREVER: Final = 1 << 62
_AFTER_ERROR: Final = "step after an error: call reset first"
_finite: Final = np.isfinite
_ndarray: Final = np.ndarray

Read: TypeAlias = Callable[[Any], Observation]


class ArrayReader:
    """Copies an array out of a simulator's hands, in the form that its spec declares."""

    __slots__ = ("_dtype", "_float", "_name", "_seen", "_shape")

    def __init__(self, name: str, spec: ArraySpec) -> None:
        """Make a reader.

        Args:
            name: For messages.
            spec: What is expected.
        """
        self._name = name
        self._shape = spec.shape
        self._dtype = np.dtype(spec.dtype)
        self._seen = self._dtype  # the last dtype that was found castable; dtypes are compared by identity below
        self._float = self._dtype.kind == "f"

    def read(self, value: Any) -> Array:
        """Return a checked copy.

        Raises:
            InvalidData: Other shape, a dtype that does not fit, NaN or infinity.
        """
        if type(value) is not _ndarray or value.dtype is not self._seen or value.shape != self._shape:
            value = self._accept(value)
        array: Array = value.copy() if value.dtype is self._dtype else value.astype(self._dtype)
        if self._float and b"\0" in _finite(array).tobytes():  # a third of the time of .all()
            raise InvalidData(not_finite(self._name, array))
        return array

    def _accept(self, value: Any) -> Array:
        array = np.asarray(value)
        if array.shape != self._shape or not np.can_cast(array.dtype, self._dtype, "same_kind"):
            raise InvalidData(f"{self._name}: expected {describe(self._dtype, self._shape)}, got {_found(value)}")
        self._seen = array.dtype
        return array


class ActionReader:
    """Brings actions into the form ``[H, *action.shape]`` of the spec."""

    __slots__ = ("_dtype", "_ndim", "_num_values", "_shape")

    def __init__(self, spec: ArraySpec) -> None:
        """Make a reader.

        Args:
            spec: Of one action.
        """
        self._num_values = spec.num_values
        self._shape = spec.shape
        self._ndim = len(spec.shape) + 1
        self._dtype = np.dtype(spec.dtype)

    def chunk(self, actions: Any) -> Array:
        """Return ``[H, *action.shape]`` in the spec's dtype, without a copy where none is needed.

        Raises:
            InvalidAction: Other shape, no action at all, or a dtype that does not fit.
        """
        if type(actions) is _ndarray and actions.dtype is self._dtype:
            shape = actions.shape
            if len(shape) == self._ndim and shape[1:] == self._shape and shape[0]:
                return actions
        return self._accept(actions)

    def check(self, chunk: Array) -> None:
        """Look at the numbers.

        Raises:
            InvalidAction: NaN or infinity, or a value outside a discrete space.
        """
        num_values = self._num_values
        if num_values is not None:
            if chunk.min() < 0 or chunk.max() >= num_values:
                raise InvalidAction(f"action: expected integers from 0 to {num_values - 1}, got {chunk.tolist()}")
        elif b"\0" in _finite(chunk).tobytes():
            raise InvalidAction(not_finite("action", chunk))

    def _accept(self, actions: Any) -> Array:
        array = as_actions(actions)
        if array.shape == self._shape:
            array = array[np.newaxis]
        fits = array.ndim == self._ndim and array.shape[1:] == self._shape and array.shape[0] > 0
        if not fits or not np.can_cast(array.dtype, self._dtype, "same_kind"):
            one, many = describe(self._dtype, self._shape), ", ".join(["H", *map(str, self._shape)])
            raise InvalidAction(f"action: expected {one}, or a chunk of shape ({many}), got {_found(actions)}")
        return array.astype(self._dtype, copy=False)


def as_actions(actions: Any) -> Array:
    """Return actions as an array.

    Raises:
        InvalidAction: They are none: lists of different lengths, or a tensor that numpy cannot read.
    """
    try:
        return np.asarray(actions)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidAction(f"action: expected an array, got {_found(actions)}: {error}") from error


def describe(dtype: Any, shape: tuple[int, ...]) -> str:
    """Return words for a dtype and a shape."""
    return f"{dtype} of shape {shape}"


def not_finite(name: str, array: Array) -> str:
    """Return words for where NaN or infinity is: which, how many, and where the first is."""
    bad = np.argwhere(~np.isfinite(array))
    first = tuple(int(i) for i in bad[0])
    word = "NaN" if np.isnan(array[first]) else "infinity"
    return f"{name}: expected finite numbers, got {word} at {first} ({len(bad)} of {array.size})"


def _found(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return describe(value.dtype, value.shape)
    return f"{type(value).__name__} {value!r:.60}"


def observation_reader(spec: ArraySpec | Mapping[str, ArraySpec]) -> Read:
    """Return the function that checks and copies observations of that form."""
    if isinstance(spec, ArraySpec):
        return ArrayReader("observation", spec).read
    readers = {key: ArrayReader(f"observation[{key!r}]", part).read for key, part in spec.items()}

    def read(value: Any) -> Observation:
        if not isinstance(value, Mapping) or value.keys() != readers.keys():
            keys = sorted(map(str, value)) if isinstance(value, Mapping) else _found(value)
            raise InvalidData(f"observation: expected a dictionary with keys {sorted(readers)}, got {keys}")
        return {key: reader(value[key]) for key, reader in readers.items()}

    return read


def as_reward(reward: Any) -> float:
    """Return a reward as a Python float.

    Args:
        reward: A number, or an array of shape ``()`` or ``(1,)``.

    Raises:
        InvalidData: It is not one finite number, or beyond `MOST_REWARD`.
    """
    if isinstance(reward, SCALARS):
        value = float(reward)
    else:
        array = np.asarray(reward)
        if array.shape not in {(), (1,)} or array.dtype.kind not in "fiub":
            raise InvalidData(f"reward: expected one number, got {_found(reward)}")
        value = float(array.reshape(()))
    if not -MOST_REWARD <= value <= MOST_REWARD:
        raise InvalidData(f"reward: expected {within(value)}, got {value}")
    return value


def within(reward: float) -> str:
    """Return words for what a reward that is refused should have been."""
    return f"a number of at most {MOST_REWARD:g}" if isfinite(reward) else "a finite number"


def as_end(name: str, flag: Any) -> bool:
    """Return whether an episode has ended, as `step` says it.

    Args:
        name: For the message.
        flag: A bool, or a whole number, or an array of one of them.

    Raises:
        InvalidData: It is something else; that None and ``"False"`` had a truth of their own would surprise.
    """
    array = np.asarray(flag)
    if array.size != 1 or array.dtype.kind not in "biu":
        raise InvalidData(f"{name}: expected True or False, got {_found(flag)}")
    return bool(array.reshape(()))


def as_flag(name: str, flag: Any) -> bool | None:
    """Return a flag as a Python bool.

    Args:
        name: For the message.
        flag: A bool, a number that counts as true where it is not 0, an array of one of them, or None.

    Returns:
        None: it says nothing; so does NaN.

    Raises:
        InvalidData: It is not one flag.
    """
    if type(flag) is bool or flag is None:
        return flag
    array = np.asarray(flag)
    if array.size != 1 or array.dtype.kind not in "fiub":
        raise InvalidData(f"info[{name!r}]: expected one flag, got {_found(flag)}")
    value = array.reshape(()).item()
    return None if value != value else bool(value)


def _flags_of(info: Any) -> dict[str, bool]:
    """Return what an `info` says about success; where it says None or NaN, nothing."""
    if not isinstance(info, dict):
        raise SimulatorError(f"info: expected a dictionary, got {_found(info)}")
    flags = {name: as_flag(name, info[name]) for name in SUCCESS if name in info}
    return {name: flag for name, flag in flags.items() if flag is not None}


def _with(flags: dict[str, bool], info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key not in SUCCESS} | flags


class Border:
    """What passes between a simulator and those who use it, and which calls it allows now; calls nothing itself."""

    def __init__(self, spec: EnvSpec) -> None:
        """Make one.

        Args:
            spec: What to expect.
        """
        self._actions = ActionReader(spec.action)
        self._read = observation_reader(spec.observation)
        self._discrete = spec.action.num_values is not None
        self._repeat = range(spec.action_repeat)
        self._single = spec.action_repeat == 1
        self._horizon = _FOREVER if spec.horizon is None else spec.horizon
        self._left = 0  # simulator steps until the horizon
        self._rewards: list[float] = []  # of the chunk that runs
        self._flags: dict[str, bool] | None = None  # whether success was told in any step of it, if it has several
        self._running = False
        self._why = "step before reset: call reset first"

    def interrupt(self, why: str = _AFTER_ERROR) -> None:
        """Allow no step until `begin`: nobody knows any more where the simulator is."""
        self._running = False
        self._why = why

    def begin(self, result: Any) -> tuple[Observation, dict[str, Any]]:
        """Check what `reset` returned; steps are allowed from now on.

        Raises:
            SimulatorError: The simulator broke its interface.
        """
        if not isinstance(result, tuple) or len(result) != 2:
            raise SimulatorError(f"reset: expected (observation, info), got {_shape_of(result)}")
        obs, info = self._read(result[0]), _with(_flags_of(result[1]), result[1])
        self._left = self._horizon
        self._running = True
        return obs, info

    def take(self, actions: Any, finite: bool) -> Iterable[Any]:
        """Return what to step with, one after the other, until `note` says that it was the last.

        Raises:
            InvalidAction: Actions contradict the spec.
            SimulatorError: No episode is running; says why.
        """
        if not self._running:
            raise SimulatorError(self._why)
        chunk = self._actions.chunk(actions)
        if not finite or self._discrete:
            self._actions.check(chunk)
        self.interrupt()  # until `give`
        self._rewards, self._flags = [], None
        if self._single and len(chunk) == 1:  # as in _each(), without its loops
            action = chunk[0]
            return (int(action) if self._discrete else action.copy(),)
        self._flags = {}
        return self._each(chunk)

    def note(self, result: Any) -> bool:
        """Check the form and the reward of what one step returned, and look for success in it.

        Returns:
            Whether the episode has ended.

        Raises:
            InvalidData: The reward is not one finite number, an end not True or False, or success not one flag.
            SimulatorError: The simulator broke its interface.
        """
        if not isinstance(result, tuple) or len(result) != 5:
            raise SimulatorError(
                f"step: expected (observation, reward, terminated, truncated, info), got {_shape_of(result)}"
            )
        reward = result[1]
        usual = type(reward) is float and -MOST_REWARD <= reward <= MOST_REWARD
        self._rewards.append(reward if usual else as_reward(reward))
        self._left -= 1
        if self._flags is not None:
            for name, flag in _flags_of(result[4]).items():
                self._flags[name] = flag or self._flags.get(name, False)
        terminated, truncated = result[2], result[3]
        if type(terminated) is not bool or type(truncated) is not bool:
            terminated, truncated = as_end("terminated", terminated), as_end("truncated", truncated)
        return terminated or truncated or self._left <= 0

    def give(self, result: tuple[Any, ...]) -> StepResult:
        """Return what a chunk came to, of which this was the last step.

        Raises:
            InvalidData: Observation or success contradict the spec.
            SimulatorError: The simulator broke its interface.
        """
        obs = self._read(result[0])
        terminated = bool(result[2])
        over = bool(terminated or result[3] or self._left <= 0)
        info = _with(_flags_of(result[4]) if self._flags is None else self._flags, result[4])
        if over:
            self._why = "step after the end of the episode: call reset first"
        else:
            self._running = True
        return StepResult(obs, tuple(self._rewards), terminated, over and not terminated, info)

    def _each(self, chunk: Array) -> Iterator[Any]:
        for action in chunk.tolist() if self._discrete else chunk:
            for _ in self._repeat:
                # A copy each: simulators clip and scale in place, and this row is part of the recorded decision.
                yield action if self._discrete else action.copy()


def _shape_of(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"{type(result).__name__}"
