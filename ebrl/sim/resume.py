"""A group between two processes: what is kept of its environments, and how running episodes are brought back.

Simulators cannot be saved in general. So an episode that runs is either given up, and the next one begins, or, where
simulators are deterministic, run again: reset with the same seed and told the same actions. A decision that was in
flight is then made again, with the same noise, and everything is as if it had never been started.

The program is begun anew, and its reset returns what it saw last before that decision. So what it keeps in mind from
one decision to the next is lost; and it draws (`rng`) and asks other actors again what came between observation and
decision. That is as it was for a program that draws before a decision and its step, and for one that draws after them;
one that does both finds other numbers before its first decision, and the same ones after it.

The other half of `EnvContext` and `Feed`, on which everything here works.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ebrl.core.errors import ConfigError, SimulatorError
from ebrl.core.records import Array, ArraySpec, Observation, StepResult, same
from ebrl.core.saved import Others, SavedEnv, SavedEpisode, SavedExperience
from ebrl.sim.recovery import blame_reset
from ebrl.sim.requests import Other, noise_of

if TYPE_CHECKING:
    import asyncio

    from ebrl.sim.cohorts import Cohorts
    from ebrl.sim.context import EnvContext
    from ebrl.sim.feed import Feed

logger = logging.getLogger("ebrl")


class EpisodeLog:
    """What a simulator was told in the running episode, and how everything was when its program saw it last.

    Attributes:
        called: The program has called the simulator since the episode began.
        dropped: Why decisions that began after what the program saw last have ended.
    """

    __slots__ = ("_actions", "_began", "_dtype", "_env", "_given", "_num", "_seen", "_shape", "called", "dropped")

    def __init__(self, env: EnvContext, action: ArraySpec) -> None:
        """Make a log.

        Args:
            env: Whose.
            action: Of its simulator.
        """
        self._env = env
        self._shape = (-1, *action.shape)
        self._dtype = np.dtype(action.dtype)
        self.called = False
        self.dropped: list[str] = []
        self._actions: list[Array] = []
        self._seen = state_of(env, None)
        self._num = 0  # actions until then
        self._began = self._seen, 0
        self._given: SavedEpisode | None = None  # that goes on, until its first decision begins

    def begin(self, running: SavedEpisode | None) -> None:
        """An episode begins, or goes on where it was."""
        self.called = False
        self._actions = list(running.actions) if running is not None else []
        self._see()
        self._given = running

    def step(self, action: Any) -> None:
        """The simulator was stepped; the action is copied, since programs may use their arrays again."""
        self._actions.append(np.array(action, self._dtype).reshape(self._shape))
        if not self._env.done:  # what follows the end cannot be come back to: then the last step is done again
            self._see()

    def end(self) -> None:
        """No episode runs; whoever goes on begins its program anew."""
        if self._seen.running is not None:
            self._seen = state_of(self._env, None)

    def renew(self) -> None:
        """No episode runs yet, and the environment was given another state."""
        self._seen = state_of(self._env, None)

    def decide(self) -> None:
        """A decision begins."""
        env, given, seen = self._env, self._given, self._seen
        if given is not None and given.rng is not None:
            give_back(env, given.rng, given.others)
        self._given = None
        if seen.running is not None:
            rng, others = env.rng.bit_generator.state, others_of(env)
            running = replace(seen.running, rng=rng, others=others, dropped=list(self.dropped))
            self._began = replace(seen, running=running), self._num

    def state(self) -> SavedEnv:
        """Return how the environment was when the program saw something last, or before the decision in flight."""
        env, given = self._env, self._given
        saved, num = self._began if deciding(env) else (self._seen, self._num)
        running = saved.running
        if running is None:
            return saved
        if not deciding(env):
            running = replace(running, dropped=list(self.dropped))
        if given is not None:
            running = replace(running, rng=given.rng, others=given.others)
        return replace(saved, running=replace(running, actions=self._actions[:num], reported=env.meter.counted))

    def _see(self) -> None:
        env, meter = self._env, self._env.meter
        running = SavedEpisode(
            actions=[],
            last_obs=env.recorder.seen,
            memory=env._request.memory,
            first_decision=meter.first_decision,
            num_steps=meter.num_steps,
            total_reward=meter.total_reward,
            success=meter.success,
            duration_s=env.episode_time,
            called=self.called,
        )
        self._seen, self._num, self._given = state_of(env, running), len(self._actions), None
        self.dropped = []


def deciding(env: EnvContext) -> bool:
    """Whether a decision has begun whose outcome is not complete."""
    return env._busy in ("act", "act_step") or env.recorder.current is not None


def state_of(env: EnvContext, running: SavedEpisode | None) -> SavedEnv:
    """Return how an environment is now."""
    return SavedEnv(
        episode=env.episode,
        num_decisions=env.recorder.num_decisions,
        env_steps=env.meter.env_steps,
        others=others_of(env),
        rng=env.rng.bit_generator.state,
        running=running,
    )


def others_of(env: EnvContext) -> Others:
    """Return what further actors were asked."""
    return {name: (other.num_asked, other.episode, other.memory) for name, other in env.others.items()}


def give_back(env: EnvContext, rng: Mapping[str, Any], others: Others) -> None:
    """Let the program's generator and further actors go on from there."""
    env.rng.bit_generator.state = rng
    env.others = {name: Other(noise_of(env, name), *asked) for name, asked in others.items()}


def save_env(env: EnvContext, waiting: Container[int] = ()) -> SavedEnv:
    """Return what is needed to go on with an environment in another process.

    Args:
        env: Which.
        waiting: Environments that wait for a credit.
    """
    if env.resumed is not None:  # its first reset has not brought it back yet
        return env.resumed
    log = env.recorder.log
    saved = state_of(env, None) if log is None else log.state()
    return replace(saved, in_flight=deciding(env) and env.index not in waiting)


def resume_env(env: EnvContext, saved: SavedEnv) -> None:
    """Go on with an environment before its first episode here; a running one is brought back by its first reset."""
    running = saved.running is not None
    env.resumed = saved if running else None
    env.episode = saved.episode - running
    give_back(env, saved.rng, saved.others)
    env.meter.steps_before = saved.env_steps
    if env.recorder.log is not None:
        env.recorder.log.renew()


class Past:
    """What a group goes on with, environment by environment, and what they counted before.

    Attributes:
        env_steps: Of all environments.
        episodes: Of environments that have gone on.
        waiting: Those that are not built yet, by index. An update may end before they are, of what was saved.
    """

    def __init__(self) -> None:
        self.env_steps = 0
        self.episodes = 0
        self.waiting: dict[int, SavedEnv] = {}

    @property
    def steps_to_come(self) -> int:
        """Of environments that are not built yet."""
        return sum(env.env_steps for env in self.waiting.values())

    def take(self, envs: Sequence[SavedEnv], built: Iterable[EnvContext]) -> None:
        """There is one, of all environments; those that are built go on."""
        self.waiting = dict(enumerate(envs))
        self.env_steps = sum(env.env_steps for env in envs)
        for env in built:
            self.give(env)

    def give(self, env: EnvContext) -> None:
        """Let an environment go on, if there is something to go on with."""
        saved = self.waiting.pop(env.index, None)
        if saved is not None:
            resume_env(env, saved)
            self.episodes += env.episode + 1


async def run_again(env: EnvContext, obs: Observation) -> Observation:
    """Tell the simulator, which has just been reset, what it was told before; each call takes its turn on the lane.

    Args:
        env: Whose.
        obs: From the reset.

    Returns:
        What the simulator shows at the end.

    Raises:
        SimulatorError: It ended the episode sooner than it did before.
    """
    assert env.resumed is not None
    running = env.resumed.running
    assert running is not None
    for num, action in enumerate(running.actions, start=1):
        future: asyncio.Future[StepResult] = env._loop.create_future()
        try:
            env.slot.step(future, action)
            result = await future
        except BaseException as error:
            blame_reset(env, error, future, partial(np.asarray, action))
            raise
        obs = result.obs
        if result.terminated or result.truncated:  # the step that ends an episode is not among them
            raise _other_simulator(env, env.episode + 1, f"ended after {num} of the calls, where it had not before")
    return obs


def _other_simulator(env: EnvContext, episode: int, what: str) -> SimulatorError:
    return SimulatorError(
        f"env {env.index}: episode {episode} was run again with the same seed and actions and {what}, so this "
        'simulator is not deterministic, or not the one of that run: continue with EnvGroup(on_resume="next")'
    )


def come_back(env: EnvContext) -> SavedEpisode:
    """Go on with the episode that was run again, as if it had never been interrupted, and return it.

    Raises:
        SimulatorError: It came to another observation.
    """
    saved, env.resumed = env.resumed, None
    assert saved is not None
    running = saved.running
    assert running is not None
    if not same(env.recorder.seen, running.last_obs):
        raise _other_simulator(env, env.episode, "came to another observation")
    env._request.memory = running.memory
    meter = env.meter
    meter.began_s -= running.duration_s
    meter.first_decision = running.first_decision
    meter.steps_before -= running.num_steps
    meter.num_steps = running.num_steps
    meter.total_reward = running.total_reward
    meter.success = running.success
    meter.counted = running.reported
    give_back(env, saved.rng, saved.others)  # as it was, whatever the program has done before its reset
    return running


def check_alike(feed: Feed, saved: SavedExperience, seed: int, *, groups: bool) -> None:
    """Check that a run can be continued by these environments, in a run of that seed, for who compares groups or not.

    Raises:
        ConfigError: It is of another number of environments, of other ones, of another seed or kind of learner.
    """
    num, size, kind = len(saved.envs), saved.group_size, "groups" if saved.compared else "no groups"
    for theirs, ours, what in (
        (saved.name, feed.name, f"of a group {saved.name!r}: use name={saved.name!r}"),
        (num, len(feed.specs), f"of {num} environments, not {len(feed.specs)}: use as many"),
        (size, feed.group_size, f"of groups of {size}: use group_size={size}"),
        (saved.compared, groups, f"of a learner that compares {kind}: use that learner"),
        (saved.seed, seed, f"of seed {saved.seed}: use Runtime(seed={saved.seed})"),
    ):
        if theirs != ours:
            raise ConfigError(f"{feed.name}: the checkpoint is {what}")
    for what, names, own in (
        ("the checkpoint is of", saved.ids, [spec.id for spec in feed.specs]),
        ("the checkpoint is of task", saved.tasks, feed.tasks),
    ):
        for i, (name, now) in enumerate(zip(names, own, strict=True)):
            if name != now:
                raise ConfigError(f"{feed.name}: {what} {name!r} in env {i}, not {now!r}: use the same specs")


def align(envs: list[SavedEnv], size: int, cohorts: Cohorts) -> list[SavedEnv]:
    """Let the members of each group of `size` go on with one episode."""
    last = [max(env.episode for env in envs[i : i + size]) for i in range(0, len(envs), size)]
    cohorts.resume([episode + 1 for episode in last])
    return [replace(env, episode=last[i // size]) for i, env in enumerate(envs)]


def warn_of_loss(feed: Feed, saved: SavedExperience) -> None:
    """Say which episodes are given up, where they are to be run again."""
    if feed.cohorts is not None:
        if saved.ledger.parked or saved.ledger.in_flight:
            logger.warning("%s: episodes of groups are not run again: those that were open are given up", feed.name)
        return
    if not any(env.running is not None for env in saved.envs):
        logger.warning(
            '%s: the run that saved did not note how to run its episodes again (on_resume="replay"): they are given up',
            feed.name,
        )
    num = sum(env.running is not None and env.running.called for env in saved.envs)
    if num:
        logger.warning(
            "%s: %d running episodes are given up, since their programs have called the simulator (env.call), which "
            "cannot be done again: from here on the run is not the one that it would have been",
            feed.name,
            num,
        )
