"""States as JSON and named tensors, and back: no pickle, so that reading a checkpoint runs nobody's code.

JSON has neither tuples nor keys that are no strings nor tensors; those become objects with one key that begins with a
dollar sign, ``{"$tensor": "policy/actor.0.weight"}`` say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ebrl.core.errors import ConfigError

Tensors: TypeAlias = dict[str, Tensor]


def copied(value: Any) -> Any:
    """Return a state whose containers and tensors are nobody else's; tensors are on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(copied(inner) for inner in value)
    if isinstance(value, list):
        return [copied(inner) for inner in value]
    return value


def pack(value: Any, tensors: Tensors, name: str) -> Any:
    """Return a state as JSON; its tensors and arrays go into `tensors`.

    Args:
        value: Dictionaries, lists and tuples of tensors, arrays, numbers, strings and None. Tensors are not copied, and
            must not share memory: see `copied`.
        tensors: Takes them, by the path that leads to each.
        name: Of the whole.

    Raises:
        ConfigError: Something else is in it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": _put(value, tensors, name)}
    if isinstance(value, np.ndarray):
        return {"$array": _put(_as_tensor(value, name), tensors, name)}
    if isinstance(value, np.generic):
        return pack(value.item(), tensors, name)
    if isinstance(value, tuple):
        return {"$tuple": [pack(inner, tensors, f"{name}/{i}") for i, inner in enumerate(value)]}
    if isinstance(value, list):
        return [pack(inner, tensors, f"{name}/{i}") for i, inner in enumerate(value)]
    if isinstance(value, Mapping):
        pairs = [[pack(key, tensors, name), pack(inner, tensors, f"{name}/{key}")] for key, inner in value.items()]
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$dict": pairs}
    raise ConfigError(f"{name}: {type(value).__name__} cannot be saved: use tensors, arrays, numbers and strings")


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `pack` was given."""
    if isinstance(value, list):
        return [unpack(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind == "$tensor":
        return tensors[value[kind]]
    if kind == "$array":
        return tensors[value[kind]].numpy()
    if kind == "$tuple":
        return tuple(unpack(inner, tensors) for inner in value[kind])
    if kind == "$dict":
        return {unpack(key, tensors): unpack(inner, tensors) for key, inner in value[kind]}
    return {key: unpack(inner, tensors) for key, inner in value.items()}


def _put(tensor: Tensor, tensors: Tensors, name: str) -> str:
    while name in tensors:  # keys with a slash in them
        name += "'"
    tensors[name] = tensor
    return name


def _as_tensor(array: np.ndarray, name: str) -> Tensor:
    try:
        return torch.from_numpy(array.copy(order="C"))
    except TypeError as error:
        raise ConfigError(f"{name}: an array of {array.dtype} cannot be saved") from error
