"""Policies, and the choice of one where nobody chose."""

from __future__ import annotations

from collections.abc import Sequence

from ebrl.core.records import EnvSpec
from ebrl.gen.policies.base import TorchPolicy
from ebrl.gen.policies.categorical import CategoricalPolicy
from ebrl.gen.policies.feed_forward import feed_forward_policy
from ebrl.gen.policies.gaussian import GaussianPolicy
from ebrl.gen.policies.recurrent import RecurrentPolicy

__all__ = ["CategoricalPolicy", "GaussianPolicy", "RecurrentPolicy", "TorchPolicy", "default_policy"]


def default_policy(
    spec: EnvSpec,
    *,
    hidden: Sequence[int] = (64, 64),
    horizon: int = 1,
    memory_size: int = 0,
    normalize: bool = True,
    seed: int = 0,
) -> TorchPolicy:
    """Make a small policy for an environment: Gaussian for float actions, categorical for discrete ones.

    Args:
        spec: Of the environment.
        hidden: Widths of the hidden layers.
        horizon: H, actions in one chunk; 1 for discrete actions.
        memory_size: M, numbers that actor and critic remember each within an episode; 0: none.
        normalize: Scale observations by running statistics.
        seed: Of the weights.

    Raises:
        SpaceError: No stock policy serves these spaces.
        ConfigError: A chunk of discrete actions was asked for, or `memory_size` is below 0.
    """
    if memory_size:
        return RecurrentPolicy.for_spec(
            spec, memory_size=memory_size, hidden=hidden, horizon=horizon, normalize=normalize, seed=seed
        )
    return feed_forward_policy(spec, hidden=hidden, horizon=horizon, normalize=normalize, seed=seed)
