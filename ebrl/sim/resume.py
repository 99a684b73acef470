"""A group between two processes: what is kept of its environments, and how running episodes are brought back.

Simulators cannot be saved in general. So an episode that runs is either given up, and the next one begins, or, where
simulators are deterministic, run again: reset with the same seed and told the same actions. A decision that was in
flight is then made again, with the same noise, and everything is as if it had never been started.

The other half of `EnvContext` and `EnvGroup`, on which everything here works.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ebrl.core.errors import ConfigError, SimulatorError
from ebrl.core.records import Array, ArraySpec, Observation, StepResult
from ebrl.core.saved import SavedEnv, SavedEpisode, SavedExperience
from ebrl.sim.recovery import blame_reset

if TYPE_CHECKING:
    import asyncio

    from ebrl.sim.context import EnvContext
    from ebrl.sim.group import EnvGroup

logger = logging.getLogger("ebrl")


class EpisodeLog:
    """What a simulator was told in the running episode, and how everything was when its last decision began."""

    __slots__ = ("_dtype", "_env", "_mark", "_shape", "actions")

    def __init__(self, env: EnvContext, action: ArraySpec) -> None:
        """Make a log.

        Args:
            env: Whose.
            action: Of its simulator.
        """
        self._env = env
        self._shape = (-1, *action.shape)
        self._dtype = np.dtype(action.dtype)
        self._mark: tuple[SavedEnv, int] | None = None
        self.actions: list[Array] = []

    def begin(self, actions: list[Array]) -> None:
        """An episode begins, or goes on after these actions."""
        self.actions = list(actions)
        self._mark = None

    def add(self, action: Any) -> None:
        """The simulator was stepped; a copy, since programs may use their arrays again."""
        self.actions.append(np.array(action, self._dtype).reshape(self._shape))

    def mark(self) -> None:
        """A decision begins."""
        self._mark = state_of(self._env, self.actions), len(self.actions)

    def state(self) -> SavedEnv:
        """Return how the environment is, or how it was when the decision began that is not finished yet."""
        env, mark = self._env, (state_of(self._env, self.actions), len(self.actions))
        if env._busy in ("act", "act_step") or env.recorder.current is not None:
            assert self._mark is not None
            mark = self._mark
        saved, num = mark
        assert saved.running is not None
        return replace(saved, running=replace(saved.running, actions=self.actions[:num], reported=env.done))


def state_of(env: EnvContext, actions: list[Array] | None) -> SavedEnv:
    """Return how an environment is now.

    Args:
        env: Which.
        actions: Those of its episode; None: it cannot be run again.
    """
    meter, running = env.meter, None
    if actions is not None:
        running = SavedEpisode(
            actions=actions,
            last_obs=env._last_obs,
            memory=env._request.memory,
            first_decision=meter.first_decision,
            num_steps=meter.num_steps,
            total_reward=meter.total_reward,
            success=meter.success,
            duration_s=env.episode_time,
        )
    others = tuple((other.num_asked, other.episode, other.memory) for other in env._others.values())
    return SavedEnv(
        episode=env.episode,
        num_decisions=env.recorder.num_decisions,
        env_steps=meter.env_steps,
        others=others + env.asked_before[len(others) :],
        rng=env.rng.bit_generator.state,
        running=running,
    )


def save_env(env: EnvContext) -> SavedEnv:
    """Return what is needed to go on with an environment in another process."""
    if env.resumed is not None:  # its first reset has not brought it back yet
        return env.resumed
    log, over = env.recorder.log, env.done and env.recorder.current is None
    return state_of(env, None) if log is None or over else log.state()


def resume_env(env: EnvContext, saved: SavedEnv) -> None:
    """Go on with an environment before its first episode here; a running one is brought back by its first reset."""
    running = saved.running is not None
    env.resumed = saved if running else None
    env.episode = saved.episode - running
    env.rng.bit_generator.state = saved.rng
    env.asked_before = saved.others
    env.meter.steps_before = saved.env_steps


class Past:
    """What a group goes on with, environment by environment, and what they counted before.

    Attributes:
        env_steps: Of environments that have gone on.
        episodes: Likewise.
    """

    def __init__(self) -> None:
        self.env_steps = 0
        self.episodes = 0
        self._envs: dict[int, SavedEnv] = {}

    def take(self, envs: Sequence[SavedEnv]) -> None:
        """There is one."""
        self._envs = dict(enumerate(envs))

    def give(self, env: EnvContext) -> None:
        """Let an environment go on, if there is something to go on with."""
        saved = self._envs.pop(env.index, None)
        if saved is not None:
            resume_env(env, saved)
            self.env_steps += env.meter.env_steps
            self.episodes += env.episode + 1


async def run_again(env: EnvContext, obs: Observation) -> Observation:
    """Tell the simulator, which has just been reset, what it was told before; each call takes its turn on the lane.

    Args:
        env: Whose.
        obs: From the reset.

    Returns:
        What the simulator shows at the end.
    """
    assert env.resumed is not None
    assert env.resumed.running is not None
    for action in env.resumed.running.actions:
        future: asyncio.Future[StepResult] = env._loop.create_future()
        try:
            env.slot.step(future, action)
            obs = (await future).obs
        except BaseException as error:
            blame_reset(env, error, future, partial(np.asarray, action))
            raise
    return obs


def come_back(env: EnvContext) -> None:
    """Go on with the episode that was run again, as if it had never been interrupted.

    Raises:
        SimulatorError: It came to another observation.
    """
    saved, env.resumed = env.resumed, None
    assert saved is not None
    running = saved.running
    assert running is not None
    if not same(env._last_obs, running.last_obs):
        raise SimulatorError(
            f"env {env.index}: episode {env.episode} was run again with the same seed and actions and came to another "
            'observation, so this simulator is not deterministic: continue with EnvGroup(on_resume="next")'
        )
    env._request.memory = running.memory
    meter = env.meter
    meter.began_s -= running.duration_s
    meter.first_decision = running.first_decision
    meter.steps_before -= running.num_steps
    meter.num_steps = running.num_steps
    meter.total_reward = running.total_reward
    meter.success = running.success
    env.reported = env.episode if running.reported else -1
    if env.recorder.log is not None:
        env.recorder.log.begin(running.actions)


def same(a: Observation, b: Observation) -> bool:
    """Whether two observations are equal in every number."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    return not isinstance(a, dict) and not isinstance(b, dict) and np.array_equal(a, b)


def save_group(group: EnvGroup) -> SavedExperience:
    """Return what is needed to go on with a group in another process.

    Raises:
        ConfigError: It is still being built.
    """
    if len(group._contexts) < group.count:
        raise ConfigError(f"{group.name} is still being built: save a run after one of its updates")
    segments = [recorder.open_segment for recorder in group._recorders] if group.cohorts is None else []
    return SavedExperience(
        seed=group.seed,
        tasks=group.tasks,
        ledger=group.admission.ledger(),
        ahead=group.admission.ahead,
        segments=list(group._segments),
        open=[segment for segment in segments if segment is not None],
        episodes=list(group._episodes),
        envs=[save_env(context) for context in group._contexts],
    )


def resume_group(group: EnvGroup, saved: SavedExperience) -> SavedExperience:
    """Give everybody what it goes on with, and return all of it.

    Raises:
        ConfigError: It is of another number of environments, of other tasks, or of another seed.
    """
    num, name, cohorts = len(saved.envs), group.name, group.cohorts
    if num != group.count:
        raise ConfigError(f"{name}: the checkpoint is of {num} environments: use count={num}")
    if saved.tasks != group.tasks:
        raise ConfigError(f"{name}: the checkpoint is of tasks {saved.tasks}, not {group.tasks}: use the same specs")
    if saved.seed != group.seed:
        raise ConfigError(f"{name}: the checkpoint is of seed {saved.seed}: use Runtime(seed={saved.seed})")
    if group.replays:
        _warn_of_loss(group, saved)
    saved = saved.settled(replay=group.replays and cohorts is None)
    envs = saved.envs
    if cohorts is not None:  # the members of a group go on with one episode
        size = group.group_size
        last = [max(env.episode for env in envs[i : i + size]) for i in range(0, num, size)]
        cohorts.resume([episode + 1 for episode in last])
        envs = [replace(env, episode=last[i // size]) for i, env in enumerate(envs)]
    group._segments, group._episodes = list(saved.segments), list(saved.episodes)
    still_open = {segment.env: segment for segment in saved.open}
    for recorder, env in zip(group._recorders, envs, strict=True):
        recorder.resume(env.num_decisions, still_open.get(recorder.env))
    group._past.take(envs)
    for context in group._contexts:
        group._past.give(context)
    return saved


def _warn_of_loss(group: EnvGroup, saved: SavedExperience) -> None:
    if group.cohorts is not None:
        if saved.ledger.parked or saved.ledger.in_flight:
            logger.warning("%s: episodes of groups are not run again: those that were open are given up", group.name)
    elif not any(env.running is not None for env in saved.envs):
        logger.warning(
            '%s: the run that saved did not note how to run its episodes again (on_resume="replay"): they are given up',
            group.name,
        )
