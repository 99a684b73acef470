"""`Batcher`: when to launch how many of the waiting requests. A pure decision; never awaits, never reads a clock.

Launching whatever waits (threshold 1, "greedy") is right when simulation is the bottleneck; waiting for almost
everybody is right when the fixed cost of a batch dominates. The threshold will be tuned; here it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebrl.core.errors import ConfigError, whole


@dataclass(frozen=True, slots=True)
class Batcher:
    """A rule.

    Attributes:
        threshold: Requests that make a batch worth launching. Of those of batched simulators, which have a row per
            slot, a batch takes no more.
        max_size: Requests in a batch at most.
        max_wait_s: Age of the oldest request at which a batch below the threshold is launched all the same. Counted
            from the request, never from the last launch.

    Raises:
        ConfigError: Out of range.

    Example:
        >>> rule = Batcher(threshold=8, max_size=32, max_wait_s=0.004)
        >>> rule.decide(40, 0.0), rule.decide(3, 0.001), rule.decide(3, 0.004), rule.decide(0, 0.0)
        ((32, None), (0, 0.003), (3, None), (0, None))
    """

    threshold: int = 1
    max_size: int = 256
    max_wait_s: float = 0.01

    def __post_init__(self) -> None:
        whole("Batcher.threshold", self.threshold)
        if whole("Batcher.max_size", self.max_size) < self.threshold:
            raise ConfigError(
                f"Batcher needs 1 <= threshold <= max_size, got threshold {self.threshold}, max_size {self.max_size}"
            )
        if not self.max_wait_s >= 0:
            raise ConfigError(f"Batcher.max_wait_s must not be negative, got {self.max_wait_s}")

    def decide(self, num_waiting: int, oldest_age_s: float) -> tuple[int, float | None]:
        """Decide for one free lane.

        Args:
            num_waiting: Requests.
            oldest_age_s: How long the first of them has waited.

        Returns:
            How many to launch now, oldest first; and if none, in how many seconds to look again (None: when
            something changes).
        """
        if num_waiting >= self.threshold:
            return min(num_waiting, self.max_size), None
        if not num_waiting:
            return 0, None
        left_s = self.max_wait_s - oldest_age_s
        return (0, left_s) if left_s > 1e-9 else (num_waiting, None)
