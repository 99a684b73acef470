"""`ScriptedPolicy`: a policy that costs next to nothing, for tests and for measuring the runtime around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ebrl.core.protocols import PolicyOut
from ebrl.core.records import EnvSpec
from ebrl.gen.policies.base import TorchPolicy, bounds


class ScriptedPolicy(TorchPolicy):
    """Adds the first number of the observation to the noise. A verified fake: it passes `check_policy`.

    Its one parameter is log-probability, value and entropy at once, so that versions can be told apart by what they
    answer.

    Args:
        spec: Environment that it is for: any observation, a float or discrete action.
        horizon: H, actions in one chunk.
    """

    low: Tensor
    high: Tensor

    def __init__(self, spec: EnvSpec, *, horizon: int = 1) -> None:
        super().__init__(horizon=horizon, noise_dim=horizon * spec.action.size)
        self.action_shape = spec.action.shape
        self.action_size = spec.action.size
        self.num_values = spec.action.num_values
        self.weight = nn.Parameter(torch.zeros(()))
        low, high = bounds(spec.action)
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        """Choose actions; see `ebrl.core.protocols.Policy.act`. `aux` is empty."""
        num = len(noise)
        first = next(iter(batch.values())).reshape(num, -1)[:, :1]
        x = first.float().expand_as(noise) if deterministic else noise + first
        x = x.reshape(num, self.horizon, *self.action_shape)
        if self.num_values is None:
            action = x.clamp(self.low, self.high)
        else:
            action = (x * self.num_values).long().remainder(self.num_values)
        # detach: a view of a parameter asks for gradients even where they are off.
        weight = self.weight.detach()
        log_prob = weight.expand(num, self.horizon, self.action_size)
        return PolicyOut(action, log_prob, weight.expand(num), {})

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Score samples again; see `ebrl.core.protocols.Policy.evaluate`."""
        num = len(next(iter(batch.values())))
        rows = self.weight.expand(num, self.horizon, self.action_size)
        return rows, self.weight.expand(num), rows
