"""What policies are built from: the base class for users' own, the stacking of observations, the small networks."""

from __future__ import annotations

import math
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ebrl.core.errors import ConfigError, SpaceError, whole
from ebrl.core.protocols import PolicyOut
from ebrl.core.records import Array, ArraySpec, EnvSpec, Observation
from ebrl.gen.policies.normalizer import ObservationNormalizer

STATE = "state"


class TorchPolicy(nn.Module, metaclass=ABCMeta):
    """Base for your own policy: write `act` and `evaluate`, then run `ebrl.gen.check.check_policy` on it.

    Args:
        horizon: H, actions in one chunk.
        noise_dim: Standard normal numbers that one decision consumes.
        memory_size: M, numbers that it remembers within an episode. If there are any, write `unroll` as well; see
            `ebrl.core.protocols.MemoryPolicy`.
    """

    def __init__(self, *, horizon: int = 1, noise_dim: int = 0, memory_size: int = 0) -> None:
        super().__init__()
        self.horizon = horizon
        self.noise_dim = noise_dim
        self.memory_size = memory_size

    def collate(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        """Stack B observations; floats become float32, everything else (uint8 images) keeps its type.

        Returns:
            CPU tensors ``[B, ...]``: one per key of a dictionary observation, ``"state"`` for a plain array.
        """
        first = observations[0]
        if isinstance(first, dict):
            return {key: stack([obs[key] for obs in observations]) for key in first}
        return {STATE: stack(observations)}  # type: ignore[arg-type]

    @abstractmethod
    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        """Choose actions; see `ebrl.core.protocols.Policy.act`."""

    @abstractmethod
    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Score samples again; see `ebrl.core.protocols.Policy.evaluate`."""

    def observe(self, batch: dict[str, Tensor]) -> None:
        """Take trained observations into the running statistics; nothing unless overridden."""


def stack(rows: Sequence[Array]) -> Tensor:
    """Stack equally shaped arrays into ``[B, ...]``; floats become float32."""
    dtype = np.dtype(np.float32) if np.issubdtype(rows[0].dtype, np.floating) else rows[0].dtype
    shape = (len(rows), *np.shape(rows[0]))
    if len(shape) == 1:
        return torch.from_numpy(np.array(rows, dtype))
    first = shape[1:]
    for row in rows:
        if row.shape != first:
            raise ValueError(f"observations of different shapes in one batch: {first} and {row.shape}")
    # A third of the time of np.stack, which makes a view of every row first.
    return torch.from_numpy(np.concatenate(rows, dtype=dtype, casting="same_kind").reshape(shape))


class Features(nn.Module):
    """Named vectors in, one normalised vector out.

    Args:
        names: Entries of the collated batch, concatenated in this order.
        size: D, numbers in all of them.
        normalize: Keep running statistics and scale by them.
    """

    def __init__(self, names: Sequence[str], size: int, *, normalize: bool) -> None:
        super().__init__()
        self.names = tuple(names)
        self.size = size
        self.normalizer = ObservationNormalizer(size) if normalize else None

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return ``[B, D]`` float32."""
        x = self.concatenate(batch)
        return x if self.normalizer is None else self.normalizer(x)

    def concatenate(self, batch: dict[str, Tensor]) -> Tensor:
        """Return ``[B, D]`` float32 before normalisation."""
        parts = [batch[name].float() for name in self.names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def observe(self, batch: dict[str, Tensor]) -> None:
        """Take a batch into the statistics, if there are any."""
        if self.normalizer is not None:
            self.normalizer.update(self.concatenate(batch))


def vector_features(spec: EnvSpec, reader: str, *, normalize: bool) -> Features:
    """Make the `Features` of an environment whose observations are vectors.

    Args:
        spec: Of the environment.
        reader: Name of the policy, for the message.
        normalize: See `Features`.

    Raises:
        SpaceError: An observation is not a 1-D array.
    """
    plain = isinstance(spec.observation, ArraySpec)
    arrays: Mapping[str, Any] = {STATE: spec.observation} if plain else spec.observation  # type: ignore[assignment]
    for name, array in arrays.items():
        if len(array.shape) != 1:
            what = "the observation" if plain else f"observation {name!r}"
            out = (
                "make the environment without cameras, or write a TorchPolicy that sees (README.md, Pictures)"
                if len(array.shape) == 3
                else "write a TorchPolicy that reads it, or give env_spec a function that returns "
                "gymnasium.wrappers.FlattenObservation(environment)"
            )
            raise SpaceError(f"{spec.id}: {reader} reads 1-D arrays, but {what} has shape {array.shape}; {out}")
    return Features(tuple(arrays), sum(array.size for array in arrays.values()), normalize=normalize)


def check_spec(spec: object, maker: str) -> None:
    """Check that a policy is to be made for one environment.

    Args:
        spec: Of it.
        maker: Name of what makes the policy, for the message.

    Raises:
        ConfigError: It is no `EnvSpec`.
    """
    if not isinstance(spec, EnvSpec):
        raise ConfigError(
            f"{maker} takes an EnvSpec, as env_spec(...) returns (of several, any: they are alike), "
            f"got a {type(spec).__name__}"
        )


def source_of(seed: int) -> torch.Generator:
    """Return the source of the first weights; torch's global one is not touched.

    Raises:
        ConfigError: `seed` is no whole number that torch takes.
    """
    return torch.Generator().manual_seed(whole("seed", seed, least=0, most=2**64 - 1))


def mlp(
    num_in: int, num_out: int, *, hidden: Sequence[int] = (64, 64), gain: float, generator: torch.Generator
) -> nn.Sequential:
    """Make a tanh network with orthogonal weights and zero biases.

    Args:
        num_in: Numbers in.
        num_out: Numbers out.
        hidden: Widths of the hidden layers.
        gain: Of the last layer: 0.01 for a policy (starts near uniform), 1 for a critic. The others have sqrt(2).
        generator: Source of the weights.

    Raises:
        ConfigError: `hidden` is no sequence of widths.
    """
    given: object = hidden
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"hidden must be the widths of the hidden layers, as (64, 64), got {given!r}")
    widths = [num_in, *(whole("a width in hidden", width) for width in hidden)]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [_linear(a, b, math.sqrt(2), generator), nn.Tanh()]
    return nn.Sequential(*layers, _linear(widths[-1], num_out, gain, generator))


def _linear(num_in: int, num_out: int, gain: float, generator: torch.Generator) -> nn.Linear:
    # skip_init: the constructor's own initialisation would draw from the global generator.
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, num_in, num_out)  # type: ignore[no-untyped-call]
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def bounds(action: ArraySpec) -> tuple[Tensor, Tensor]:
    """Return low and high of an action, ``[*action.shape]`` float32, infinite where it has none."""
    low = -np.inf if action.low is None else action.low
    high = np.inf if action.high is None else action.high
    low_array, high_array = (np.broadcast_to(np.asarray(x, np.float32), action.shape).copy() for x in (low, high))
    return torch.from_numpy(low_array), torch.from_numpy(high_array)
