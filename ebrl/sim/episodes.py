"""`EpisodeMeter`: what is counted about the running episode of one environment."""

from __future__ import annotations

from typing import Any

from ebrl.core.records import Episode


class EpisodeMeter:
    """Sums of one episode at a time."""

    __slots__ = (
        "assigned",
        "began_s",
        "counted",
        "first_decision",
        "lost",
        "num_steps",
        "position",
        "seed",
        "steps_before",
        "success",
        "total_reward",
    )

    def __init__(self) -> None:
        self.assigned: tuple[int, int] | None = None  # taken from the plan for an episode that has not begun
        self.position = 0
        self.seed = 0
        self.steps_before = 0
        self.num_steps = 0
        self.begin(0.0, 0)
        self.counted = True  # there was none yet

    @property
    def env_steps(self) -> int:
        """Simulator steps of all episodes so far."""
        return self.steps_before + self.num_steps

    def begin(self, now_s: float, num_decisions: int) -> None:
        """An episode begins."""
        if self.assigned is not None:
            (self.position, self.seed), self.assigned = self.assigned, None
        self.began_s = now_s
        self.first_decision = num_decisions
        self.steps_before += self.num_steps
        self.num_steps = 0
        self.total_reward = 0.0
        self.success: bool | None = None
        self.lost = False  # how it went on is not known
        self.counted = False

    def fail(self, now_s: float, num_decisions: int) -> None:
        """An episode came to nothing before it began: there is nothing to count."""
        self.begin(now_s, num_decisions)
        self.lost = self.counted = True

    def end(self, env: int, task: str, now_s: float, num_decisions: int, version: int) -> Episode:
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
            task=task,
        )

    def see(self, info: dict[str, Any]) -> None:
        """Look for success in the `info` of a step."""
        success = info.get("success", info.get("is_success"))
        if success is not None:
            self.success = bool(success) or bool(self.success)
