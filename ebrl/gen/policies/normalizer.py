"""Running statistics of what a policy sees, as part of the policy.

The statistics are buffers, so they travel in ``state_dict``, in every published version and in every checkpoint, with
their count. Statistics kept elsewhere make the ratio at lag 0 differ from 1, or are lost on resume.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ObservationNormalizer(nn.Module):
    """Scales each number of an observation to zero mean and unit variance, and clips it.

    Acts as the identity (but for the clip) until the first `update`.

    Args:
        size: D, numbers in one observation.
        clip: Bound of the output, in standard deviations.
        eps: Added to the variance, so that a constant number divides by something.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int, *, clip: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.clip = clip
        self.eps = eps
        # float64: a float32 mean stops moving after some 10 million observations.
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise.

        Args:
            x: ``[B, D]``.

        Returns:
            ``[B, D]`` float32.
        """
        scaled = (x - self.mean) * (self.var + self.eps).rsqrt()
        return scaled.clamp_(-self.clip, self.clip).float()

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take a batch into the statistics (parallel variance; Chan, Golub and LeVeque 1979).

        Args:
            x: ``[B, D]``, not normalised.
        """
        x = x.double()
        num, mean, var = len(x), x.mean(0), x.var(0, correction=0)
        delta, total = mean - self.mean, self.count + num
        self.var.copy_((self.var * self.count + var * num + delta.square() * (self.count * num / total)) / total)
        self.mean.add_(delta * (num / total))
        self.count.copy_(total)
