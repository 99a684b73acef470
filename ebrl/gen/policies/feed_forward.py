"""The choice of a policy without memory, where nobody chose."""

from __future__ import annotations

from collections.abc import Sequence

from ebrl.core.errors import ConfigError
from ebrl.core.records import EnvSpec
from ebrl.gen.policies.base import TorchPolicy, check_spec
from ebrl.gen.policies.categorical import CategoricalPolicy
from ebrl.gen.policies.gaussian import GaussianPolicy


def feed_forward_policy(
    spec: EnvSpec, *, hidden: Sequence[int] = (64, 64), horizon: int = 1, normalize: bool = True, seed: int = 0
) -> TorchPolicy:
    """Make a small policy for an environment: Gaussian for float actions, categorical for discrete ones.

    Args:
        spec: Of the environment.
        hidden: Widths of the hidden layers.
        horizon: H, actions in one chunk; 1 for discrete actions.
        normalize: Scale observations by running statistics.
        seed: Of the weights.

    Raises:
        SpaceError: No stock policy serves these spaces.
        ConfigError: A chunk of discrete actions was asked for, or an argument cannot be.
    """
    check_spec(spec, "default_policy")
    if spec.action.num_values is None:
        return GaussianPolicy.for_spec(spec, hidden=hidden, horizon=horizon, normalize=normalize, seed=seed)
    if horizon != 1:
        raise ConfigError(f"horizon={horizon}: {spec.id} has discrete actions; CategoricalPolicy makes one at a time")
    return CategoricalPolicy.for_spec(spec, hidden=hidden, normalize=normalize, seed=seed)
