"""The runtime: services by name, the order of the end, errors, settings of the interpreter, lost lanes."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest

from ebrl.core.errors import Closed, ConfigError, PoolError
from ebrl.core.leases import Lease
from ebrl.core.machine import LocalMachine
from ebrl.core.protocols import Lane, Machine
from ebrl.core.runtime import LEAST_S, SWITCH_INTERVAL_S, YOUNG_THRESHOLD, Runtime
from ebrl.core.testing import settle
from ebrl.core.virtual_gpu import GpuModel
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.group import EnvGroup
from tests.helpers import leaves, scripted_spec, virtually


class Recording:
    """A service that writes down what happens to it."""

    def __init__(
        self,
        name: str,
        log: list[str],
        *,
        error: Exception | None = None,
        error_at_end: Exception | None = None,
        error_in_aclose: Exception | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.error = error
        self.error_at_end = error_at_end
        self.error_in_aclose = error_in_aclose
        self.deadline_s = -1.0
        self.lane: Lane | None = None

    def open(self, runtime: Runtime) -> None:
        self.lane = runtime.machine.lane("sim", f"{self.name}-lane")
        self.log.append(f"open {self.name}")

    async def serve(self) -> None:
        self.log.append(f"serve {self.name}")
        try:
            if self.error is not None:
                await asyncio.sleep(1)
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.log.append(f"end {self.name}")
            if self.error_at_end is not None:
                raise self.error_at_end

    def statistics(self) -> Mapping[str, float]:
        return {"entries": float(len(self.log))}

    async def aclose(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.log.append(f"close {self.name}")
        if self.error_in_aclose is not None:
            raise self.error_in_aclose


def make_runtime(**kwargs: float) -> Runtime:
    return Runtime(VirtualMachine({}), **kwargs)  # type: ignore[arg-type]  # floats stand for whatever is tested


def closed(service: Recording) -> bool:
    """Whether the machine has closed the lane of a service."""
    assert service.lane is not None
    try:
        service.lane.run(int).cancel()
    except Closed:
        return True
    return False


@virtually
async def test_services_end_in_reverse_order() -> None:
    log: list[str] = []
    async with make_runtime() as runtime:
        for name in ("gen", "envs", "trainer"):
            runtime.start(Recording(name, log))
        await settle()
        del log[:]
    assert log == [f"{what} {name}" for name in ("trainer", "envs", "gen") for what in ("end", "close")]


@virtually
async def test_names_are_unique_and_statistics_carry_them() -> None:
    log: list[str] = []
    async with make_runtime() as runtime:
        services = [runtime.start(Recording(name, log)) for name in ("envs", "envs", "envs", "tuner")]
        await settle()
        assert set(runtime.statistics()) == {"envs", "envs-2", "envs-3", "tuner-2", "tuner"}
        await runtime.stop(services[1])
        assert log[-2:] == ["end envs-2", "close envs-2"]
        assert set(runtime.statistics()) == {"envs", "envs-3", "tuner-2", "tuner"}
    assert sorted(line for line in log if "close env" in line) == ["close envs", "close envs-2", "close envs-3"]


@virtually
async def test_an_error_in_a_service_ends_the_run_and_leaves_as_a_group() -> None:
    log: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with make_runtime() as runtime:
            runtime.start(Recording("good", log))
            runtime.start(Recording("bad", log, error=ValueError("broken")))
            await asyncio.Event().wait()
    assert caught.group_contains(ValueError, match="broken")
    assert sorted(log[-4:-2]) == ["end bad", "end good"], "the error ends all at once, they are closed in order"
    assert log[-2:] == ["close bad", "close good"]


@virtually
async def test_an_error_of_the_body_still_closes_everything() -> None:
    log: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with make_runtime() as runtime:
            runtime.start(Recording("envs", log))
            await settle()
            raise KeyError("body")
    assert caught.group_contains(KeyError)
    assert log[-2:] == ["end envs", "close envs"]


@virtually
async def test_an_error_at_the_end_of_a_service_does_not_stop_the_others_from_closing() -> None:
    log: list[str] = []
    services = [Recording("first", log), Recording("second", log, error_at_end=ValueError("late"))]
    with pytest.raises(ExceptionGroup) as caught:
        async with make_runtime() as runtime:
            for service in services:
                runtime.start(service)
            await settle()
    assert caught.group_contains(ValueError, match="late")
    assert [entry for entry in log if entry.startswith("close")] == ["close second", "close first"]
    assert all(map(closed, services))


@virtually
async def test_an_error_in_aclose_does_not_stop_the_others_from_closing() -> None:
    log: list[str] = []
    services = [Recording("first", log), Recording("second", log, error_in_aclose=ValueError("late"))]
    with pytest.raises((ExceptionGroup, ValueError)):
        async with make_runtime() as runtime:
            for service in services:
                runtime.start(service)
            await settle()
    assert [entry for entry in log if entry.startswith("close")] == ["close second", "close first"]
    assert all(map(closed, services))


@virtually
async def test_cancelling_the_owner_closes_everything() -> None:
    log: list[str] = []

    async def owner() -> None:
        async with make_runtime() as runtime:
            runtime.start(Recording("envs", log))
            await asyncio.Event().wait()

    async with make_runtime() as outer:
        task = outer.spawn(owner(), "owner")
        await settle()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert log[-2:] == ["end envs", "close envs"]


@virtually
async def test_services_share_one_deadline() -> None:
    log: list[str] = []

    class Slow(Recording):
        async def aclose(self, deadline_s: float) -> None:
            await super().aclose(deadline_s)
            await asyncio.sleep(min(1.0, deadline_s))

    services = [Slow(name, log) for name in "abc"]
    async with make_runtime(grace_s=1.5) as runtime:
        for service in services:
            runtime.start(service)
        await settle()
        began = asyncio.get_running_loop().time()
    assert [service.deadline_s for service in reversed(services)] == [1.5, 0.5, LEAST_S]
    assert asyncio.get_running_loop().time() - began == 1.5 + LEAST_S


@virtually
async def test_a_runtime_is_used_inside_its_block_only() -> None:
    log: list[str] = []
    runtime = make_runtime()
    with pytest.raises(Closed, match="envs was started outside"):
        runtime.start(Recording("envs", log))
    async with runtime:
        assert await runtime.spawn(asyncio.sleep(1, "done"), "task") == "done"
    with pytest.raises(Closed, match="outside"):
        runtime.start(Recording("envs", log))
    with pytest.raises(Closed, match="task late"):
        runtime.spawn(asyncio.sleep(0), "late")
    with pytest.raises(Closed, match="entered once"):
        async with runtime:
            pass
    assert log == []


HALF = GpuModel(2.5, {}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"grace_s": 0}, "grace_s must be a number above 0"),
        ({"grace_s": math.nan}, "grace_s must be a number above 0"),
        ({"profile": {"version": 1}}, "profile must be a file, .* got a dict"),
        ({"machine": VirtualMachine({}, gpu=HALF)}, "units of pool 'sm' must be a whole number"),
    ],
)
def test_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Runtime(**values)


@pytest.mark.parametrize("options", [{"num_cores": 1.5}, {"num_cores": 0}, {"servers": {"gen": math.nan}}])
def test_a_machine_has_whole_cores_and_servers(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^(num_cores|servers\['gen'\]) must be a whole number of at least 1, got"):
        VirtualMachine({}, **options)


@pytest.mark.hogs("gc.get_freeze_count() walks over all objects of the process")
@pytest.mark.parametrize("error", [None, ValueError("body")])
def test_the_settings_of_the_interpreter_are_restored(error: Exception | None) -> None:
    before = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()

    async def main() -> None:
        async with make_runtime() as runtime:
            assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
            assert gc.get_threshold() == (YOUNG_THRESHOLD, *before[1][1:])
            runtime.boundary()
            assert gc.get_freeze_count() > 0
            runtime.boundary()
            if error is not None:
                raise error

    if error is None:
        asyncio.run(main())
    else:
        with pytest.raises(ExceptionGroup):
            asyncio.run(main())
    assert (sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()) == before


@virtually
async def test_the_pools_of_a_runtime() -> None:
    runtime = Runtime(VirtualMachine({}, num_cores=3))
    assert runtime.resources.pool("cores").units == 3


@pytest.mark.parametrize("machine", [LocalMachine(1), VirtualMachine({})], ids=["real", "model"])
def test_pools_tell_the_time_as_their_runtime_does(machine: Machine) -> None:
    async def main() -> None:
        async with Runtime(machine) as rt:
            for name in ("cores", "memory"):
                before_s, now_s, after_s = rt.clock(), rt.resources.pool(name).clock(), rt.clock()
                assert before_s <= now_s <= after_s

    class Other(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return super().time() + 1e6  # its own zero, so that its clock cannot be taken for the monotonic one

    with asyncio.Runner(loop_factory=Other) as runner:
        runner.run(main())


class Stuck(Recording):
    """A service whose only call does not return before the test says so."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name, log)
        self.begun = threading.Event()
        self.release = threading.Event()

    async def serve(self) -> None:
        assert self.lane is not None
        await self.lane.run(self.never_returns)

    def never_returns(self) -> None:
        self.begun.set()
        self.release.wait(10)


def test_a_lane_whose_call_runs_past_the_deadline_is_named_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    stuck, good = Stuck("stuck", []), Recording("good", [])

    async def main() -> None:
        async with Runtime(LocalMachine(1), grace_s=0.05) as runtime:
            runtime.start(good)
            runtime.start(stuck)
            assert await asyncio.to_thread(stuck.begun.wait, 10)

    with caplog.at_level(logging.ERROR, "ebrl"):
        asyncio.run(main())
    stuck.release.set()
    assert "lane stuck-lane is lost" in caplog.text
    assert "in never_returns" in caplog.text
    assert "stuck-lane is lost" in caplog.text
    assert "good-lane" not in caplog.text


def test_the_default_machine_leaves_no_thread_behind() -> None:
    async def main() -> int:
        async with Runtime(seed=1) as runtime:
            service = runtime.start(Recording("envs", []))
            assert service.lane is not None
            return await service.lane.run(threading.get_ident)

    assert asyncio.run(main()) != threading.get_ident()


# What a runtime shares out.


def sharing_machine(**options: Any) -> VirtualMachine:
    gpu = GpuModel(8, {"gen": lambda units: units / 8, "train": lambda units: units / 8}, {})
    return VirtualMachine({}, gpu=gpu, **options)


@virtually
async def test_there_is_a_pool_for_each_resource() -> None:
    async with Runtime(sharing_machine(num_cores=4, memory_mib=1000)) as rt:
        units = {pool.name: pool.units for pool in rt.resources.statistics()}
        assert units == {"cores": 4, "memory": 1000, "sm": 8}
        assert [bucket.name for bucket in rt.resources.pool("cores").statistics().buckets] == ["direct", "sim"]
        assert rt.claim("gen") is None  # it runs on the GPU
    async with Runtime(VirtualMachine({})) as rt:
        with pytest.raises(PoolError, match="sm"):
            rt.resources.pool("sm")


@virtually
async def test_simulators_that_do_not_fit_are_not_built() -> None:
    spec = replace(scripted_spec(), memory_mib=300)
    with pytest.raises(ExceptionGroup) as caught:
        async with Runtime(sharing_machine(memory_mib=1000)) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            rt.start(EnvGroup(spec, actor=gen, count=4))
            await settle()
    (error,) = leaves(caught.value)
    assert str(error) == "envs: 4 simulators of 300 MiB do not fit into 1000 MiB: use a smaller count"


@virtually
async def test_a_group_waits_for_the_memory_of_another() -> None:
    spec = replace(scripted_spec(), memory_mib=300)
    async with Runtime(sharing_machine(memory_mib=1000)) as rt:
        gen = rt.start(Generator(ScriptedPolicy(spec)))
        first = rt.start(EnvGroup(spec, actor=gen, count=2, name="first"))
        second = rt.start(EnvGroup(spec, actor=gen, count=2, name="second"))
        await first.run_episodes([1])
        memory = rt.resources.pool("memory")
        assert (memory.statistics().holding, memory.statistics().waiting) == ({"first": 600}, ("second",))
        await rt.stop(first)
        await second.run_episodes([1])
        assert memory.statistics().holding == {"second": 600}
    assert memory.statistics().free == 1000


class SlowToEnd(Recording):
    """Takes a second to close."""

    async def aclose(self, deadline_s: float) -> None:
        await asyncio.sleep(1.0)
        await super().aclose(deadline_s)


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
@pytest.mark.parametrize("again", [True, False])
def test_a_stop_that_is_cancelled_goes_on_and_may_be_asked_for_again(wait_s: float, again: bool) -> None:
    @virtually
    async def main() -> None:
        log = list[str]()
        async with make_runtime() as rt:
            service = rt.start(SlowToEnd("a", log, error_in_aclose=ValueError("broken")))
            await settle()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await rt.stop(service)
            assert rt.start(Recording("a", log)).name == "a-2"
            if again:
                with pytest.raises(ValueError, match="broken"):
                    await rt.stop(service)
            raise KeyError("of the body")

    with pytest.raises(ExceptionGroup) as caught:
        main()
    told = [type(error) for error in leaves(caught.value)]
    assert told == ([KeyError] if again else [ValueError]), "what nobody was told is not lost"


class StopsItself(Recording):
    """On its way out, as a service of several parts might."""

    runtime: Runtime

    def __init__(self, where: str) -> None:
        super().__init__("a", [])
        self.where = where

    async def serve(self) -> None:
        try:
            await super().serve()
        finally:
            if self.where == "serve":
                await self.runtime.stop(self)

    async def aclose(self, deadline_s: float) -> None:
        await asyncio.sleep(0.1)
        if self.where == "aclose":
            await self.runtime.stop(self)
        await super().aclose(deadline_s)


@pytest.mark.parametrize("where", ["serve", "aclose"])
@pytest.mark.parametrize("who", ["the runtime", "a stop", "a stop that is cancelled", "two stops"])
def test_a_service_that_stops_itself_waits_for_nothing(where: str, who: str) -> None:
    @virtually
    async def main() -> None:
        service, clock = StopsItself(where), asyncio.get_running_loop().time
        async with make_runtime() as rt:
            service.runtime = rt
            rt.start(service)
            await settle()
            began_s = clock()
            if who == "two stops":
                await asyncio.gather(rt.stop(service), rt.stop(service))
            elif who != "the runtime":
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05 if who == "a stop that is cancelled" else 9):
                        await rt.stop(service)
        assert service.log[-1] == "close a"
        assert clock() - began_s == pytest.approx(0.1)

    main()


@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.04, 0.06, 1.0])
def test_a_runtime_that_ends_within_a_stop_lets_it_end(gap_s: float) -> None:
    @virtually
    async def main() -> None:
        log, clock = list[str](), asyncio.get_running_loop().time
        async with make_runtime(grace_s=1.5) as rt:
            slow, other = SlowToEnd("slow", log), Recording("other", log)
            rt.start(other)
            rt.start(slow)
            await settle()
            stopping = asyncio.ensure_future(rt.stop(slow))
            await asyncio.sleep(gap_s)
        assert [entry for entry in log if entry.startswith("close")] == ["close slow", "close other"]
        assert clock() <= 1.6 + gap_s
        await stopping

    main()


@virtually
async def test_a_service_that_has_not_ended_is_not_started_again() -> None:
    async with make_runtime() as rt:
        service = rt.start(SlowToEnd("a", []))
        with pytest.raises(ConfigError, match="a was started before, and has not ended: make another one"):
            rt.start(service)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await rt.stop(service)
        with pytest.raises(ConfigError, match="a was started before, and has not ended: make another one"):
            rt.start(service)
        service.name = "renamed"  # it is found by what it is
        await rt.stop(service)
        assert service.log[-1] == "close renamed"


@virtually
async def test_a_gpu_is_left_undivided_for_the_next_runtime() -> None:
    machine = sharing_machine()
    assert machine.gpu is not None
    for outcome in (nullcontext(), pytest.raises(ExceptionGroup)):
        with outcome as caught:
            async with Runtime(machine):
                assert machine.gpu.partition is None
                machine.divide({"gen": 2, "train": 6})  # as the tuner does
                if caught is not None:
                    raise ValueError("body")
    assert machine.gpu.partition is None


@virtually
async def test_a_division_is_lent_as_it_stands_whoever_had_units_meanwhile() -> None:
    rng = random.Random(0)
    async with Runtime(sharing_machine()) as rt:
        sm, held = rt.resources.pool("sm"), list[Lease]()
        for _ in range(50):
            for lease in held:
                lease.release()
            held = [await sm.acquire(rng.randint(1, sm.free), "user")] if sm.free else []
            for _ in range(rng.randint(1, 4)):  # some are not lent before the next one comes
                gen = rng.randrange(8)
                rt.tuning._set("partition", gen)
            while held:
                held.pop().release()
            now = sm.statistics()
            assert (now.holding, now.waiting) == ({"gen": gen, "train": 8 - gen} if gen else {}, ())
            rt.tuning._set("partition", 0)
            assert sm.free == 8
