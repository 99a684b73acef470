"""The scale of rewards, learned while they arrive.

As Stable-Baselines3's ``VecNormalize``: rewards are divided by the standard deviation of the running discounted return,
which begins anew with every episode (gymnasium's ``NormalizeReward`` lets it go on after a truncation). It goes on from
batch to batch, so the learner keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebrl.core.records import Segment

Float64s = NDArray[np.float64]


class ReturnNormalizer:
    """Running variance of the discounted return.

    Args:
        clip: Bound of a normalised reward, in standard deviations.
        eps: Added to the variance.
    """

    def __init__(self, *, clip: float = 10.0, eps: float = 1e-8) -> None:
        self.clip = clip
        self.eps = eps
        self.mean = 0.0
        self.var = 1.0
        self.count = 0.0
        # Per environment: the episode it was in, the index of the next decision, and the running return up to it.
        self.open: dict[int, tuple[int, int, float]] = {}

    def update(self, segments: Sequence[Segment], rewards_B: Float64s, discounts_B: Float64s) -> None:
        """Take a batch into the statistics.

        Args:
            segments: Those of one environment in the order in which they happened.
            rewards_B: ``[B]`` per decision, segment by segment.
            discounts_B: ``[B]`` from each decision to the next.
        """
        pairs = zip(rewards_B.tolist(), discounts_B.tolist(), strict=True)
        returns = []
        for segment in segments:
            first = segment.decisions[0]
            episode, following, total = self.open.get(segment.env, (-1, 0, 0.0))
            if first.episode != episode or first.index < following:  # less: of the environments of another trainer
                total = 0.0
            for _ in segment.decisions:
                reward, discount = next(pairs)
                returns.append(total + reward)
                total = returns[-1] * discount
            self.open[segment.env] = (first.episode, segment.decisions[-1].index + 1, total)
        self._take(np.array(returns))

    def normalize(self, rewards_B: Float64s) -> Float64s:
        """Return rewards in standard deviations of the return; they are not centred."""
        scaled: Float64s = np.clip(rewards_B / np.sqrt(self.var + self.eps), -self.clip, self.clip)
        return scaled

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics with their count, and the returns that go on."""
        return {"mean": self.mean, "var": self.var, "count": self.count, "open": dict(self.open)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.mean, self.var, self.count = state["mean"], state["var"], state["count"]
        self.open = dict(state["open"])

    def _take(self, x: Float64s) -> None:
        """Parallel variance (Chan, Golub and LeVeque 1979)."""
        num, total = len(x), self.count + len(x)
        delta = float(x.mean()) - self.mean
        squares = self.var * self.count + float(x.var()) * num + delta * delta * self.count * num / total
        self.mean, self.var, self.count = self.mean + delta * num / total, squares / total, total
