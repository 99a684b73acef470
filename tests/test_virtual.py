"""Virtual time: jumps, deadlocks with a table, threads, queueing for servers, determinism."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from ebrl.core.errors import Closed, ConfigError, Deadlock
from ebrl.core.pools import Pool
from ebrl.core.runtime import Runtime
from ebrl.core.scope import Scope
from ebrl.core.testing import Sequencer, no_leaks, settle
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_gpu import GpuModel
from ebrl.core.virtual_machine import VirtualMachine, spend
from tests.helpers import the_failure, virtually


def now() -> float:
    return asyncio.get_running_loop().time()


@virtually
async def test_sleeping_costs_no_time() -> None:
    began = time.monotonic()
    await asyncio.sleep(86_400 * 30)
    assert now() == pytest.approx(86_400 * 30)
    assert time.monotonic() - began < 1


@virtually
async def test_timeouts_count_virtual_seconds() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await asyncio.Event().wait()
    assert now() == pytest.approx(3600)


@pytest.mark.slow
def test_a_thousand_tasks_with_a_hundred_sleeps_each() -> None:
    async def sleeper(number: int, ends: list[tuple[float, int]]) -> None:
        for _ in range(100):
            await asyncio.sleep(1)
        ends.append((now(), number))

    async def main() -> list[tuple[float, int]]:
        ends: list[tuple[float, int]] = []
        async with Scope() as scope:
            await asyncio.wait([scope.start(sleeper(i, ends), f"sleeper-{i}") for i in range(1000)])
        return ends

    began = time.process_time()
    ends = run_virtual(main())
    assert time.process_time() - began < 5
    assert {seconds for seconds, _ in ends} == {100.0}
    # Timers of one moment fire in the order of a heap: not that of their start, but the same in every run.
    assert run_virtual(main()) == ends


def test_a_deadlock_is_an_error_with_a_table() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with Scope() as scope:
            await asyncio.sleep(5)
            task = scope.start(waits_for_ever(), "stuck-one")
            await asyncio.wait([task])

    with pytest.raises(Deadlock) as caught:
        run_virtual(main())
    table = str(caught.value)
    assert "stuck-one: waits_for_ever (line " in table
    assert "main (line " in table
    assert "wait (line " in table


def test_a_deadlock_unwinds_everybody() -> None:
    seen: list[str] = []

    async def stuck(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(name)

    async def main() -> None:
        async with Scope() as scope:
            tasks = [scope.start(stuck("a"), "a"), scope.start(stuck("b"), "b")]
            try:
                await asyncio.wait(tasks)
            finally:
                seen.append("main")

    with pytest.raises(Deadlock):
        run_virtual(main())
    assert sorted(seen) == ["a", "b", "main"]


def test_a_deadlock_is_raised_whatever_main_makes_of_its_cancellation() -> None:
    async def raises() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("something else") from None

    async def returns() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 5
        return 6

    for main in (raises, returns):
        with pytest.raises(Deadlock, match="nothing is scheduled"):
            run_virtual(main())


@pytest.mark.leaks("main refuses to end, so it is still there when the loop is closed")
def test_a_second_deadlock_of_the_same_run_ends_it() -> None:
    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="nothing is scheduled") as caught:
        run_virtual(main())
    assert "wait again" in str(caught.value.__cause__)


@virtually
async def test_the_clock_stands_while_a_thread_works() -> None:
    release = threading.Event()
    async with Scope() as scope:
        scope.start(_release_after(release, 0.0), "release")
        assert await asyncio.to_thread(release.wait, 10)
    assert now() == 0.0


async def _release_after(event: threading.Event, seconds: float) -> None:
    await asyncio.sleep(seconds)
    event.set()


@virtually
async def test_threads_and_timers_together() -> None:
    async with Scope() as scope:
        sleeper = scope.start(asyncio.sleep(7), "sleeper")
        assert await asyncio.to_thread(sum, range(1000)) == 499_500
        assert not sleeper.done()
        await sleeper
    assert now() == 7


@virtually
async def test_settle_waits_until_all_others_are_blocked() -> None:
    seen: list[int] = []

    async def busy() -> None:
        for i in range(50):
            await asyncio.sleep(0)
            seen.append(i)
        await asyncio.sleep(1)
        seen.append(-1)

    async with Scope() as scope:
        scope.start(busy(), "busy")
        await settle()
        assert (len(seen), now()) == (50, 0.0)
        await asyncio.sleep(2)
        assert seen[-1] == -1


def test_settle_needs_virtual_time() -> None:
    with pytest.raises(RuntimeError, match="run_virtual"):
        asyncio.run(settle())


@virtually
async def test_sequencer() -> None:
    order, sequence = list[int](), Sequencer()

    async def at(position: int) -> None:
        async with sequence(position):
            await asyncio.sleep(3 - position)
            order.append(position)

    async with Scope() as scope:
        await asyncio.wait([scope.start(at(position), f"{position}") for position in (2, 0, 3, 1)])
    assert order == [0, 1, 2, 3]


def test_leak_check_names_the_thread() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    with pytest.raises(AssertionError, match="forgotten"), no_leaks(patience_s=0.01):
        thread.start()
    release.set()
    thread.join()


@virtually
async def test_lanes_queue_for_their_servers_exactly() -> None:
    machine = VirtualMachine({"sim": lambda n, rng: 1.0, "gen": lambda n, rng: 0.5 + 0.25 * n}, num_cores=2)
    lanes = [machine.lane("sim", f"sim-{i}") for i in range(5)]
    gen = machine.lane("gen", "gen-0")
    ends: dict[str, float] = {}

    async def note(name: str, future: asyncio.Future[Any]) -> None:
        await future
        ends[name] = now()

    await asyncio.gather(*(note(lane.name, lane.run(int)) for lane in lanes), note("gen", gen.run(int, n=6)))
    assert ends == {"sim-0": 1, "sim-1": 1, "sim-2": 2, "sim-3": 2, "sim-4": 3, "gen": 2}
    assert [lane.busy_s for lane in lanes] == [1.0] * 5


@virtually
async def test_one_lane_runs_one_call_at_a_time_in_order() -> None:
    machine = VirtualMachine({"sim": lambda n, rng: float(n)}, num_cores=4)
    lane, order = machine.lane("sim", "sim-0"), list[tuple[str, float]]()
    await asyncio.gather(
        *(lane.run(lambda x=x: order.append((x, now())), n=n) for x, n in (("a", 3), ("b", 1), ("c", 0)))
    )
    assert order == [("a", 0.0), ("b", 3.0), ("c", 4.0)]  # a call does its work when it begins
    assert now() == 4.0  # and its result is there when its time has passed


@virtually
async def test_a_call_says_itself_how_long_it_takes() -> None:
    machine = VirtualMachine({"sim": lambda n, rng: 1.0}, num_cores=4)
    lane = machine.lane("sim", "sim-0")

    def work(fail: bool) -> str:
        spend(2.0)
        spend(0.5)
        if fail:
            raise ValueError("after it was spent")
        return "done"

    assert await lane.run(work, False) == "done"
    assert now() == 3.5
    with pytest.raises(ValueError, match="after it was spent"):
        await lane.run(work, True)
    assert (now(), lane.busy_s) == (7.0, 7.0)


def test_spend_sleeps_outside_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    spend(0.25)
    assert slept == [0.25]


def saturating(units: float) -> float:
    return min(1.0, units / 4)  # of 8: half of them are enough


GPU = GpuModel(8, {"gen": saturating, "train": lambda units: units / 8}, {"gen": 0.5, "train": 0.25})


async def gpu_ends(gpu: GpuModel, partition: Mapping[str, int] | None, *jobs: tuple[str, float, float]) -> list[float]:
    """Start ``(kind, at, seconds)`` jobs on lanes of their own, and return when each ended."""
    machine = VirtualMachine({}, gpu=gpu, servers={"gen": 9, "train": 9})
    assert machine.gpu is not None
    machine.gpu.partition = partition
    began = now()

    async def one(number: int, kind: str, at: float, seconds: float) -> float:
        await asyncio.sleep(at)
        await machine.lane(kind, f"{kind}-{number}").run(spend, seconds)
        return round(now() - began, 9)

    return await asyncio.gather(*(one(i, *job) for i, job in enumerate(jobs)))


@virtually
async def test_work_on_a_gpu_is_time_sliced_without_a_partition() -> None:
    assert await gpu_ends(GPU, None, ("gen", 0, 1)) == [1.0]
    assert await gpu_ends(GPU, None, ("gen", 0, 1), ("train", 0, 2)) == [2.0, 3.0]
    assert await gpu_ends(GPU, None, ("gen", 0, 2), ("gen", 1, 1)) == [3.0, 3.0]
    assert await gpu_ends(GPU, None, ("sim", 0, 1), ("gen", 0, 1)) == [1.0, 1.0]  # not a kind that uses the GPU


@virtually
async def test_a_partition_saturates_and_lends_what_nobody_uses() -> None:
    # gen has half of the units and full speed; train half speed until gen has ended, and then everything.
    assert await gpu_ends(GPU, {"gen": 4, "train": 4}, ("gen", 0, 1), ("train", 0, 2)) == [1.0, 2.5]
    assert await gpu_ends(GPU, {"gen": 2, "train": 6}, ("gen", 0, 1), ("train", 0, 1.5)) == [2.0, 2.0]


@virtually
async def test_a_partition_may_keep_what_nobody_uses() -> None:
    machine = VirtualMachine({}, gpu=GPU)
    assert machine.gpu is not None
    machine.gpu.lends = False
    machine.divide({"gen": 2, "train": 6})
    began = now()
    await machine.lane("gen", "gen-0").run(spend, 1.0)
    assert now() - began == 2.0


@virtually
async def test_work_on_a_gpu_ends_however_late_it_is() -> None:
    await asyncio.sleep(3e6)  # a month: the clock has steps of half a nanosecond
    ends = await gpu_ends(GPU, {"gen": 2, "train": 6}, *(("gen", i / 7, 1 / 3) for i in range(5)), ("train", 0, 1 / 3))
    assert max(ends) < 6


@virtually
async def test_what_has_no_part_in_a_partition_takes_turns() -> None:
    model = GpuModel(8, {**GPU.speed, "sim": lambda units: 1.0}, {})
    assert await gpu_ends(model, {"gen": 4, "train": 4}, ("sim", 0, 1), ("gen", 0, 1)) == [2.0, 2.0]


@virtually
async def test_memory_bandwidth_is_divided() -> None:
    greedy = GpuModel(8, GPU.speed, {"gen": 1.0, "train": 1.0})
    # Both want 1 + 0.5 of it, so that both are slower by 1.5.
    ends = await gpu_ends(greedy, {"gen": 4, "train": 4}, ("gen", 0, 1), ("train", 0, 0.5))
    assert ends == [1.5, 1.5]


@virtually
async def test_a_partition_may_change_while_work_runs() -> None:
    machine = VirtualMachine({}, gpu=GPU)
    gpu = machine.gpu
    assert gpu is not None
    gpu.partition = {"gen": 4, "train": 4}
    gen, train = machine.lane("gen", "gen-0"), machine.lane("train", "train-0")
    running = asyncio.gather(gen.run(spend, 10.0), train.run(spend, 1.0))
    await asyncio.sleep(1.0)
    gpu.partition = {"gen": 2, "train": 6}
    await running
    assert round(now(), 9) == round(1.0 + 0.5 / 0.75 + 9.0 - 0.5 * 0.5 / 0.75, 9)


@virtually
async def test_the_number_of_servers_of_a_kind_can_be_set() -> None:
    machine = VirtualMachine({"gen": lambda n, rng: 1.0}, servers={"gen": 3})
    await asyncio.gather(*(machine.lane("gen", f"gen-{i}").run(int) for i in range(7)))
    assert now() == 3.0


@virtually
async def test_a_pool_beside_the_servers() -> None:
    machine, pool = VirtualMachine({"sim": lambda n, rng: 1.0}, num_cores=8), Pool("cores", 2)
    lanes = [machine.lane("sim", f"sim-{i}", pool) for i in range(6)]
    await asyncio.gather(*(lane.run(int) for lane in lanes))
    assert (now(), pool.statistics().free) == (3.0, 2)


@virtually
async def test_a_cancelled_call_takes_no_time_and_errors_travel() -> None:
    machine = VirtualMachine({"sim": lambda n, rng: 1.0})
    lane, ran = machine.lane("sim", "sim-0"), list[int]()
    first, second, third = (lane.run(ran.append, i) for i in range(3))
    await settle()
    second.cancel()
    await third
    assert (ran, now(), first.done()) == ([0, 2], 2.0, True)
    with pytest.raises(ZeroDivisionError):
        await lane.run(divmod, 1, 0)


@virtually
async def test_a_closed_lane_runs_nothing_that_has_not_begun() -> None:
    machine = VirtualMachine({"sim": lambda n, rng: 1.0})
    lane, ran = machine.lane("sim", "sim-0"), list[int]()
    running, queued = lane.run(ran.append, 0), lane.run(ran.append, 1)
    await settle()
    assert await machine.aclose(deadline_s=1) == []
    await running
    assert ran == [0]
    assert queued.cancelled()
    with pytest.raises(Closed, match="sim-0"):
        lane.run(int)


@virtually
async def test_a_call_that_waits_for_a_server_has_not_begun() -> None:
    machine, pool, ran = VirtualMachine({"gen": lambda n, rng: 1.0}), Pool("cores", 2), list[str]()
    lanes = [machine.lane("gen", name, pool) for name in "ab"]  # and one server
    first, second = (lane.run(ran.append, lane.name) for lane in lanes)
    await settle()
    await machine.aclose(deadline_s=1)
    await first
    await asyncio.sleep(5)
    assert (ran, second.cancelled()) == (["a"], True)
    assert pool.statistics().free == 2


@pytest.mark.parametrize("gpu", [None, GPU])
def test_another_loop_finds_a_machine_as_it_was_made(gpu: GpuModel | None) -> None:
    def make() -> VirtualMachine:
        laws = dict.fromkeys(("gen", "train", "sim"), lambda n, rng: 0.5 + float(rng.exponential()))
        return VirtualMachine(laws, num_cores=2, gpu=gpu)

    async def main(machine: VirtualMachine, until_s: float) -> list[float | None]:
        await machine.aclose(deadline_s=1)  # of what was begun on another loop it knows nothing
        lanes = [machine.lane(kind, f"{kind}-{i}") for kind in ("gen", "train", "sim") for i in range(3)]
        began = [lane.run(now) for lane in lanes for _ in range(2)]
        await asyncio.wait(began, timeout=until_s)
        if gpu is not None:
            machine.divide({"gen": 1, "train": 7})
        return [call.result() if call.done() else None for call in began]

    alone, machine = run_virtual(main(make(), 100)), make()
    for until_s in (1.0, 2.0, 100):
        began = run_virtual(main(machine, until_s))
        assert (None in began) == (until_s < 100), "some calls were in flight when their loop ended"
    assert began == alone


def test_latencies_depend_on_the_seed_and_the_lane_alone() -> None:
    async def main(seed: int, others: int) -> list[float]:
        machine = VirtualMachine({"sim": lambda n, rng: float(rng.exponential())}, seed=seed)
        lane, ends = machine.lane("sim", "sim-0"), list[float]()
        rest = [machine.lane("sim", f"sim-{i + 1}") for i in range(others)]
        noise = [other.run(int) for other in rest for _ in range(3)]
        for _ in range(5):
            await lane.run(lambda: ends.append(now()))
        await asyncio.gather(*noise)
        return ends

    assert run_virtual(main(0, 0)) == run_virtual(main(0, 5))
    assert run_virtual(main(0, 0)) != run_virtual(main(1, 0))


@virtually
async def test_a_lane_that_comes_after_one_was_closed_draws_for_itself() -> None:
    machine, ends = VirtualMachine({"sim": lambda n, rng: float(rng.exponential())}), list[float]()
    first = machine.lane("sim", "sim-0")
    await machine.aclose([first], deadline_s=1)
    for number in range(2):
        began = now()
        await machine.lane("sim", f"sim-{number}").run(int)
        ends.append(now() - began)
        await machine.aclose(deadline_s=1)
    assert ends[0] != ends[1]


@pytest.mark.timeout(5)
def test_a_thread_pool_that_is_shut_down_does_not_stop_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(int)
        await loop.shutdown_default_executor()
        with pytest.raises(RuntimeError, match="shutdown"):
            await asyncio.to_thread(int)
        await asyncio.sleep(1)
        return now()

    assert run_virtual(main()) == 1.0


@pytest.mark.parametrize("seconds", [-0.02, math.nan, math.inf, None, "x"])
def test_a_law_that_returns_no_seconds_ends_the_run_and_is_named(seconds: Any) -> None:
    async def main() -> None:
        async with Runtime(VirtualMachine({"sim": lambda n, rng: seconds})) as rt:
            await rt.machine.lane("sim", "one").run(int)

    error = the_failure(main())
    assert isinstance(error, ConfigError)
    assert str(error) == f"the latency law of 'sim' must return seconds, 0 or more, got {seconds!r}"


def test_a_law_is_a_function() -> None:
    with pytest.raises(ConfigError, match=r"the latency law of 'gen' must be a function of \(n, rng\), got 0.02"):
        VirtualMachine({"gen": 0.02})  # type: ignore[dict-item]
