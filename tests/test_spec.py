"""`env_spec`: ids, factories, spaces, options, and the messages when they do not fit."""

from __future__ import annotations

import functools
import importlib
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ebrl.core.errors import ConfigError, InvalidData, SpaceError, UnknownEnv
from ebrl.core.records import ArraySpec
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.simulator import Simulator
from ebrl.sim.spec import env_spec


class Spaces(gymnasium.Env[Any, Any]):
    """Has the spaces it is given."""

    def __init__(self, observation: Any = None, action: Any = None, info: Any = None) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float64) if observation is None else observation
        self.action_space = spaces.Box(0.5, 1, (2,), np.float32) if action is None else action
        self.info = info or {}
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, self.info

    def close(self) -> None:
        self.closed = True


def test_gymnasium_id() -> None:
    spec = env_spec("CartPole-v1", horizon=50, task="balance")
    assert (spec.id, spec.task, spec.horizon, spec.host) == ("CartPole-v1", "balance", 50, "thread")
    assert spec.observation == ArraySpec((4,), "float32")
    assert spec.action == ArraySpec((), "int64", num_values=2)
    sim = Simulator(pickle.loads(pickle.dumps(spec)))
    sim.reset(0)
    sim.step(np.array([0, 1]))
    sim.close()


def test_own_time_limit_of_an_id_is_respected() -> None:
    sim = Simulator(env_spec("Pendulum-v1", max_episode_steps=5))
    sim.reset(0)
    result = sim.step(np.zeros((9, 1), np.float32))
    assert (result.num_steps, result.truncated) == (5, True)
    sim.close()


def test_module_prefix_imports_the_module() -> None:
    spec = env_spec("gymnasium.envs.classic_control:CartPole-v1")
    assert spec.id == "gymnasium.envs.classic_control:CartPole-v1"
    with pytest.raises(ConfigError, match="module 'no_such_module' is not installed"):
        env_spec("no_such_module:X-v0")


@pytest.mark.parametrize("name", ["CartPol-v1", "cartpole", "CartPole-v77"])
def test_unknown_ids_list_the_nearest(name: str) -> None:
    with pytest.raises(UnknownEnv, match=f"no environment '{name}'; nearest: .*CartPole-v1"):
        env_spec(name)


def test_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("no", name="metaworld")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'ebrl\[metaworld\]'"):
        env_spec("Meta-World/MT1", env_name="reach-v3")


def test_factories() -> None:
    spec = env_spec(ScriptedEnv)
    assert spec.id == "ScriptedEnv"
    assert spec.info_keys == ("success", "is_success", "x")
    spec = env_spec(functools.partial(ScriptedEnv, obs_dim=3), num_actions=5)
    assert (spec.id, spec.observation, spec.action.num_values) == ("ScriptedEnv", ArraySpec((3,), "float32"), 5)
    assert pickle.loads(pickle.dumps(spec)).observation == spec.observation


def test_numeric_info_keys_only() -> None:
    info = {"a": 1, "b": np.float32(2), "c": True, "d": np.zeros(1), "e": "x", "f": np.bool_(True), "g": None, 3: 4.0}
    assert env_spec(lambda: Spaces(info=info)).info_keys == ("success", "is_success", "a", "b", "c", "f")


def test_bounds_and_dtypes() -> None:
    spec = env_spec(lambda: Spaces(spaces.Box(np.array([-np.inf, 0.0]), np.inf, (2,), np.float64)))
    assert isinstance(spec.observation, ArraySpec)
    assert spec.observation.dtype == "float64"
    assert spec.observation.low is not None
    assert spec.observation.high is None
    assert spec.action.low is not None
    assert spec.action.low.tolist() == [0.5, 0.5]


def test_dictionary_of_boxes() -> None:
    space = spaces.Dict(image=spaces.Box(0, 255, (4, 4, 3), np.uint8), state=spaces.Box(-1, 1, (2,), np.float32))
    spec = env_spec(lambda: Spaces(space))
    assert spec.observation == {"image": ArraySpec((4, 4, 3), "uint8"), "state": ArraySpec((2,), "float32")}


BOX = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Discrete(3), BOX, "observations are a Discrete.*FlattenObservation"),
        (spaces.Tuple([BOX]), BOX, "observations are a Tuple.*FlattenObservation"),
        (spaces.Dict(a=spaces.Dict(b=BOX)), BOX, r"observation\['a'\] is a Dict.*FlattenObservation"),
        (BOX, spaces.MultiDiscrete([2, 2]), "actions are MultiDiscrete.*TransformAction"),
        (BOX, spaces.Discrete(3, start=1), "start at 1.*TransformAction"),
        (BOX, spaces.Box(0, 9, (2,), np.int32), "expected a Box of floats.*TransformAction"),
    ],
)
def test_spaces_that_do_not_fit_name_a_way_out(observation: Any, action: Any, message: str) -> None:
    made: list[Spaces] = []

    def make() -> Spaces:
        made.append(Spaces(observation, action))
        return made[0]

    with pytest.raises(SpaceError, match=message):
        env_spec(make)
    assert made[0].closed


def test_an_environment_that_contradicts_itself_is_found_at_once() -> None:
    with pytest.raises(InvalidData, match="NaN"):
        env_spec(functools.partial(ScriptedEnv, faults={1: "nan"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": 0}, "horizon must be an integer of at least 1, got 0"),
        ({"horizon": True}, "horizon"),
        ({"action_repeat": 0}, "action_repeat"),
        ({"action_repeat": 1.5}, "action_repeat"),
        ({"host": "gpu"}, "host must be one of .*'inline', 'auto'.* or None, got 'gpu'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env_spec("CartPole-v1", **options)


def test_not_a_factory() -> None:
    with pytest.raises(ConfigError, match="takes an id or a function"):
        env_spec(ScriptedEnv())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected the function to make a gymnasium\.Env, got list"):
        env_spec(list)
