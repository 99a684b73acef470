"""`LagWatch`: how far data are from the weights that learn from them, measured in every update.

The age of data is corrected for by ``w = pi_now / pi_acted``, per decision, action or token, as the loss takes its
ratios: a decision of many tokens may be far from its old probability while each token is near. Where w scatters, few of
them make up the gradient: the bounds (half of the batch as effective sample size, 0.1 as mean of ``(log w)**2``) are
what training on CartPole with exact lags suggested. At lag 0, w is 1 but for rounding (``|log w|`` below 1e-4 in
float32); anything else means that acting and scoring do not agree, and then no correction is right.
"""

from __future__ import annotations

import logging
import math

from torch import Tensor

from ebrl.train.losses import effective_sample_size

logger = logging.getLogger("ebrl")

LOWEST_ESS = 0.5
HIGHEST_SQUARE = 0.1
HIGHEST_AT_LAG_0 = 1e-4

_TOO_OLD = "the data are far from the weights that learn from them: lower max_lag, learning_rate or epochs"
_DISAGREE = (
    "acting and scoring disagree on the same weights: run ebrl.check_policy, and change running statistics only in "
    "observe()"
)


class LagWatch:
    """Measures, and warns once in its life of each kind of trouble. Called on the training lane."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def measure(self, log_weight_N: Tensor, lag_N: Tensor) -> dict[str, float]:
        """Return metrics of a batch.

        Args:
            log_weight_N: Of each executed element of the loss, its log-probability under the weights that the update
                starts from, minus that under the weights that acted.
            lag_N: Versions behind.

        Returns:
            ``behaviour_weight_ess``, as a part of the batch; ``log_weight_sq_mean``; ``max_abs_log_weight_at_lag_0``,
            NaN where none has lag 0.
        """
        ess = float(effective_sample_size(log_weight_N))
        square = float(log_weight_N.square().mean())
        fresh = log_weight_N[lag_N == 0]
        at_lag_0 = float(fresh.abs().max()) if len(fresh) else math.nan
        if ess < LOWEST_ESS:
            self._warn("ess", f"the effective sample size of a batch is {ess:.3g} (healthy: over 0.5)", _TOO_OLD)
        if square > HIGHEST_SQUARE:
            self._warn("square", f"the mean of (log w)**2 is {square:.3g} (healthy: under 0.1)", _TOO_OLD)
        if at_lag_0 > HIGHEST_AT_LAG_0:
            self._warn("lag 0", f"max |log w| at lag 0 is {at_lag_0:.3g} (healthy: under 0.0001)", _DISAGREE)
        return {
            "behaviour_weight_ess": ess,
            "log_weight_sq_mean": square,
            "max_abs_log_weight_at_lag_0": at_lag_0,
        }

    def _warn(self, kind: str, found: str, advice: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s; %s", found, advice)
