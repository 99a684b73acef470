"""Tier C: the log of a run in real time, or in any other, repeats it; and what cannot be repeated is named."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ebrl.cli import main
from ebrl.core.errors import ConfigError, PolicyError
from ebrl.core.events import RecordedRun, checksums
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import Machine
from ebrl.core.records import Array, EnvSpec, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.generator import Generator
from ebrl.gen.policies import default_policy
from ebrl.replayer import _Replay, replay
from ebrl.sim.context import EnvContext
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.group import EnvGroup
from ebrl.sim.programs import receding_horizon
from ebrl.sim.spec import env_spec
from ebrl.train.grpo import GRPO, GRPOConfig
from ebrl.train.journal import parameter_digest
from ebrl.train.ppo import PPO, PPOConfig
from ebrl.train.trainer import Trainer
from tests.helpers import PATIENT, leaves, make_decision, make_segment, scripted_spec

LENGTHS = scripted_spec(length=lambda rng: 2 + int(rng.integers(12)))
torch.set_num_threads(1)
pytestmark = [
    pytest.mark.blocks("a replay builds simulators, and reads its log, where it runs: nobody waits for its loop"),
    pytest.mark.hogs("a replay learns in the thread of its loop"),
]


class Watched(PPO):
    """Remembers what it was given, as a hash of every id, version, number and action in the order of consumption."""

    def __init__(self, policy: Any, config: PPOConfig) -> None:
        super().__init__(policy, config)
        self.consumed = hashlib.sha256()

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        for segment in batch.segments:
            self.consumed.update(f"{segment.env} {segment.task} {segment.reason} {segment.advantage}".encode())
            for d in segment.decisions:
                self.consumed.update(f"{d.env} {d.episode} {d.index} {d.version} {d.rewards} {d.terminated}".encode())
                self.consumed.update(d.out.action.tobytes() + d.out.log_prob.tobytes() + np.asarray(d.obs).tobytes())
            self.consumed.update(np.asarray(segment.last_obs).tobytes())
        return super().update(batch)


def make(spec: EnvSpec = LENGTHS, batch_size: int = 24, *, seed: int = 0, order: int = 0) -> Watched:
    policy = default_policy(spec, hidden=(8,), normalize=True, seed=seed)
    return Watched(policy, PPOConfig(batch_size=batch_size, minibatch_size=batch_size // 2, epochs=2, seed=order))


@dataclass
class Ran:
    """What a recorded run came to."""

    consumed: str
    parameters: str
    num_masked: int
    num_lags: int


async def record(
    path: Path,
    machine: Machine,
    *,
    spec: EnvSpec = LENGTHS,
    batch_size: int = 24,
    count: int = 6,
    updates: int = 6,
    max_lag: int = 1,
    seed: int = 3,
    gen_lanes: int | None = None,
    **group: Any,
) -> Ran:
    learner, lags = make(spec, batch_size), set()
    async with Runtime(machine, seed=seed, record=path) as rt:
        gen = rt.start(Generator(learner.policy, lanes=gen_lanes))
        envs = rt.start(EnvGroup(spec, actor=gen, count=count, failures=PATIENT, **group))
        async for report in rt.start(Trainer(envs, learner, updates=updates, max_lag=max_lag)):
            lags.add(report.lag_counts)
    masked = report.dropped.get("masked", 0)
    return Ran(learner.consumed.hexdigest(), parameter_digest(learner.policy), masked, len(lags))


def heavy_tails(latency_seed: int, num_cores: int = 8) -> VirtualMachine:
    return VirtualMachine(
        {
            "sim": lambda n, rng: float(rng.pareto(0.7)),
            "gen": lambda n, rng: 0.05 * n * float(rng.exponential()),
            "train": lambda n, rng: 3 * float(rng.exponential()),
        },
        num_cores=num_cores,
        servers={"gen": 2},
        seed=latency_seed,
    )


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, changed: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return the log of a short run."""
    path = tmp_path / "events.jsonl"
    run_virtual(record(path, heavy_tails(0)))
    return path


# Equal.


@pytest.mark.slow
@pytest.mark.parametrize("host", ["thread", "process"])
def test_a_run_in_real_time_is_repeated(host: str, tmp_path: Path) -> None:
    spec = env_spec("CartPole-v1")
    options: dict[str, Any] = {"spec": spec, "batch_size": 128, "count": 8, "host": host}
    ran = asyncio.run(record(tmp_path / "log", LocalMachine(), **options))
    learner = make(spec, 128)
    report = replay(tmp_path / "log", spec, learner)
    assert report.mismatch is None, report.describe()
    assert (report.updates, report.end, report.software) == (6, "", ())
    assert report.decisions >= 6 * 128
    assert report.parameters == ran.parameters == parameter_digest(learner.policy)
    assert learner.consumed.hexdigest() == ran.consumed


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "count": st.integers(1, 10),
    "max_lag": st.integers(0, 3),
    "batch_size": st.sampled_from([12, 24, 48]),
    "segment_length": st.none() | st.integers(1, 5),
    "gen_lanes": st.none() | st.integers(1, 2),
    "lanes": st.none() | st.just(2),
}


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=st.fixed_dictionaries(OPTIONS), latency_seed=st.integers(0, 10**6))
@example(options={"count": 10, "max_lag": 1}, latency_seed=0)
@example(options={"count": 10, "max_lag": 0}, latency_seed=1)
def test_a_run_is_repeated_whatever_took_how_long(tmp_path: Path, options: dict[str, Any], latency_seed: int) -> None:
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    ran = run_virtual(record(path, heavy_tails(latency_seed), **options))
    learner = make(batch_size=options.get("batch_size", 24))
    report = replay(path, LENGTHS, learner)
    assert report.mismatch is None, report.describe()
    assert (report.updates, report.end) == (6, "")
    assert report.parameters == ran.parameters
    assert learner.consumed.hexdigest() == ran.consumed


def test_masked_decisions_are_made_again_and_not_trained(tmp_path: Path) -> None:
    ran = run_virtual(record(tmp_path / "log", heavy_tails(0), count=10, updates=12, max_lag=1))
    assert ran.num_masked > 5
    learner = make()
    replaying = _Replay(RecordedRun(tmp_path / "log"), LENGTHS, learner, {})
    report = replaying.run()
    assert report.mismatch is None
    assert report.decisions >= 12 * 24 + ran.num_masked
    assert learner.consumed.hexdigest() == ran.consumed
    assert min(replaying._untrained.values(), default=12) >= 12 - 1, "what is too old to be trained is not kept"


@pytest.mark.parametrize(
    "group",
    [
        {"program": partial(receding_horizon, execute=2)},
        {"observe": lambda obs: np.tanh(obs)},
        {"name": "others"},
        {"group_size": 3},
    ],
    ids=lambda group: next(iter(group)),
)
def test_other_programs_are_repeated(group: dict[str, Any], tmp_path: Path) -> None:
    ran = run_virtual(record(tmp_path / "log", heavy_tails(2), **group))
    learner = make()
    for known in ("name", "group_size"):  # the log knows them
        group.pop(known, None)
    report = replay(tmp_path / "log", LENGTHS, learner, **group)
    assert report.mismatch is None, report.describe()
    assert learner.consumed.hexdigest() == ran.consumed


def test_rows_of_batches_that_are_larger_than_the_padding_have_the_bits_that_they_have_alone() -> None:
    """A batch of 100 rows here: as the tuner may want it while recording."""
    spec = scripted_spec(obs_dim=7, action_dim=3)
    policy = default_policy(spec, hidden=(64, 64), normalize=True, seed=0)

    async def answers(count: int) -> dict[int, tuple[bytes, bytes]]:
        found: dict[int, tuple[bytes, bytes]] = {}

        async def program(env: EnvContext) -> None:
            obs, _ = await env.reset()
            out = await env.act(obs)
            found[env.index] = out.action.tobytes(), out.log_prob.tobytes()
            await env.step(out.action)
            await asyncio.Event().wait()

        async with Runtime(VirtualMachine({}, num_cores=100), deterministic=True) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(spec, actor=gen, count=count, program=program))
            envs.open_training(1000, max_lag=1)
            await asyncio.sleep(1)
            assert gen.statistics()["batches"] == 1
        return found

    few, many = run_virtual(answers(5)), run_virtual(answers(100))
    assert len(many) == 100
    assert {env: many[env] for env in few} == few


# Not to its end.


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part=st.floats(0, 1))
def test_a_log_that_is_torn_is_repeated_up_to_its_last_complete_update(recorded: Path, part: float) -> None:
    data = recorded.read_bytes()
    header, *updates = data.splitlines(keepends=True)
    size = len(header) + round(part * (len(data) - len(header)))
    torn = recorded.with_name("torn")
    torn.write_bytes(data[:size])
    whole = [line for i, line in enumerate(updates) if len(header) + sum(map(len, updates[: i + 1])) <= size + 1]
    report = replay(torn, LENGTHS, make())
    assert report.mismatch is None
    assert report.updates == len(whole)
    if whole:
        assert report.parameters == json.loads(whole[-1])["parameters"]
    is_torn = size not in {len(header) + sum(map(len, updates[:i])) - missing for i in range(7) for missing in (0, 1)}
    assert ("is torn: the run was killed" in report.end) == is_torn


async def intervening(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        out = await env.act(obs)
        if env.index == 2 and env.recorder.num_decisions == 12:
            obs = (await env.intervene(-out.action)).obs
        else:
            obs = (await env.step(out.action)).obs


async def giving_up(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        if env.index == 1 and env.recorder.num_decisions == 15:
            await env.act(obs)
        obs = (await env.act_step(obs)).obs


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (intervening, "the program replaced the action of decision 11 of env 2"),
        (giving_up, "decision 15 of env 1 was cancelled, lost or not executed"),
    ],
)
def test_what_no_log_can_repeat_ends_it_and_not_the_run(
    program: Callable[..., Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_virtual(record(tmp_path / "log", heavy_tails(0), program=program, updates=8))
    assert [why in entry.getMessage() for entry in caplog.records if "ends at update" in entry.getMessage()] == [True]
    assert lines(tmp_path / "log")[-1] == {"unreplayable": why}
    report = replay(tmp_path / "log", LENGTHS, make(), program=program)
    assert report.mismatch is None
    assert 0 < report.updates < 8
    assert report.end == f"what follows cannot be repeated: {why}"
    assert report.describe().splitlines()[1:] == [report.end]


@pytest.mark.parametrize("when", ["before the first update", "between two"])
def test_where_somebody_else_publishes_the_log_ends(when: str, tmp_path: Path) -> None:
    log, first = tmp_path / "log", when == "before the first update"

    async def main() -> None:
        learner = make()
        async with Runtime(heavy_tails(0), seed=3, record=log) as rt:
            gen = rt.start(Generator(learner.policy))
            if first:
                await gen.publish(learner.policy)
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=6, failures=PATIENT))
            async for report in rt.start(Trainer(envs, learner, updates=5)):
                if report.update == 2 and not first:
                    await gen.publish(learner.policy)

    run_virtual(main())
    why = f"version {2 if first else 3} was published by somebody else"
    assert lines(log)[-1] == {"unreplayable": why}
    report = replay(log, LENGTHS, make())
    assert (report.mismatch, report.updates, report.end) == (
        None,
        0 if first else 2,
        f"what follows cannot be repeated: {why}",
    )


def test_who_is_cancelled_in_an_update_leaves_a_log_that_can_be_repeated(tmp_path: Path) -> None:
    async def impatient() -> int:
        learner, num_timeouts = make(), 0
        async with Runtime(heavy_tails(0), seed=3, record=tmp_path / "log") as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=6, failures=PATIENT))
            trainer = rt.start(Trainer(envs, learner, updates=5))
            while trainer.reading().num_updates < 5:
                try:
                    async with asyncio.timeout(0.1):
                        await anext(trainer)
                except TimeoutError:
                    num_timeouts += 1
        return num_timeouts

    assert run_virtual(impatient()) > 5
    report = replay(tmp_path / "log", LENGTHS, make())
    assert (report.mismatch, report.updates, report.end) == (None, 5, "")


# Different.


class Moody(ScriptedEnv):
    """At call `when` of one simulator, after so many were built, it shows or gives something else."""

    num_built = 0

    def __init__(self, *args: Any, which: int, when: int, mood: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.me, Moody.num_built = Moody.num_built == which, Moody.num_built + 1
        self.when, self.mood = when, mood
        self.calls = -1

    def changed(self, obs: Array) -> Array:
        self.calls += 1
        return obs + np.float32(1e-6) if self.me and self.mood == "obs" and self.calls == self.when else obs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        return self.changed(obs), info

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        obs = self.changed(obs)
        change = self.me and self.mood == "reward" and self.calls == self.when
        return obs, reward + change, terminated, truncated, info


@pytest.mark.parametrize(
    ("when", "mood", "episode", "decision", "what"),
    [
        (9, "obs", 1, 7, "the simulator made something else of the same action"),  # calls 0 and 6 are resets
        (9, "reward", 1, 7, "the simulator made something else of the same action"),
        (6, "obs", 1, 5, "its reset showed another observation"),
        (5, "obs", 0, 4, "the simulator made something else of the same action"),  # the last one of its episode
    ],
)
def test_a_simulator_that_is_not_deterministic_is_named(
    when: int, mood: str, episode: int, decision: int, what: str, tmp_path: Path
) -> None:
    Moody.num_built = 0
    spec = replace(LENGTHS, make=partial(Moody, 3, 2, length=5, which=6 + 4, when=when, mood=mood))
    run_virtual(record(tmp_path / "log", heavy_tails(0), spec=spec))
    report = replay(tmp_path / "log", spec, make())
    found = report.mismatch
    assert found is not None
    assert (found.env, found.episode, found.decision) == (4, episode, decision)
    assert found.what.startswith(what)
    assert report.updates == found.update - 1
    assert report.describe().startswith(f"DIFFERENT at update {found.update}, env 4 episode {episode} decision ")


def test_another_policy_or_learner_is_named(recorded: Path) -> None:
    class Other(type(make().policy)):  # type: ignore[misc]
        def act(self, batch: Any, noise: Any, deterministic: bool = False) -> Any:
            return super().act(batch, noise * (1 + 1e-6), deterministic)

    learner = make()
    learner.policy.__class__ = Other
    found = replay(recorded, LENGTHS, learner).mismatch
    assert found is not None
    assert (found.update, found.decision) == (1, 0)
    assert found.what.startswith("the policy gave another action")

    found = replay(recorded, LENGTHS, make(order=1)).mismatch
    assert str(found) == "update 1: the learner made other weights of the same batch"


def test_the_log_says_how_many_threads_there_were_and_a_replay_has_as_many(recorded: Path, tmp_path: Path) -> None:
    class Counting(Watched):
        def update(self, batch: TrainBatch) -> Mapping[str, float]:
            found.append(torch.get_num_threads())
            return super().update(batch)

    async def two() -> None:
        learner = make()
        async with Runtime(LocalMachine(), record=tmp_path / "two") as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=2))
            async for _ in rt.start(Trainer(envs, learner, updates=1, threads=2)):
                pass

    found: list[int] = []
    asyncio.run(two())
    header = lines(tmp_path / "two")[0]
    assert (header["generators"]["gen"]["threads"], header["trainers"]["trainer"]["threads"]) == (1, 2)
    assert lines(recorded)[0]["trainers"]["trainer"]["threads"] == torch.get_num_threads() == 1
    replay(tmp_path / "two", LENGTHS, Counting(make().policy, make().config))
    assert found == [2]
    assert torch.get_num_threads() == 1


async def rolling(env: EnvContext, limit: int = 10**9) -> None:
    obs, _ = await env.reset()
    while not env.done:
        if env.recorder.num_decisions >= limit:
            await asyncio.Event().wait()
        obs = (await env.act_step(obs)).obs


def test_a_program_that_asks_for_less_is_named(tmp_path: Path) -> None:
    run_virtual(record(tmp_path / "log", heavy_tails(0), program=rolling))
    report = replay(tmp_path / "log", LENGTHS, make(), program=partial(rolling, limit=9))
    assert 0 < report.updates < 6
    assert str(report.mismatch).startswith(f"update {report.updates + 1}: the program asked for fewer decisions")


def test_other_software_is_named(recorded: Path, tmp_path: Path) -> None:
    header, *rest = lines(recorded)
    report = replay(write(tmp_path / "old", [{**header, "torch": "1.0"}, *rest]), LENGTHS, make())
    assert report.software == (f"torch: recorded 1.0, here {torch.__version__}",)
    assert report.mismatch is None
    assert report.describe().splitlines()[-1] == report.software[0]


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> tuple[int, str]:
        status = main(args)
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    small = ["--num-envs", "4", "--ppo.batch-size", "32", "--ppo.minibatch-size", "16", "--updates", "3", "--seed", "2"]
    folder, plain = str(tmp_path / "run"), str(tmp_path / "plain")
    assert run("train", "--env", "CartPole-v1", *small, "--record", "--run-dir", folder)[0] == 0
    status, text = run("replay", folder)
    assert status == 0
    assert text.startswith("3 updates and ")
    assert text.endswith(" decisions are as recorded\n")
    header, *updates = lines(tmp_path / "run" / "events.jsonl")
    write(tmp_path / "run" / "events.jsonl", [header, updates[0], {**updates[1], "parameters": "0"}, updates[2]])
    status, text = run("replay", folder)
    assert status == 1
    assert text.startswith("DIFFERENT at update 2: the learner made other weights of the same batch; before that, 1 ")
    assert run("train", "--env", "CartPole-v1", *small, "--run-dir", plain)[0] == 0
    assert run("replay", plain) == (2, f"error: {plain} was not recorded: train with --record\n")


# Refused.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: its run ended before the first update"),
        ("an essay\n", "is no event log: give a file that Runtime(record=...) wrote"),
        ('{"version": 1}\n', "is no event log: give a file that Runtime(record=...) wrote"),
        ("[]\n", "is no event log: give a file that Runtime(record=...) wrote"),
        ('{"ebrl_events": 2, "ebrl": "9.9"}\n', "has schema 2 of EBRL 9.9, and this EBRL reads schema 1"),
        ("\x00\xff", "is no event log"),
    ],
)
def test_a_foreign_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        replay(path, LENGTHS, make())
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_damaged_log_is_refused(recorded: Path, tmp_path: Path) -> None:
    header, *rest = lines(recorded)
    missing = write(tmp_path / "missing", [header, rest[0], *rest[2:]])
    with pytest.raises(ConfigError, match="line 3 is the update of version 2, not 1"):
        replay(missing, LENGTHS, make())
    with pytest.raises(ConfigError, match=r"line 3 is damaged: .*parameters"):
        del rest[1]["parameters"]
        replay(write(missing, [header, *rest]), LENGTHS, make())
    text = recorded.read_text().splitlines()
    missing.write_text("\n".join([*text[:2], text[2][:100], *text[3:]]))
    with pytest.raises(ConfigError, match="line 3 is damaged"):
        replay(missing, LENGTHS, make())
    with pytest.raises(ConfigError, match=r"the event log cannot be read: .*No such file"):
        replay(tmp_path / "nothing", LENGTHS, make())


def test_another_environment_or_learner_is_refused(recorded: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"recorded with environments \['scripted'\], not with \['other'\]: give the same"
    ):
        replay(recorded, replace(LENGTHS, id="other"), make())
    with pytest.raises(ConfigError, match="recorded with batches of 24, not with 12: give the same"):
        replay(recorded, LENGTHS, make(batch_size=12))
    with pytest.raises(ConfigError, match="a recorded run has no groups, which GRPO learns from"):
        replay(recorded, LENGTHS, GRPO(make().policy, GRPOConfig(batch_size=24, minibatch_size=12)))
    with pytest.raises(ConfigError, match="the policy does not begin with the weights of the run"):
        replay(recorded, LENGTHS, make(seed=1))
    learner = make()
    replay(recorded, LENGTHS, learner)
    with pytest.raises(ConfigError, match="the policy does not begin with the weights of the run"):
        replay(recorded, LENGTHS, learner)


def test_a_log_is_a_new_file_and_holds_one_trainer(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists: remove it, or record to another file"):
        run_virtual(record(recorded, VirtualMachine({})))
    with pytest.raises(ConfigError, match="the event log cannot be written: No such file"):
        run_virtual(record(tmp_path / "no" / "log", VirtualMachine({})))

    async def two() -> None:
        async with Runtime(VirtualMachine({}), record=tmp_path / "two") as rt:
            for _ in range(2):
                learner = make()
                envs = rt.start(EnvGroup(LENGTHS, actor=rt.start(Generator(learner.policy)), count=2))
                rt.start(Trainer(envs, learner, updates=1))

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(two())
    assert [str(error) for error in leaves(caught.value)] == [
        f"{tmp_path / 'two'} records a trainer already: give every trainer a runtime of its own"
    ]


def test_an_update_that_fails_is_not_in_the_log(tmp_path: Path) -> None:
    class Failing(Watched):
        def update(self, batch: TrainBatch) -> Mapping[str, float]:
            if self.num_updates == 2:
                raise PolicyError("no more")
            return super().update(batch)

    async def fail() -> None:
        learner = Failing(make().policy, make().config)
        async with Runtime(heavy_tails(0), record=tmp_path / "log") as rt:
            gen = rt.start(Generator(learner.policy))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=4, failures=PATIENT))
            async for _ in rt.start(Trainer(envs, learner, updates=5)):
                pass

    with pytest.raises(ExceptionGroup):
        run_virtual(fail())
    report = replay(tmp_path / "log", LENGTHS, make())
    assert (report.updates, report.mismatch) == (2, None)


def test_dictionaries_of_observations_are_checked_entry_by_entry() -> None:
    obs = {"b": np.zeros(2, np.float32), "a": np.ones(3, np.float32)}
    (one,) = checksums(make_segment(1, last_obs=obs, decisions=[make_decision(obs=obs)]))
    (same,) = checksums(make_segment(1, last_obs=obs, decisions=[make_decision(obs=dict(reversed(obs.items())))]))
    changed = {**obs, "a": np.array([1, 1, 1 + 1e-7], np.float32)}
    (saw,) = checksums(make_segment(1, last_obs=obs, decisions=[make_decision(obs=changed)]))
    (got,) = checksums(make_segment(1, last_obs=changed, decisions=[make_decision(obs=obs)]))
    assert one == same
    assert [a == b for a, b in zip(one, saw, strict=True)] == [False, True, True]
    assert [a == b for a, b in zip(one, got, strict=True)] == [True, True, False]
