"""A run that goes on in another process: what was started is accounted for, and nothing waits for a save."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebrl.core.errors import Closed, ConfigError, EbrlError
from ebrl.core.records import Decision, Episode, GroupRule, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.saved import SavedExperience
from ebrl.core.trace import Trace
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.sim.programs import rollout
from ebrl.train.checkpoint import Checkpoint, Checkpointer, load
from ebrl.train.sampling import Sampling
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner, VersionedPolicy, assert_sound, scripted_spec, the_failure

LENGTHS = scripted_spec(length=lambda rng: 3 + int(rng.integers(10)))
torch.set_num_threads(1)


class SavedLearner(RecordingLearner):
    """Can be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])


def machine(seed: int = 0, **laws: float) -> VirtualMachine:
    """Return hardware whose latencies scatter, but for those that are given."""
    fixed = {kind: (lambda n, rng, seconds=seconds: seconds) for kind, seconds in laws.items()}
    return VirtualMachine(
        {
            "sim": lambda n, rng: float(rng.lognormal(0.0, 1.0)),
            "gen": lambda n, rng: 0.05 * n * float(rng.exponential()),
            "train": lambda n, rng: float(rng.exponential()),
            **fixed,
        },
        num_cores=4,
        seed=seed,
    )


@dataclass
class Run:
    """A run that goes on until it is told to stop."""

    rt: Runtime
    envs: EnvGroup
    trainer: Trainer
    learner: SavedLearner

    @property
    def trained(self) -> list[Decision]:
        return self.learner.decisions


async def going(
    rt: Runtime,
    *,
    updates: int,
    resume: Checkpoint | None = None,
    max_lag: int = 1,
    sampling: Sampling | None = None,
    groups: bool = False,
    **group: Any,
) -> Run:
    learner = SavedLearner(VersionedPolicy(LENGTHS), 12)
    if groups:
        learner.groups = GroupRule()  # type: ignore[attr-defined]
    gen = rt.start(Generator(learner.policy))
    envs = rt.start(EnvGroup(group.pop("spec", LENGTHS), actor=gen, **{"count": 4, **group}))
    trainer = rt.start(Trainer(envs, learner, updates=updates, max_lag=max_lag, sampling=sampling, resume=resume))
    return Run(rt, envs, trainer, learner)


def saved_after(
    updates: int, delay_s: float, *, hardware: VirtualMachine | None = None, **options: Any
) -> tuple[Checkpoint, list[Decision]]:
    """Return a checkpoint made `delay_s` after an update, and what was trained before."""

    async def main() -> tuple[Checkpoint, list[Decision]]:
        async with Runtime(hardware or machine()) as rt:
            run = await going(rt, updates=updates, **options)
            async for _ in run.trainer:
                pass
            await asyncio.sleep(delay_s)
            return await run.trainer.snapshot(), run.trained

    return run_virtual(main())


def held(experience: SavedExperience) -> list[Decision]:
    """Return what is finished and not trained."""
    segments = [*experience.taken, *experience.segments, *experience.open]
    return [decision for segment in segments for decision in segment.decisions]


@pytest.mark.parametrize("on_resume", ["next", "replay"])
@pytest.mark.parametrize("version", [0, 1, 1000])
def test_a_resumed_run_has_credit_for_what_fits_beside_what_is_open(version: int, on_resume: Any) -> None:
    """Whatever the version: a counter that starts at 0 would let a thousand batches of decisions start at once."""
    saved, _ = saved_after(2, 4.0, on_resume=on_resume)
    experience, ledger, num = saved.experience, saved.experience.ledger, (version - 2) * 12
    ledger = replace(ledger, started=ledger.started + num, trained=ledger.trained + num)
    saved = replace(saved, update=version, version=version, experience=replace(experience, ledger=ledger))
    num_open = len(held(experience))
    assert num_open == ledger.buffered + ledger.parked > 0
    assert ledger.in_flight > 0

    async def main() -> None:
        async with Runtime(machine()) as rt:
            run = await going(rt, updates=version + 5, resume=saved, on_resume=on_resume)
            assert run.envs.actor.weights.version == version
            before = run.envs.admission.ledger()
            assert_sound(before)
            assert before.in_flight == 0
            assert before.buffered + before.parked == num_open
            assert before.dropped.get("lost", 0) == (ledger.in_flight if on_resume == "next" else 0)
            await asyncio.sleep(1000)  # nobody trains
            after = run.envs.admission.ledger()
            assert after.started - before.started == 2 * 12 - num_open
            assert after.num_waiting == 4

    run_virtual(main())


@pytest.mark.parametrize("max_lag", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_trained_twice_and_nothing_is_forgotten(seed: int, max_lag: int, tmp_path: Path) -> None:
    """Of long episodes no more than of short ones: what is lost is what was in flight, and is counted."""
    laws = {"train": 20.0} if max_lag > 1 else {}  # then segments also lie with the trainer
    saved, before = saved_after(3, 0.8 * seed, hardware=machine(seed, **laws), max_lag=max_lag)
    assert bool(saved.experience.taken) == (max_lag > 1)
    saves = Checkpointer(tmp_path)
    saves._write(saved)
    in_flight = saved.experience.ledger.in_flight

    async def main() -> None:
        async with Runtime(machine(seed + 50)) as rt:
            run = await going(rt, updates=9, resume=found, max_lag=max_lag)
            episodes = list[Episode]()
            async for report in run.trainer:
                assert_sound(run.envs.admission.ledger())
                assert report.lag_max <= max_lag
                assert report.dropped.get("lost", 0) == in_flight
                episodes += report.episodes
            assert report.update == 9
            ledger = run.envs.admission.ledger()
            assert ledger.trained == 9 * 12
            rest = await run.trainer.snapshot()
            kept = held(rest.experience)
            ids = [(d.env, d.index) for d in [*before, *run.trained, *kept]]
            assert len(set(ids)) == len(ids)
            assert len(ids) + sum(ledger.dropped.values()) == ledger.started - ledger.in_flight
            missing = {(env, i) for env in range(4) for i in range(run.envs.save().envs[env].num_decisions)} - set(ids)
            assert len(missing) <= sum(ledger.dropped.values()) + ledger.in_flight
            assert len({(e.env, e.episode) for e in episodes}) == len(episodes)

    found = saves.latest()
    run_virtual(main())


def test_a_resumed_run_acts_with_the_saved_version_and_weights_from_the_start() -> None:
    saved, _ = saved_after(5, 2.0)
    begun = [env.episode for env in saved.experience.envs]

    async def main() -> None:
        async with Runtime(machine()) as rt:
            run = await going(rt, updates=7, resume=saved)
            reports = [report async for report in run.trainer]
            assert [report.update for report in reports] == [6, 7]
            assert reports[0].elapsed_s > saved.elapsed_s
            assert reports[0].env_steps > sum(env.env_steps for env in saved.experience.envs)
            kept = {(d.env, d.index) for d in held(saved.experience)}
            new = [d for d in run.trained if (d.env, d.index) not in kept]
            assert {d.version for d in new} == {5, 6}
            # The policy's log-probability is its one weight: the number of updates.
            assert all(float(d.out.log_prob.ravel()[0]) == d.version for d in new)
            assert min(Counter(d.env for d in new).values()) > 0
            for env in range(4):
                first = min((d for d in new if d.env == env), key=lambda d: d.index)
                assert first.episode == begun[env] + 1, "the next episode"
                assert first.index >= saved.experience.envs[env].num_decisions

    run_virtual(main())


def test_the_segments_of_episodes_that_were_given_up_bootstrap_from_what_was_seen_last() -> None:
    saved, _ = saved_after(2, 4.0)
    still_open = {segment.env: segment for segment in saved.experience.open}
    assert still_open

    async def main() -> None:
        async with Runtime(machine()) as rt:
            run = await going(rt, updates=4, resume=saved)
            async for _ in run.trainer:
                pass
            for env, segment in still_open.items():
                last = segment.decisions[-1]
                (found,) = (
                    s
                    for batch in run.learner.batches
                    for s in batch.segments
                    if (s.env, s.decisions[-1].index) == (env, last.index)
                )
                assert np.array_equal(found.last_obs, segment.last_obs)  # type: ignore[arg-type]
                assert not found.decisions[-1].terminated

    run_virtual(main())


def test_every_environment_has_what_is_left_of_its_quota() -> None:
    """Also one that was trained more than others: its lead counts, and not only what it has open."""
    saved, before = saved_after(3, 0.5, sampling="quota", max_lag=2)
    assert any(saved.experience.ahead)

    async def main() -> None:
        async with Runtime(machine()) as rt:
            run = await going(rt, updates=4, resume=saved, sampling="quota", max_lag=2)
            await asyncio.sleep(1000)  # nobody trains
            started = Counter(d.env for d in [*before, *held((await run.trainer.snapshot()).experience)])
            assert started == dict.fromkeys(range(4), (3 + 2 + 1) * 12 // 4)

    run_virtual(main())


@pytest.mark.parametrize("on_resume", ["next", "replay"])
def test_open_groups_of_episodes_are_given_up_and_counted(on_resume: Any, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"groups": True, "group_size": 2, "on_resume": on_resume, "max_lag": 4}
    saved, before = saved_after(3, 2.0, **options)
    ledger = saved.experience.ledger
    begun = [env.episode for env in saved.experience.envs]
    assert ledger.parked > 0
    assert ledger.in_flight > 0
    assert begun[0] != begun[1], "members of one group"

    async def main() -> None:
        async with Runtime(machine(9)) as rt:
            run = await going(rt, updates=8, resume=saved, **options)
            dropped = run.envs.admission.ledger().dropped
            assert dropped.get("incomplete", 0) == ledger.dropped.get("incomplete", 0) + ledger.parked
            assert dropped.get("lost", 0) == ledger.dropped.get("lost", 0) + ledger.in_flight
            async for _ in run.trainer:
                assert_sound(run.envs.admission.ledger())
            kept = {(d.env, d.index) for d in held(saved.experience)}
            new = [d for d in run.trained if (d.env, d.index) not in kept]
            num = len({(d.env, d.index) for d in [*before, *run.trained]})
            assert num == run.envs.admission.ledger().trained >= 8 * 12
            for env in range(4):
                first = max(begun[env // 2 * 2 : env // 2 * 2 + 2]) + 1
                assert min(d.episode for d in new if d.env == env) == first

    run_virtual(main())
    assert any("episodes of groups are not run again" in message for message in caplog.messages) == (
        on_resume == "replay"
    )


def test_between_two_waves_of_groups_nothing_is_open_and_a_deterministic_run_goes_on_exactly() -> None:
    async def main(updates: int, seed: int, resume: Checkpoint | None = None) -> tuple[Checkpoint, list[Any]]:
        async with Runtime(machine(seed), deterministic=True) as rt:
            run = await going(rt, updates=updates, max_lag=0, resume=resume, groups=True, group_size=2)
            async for report in run.trainer:
                if report.update == updates:  # before environments have had a turn
                    saved = await run.trainer.snapshot()
            return saved, [(d.env, d.index, d.version, d.out.action.tobytes()) for d in run.trained]

    _, whole = run_virtual(main(6, 0))
    saved, first = run_virtual(main(3, 1))
    assert saved.experience.ledger.parked == saved.experience.ledger.in_flight == 0
    _, rest = run_virtual(main(6, 2, saved))
    assert first + rest == whole


# While a save runs.


def test_no_environment_waits_for_a_save(tmp_path: Path) -> None:
    trace = Trace()

    async def main() -> tuple[float, float]:
        async with Runtime(machine(sim=1.0, gen=0.0, train=0.0, io=100.0), trace=trace) as rt:
            run = await going(rt, updates=3, max_lag=1000)
            async for report in run.trainer:
                if report.update == 2:
                    began_s = rt.clock()
                    await Checkpointer(tmp_path).save(run.trainer)
                    return began_s, rt.clock()
        raise AssertionError

    began_s, ended_s = run_virtual(main())
    assert ended_s == began_s + 100.0, "files take their time, and the copy of the learner takes none"
    for env in range(4):
        ends = [span.end_s for span in trace.spans if span.track == f"envs-{env}" and began_s < span.end_s <= ended_s]
        assert len(ends) == 100
        assert np.diff([began_s, *ends]).max() == 1.0


def test_a_run_whose_environments_are_not_back_yet_can_be_saved_after_an_update_of_what_was_saved() -> None:
    saved, _ = saved_after(3, 400.0, hardware=machine(train=20.0), max_lag=3, on_resume="replay")
    assert len(held(saved.experience)) >= 12

    async def main() -> None:
        async with Runtime(machine(9, sim=50.0, train=0.0)) as rt:
            run = await going(rt, updates=9, resume=saved, max_lag=3, on_resume="replay")
            report = await anext(run.trainer)
            assert all(context.resumed is not None for context in run.envs._contexts)
            assert report.env_steps == sum(env.env_steps for env in saved.experience.envs) == run.envs.env_steps
            again = await run.trainer.snapshot()
            assert again.update == saved.update + 1
            pairs = zip(again.experience.envs, saved.experience.envs, strict=True)
            assert all(replace(env, in_flight=before.in_flight) == before for env, before in pairs)
            assert len(held(again.experience)) == len(held(saved.experience)) - 12
            async for _ in run.trainer:
                assert_sound(run.envs.admission.ledger())
            assert run.envs.env_steps > report.env_steps

    run_virtual(main())


def test_saves_that_overlap_are_written_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        saves = Checkpointer(tmp_path)
        async with Runtime(machine(io=50.0)) as rt:
            run = await going(rt, updates=3)
            writing = []
            async for report in run.trainer:
                writing.append(rt.spawn(saves.save(run.trainer), f"save-{report.update}"))
                await asyncio.sleep(0)  # it has what it needs
            assert [path.name for path in [await task for task in writing]] == [
                "000001-update-1",
                "000002-update-2",
                "000003-update-3",
            ]

    run_virtual(main())
    for number in (1, 2, 3):
        path = tmp_path / f"00000{number}-update-{number}"
        assert load(path).learner["policy"]["weight"].item() == number, "as it was between the updates"


def test_a_save_that_is_cancelled_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        async with Runtime(machine(io=50.0)) as rt:
            run = await going(rt, updates=1)
            async for _ in run.trainer:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(10):
                        await Checkpointer(tmp_path).save(run.trainer)

    run_virtual(main())
    assert load(tmp_path / "000001-update-1").update == 1


# What is refused.


def test_a_save_in_an_update_is_refused() -> None:
    async def main() -> None:
        async with Runtime(machine(train=10.0)) as rt:
            run = await going(rt, updates=1)
            beginning, update = asyncio.Event(), run.learner.update

            def watched(batch: TrainBatch) -> Mapping[str, float]:
                beginning.set()  # the virtual lane runs it on the loop
                return update(batch)

            run.learner.update = watched  # type: ignore[method-assign]
            with pytest.raises(ConfigError, match="envs is still being built: save a run after one of its updates"):
                await run.trainer.snapshot()
            updating = rt.spawn(anext(run.trainer), "update")
            await beginning.wait()
            with pytest.raises(ConfigError, match="trainer is in an update: save in the body of `async for report in"):
                await run.trainer.snapshot()
            await updating
            assert (await run.trainer.snapshot()).update == 1
        with pytest.raises(Closed, match="trainer is not running"):
            await run.trainer.snapshot()

    run_virtual(main())


def test_a_learner_without_a_state_is_refused() -> None:
    async def main() -> None:
        learner = RecordingLearner(VersionedPolicy(LENGTHS), 12)
        async with Runtime(machine()) as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=4))
            trainer = rt.start(Trainer(envs, learner, updates=1))
            async for _ in trainer:
                with pytest.raises(ConfigError, match="RecordingLearner cannot be saved: give it state_dict"):
                    await trainer.snapshot()

    run_virtual(main())


@pytest.mark.parametrize(
    ("runtime", "options", "words"),
    [
        ({}, {"count": 3}, "envs: the checkpoint is of 4 environments, not 3: use as many"),
        ({"seed": 5}, {}, "envs: the checkpoint is of seed 0: use Runtime(seed=0)"),
        (
            {},
            {"spec": replace(LENGTHS, task="b"), "count": 4},
            "envs: the checkpoint is of task '' in env 0, not 'b': use the same specs",
        ),
        (
            {},
            {"spec": replace(LENGTHS, id="other")},
            "envs: the checkpoint is of 'scripted' in env 0, not 'other': use the same specs",
        ),
        ({}, {"group_size": 2}, "envs: the checkpoint is of groups of 1: use group_size=1"),
        ({}, {"groups": True}, "envs: the checkpoint is of a learner that compares no groups: use that learner"),
        ({}, {"name": "robots"}, "robots: the checkpoint is of a group 'envs': use name='envs'"),
        (
            {"record": "log"},
            {},
            "a run is recorded from its beginning: leave out Runtime(record=...), or resume=...",
        ),
    ],
)
@pytest.mark.blocks("a log is opened before anything runs")
def test_another_run_is_refused(
    runtime: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    groups: dict[str, Any] = {"group_size": 2} if "groups" in options else {}
    saved, _ = saved_after(1, 1.0, **groups)

    async def main() -> None:
        async with Runtime(machine(), **runtime) as rt:
            await going(rt, updates=2, resume=saved, **groups, **options)

    error = the_failure(main())
    assert isinstance(error, ConfigError)
    assert str(error) == words


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("environments", "of a learner that compares no groups"),
        ("share", "share a batch equally"),
        ("learner", "does not fit this SavedLearner"),
        ("generator", "not of the form of the generator's"),
    ],
)
def test_who_is_refused_has_changed_nothing(why: str, told: str) -> None:
    saved, _ = saved_after(2, 1.0, group_size=2)

    async def main() -> None:
        learner, other = (SavedLearner(VersionedPolicy(LENGTHS), 12) for _ in range(2))
        if why == "environments":
            learner.groups = GroupRule()  # type: ignore[attr-defined]
        elif why == "share":
            learner.batch_size = 10
        else:
            (learner if why == "learner" else other).policy.register_buffer("more", torch.zeros(2))
        async with Runtime(machine()) as rt:
            gen = rt.start(Generator(other.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=4, group_size=2))
            sampling: Sampling | None = "quota" if why == "share" else None
            with pytest.raises(EbrlError, match=told):
                rt.start(Trainer(envs, learner, updates=4, sampling=sampling, resume=saved))
            assert (learner.policy.weight.item(), gen.weights.version) == (0.0, 0)
            trainer = rt.start(Trainer(envs, other, updates=4))
            assert [report.update async for report in trainer] == [1, 2, 3, 4]
            assert other.decisions[0].index == 0
            assert_sound(envs.admission.ledger())

    run_virtual(main())


# Episodes that are run again.


def lengths_of(episodes: Sequence[Episode]) -> None:
    for episode in episodes:
        rng = np.random.default_rng(episode.seed)
        rng.uniform(-0.1, 0.1)
        rng.uniform(-1.0, 1.0)
        assert episode.num_steps == episode.num_decisions == 3 + int(rng.integers(10))


def resumed_episodes(saved: Checkpoint, **options: Any) -> list[Episode]:
    async def main() -> list[Episode]:
        async with Runtime(machine(9)) as rt:
            run = await going(rt, updates=saved.update + 6, resume=saved, **options)
            return [episode async for report in run.trainer for episode in report.episodes]

    return run_virtual(main())


def test_episodes_go_on_where_they_were_or_the_next_ones_begin() -> None:
    saved, _ = saved_after(2, 4.0, on_resume="replay")
    running = {env: e.episode for env, e in enumerate(saved.experience.envs) if e.running and e.running.num_steps}
    assert running
    again = resumed_episodes(saved, on_resume="replay")
    lengths_of(again)
    assert set(running.items()) <= {(e.env, e.episode) for e in again}
    following = resumed_episodes(saved, on_resume="next")
    lengths_of(following)
    assert not set(running.items()) & {(e.env, e.episode) for e in following}
    assert {(env, number + 1) for env, number in running.items()} <= {(e.env, e.episode) for e in following}


def test_a_run_that_took_no_notes_gives_its_episodes_up_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    saved, _ = saved_after(2, 4.0)
    with caplog.at_level(logging.WARNING, logger="ebrl"):
        assert resumed_episodes(saved, on_resume="replay") == resumed_episodes(saved, on_resume="next")
    assert [message for message in caplog.messages if "did not note how to run its episodes again" in message] == [
        'envs: the run that saved did not note how to run its episodes again (on_resume="replay"): they are given up'
    ]


async def nudging(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        if env.meter.num_steps == 3 and env.index % 2:
            await env.call(lambda sim: sim.unwrapped)
        obs = (await env.act_step(obs)).obs


def test_episodes_whose_simulators_were_called_are_given_up_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    spec = scripted_spec(length=9)
    saved, _ = saved_after(1, 4.0, spec=spec, on_resume="replay", program=nudging, max_lag=3)
    running = {i: env for i, env in enumerate(saved.experience.envs) if env.running is not None}
    called = {i for i, env in running.items() if env.running is not None and env.running.called}
    assert called
    assert called < running.keys()
    lost = sum(running[env].in_flight for env in called)
    assert 0 < lost < saved.experience.ledger.in_flight == sum(env.in_flight for env in running.values())

    async def main() -> list[Episode]:
        async with Runtime(machine(9)) as rt:
            run = await going(rt, updates=9, resume=saved, spec=spec, on_resume="replay", program=nudging, max_lag=3)
            ledger = run.envs.admission.ledger()
            assert_sound(ledger)
            assert ledger.dropped["lost"] == lost
            assert ledger.in_flight == 0
            return [episode async for report in run.trainer for episode in report.episodes]

    episodes = {(e.env, e.episode) for e in run_virtual(main())}
    assert {(env, running[env].episode) for env in running.keys() - called} <= episodes
    assert not {(env, running[env].episode) for env in called} & episodes
    assert {(env, running[env].episode + 1) for env in called} <= episodes
    (message,) = [message for message in caplog.messages if "env.call" in message]
    assert message == (
        f"envs: {len(called)} running episodes are given up, since their programs have called the simulator "
        "(env.call), which cannot be done again: from here on the run is not the one that it would have been"
    )


def test_a_reset_that_is_cancelled_while_an_episode_is_run_again_runs_it_again() -> None:
    cancelled: list[int] = []

    async def impatient(env: EnvContext) -> None:
        if env.resumed is not None and env.resumed.running is not None and len(env.resumed.running.actions) > 3:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.5):
                    await env.reset()
            cancelled.append(env.index)
        await rollout(env)

    saved, _ = saved_after(2, 9.0, on_resume="replay", program=impatient)
    running = {env: e.episode for env, e in enumerate(saved.experience.envs) if e.running and e.running.num_steps > 3}

    async def main() -> list[Episode]:
        async with Runtime(machine(sim=1.0)) as rt:
            run = await going(rt, updates=8, resume=saved, on_resume="replay", program=impatient)
            return [episode async for report in run.trainer for episode in report.episodes]

    episodes = run_virtual(main())
    lengths_of(episodes)
    assert sorted(cancelled) == sorted(running)
    assert set(running.items()) <= {(e.env, e.episode) for e in episodes}
