"""What an adapter with a camera observes, without its simulator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ebrl.sim.envs.common import observation_space


class Seen(gymnasium.Env[Any, Any]):
    """Observes as LIBERO does, in small; ends after four steps."""

    observation_space = observation_space(8, ["agentview"], 32)
    action_space = spaces.Box(-1, 1, (7,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.left = 4
        return self.look(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self.look(), 1.0, self.left == 0, False, {"success": self.left == 0}

    def look(self) -> Any:
        picture = self.np_random.integers(256, size=(32, 32, 3), dtype=np.uint8)
        return {"state": self.np_random.normal(size=8).astype(np.float32), "images/agentview": picture}
