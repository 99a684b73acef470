"""`VectorContext`: all that the program of a batched simulator may do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ebrl.core.errors import InvalidData, ProgramError
from ebrl.core.records import ActionOut, Array, Observation
from ebrl.core.rng import Domain, NoiseStream, name_key, stream
from ebrl.sim.recorder import Recorder
from ebrl.sim.recovery import Fault, blame
from ebrl.sim.slots import Asked, RowRequest, Slot
from ebrl.sim.vector_episodes import assign, end_episode, leave, lose_all, lose_assigned, may_begin
from ebrl.sim.vector_simulator import VectorStep, rows

if TYPE_CHECKING:
    from ebrl.sim.hosts import ThreadSlot
    from ebrl.sim.vector import VectorGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VectorOut:
    """The answer to one `act`.

    Attributes:
        slots: Of each slot.
        action: ``[M, H, *action.shape]``.
    """

    slots: list[ActionOut]
    action: Array

    @property
    def version(self) -> int:
        """Of the weights that acted."""
        return self.slots[0].version


class VectorContext:
    """One batched simulator, as its program sees it. Made by `VectorGroup`.

    All M slots act and step together. A slot whose episode has ended must be reset before the next `act`; one that has
    no episode to run (an evaluation ends, or a group of episodes is not complete) is idle: it is carried along, and
    nothing that it does is recorded.

    Attributes:
        index: Of this simulator in its group.
        task: What the policy is asked to do.
        num_slots: M.
        num_steps: Of the simulator so far; one of them is a step of all slots.
        rng: A random stream of this simulator, for the program's own use.
    """

    def __init__(self, group: VectorGroup, index: int, slot: ThreadSlot, recorders: Sequence[Recorder]) -> None:
        key, first = name_key(group.name), recorders[0].env
        self.index = index
        self.task = recorders[0].task
        self.num_slots = len(recorders)
        self.rng: np.random.Generator = stream(group.seed, Domain.PROGRAM, key, first)
        self.num_steps = 0
        self.slot = slot  # where it runs; from here on for the group, and for whoever builds the simulator again
        self.num_calls = self.num_asides = 0
        self.running: asyncio.Task[None] | None = None  # its program, again and again
        self.raised: Fault | None = None  # by its simulator, last
        self.fault: Fault | None = None  # because of which the simulator is to be built anew
        self.recovery = group.recovery
        self.slots = [
            Slot(i, recorder, RowRequest(self, i, NoiseStream(group.seed, key, recorder.env, 0)))
            for i, recorder in enumerate(recorders)
        ]
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._busy: str | None = None
        self._mark_s = 0.0  # when the running call began, for the trace
        self.asked_cohorts: dict[int, asyncio.Future[None]] = {}  # by idle slot: done when its episode may begin
        self._obs: Observation = {}
        self._rows: list[Observation] = []  # of it
        self._chunks: Array | None = None  # what the open decisions want

    @property
    def done(self) -> NoReturn:
        """Of one environment, and this is not one.

        Raises:
            ProgramError: Always.
        """
        raise ProgramError(
            f"a batched simulator has {self.num_slots} slots, and the program asks for the `done` of one environment "
            f"({self.where()}): write it for a VectorContext, with `env.needs_reset`, as "
            "ebrl.sim.programs.vector_rollout is"
        )

    @property
    def needs_reset(self) -> Array:
        """``[M]`` bool: slots whose episode has ended, and idle ones for which there is one now."""
        return np.array(
            [slot.state == "over" or (slot.state == "idle" and may_begin(self, slot)) for slot in self.slots], np.bool_
        )

    @property
    def version(self) -> int:
        """Of the weights with which the group's actor acts now."""
        return self._group.actor.weights.version

    def where(self, number: int | None = None) -> str:
        """Return a line that names the simulator, or one of its slots, for messages."""
        place = f"version {self.version} lane {self.slot.lane_name}"
        if number is None:
            return f"simulator {self.index} with envs {self.slots[0].index} to {self.slots[-1].index} {place}"
        slot = self.slots[number]
        return (
            f"env {slot.index} (slot {number} of simulator {self.index}) episode {slot.episode} "
            f"decision {slot.recorder.place} seed {slot.meter.seed} {place}"
        )

    async def reset(self, mask: ArrayLike | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begin the next episode in some slots, and in idle ones for which there is one. Waits if no slot has any.

        A running episode is left: its last decision bootstraps from what was seen last.

        Args:
            mask: ``[M]`` bool; None: all slots.

        Returns:
            What all slots see, ``[M, ...]``, and ``info`` as gymnasium has it.
        """
        _check_free(self, "reset")
        chosen = _chosen(self, mask)
        self._busy = "reset"
        self.num_calls += 1
        self.num_asides += 1
        future: asyncio.Future[tuple[Observation, dict[str, Any]]] = self._loop.create_future()
        info: dict[str, Any] = {}
        seeds: dict[int, int] = {}
        try:
            for slot in chosen:
                leave(self, slot)
            if self.fault is not None or not self.slot.built:
                await self.recovery.make_ready(self)
            seeds = await assign(self, chosen)
            if seeds:
                self.slot.reset(future, seeds)
                obs, info = await future
                self._obs = obs if self._group.observe is None else self._group.observe(obs)
        except BaseException as error:
            if blame(self, error, future):
                self.fault = self.raised
                lose_assigned(self, seeds)
            raise
        finally:
            self._busy = None
            if future.done() and not future.cancelled() and future.exception() is not None:  # the others are gone too
                lose_all(self)
        _begin_episodes(self, seeds)
        return self._obs, info

    async def act(self, obs: Observation) -> VectorOut:
        """Ask the policy for all slots, in one request.

        Args:
            obs: What they see, ``[M, ...]``.
        """
        _check_ready(self, "act")
        self._busy = "act"
        self.num_calls += 1
        running = [slot for slot in self.slots if slot.state == "running"]
        seen = self._rows if obs is self._obs else rows(obs, self.num_slots)
        started, outs = False, None
        try:
            if _must_wait(self, running, seen):
                await _wait_for_credit(self, running)
            started = True
            future: asyncio.Future[list[ActionOut]] = self._loop.create_future()
            _ask(self, seen, Asked(future, self.num_slots))
            outs = await future
        finally:
            self._busy = None
            if started and outs is None:
                self._group.actor.withdraw()
                for slot in self.slots:
                    slot.request = slot.request.again()
                for slot in running:
                    slot.recorder.drop_current("cancelled")
        for slot in running:
            slot.recorder.begin(slot.episode, seen[slot.number], outs[slot.number])
        self._chunks = _chunks(outs)
        _span(self, "act")
        return VectorOut(outs, self._chunks)

    async def step(self, action: Array) -> VectorStep:
        """Execute actions of the open decisions, in any form the program gave them.

        Args:
            action: ``[M, H, *shape]``, a slice of it, or one action each ``[M, *shape]``.

        Returns:
            What the simulator said; fewer steps than asked where an episode ended.

        Raises:
            ProgramError: There is no open decision.
        """
        _check_ready(self, "step")
        if all(slot.recorder.current is None for slot in self.slots):
            raise ProgramError(
                f"step() without open decisions ({self.where()}): call act() first, or use intervene(action) for "
                "actions that are not the policy's"
            )
        return await self._step("step", action)

    async def intervene(self, action: Array) -> VectorStep:
        """Execute actions that are not the policy's, in any form that `step` takes.

        Open decisions are marked: they stay in recorded data and are not trained on.
        """
        _check_ready(self, "intervene")
        return await self._step("intervene", action)

    def reward(self, values: ArrayLike) -> None:
        """Add to the rewards of the open decisions; also right after a step that ended episodes.

        Args:
            values: ``[M]``, or one number for all; those of slots without an open decision are not looked at.

        Raises:
            ProgramError: No open decision has been executed, or a value is no reward that `step` may return.
        """
        numbers = np.broadcast_to(np.asarray(values, np.float64), (self.num_slots,)).tolist()
        found = False
        for slot, value in zip(self.slots, numbers, strict=True):
            try:
                found |= slot.recorder.add_reward(value)
            except InvalidData as error:
                raise ProgramError(f"{error} ({self.where(slot.number)})") from None
        if not found:
            raise ProgramError(f"reward() without an executed decision ({self.where()}): call it after step()")

    async def call(self, fn: Callable[[Any], T]) -> T:
        """Run ``fn(simulator)`` on the simulator's own lane; any blocking call is allowed there.

        Args:
            fn: Takes the ``gymnasium.vector.VectorEnv``.

        Returns:
            What `fn` returned.
        """
        _check_free(self, "call")
        self._busy = "call"
        self.num_calls += 1
        self.num_asides += 1
        future: asyncio.Future[T] = self._loop.create_future()
        try:
            if not self.slot.built:
                await self.recovery.make_ready(self)
            self.slot.call(future, fn)
            return await future
        except BaseException as error:
            if blame(self, error, future) and not self.slot.built:
                self.fault = self.raised  # otherwise the program may catch it, and go on
            raise
        finally:
            self._busy = None

    def deciding(self, slot: Slot) -> bool:
        """Whether a decision of a slot has begun whose outcome is not complete."""
        return slot.recorder.current is not None or (self._busy == "act" and slot.state == "running")

    def finish_episode(self) -> None:
        """Close what is open. Called by the group when the program has returned."""
        for slot in self.slots:
            leave(self, slot)

    async def _step(self, name: str, action: Array) -> VectorStep:
        self._busy = name
        self.num_calls += 1
        running = [slot for slot in self.slots if slot.state == "running"]
        for slot in running:
            if slot.recorder.current is None:
                slot.recorder.cut("split")  # what follows does not follow from the decision before
            elif name == "intervene":
                slot.recorder.current.intervened = True
        result: VectorStep | None = None
        future: asyncio.Future[VectorStep] = self._loop.create_future()
        try:
            self.slot.step(future, action)
            result = await future
            self.num_steps += result.num_steps
        except BaseException as error:
            if blame(self, error, future, lambda: action):
                self.fault = self.raised
            raise
        finally:
            self._busy = None
            if result is None:
                lose_all(self)
        _span(self, name)
        return _took(self, running, result, action)


def _chosen(env: VectorContext, mask: ArrayLike | None) -> list[Slot]:
    if mask is None:
        return env.slots
    chosen = np.asarray(mask)
    if chosen.shape != (env.num_slots,) or chosen.dtype != np.bool_ or not chosen.any():
        raise ProgramError(
            f"reset(mask) of {env.where()}: expected a mask of {env.num_slots} bools, one of them True at least, "
            f"got {chosen!r:.80}"
        )
    return [slot for slot, on in zip(env.slots, chosen.tolist(), strict=True) if on]


def _begin_episodes(env: VectorContext, seeds: Iterable[int]) -> None:
    now_s = env._loop.time()
    for number in seeds:
        slot = env.slots[number]
        slot.state = "running"
        slot.episode += 1
        slot.request.memory = None
        slot.meter.begin(now_s, slot.recorder.num_decisions)
    _show(env)
    _span(env, "reset")


def _must_wait(env: VectorContext, running: Sequence[Slot], seen: Sequence[Observation]) -> bool:
    """Close the decisions before `seen` and start others; return whether their credit has to be waited for."""
    for slot in running:
        slot.recorder.park(seen[slot.number])
        slot.recorder.place = slot.recorder.num_decisions
    admission = env.slots[0].recorder.admission
    return admission is not None and not admission.try_start(*(slot.index for slot in running))


async def _wait_for_credit(env: VectorContext, running: Sequence[Slot]) -> None:
    for slot in env.slots:
        slot.request.answered_s = 0.0  # the time since then says nothing about the simulator
    await env._group.admission.start(*(slot.index for slot in running))


def _ask(env: VectorContext, seen: Sequence[Observation], asked: Asked) -> None:
    requests = [slot.request for slot in env.slots]
    if requests[0].answered_s:
        env._group.profile.turnaround.latency.add(env._group.clock() - requests[0].answered_s)
    for slot, request, obs in zip(env.slots, requests, seen, strict=True):
        request.obs, request.index, request.asked = obs, slot.recorder.place, asked
    env._group.actor.request_all(requests)


def _chunks(outs: Sequence[ActionOut]) -> Array:
    """Return the actions of all slots, without a copy where they were chosen in one batch."""
    first, last = outs[0], outs[-1]
    if first.batch is last.batch and last.row - first.row == len(outs) - 1:
        action: Array = first.batch.action[first.row : last.row + 1]
        return action
    return np.stack([out.action for out in outs])


def _took(env: VectorContext, running: Sequence[Slot], result: VectorStep, action: Array) -> VectorStep:
    observe = env._group.observe
    if observe is not None:
        result.obs = observe(result.obs)
    env._obs = result.obs
    _forget_idle(env, result)
    _show(env)
    terminated, truncated = result.terminated.tolist(), result.truncated.tolist()
    for slot in running:
        number, meter, decision = slot.number, slot.meter, slot.recorder.current
        rewards, success = result.rewards[number], result.success[number]
        meter.num_steps += len(rewards)
        meter.total_reward += sum(rewards)
        if success is not None:
            meter.see({"success": success})
        if decision is not None:
            if decision.num_steps or action is not env._chunks:
                slot.recorder.note_executed(decision, action[number], len(rewards))
            decision.rewards = decision.rewards + rewards if decision.num_steps else rewards
            decision.num_steps += len(rewards)
            decision.terminated, decision.truncated = terminated[number], truncated[number]
            if decision.out.batch.memory is not None:
                slot.request.memory = decision.out.memory
        if terminated[number] or truncated[number]:
            env.recovery.went_well(env.index)
            end_episode(env, slot)
    return result


def _show(env: VectorContext) -> None:
    env._rows = rows(env._obs, env.num_slots)
    for slot, obs in zip(env.slots, env._rows, strict=True):
        if slot.state == "running":
            slot.recorder.seen = obs


def _forget_idle(env: VectorContext, result: VectorStep) -> None:
    """What an idle slot does is nobody's business."""
    for slot in env.slots:
        if slot.state == "idle":
            result.rewards[slot.number], result.success[slot.number] = (), None
            result.terminated[slot.number] = result.truncated[slot.number] = False


def _check_free(env: VectorContext, name: str) -> None:
    if env._busy is not None:
        raise ProgramError(
            f"{name}() while {env._busy}() of the same simulator is running ({env.where()}): await one before the next"
        )


def _check_ready(env: VectorContext, name: str) -> None:
    _check_free(env, name)
    over = [slot.number for slot in env.slots if slot.state == "over"]
    if over or all(slot.state == "idle" for slot in env.slots):
        raise ProgramError(
            f"{name}(): slots {over or 'all'} have no running episode ({env.where()}): call "
            "reset(env.needs_reset) first"
        )


def _span(env: VectorContext, name: str) -> None:
    """Record the time since the last span of this simulator: what it waited for."""
    trace = env._group.trace
    if trace is not None:
        now_s = env._loop.time()
        trace.span(f"{env._group.name}-{env.index}", name, env._mark_s, now_s, calls=env.num_calls)
        env._mark_s = now_s
