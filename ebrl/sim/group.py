"""`EnvGroup`: N environments, each a coroutine that runs at its own pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from ebrl.core.errors import ConfigError, whole, word
from ebrl.core.leases import Lease
from ebrl.core.profile import SimulationProfile
from ebrl.core.protocols import Actor
from ebrl.core.readings import SimReading
from ebrl.core.records import EnvSpec, Episode, Host, Observation, Place, Segment
from ebrl.core.runtime import Runtime
from ebrl.core.saved import SavedExperience
from ebrl.core.scope import Scope
from ebrl.core.trace import Trace
from ebrl.sim.auto import Choice, choose
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.feed import Feed
from ebrl.sim.hosts import SimHost
from ebrl.sim.life import live
from ebrl.sim.placement import make_hosts, slots_of, take_memory, take_spare_memory
from ebrl.sim.programs import rollout
from ebrl.sim.recovery import Recovery
from ebrl.sim.resume import Past, save_env
from ebrl.sim.spares import Spares
from ebrl.sim.tasks import as_specs, chosen_host, spread

EnvProgram: TypeAlias = Callable[[EnvContext], Awaitable[None]]
OnResume: TypeAlias = Literal["next", "replay"]


class EnvGroup:
    """N coroutines from one program; a service.

    Simulators are built when the group starts, and nobody waits for another one's; first episodes begin when a
    consumer opens the group: a `Trainer`, or `run_episodes`. Each environment consumes credit for a decision, its own
    action and its own simulator call; nothing in here ever waits for all of them.

    Attributes:
        specs: Of each environment.
        tasks: Of each environment.
        choice: Where ``host="auto"`` has simulators run, and why; None until that is known, and with other hosts.
        profile: What is known of steps, resets and turn-arounds; as of the last call of `statistics`.
    """

    def __init__(
        self,
        spec: EnvSpec | Sequence[EnvSpec],
        *,
        actor: Actor,
        count: int,
        group_size: int = 1,
        spares: int = 0,
        program: EnvProgram = rollout,
        host: Host | None = None,
        lanes: int | None = None,
        segment_length: int | None = None,
        observe: Callable[[Observation], Observation] | None = None,
        on_resume: OnResume | None = None,
        failures: FailurePolicy | None = None,
        name: str = "envs",
    ) -> None:
        """Describe a group.

        Args:
            spec: From `ebrl.env_spec`; or several that observe and act alike and have a task each, from
                `ebrl.env_specs`: environment i then has ``spec[i % len(spec)]``.
            actor: Decides for all of them, in batches: a `Generator`.
            count: N.
            group_size: G; consecutive environments that have one task and train from the same seeds, so that a learner
                (GRPO) can compare their episodes. N is a multiple of it, and group i has ``spec[i % len(spec)]``.
            spares: K, at most N; further simulators that are reset ahead with the seeds of next episodes, so that
                environments wait less while they train, and do the same. As many are made as there is memory for. Worth
                it where resets are slow and cores are left (`ebrl.sim.spares`).
            program: Coroutine function that runs one episode or many; called again until the group ends.
            host: ``"thread"``, ``"process"``, or ``"auto"``: that in which simulators do more steps, found out when the
                group starts (`ebrl.sim.auto`). Default: what the spec wants. (Environments that are awaited run on the
                loop, ``"inline"``, and nowhere else.)
            lanes: Threads, or processes, that share the simulators, the i-th that of environment i modulo this number;
                spares have as many of their own. Default: one thread each up to 256, or one process per core. With
                spares it is one process each, since a process does one call at a time, and a reset would hold up all.
            segment_length: Decisions after which a segment is cut. Default: none, so that segments are as long as the
                end of episodes and the needs of the consumer allow.
            observe: Applied to every observation, the final one of an episode included; on the loop, so keep it short.
            on_resume: What becomes of running episodes in a run that goes on with a checkpoint. ``"next"``: they are
                given up, what is finished of them is trained, and the next ones begin. ``"replay"``: they are run again
                to the same point, exact where simulators are deterministic and programs keep nothing in mind from one
                decision to the next (`ebrl.sim.resume`); the run that saves needs it too. Default: ``"replay"`` in
                deterministic mode. Episodes in which simulators were called (`EnvContext.call`) are given up in any
                case, as are those that a learner compares (GRPO), of which none is trained; in deterministic mode there
                are none of these when an update has just ended.
            failures: What is done about simulators that raise, hang or die. Default: ``FailurePolicy()``, they are
                built again.
            name: Of the service; keys its random streams.

        Raises:
            ConfigError: An option out of range, or specs that do not go together.
        """
        whole("count", count)
        whole("group_size", group_size)
        if lanes is not None:
            whole("lanes", lanes)
        word("host", host, Host)
        word("on_resume", on_resume, OnResume)
        whole("spares", spares, 0, count)
        specs = as_specs(spec)
        spec_of = spread(specs, count, group_size)
        self.feed = feed = Feed(
            name, specs, spec_of, group_size=group_size, segment_length=segment_length, failures=failures
        )
        self.specs, self.tasks, self.admission, self.plan = feed.specs, feed.tasks, feed.admission, feed.plan
        self.actor = actor
        self.count = count
        self.group_size = group_size
        self.name = name
        self.observe = observe
        self.replays = False  # running episodes, after a resume
        self.seed = 0
        self.trace: Trace | None = None
        self.clock = time.monotonic
        self.profile = SimulationProfile(name)
        self.choice: Choice | None = None
        self._program = program
        self._on_resume = on_resume
        self._past = Past()
        self._host = chosen_host(specs, host)
        self._lanes = lanes
        self._runtime: Runtime | None = None
        self._hosts: list[SimHost] = []
        self._scope: Scope | None = None
        self._memory: list[Lease] = []
        self._contexts: list[EnvContext] = []
        self.recovery = Recovery(feed.policy, self.tasks)
        self.spares = Spares(spares, specs, spec_of, feed.policy)

    def open(self, runtime: Runtime) -> None:
        """Take lanes; called by `Runtime.start`."""
        self._runtime = runtime
        self.feed.open(self.name, runtime)
        self.seed, self.trace, self.clock = runtime.seed, runtime.trace, runtime.clock
        self.replays = runtime.deterministic if self._on_resume is None else self._on_resume == "replay"
        if self._host != "auto":
            self._hosts = _hosts_for(self, runtime, self._host, self.specs, self.name)
        self.profile = SimulationProfile(self.name)
        runtime.profiles.add(*self.profile.stages)
        _read(self)
        runtime.tuning.add_group(self)

    def reading(self) -> SimReading:
        """What the tuner needs to know; see `ebrl.core.tuning.TunedGroup`."""
        assert self._runtime is not None
        claim, hosts = self._runtime.claim("sim"), self._hosts
        return SimReading(
            name=self.name,
            gen="",
            num_envs=len(self._contexts) - self.plan.num_waiting - len(self.recovery.dropped),
            num_steps=self.env_steps - self._past.env_steps,
            busy_s=sum(host.busy_s for host in hosts),
            num_cores=claim.account.ceiling if claim is not None else self._runtime.machine.num_cores,
            cpu_part=sum(host.times.cpu_part() for host in hosts) / len(hosts) if hosts else 1.0,
        )

    async def serve(self) -> None:
        """Run all programs until cancelled; each begins with its simulator."""
        async with Scope() as self._scope:
            await _begin(self, self._scope)
            await asyncio.get_running_loop().create_future()  # until cancelled, or until a program raises

    def statistics(self) -> Mapping[str, float]:
        """Env steps and their rate, lane time, use of the cores, who waits, the ledger, restarts, and resets."""
        return {
            "env_steps": self.env_steps,
            "busy_s": sum(host.busy_s for host in self._hosts),
            **_read(self),
            **self.feed.counts(),
            **self.recovery.counts(),
            **self.spares.counts(),
        }

    async def aclose(self, deadline_s: float) -> None:
        """Close the simulators, each behind its running call."""
        self.feed.close()
        self.recovery.end()
        self.spares.end()
        if self._runtime is not None:
            self._runtime.tuning.forget(self)
            _read(self)
        await asyncio.gather(*(host.aclose(deadline_s) for host in self._hosts))
        leases, self._memory = self._memory, []
        for lease in leases:
            lease.release()
        if self._scope is not None:
            self._scope.cancel()  # again: a program that still awaits something in a `finally` has had its time

    @property
    def faults(self) -> Mapping[str, int]:
        """Restarts of simulators, environments that were dropped, and threads that leaked, so far; spares included."""
        return self.recovery.counts()

    @property
    def env_steps(self) -> int:
        """Simulator steps so far, of all environments."""
        return self._past.steps_to_come + sum(context.meter.env_steps for context in self._contexts)

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
        """Begin to produce segments, or go on with it; called once, by a trainer.

        Args:
            batch_size: B, decisions that the consumer takes at once.
            max_lag: Versions that a decision may be behind when it is trained.
            quota: Every environment may start B / N decisions per version.
            groups: Hand over the segments of an episode when all of its group have ended it, and no others. Credit is
                then of whole episodes (`ebrl.sim.cohorts`).
            saved: What `save` returned in the run to go on with.

        Raises:
            ConfigError: As `Admission.open`; the group has a trainer, or has run an evaluation; a quota where tasks
                have different numbers of environments; groups of one environment, or with a quota; environments that
                may be dropped, where all of them are needed; or `saved` is of other environments or another seed.
            Closed: The group was not started.
        """
        settled = self.feed.train(batch_size, max_lag, quota=quota, groups=groups, saved=saved, replay=self.replays)
        if settled is not None:
            self._past.take(settled.envs, self._contexts)
        assert self._runtime is not None
        if self._runtime.events is not None:
            facts = {
                "specs": [spec.id for spec in self.specs[:1]],
                "count": self.count,
                "group_size": self.group_size,
                "actor": self.actor.name,
            }
            self._runtime.events.describe("groups", self.name, **facts)

    def take_segments(self, stale: int | None = None) -> list[Segment]:
        """Hand over all segments that are ready, in order of arrival.

        Args:
            stale: First cut every open segment that holds a decision of this version or an older one, which could not
                wait for the next batch; then, while a batch is not complete, those with the oldest versions. None:
                cut nothing. Of groups nothing is cut.
        """
        return self.feed.take_segments(stale)

    def save(self) -> SavedExperience:
        """Return what is needed to go on from here in another process.

        Raises:
            ConfigError: The simulators are still being built.
        """
        later, waiting = self._past.waiting, self.admission.waiting
        if len(self._contexts) + len(later) < self.count:
            raise ConfigError(f"{self.name} is still being built: save a run after one of its updates")
        return self.feed.save([*(save_env(env, waiting) for env in self._contexts), *later.values()])

    def take_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call."""
        return self.feed.take_episodes()

    async def run_episodes(self, seeds: Iterable[int]) -> list[Episode]:
        """Run one episode per seed and task, and wait for all of them, recording nothing for training.

        Environments take the seeds as they come, and who finishes first does not matter: all that start count. Noise is
        that of the environment, so that episodes of a generator that samples are others the next time.

        Args:
            seeds: One per episode; every task runs all of them.

        Returns:
            In the order of `seeds`, and for each seed in the order of tasks.

        Raises:
            ConfigError: The group is used for training, or a seed is out of range.
            Closed: The group was not started.
        """
        return await self.feed.run(seeds)


def _hosts_for(group: EnvGroup, runtime: Runtime, place: Place, specs: Sequence[EnvSpec], name: str) -> list[SimHost]:
    return make_hosts(
        specs,
        host=place,
        lanes=group._lanes,
        machine=runtime.machine,
        pool=runtime.claim("sim"),
        name=name,
        alone=bool(group.spares.specs),
    )


async def _begin(group: EnvGroup, scope: Scope) -> None:
    runtime, place, spares = group._runtime, group._host, group.spares
    assert runtime is not None
    if place == "auto":
        group.choice = await choose(runtime, group.specs, lanes=group._lanes, name=group.name)
        place = group.choice.host
        group._hosts = _hosts_for(group, runtime, place, group.specs, group.name)
    hosts = group._hosts
    slots = slots_of(hosts)
    lease = await take_memory(runtime, group.specs, group.name)
    num, more = take_spare_memory(runtime, spares.specs, group.name)
    group._memory = [each for each in (lease, more) if each is not None]
    group.recovery.begin(group.name, runtime, scope, hosts)
    if num:
        further = _hosts_for(group, runtime, place, spares.specs[:num], f"{group.name}-spare")
        spares.begin(group, further)
        hosts += further
    for index, recorder in enumerate(group.feed.recorders):
        context = EnvContext(group, index, slots[index], recorder)
        group._contexts.append(context)
        group._past.give(context)
        context.running = scope.start(live(group._program, context, scope), f"{group.name}-{index}")


def _read(group: EnvGroup) -> dict[str, float]:
    """Bring the profile up to date with counters and with what hosts have noted."""
    assert group._runtime is not None
    now_s, profile = group.clock(), group.profile
    for host in group._hosts:
        host.times.move(profile)
    busy_s = sum(host.busy_s for host in group._hosts)
    cores = min(group._runtime.resources.pool("cores").units, sum(len(host.slots) for host in group._hosts))
    resets = sum(context.episode + 1 for context in group._contexts) - group._past.episodes
    profile.reset.read(now_s, resets, 0.0)
    return profile.step.read(now_s, group.env_steps - group._past.env_steps, busy_s, cores)
