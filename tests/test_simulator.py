"""`Simulator`, `ScriptedEnv` and `check_env`: what passes the border of a simulator, and what does not."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ebrl.core.errors import ConfigError, InvalidData, SimulatorError
from ebrl.core.records import Array, ArraySpec, EnvSpec
from ebrl.sim.border import SUCCESS
from ebrl.sim.check import check_env
from ebrl.sim.fake import CONSTRUCTION, ScriptedEnv, ScriptedFault
from ebrl.sim.simulator import Simulator, Turns

OBS, ACTION = ArraySpec((3,), "float32"), ArraySpec((2,), "float32")
ZERO = np.zeros((1, 2), np.float32)


def scripted(*, horizon: int | None = None, action_repeat: int = 1, **options: Any) -> EnvSpec:
    make = functools.partial(ScriptedEnv, obs_dim=3, action_dim=2, **options)
    return EnvSpec("scripted", make, OBS, ACTION, horizon, action_repeat)


class Answers(gymnasium.Env[Any, Any]):
    """Returns from `step` what it was told to."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, answer: Any, first: Any = None) -> None:
        self.answer = answer
        self.first = (np.zeros(3, np.float32), {}) if first is None else first
        self.seen: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.first

    def step(self, action: Any) -> Any:
        self.seen.append(action)
        return self.answer


def answering(
    obs: Any = None, reward: Any = 0.0, info: Any = None, observation: Any = OBS, ends: Any = (False, False)
) -> Simulator:
    obs = np.zeros(3, np.float32) if obs is None else obs
    env = Answers((obs, reward, *ends, {} if info is None else info), (obs, {}))
    sim = Simulator(EnvSpec("answers", lambda: env, observation, ACTION))
    sim.reset(0)
    return sim


def test_chunk_stops_at_first_end_and_says_how_many_steps_ran() -> None:
    sim = Simulator(scripted(length=5, action_repeat=2))
    sim.reset(0)
    result = sim.step(np.zeros((2, 2), np.float32))
    assert (result.num_steps, result.truncated) == (4, False)
    result = sim.step(np.zeros((2, 2), np.float32))
    assert (result.num_steps, result.terminated, result.truncated) == (1, False, True)


def test_chunks_and_single_actions_give_the_same_trajectory() -> None:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (12, 2)).astype(np.float32)
    one, many = Simulator(scripted()), Simulator(scripted())
    starts: list[Any] = [one.reset(7)[0], many.reset(7)[0]]
    assert np.array_equal(*starts)
    singles = [one.step(action) for action in actions]
    chunks = [many.step(actions[at : at + 3]) for at in range(0, 12, 3)]
    assert [r for result in singles for r in result.rewards] == [r for result in chunks for r in result.rewards]
    ends: list[Any] = [singles[-1].obs, chunks[-1].obs]
    assert np.array_equal(*ends)


@pytest.mark.parametrize(("terminates", "flags"), [(True, (True, False)), (False, (False, True))])
def test_exactly_one_flag_is_set_where_horizon_and_own_end_meet(terminates: bool, flags: tuple[bool, bool]) -> None:
    sim = Simulator(scripted(length=4, horizon=4, terminates=terminates))
    sim.reset(0)
    result = sim.step(np.zeros((6, 2), np.float32))
    assert (result.num_steps, result.terminated, result.truncated) == (4, *flags)


def test_horizon_counts_from_every_reset() -> None:
    sim = Simulator(scripted(horizon=3))
    for _ in range(2):
        sim.reset(0)
        assert [sim.step(ZERO).truncated for _ in range(3)] == [False, False, True]


def test_step_needs_a_running_episode() -> None:
    sim = Simulator(scripted(length=1, faults={3: "raise"}))
    with pytest.raises(SimulatorError, match="step before reset"):
        sim.step(ZERO)
    sim.reset(0)
    sim.step(ZERO)
    with pytest.raises(SimulatorError, match="after the end of the episode"):
        sim.step(ZERO)
    sim.reset(0)
    with pytest.raises(ScriptedFault, match="call 3"):
        sim.step(ZERO)
    with pytest.raises(SimulatorError, match="after an error"):
        sim.step(ZERO)
    sim.reset(0)
    sim.step(ZERO)


def test_observations_are_copies() -> None:
    sim = Simulator(scripted())
    first: Any = sim.reset(3)[0]
    kept = np.array(first)
    second = sim.step(ZERO).obs
    assert np.array_equal(first, kept)
    assert not np.shares_memory(np.asarray(first), np.asarray(second))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros((1, 3), np.float32), r"float32 of shape \(2,\), or a chunk of shape \(H, 2\), got float32 of"),
        (np.zeros((0, 2), np.float32), "or a chunk"),
        (np.zeros((1, 1, 2), np.float32), "or a chunk"),
        (np.zeros((1, 2), np.complex64), "got complex64"),
        (np.array([[0.0, np.nan]], np.float32), r"got NaN at \(0, 1\) \(1 of 2\)"),
        (np.array([0.0, -np.inf], np.float32), "got infinity"),
        (None, "got NoneType None"),
    ],
)
def test_actions_are_refused_before_the_simulator_sees_them(action: Any, message: str) -> None:
    env = Answers(None)
    sim = Simulator(EnvSpec("answers", lambda: env, OBS, ACTION))
    sim.reset(0)
    with pytest.raises(InvalidData, match=message):
        sim.step(action)
    assert env.seen == []


def test_large_finite_numbers_pass_although_their_square_overflows() -> None:
    sim = answering(np.full(3, 1e30, np.float32))
    obs: Any = sim.step(np.full((1, 2), 1e30, np.float32)).obs
    assert obs.tolist() == np.full(3, 1e30, np.float32).tolist()


def test_actions_are_cast_to_the_spec_and_not_shared_with_the_simulator() -> None:
    sim = answering()
    actions = np.zeros((1, 2), np.float32)
    sim.step(actions)
    sim.step(np.zeros(2))
    seen = sim.call(lambda env: env.seen)
    assert [a.dtype for a in seen] == [np.float32, np.float32]
    assert not np.shares_memory(seen[0], actions)


def test_discrete_actions_are_integers_within_range() -> None:
    env = Answers((np.zeros(3, np.float32), 0.0, False, False, {}))
    sim = Simulator(EnvSpec("answers", lambda: env, OBS, ArraySpec((), "int64", num_values=3), action_repeat=2))
    sim.reset(0)
    sim.step(np.array([2, 0]))
    assert env.seen == [2, 2, 0, 0]
    assert all(type(a) is int for a in env.seen)
    with pytest.raises(InvalidData, match="expected integers from 0 to 2, got"):
        sim.step(np.array([3]))
    with pytest.raises(InvalidData, match="got float64"):
        sim.step(np.array([1.0]))


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (np.zeros(4, np.float32), r"observation: expected float32 of shape \(3,\), got float32 of shape \(4,\)"),
        (np.zeros(3, np.complex64), "got complex64"),
        (np.array([0, np.inf, np.nan], np.float32), r"got infinity at \(1,\) \(2 of 3\)"),
        (None, "got NoneType None"),
    ],
)
def test_wrong_observations_are_refused(obs: Any, message: str) -> None:
    sim = answering()
    sim.call(lambda env: setattr(env, "answer", (obs, 0.0, False, False, {})))
    with pytest.raises(InvalidData, match=message):
        sim.step(ZERO)


@pytest.mark.parametrize("obs", [np.ones(3), np.ones(3, np.int16), [1.0, 1.0, 1.0], np.ones((3, 2), np.float32)[:, 0]])
def test_observations_are_cast_to_the_spec(obs: Any) -> None:
    found = answering(obs).step(ZERO).obs
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert found.tolist() == [1, 1, 1]
    assert found.flags.c_contiguous


def test_dictionaries_of_arrays() -> None:
    observation = {"image": ArraySpec((2, 2), "uint8"), "state": ArraySpec((3,), "float32")}
    good: dict[str, Array] = {"image": np.zeros((2, 2), np.uint8), "state": np.zeros(3, np.float32)}
    sim = answering(good, observation=observation)
    found = sim.step(ZERO).obs
    assert isinstance(found, dict)
    assert found.keys() == good.keys()
    assert not np.shares_memory(found["image"], good["image"])
    good["state"][1] = np.nan
    with pytest.raises(InvalidData, match=r"observation\['state'\]: expected finite"):
        sim.step(ZERO)
    with pytest.raises(InvalidData, match=r"with keys \['image', 'state'\], got \['image'\]"):
        answering({"image": good["image"]}, observation=observation)


@pytest.mark.parametrize("reward", [1.5, np.float32(1.5), np.float64(1.5), np.array(1.5), np.array([1.5], np.float32)])
def test_rewards_become_floats(reward: Any) -> None:
    assert answering(reward=reward).step(ZERO).rewards == (1.5,)


@pytest.mark.parametrize("end", [True, np.True_, 1, np.array(True), np.array([1])])
def test_ends_become_bools(end: Any) -> None:
    for ends, told in (((end, False), (True, False)), ((np.False_, end), (False, True))):
        result = answering(ends=ends).step(ZERO)
        assert (result.terminated, result.truncated) == told


@pytest.mark.parametrize("end", [None, "False", 0.5, np.zeros(2)])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_what_is_no_end_is_refused(ends: str, end: Any) -> None:
    told = (end, False) if ends == "terminated" else (True, end)
    with pytest.raises(InvalidData, match=f"{ends}: expected True or False, got "):
        answering(ends=told).step(ZERO)


@pytest.mark.parametrize("reward", [float("nan"), np.float32("inf"), 1e300, -1e39, None, "1", np.zeros(2)])
def test_wrong_rewards_are_refused(reward: Any) -> None:
    with pytest.raises(InvalidData, match="reward: expected"):
        answering(reward=reward).step(ZERO)


@pytest.mark.parametrize("name", SUCCESS)
@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        (True, True),
        (np.bool_(False), False),
        (1, True),
        (0.0, False),
        (np.float32(1), True),
        (np.array([True]), True),
        (np.array([[0]]), False),
        ([1.0], True),
        (None, None),
        (float("nan"), None),
    ],
)
def test_flags_of_success_become_bools(name: str, flag: Any, expected: bool | None) -> None:
    info = {name: flag, "other": flag}
    assert answering(info=info).step(ZERO).info.get(name) is expected
    assert info[name] is flag, "the simulator's own dictionary is left alone"


@pytest.mark.parametrize("flag", ["yes", np.zeros(2), {}, np.array(1j)])
def test_wrong_flags_of_success_are_refused(flag: Any) -> None:
    with pytest.raises(InvalidData, match=r"info\['success'\]: expected one flag"):
        answering(info={"success": flag}).step(ZERO)


def test_turns_are_reentrant_and_can_be_taken_from_a_thread_that_hangs() -> None:
    turns, gate, has_it = Turns(), threading.Event(), threading.Event()
    order: list[str] = []

    def hangs() -> None:
        with turns, turns:
            has_it.set()
            gate.wait()
        order.append("late")  # it lets go of what is not its own any more

    def waits() -> None:
        with turns:
            order.append("next")
            gate.set()
            first.join()
            with turns:
                order.append("again")

    first, second = threading.Thread(target=hangs), threading.Thread(target=waits)
    first.start()
    has_it.wait()
    second.start()
    while not turns.is_awaited_by(second.ident):
        pass
    assert not turns.is_awaited_by(first.ident)
    turns.take_from(second.ident)  # it has none
    turns.take_from(None)
    assert order == []
    turns.take_from(first.ident)
    second.join()
    assert order == ["next", "late", "again"]
    with turns:
        pass


def test_interface_of_another_age_is_named() -> None:
    sim = answering()
    sim.call(lambda env: setattr(env, "answer", (np.zeros(3, np.float32), 0.0, False, {})))
    with pytest.raises(SimulatorError, match=r"step: expected .* got a tuple of 4"):
        sim.step(ZERO)
    sim.call(lambda env: setattr(env, "first", np.zeros(3, np.float32)))
    with pytest.raises(SimulatorError, match=r"reset: expected .* got ndarray"):
        sim.reset(0)
    with pytest.raises(SimulatorError, match="info: expected a dictionary"):
        answering(info=[1]).step(ZERO)


def test_what_user_code_raises_leaves_unchanged() -> None:
    with pytest.raises(ScriptedFault):
        Simulator(scripted(faults={CONSTRUCTION: "raise"}))
    with pytest.raises(ScriptedFault):
        Simulator(scripted(faults={0: "raise"})).reset(0)


@pytest.mark.parametrize(("fault", "message"), [("nan", "NaN"), ("shape", r"\(4,\)"), ("dtype", "complex64")])
def test_scripted_faults(fault: Any, message: str) -> None:
    sim = Simulator(scripted(faults={1: fault}))
    sim.reset(0)
    with pytest.raises(InvalidData, match=message):
        sim.step(ZERO)


def test_scripted_lengths_and_success_come_from_the_seed() -> None:
    def lengths(seed: int) -> list[int]:
        sim = Simulator(scripted(length=lambda rng: rng.integers(2, 30)))
        sim.reset(seed)
        result = sim.step(np.zeros((40, 2), np.float32))
        assert isinstance(result.info["success"], bool)
        return [result.num_steps]

    assert lengths(1) == lengths(1)
    assert len({tuple(lengths(seed)) for seed in range(6)}) > 1


def test_check_env_accepts_a_sound_environment() -> None:
    check_env(scripted(length=7))
    check_env(scripted(horizon=9, action_repeat=2))


class Unseeded(ScriptedEnv):
    """Draws from somewhere else."""

    count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        Unseeded.count += 1
        return super().reset(seed=Unseeded.count)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Unseeded(3, 2), "the same seed and actions gave another observation at step 0 when played again"),
        (lambda: ScriptedEnv(3, 2, length=10**9), "no end after 10000 steps"),
        (lambda: ScriptedEnv(3, 2, faults={4: "nan"}), "got NaN"),
    ],
)
def test_check_env_names_the_first_violation(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SimulatorError, match=message):
        check_env(EnvSpec("mine", make, OBS, ACTION))


def test_check_env_tries_the_way_to_a_process() -> None:
    with pytest.raises(ConfigError, match="cannot be sent to a process"):
        check_env(EnvSpec("mine", lambda: ScriptedEnv(3, 2), OBS, ACTION, host="process"))
    with pytest.raises(ConfigError, match="episodes"):
        check_env(scripted(), episodes=0)
