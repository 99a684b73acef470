"""A diagonal Gaussian over chunks of float actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from ebrl.core.errors import ConfigError, SpaceError, is_a, whole
from ebrl.core.protocols import PolicyOut
from ebrl.core.records import ArraySpec, EnvSpec
from ebrl.gen.policies.base import Features, TorchPolicy, bounds, check_spec, mlp, source_of, vector_features

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class GaussianPolicy(TorchPolicy):
    """Separate tanh networks for mean and value, and one standard deviation per number of the chunk.

    The sample u is not squashed: the action is u clipped to the bounds, the log-probability is that of u.

    Args:
        features: Reads the observation.
        action: Form of one action.
        hidden: Widths of the hidden layers.
        log_std: Initial logarithm of the standard deviation, in the action's units.
        horizon: H, actions in one chunk.
        seed: Of the weights.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        features: Features,
        action: ArraySpec,
        *,
        hidden: Sequence[int] = (64, 64),
        log_std: float = -0.5,
        horizon: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(horizon=horizon, noise_dim=horizon * action.size)
        generator = source_of(seed)
        self.action_shape = action.shape
        self.features = features
        self.mean = mlp(features.size, self.noise_dim, hidden=hidden, gain=0.01, generator=generator)
        self.value = mlp(features.size, 1, hidden=hidden, gain=1.0, generator=generator)
        self.log_std = nn.Parameter(torch.full((horizon, action.size), log_std))
        low, high = bounds(action)
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    @classmethod
    def for_spec(
        cls,
        spec: EnvSpec,
        *,
        hidden: Sequence[int] = (64, 64),
        log_std: float = -0.5,
        horizon: int = 1,
        normalize: bool = True,
        seed: int = 0,
    ) -> Self:
        """Make a policy that fits an environment.

        Args:
            spec: Its observations must be 1-D arrays, its action a float array.
            hidden: Widths of the hidden layers.
            log_std: Initial logarithm of the standard deviation, in the action's units.
            horizon: H, actions in one chunk.
            normalize: Scale observations by running statistics.
            seed: Of the weights: the same seed gives the same weights.

        Raises:
            SpaceError: It cannot serve these spaces.
            ConfigError: An argument that cannot be.
        """
        check_spec(spec, f"{cls.__name__}.for_spec")
        whole("horizon", horizon)
        if not is_a(Real, log_std) or not math.isfinite(log_std):
            raise ConfigError(f"log_std must be a finite number, got {log_std!r}")
        if spec.action.num_values is not None:
            raise SpaceError(
                f"{spec.id}: GaussianPolicy needs a float action, but it is discrete with {spec.action.num_values} "
                "values; use CategoricalPolicy.for_spec(spec)"
            )
        if not np.issubdtype(np.dtype(spec.action.dtype), np.floating):
            raise SpaceError(
                f"{spec.id}: GaussianPolicy needs a float action, but it is {spec.action.dtype} of shape "
                f"{spec.action.shape}; write a TorchPolicy that makes them"
            )
        features = vector_features(spec, cls.__name__, normalize=normalize)
        return cls(features, spec.action, hidden=hidden, log_std=log_std, horizon=horizon, seed=seed)

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        """Choose actions; see `ebrl.core.protocols.Policy.act`. ``aux["u"]`` ``[B, H, A]`` is the sample."""
        mean, value = self._forward(batch)
        u = mean if deterministic else torch.addcmul(mean, self.log_std.exp(), noise.view_as(mean))
        action = u.view(-1, self.horizon, *self.action_shape).clamp(self.low, self.high)
        return PolicyOut(action, self._log_prob(mean, u), value, {"u": u})

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Score samples again; see `ebrl.core.protocols.Policy.evaluate`."""
        mean, value = self._forward(batch)
        entropy = (self.log_std + (0.5 + LOG_SQRT_2PI)).expand_as(mean)
        return self._log_prob(mean, aux["u"]), value, entropy

    def observe(self, batch: dict[str, Tensor]) -> None:
        """Take trained observations into the running statistics."""
        self.features.observe(batch)

    def _forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return mean ``[B, H, A]`` and value ``[B]``."""
        x = self.features(batch)
        return self.mean(x).view(-1, *self.log_std.shape), self.value(x).squeeze(-1)

    def _log_prob(self, mean: Tensor, u: Tensor) -> Tensor:
        # Written out: torch.distributions costs as much as the network here.
        z = (u - mean) * (-self.log_std).exp()
        return z.square() * -0.5 - (self.log_std + LOG_SQRT_2PI)
