"""`LinearFit`: the time of a call as a line in its size, ``t(n) = a + b n``, learned from one call after another.

Weighted least squares of two parameters in closed form, with exponential forgetting (recursive least squares: Ljung,
System Identification, 1999, section 11.2; Haykin, Adaptive Filter Theory, chapter 10). The sums are kept about their
means (West, 1979), so that batches of nearly one size do not cancel digits. Four things are added:

- **Tails** are weighted down (Huber, 1964): past `TOLERANCE` times the usual relative error, a call pulls no harder the
  further off it is. Where a quarter of all calls are out there, the usual error grows until they are not.
- **Stalls**, more than `STALL` times slower than expected, move nothing. Where the slope is not known yet, what is
  expected is every line with ``a, b >= 0`` through what was seen.
- **A change of regime** looks like outliers that agree. They train a rival fit, and when `ADOPT` more calls have
  contradicted the fit than confirmed it, the rival takes its place. A young fit has less to defend: it falls to as many
  calls as it rests on, a majority vote (Boyer and Moore, 1981). So a slow first call is forgotten after the second.
- **The slope is not forgotten for nothing.** While batches all have one size they say nothing about it; plain
  forgetting would lose it then, and noise would take its place (estimator wind-up). Below `KEEP` it is kept until
  something replaces it, the idea of directional forgetting (Hägglund, 1985).
"""

from __future__ import annotations

from math import inf, sqrt

from ebrl.core.errors import ConfigError

TOLERANCE = 3.0  # usual errors past which a call is an outlier
STALL = 5.0  # relative error past which an outlier moves nothing: six times slower, or six times faster
ADOPT = 16  # contradictions more than confirmations after which the rival takes over
KEEP = 4.0  # knowledge of the slope that is not forgotten: so many calls, as far from the mean size as that is from 0
PRIOR_NUM = 20.0  # calls that a warm start counts as, at most
FIRST_SCALE, FIRST_SCALE_NUM = 0.2, 4.0  # usual error expected at first, and how many calls say so
LEAST_SCALE = 0.01  # calls that differ by less are alike, however exact the others were
SIGMA = 1.25  # standard deviation of a normal variable over its mean absolute value: sqrt(pi / 2)
TINY_S = 1e-9


class LinearFit:
    """A line ``t(n) = a_s + b_s * n``, never negative and never falling.

    With forgetting 1 and no outliers it is the least-squares line, whatever the order of the calls. While all sizes are
    equal, `b_s` is what a warm start said, else 0. `observe` costs less than a microsecond.

    Attributes:
        a_s: Seconds of a call whatever its size.
        b_s: Seconds for each unit of size.
        num: Calls that count: at most ``1 / (1 - forgetting)``.

    Example:
        >>> fit = LinearFit()
        >>> for n in (1, 8, 4, 8, 1, 4):
        ...     fit.observe(n, 0.004 + 0.0005 * n)
        >>> round(fit.a_s, 6), round(fit.b_s, 6), round(fit.predict(32), 6)
        (0.004, 0.0005, 0.02)
    """

    __slots__ = (
        "_calm", "_doubts", "_forgetting", "_mean_n", "_mean_s", "_nn", "_ns", "_rival", "_scale", "a_s", "b_s", "num",
    )  # fmt: skip

    def __init__(self, forgetting: float = 0.99) -> None:
        """Make a fit that knows nothing and predicts 0.

        Args:
            forgetting: Weight of a call relative to the next one; 0.99 lets about 100 count.

        Raises:
            ConfigError: `forgetting` is not in (0, 1].
        """
        if not 0.0 < forgetting <= 1.0:
            raise ConfigError(f"forgetting must be above 0 and at most 1, got {forgetting}")
        self._forgetting = forgetting
        self.a_s = 0.0
        self.b_s = 0.0
        self.num = 0.0
        self._mean_n = 0.0  # 0 until the first call: a warm start is centred there
        self._mean_s = 0.0
        self._nn = 0.0  # weighted sum of squares of sizes about their mean
        self._ns = 0.0  # and of their products with seconds
        self._scale = FIRST_SCALE
        self._calm = FIRST_SCALE  # the scale when doubts began: a change of regime must not pass for noise on its way
        self._doubts = 0
        self._rival: LinearFit | None = None

    @property
    def size_spread(self) -> float:
        """Standard deviation of the sizes over their mean; where it is small, `a_s` and `b_s` are hardly told apart."""
        if not self._mean_n or self.num <= 0.0:
            return 0.0
        return sqrt(max(0.0, self._nn) / self.num) / self._mean_n

    def warm_start(self, a_s: float, b_s: float, num: float) -> None:
        """Begin with a line from elsewhere; only before the first call.

        It counts as `num` calls (at most `PRIOR_NUM`) of the size that comes first, and its slope, unless it is 0, as
        `KEEP` of them.
        New calls that agree with it take over as others are forgotten; if the first ones contradict it, they replace
        it as soon as they are `ADOPT`, or as many as it counts.

        Args:
            a_s: Seconds.
            b_s: Seconds for each unit of size.
            num: Calls it rests on.
        """
        assert not self._mean_n, "a warm start must come before the first call"
        assert min(a_s, b_s) >= 0.0, f"a line that may be negative: {a_s} + {b_s} n"
        if num > 0.0:
            self.a_s, self.b_s, self.num = a_s, b_s, min(num, PRIOR_NUM)

    def predict(self, n: float) -> float:
        """Seconds of a call of size `n`; 0 as long as nothing is known (`num` is 0)."""
        return self.a_s + self.b_s * n

    def observe(self, n: float, seconds: float) -> None:
        """Learn from one call.

        Args:
            n: Its size, above 0.
            seconds: It took.
        """
        assert n > 0.0, f"a call of size {n}"
        assert 0.0 <= seconds < inf, f"a call of {seconds} seconds"
        if not self._mean_n and not self._begin(n, seconds):
            return
        expected_s = self.a_s + self.b_s * n
        # Relative to the smaller of the two: twice as fast is as far off as twice as slow.
        error = abs(seconds - expected_s) / max(min(seconds, expected_s), TINY_S)
        limit = TOLERANCE * max(self._calm if self._doubts else self._scale, LEAST_SCALE)
        weight = 1.0
        if error > limit:
            weight = self._doubt(n, seconds, error, limit)
            if not weight:
                return
            error = limit
        elif self._doubts:
            self._doubts -= 1
            if not self._doubts:
                self._rival = None
        self._add(n, seconds, weight)
        self._scale += (SIGMA * error - self._scale) / (self.num + FIRST_SCALE_NUM)

    def _begin(self, n: float, seconds: float) -> bool:
        """Centre everything at the first size; whether there is a line already that this call may contradict."""
        self._mean_n = n
        if self.num:
            self._mean_s = self.a_s + self.b_s * n
            self._nn = KEEP * n * n if self.b_s else 0.0  # a flat line may come from calls of one size
            self._ns = self._nn * self.b_s
            return True
        self.num = 1.0
        self._mean_s = self.a_s = seconds
        return False

    def _add(self, n: float, seconds: float, weight: float) -> None:
        forgetting, nn = self._forgetting, self._nn
        self.num = num = forgetting * self.num + weight
        gain = weight / num
        far_n, far_s = n - self._mean_n, seconds - self._mean_s
        self._mean_n = mean_n = self._mean_n + gain * far_n
        self._mean_s += gain * far_s
        keep = forgetting if nn > KEEP * mean_n * mean_n else 1.0
        far = weight * (1.0 - gain) * far_n
        self._nn = keep * nn + far * far_n
        self._ns = keep * self._ns + far * far_s
        self._solve()

    def _solve(self) -> None:
        """Least squares with ``a, b >= 0``: where the free line breaks a bound, the best one lies on that bound."""
        mean_n, mean_s, nn, ns = self._mean_n, self._mean_s, self._nn, self._ns
        b_s = ns / nn if nn > 0.0 and ns > 0.0 else 0.0
        a_s = mean_s - b_s * mean_n
        if a_s < 0.0:
            a_s = 0.0
            b_s = (ns + self.num * mean_n * mean_s) / (nn + self.num * mean_n * mean_n)
        self.a_s, self.b_s = a_s, b_s

    def _doubt(self, n: float, seconds: float, error: float, limit: float) -> float:
        """Return the weight of a call that is off by more than noise: 0 of a stall, or where it overthrew the fit."""
        limit += self._ignorance(n, seconds, limit)
        if error <= limit:
            return 1.0
        if self._rival is None:
            self._calm = self._scale
            self._rival = LinearFit(self._forgetting)
            self._rival._scale = self._scale
        self._rival.observe(n, seconds)
        self._doubts += 1
        if self._doubts >= min(ADOPT, self.num):
            self._adopt(self._rival)
            return 0.0
        return limit / error if error <= STALL else 0.0

    def _ignorance(self, n: float, seconds: float, limit: float) -> float:
        """How far off, relatively, the line may be at `n` because its slope is not known well.

        Never more than ``a, b >= 0`` allows: time grows with size, and at most in proportion.
        """
        far, expected_s = n - self._mean_n, self.a_s + self.b_s * n
        if not far:
            return 0.0
        ratio = n / self._mean_n
        if seconds > expected_s:
            bound = self._mean_s * max(ratio, 1.0) / max(expected_s, TINY_S)
        else:
            bound = expected_s / max(self._mean_s * min(ratio, 1.0), TINY_S)
        slope_s = limit * self._mean_s * abs(far) / sqrt(self._nn) if self._nn > 0.0 else inf
        return max(0.0, min(slope_s / max(expected_s, TINY_S), bound - 1.0))

    def _adopt(self, rival: LinearFit) -> None:
        """Become the rival; where it has seen too few sizes for a slope, keep the old one in proportion."""
        mean_n = rival._mean_n
        expected_s = self.a_s + self.b_s * mean_n
        missing = min(self._nn, KEEP * mean_n * mean_n - rival._nn)
        slope_s = self.b_s * rival._mean_s / max(expected_s, TINY_S)
        self.num, self._mean_n, self._mean_s = rival.num, mean_n, rival._mean_s
        self._nn, self._ns, self._scale = rival._nn, rival._ns, rival._scale
        if missing > 0.0:
            self._nn += missing
            self._ns += missing * slope_s
        self._rival, self._doubts = None, 0
        self._solve()
