"""`EpisodeMeter`: what is counted about the running episode of one environment."""

from __future__ import annotations

from typing import Any

from ebrl.core.records import Episode, StepResult


class EpisodeMeter:
    """Sums of one episode at a time."""

    __slots__ = ("assigned", "began_s", "first_decision", "num_steps", "position", "seed", "success", "total_reward")

    def __init__(self) -> None:
        self.assigned: tuple[int, int] | None = None  # taken from the plan for an episode that has not begun
        self.position = 0
        self.seed = 0
        self.begin(0.0, 0)

    def begin(self, now_s: float, num_decisions: int) -> None:
        """An episode begins."""
        if self.assigned is not None:
            (self.position, self.seed), self.assigned = self.assigned, None
        self.began_s = now_s
        self.first_decision = num_decisions
        self.num_steps = 0
        self.total_reward = 0.0
        self.success: bool | None = None

    def add(self, result: StepResult) -> None:
        """Count the outcome of a step."""
        rewards = result.rewards
        if len(rewards) == 1:
            self.num_steps += 1
            self.total_reward += rewards[0]
        else:
            self.num_steps += len(rewards)
            self.total_reward += sum(rewards)
        if result.info:
            self._see(result.info)

    def end(self, env: int, now_s: float, num_decisions: int, version: int) -> Episode:
        """Return the episode."""
        return Episode(
            env=env,
            episode=self.position,
            seed=self.seed,
            total_reward=self.total_reward,
            num_steps=self.num_steps,
            num_decisions=num_decisions - self.first_decision,
            success=self.success,
            duration_s=now_s - self.began_s,
            version=version,
        )

    def _see(self, info: dict[str, Any]) -> None:
        success = info.get("success", info.get("is_success"))
        if success is not None:
            self.success = bool(success) or bool(self.success)
