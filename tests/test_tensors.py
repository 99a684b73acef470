"""Simulators that are batched on a GPU, with tensors on the CPU in their place: what is at the border."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from ebrl.core.records import EnvSpec
from ebrl.core.virtual import run_virtual
from ebrl.sim.envs.common import STATE, observation_space
from ebrl.sim.envs.tensors import TensorVectorEnv, flat, to_numpy
from ebrl.sim.spec import env_spec
from ebrl.sim.vector_check import check_vector_env
from tests.helpers import the_failure
from tests.vectors import vector_training

BOX = spaces.Box(-1, 1, (2,), np.float32)


class FakeManiSkill:
    """Has the interface of ``mani_skill.envs.BaseEnv`` as far as it is used: tensors, and partial resets by numbers."""

    def __init__(self, num_envs: int = 3, length: int = 5) -> None:
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.state = torch.zeros(num_envs, 2)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int32)
        self.length = length
        self.seeds: list[Any] = []
        self.actions: list[Any] = []
        self.closed = False

    def reset(self, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        chosen = (options or {}).get("env_idx", torch.arange(self.num_envs))
        assert isinstance(chosen, torch.Tensor)
        with torch.random.fork_rng():
            torch.manual_seed(0 if seed is None else seed)
            self.state[chosen] = torch.rand(len(chosen), 2)
        self.elapsed[chosen] = 0
        return self.seen(), {"reconfigure": False}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        self.elapsed += 1
        self.state += 0.01 * torch.as_tensor(action["arm"] if isinstance(action, dict) else action)
        success = self.elapsed >= self.length
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        info = {"success": success, "elapsed_steps": self.elapsed, "extra": {"a": 1}, "poses": self.state}
        return self.seen(), self.state.sum(1), success.clone(), never, info

    def seen(self) -> dict[str, Any]:
        return {"agent": {"qpos": self.state, "qvel": 2 * self.state}, "extra": {"goal": self.state[:, :1]}}

    def close(self) -> None:
        self.closed = True


def observe(obs: Any) -> dict[str, Any]:
    return {STATE: flat([obs["agent"]["qpos"], obs["agent"]["qvel"], obs["extra"]["goal"]])}


def make(num: int = 3, env: FakeManiSkill | None = None, **options: Any) -> TensorVectorEnv:
    return TensorVectorEnv(env or FakeManiSkill(num), observation_space(5), BOX, observe, **options)


def spec(num: int = 3) -> EnvSpec:
    return env_spec(make, num=num, horizon=9)


def test_it_is_a_batched_simulator() -> None:
    found = spec()
    assert (found.num_slots, found.slot_seeds) == (3, False)
    assert isinstance(found.observation, dict)
    assert (found.observation[STATE].shape, found.observation[STATE].dtype) == ((5,), "float32")
    check_vector_env(found)
    check_vector_env(found, tolerance=1e-6)


def test_slots_are_reset_by_their_numbers() -> None:
    env = FakeManiSkill()
    batched = make(env=env)
    before, info = batched.reset(seed=7)
    assert info == {}
    result = batched.step(np.ones((3, 2), np.float32))
    after, _ = batched.reset(seed=8, options={"reset_mask": np.array([False, True, False])})
    assert env.seeds == [7, 8]
    assert env.elapsed.tolist() == [1, 0, 1]
    assert not np.array_equal(after[STATE][1], result[0][STATE][1])
    assert np.array_equal(after[STATE][::2], result[0][STATE][::2])
    assert before[STATE].dtype == np.float32
    assert sorted(result[4]) == ["elapsed_steps", "success"]
    assert isinstance(result[1], np.ndarray)
    batched.close()
    assert env.closed


def test_actions_of_several_robots_are_parts_of_one() -> None:
    env = FakeManiSkill()
    batched = make(env=env, act=lambda actions: {"arm": actions[:, :1], "hand": actions[:, 1:]})
    batched.reset(seed=0)
    batched.step(np.ones((3, 2), np.float32))
    assert env.actions[0]["hand"].shape == (3, 1)


def test_tensors_with_gradients_are_numbers_too() -> None:
    assert to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_it_trains() -> None:
    async def main() -> None:
        async with vector_training(spec(4), updates=3, batch_size=8) as s:
            decisions = await s.run()
        assert all(d.terminated == (len(d.rewards) == 1 and d.index % 5 == 4) for d in decisions)

    run_virtual(main())


def test_an_evaluation_says_that_its_seeds_are_only_numbers(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with vector_training(spec(4)) as s:
            await s.envs.run_episodes([1, 2])

    assert "is used for training" in str(the_failure(main()))
    assert "gives no slot a seed of its own, so that seeds of this evaluation only number its episodes" in caplog.text
