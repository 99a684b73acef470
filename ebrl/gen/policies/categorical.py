"""A categorical distribution over discrete actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ebrl.core.errors import SpaceError
from ebrl.core.protocols import PolicyOut
from ebrl.core.records import EnvSpec
from ebrl.gen.policies.base import Features, TorchPolicy, check_spec, mlp, source_of, vector_features


class CategoricalPolicy(TorchPolicy):
    """Separate tanh networks for logits and value; one action per decision.

    Args:
        features: Reads the observation.
        num_values: Actions to choose from.
        hidden: Widths of the hidden layers.
        seed: Of the weights.
    """

    def __init__(self, features: Features, num_values: int, *, hidden: Sequence[int] = (64, 64), seed: int = 0) -> None:
        super().__init__(horizon=1, noise_dim=1)
        generator = source_of(seed)
        self.num_values = num_values
        self.features = features
        self.logits = mlp(features.size, num_values, hidden=hidden, gain=0.01, generator=generator)
        self.value = mlp(features.size, 1, hidden=hidden, gain=1.0, generator=generator)

    @classmethod
    def for_spec(
        cls, spec: EnvSpec, *, hidden: Sequence[int] = (64, 64), normalize: bool = True, seed: int = 0
    ) -> Self:
        """Make a policy that fits an environment.

        Args:
            spec: Its observations must be 1-D arrays, its action discrete.
            hidden: Widths of the hidden layers.
            normalize: Scale observations by running statistics.
            seed: Of the weights: the same seed gives the same weights.

        Raises:
            SpaceError: It cannot serve these spaces.
            ConfigError: An argument that cannot be.
        """
        check_spec(spec, f"{cls.__name__}.for_spec")
        if spec.action.num_values is None:
            raise SpaceError(
                f"{spec.id}: CategoricalPolicy needs a discrete action, but it is {spec.action.dtype} of shape "
                f"{spec.action.shape}; use GaussianPolicy.for_spec(spec), or write a TorchPolicy that makes them"
            )
        features = vector_features(spec, cls.__name__, normalize=normalize)
        return cls(features, spec.action.num_values, hidden=hidden, seed=seed)

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        """Choose actions; see `ebrl.core.protocols.Policy.act`. ``aux["index"]`` ``[B, 1]`` is the choice."""
        log_probs, value = self._forward(batch)
        if deterministic:
            index = log_probs.argmax(-1, keepdim=True)
        else:
            # Inverse of the distribution function: one number of the environment's own stream per decision.
            below = log_probs.exp().cumsum(-1) < torch.special.ndtr(noise)
            index = below.sum(-1, keepdim=True).clamp_(max=self.num_values - 1)
        return PolicyOut(index, log_probs.gather(-1, index).unsqueeze(-1), value, {"index": index})

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Score samples again; see `ebrl.core.protocols.Policy.evaluate`."""
        log_probs, value = self._forward(batch)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, aux["index"]).unsqueeze(-1), value, entropy[:, None, None]

    def observe(self, batch: dict[str, Tensor]) -> None:
        """Take trained observations into the running statistics."""
        self.features.observe(batch)

    def _forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities ``[B, num_values]`` and value ``[B]``."""
        x = self.features(batch)
        return self.logits(x).log_softmax(-1), self.value(x).squeeze(-1)
