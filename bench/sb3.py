"""Stable-Baselines3's PPO with the task, network and settings of one of our runs: what other people's code makes of it.

The package is optional: ``pip install 'ebrl[bench]'``.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ebrl import EnvSpec, PolicyOut, PPOConfig, TorchPolicy
from ebrl.core.errors import ConfigError
from ebrl.core.records import Array
from ebrl.gen.policies.base import bounds
from ebrl.gen.policies.normalizer import ObservationNormalizer

LOG_STD = -0.5  # as `ebrl.GaussianPolicy` begins


def require() -> None:
    """Look whether it is there, before a long run.

    Raises:
        ConfigError: It is not installed.
    """
    if importlib.util.find_spec("stable_baselines3") is None:
        raise ConfigError("stable_baselines3, which EBRL is compared with, is not installed: pip install 'ebrl[bench]'")


@dataclass(frozen=True)
class Finished:
    """An episode that has ended: its sum of rewards, not scaled, and whether success was ever reported."""

    total_reward: float
    success: bool | None


class Task(gymnasium.Wrapper[Array, Any, Any, Any]):
    """An environment as the spec has it: actions repeated, an own horizon; and rewards scaled. Only the state is seen.

    Args:
        env: What the spec makes.
        spec: Says the rest.
        reward_scale: Multiplies rewards.
        finished: Takes the episodes that end.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], spec: EnvSpec, reward_scale: float, finished: list[Finished]
    ) -> None:
        super().__init__(env)
        if isinstance(env.observation_space, spaces.Dict):
            self.observation_space = env.observation_space["state"]
        self._spec, self._scale, self._finished = spec, reward_scale, finished
        self._steps, self._total = 0, 0.0
        self._success: bool | None = None

    def reset(self, **kwargs: Any) -> tuple[Array, dict[str, Any]]:
        self._steps, self._total, self._success = 0, 0.0, None
        obs, info = self.env.reset(**kwargs)
        return state(obs), info

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        total, terminated, truncated = 0.0, False, False
        for _ in range(self._spec.action_repeat):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            self._steps += 1
            if "success" in info:
                self._success = bool(info["success"]) or bool(self._success)
            truncated = truncated or self._steps == self._spec.horizon
            if terminated or truncated:
                break
        self._total += total
        if terminated or truncated:
            self._finished.append(Finished(self._total, self._success))
        return state(obs), self._scale * total, terminated, truncated, info


def state(obs: Any) -> Array:
    """Return the numbers of an observation that may have a name."""
    numbers: Array = obs["state"] if isinstance(obs, dict) else obs
    return numbers.astype(np.float32)


class Actor(TorchPolicy):
    """The actor of Stable-Baselines3 with its observation statistics, to be evaluated as ours are.

    Args:
        features: Scales observations.
        actor: From those to the means of an action, or the logits of a choice.
        spec: Of the task.
    """

    low: Tensor
    high: Tensor

    def __init__(self, features: nn.Module, actor: nn.Module, spec: EnvSpec) -> None:
        discrete = spec.action.num_values is not None
        super().__init__(horizon=1, noise_dim=1 if discrete else spec.action.size)
        self.features, self.actor, self.discrete = features, actor, discrete
        low, high = bounds(spec.action)
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        """Take the mean, or the likeliest choice."""
        out = self.actor(self.features(batch["state"]))
        action = out.argmax(-1, keepdim=True) if self.discrete else out[:, None].clamp(self.low, self.high)
        return PolicyOut(action, torch.zeros(len(action), 1, 1), torch.zeros(len(action)), {})

    def evaluate(self, batch: dict[str, Tensor], aux: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Not needed."""
        raise AssertionError("only evaluated")


class Reference:
    """A PPO of Stable-Baselines3 on environments in this process, which is faster here than its process version.

    What is the same: network (64 and 64, tanh, mean and value apart), initial deviation, optimiser, and all of a
    `PPOConfig` that both have; its value loss is the squared error, ours half of it. Observations and rewards are
    normalised after every step there, and after every update here.

    Args:
        spec: Of the task.
        config: Of our learner.
        num_envs: Environments.
        normalize_obs: Scale observations by running statistics.
        seed: Of everything.

    Attributes:
        finished: Episodes that have ended, for whoever wants to take them.
    """

    def __init__(self, spec: EnvSpec, config: PPOConfig, *, num_envs: int, normalize_obs: bool, seed: int) -> None:
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

        self.finished: list[Finished] = []
        self._spec, self._batch_size = spec, config.batch_size

        def make() -> gymnasium.Env[Array, Any]:
            return Task(spec.make(), spec, config.reward_scale, self.finished)

        self._envs = VecNormalize(
            DummyVecEnv([make] * num_envs),
            norm_obs=normalize_obs,
            norm_reward=config.normalize_return,
            gamma=config.gamma,
        )

        def annealed(value: float, too: bool = True) -> float | Callable[[float], float]:
            return value if config.anneal_updates is None or not too else lambda left: left * value

        self._model = PPO(
            "MlpPolicy",
            self._envs,
            n_steps=config.batch_size // num_envs,
            batch_size=config.minibatch_size,
            n_epochs=config.epochs,
            learning_rate=annealed(config.learning_rate),
            clip_range=annealed(config.clip_range, config.anneal_clip_range),
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            vf_coef=config.value_coef / 2,
            ent_coef=config.entropy_coef,
            max_grad_norm=config.max_grad_norm,
            policy_kwargs={"net_arch": [64, 64]} | ({} if spec.action.num_values else {"log_std_init": LOG_STD}),
            device="cpu",
            seed=seed,
        )

    def learn(self, updates: int, on_update: Callable[[int], None]) -> None:
        """Train.

        Args:
            updates: How many.
            on_update: Told the number of each after it; `policy` may be called there.
        """
        from stable_baselines3.common.callbacks import BaseCallback

        batch_size = self._batch_size

        class AfterUpdates(BaseCallback):
            def _on_step(self) -> bool:
                return True

            def _on_rollout_start(self) -> None:  # the update before has ended
                if self.num_timesteps:
                    on_update(self.num_timesteps // batch_size)

        self._model.learn(updates * batch_size, callback=AfterUpdates())
        on_update(updates)

    def policy(self) -> TorchPolicy:
        """Return a copy of what was learned so far."""
        from stable_baselines3.common.running_mean_std import RunningMeanStd

        nets = self._model.policy
        actor = copy.deepcopy(nn.Sequential(nets.mlp_extractor.policy_net, nets.action_net))
        if not self._envs.norm_obs:
            return Actor(nn.Identity(), actor, self._spec)
        seen = cast(RunningMeanStd, self._envs.obs_rms)
        features = ObservationNormalizer(len(seen.mean))
        features.mean.copy_(torch.from_numpy(seen.mean))
        features.var.copy_(torch.from_numpy(seen.var))
        return Actor(features, actor, self._spec)

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()
