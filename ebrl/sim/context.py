"""`EnvContext`: all that an environment program may do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from ebrl.core.errors import InvalidData, ProgramError
from ebrl.core.protocols import Actor
from ebrl.core.records import ActionOut, Array, Observation, StepResult
from ebrl.core.rng import Domain, NoiseStream, name_key, stream
from ebrl.core.saved import SavedEnv
from ebrl.sim.episodes import EpisodeMeter
from ebrl.sim.recorder import Recorder
from ebrl.sim.recovery import Fault, blame, blame_reset
from ebrl.sim.requests import ActRequest, ActStepRequest, Other, ask_other
from ebrl.sim.resume import EpisodeLog, come_back, run_again

if TYPE_CHECKING:
    from ebrl.sim.group import EnvGroup
    from ebrl.sim.hosts import Slot

T = TypeVar("T")

SAMPLED = 15
"""One call in 16 is looked at. Of an episode that is usually an odd number: an even one of steps, and a reset."""


class EnvContext:
    """One environment, as its program sees it. Made by `EnvGroup`.

    Every call raises `ProgramError` while another one of the same environment runs, and all but `reset` and `call` do
    so before the first `reset` and after the end of an episode. Asking another actor is free of these rules.

    What a policy with memory remembers begins anew with each episode. The group's own actor remembers what was
    executed: an answer that no `step` follows leaves no trace. Another one remembers all that it answered.

    Attributes:
        index: Of this environment in its group.
        task: What the policy is asked to do.
        episode: Number of the running episode of this environment, from 0; -1 before the first.
        rng: A random stream of this environment, for the program's own use.
    """

    def __init__(self, group: EnvGroup, index: int, slot: Slot, recorder: Recorder) -> None:
        key = (name_key(group.name), index)
        self.index = index
        self.task = recorder.task
        self.episode = -1
        self.rng: np.random.Generator = stream(group.seed, Domain.PROGRAM, *key)
        self.slot = slot  # from here on for the group and for requests
        self.recorder = recorder
        self.num_calls = self.num_asides = 0
        self.resumed: SavedEnv | None = None  # whose episode the first reset has to bring back
        self.others: dict[str, Other] = {}  # by name of the actor
        self.running: asyncio.Task[None] | None = None  # its program, again and again
        self.raised: Fault | None = None  # by its simulator, last
        self.recovery = group.recovery
        self.fault: Fault | None = None  # because of which the simulator is to be built anew
        self._key, self._group, self._actor = key, group, group.actor
        self._admission = group.admission
        self._loop = asyncio.get_running_loop()
        self._noise = NoiseStream(group.seed, *key, 0)
        self._request = ActStepRequest(self, self._noise)
        self.meter = EpisodeMeter()
        if group.replays:
            recorder.log = EpisodeLog(self, group.specs[index].action)
        self._observe = group.observe
        self._trace = group.trace
        self._mark_s = 0.0  # when the running call began, for the trace
        self._busy: str | None = None
        self._needs_reset: str | None = "there was no reset yet"

    @property
    def done(self) -> bool:
        """Whether `reset` must come next: before the first episode, and after the end of each."""
        return self._needs_reset is not None

    @property
    def episode_time(self) -> float:
        """Loop time since the last reset returned, in seconds; virtual in tests."""
        return self._loop.time() - self.meter.began_s

    @property
    def version(self) -> int:
        """Of the weights with which the group's actor acts now."""
        return self._actor.weights.version

    def where(self) -> str:
        """Return a line that names the place, for messages."""
        episode, seed = self.episode, self.meter.seed
        if self.meter.assigned is not None:  # of an episode that has not begun
            episode, seed = episode + 1, self.meter.assigned[1]
        return (
            f"env {self.index} episode {episode} decision {self.recorder.place} "
            f"seed {seed} version {self.version} lane {self.slot.lane_name}"
        )

    async def reset(self) -> tuple[Observation, dict[str, Any]]:
        """Begin the next episode. A running one is left: its last decision bootstraps from what was seen last.

        After a resume the first call may bring back the episode that was running, and return where it was.

        Returns:
            Observation and ``info``, as in gymnasium.
        """
        if self._busy is not None:
            _refuse(self, "reset")
        self._busy = "reset"
        self.num_calls += 1
        self.num_asides += 1
        try:
            if self.resumed is None:
                self.finish_episode()
            obs, info = await _reset_simulator(self)
        except asyncio.CancelledError:
            self._needs_reset = "the last reset was cancelled"
            raise
        finally:
            self._busy = None
        _begin_episode(self, obs)
        return self.recorder.seen, info

    async def act(self, obs: Observation, actor: Actor | None = None) -> ActionOut:
        """Ask a policy; batched with whoever else is ready.

        Args:
            obs: What it sees. If it is not what the simulator showed last, what follows the last decision of an episode
                looks different, too: there is `EnvGroup`'s `observe` for that, and gymnasium's wrappers.
            actor: Another one than the group's own: opens no decision and needs no credit.

        Returns:
            ``action`` is a chunk ``[H, *shape]``.
        """
        if actor is not None and actor is not self._actor:
            return await ask_other(self, obs, actor)
        if self._busy is not None or self._needs_reset is not None:
            _refuse(self, "act")
        self._busy = "act"
        self.num_calls += 1
        started, answered, last = False, False, self._request
        try:
            if self.recorder.must_wait(obs):
                await _wait_for_credit(self)
            started = True
            future: asyncio.Future[ActionOut] = self._loop.create_future()
            place = self.recorder.place
            request = ActRequest(self, self._noise, place, obs, future, last.answered_s, last.memory)
            if not self.num_calls & SAMPLED:
                _note_turnaround(self, request)
            self._actor.request(request)
            out = await future
            last.answered_s, answered = request.answered_s, True
        finally:
            self._busy = None
            if started and not answered:
                last.answered_s = 0.0
                self._actor.withdraw()
                self.recorder.drop_current("cancelled")
        self.recorder.begin(self.episode, obs, out)
        if self._trace is not None:
            _span(self, "act")
        return out

    async def act_step(self, obs: Observation) -> StepResult:
        """`act` and `step` in one request: the action goes to the simulator without waking the program.

        Args:
            obs: As in `act`.

        Returns:
            As `step`.
        """
        if self._busy is not None or self._needs_reset is not None:
            _refuse(self, "act_step")
        self._busy = "act_step"
        self.num_calls += 1
        started = stepped = False
        try:
            if self.recorder.must_wait(obs):
                await _wait_for_credit(self)
            started = True
            future: asyncio.Future[StepResult] = self._loop.create_future()
            request = self._request
            if not self.num_calls & SAMPLED:
                _note_turnaround(self, request)
            request.index = self.recorder.place
            request.obs = obs
            request.future = future
            self._actor.request(request)
            result = await future
            stepped = True
        except BaseException as error:
            request = self._request
            if error is not request.refusal and blame(self, error, request.future, lambda: request.out.action):
                self.fault = self.raised
            raise
        finally:
            self._busy = None
            if started and not stepped:
                self._actor.withdraw()
                self._request = ActStepRequest(self, self._noise)  # the actor may still hold the other one
                _lose(self, True)
        self.recorder.begin(self.episode, obs, request.out)
        if self._trace is not None:
            _span(self, "act_step")
        return _took(self, result, request.out.action)

    async def step(self, action: Array) -> StepResult:
        """Execute an action of the open decision, in any form the program gave it.

        Learning is from the actions of the chunk that were executed: those that are passed on, whichever they are. An
        action that is none of the chunk's (it was clipped, say) counts as the one after the last that was executed.

        Args:
            action: ``[H, *shape]``, a slice of it, or one action ``[*shape]``.

        Returns:
            What the simulator said; fewer steps than asked when the episode ended.

        Raises:
            ProgramError: There is no open decision.
        """
        if self.recorder.current is None and self._busy is None and self._needs_reset is None:
            raise ProgramError(
                f"step() without an open decision ({self.where()}): call act() first, or use intervene(action) "
                "for actions that are not the policy's"
            )
        return await _step(self, "step", action)

    async def intervene(self, action: Array) -> StepResult:
        """Execute an action that is not the policy's, in any form that `step` takes.

        The open decision, if there is one, is marked: it stays in recorded data and is not trained on.
        """
        return await _step(self, "intervene", action)

    def reward(self, value: float) -> None:
        """Add to the reward of the open decision; also right after the step that ended the episode.

        Raises:
            ProgramError: There is no open decision that has been executed, or it is no reward that `step` may return.
        """
        try:
            found = self.recorder.add_reward(value)
        except InvalidData as error:
            raise ProgramError(f"{error} ({self.where()})") from None
        if not found:
            raise ProgramError(f"reward() without an executed decision ({self.where()}): call it after step()")

    async def call(self, fn: Callable[[Any], T]) -> T:
        """Run ``fn(simulator)`` on the simulator's own lane; any blocking call is allowed there.

        Args:
            fn: Takes the ``gymnasium.Env``. A process host needs it (and what it returns) to be picklable.

        Returns:
            What `fn` returned.
        """
        if self._busy is not None:
            _refuse(self, "call")
        self._busy = "call"
        self.num_calls += 1
        self.num_asides += 1
        self._group.spares.keep(self)
        if self.recorder.log is not None:
            self.recorder.log.called = True
        decision = self.recorder.current
        future: asyncio.Future[T] = self._loop.create_future()
        try:
            if not self.slot.built:
                await self.recovery.make_ready(self)
            self.slot.call(future, fn)
            return await future
        except BaseException as error:
            told = None if decision is None else decision.out.action
            if blame(self, error, future, lambda: told) and not self.slot.built:
                self.fault = self.raised  # otherwise the program may catch it, and go on
            raise
        finally:
            self._busy = None

    def finish_episode(self) -> None:
        """Close what is open. Called by the group when the program has returned."""
        if not self.meter.counted:  # the program leaves an episode that could have gone on, or was lost
            _end_episode(self, "the program has left the episode")
        _close(self)


async def _step(env: EnvContext, name: str, action: Array) -> StepResult:
    if env._busy is not None or env._needs_reset is not None:
        _refuse(env, name)
    env._busy = name
    env.num_calls += 1
    if env.recorder.current is None:
        env.recorder.cut("split")  # what follows does not follow from the decision before
    elif name == "intervene":
        env.recorder.current.intervened = True
    stepped = False
    future: asyncio.Future[StepResult] = env._loop.create_future()
    try:
        env.slot.step(future, action)
        result = await future
        stepped = True
    except BaseException as error:
        if blame(env, error, future, lambda: action):
            env.fault = env.raised
        raise
    finally:
        env._busy = None
        if not stepped:
            _lose(env, env.recorder.current is not None)
    if env._trace is not None:
        _span(env, name)
    return _took(env, result, action)


async def _next_episode(env: EnvContext) -> tuple[int, int]:
    plan = env._group.plan
    while plan.must_wait(env.index):
        env._request.answered_s = 0.0
        await plan.wait(env.index)
    cohorts, episode = env._group.feed.cohorts, env.episode + 1  # only now: a resume counts on from an earlier run
    assigned = plan.next(env.index, episode)
    if cohorts is not None and cohorts.must_wait(env.index, episode):
        env._request.answered_s = 0.0
        await cohorts.begin(env.index, episode)
    return assigned


async def _reset_simulator(env: EnvContext) -> tuple[Observation, dict[str, Any]]:
    if env.fault is not None or not env.slot.built:
        await env.recovery.make_ready(env, lambda: env._group.spares.take_over(env))
    assigned = env.meter.assigned
    if assigned is None or not env._group.plan.wants(assigned[0]):
        assigned = env.meter.assigned = await _next_episode(env)
    future = env._group.spares.reset(env, assigned)
    try:
        obs, info = await future
    except BaseException as error:
        blame_reset(env, error, future)
        raise
    return (obs if env.resumed is None else await run_again(env, obs)), info


def _begin_episode(env: EnvContext, obs: Observation) -> None:
    env._needs_reset = None
    env.episode += 1
    env._request.memory = None
    env.meter.begin(env._loop.time(), env.recorder.num_decisions)
    env.recorder.seen = obs if env._observe is None else env._observe(obs)
    running = come_back(env) if env.resumed is not None else None
    if env.recorder.log is not None:
        env.recorder.log.begin(running)
    if env._trace is not None:
        _span(env, "reset")
    env._group.spares.tend()


def _close(env: EnvContext) -> None:
    env.recorder.end()
    if env._group.feed.cohorts is not None:
        env._group.feed.cohorts.end(env.index, env.episode, env.meter.success, lost=env.meter.lost)
    if env.recorder.log is not None:
        env.recorder.log.end()


async def _wait_for_credit(env: EnvContext) -> None:
    env._request.answered_s = 0.0  # the time since then says nothing about the simulator
    await env._admission.start(env.index)


def _note_turnaround(env: EnvContext, request: ActRequest) -> None:
    if request.answered_s:
        env._group.profile.turnaround.latency.add(env._group.clock() - request.answered_s)


def _lose(env: EnvContext, started: bool) -> None:
    """A step failed, or its program was cancelled while it ran: nobody knows where the simulator is now."""
    if started:
        env.recorder.drop_current("lost")
    env.recorder.cut("lost")
    env.meter.lost = True
    if env.recorder.log is not None:
        env.recorder.log.end()
    # It counts when its program leaves it: what ends the program may end the run.
    env._needs_reset = "a step failed or was cancelled while it ran, so the state of the simulator is unknown"


def _took(env: EnvContext, result: StepResult, action: Array) -> StepResult:
    rewards = result.rewards
    if env._observe is not None:
        result.obs = env._observe(result.obs)
    env.recorder.seen = result.obs
    meter = env.meter
    if len(rewards) == 1:
        meter.num_steps += 1
        meter.total_reward += rewards[0]
    else:
        meter.num_steps += len(rewards)
        meter.total_reward += sum(rewards)
    if result.info:
        meter.see(result.info)
    decision = env.recorder.current
    if decision is not None:
        if decision.num_steps or action is not decision.out.action:
            env.recorder.note_executed(decision, action, len(rewards))
        decision.rewards = decision.rewards + rewards if decision.num_steps else rewards
        decision.num_steps += len(rewards)
        if decision.out.batch.memory is not None:
            env._request.memory = decision.out.memory
    if result.terminated or result.truncated:
        if decision is not None:
            decision.terminated, decision.truncated = result.terminated, result.truncated
        env.recovery.went_well(env.index)
        _end_episode(env, "the episode has ended")
    if env.recorder.log is not None:
        env.recorder.log.step(action)
    return result


def _end_episode(env: EnvContext, why: str) -> None:
    env._needs_reset = why
    if env.meter.counted:
        return
    failed = env.fault is not None  # then it did not end by itself, and is none
    env._group.feed.finish(env.recorder, env.meter, env._loop.time(), env.version, failed=failed)


def _span(env: EnvContext, name: str) -> None:
    """Record the time since the last span of this environment: what it waited for."""
    assert env._trace is not None
    now_s = env._loop.time()
    place = {"episode": env.episode, "decision": env.recorder.place}
    env._trace.span(f"{env._group.name}-{env.index}", name, env._mark_s, now_s, **place)
    env._mark_s = now_s


def _refuse(env: EnvContext, name: str) -> NoReturn:
    if env._busy is not None:
        raise ProgramError(
            f"{name}() while {env._busy}() of the same environment is running ({env.where()}): "
            "await one before the next"
        )
    raise ProgramError(f"{name}(): {env._needs_reset} ({env.where()}): call reset() first")
