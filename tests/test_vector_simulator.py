"""The border of a batched simulator: what is executed, what is seen, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from ebrl.core.errors import ConfigError, InvalidAction, InvalidData, SimulatorError
from ebrl.core.records import Array, ArraySpec, EnvSpec
from ebrl.sim.check import check_env
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.spec import env_spec, env_specs
from ebrl.sim.vector_check import check_vector_env
from ebrl.sim.vector_simulator import VectorSimulator
from tests.vectors import batched_spec, lengths


class Counting(VectorEnv[Any, Any, Any]):
    """Slot s shows ``[s, its seed, its steps]`` in one buffer, and ends after ``s + 2`` steps; asserts its rules."""

    def __init__(self, num: int = 3, **options: Any) -> None:
        self.num_envs = num
        self.metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.options = options
        self.obs = np.zeros((num, 3), np.float32)
        self.obs[:, 0] = np.arange(num)
        self.over = np.ones(num, bool)
        self.masks: list[list[bool]] = []

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = np.ones(self.num_envs, bool) if options is None else options["reset_mask"]
        self.masks.append(mask.tolist())
        self.obs[mask, 1] = np.array([s or 0 for s in seed])[mask]
        self.obs[mask, 2] = 0
        self.over[mask] = False
        return self.obs, {}

    def step(self, actions: Any) -> Any:
        assert not self.over.any(), "a slot was stepped after its end"
        actions += 100.0  # as simulators do that scale in place
        self.obs[:, 2] += 1
        self.over = self.obs[:, 2] >= self.obs[:, 0] + 2
        result = {
            "obs": self.obs,
            "reward": self.obs[:, 2] * 1.0,
            "terminated": self.over.copy(),
            "truncated": np.zeros(self.num_envs, bool),
            "info": {"success": self.obs[:, 2] == 1, "_success": np.arange(self.num_envs) > 0},
        }
        return tuple({**result, **self.options}.values())


def spec(num: int = 3, **options: Any) -> EnvSpec:
    action = ArraySpec((1,), "float32")
    return EnvSpec("counting", lambda: Counting(num), ArraySpec((3,), "float32"), action, num_slots=num, **options)


def column(obs: Any, index: int) -> list[float]:
    return [float(number) for number in np.asarray(obs)[:, index]]


def objects(*flags: Any) -> Any:
    return np.array(flags, object)


SEEDS = {0: 10, 1: 11, 2: 12}
ONE = np.zeros((3, 1), np.float32)


def test_a_mask_resets_its_slots_and_no_others() -> None:
    sim = VectorSimulator(spec())
    obs, _ = sim.reset(SEEDS)
    assert column(obs, 1) == [10, 11, 12]
    for _ in range(2):
        result = sim.step(ONE)
    assert result.terminated.tolist() == [True, False, False]
    again, _ = sim.reset({0: 20})
    assert column(again, 1) == [20, 11, 12]
    assert column(again, 2) == [0, 2, 2]
    assert column(result.obs, 2) == [2, 2, 2]  # no view of what the simulator overwrites
    assert column(sim.step(ONE).obs, 2) == [1, 3, 3]


class ShowsOnlyTheReset(Counting):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed, options=options)
        return np.where(np.array(self.masks[-1])[:, np.newaxis], obs, 99), info


def test_what_a_masked_reset_shows_of_other_slots_is_not_believed() -> None:
    sim = VectorSimulator(replace(spec(), make=ShowsOnlyTheReset))
    sim.reset(SEEDS)
    seen = sim.step(ONE).obs
    again, _ = sim.reset({1: 20})
    assert column(again, 1) == [10, 20, 12]
    assert column(again, 2) == [1, 0, 1]
    assert column(seen, 2) == [1, 1, 1]


@pytest.mark.parametrize("make", [Counting, ShowsOnlyTheReset])
def test_who_works_in_what_was_seen_changes_nothing(make: Any) -> None:
    sim = VectorSimulator(replace(spec(), make=make))
    for step in range(3):
        obs, _ = sim.reset({0: 10 + step} if step else SEEDS)
        assert column(obs, 0) == [0, 1, 2]
        assert column(obs, 2) == [0, step, step]
        np.asarray(obs)[:] = 100
        np.asarray(sim.reset({0: 10})[0])[:] = 100  # once more, so that what is seen of others comes from a reset
        seen = sim.step(ONE).obs
        assert column(seen, 2) == [1, step + 1, step + 1]
        np.asarray(seen)[:] = 100


def test_a_chunk_ends_with_the_episode_of_each_slot() -> None:
    env = Counting()
    sim = VectorSimulator(replace(spec(), make=lambda: env))
    sim.reset(SEEDS)
    chunk = np.zeros((3, 5, 1), np.float32)
    result = sim.step(chunk)
    assert result.rewards == [(1.0, 2.0), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 4.0)]
    assert result.terminated.tolist() == [True, True, True]
    assert column(result.obs, 2) == [2, 3, 4]  # of each slot what its episode ended with
    assert column(result.obs, 1) == [10, 11, 12]
    assert result.success == [None, True, True]  # slot 0 never says
    assert result.num_steps == 4
    assert env.masks == [[True] * 3, [True, False, False], [False, True, False]]  # carried along after their ends
    assert chunk.max() == 0.0


def test_the_horizon_truncates_each_slot_by_itself() -> None:
    sim = VectorSimulator(spec(horizon=3, action_repeat=2))
    sim.reset(SEEDS)
    result = sim.step(np.zeros((3, 2, 1), np.float32))
    assert result.rewards == [(1.0, 2.0), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0)]
    assert result.terminated.tolist() == [True, True, False]
    assert result.truncated.tolist() == [False, False, True]
    sim.reset({0: 1})
    result = sim.step(ONE)
    assert result.rewards == [(1.0, 2.0), (), ()]


def test_what_carried_slots_do_is_not_looked_at() -> None:
    env = Counting(reward=np.array([1.0, np.nan, 1.0]))
    sim = VectorSimulator(replace(spec(), make=lambda: env))
    sim.reset(SEEDS)
    env.over[:] = False
    with pytest.raises(InvalidData, match="rewards: expected a finite number each, got nan in slot 1"):
        sim.step(ONE)
    sim.reset({0: 1, 2: 1})
    assert sim.step(ONE).rewards == [(1.0,), (), (1.0,)]


def test_rewards_that_would_spoil_every_statistic_are_refused() -> None:
    sim = VectorSimulator(replace(spec(), make=lambda: Counting(reward=np.array([1.0, -1e300, 1.0]))))
    sim.reset(SEEDS)
    with pytest.raises(InvalidData, match=r"rewards: expected a number of at most 1e\+38 each, got -1e\+300 in slot 1"):
        sim.step(ONE)


def test_steps_at_the_wrong_time() -> None:
    sim = VectorSimulator(spec())
    with pytest.raises(SimulatorError, match="step before reset: call reset first"):
        sim.step(ONE)
    sim.reset(SEEDS)
    sim.step(np.zeros((3, 9, 1), np.float32))
    with pytest.raises(SimulatorError, match="step after the end of all episodes: call reset first"):
        sim.step(ONE)
    sim.close()
    with pytest.raises(SimulatorError, match="step after close"):
        sim.step(ONE)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (
            np.zeros((2, 1), np.float32),
            r"actions: expected float32 of shape \(3, 1\) or \(3, H, 1\), got float32 .*\(2, 1\)",
        ),
        (np.zeros((3, 0, 1), np.float32), "actions: expected float32 of shape"),
        (np.zeros((3, 1), complex), "actions: expected float32 of shape"),
        (np.full((3, 1), np.nan, np.float32), "action: expected finite numbers, got NaN"),
        ([[0.0], [0.0, 1.0], [0.0]], "action: expected an array, got list"),
    ],
)
def test_actions_of_another_form(actions: Any, message: str) -> None:
    sim = VectorSimulator(spec())
    sim.reset(SEEDS)
    with pytest.raises(InvalidAction, match=message):
        sim.step(actions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"obs": np.zeros((2, 3), np.float32)},
            r"observation: expected float32 of shape \(3, 3\), got float32 of shape",
        ),
        ({"obs": np.full((3, 3), np.nan, np.float32)}, "observation: expected finite numbers, got NaN"),
        ({"reward": np.zeros(2)}, r"rewards: expected 3 numbers, got float64 of shape \(2,\)"),
        ({"terminated": np.zeros(3)}, "terminated: expected 3 flags, got float64"),
        ({"truncated": False}, "truncated: expected 3 flags, got bool"),
        ({"info": []}, "info: expected a dictionary, got list"),
        (
            {"info": {"success": np.array(["yes", "no", "no"])}},
            r"info\['success'\]: expected one flag per slot, got <U3",
        ),
        ({"info": {"success": objects(True, "no", None)}}, r"info\['success'\]: expected one flag, got str 'no'"),
        ({"info": {"success": True}}, r"info\['success'\]: expected one flag per slot, got bool of shape \(\)"),
        ({"more": 1}, r"step: expected \(observations, rewards, terminated, truncated, info\), got"),
    ],
)
def test_answers_of_another_form(options: dict[str, Any], message: str) -> None:
    sim = VectorSimulator(replace(spec(), make=lambda: Counting(**options)))
    sim.reset(SEEDS)
    with pytest.raises(SimulatorError, match=message) as caught:
        sim.step(ONE)
    assert "\n" not in str(caught.value)
    with pytest.raises(SimulatorError, match="step after an error: call reset first"):
        sim.step(ONE)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (np.array([True, False, True]), [True, False, True]),
        (np.array([1, 0, 2], np.uint8), [True, False, True]),
        (np.array([np.nan, 0.0, 0.5]), [None, False, True]),
        (np.array([[1.0], [0.0], [np.nan]]), [True, False, None]),
        ([True, False, False], [True, False, False]),
        (objects(np.True_, None, False), [True, None, False]),
        (objects(np.array([1.0]), np.nan, np.int64(0)), [True, None, False]),
    ],
)
@pytest.mark.parametrize("key", ["success", "is_success"])
def test_flags_of_any_type(key: str, said: Any, expected: list[bool | None]) -> None:
    sim = VectorSimulator(replace(spec(), make=lambda: Counting(info={key: said})))
    sim.reset(SEEDS)
    assert sim.step(ONE).success == expected


# Descriptions.


def test_a_function_that_makes_batched_simulators_says_so_itself() -> None:
    found = env_spec(Counting, num=5)
    assert (found.num_slots, found.slot_seeds, found.observation) == (5, True, ArraySpec((3,), "float32"))
    with pytest.raises(ConfigError, match="num_slots=4, but the function makes 5 slots"):
        env_spec(Counting, num=5, num_slots=4)


def test_ids_and_functions_are_batched_in_turn() -> None:
    cart = env_spec("CartPole-v1", num_slots=3, horizon=20)
    assert (cart.num_slots, cart.action.num_values) == (3, 2)
    check_vector_env(cart)
    (same,) = env_specs("CartPole-v1", num_slots=3)
    assert same.num_slots == 3
    check_vector_env(env_spec(functools.partial(ScriptedEnv, 3, 2), num_slots=1, length=4))


def test_what_cannot_be_batched() -> None:
    with pytest.raises(ConfigError, match="a batched simulator runs in a thread of this process"):
        env_spec("CartPole-v1", num_slots=2, host="process")
    with pytest.raises(ConfigError, match="num_slots must be at least 1 for a batched simulator, got -1"):
        env_spec("CartPole-v1", num_slots=-1)
    with pytest.raises(
        ConfigError, match=r"SyncVectorEnv.*AutoresetMode.NEXT_STEP, so that it would reset slots by itself"
    ):
        env_spec(SyncVectorEnv, env_fns=[ScriptedEnv])
    with pytest.raises(ConfigError, match="Undecided: its metadata have no autoreset_mode, so that nobody knows"):
        env_spec(Undecided)
    with pytest.raises(ConfigError, match="takes a list of seeds, one per slot, or says metadata"):
        env_spec(lambda: disabled(gymnasium.make_vec("CartPole-v1", 2)))
    with pytest.raises(ConfigError, match="scripted is a batched simulator: use check_vector_env"):
        check_env(batched_spec())


class Undecided(Counting):
    """Does not say whether it resets slots by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata = {}


def disabled(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.DISABLED}
    return env


# The check.


class ResetsAll(Counting):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=[s or 7 for s in seed])


class ResetsNone(Counting):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed) if options is None else (self.obs, {})


class Endless(Counting):
    def step(self, actions: Any) -> Any:
        obs, reward, _, truncated, info = super().step(actions)
        self.over[:] = False
        return obs, reward, truncated, truncated, info


class SharesSeeds(Counting):
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=[s if s is None else s + i for i, s in enumerate(seed)], options=options)


class ResetsItself(Counting):
    """Begins the next episode where one has ended, and is not to be told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = np.zeros(3, bool)

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, *rest = super().step(actions)
        self.begun = terminated
        obs[self.begun, 1:] = 77, 0
        self.over[:] = False
        return obs, reward, terminated, *rest

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        begun, seen = self.begun, self.obs.copy()
        obs, info = super().reset(seed=seed, options=options)
        obs[begun] = seen[begun]
        self.begun = begun & ~np.array(self.masks[-1])
        return obs, info


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ResetsAll, "slot 1: what a slot does after another one was reset by mask is not what it was"),
        (
            ResetsNone,
            "slot 0: the observation after a reset by mask with the seed of its first reset is not what it was",
        ),
        (SharesSeeds, "slots 0 and 1 had the same seed and actions and came to different observations"),
        (Endless, "no end of slot 0 after 10000 steps"),
        (ResetsItself, "slot 0: the observation after a reset by mask at the end of an episode, compared with another"),
    ],
)
def test_the_check_finds(kind: Any, message: str) -> None:
    hidden = replace(spec(), make=lambda: Hidden(kind), observation=ArraySpec((2,), "float32"))
    check_vector_env(replace(hidden, make=lambda: Hidden(Counting)))
    with pytest.raises(SimulatorError, match=message) as caught:
        check_vector_env(hidden)
    assert "\n" not in str(caught.value)


class Hidden(VectorEnv[Any, Any, Any]):
    """Does not show the number of the slot, and lets all of them end after three steps."""

    def __init__(self, kind: Any) -> None:
        self.env = kind()
        self.env.obs[:, 0] = 1
        self.num_envs, self.metadata = self.env.num_envs, self.env.metadata

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs[:, 1:], info

    def step(self, actions: Any) -> Any:
        obs, *rest = self.env.step(actions)
        return obs[:, 1:], *rest


def test_the_check_of_other_things() -> None:
    with pytest.raises(ConfigError, match="episodes must be at least 1, got 0"):
        check_vector_env(batched_spec(), episodes=0)
    with pytest.raises(ConfigError, match="CartPole-v1 is no batched simulator: use check_env"):
        check_vector_env(env_spec("CartPole-v1"))
    check_vector_env(batched_spec(4, length=lengths(1, 5)), episodes=3)
    check_vector_env(replace(batched_spec(2, length=9), slot_seeds=False, make=OneSeed))


class OneSeed(SyncVectorEnv):
    """Takes one seed."""

    def __init__(self) -> None:
        super().__init__([lambda: ScriptedEnv(3, 2, length=9)] * 2, autoreset_mode=AutoresetMode.DISABLED)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is None or isinstance(seed, int)
        return super().reset(seed=seed, options=options)


class Ring(gymnasium.Env[Any, Any]):
    """Ends where it begins."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.num_steps = 0
        return self.look(), {}

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        return self.look(), 0.0, self.num_steps == 4, False, {}

    def look(self) -> Array:
        return np.full(1, self.num_steps % 4, np.float32)


class Still(Ring):
    """Always shows the same."""

    def look(self) -> Array:
        return np.zeros(1, np.float32)


class Coin(Ring):
    """Shows one of two things by chance."""

    def look(self) -> Array:
        return self.np_random.integers(2, size=1).astype(np.float32)


class Alike(SyncVectorEnv):
    """Simulators of one kind that take one seed."""

    def __init__(self, kind: Any, honours_masks: bool = True) -> None:
        super().__init__([kind] * 2, autoreset_mode=AutoresetMode.DISABLED)
        self.metadata = {**self.metadata, "slot_seeds": False}
        self.honours_masks = honours_masks

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        if options is not None and not self.honours_masks:
            return self._observations.copy(), {}
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("kind", [Ring, Still, Coin])
def test_the_check_accepts_what_looks_alike(kind: Any) -> None:
    for seed in range(8):
        check_vector_env(env_spec(kind, num_slots=2), seed=seed)
        check_vector_env(env_spec(functools.partial(Alike, kind)), seed=seed)


def test_the_check_finds_that_masks_are_ignored_without_seeds_of_slots() -> None:
    with pytest.raises(SimulatorError, match="a reset by mask left its slot as it was"):
        check_vector_env(env_spec(functools.partial(Alike, Ring, honours_masks=False)))
