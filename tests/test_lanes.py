"""Thread lanes: order, one wake-up for many results, errors, units of the pool, the end."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from typing import Any

import pytest

from ebrl.core.errors import Closed, ConfigError
from ebrl.core.lanes import Call, Completions, Mailbox, execute
from ebrl.core.machine import LocalMachine, available_cores
from ebrl.core.pools import Pool


def gate(lane_runs: threading.Event, release: threading.Event) -> None:
    """Block a lane until the test lets it go."""
    lane_runs.set()
    assert release.wait(10)


async def running(lane_runs: threading.Event) -> None:
    """Wait until a lane has begun `gate`."""
    assert await asyncio.to_thread(lane_runs.wait, 10)


def test_calls_run_in_order_on_one_named_thread() -> None:
    async def main() -> None:
        machine, seen = LocalMachine(2), list[tuple[int, str]]()
        lane = machine.lane("sim", "sim-0")
        assert lane.name == "sim-0"
        await asyncio.gather(
            *(lane.run(lambda i=i: seen.append((i, threading.current_thread().name))) for i in range(50))
        )
        assert seen == [(i, "ebrl-sim-0") for i in range(50)]
        assert await lane.run(divmod, 7, 2, n=3) == (3, 1)
        assert lane.busy_s > 0
        assert await machine.aclose(deadline_s=5) == []

    asyncio.run(main())


def test_many_results_ride_on_one_wake_up() -> None:
    async def main() -> None:
        machine = LocalMachine(1)
        lanes = [machine.lane("sim", f"sim-{i}") for i in range(4)]
        completions = machine._completions
        assert completions is not None
        futures = [lane.run(int, "3") for lane in lanes for _ in range(200)]
        for lane in lanes:  # the loop does not turn meanwhile: all results are there before the first wake-up
            while not lane._queue.empty():
                pass
        assert await asyncio.gather(*futures) == [3] * 800
        assert completions.num_wakeups <= 8
        await machine.aclose(deadline_s=5)

    asyncio.run(main())


def test_an_error_travels_to_the_task_that_asked_and_the_lane_lives() -> None:
    async def main() -> None:
        machine = LocalMachine(1)
        lane = machine.lane("sim", "sim-0")
        with pytest.raises(ZeroDivisionError):
            await lane.run(divmod, 1, 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await lane.run(next, iter(()))
        assert await lane.run(len, "abc") == 3
        await machine.aclose(deadline_s=5)

    asyncio.run(main())


def test_a_queued_call_that_was_cancelled_does_not_run_and_a_running_one_does() -> None:
    async def main() -> None:
        machine, begun, release, ran = LocalMachine(1), threading.Event(), threading.Event(), list[str]()
        lane = machine.lane("sim", "sim-0")
        first = lane.run(gate, begun, release)
        queued = lane.run(ran.append, "queued")
        last = lane.run(ran.append, "last")
        await running(begun)
        assert first.cancel()
        assert queued.cancel()
        release.set()
        await last
        assert ran == ["last"]
        await machine.aclose(deadline_s=5)

    asyncio.run(main())


def test_submit_completes_the_callers_future() -> None:
    async def main() -> None:
        machine = LocalMachine(1)
        lane = machine.lane("sim", "sim-0")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        lane.submit(future, len, "abcd")
        assert await future == 4
        await machine.aclose(deadline_s=5)
        with pytest.raises(Closed, match="sim-0 is closed: len was not run"):
            lane.run(len, "")

    asyncio.run(main())


def test_a_pool_limits_how_many_lanes_work_at_once() -> None:
    async def main() -> None:
        machine, pool, lock = LocalMachine(2), Pool("cores", 2), threading.Lock()
        now, most = 0, 0

        def work() -> None:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            threading.Event().wait(0.001)
            with lock:
                now -= 1

        lanes = [machine.lane("sim", f"sim-{i}", pool) for i in range(6)]
        await asyncio.gather(*(lane.run(work) for lane in lanes for _ in range(5)))
        await machine.aclose(deadline_s=5)
        assert most <= 2
        assert pool.statistics().free == 2  # the last unit may come back after the last result

    asyncio.run(main())


def test_a_busy_lane_gives_its_unit_to_one_that_waits() -> None:
    async def main() -> None:
        machine, pool, order = LocalMachine(1), Pool("cores", 1), list[str]()
        greedy, other = machine.lane("sim", "greedy", pool), machine.lane("sim", "other", pool)

        async def many(times: int) -> None:
            for _ in range(times):
                await greedy.run(order.append, "greedy")

        async with asyncio.TaskGroup() as group:
            group.create_task(many(20))
            await asyncio.sleep(0)
            group.create_task(asyncio.wait_for(other.run(order.append, "other"), 10))
        assert order.index("other") < 5
        await machine.aclose(deadline_s=5)

    asyncio.run(main())


def test_closing_forgets_what_was_not_sent_and_frees_the_pool() -> None:
    async def main() -> None:
        machine, pool = LocalMachine(1), Pool("cores", 1)
        begun, release, ran = threading.Event(), threading.Event(), list[str]()
        busy, waiting = machine.lane("sim", "busy", pool), machine.lane("sim", "waiting", pool)
        running_call = busy.run(gate, begun, release)
        await running(begun)
        queued = waiting.run(ran.append, "never")
        await asyncio.sleep(0)
        assert pool.statistics().waiting == ("waiting",)
        assert await machine.aclose([waiting], deadline_s=5) == []
        assert queued.cancelled()
        assert not pool.contended
        release.set()
        await running_call
        assert await machine.aclose(deadline_s=5) == []
        assert (ran, pool.statistics().free) == ([], 1)

    asyncio.run(main())


def test_closing_waits_for_the_running_call() -> None:
    async def main() -> None:
        machine, begun, release = LocalMachine(1), threading.Event(), threading.Event()
        lane = machine.lane("sim", "sim-0")
        lane.run(gate, begun, release)
        await running(begun)
        asyncio.get_running_loop().call_soon(release.set)
        assert await machine.aclose(deadline_s=10) == []
        await asyncio.to_thread(lane.thread.join, 5)
        assert not lane.thread.is_alive()

    asyncio.run(main())


def test_a_lane_past_its_deadline_is_named_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        machine, begun, release = LocalMachine(1), threading.Event(), threading.Event()
        lane = machine.lane("sim", "stuck")
        call = lane.run(gate, begun, release)
        await running(begun)
        with caplog.at_level(logging.ERROR, "ebrl"):
            assert await machine.aclose(deadline_s=0.01) == ["stuck"]
        assert "lane stuck is lost" in caplog.text
        assert "in gate" in caplog.text
        release.set()
        await call

    asyncio.run(main())


@pytest.mark.parametrize("num_queued", [0, 2])
def test_the_units_of_a_lost_lane_go_back_and_only_once(num_queued: int) -> None:
    async def main() -> None:
        machine, pool, begun, release = LocalMachine(2), Pool("cores", 2), threading.Event(), threading.Event()
        stuck, other = machine.lane("gen", "stuck", pool, 2), machine.lane("gen", "other", pool, 2)
        calls: list[asyncio.Future[Any]] = [stuck.run(gate, begun, release)]
        calls += [stuck.run(int) for _ in range(num_queued)]
        await running(begun)
        waiting = other.run(len, "abc")
        await asyncio.sleep(0)
        assert pool.statistics().waiting == ("other",)
        assert await machine.aclose([stuck], deadline_s=0.01) == ["stuck"]
        assert await asyncio.wait_for(waiting, 10) == 3
        begun_too, release_too = threading.Event(), threading.Event()
        busy = other.run(gate, begun_too, release_too)
        await running(begun_too)
        release.set()  # the lost call returns after all, while others have its units
        await asyncio.gather(*calls)
        await asyncio.to_thread(stuck.thread.join, 10)
        assert pool.statistics().holding == {"other": 2}
        release_too.set()
        await busy
        assert await machine.aclose(deadline_s=10) == []
        assert pool.statistics().free == 2

    asyncio.run(main())


def test_a_lane_is_not_forgotten_when_its_closing_is_cancelled() -> None:
    async def main() -> None:
        machine, begun, release = LocalMachine(1), threading.Event(), threading.Event()
        call = machine.lane("sim", "stuck").run(gate, begun, release)
        await running(begun)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(machine.aclose(deadline_s=10), 0.01)
        assert await machine.aclose(deadline_s=0.01) == ["stuck"]
        release.set()
        await call

    asyncio.run(main())


def test_a_machine_serves_one_loop_after_the_other() -> None:
    machine = LocalMachine(1)

    async def main() -> str:
        await machine.aclose(deadline_s=10)  # of lanes of another loop it knows nothing
        answer = await machine.lane("sim", "sim-0").run(str, "done")
        assert await machine.aclose(deadline_s=10) == []
        return answer

    assert [asyncio.run(main()) for _ in range(2)] == ["done", "done"]


def test_a_result_after_the_loop_has_closed_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    begun, release = threading.Event(), threading.Event()

    async def main() -> threading.Thread:
        machine = LocalMachine(1)
        lane = machine.lane("sim", "late")
        lane.run(gate, begun, release)
        await running(begun)
        await machine.aclose(deadline_s=0.01)
        return lane.thread

    thread = asyncio.run(main())
    release.set()
    thread.join(5)
    assert not thread.is_alive()


def test_calls_posted_in_one_turn_leave_together() -> None:
    async def main() -> None:
        loop, sent = asyncio.get_running_loop(), list[list[Call]]()
        pool = Pool("cores", 1)
        mailbox = Mailbox(loop, pool, sent.append, "box")
        calls: list[Call] = [(loop.create_future(), int, (), 1) for _ in range(3)]
        for call in calls:
            mailbox.post(call)
        assert sent == []
        await asyncio.sleep(0)
        assert sent == [calls]
        assert pool.statistics().free == 0
        mailbox.settle(2)
        assert pool.statistics().free == 0
        mailbox.settle()
        assert pool.statistics().free == 1

    asyncio.run(main())


def test_completions_from_many_threads_arrive_once_each() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        completions = Completions(loop)
        mailbox = Mailbox(loop, None, lambda calls: None, "box")
        calls: list[Call] = [(loop.create_future(), int, ("1",), 1) for _ in range(4000)]
        mailbox.outstanding = len(calls)

        def put(part: list[Call]) -> None:
            for call in part:
                completions.put(execute(call))
            completions.put((None, mailbox, len(part)))

        threads = [threading.Thread(target=put, args=(calls[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        assert await asyncio.gather(*(future for future, *_ in calls)) == [1] * len(calls)
        assert mailbox.outstanding == 0
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))

    asyncio.run(main())


def test_machine() -> None:
    assert LocalMachine().num_cores == available_cores() >= 1
    assert LocalMachine.real
    with pytest.raises(ConfigError, match="num_cores must be a whole number of at least 1, got 0"):
        LocalMachine(0)


def test_a_function_sees_no_context_of_the_caller() -> None:
    """A lane does not carry context variables: copying them costs more than the hop, so users pass what they need."""
    variable = contextvars.ContextVar("variable", default="unset")

    async def main() -> str:
        machine = LocalMachine(1)
        variable.set("set")
        value = await machine.lane("sim", "sim-0").run(variable.get)
        await machine.aclose(deadline_s=5)
        return value

    assert asyncio.run(main()) == "unset"
