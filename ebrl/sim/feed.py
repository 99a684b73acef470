"""`Feed`: where a group of environments meets its consumer, a trainer or an evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ebrl.core.admission import Admission, check_terms
from ebrl.core.errors import Closed, ConfigError, logger, whole
from ebrl.core.records import EnvSpec, Episode, Segment
from ebrl.core.runtime import Runtime
from ebrl.core.saved import SavedEnv, SavedExperience
from ebrl.sim.cohorts import Cohorts
from ebrl.sim.episodes import EpisodeMeter
from ebrl.sim.failures import FailurePolicy, refuse_drop
from ebrl.sim.plan import Plan
from ebrl.sim.recorder import Recorder, cut_stale
from ebrl.sim.resume import align, check_alike, warn_of_loss
from ebrl.sim.tasks import check_even, check_groups


class Feed:
    """Says what the environments of a group run next, and keeps what came of it until a trainer or `evaluate` takes it.

    Each group holds one, and each of its environments works with it; used on the loop only. What trainers call is
    described at `EnvGroup`.

    Attributes:
        name: Of the group.
        specs: Of each environment.
        tasks: Of each environment.
        group_size: Consecutive environments that train from the same seeds.
        admission: Who may start a decision, and the ledger of where every started one went.
        plan: Which episode comes next.
        cohorts: Episodes of whole groups, where the consumer compares them.
        policy: What is done about environments that fail.
        recorders: Of each environment; they hand over segments.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[EnvSpec],
        spec_of: Sequence[int],
        *,
        group_size: int,
        segment_length: int | None,
        failures: FailurePolicy | None,
    ) -> None:
        """Describe it.

        Args:
            name: Of the group; as its runtime has it from `open` on.
            specs: All that there are.
            spec_of: Which of them each environment has.
            group_size: G.
            segment_length: Decisions after which a segment is cut; None: none.
            failures: What is done about environments that fail; None: as `FailurePolicy` has it.

        Raises:
            ConfigError: A length out of range, or `failures` of another type.
        """
        if segment_length is not None:
            whole("segment_length", segment_length)
        if failures is not None and not isinstance(failures, FailurePolicy):
            raise ConfigError(
                f'failures must be a FailurePolicy, as FailurePolicy("drop"), or None, got {failures!r:.80}'
            )
        self.name = name
        self.specs = [specs[i] for i in spec_of]
        self.tasks = [spec.task for spec in self.specs]
        self.group_size = group_size
        self.admission = Admission(len(self.specs))
        self.plan = Plan(spec_of, group_size)
        self.cohorts: Cohorts | None = None
        self.policy = failures or FailurePolicy()
        length = segment_length or sys.maxsize
        self.recorders = [
            Recorder(i, spec.task, spec.action_repeat, length, self._hand_over) for i, spec in enumerate(self.specs)
        ]
        self._runtime: Runtime | None = None
        self._ended = False
        self._segments: list[Segment] = []
        self._episodes: list[Episode] = []
        self._told: set[str] = set()

    def open(self, name: str, runtime: Runtime) -> None:
        """The group has been started."""
        self.name, self._runtime, self._ended = name, runtime, False

    def close(self) -> None:
        """The group ends: whoever waits for credit, for a batch or for an evaluation is told."""
        self._ended = True
        self.admission.close()
        self.plan.close(f"{self.name} has ended, and its evaluation with it")

    def train(
        self, batch_size: int, max_lag: int, *, quota: bool, groups: bool, saved: SavedExperience | None, replay: bool
    ) -> SavedExperience | None:
        """Begin to produce segments, or go on with it; see `EnvGroup.open_training`. What is refused changes nothing.

        With `replay` environments run their episodes again where that is possible.

        Returns:
            What they are to be given, in this very turn; None where they begin.
        """
        self.plan.refuse_training(self.name)
        runtime = self._started("the trainer's")
        exact = runtime.deterministic and max_lag == 0
        per_env = quota or (exact and not groups)
        refuse_drop(self.policy, self.name, all_needed=quota or exact or groups)
        if quota:
            check_even(self.tasks)
        if groups:
            check_groups(self.name, self.group_size, quota)
        if saved is not None:
            check_alike(self, saved, runtime.seed, groups=groups)
        check_terms(len(self.specs), batch_size, max_lag, per_env=per_env)
        if groups:
            self.cohorts = Cohorts(
                self.admission,
                self._hand_over,
                num_envs=len(self.specs),
                size=self.group_size,
                batch_size=batch_size,
                max_lag=max_lag,
                in_waves=exact,
            )
            for recorder in self.recorders:
                recorder.emit = self.cohorts.add
        settled = None if saved is None else self._resume(saved, replay)
        self.admission.open(batch_size, max_lag, per_env=per_env, whole=groups, saved=settled)
        for recorder in self.recorders:
            recorder.admission = self.admission
        self.plan.train(runtime.seed)
        return settled

    async def run(self, seeds: Iterable[int]) -> list[Episode]:
        """Run one episode per seed and task; see `EnvGroup.run_episodes`."""
        self._started("the evaluation")
        if self._ended:
            raise Closed(f"{self.name} has ended: evaluate inside `async with Runtime()`, before the group is stopped")
        return await self.plan.run(list(seeds))

    def take_segments(self, stale: int | None) -> list[Segment]:
        """Hand over all segments that are ready; see `EnvGroup.take_segments`."""
        if stale is not None and self.cohorts is None:
            cut_stale(self.recorders, self.admission, stale)
        segments, self._segments = self._segments, []
        return segments

    def take_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def finish(self, recorder: Recorder, meter: EpisodeMeter, now_s: float, version: int, *, failed: bool) -> None:
        """An episode has ended, and counts, unless its simulator has failed; called by its environment, once."""
        meter.counted = True
        if failed:
            self.plan.give_back(recorder.env, (meter.position, meter.seed))
            return
        if recorder.current is not None:
            version = recorder.current.version
        episode = meter.end(recorder.env, recorder.task, now_s, recorder.num_decisions, version)
        if not self.plan.finished(episode):
            self._episodes.append(episode)

    def counts(self) -> dict[str, float]:
        """Return who waits, and the ledger."""
        ledger = self.admission.ledger()
        return {
            "waiting_for_credit": ledger.num_waiting + (self.cohorts.num_waiting if self.cohorts is not None else 0),
            "started": ledger.started,
            "trained": ledger.trained,
            "buffered": ledger.buffered,
            "parked": ledger.parked,
            "in_flight": ledger.in_flight,
            **{f"dropped_{reason}": num for reason, num in ledger.dropped.items()},
        }

    def save(self, envs: list[SavedEnv]) -> SavedExperience:
        """Return what is needed to go on in another process, with what each environment needs."""
        segments = [recorder.open_segment for recorder in self.recorders] if self.cohorts is None else []
        return SavedExperience(
            seed=self._started("it is saved").seed,
            name=self.name,
            ids=[spec.id for spec in self.specs],
            tasks=self.tasks,
            group_size=self.group_size,
            compared=self.cohorts is not None,
            ledger=self.admission.ledger(),
            ahead=self.admission.ahead,
            segments=list(self._segments),
            open=[segment for segment in segments if segment is not None],
            episodes=list(self._episodes),
            envs=envs,
        )

    def _started(self, what: str) -> Runtime:
        if self._runtime is None:
            raise Closed(f"{self.name} was not started: call rt.start(envs) before {what}")
        return self._runtime

    def _hand_over(self, segment: Segment) -> None:
        self.admission.emit(len(segment.decisions))
        self._segments.append(segment)
        recorder, last = self.recorders[segment.env], segment.decisions[-1]
        if recorder.foreign:
            self._tell(
                segment.env,
                "steps with actions that its policy did not choose, and they are learnt from as if it had: clip and "
                "round them in the policy, and give others to env.intervene(action)",
            )
        if recorder.altered and self.cohorts is None and segment.reason == "end" and not last.terminated:
            self._tell(
                segment.env,
                "shows its policy other observations than the simulator's, and an episode that was cut off is valued "
                "by the simulator's last one: change them in the environment (gymnasium.ObservationWrapper), or with "
                "observe=... of the group",
            )

    def _tell(self, env: int, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s: the program of environment %d %s", self.name, env, what)

    def _resume(self, saved: SavedExperience, replay: bool) -> SavedExperience:
        if replay:
            warn_of_loss(self, saved)
        saved = saved.settled(replay=replay and self.cohorts is None)
        if self.cohorts is not None:
            saved = replace(saved, envs=align(saved.envs, self.group_size, self.cohorts))
        self._segments, self._episodes = list(saved.segments), list(saved.episodes)
        still_open = {segment.env: segment for segment in saved.open}
        for recorder, env in zip(self.recorders, saved.envs, strict=True):
            recorder.resume(env.num_decisions, still_open.get(recorder.env))
        return saved
