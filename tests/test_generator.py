"""The generator in virtual time: when it launches, with which weights, whom it answers, and whom it blames."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebrl.core.errors import Closed, ConfigError, PolicyError
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import PolicyOut
from ebrl.core.readings import Batching, Move
from ebrl.core.records import ActionOut, Array, Observation
from ebrl.core.rng import NoiseStream
from ebrl.core.runtime import Runtime
from ebrl.core.testing import settle
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.batcher import Batcher
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.gen.policies import GaussianPolicy
from ebrl.gen.policies.base import TorchPolicy
from ebrl.gen.service import BatchService
from tests.helpers import VersionedPolicy, scripted_spec, virtually

SPEC = scripted_spec()
ZERO = np.zeros(3, np.float32)


class Ask:
    """A request by hand."""

    def __init__(self, env: int, obs: Observation = ZERO, index: int = 0) -> None:
        self.env = env
        self.index = index
        self.obs = obs
        self.noise = NoiseStream(0, env)
        self.memory: Array | None = None
        self.future: asyncio.Future[ActionOut] = asyncio.get_running_loop().create_future()
        self.answered_s = -1.0

    def cancelled(self) -> bool:
        return self.future.done()

    def deliver(self, out: ActionOut) -> None:
        if not self.future.done():
            self.answered_s = asyncio.get_running_loop().time()
            self.future.set_result(out)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def where(self) -> str:
        return f"env {self.env} episode 4 decision 7"


class Bench:
    """A generator whose batches are written down: when each began, and how large it was."""

    def __init__(self, runtime: Runtime, gen: Generator) -> None:
        self.runtime = runtime
        self.gen = gen
        self.batches: list[tuple[float, int]] = []

    def ask(self, *envs: int, obs: Observation = ZERO) -> list[Ask]:
        asks = [Ask(env, obs) for env in envs]
        for ask in asks:
            self.gen.request(ask)
        return asks


@asynccontextmanager
async def bench(
    policy: TorchPolicy | None = None, *, batch_s: float = 1.0, servers: int = 1, **options: Any
) -> AsyncIterator[Bench]:
    """Start a generator whose batches take a second each."""

    def law(n: int, rng: np.random.Generator) -> float:
        found.batches.append((asyncio.get_running_loop().time(), n))
        return batch_s

    async with Runtime(VirtualMachine({"gen": law}, servers={"gen": servers})) as rt:
        found = Bench(rt, rt.start(Generator(policy or ScriptedPolicy(SPEC), **options)))
        yield found


# When.


@virtually
async def test_what_is_asked_in_one_turn_is_one_batch_and_the_rest_waits_for_the_lane() -> None:
    async with bench() as b:
        b.ask(0, 1, 2)
        await asyncio.sleep(0.25)
        b.ask(3)
        await asyncio.sleep(0.25)
        b.ask(4, 5)
        await asyncio.sleep(5)
    assert b.batches == [(0.0, 3), (1.0, 3)]


@virtually
async def test_a_batch_below_the_threshold_waits_for_more() -> None:
    async with bench(batcher=Batcher(threshold=3, max_size=8, max_wait_s=100.0)) as b:
        for env in range(3):
            b.ask(env)
            await asyncio.sleep(2)
    assert b.batches == [(4.0, 3)]


@virtually
async def test_a_batch_is_never_larger_than_the_maximum() -> None:
    async with bench(batcher=Batcher(threshold=2, max_size=4, max_wait_s=0.5)) as b:
        asks = b.ask(*range(9))
        await asyncio.sleep(5)
    assert [size for _, size in b.batches] == [4, 4, 1]
    assert [ask.answered_s for ask in asks] == [1.0] * 4 + [2.0] * 4 + [3.0], "first come, first served"


@virtually
async def test_the_deadline_counts_from_the_oldest_request() -> None:
    async with bench(batcher=Batcher(threshold=4, max_size=8, max_wait_s=3.0)) as b:
        await asyncio.sleep(10)
        b.ask(0)
        await asyncio.sleep(2)
        b.ask(1)  # does not put the deadline off
        await asyncio.sleep(10)
        b.ask(2)  # the last launch was long ago, which does not bring it forward
        await asyncio.sleep(10)
    assert b.batches == [(13.0, 2), (25.0, 1)]


@virtually
async def test_a_deadline_that_passed_while_the_lane_was_busy_launches_at_once() -> None:
    async with bench(batcher=Batcher(threshold=4, max_size=8, max_wait_s=0.25)) as b:
        b.ask(0)
        await asyncio.sleep(0.5)
        b.ask(1)
        await asyncio.sleep(5)
    assert b.batches == [(0.25, 1), (1.25, 1)]


@virtually
async def test_two_lanes_run_two_batches_at_once() -> None:
    async with bench(lanes=2, servers=2) as b:
        first = b.ask(0, 1)
        await asyncio.sleep(0.5)
        second = b.ask(2)
        await asyncio.sleep(0.1)
        third = b.ask(3)
        await asyncio.sleep(5)
        assert [ask.answered_s for ask in (*first, *second, *third)] == [1.0, 1.0, 1.5, 2.0]
        assert b.gen.statistics()["busy_s"] == 3.0
    assert b.batches == [(0.0, 2), (0.5, 1), (1.0, 1)]


@virtually
async def test_cancelled_requests_are_dropped_before_the_launch() -> None:
    async with bench(batcher=Batcher(threshold=2, max_size=8, max_wait_s=3.0)) as b:
        b.ask(9, 9)
        await settle()
        asks = b.ask(0, 1, 2, 3)
        await settle()
        for ask in (asks[0], asks[2]):
            ask.future.cancel()
            b.gen.withdraw()
        await asyncio.sleep(5)
        assert [ask.answered_s for ask in asks] == [-1.0, 2.0, -1.0, 2.0]
        assert b.gen.statistics()["requests"] == 4
    assert b.batches == [(0.0, 2), (1.0, 2)]


@virtually
async def test_cancelled_requests_count_for_no_threshold_and_no_deadline() -> None:
    async with bench(batcher=Batcher(threshold=2, max_size=8, max_wait_s=3.0)) as b:
        (gone,) = b.ask(0)
        await asyncio.sleep(1)
        gone.future.cancel()
        b.gen.withdraw()
        b.ask(1)
        await asyncio.sleep(10)
    assert b.batches == [(4.0, 1)]


# With which weights.


@virtually
async def test_an_answer_carries_the_version_that_made_it() -> None:
    policy = VersionedPolicy(SPEC)
    async with bench(policy, lanes=2, servers=2) as b:
        seen = []
        for version in range(5):
            before = b.ask(0)
            await asyncio.sleep(0.5)  # runs, and keeps the weights it began with
            with torch.no_grad():
                policy.weight.fill_(version + 1.0)
            publishing = asyncio.ensure_future(b.gen.publish(policy))
            late = b.ask(1)
            assert await publishing == version + 1
            after = b.ask(2)
            for ask in (*before, *late, *after):
                out = await ask.future
                assert out.log_prob[0, 0] == out.version
                seen.append(out.version - version)
    assert set(seen[::3]) == {0}
    assert set(seen[2::3]) == {1}


@virtually
async def test_an_answer_does_not_change_when_later_versions_are_published() -> None:
    policy = ScriptedPolicy(SPEC)
    async with bench(policy) as b:
        (ask,) = b.ask(0)
        out = await ask.future
        for version in (1.0, 2.0):
            with torch.no_grad():
                policy.weight.fill_(version)
            await b.gen.publish(policy)
        assert (out.version, float(out.log_prob[0, 0]), out.value) == (0, 0.0, 0.0)


@virtually
async def test_the_policy_that_was_given_is_copied() -> None:
    policy = VersionedPolicy(SPEC)
    async with bench(policy) as b:
        with torch.no_grad():
            policy.weight.fill_(9.0)
        (ask,) = b.ask(0)
        assert (await ask.future).log_prob[0, 0] == 0.0


# Whom it blames.


class Faulty(GaussianPolicy):
    """Does something wrong where an observation begins with more than 100."""

    wrong: Callable[[Tensor], Tensor]

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        bad = batch["state"][:, 0] > 100
        if bad.any():
            out.action[bad] = self.wrong(out.action[bad])
        return out


def no_number(action: Tensor) -> Tensor:
    return action * torch.nan


def value_error(action: Tensor) -> Tensor:
    raise ValueError("no way")


def attribute_error(action: Tensor) -> Tensor:
    raise AttributeError("no way")


def zero_division(action: Tensor) -> Tensor:
    raise ZeroDivisionError("no way")


def faulty(wrong: Callable[[Tensor], Tensor]) -> Faulty:
    policy = Faulty.for_spec(SPEC)
    policy.wrong = wrong
    return policy


GAUSSIAN, NO_NUMBER = GaussianPolicy.for_spec(SPEC), faulty(no_number)


async def outcomes(b: Bench, observations: Sequence[Array]) -> list[ActionOut | BaseException]:
    asks = [b.ask(env, obs=obs)[0] for env, obs in enumerate(observations)]
    found = await asyncio.gather(*(ask.future for ask in asks), return_exceptions=True)
    assert b.batches[-1][1] == len(observations), "one batch"
    return found


def assert_only_one_failed(found: Sequence[ActionOut | BaseException], env: int, *words: str) -> None:
    for index, outcome in enumerate(found):
        if index != env:
            assert isinstance(outcome, ActionOut)
            assert np.isfinite(outcome.action).all()
    error = found[env]
    assert isinstance(error, PolicyError)
    for word in (f"env {env} episode 4 decision 7", *words):
        assert word in str(error)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (no_number, "not finite"),
        (value_error, "no way"),
        (attribute_error, "no way"),
        (zero_division, "no way"),
    ],
)
def test_a_policy_that_fails_for_one_row_fails_no_other(wrong: Callable[[Tensor], Tensor], words: str) -> None:
    policy = faulty(wrong)

    async def main() -> None:
        async with bench(policy) as b:
            found = await outcomes(b, [ZERO, ZERO, ZERO + 1000, ZERO])
            assert_only_one_failed(found, 2, words)
            assert_only_one_failed(await outcomes(b, [ZERO + 1000]), 0, words)
            (again,) = await outcomes(b, [ZERO])
            assert isinstance(again, ActionOut), "and the generator goes on"

    virtually(main)()


@pytest.mark.parametrize("wrong", [np.zeros(4, np.float32), np.zeros(2, np.float32)])
@pytest.mark.parametrize("at", [0, 1])
def test_an_observation_of_the_wrong_form_fails_no_other(wrong: Array, at: int) -> None:
    async def main() -> None:
        async with bench(GAUSSIAN) as b:
            observations = [ZERO, ZERO, ZERO]
            observations[at] = wrong
            assert_only_one_failed(await outcomes(b, observations), at)

    virtually(main)()


@virtually
async def test_observations_whose_errors_cancel_out_are_found_all_the_same() -> None:
    async with bench(GAUSSIAN) as b:
        found = await outcomes(b, [ZERO, np.zeros(2, np.float32), np.zeros(4, np.float32)])
    assert [isinstance(outcome, PolicyError) for outcome in found] == [False, True, True]


@virtually
async def test_the_noise_of_the_others_does_not_depend_on_who_failed() -> None:
    actions = []
    for bad in (False, True):
        async with bench(NO_NUMBER) as b:
            found = [await outcomes(b, [ZERO, ZERO + (1000 if bad else 0), ZERO]) for _ in range(2)]
        actions.append([o.action.tobytes() for row in found for o in (row[0], row[2]) if isinstance(o, ActionOut)])
    assert actions[0] == actions[1]
    assert len(actions[0]) == 4


# The end.


@virtually
async def test_requests_that_wait_at_the_end_are_refused_and_running_ones_answered() -> None:
    async with Runtime(VirtualMachine({"gen": lambda n, rng: 1.0})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC)))
        running, waiting = Ask(0), Ask(1)
        gen.request(running)
        await settle()
        gen.request(waiting)
        await rt.stop(gen)
        with pytest.raises(Closed, match="gen has ended"):
            await waiting.future
        assert (await running.future).version == 0
        with pytest.raises(Closed, match="not running"):
            gen.request(Ask(2))


@virtually
async def test_a_generator_that_was_not_started_says_so() -> None:
    gen = Generator(ScriptedPolicy(SPEC))
    with pytest.raises(Closed, match=r"rt\.start\(generator\)"):
        gen.request(Ask(0))
    with pytest.raises(Closed, match="was not started"):
        gen.weights  # noqa: B018  # a property that raises
    assert gen.statistics() == {}


@pytest.mark.parametrize("value", [0, 1.5])
@pytest.mark.parametrize("name", ["lanes", "threads"])
def test_numbers_out_of_range(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=rf"Generator\.{name} must be a whole number of at least 1, got {value}"):
        Generator(ScriptedPolicy(SPEC), **options)


# Lanes that come and go, and another life.


def turn(gen: Generator, num_lanes: int, threshold: int = 1) -> None:
    old = gen.reading().batching
    new = Batching(threshold, 256, 100.0, num_lanes)
    gen.turn(Move(0.0, gen.name, "lanes", old, new, "", 0.0))


@virtually
async def test_lanes_that_are_added_run_batches_at_once_and_those_taken_away_end_theirs() -> None:
    async with bench(servers=8) as b:
        turn(b.gen, 3)
        asks = []
        for env in range(4):
            asks += b.ask(env)
            await settle()
        assert [len(b.batches), b.gen.statistics()["lanes"]] == [3, 3]
        turn(b.gen, 1)
        await asyncio.sleep(0.5)
        asks += b.ask(4)
        await asyncio.sleep(5)
        assert b.batches == [(0.0, 1), (0.0, 1), (0.0, 1), (1.0, 2)]
        assert all(ask.future.done() for ask in asks)
        assert b.gen.statistics()["busy_s"] == 4.0, "those that are not used any more count too"


@virtually
async def test_another_life_begins_as_described_and_within_what_its_machine_has() -> None:
    gen = Generator(ScriptedPolicy(SPEC))
    cpu = VirtualMachine({}, num_cores=4, on_cores=("sim", "gen"))
    async with Runtime(cpu) as rt:
        for _ in range(2):
            rt.start(gen)
            assert gen.reading().batching == Batching(1, 256, 0.01, 1)
            assert gen.reading().lanes == range(1, 5)
            turn(gen, 4, threshold=7)
            assert gen.reading().batching.num_lanes == 4
            await rt.stop(gen)
    async with Runtime(VirtualMachine({}, num_cores=4)) as rt:
        rt.start(gen)
        assert (gen.reading().batching.num_lanes, gen.reading().lanes) == (1, range(1, 2))


@virtually
async def test_a_deterministic_life_leaves_the_next_one_as_it_is() -> None:
    sizes: list[int] = []

    class Sized(ScriptedPolicy):
        def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
            sizes.append(len(noise))
            return super().act(batch, noise, deterministic)

    gen = Generator(Sized(SPEC))
    for deterministic in (True, False):
        async with Runtime(VirtualMachine({}), deterministic=deterministic) as rt:
            rt.start(gen)
            ask = Ask(0)
            gen.request(ask)
            await ask.future
    assert sizes == [32, 1]


@virtually
async def test_a_batch_of_an_earlier_life_frees_no_lane_of_this_one() -> None:
    async with bench(servers=8) as b:
        asks = b.ask(0)
        await asyncio.sleep(0.5)
        await b.runtime.stop(b.gen)
        b.runtime.start(b.gen)
        asks += b.ask(1)
        await asyncio.sleep(0.6)
        for env in (2, 3):  # the first batch has ended, and the second one runs
            asks += b.ask(env)
            await settle()
        await asyncio.gather(*(ask.future for ask in asks))
    assert b.batches == [(0.0, 1), (0.5, 1), (1.5, 2)]


@virtually
async def test_a_batch_that_waits_for_a_core_at_the_end_is_refused() -> None:
    async with Runtime(VirtualMachine({}, num_cores=1, on_cores=("sim", "gen"))) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC)))
        service: BatchService[int, int] = rt.start(BatchService(list))
        lease = await rt.resources.pool("cores").acquire(1, "somebody")
        ask = Ask(0)
        gen.request(ask)
        asked = asyncio.ensure_future(service(1))
        await settle()
        await rt.stop(gen)
        await rt.stop(service)
        with pytest.raises(Closed, match="gen has ended"):
            await ask.future
        with pytest.raises(Closed, match="service has ended"):
            await asked
        lease.release()


def test_threads_of_lanes_end_with_their_generator_whatever_is_used_of_them() -> None:
    async def main() -> None:
        async with Runtime(LocalMachine(4)) as rt:
            gen = Generator(ScriptedPolicy(SPEC))
            for _ in range(2):
                rt.start(gen)
                for num_lanes in (3, 1, 2):
                    turn(gen, num_lanes)
                    asks = [Ask(env) for env in range(6)]
                    for ask in asks:
                        gen.request(ask)
                        await asyncio.sleep(0)  # a batch of its own, if a lane is free
                    await asyncio.gather(*(ask.future for ask in asks))
                threads = lane_threads()
                assert set(threads) == {"ebrl-gen-0", "ebrl-gen-1", "ebrl-gen-2"}
                await rt.stop(gen)
                for thread in threads.values():
                    await asyncio.to_thread(thread.join, 10)  # it has said that it ends, and may not have left yet
                assert not any(thread.is_alive() for thread in threads.values())

    asyncio.run(main())


def lane_threads() -> dict[str, threading.Thread]:
    return {thread.name: thread for thread in threading.enumerate() if thread.name.startswith("ebrl-gen")}


# Any function as a service.


@virtually
async def test_a_service_answers_item_by_item_and_in_order() -> None:
    async with Runtime(VirtualMachine({"gen": lambda n, rng: 1.0})) as rt:
        square: BatchService[int, int] = rt.start(BatchService(lambda items: [item * item for item in items]))
        assert await asyncio.gather(*map(square, range(5))) == [0, 1, 4, 9, 16]
        assert square.statistics()["batches"] == 1
        assert asyncio.get_running_loop().time() == 1.0
    with pytest.raises(Closed, match="not running"):
        await square(1)


@pytest.mark.parametrize("result", [[1], [1, 2, 3], None, 5])
def test_a_service_that_returns_something_else_than_one_result_per_item(result: Any) -> None:
    async def main() -> None:
        async with Runtime(VirtualMachine({})) as rt:
            service: BatchService[int, int] = rt.start(BatchService(lambda items: result))
            found = await asyncio.gather(service(0), service(1), return_exceptions=True)
            assert [type(error) for error in found] == [PolicyError] * 2
            assert "service" in str(found[0])

    virtually(main)()


@virtually
async def test_an_error_of_a_service_is_one_of_its_own_for_everybody_who_asked() -> None:
    def fails(items: Sequence[int]) -> Sequence[int]:
        raise KeyError("broken")

    async with Runtime(VirtualMachine({})) as rt:
        service: BatchService[int, int] = rt.start(BatchService(fails))
        found = await asyncio.gather(service(0), service(1), return_exceptions=True)
    assert [str(error) for error in found] == ["service failed: KeyError('broken')"] * 2
    assert all(isinstance(error, PolicyError) and isinstance(error.__cause__, KeyError) for error in found)
    assert found[0] is not found[1], "notes and tracebacks of one task would show in the other"


@virtually
async def test_weights_are_published_to_a_generator_that_runs() -> None:
    policy = ScriptedPolicy(SPEC)
    gen = Generator(policy)
    with pytest.raises(Closed, match=r"gen was not started: call rt\.start\(generator\) first"):
        await gen.publish(policy)
    async with Runtime(VirtualMachine({})) as rt:
        assert await rt.start(gen).publish(policy) == 1
    with pytest.raises(Closed, match="gen has ended, and takes no weights any more"):
        await gen.publish(policy)
