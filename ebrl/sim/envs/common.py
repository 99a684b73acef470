"""What all adapters share: the form of observations, and a seed for simulators that draw from numpy's global generator.

Every adapter observes a flat dictionary:

- ``state``: float32 ``[D]``. With cameras, what the robot feels of itself, since pictures show the rest; without,
  objects and goals as well. The option `full_state` decides otherwise.
- ``images/<camera>``: uint8 ``[height, width, 3]``, the first row at the top, one per camera that was asked for.

The third thing that a policy is told, the task, is a string and constant: an environment has one for life. So it is
`EnvSpec.task`, from where environments, segments and episodes have it. In an observation it would be an array of bytes,
which lies in shared memory, is copied in every step and would be taken for numbers by every policy that concatenates
vectors; and ``info`` has no strings, since a process host passes on numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from ebrl.core.errors import ConfigError
from ebrl.core.records import Array
from ebrl.sim.simulator import construction_lock

STATE = "state"
IMAGE_SIZE = 128
"""Height and width of pictures, unless the user says otherwise."""


def image_key(camera: str) -> str:
    """Return the key of a camera's pictures."""
    return f"images/{camera}"


def observation_space(num_state: int, cameras: Sequence[str] = (), image_size: int = IMAGE_SIZE) -> spaces.Dict:
    """Return the space of uniform observations.

    Args:
        num_state: D, numbers in ``state``.
        cameras: Names.
        image_size: Height and width of a picture.
    """
    parts: dict[str, Any] = {STATE: spaces.Box(-np.inf, np.inf, (num_state,), np.float32)}
    for camera in cameras:
        parts[image_key(camera)] = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
    return spaces.Dict(parts)


def vector(parts: Iterable[Any]) -> Array:
    """Return arrays of any shape as one float32 vector."""
    return np.concatenate([np.ravel(part) for part in parts], dtype=np.float32, casting="same_kind")


def camera_names(asked: str | Sequence[str], known: Iterable[str], name: str) -> tuple[str, ...]:
    """Return the cameras that were asked for: one name, or several.

    Raises:
        ConfigError: There is no such camera.
    """
    names, there = (asked,) if isinstance(asked, str) else tuple(asked), sorted(known)
    for camera in names:
        if camera not in there:
            raise ConfigError(f"{name} has no camera {camera!r}; there are {', '.join(there)}")
    return names


@contextmanager
def global_numpy(seed: int) -> Iterator[None]:
    """Seed numpy's global generator inside the block, and put it back after it.

    Only one thread is in such a block, or builds a simulator, at a time: else they would draw each other's numbers.
    """
    with construction_lock:
        before = np.random.get_state(legacy=False)
        np.random.set_state(np.random.RandomState(np.random.MT19937(seed)).get_state(legacy=False))
        try:
            yield
        finally:
            np.random.set_state(before)
