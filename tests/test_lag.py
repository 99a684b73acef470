"""What a learner says about the age of its data, and when it warns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ebrl.core.records import Array, Decision, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.generator import Generator
from ebrl.gen.policies import GaussianPolicy
from ebrl.sim.context import EnvContext
from ebrl.sim.group import EnvGroup
from ebrl.train.lag import LagWatch
from ebrl.train.options import RatioLevel
from tests.helpers import make_decision, recording, scripted_spec, take, virtually
from tests.learning import SPEC, made_old, make_ppo, outputs, rollout_of

torch.set_num_threads(1)


def measure(watch: LagWatch, log_weights: list[float], lags: list[int]) -> dict[str, float]:
    return watch.measure(torch.tensor(log_weights), torch.tensor(lags))


def test_what_is_measured() -> None:
    found = measure(LagWatch(), [math.log(3), 0.0, -2e-4], [1, 0, 0])
    ess = (3 + 1 + math.exp(-2e-4)) ** 2 / (3 * (9 + 1 + math.exp(-4e-4)))
    assert found == {
        "behaviour_weight_ess": pytest.approx(ess),
        "log_weight_sq_mean": pytest.approx((math.log(3) ** 2 + 4e-8) / 3),
        "max_abs_log_weight_at_lag_0": pytest.approx(2e-4),
    }
    assert math.isnan(measure(LagWatch(), [0.1, 0.0], [1, 2])["max_abs_log_weight_at_lag_0"])


def test_healthy_data_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    watch = LagWatch()
    for log_weight in (0.0, 2e-5, -9e-5):
        measure(watch, [log_weight, 0.3, -0.3], [0, 1, 1])
    assert not caplog.messages


@pytest.mark.parametrize(
    ("log_weights", "lags", "message"),
    [
        (
            [0.0, 0.0, 0.0, 3.0],
            [1, 1, 1, 1],
            "the effective sample size of a batch is 0.328 (healthy: over 0.5); the data ",
        ),
        ([0.4, -0.4], [1, 1], "the mean of (log w)**2 is 0.16 (healthy: under 0.1); the data are far from the weights"),
        ([-2e-4, 0.0], [0, 1], "max |log w| at lag 0 is 0.0002 (healthy: under 0.0001); acting and scoring disagree"),
    ],
)
def test_each_trouble_is_told_once(
    log_weights: list[float], lags: list[int], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = LagWatch()
    for _ in range(3):
        measure(watch, log_weights, lags)
    told = [text for text in caplog.messages if text.startswith(message)]
    assert len(told) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert len(caplog.messages) == len(set(caplog.messages))
    measure(LagWatch(), log_weights, lags)
    assert len([text for text in caplog.messages if text.startswith(message)]) == 2


def test_a_learner_measures_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    ppo = make_ppo()
    metrics = ppo.update(rollout_of(ppo.policy))
    assert metrics["behaviour_weight_ess"] == pytest.approx(1)
    assert metrics["max_abs_log_weight_at_lag_0"] < 1e-4
    assert not caplog.messages
    batch = rollout_of(ppo.policy, seed=1)
    for number, out in enumerate(outputs(batch)):
        out.log_prob = out.log_prob + np.float32(number % 2)  # two numbers of an action: log w is 0 or -2
    batch.version = 3
    metrics = ppo.update(batch)
    assert metrics["log_weight_sq_mean"] == pytest.approx(2, rel=1e-3)
    assert metrics["behaviour_weight_ess"] == pytest.approx((1 + math.exp(-2)) ** 2 / (2 + 2 * math.exp(-4)), rel=1e-3)
    assert math.isnan(metrics["max_abs_log_weight_at_lag_0"])
    assert [text.partition(";")[0] for text in caplog.messages] == ["the mean of (log w)**2 is 2 (healthy: under 0.1)"]


@pytest.mark.parametrize(
    ("level", "ess", "num_warnings"),
    [("token", math.exp(-(0.15**2)), 0), ("action", math.exp(-2 * 0.15**2), 0), ("decision", 0.35, 2)],
)
def test_data_are_measured_as_the_loss_weighs_them(
    level: RatioLevel, ess: float, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A decision of 56 numbers is far from its old probability though each of them is near."""
    policy = GaussianPolicy.for_spec(SPEC, hidden=(16,), horizon=28)
    ppo = make_ppo(policy, ratio_level=level)
    batch = made_old(rollout_of(policy, executed=lambda env, t: 28), scale=0.15)
    batch.version = 1
    metrics = ppo.update(batch)
    assert metrics["behaviour_weight_ess"] == pytest.approx(ess, abs=0.005 if level != "decision" else 0.2)
    assert len(caplog.messages) == num_warnings


@pytest.mark.parametrize(("level", "square"), [("token", 0.09), ("action", 0.36), ("decision", 0.36)])
def test_what_was_not_executed_is_not_measured(level: RatioLevel, square: float) -> None:
    policy = GaussianPolicy.for_spec(SPEC, hidden=(16,), horizon=3)
    batch = rollout_of(policy)  # one action of three
    for out in outputs(batch):
        out.log_prob = out.log_prob + np.float32(0.3)
    assert make_ppo(policy, ratio_level=level).update(batch)["log_weight_sq_mean"] == pytest.approx(square, rel=1e-3)


@pytest.mark.parametrize(("num_steps", "repeat", "num"), [(4, 1, 4), (1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2)])
def test_interrupted_actions_count(num_steps: int, repeat: int, num: int) -> None:
    decision = make_decision(rewards=[0.0] * num_steps)
    decision.action_repeat = repeat
    assert decision.num_actions == num


@virtually
async def test_decisions_say_how_many_of_their_actions_were_executed() -> None:
    """Episodes of five simulator steps, chunks of four actions, each applied twice; a program may also stop early."""

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            out = await env.act(obs)
            obs = (await env.step(out.action[:1])).obs
            if env.episode == 1 and not env.done:
                obs = (await env.step(out.action[1:])).obs

    async with recording(program, spec=replace(scripted_spec(length=5), action_repeat=2), horizon=4) as envs:
        first, second = await take(envs, 2)

    def executed(decisions: list[Decision]) -> list[tuple[int, int]]:
        return [(decision.num_steps, decision.num_actions) for decision in decisions]

    assert executed(first.decisions) == [(2, 1), (2, 1), (1, 1)]
    assert executed(second.decisions) == [(5, 3)]


Parts = Callable[[Array], list[Any]]


@pytest.mark.parametrize(
    ("parts", "executed"),
    [
        (lambda a: [a], None),
        (lambda a: [a[:2]], None),
        (lambda a: [a[0], a[1]], None),
        (lambda a: [a[:1], a[1:]], None),
        (lambda a: [a[2:]], (2, 3)),  # the first two came too late
        (lambda a: [a[1:3]], (1, 2)),
        (lambda a: [a[3]], (3,)),
        (lambda a: [a[:1], a[3:]], (0, 3)),
        (lambda a: [a[3], a[1]], (1, 3)),
        (lambda a: [a[::2]], (0, 2)),
        (lambda a: [a[1:][::-1]], (1, 2, 3)),
        (lambda a: [a[0], a[0]], (0,)),
        (lambda a: [a, a], None),
        (lambda a: [a[2:].copy()], (2, 3)),
        (lambda a: [a[2:].tolist()], (2, 3)),
        (lambda a: [a[2].astype(np.float64)], (2,)),
        # In another form: the following ones, since nothing says which.
        (lambda a: [a * 0.5], None),
        (lambda a: [a[1:2], a[2:] * 0.5], (1, 2, 3)),
        (lambda a: [a[2:] * 0.5], None),
        (lambda a: [a[3:], a * 0.5], (3,)),
    ],
)
def test_what_was_executed_of_a_chunk_is_known_wherever_it_lies(parts: Parts, executed: tuple[int, ...] | None) -> None:
    """Chunks of four actions."""

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        out = await env.act(obs)
        for part in parts(out.action):
            await env.step(part)

    async def main() -> None:
        policy = GaussianPolicy.for_spec(scripted_spec(), horizon=4)
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(scripted_spec(length=99), actor=gen, count=1, program=program))
            envs.open_training(100, max_lag=1)
            (segment,) = await take(envs, 1)
        (decision,) = segment.decisions
        assert decision.executed == executed
        rollout = make_ppo(policy, batch_size=1, minibatch_size=1, normalize_advantage=False).collate(
            TrainBatch([segment], 0)
        )
        expected = range(min(decision.num_actions, 4)) if executed is None else executed
        assert rollout.executed.tolist() == [[place in expected for place in range(4)]]

    run_virtual(main())


@virtually
async def test_the_end_of_an_episode_ends_what_is_executed() -> None:
    """Three steps are left where five actions of a chunk of six are passed on, each for two steps."""

    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        out = await env.act(obs)
        await env.step(out.action[1:])

    spec = replace(scripted_spec(length=3, num_actions=2), action_repeat=2)
    async with recording(program, spec=spec, horizon=6) as envs:
        (segment,) = await take(envs, 1)
    assert (segment.decisions[0].num_steps, segment.decisions[0].executed) == (3, (1, 2))
