"""The same scenarios on real loops with threads: asyncio in debug mode, uvloop, and threads that switch very often."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import uvloop

from ebrl.core.errors import ConfigError
from ebrl.core.machine import LocalMachine
from ebrl.core.runtime import Runtime
from ebrl.core.testing import no_leaks
from ebrl.gen.batcher import Batcher
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.gen.service import BatchService
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import ScriptedFault
from ebrl.sim.group import EnvGroup
from ebrl.train.evaluate import evaluate
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner, Stage, assert_sound, leaves, next_segments, scripted_spec, training
from tests.test_asynchrony import assert_trained_fairly, chaos

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, Any]], Any]
SPEC = scripted_spec(length=9)


@pytest.fixture(params=["debug", "uvloop", "switching"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a coroutine on one kind of loop."""
    interval = sys.getswitchinterval()
    if request.param == "switching":
        sys.setswitchinterval(1e-6)  # `Runtime` lowers it at most

    def runs(main: Coroutine[Any, Any, T]) -> T:
        loop = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with no_leaks(), asyncio.Runner(debug=request.param == "debug", loop_factory=loop) as runner:
            return runner.run(main)

    yield runs
    sys.setswitchinterval(interval)


async def exhaust(stage: Stage) -> None:
    async for report in stage.trainer:
        assert_sound(stage.envs.admission.ledger())
        assert report.lag_max <= stage.trainer.max_lag
    assert stage.envs.admission.ledger().trained == stage.trainer.updates * stage.learner.batch_size
    assert_trained_fairly(stage.learner, stage.trainer.max_lag)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_training_accounts_for_every_decision(run: Run, max_lag: int) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"count": 8, "batch_size": 20, "updates": 15, "gen_lanes": 2, "lanes": 3}
        async with training(SPEC, LocalMachine(2), max_lag=max_lag, **options) as stage:
            await exhaust(stage)

    run(main())


def test_training_with_a_batcher_and_a_lane_each(run: Run) -> None:
    async def main() -> None:
        batcher = Batcher(threshold=5, max_size=6, max_wait_s=0.002)
        async with training(SPEC, LocalMachine(1), count=8, batch_size=24, updates=8, batcher=batcher) as stage:
            await exhaust(stage)
            found = stage.gen.statistics()
        assert found["batch_mean"] <= 6

    run(main())


async def chaotic(env: EnvContext) -> None:
    """As in virtual time, with timeouts that hit now and then."""
    obs, _ = await env.reset()
    while not env.done:
        what = str(env.rng.choice(["act_step", "step", "twice", "intervene", "call", "slice"]))
        try:
            async with asyncio.timeout(float(env.rng.exponential(0.005))):
                obs = await chaos(env, obs, what)
        except TimeoutError:
            continue


def test_nothing_is_lost_whatever_programs_do(run: Run) -> None:
    async def main() -> None:
        spec = scripted_spec(length=9, latency_s=0.0005)
        async with training(spec, LocalMachine(2), count=6, batch_size=12, updates=12, program=chaotic) as stage:
            await exhaust(stage)

    run(main())


def test_a_service_and_a_blocking_call(run: Run) -> None:
    called: Counter[int] = Counter()

    async def main() -> None:
        async with Runtime(LocalMachine(2)) as rt:
            gen = rt.start(Generator(ScriptedPolicy(SPEC)))
            score: BatchService[Any, float] = rt.start(BatchService(lambda items: [1.0] * len(items)))

            async def program(env: EnvContext) -> None:
                obs, _ = await env.reset()
                while not env.done:
                    out = await env.act(obs)
                    obs = (await env.step(out.action)).obs
                    env.reward(await score(obs))
                    called[await env.call(lambda sim: env.index)] += 1

            envs = rt.start(EnvGroup(SPEC, actor=gen, count=4, program=program))
            envs.open_training(1000, max_lag=0)
            seen: set[int] = set()
            while len(seen) < 4:
                for segment in await next_segments(envs):
                    seen.add(segment.env)
                    assert [d.num_steps for d in segment.decisions] == [1] * len(segment.decisions)
        assert all(called[index] >= 9 for index in range(4))

    run(main())


def test_an_evaluation_returns_episodes_in_the_order_of_its_seeds(run: Run) -> None:
    spec = scripted_spec(length=lambda rng: 1 + int(rng.integers(12)))

    async def main(count: int, lanes: int) -> list[tuple[int, float, int]]:
        async with Runtime(LocalMachine(2), deterministic=True) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec), deterministic=True, lanes=lanes))
            envs = rt.start(EnvGroup(spec, actor=gen, count=count))
            report = await evaluate(envs, range(20))
        return [(episode.seed, episode.total_reward, episode.num_steps) for episode in report.episodes]

    alone, together = run(main(1, 1)), run(main(7, 2))
    assert alone == together
    assert [seed for seed, _, _ in alone] == list(range(20))


def test_an_error_ends_everything(run: Run) -> None:
    async def main() -> None:
        spec = scripted_spec(length=9, faults={30: "raise"})
        policy = FailurePolicy("raise")
        async with training(spec, LocalMachine(2), count=5, batch_size=10, updates=1000, failures=policy) as stage:
            await exhaust(stage)

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    for error in leaves(caught.value):
        assert isinstance(error, ScriptedFault)
        assert len(error.__notes__) == 1


def test_leaving_early_ends_everything(run: Run) -> None:
    async def main() -> None:
        async with training(SPEC, LocalMachine(2), count=5, batch_size=10, updates=1000) as stage:
            async for report in stage.trainer:
                if report.update == 3:
                    break
        assert_sound(stage.envs.admission.ledger())

    run(main())


@pytest.mark.slow
def test_threads_make_no_difference_to_what_is_trained_in_deterministic_mode(run: Run) -> None:
    async def digest(machine: LocalMachine) -> list[tuple[int, int, int, bytes]]:
        learner = RecordingLearner(ScriptedPolicy(SPEC), 12)
        async with Runtime(machine, deterministic=True) as rt:
            gen = rt.start(Generator(learner.policy, lanes=2))
            envs = rt.start(EnvGroup(SPEC, actor=gen, count=4))
            async for _ in rt.start(Trainer(envs, learner, updates=10, max_lag=0)):
                pass
        return [(d.env, d.index, d.version, d.out.action.tobytes()) for d in learner.decisions]

    assert run(digest(LocalMachine(1))) == run(digest(LocalMachine(3)))


def test_a_deterministic_run_with_lag_is_refused_on_a_real_machine(run: Run) -> None:
    async def main() -> None:
        policy = ScriptedPolicy(SPEC)
        async with Runtime(LocalMachine(2), deterministic=True) as rt:
            envs = rt.start(EnvGroup(SPEC, actor=rt.start(Generator(policy)), count=4))
            with pytest.raises(ConfigError, match=r"a deterministic run needs Trainer\(max_lag=0\), got 1"):
                rt.start(Trainer(envs, RecordingLearner(policy, 12), updates=1))

    run(main())
