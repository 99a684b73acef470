"""`VectorGroup`: batched simulators, a coroutine each; one steps while the actions of another are chosen."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from ebrl.core.errors import ConfigError, whole
from ebrl.core.leases import Lease
from ebrl.core.profile import SimulationProfile
from ebrl.core.protocols import Actor
from ebrl.core.readings import SimReading
from ebrl.core.records import EnvSpec, Episode, Observation, Segment
from ebrl.core.runtime import Runtime
from ebrl.core.saved import SavedExperience
from ebrl.core.scope import Scope
from ebrl.core.trace import Trace
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.feed import Feed
from ebrl.sim.hosts import ThreadHost
from ebrl.sim.life import live
from ebrl.sim.placement import take_memory
from ebrl.sim.programs import vector_rollout
from ebrl.sim.recovery import Recovery
from ebrl.sim.tasks import as_specs, spread
from ebrl.sim.vector_context import VectorContext
from ebrl.sim.vector_episodes import go_on, save_slots
from ebrl.sim.vector_simulator import VectorSimulator

logger = logging.getLogger("ebrl")
VectorProgram: TypeAlias = Callable[[VectorContext], Awaitable[None]]


class VectorGroup:
    """Batched simulators of M slots each, a lane and a coroutine each; a service, and the place of an `EnvGroup`.

    All slots of a simulator act and step together: one request of M rows, credit for M decisions, one call. With two
    simulators, one of them steps while the actions of the other are chosen; so two of M / 2 slots beat one of M where
    time goes with the number of slots, and a second one of M slots is free where it does not.

    Slot s of simulator i is environment ``i * M + s``, with segments, seeds and random numbers of its own: with the
    same name and seed, and simulators that give each slot its seed, they are those of an `EnvGroup`.

    Attributes:
        specs: Of each environment.
        tasks: Of each environment.
        profile: What is known of steps, resets and turn-arounds, each of a whole simulator.
    """

    def __init__(
        self,
        spec: EnvSpec | Sequence[EnvSpec],
        *,
        actor: Actor,
        num_groups: int = 2,
        group_size: int = 1,
        program: VectorProgram = vector_rollout,
        threads: int = 1,
        segment_length: int | None = None,
        observe: Callable[[Observation], Observation] | None = None,
        failures: FailurePolicy | None = None,
        name: str = "envs",
    ) -> None:
        """Describe a group.

        Args:
            spec: From ``ebrl.env_spec(..., num_slots=M)``; or several that observe and act alike and have a task each:
                simulator i then has ``spec[i % len(spec)]``.
            actor: Decides for all of them: a `Generator`.
            num_groups: Simulators.
            group_size: G; consecutive slots that train from the same seeds, for learners that compare episodes (GRPO).
                M is a multiple of it.
            program: Coroutine function that drives one simulator; called again until the group ends.
            threads: Cores that one simulator uses while it steps.
            segment_length: As for `EnvGroup`.
            observe: Applied to every batch of observations ``[M, ...]``; on the loop, so keep it short.
            failures: What is done about simulators that raise or hang: all slots of one end with it, and budgets are of
                simulators. Default: ``FailurePolicy()``, they are built again.
            name: Of the service; keys its random streams.

        Raises:
            ConfigError: A number out of range, specs that do not go together or are of single simulators, or a program
                for a single environment.
        """
        for label, value in (("num_groups", num_groups), ("group_size", group_size), ("threads", threads)):
            whole(label, value)
        _check_program(program)
        specs = as_specs(spec, batched=True)
        self.num_slots = num_slots = _common_slots(specs, group_size)
        spec_of = spread(specs, num_groups * num_slots, num_slots)
        self.feed = feed = Feed(
            name, specs, spec_of, group_size=group_size, segment_length=segment_length, failures=failures
        )
        self.specs, self.tasks, self.admission, self.plan = feed.specs, feed.tasks, feed.admission, feed.plan
        self.actor = actor
        self.num_groups = num_groups
        self.group_size = group_size
        self.name = name
        self.observe = observe
        self.seed = 0
        self.trace: Trace | None = None
        self.clock = time.monotonic
        self.profile = SimulationProfile(name)
        self.contexts: list[VectorContext] = []
        self.recovery = Recovery(feed.policy, self.tasks[::num_slots], "simulator")
        self._program = program
        self._threads = threads
        self._runtime: Runtime | None = None
        self._host: ThreadHost | None = None
        self._scope: Scope | None = None
        self._memory: Lease | None = None

    def open(self, runtime: Runtime) -> None:
        """Take lanes; called by `Runtime.start`.

        Raises:
            ConfigError: The run is recorded.
        """
        if runtime.events is not None:
            raise ConfigError(
                "a recorded run has no batched simulators: leave out Runtime(record=...), or use EnvGroup"
            )
        self._runtime = runtime
        self.feed.open(self.name, runtime)
        self.seed, self.trace, self.clock = runtime.seed, runtime.trace, runtime.clock
        self._host = ThreadHost(
            self.specs[:: self.num_slots],
            runtime.machine,
            runtime.claim("sim"),
            self.num_groups,
            self.name,
            kind=VectorSimulator,
            threads=self._threads,
            sample_every=1,
        )
        self.contexts = [
            VectorContext(self, i, slot, self.feed.recorders[i * self.num_slots : (i + 1) * self.num_slots])
            for i, slot in enumerate(self._host.slots)
        ]
        self.profile = SimulationProfile(self.name)
        runtime.profiles.add(*self.profile.stages)
        _read(self)
        runtime.tuning.add_group(self)

    def reading(self) -> SimReading:
        """What the tuner needs to know: to it, a simulator is one environment. See `ebrl.core.tuning.TunedGroup`."""
        assert self._runtime is not None
        assert self._host is not None
        claim, dropped = self._runtime.claim("sim"), self.recovery.dropped
        return SimReading(
            name=self.name,
            gen="",
            num_envs=sum(each.slot.built for each in self.contexts if each.index not in dropped)
            - self.plan.num_waiting,
            num_steps=sum(context.num_steps for context in self.contexts),
            busy_s=self._host.busy_s,
            num_cores=claim.account.ceiling if claim is not None else self._runtime.machine.num_cores,
        )

    async def serve(self) -> None:
        """Run all programs until cancelled; each begins with its simulator."""
        async with Scope() as scope:
            self._scope = scope
            assert self._runtime is not None
            assert self._host is not None
            self._memory = await take_memory(self._runtime, self.specs[:: self.num_slots], self.name)
            self.recovery.begin(self.name, self._runtime, scope, [self._host])
            for context in self.contexts:
                context.running = scope.start(live(self._program, context, scope), f"{self.name}-{context.index}")
            await asyncio.get_running_loop().create_future()  # until cancelled, or until a program raises

    def statistics(self) -> Mapping[str, float]:
        """Env steps, the rate of simulator steps, lane time, its part in use, who waits, the ledger, and restarts."""
        return {
            "env_steps": self.env_steps,
            "busy_s": self._host.busy_s if self._host is not None else 0.0,
            **_read(self),
            **self.feed.counts(),
            **self.recovery.counts(),
        }

    async def aclose(self, deadline_s: float) -> None:
        """Close the simulators, each behind its running call."""
        self.feed.close()
        self.recovery.end()
        if self._runtime is not None:
            self._runtime.tuning.forget(self)
            _read(self)
        if self._host is not None:
            await self._host.aclose(deadline_s)
        if self._memory is not None:
            self._memory.release()
            self._memory = None
        if self._scope is not None:
            self._scope.cancel()  # again: a program that still awaits something in a `finally` has had its time

    @property
    def env_steps(self) -> int:
        """Steps so far, of all slots; those that were only carried along do not count."""
        return sum(slot.meter.env_steps for context in self.contexts for slot in context.slots)

    @property
    def faults(self) -> Mapping[str, int]:
        """Restarts of simulators, those that were dropped, and threads that leaked, so far."""
        return self.recovery.counts()

    # The consumer's side; see `ebrl.core.protocols.Experience`.

    def open_training(
        self,
        batch_size: int,
        max_lag: int,
        *,
        quota: bool = False,
        groups: bool = False,
        saved: SavedExperience | None = None,
    ) -> None:
        """Begin to produce segments, or go on with it; called once, by a trainer. As `EnvGroup.open_training`."""
        settled = self.feed.train(batch_size, max_lag, quota=quota, groups=groups, saved=saved, replay=False)
        if settled is not None:
            for context in self.contexts:
                go_on(context, settled.envs)

    def take_segments(self, stale: int | None = None) -> list[Segment]:
        """Hand over all segments that are ready, in order of arrival; see `EnvGroup.take_segments`."""
        return self.feed.take_segments(stale)

    def save(self) -> SavedExperience:
        """Return what is needed to go on from here in another process; running episodes are given up there."""
        waiting = self.admission.waiting
        return self.feed.save([slot for context in self.contexts for slot in save_slots(context, waiting)])

    def take_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call."""
        return self.feed.take_episodes()

    async def run_episodes(self, seeds: Iterable[int]) -> list[Episode]:
        """Run one episode per seed and task, and wait for all of them; see `EnvGroup.run_episodes`."""
        if not all(spec.slot_seeds for spec in self.specs):
            logger.warning(
                "%s: %s gives no slot a seed of its own, so that seeds of this evaluation only number its episodes",
                self.name, self.specs[0].id,
            )  # fmt: skip
        return await self.feed.run(seeds)


def _check_program(program: VectorProgram) -> None:
    """Refuse a program that says that it is for a single environment; what says nothing is found when it runs."""
    first = next(iter(inspect.signature(program).parameters.values()), None)
    if first is not None and "EnvContext" in str(first.annotation):
        name = getattr(program, "__qualname__", repr(program))
        raise ConfigError(
            f"program {name} drives one environment (EnvContext), but a batched simulator steps all slots at once: "
            "write one for a VectorContext, as ebrl.sim.programs.vector_rollout is"
        )


def _common_slots(specs: Sequence[EnvSpec], group_size: int) -> int:
    """Return M.

    Raises:
        ConfigError: It differs, is no multiple of the size of a group, or slots cannot have equal seeds.
    """
    num = specs[0].num_slots
    for spec in specs:
        if spec.num_slots != num:
            raise ConfigError(f"{specs[0].id} has {num} slots and {spec.id} has {spec.num_slots}: give all as many")
        if group_size > 1 and not spec.slot_seeds:
            raise ConfigError(
                f"{spec.id} gives no slot a seed of its own: its episodes cannot begin alike; group_size=1"
            )
    if num % group_size:
        raise ConfigError(f"{num} slots are no multiple of group_size={group_size}")
    return num


def _read(group: VectorGroup) -> dict[str, float]:
    """Bring the profile up to date with counters and with what hosts have noted."""
    now_s, profile, host, contexts = group.clock(), group.profile, group._host, group.contexts
    if host is not None:
        host.times.move(profile)
    profile.reset.read(now_s, sum(slot.episode + 1 for context in contexts for slot in context.slots), 0.0)
    busy_s = host.busy_s if host is not None else 0.0
    return profile.step.read(now_s, sum(context.num_steps for context in contexts), busy_s, len(contexts))
