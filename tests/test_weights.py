"""The weight store: versions, a double buffer, no torn reads, nobody stops for a publish."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from ebrl.core.errors import Closed, ConfigError
from ebrl.core.machine import LocalMachine
from ebrl.core.scope import Scope
from ebrl.core.testing import settle
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.core.weights import WeightLease, WeightStore
from tests.helpers import virtually

Numbers = NDArray[np.int64]


def copy(source: Numbers, buffer: Numbers) -> None:
    buffer[:] = source


def make_store(size: int = 2) -> WeightStore[Numbers]:
    return WeightStore(np.zeros(size, np.int64), np.zeros(size, np.int64), copy)


def filled(value: int, size: int = 2) -> Numbers:
    return np.full(size, value, np.int64)


@virtually
async def test_publish_counts_versions_and_reads_see_the_newest() -> None:
    store, lane = make_store(), VirtualMachine({}).lane("io", "publish")
    assert store.version == 0
    for version in (1, 2, 3):
        assert await store.publish(filled(10 * version), lane) == version
        with store.lease() as lease:
            assert (lease.version, lease.weights.tolist()) == (version, [10 * version] * 2)


@virtually
async def test_a_lease_keeps_its_version_while_others_read_the_next() -> None:
    store, lane = make_store(), VirtualMachine({}).lane("io", "publish")
    old = store.lease()
    await store.publish(filled(1), lane)
    with store.lease() as new:
        assert (old.version, new.version) == (0, 1)
        assert (old.weights[0], new.weights[0]) == (0, 1)
    old.release()


@virtually
async def test_a_second_publisher_is_refused() -> None:
    store, lane = make_store(), VirtualMachine({}).lane("io", "publish")
    reader = store.lease()
    await store.publish(filled(1), lane)
    async with Scope() as scope:
        first = scope.start(store.publish(filled(2), lane), "first")  # waits for the reader
        await settle()
        with pytest.raises(ConfigError, match="two publish to one generator at once"):
            await store.publish(filled(3), lane)
        reader.release()
        assert await first == 2


@virtually
async def test_publish_waits_for_readers_of_the_back_buffer_only() -> None:
    store, lane = make_store(), VirtualMachine({}).lane("io", "publish")
    readers = [store.lease(), store.lease()]
    await store.publish(filled(1), lane)  # into the buffer that nobody reads: at once
    fresh = store.lease()
    async with Scope() as scope:
        second = scope.start(store.publish(filled(2), lane), "publish")
        await settle()
        assert not second.done()
        assert store.version == 1
        readers[0].release()
        await settle()
        assert not second.done()
        readers[1].release()
        assert await second == 2
    assert fresh.weights[0] == 1, "the reader of version 1 was not disturbed"
    fresh.release()


@virtually
async def test_readers_never_wait_while_a_publish_waits() -> None:
    store, lane = make_store(), VirtualMachine({}).lane("io", "publish")
    blocker = store.lease()
    await store.publish(filled(1), lane)
    async with Scope() as scope:
        publish = scope.start(store.publish(filled(2), lane), "publish")
        await settle()
        for _ in range(3):
            with store.lease() as lease:
                assert lease.version == 1
        assert not publish.done()
        blocker.release()
        await publish


@virtually
async def test_a_cancelled_publish_changes_nothing_and_the_next_one_works() -> None:
    store, lane = make_store(), VirtualMachine({}).lane("io", "publish")
    blocker = store.lease()
    await store.publish(filled(1), lane)
    async with Scope() as scope:
        publish = scope.start(store.publish(filled(2), lane), "publish")
        await settle()
        publish.cancel()
        await settle()
        blocker.release()
        assert store.version == 1
        assert await store.publish(filled(3), lane) == 2
        with store.lease() as lease:
            assert lease.weights[0] == 3


@virtually
async def test_a_publish_that_is_cancelled_while_its_copy_waits_copies_nothing() -> None:
    store, lane = make_store(), VirtualMachine({"io": lambda n, rng: 1.0}).lane("io", "publish")
    lane.run(int)
    publish = asyncio.create_task(store.publish(filled(1), lane))
    await asyncio.sleep(0.5)
    publish.cancel()
    await settle()
    second = asyncio.create_task(store.publish(filled(2), lane))
    await settle()
    assert not second.done()
    with pytest.raises(ConfigError, match="two publish to one generator at once"):
        await store.publish(filled(3), lane)
    with pytest.raises(ConfigError, match="two publish to one generator at once"):
        store.stage(filled(3))
    assert await second == 1
    with store.lease() as lease:
        assert (lease.version, lease.weights[0]) == (1, 2)


def test_a_publish_that_is_cancelled_while_it_copies_is_never_seen_and_the_next_one_waits() -> None:
    """Its source may be written again; the copy cannot be stopped, and another into the same buffer would tear both."""
    begun, release, copied = threading.Event(), threading.Event(), list[int]()

    def slow_copy(source: Numbers, buffer: Numbers) -> None:
        begun.set()
        assert release.wait(10)
        buffer[:] = source
        copied.append(int(source[0]))

    async def main() -> None:
        machine, source = LocalMachine(1), filled(1)
        lanes = [machine.lane("io", f"publish-{i}") for i in range(2)]
        store = WeightStore(filled(0), filled(0), slow_copy)
        async with Scope() as scope:
            publish = scope.start(store.publish(source, lanes[0]), "publish")
            assert await asyncio.to_thread(begun.wait, 10)
            publish.cancel()
            await asyncio.wait([publish])
            source[:] = 99
            second = scope.start(store.publish(filled(2), lanes[1]), "second")
            for _ in range(3):
                await asyncio.sleep(0)
            assert (copied, store.version) == ([], 0)
            release.set()
            assert await second == 1
        assert copied == [99, 2]
        with store.lease() as lease:
            assert lease.weights.tolist() == [2, 2]
        await machine.aclose(deadline_s=5)

    asyncio.run(main())


@pytest.mark.parametrize("why", ["an older version is read", "a copy that nobody wants runs"])
def test_a_consumer_may_begin_at_any_time(why: str) -> None:
    @virtually
    async def main() -> None:
        store, lane = make_store(), VirtualMachine({"io": lambda n, rng: 1.0}).lane("io", "publish")
        lane.run(int)
        old = store.lease()
        publish = asyncio.create_task(store.publish(filled(1), lane))
        await asyncio.sleep(0.5)
        if why == "an older version is read":
            await publish
        else:
            publish.cancel()
            await settle()
        store.stage(filled(5))
        store.begin(7)
        new = store.lease()
        await asyncio.sleep(5.0)
        assert (old.version, old.weights.tolist()) == (0, [0, 0])
        assert (new.version, new.weights.tolist(), store.version) == (7, [5, 5], 7)
        old.release()
        new.release()
        assert await store.publish(filled(8), lane) == 8
        with store.lease() as lease:
            assert lease.weights[0] == 8

    main()


@virtually
async def test_a_copy_that_was_cancelled_before_it_began_keeps_nobody_waiting() -> None:
    store, machine = make_store(), VirtualMachine({"io": lambda n, rng: 60.0 * n}, servers={"io": 2})
    busy, idle = machine.lane("io", "busy"), machine.lane("io", "idle")
    busy.run(int)
    publish = asyncio.create_task(store.publish(filled(1), busy))
    await asyncio.sleep(1.0)
    publish.cancel()
    await settle()
    assert await store.publish(filled(2), idle) == 1
    assert asyncio.get_running_loop().time() < 2.0
    await asyncio.sleep(100.0)
    with store.lease() as lease:
        assert (lease.version, lease.weights.tolist()) == (1, [2, 2])


@virtually
async def test_who_is_cancelled_while_another_copy_ends_leaves_it_to_be_waited_for() -> None:
    store, lane = make_store(), VirtualMachine({"io": lambda n, rng: 1.0}).lane("io", "publish")
    store._copied = ending = asyncio.get_running_loop().create_future()
    publish = asyncio.create_task(store.publish(filled(1), lane))
    await settle()
    publish.cancel()
    await settle()
    second = asyncio.create_task(store.publish(filled(2), lane))
    await settle()
    assert not second.done()
    ending.set_result(None)
    assert await second == 1


@virtually
async def test_a_publish_on_a_lane_that_ends_is_closed_and_not_cancelled() -> None:
    store, machine = make_store(), VirtualMachine({"io": lambda n, rng: 1.0})
    lane = machine.lane("io", "publish")
    lane.run(int)
    publish = asyncio.create_task(store.publish(filled(1), lane))
    await settle()
    await machine.aclose([lane], deadline_s=1.0)
    with pytest.raises(Closed, match="lane publish has ended: nothing was published"):
        await publish
    assert store.version == 0


@virtually
async def test_a_failed_copy_is_raised_and_publishes_nothing() -> None:
    store, lane = make_store(), VirtualMachine({}).lane("io", "publish")
    with pytest.raises(ValueError):
        await store.publish(np.zeros(5, np.int64), lane)
    assert store.version == 0


@virtually
async def test_a_lease_is_released_once() -> None:
    store = make_store()
    first, second = store.lease(), store.lease()
    first.release()
    with pytest.raises((AssertionError, RuntimeError), match="twice"):
        first.release()
    second.release()


@pytest.mark.slow
def test_no_read_is_torn_with_three_readers_on_real_threads() -> None:
    """Readers on threads sum the leased buffer in pieces while a publisher overwrites the other one."""
    size, updates, torn = 4096, 60, list[tuple[int, int]]()
    store = make_store(size)

    def read(lease: WeightLease[Numbers]) -> None:
        for part in np.split(lease.weights, 8):
            if (part != lease.version).any():
                torn.append((lease.version, int(part[0])))

    async def main() -> int:
        machine, stop, reads = LocalMachine(2), asyncio.Event(), 0
        lanes = [machine.lane("gen", f"gen-{i}") for i in range(3)]

        async def reader(number: int) -> None:
            nonlocal reads
            while not stop.is_set():
                with store.lease() as lease:
                    await lanes[number].run(read, lease)
                reads += 1

        lane = machine.lane("io", "publish")
        async with Scope() as scope:
            readers = [scope.start(reader(i), f"reader-{i}") for i in range(3)]
            for version in range(1, updates + 1):
                assert await store.publish(filled(version, size), lane) == version
            stop.set()
            await asyncio.wait(readers)
        assert await machine.aclose(deadline_s=5) == []
        return reads

    assert asyncio.run(main()) > 10
    assert not torn


def test_a_publish_copies_while_readers_read() -> None:
    """The copy is on its lane, and a lease taken meanwhile is of the old version."""
    begun, release = threading.Event(), threading.Event()

    def slow_copy(source: Numbers, buffer: Numbers) -> None:
        begun.set()
        assert release.wait(10)
        buffer[:] = source

    async def main() -> None:
        machine = LocalMachine(1)
        store = WeightStore(filled(0), filled(0), slow_copy)
        async with Scope() as scope:
            publish = scope.start(store.publish(filled(1), machine.lane("io", "publish")), "publish")
            assert await asyncio.to_thread(begun.wait, 10)
            with store.lease() as lease:
                assert (lease.version, lease.weights[0]) == (0, 0)
            release.set()
            assert await publish == 1
        await machine.aclose(deadline_s=5)

    asyncio.run(main())
