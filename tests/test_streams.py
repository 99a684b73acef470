"""Tier A: the seed of every reset and the noise of every decision depend on whose they are, and on nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ebrl.core.errors import PolicyError
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import Machine, PolicyOut
from ebrl.core.records import ActionOut, Array, Decision, EnvSpec, Observation
from ebrl.core.rng import NoiseStream, episode_seed, name_key
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.batcher import Batcher
from ebrl.gen.cpu import infer
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup, EnvProgram
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner, scripted_spec, take, virtually

SEED = 5
LENGTHS = scripted_spec(length=lambda rng: 2 + int(rng.integers(6)))


class NoisePolicy(ScriptedPolicy):
    """Keeps the noise that it was given. Acts by its weight too, so that who acts late does something else."""

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise + self.weight.detach(), deterministic)
        return PolicyOut(out.action, out.log_prob.clone(), out.value.clone(), {"noise": noise})


@dataclass
class Found:
    """What a run drew: seeds by environment and episode, noise by environment and decision."""

    seeds: dict[tuple[int, int], int] = field(default_factory=dict)
    noise: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def see(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            key = decision.env, decision.index
            assert key not in self.noise, f"decision {key} came twice"
            self.noise[key] = decision.out.aux["noise"].tobytes()


async def drawn(
    machine: Machine,
    *,
    spec: EnvSpec = LENGTHS,
    count: int = 3,
    lanes: int | None = None,
    gen_lanes: int | None = None,
    batcher: Batcher | None = None,
    batch_size: int = 24,
    updates: int = 6,
    max_lag: int = 1,
    host: Any = "thread",
    tune: bool = True,
) -> Found:
    found, learner = Found(), RecordingLearner(NoisePolicy(spec), batch_size)
    async with Runtime(machine, seed=SEED, tune=tune) as rt:
        gen = rt.start(Generator(learner.policy, lanes=gen_lanes, batcher=batcher))
        envs = rt.start(EnvGroup(spec, actor=gen, count=count, lanes=lanes, host=host))
        async for report in rt.start(Trainer(envs, learner, updates=updates, max_lag=max_lag)):
            found.seeds |= {(episode.env, episode.episode): episode.seed for episode in report.episodes}
    found.see(learner.decisions)
    return found


def assert_keyed(found: Found, size: int = 2) -> None:
    """Compare with what each key gives by itself: so any two runs agree on what they have in common."""
    for (env, episode), seed in found.seeds.items():
        assert seed == episode_seed(SEED, env, episode)
    for (env, index), row in found.noise.items():
        assert row == NoiseStream(SEED, name_key("envs"), env, 0).row(index, size).tobytes()
    assert len(set(found.noise.values())) == len(found.noise)


@st.composite
def batchers(draw: st.DrawFn) -> Batcher:
    threshold = draw(st.integers(1, 6))
    return Batcher(threshold, draw(st.integers(threshold, 40)), draw(st.sampled_from([0.0, 0.5, 100.0])))


SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "count": st.integers(1, 12),
    "lanes": st.none() | st.integers(1, 3),
    "gen_lanes": st.none() | st.integers(1, 3),
    "batcher": st.none() | batchers(),
    "batch_size": st.integers(8, 40),
    "max_lag": st.integers(0, 3),
    "tune": st.booleans(),
}


@pytest.mark.slow
@settings(max_examples=25)
@given(options=st.fixed_dictionaries(SETTINGS), latency_seed=st.integers(0, 10**6), num_cores=st.integers(1, 8))
@example(options={"count": 12, "max_lag": 3, "gen_lanes": 3}, latency_seed=0, num_cores=2)
def test_seeds_and_noise_are_the_same_whoever_else_is_there_and_whatever_takes_how_long(
    options: dict[str, Any], latency_seed: int, num_cores: int
) -> None:
    laws = {
        "sim": lambda n, rng: float(rng.pareto(1.2)),
        "gen": lambda n, rng: 0.05 * n * float(rng.exponential()),
        "train": lambda n, rng: 5 * float(rng.exponential()),
    }
    machine = VirtualMachine(laws, num_cores=num_cores, servers={"gen": 2}, seed=latency_seed)
    found = run_virtual(drawn(machine, **options))
    assert len(found.noise) == 6 * options.get("batch_size", 24)
    assert_keyed(found)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["thread", "process"])
def test_in_threads_and_processes_they_are_the_same_too(host: str) -> None:
    spec = scripted_spec(length=4)
    found = asyncio.run(drawn(LocalMachine(), spec=spec, host=host, count=4, lanes=2))
    assert len(found.seeds) > 12
    assert_keyed(found)


# What ends without an answer leaves the noise of all others alone.


def impatient(step: bool, patience_s: tuple[float, ...]) -> EnvProgram:
    """Return a program that gives up now and then while it waits for an answer, and goes on."""

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            try:
                async with asyncio.timeout(float(env.rng.choice(patience_s))):
                    if step:
                        obs = (await env.act_step(obs)).obs
                        continue
                    out = await env.act(obs)
            except TimeoutError:
                continue
            obs = (await env.step(out.action)).obs

    return program


@pytest.mark.parametrize("step", [False, True])
def test_a_request_that_is_cancelled_takes_its_noise_with_it(step: bool) -> None:
    """A batch takes 10 ms: requests give up before it, in it, and between two of it."""

    async def main() -> None:
        machine = VirtualMachine({"gen": lambda n, rng: 0.010, "sim": lambda n, rng: 0.001}, servers={"gen": 2})
        async with Runtime(machine, seed=SEED) as rt:
            gen = rt.start(Generator(NoisePolicy(LENGTHS), lanes=2))
            program = impatient(step, (0.003, 0.009, 0.015, 0.090, 0.090, 0.090))
            envs = rt.start(EnvGroup(LENGTHS, actor=gen, count=7, program=program))
            envs.open_training(10_000, max_lag=0)
            segments = await take(envs, 60)
        decisions = [decision for segment in segments for decision in segment.decisions]
        num_cancelled = envs.admission.ledger().dropped["lost" if step else "cancelled"]
        assert num_cancelled > 30
        assert gen.weights.version == 0
        found = Found()
        found.see(decisions)
        assert_keyed(found)
        given_up = sum(1 + max(d.index for d in decisions if d.env == env) for env in range(7)) - len(decisions)
        assert 30 < given_up <= num_cancelled, "no number is given twice"

    run_virtual(main())


@virtually
async def test_a_credit_that_was_never_given_takes_no_number() -> None:
    numbers: list[int] = []

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            try:
                async with asyncio.timeout(1.0):
                    out = await env.act(obs)
            except TimeoutError:
                numbers.append(env.recorder.num_decisions)
                continue
            obs = (await env.step(out.action)).obs

    async with Runtime(VirtualMachine({}), seed=SEED) as rt:
        gen = rt.start(Generator(NoisePolicy(LENGTHS)))
        envs = rt.start(EnvGroup(scripted_spec(length=9), actor=gen, count=1, program=program))
        envs.open_training(3, max_lag=0)
        await asyncio.sleep(5.5)
        assert numbers == [3] * 5
        assert envs.admission.ledger().dropped == {}


class Row:
    """A request that nobody waits for."""

    def __init__(self, env: int, index: int, sees: float = 0.0) -> None:
        self.env = env
        self.index = index
        self.obs: Observation = np.full(3, sees, np.float32)
        self.noise = NoiseStream(0, env)
        self.memory: Array | None = None
        self.answered_s = 0.0

    def cancelled(self) -> bool:
        return False

    def deliver(self, out: ActionOut) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def where(self) -> str:
        return f"env {self.env}"


class Fragile(NoisePolicy):
    """Fails for batches in which somebody sees a 1."""

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        if (batch["state"] == 1).any():
            raise ValueError("a 1")
        return super().act(batch, noise, deterministic)


@pytest.mark.parametrize("pad_to", [None, 4])
def test_rows_that_are_tried_again_one_by_one_have_the_noise_that_they_had(pad_to: int | None) -> None:
    asks = [Row(env, index=70 + env, sees=float(env == 2)) for env in range(6)]
    policy = Fragile(LENGTHS)
    answers = infer(policy, asks, 0, False, pad_to)
    again = infer(policy, [ask for ask in asks if ask.env != 2], 0, False, pad_to)
    assert isinstance(answers.pop(2), PolicyError)
    for ask, answer, other in zip([a for a in asks if a.env != 2], answers, again, strict=True):
        noise = NoiseStream(0, ask.env).row(ask.index, 2)
        for out in (answer, other):
            assert isinstance(out, ActionOut)
            assert (out.aux["noise"] == noise).all()


@pytest.mark.parametrize("pad_to", [None, 4])
def test_a_greedy_answer_does_not_move_anything(pad_to: int | None) -> None:
    ask = Row(0, index=3)
    policy = NoisePolicy(LENGTHS)
    (greedy,), (sampled,) = (infer(policy, [ask], 0, deterministic, pad_to) for deterministic in (True, False))
    assert isinstance(greedy, ActionOut)
    assert isinstance(sampled, ActionOut)
    assert not greedy.aux["noise"].any()
    assert (sampled.aux["noise"] == NoiseStream(0, 0).row(3, 2)).all()


@virtually
async def test_what_another_actor_is_asked_has_noise_of_its_own() -> None:
    rows: dict[str, list[bytes]] = {"own": [], "one": [], "two": []}

    async with Runtime(VirtualMachine({}), seed=SEED) as rt:
        actors = {name: rt.start(Generator(NoisePolicy(LENGTHS), name=name)) for name in rows}

        async def program(env: EnvContext) -> None:
            obs, _ = await env.reset()
            while not env.done:
                for name in ("one", "two") if env.episode % 2 else ("two",):
                    rows[name].append((await env.act(obs, actors[name])).aux["noise"].tobytes())
                out = await env.act(obs)
                rows["own"].append(out.aux["noise"].tobytes())
                obs = (await env.step(out.action)).obs

        envs = rt.start(EnvGroup(LENGTHS, actor=actors["own"], count=1, program=program))
        envs.open_training(1000, max_lag=0)
        await take(envs, 20)
    for name, number in {"own": 0, "one": name_key("one"), "two": name_key("two")}.items():
        stream = NoiseStream(SEED, name_key("envs"), 0, number)
        assert rows[name] == [stream.row(index, 2).tobytes() for index in range(len(rows[name]))]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), st.integers(1, 5))
def test_a_row_depends_on_its_number_alone(indices: list[int], size: int) -> None:
    stream = NoiseStream(SEED, 1, 2)
    for index in indices:
        assert (stream.row(index, size) == NoiseStream(SEED, 1, 2).row(index, size)).all()
    assert stream.row(indices[0], size).shape == (size,)
    assert (stream.row(indices[0], size) != NoiseStream(SEED, 1, 3).row(indices[0], size)).any()
