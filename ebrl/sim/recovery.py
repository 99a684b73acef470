"""What happens when a simulator fails: found out, decided by `Failures`, and done, environment by environment.

A simulator that raises, breaks its contract, hangs or dies fails the call that its program waits for. What it had
executed is trained, what was in flight is booked as lost, and the program ends with the error, which does not leave
the environment: the program is called again, and its first `reset` waits for a new simulator. Programs may also catch
the error and reset themselves. Errors of programs and policies are nobody's fault but theirs, and end the run.

Hangs are found by one timer per group, which looks which call each lane or process runs. Timeouts for every call would
cost a timer each, and would count the time that calls wait for a core.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from ebrl.core.errors import CallTimeout, Closed, EbrlError, InvalidAction, SimulatorError, note
from ebrl.core.protocols import Machine
from ebrl.core.records import Array
from ebrl.core.runtime import Runtime
from ebrl.core.scope import Scope
from ebrl.sim.failures import Drop, FailurePolicy, Failures, Restart, Stop
from ebrl.sim.hosts import Running

if TYPE_CHECKING:
    from ebrl.sim.context import EnvContext

logger = logging.getLogger("ebrl")

LOOKS: Final = 8  # within the shortest deadline
SLOWEST_S: Final = 5.0  # between two looks
TOLD: Final = 10  # restarts of a group that are told one by one; later ones at powers of two


class Rebuilt(Protocol):
    """Where a simulator runs, or several that fail together.

    Attributes:
        built: Whether there is a simulator.
        innocent: It was lost because of another one that shares its thread or process.
        lost: Why it is not there any more, also if nobody waited for it; None once it is being built.
    """

    built: bool
    innocent: bool
    lost: EbrlError | None

    def build(self) -> asyncio.Future[None]:
        """See `ebrl.sim.hosts.Slot.build`."""

    def retire(self) -> None:
        """Close the simulator for good."""


class Watched(Protocol):
    """Some simulators whose calls may hang; see `ebrl.sim.hosts.SimHost`."""

    @property
    def num_leaked(self) -> int:
        """Threads that were given up so far."""

    def start(self, on_call: Callable[[], None] | None = None) -> None:
        """Begin; nothing is built yet."""

    def running(self) -> list[Running]:
        """What they do now, call by call."""

    def give_up(self, running: Running, error: SimulatorError) -> None:
        """End a call that does not end by itself."""


class Failing(Protocol):
    """Whoever drives what may fail: an environment, or a batched simulator.

    Attributes:
        index: In its group.
        running: Its program, again and again.
        raised: What its simulator has raised last.
        fault: Because of what the simulator is to be built anew.
        recovery: Of the group.
    """

    index: int
    running: asyncio.Task[None] | None
    raised: Fault | None
    fault: Fault | None
    recovery: Recovery

    @property
    def slot(self) -> Rebuilt:
        """Where its simulator runs."""

    def where(self) -> str:
        """Return a line that names it and what it does, for messages."""


@dataclass(slots=True)
class Fault:
    """A failure of one simulator.

    Attributes:
        error: What its program was told.
        where: Environment, episode, decision, seed, and last action.
        innocent: The simulator was lost because of another one.
        until_s: Loop time at which it may be built again; None: nothing was decided yet.
    """

    error: BaseException
    where: str
    innocent: bool
    until_s: float | None = None


def is_fault(error: BaseException) -> bool:
    """Whether an error that a call of a simulator ended with is the simulator's: others are settings and actions."""
    if isinstance(error, EbrlError):
        return isinstance(error, SimulatorError) and not isinstance(error, InvalidAction)
    return isinstance(error, Exception)


def blame(
    env: Failing,
    error: BaseException,
    future: asyncio.Future[Any],
    told: Callable[[], Array | None] = lambda: None,
    where: str | None = None,
) -> bool:
    """A call of `env` has raised: note it where it was its simulator.

    Args:
        env: Whose.
        error: What was raised.
        future: Of the call: an error that did not come through it is not the simulator's.
        told: Returns the action that the simulator was told last.
        where: It happened, if not in the episode that runs.

    Returns:
        Whether the simulator has failed and is not to be used again, and the run goes on.
    """
    if not is_fault(error) or not future.done() or future.cancelled() or future.exception() is not error:
        return False
    env.raised = _fault(env, error, told(), where)
    return env.recovery.policy.action != "raise"


def blame_reset(
    env: EnvContext, error: BaseException, future: asyncio.Future[Any], told: Callable[[], Array | None] = lambda: None
) -> None:
    """Likewise of a reset: the episode that was to begin came to nothing, and the next of the same stream follows."""
    if not blame(env, error, future, told):
        return
    assigned = env.meter.assigned
    assert assigned is not None
    env.fault = env.raised
    env.resumed = None
    env.recorder.cut("lost")  # what an episode before a resume had left open
    env._group.plan.give_back(env.index, assigned)
    env.episode += 1
    env.meter.fail(asyncio.get_running_loop().time(), env.recorder.num_decisions)
    if env.recorder.log is not None:
        env.recorder.log.renew()


class Recovery:
    """The failure handling of one group.

    Attributes:
        policy: What is done.
        num_spare_restarts: Of simulators that nobody waited for; counted by `ebrl.sim.spares`.
    """

    def __init__(self, policy: FailurePolicy, tasks: Sequence[str], what: str = "env") -> None:
        """Describe it.

        Args:
            policy: Of the group.
            tasks: Of each environment.
            what: They are called in messages.
        """
        self._what = what
        self.policy = policy
        self._name = ""
        self._failures = Failures(policy, list(tasks), what)
        self._building: dict[int, asyncio.Future[None]] = {}
        self.num_spare_restarts = 0
        self._hosts: list[Watched] = []
        self._runtime: Runtime
        self._scope: Scope
        self._watch: Watch | None = None
        self._stopping = False
        self._kinds: set[tuple[type[BaseException], str]] = set()  # of errors whose stack was told

    def begin(self, name: str, runtime: Runtime, scope: Scope, hosts: Sequence[Watched]) -> None:
        """The group serves.

        Args:
            name: Its own, as its runtime has it.
            runtime: Its own.
            scope: Ends all of its environments.
            hosts: Its own, not started.

        Raises:
            ConfigError: A spec cannot be sent to a process.
        """
        self._name, self._runtime, self._scope = name, runtime, scope
        self._watch = Watch(self._hosts, self.policy, runtime.machine)
        self.start(hosts)

    def start(self, hosts: Iterable[Watched]) -> None:
        """Start hosts, now or later, and look from then on for what hangs in them.

        Raises:
            ConfigError: A spec cannot be sent to a process.
        """
        assert self._watch is not None
        for host in hosts:
            self._hosts.append(host)
            host.start(self._watch.arm)

    def end(self) -> None:
        """The group ends: nobody is waited for any more, and so nobody hangs."""
        if self._watch is not None:
            self._watch.stop()

    @property
    def dropped(self) -> Collection[int]:
        """Environments that have ended."""
        return self._failures.dropped

    def counts(self) -> Mapping[str, int]:
        """Return what was done so far."""
        return {
            "restarts": self._failures.num_restarts + self.num_spare_restarts,
            "dropped_envs": len(self.dropped),
            "leaked_threads": sum(host.num_leaked for host in self._hosts),
        }

    def went_well(self, env: int) -> None:
        """An episode has ended as it should."""
        self._failures.went_well(env)

    def takes(self, env: Failing, error: BaseException) -> bool:
        """Whether the program of `env` ended with a failure of its simulator and with nothing else."""
        fault = env.raised
        if self.policy.action == "raise" or fault is None or not _consists_of(error, fault.error):
            return False
        env.fault = fault
        return True

    def place(self, env: Failing, error: BaseException) -> str:
        """Return where an error happened that ends the run."""
        fault = env.raised
        return env.where() if fault is None or not _consists_of(error, fault.error) else fault.where

    async def make_ready(self, env: Failing, take_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until an environment has a simulator that works, and build one as often as the policy allows.

        May be cancelled and asked for again: nothing is decided or built twice.

        Args:
            env: Which.
            take_over: Gives it another simulator instead, if there is one, and has its own built for others.

        Raises:
            Exception: What building raised, where the policy is to raise, and where it is a matter of settings.
            SimulatorError: The simulator was lost before, and the policy is to raise.
        """
        if self.policy.action == "raise":
            error = env.slot.lost if env.raised is None else env.raised.error
            if error is not None:
                raise SimulatorError('the simulator is lost, and FailurePolicy("raise") builds no other') from error
        while env.fault is not None or not env.slot.built:
            building = self._building.get(env.index)
            if building is None:
                if env.fault is None and env.slot.lost is not None:  # while its program was elsewhere
                    env.fault = _fault(env, env.slot.lost, None)
                if env.fault is not None:
                    await self._wait(env, env.fault)
                    if take_over():
                        env.fault = env.raised = None
                        return
                building = self._build(env)
            await asyncio.wait([building])
            if building.cancelled():
                raise Closed(f"{self._name} has ended")
            error = building.exception()
            if error is not None and (not is_fault(error) or self.policy.action == "raise"):
                raise error

    def _build(self, env: Failing) -> asyncio.Future[None]:
        self._building[env.index] = building = env.slot.build()
        building.add_done_callback(partial(self._was_built, env))
        return building

    def _was_built(self, env: Failing, building: asyncio.Future[None]) -> None:
        """Note what came of building, also where whoever asked for it was cancelled meanwhile."""
        del self._building[env.index]
        if building.cancelled():
            return
        error = building.exception()
        if error is None:
            env.fault = env.raised = None  # what they hold, tracebacks and all, is not needed any more
        elif blame(env, error, building, where=f"{self._what} {env.index}, while it was built"):
            env.fault = env.raised

    async def _wait(self, env: Failing, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        if fault.until_s is None:
            verdict = self._failures.decide(env.index, loop.time(), charged=not fault.innocent)
            if isinstance(verdict, Restart):
                fault.until_s = loop.time() + verdict.after_s
                tell(self, fault, verdict.after_s)
            else:
                fault.until_s = math.inf
                if isinstance(verdict, Drop):
                    self._drop(env, fault)
                else:
                    self._stop(fault, verdict)
        if math.isinf(fault.until_s):
            await loop.create_future()  # the end comes as a cancellation
        if fault.until_s > loop.time():
            await asyncio.sleep(fault.until_s - loop.time())

    def _drop(self, env: Failing, fault: Fault) -> None:
        left = len(self._failures.tasks) - len(self.dropped)
        logger.warning(
            "%s: %s %d is dropped, %d go on: %r [%s]",
            self._name, self._what, env.index, left, fault.error, fault.where, exc_info=stack_if_new(self, fault.error),
        )  # fmt: skip
        env.slot.retire()
        assert env.running is not None
        env.running.cancel()

    def _stop(self, fault: Fault, verdict: Stop) -> None:
        if not self._stopping:
            self._stopping = True
            self._scope.start(self._save_and_raise(fault, verdict), f"{self._name}-stop")

    async def _save_and_raise(self, fault: Fault, verdict: Stop) -> None:
        error = fault.error
        note(error, fault.where)
        note(error, verdict.reason)
        for name, save in list(self._runtime.before_failing.items()):
            try:
                await save()
            except Exception as failed:  # whatever it was: the run ends because of `error`
                note(error, f"{name} could not be saved: {failed if isinstance(failed, EbrlError) else repr(failed)}")
        raise error


class Watch:
    """Looks now and then which calls run, and gives up those that it has seen for longer than their deadline.

    Looks are counted, not seconds: while this whole process stands still nothing hangs.
    """

    def __init__(self, hosts: Sequence[Watched], policy: FailurePolicy, machine: Machine) -> None:
        """Begin, if there is any deadline.

        Args:
            hosts: Whose calls.
            policy: Has the deadlines.
            machine: On which they run. Where it knows beforehand what takes long, there is no timer until then, so that
                virtual time still sees a deadlock.
        """
        self._hosts = hosts
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._seen: dict[object, tuple[object, int]] = {}
        self._stopped = policy.shortest_s is None
        shortest_s = policy.shortest_s or 1.0
        self._every_s = min(shortest_s / LOOKS, SLOWEST_S)
        self._always = not machine.foresee(shortest_s, self.arm)
        if self._always:
            self.arm()

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def arm(self) -> None:
        """Begin to look, until nothing runs."""
        if self._timer is None and not self._stopped:
            self._timer = self._loop.call_later(self._every_s, self._look)

    def _look(self) -> None:
        self._timer = None
        before, self._seen = self._seen, {}
        for host in self._hosts:
            for running in host.running():
                call, looks = before.get(running.place, (None, 0))
                looks = looks + 1 if call is running.call else 1
                self._seen[running.place] = running.call, looks
                self._judge(host, running, looks)
        if self._always or self._seen:
            self.arm()

    def _judge(self, host: Watched, running: Running, looks: int) -> None:
        deadline_s = self._policy.deadline_s(running.phase)
        if deadline_s is not None and (looks - 1) * self._every_s >= deadline_s:
            host.give_up(running, CallTimeout(f"a {running.phase} has not ended within {deadline_s:g} s"))


def tell(recovery: Recovery, fault: Fault, after_s: float) -> None:
    """Log the last restart of a group, in `after_s`; the first ones all, and later ones rarely."""
    num = recovery.counts()["restarts"]
    loud = num <= TOLD or num & (num - 1) == 0
    logger.log(
        logging.WARNING if loud else logging.DEBUG,
        "%s: restart %d, in %.3g s: %s%r [%s]",
        recovery._name, num, after_s, "lost with another one: " if fault.innocent else "", fault.error, fault.where,
        exc_info=stack_if_new(recovery, fault.error) if loud else None,
    )  # fmt: skip


def stack_if_new(recovery: Recovery, error: BaseException) -> BaseException | None:
    """Return an error whose stack is worth its room in the log: no other of its type has said the same."""
    kind = type(error), traceback.format_exception_only(error)[0]  # copes with what raises when it is printed
    if kind in recovery._kinds:
        return None
    recovery._kinds.add(kind)
    return error


def _fault(env: Failing, error: BaseException, action: Array | None, where: str | None = None) -> Fault:
    text = "none" if action is None else np.array2string(np.asarray(action), precision=4, threshold=16, separator=", ")
    place = where or f"{env.where()} last action {' '.join(text.split())}"
    return Fault(error, place, env.slot.innocent and not env.slot.built)


def _consists_of(error: BaseException, part: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_consists_of(inner, part) for inner in error.exceptions)
    return error is part
