"""Both hosts: the same trajectories, errors, cancellation, death, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
import torch
import uvloop
from gymnasium import spaces

from ebrl.core.errors import Closed, ConfigError, HostDied, InvalidData, SimulatorError
from ebrl.core.machine import LocalMachine
from ebrl.core.pools import Pool
from ebrl.core.records import ArraySpec, EnvSpec, StepResult
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.sim import hosts as hosts_module
from ebrl.sim.fake import CONSTRUCTION, ScriptedEnv, ScriptedFault
from ebrl.sim.hosts import SimHost, ThreadHost
from ebrl.sim.link import Link
from ebrl.sim.process import ProcessHost
from ebrl.sim.shm import MAX_CHUNK

Kind: TypeAlias = Literal["thread", "process"]
ZERO = np.zeros((1, 2), np.float32)
DEADLINE_S = 10.0
KINDS: tuple[Kind, ...] = ("thread", "process")
both = pytest.mark.parametrize("kind", KINDS)


def scripted(*, action_repeat: int = 1, horizon: int | None = None, **options: Any) -> EnvSpec:
    make = functools.partial(ScriptedEnv, obs_dim=3, action_dim=2, **options)
    keys = ("success", "x")
    form = ArraySpec((3,), "float32"), ArraySpec((2,), "float32")
    return EnvSpec("scripted", make, *form, horizon, action_repeat, info_keys=keys)


def run(main: Coroutine[Any, Any, Any], loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)


@asynccontextmanager
async def opened(
    kind: Kind,
    spec: EnvSpec,
    count: int = 1,
    *,
    num_cores: int = 2,
    expect: list[str] | None = None,
) -> AsyncIterator[SimHost]:
    machine = LocalMachine()
    pool = Pool("cores", num_cores)
    host: SimHost = (
        ThreadHost([spec] * count, machine, pool, 3)
        if kind == "thread"
        else ProcessHost([spec] * count, machine, pool, "host")
    )
    try:
        await host.open()
        yield host
    finally:
        lost = await host.aclose(DEADLINE_S if expect is None else 0.05)
        await machine.aclose(deadline_s=1.0)
        assert lost == (expect or [])
        assert pool.statistics().free == num_cores or expect


def ask(method: Callable[..., None], *args: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    method(future, *args)
    return future


async def play(host: SimHost, num: int, spec: EnvSpec) -> list[Any]:
    """Play chunks in every slot at once; return all that came back."""

    async def one(index: int, slot: hosts_module.Slot) -> list[Any]:
        rng = np.random.default_rng(index)
        trace: list[Any] = []
        over = True
        for number in range(num):
            if over:
                trace.append(await ask(slot.reset, 100 * index + number))
                over = False
                continue
            chunk = rng.uniform(-1, 1, (1 + number % 4, *spec.action.shape)).astype(np.float32)
            result = await ask(slot.step, chunk)
            trace.append(result)
            over = result.terminated or result.truncated
        return trace

    return list(await asyncio.gather(*(one(index, slot) for index, slot in enumerate(host.slots))))


def plain(value: Any) -> Any:
    """Turn a trace into something that `==` compares, bit for bit."""
    if isinstance(value, StepResult):
        return plain(value.obs), value.rewards, value.terminated, value.truncated, plain(value.info)
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: (type(item).__name__, plain(item)) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("count", [1, 19])
def test_both_hosts_give_the_same_trajectories(count: int, loop: Any) -> None:
    spec = scripted(length=11, action_repeat=2, horizon=17)

    async def main(kind: Kind) -> Any:
        async with opened(kind, spec, count) as host:
            trace = plain(await play(host, 40, spec))
            assert host.busy_s > 0
        assert host.busy_s > 0
        return trace

    traces = [run(main(kind), loop) for kind in KINDS]
    assert traces[0] == traces[1]


class Pictures(ScriptedEnv):
    """Dictionary observations, discrete actions, no success."""

    def __init__(self) -> None:
        super().__init__(obs_dim=3, num_actions=4, length=5)
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            image=spaces.Box(0, 255, (4, 4, 3), np.uint8), state=spaces.Box(-9, 9, (3,), np.float32)
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        return {"image": np.full((4, 4, 3), (seed or 0) % 256, np.uint8), "state": obs}, info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {"n": 3} if self._left % 2 else {}
        return {"image": np.full((4, 4, 3), action, np.uint8), "state": obs}, reward, terminated, truncated, info


def test_dictionaries_discrete_actions_and_missing_info() -> None:
    parts = {"image": ArraySpec((4, 4, 3), "uint8"), "state": ArraySpec((3,), "float32")}
    spec = EnvSpec("pictures", Pictures, parts, ArraySpec((), "int64", num_values=4), info_keys=("n",))

    async def main(kind: Kind) -> Any:
        async with opened(kind, spec, 2) as host:
            first = await ask(host.slots[1].reset, 7)
            results = [await ask(host.slots[1].step, np.array([2])) for _ in range(2)]
            later = await ask(host.slots[1].step, np.array([1, 1]))
        assert [dict(r.info) for r in results] == [{}, {"n": 3}]
        return plain([first[0], [r.obs for r in results], later.obs, later.rewards])

    traces = [run(main(kind)) for kind in KINDS]
    assert traces[0] == traces[1]


@both
def test_results_are_not_views_of_a_buffer(kind: Kind) -> None:
    async def main() -> None:
        async with opened(kind, scripted()) as host:
            first, _ = await ask(host.slots[0].reset, 1)
            kept = first.copy()
            await ask(host.slots[0].step, ZERO)
            assert np.array_equal(first, kept)

    run(main())


@both
def test_errors_of_user_code_keep_their_type(kind: Kind) -> None:
    async def main() -> None:
        async with opened(kind, scripted(faults={0: "raise", 3: "raise"}), 2) as host:
            slot, other = host.slots
            with pytest.raises(ScriptedFault, match="call 0") as caught:
                await ask(slot.reset, 0)
            if kind == "process":
                assert "in the simulator's process" in caught.value.__notes__[0]
                assert "fake.py" in caught.value.__notes__[0]
            await ask(slot.reset, 0)
            await ask(slot.step, ZERO)
            with pytest.raises(ScriptedFault, match="call 3"):
                await ask(slot.step, ZERO)
            with pytest.raises(SimulatorError, match="after an error"):
                await ask(slot.step, ZERO)
            await ask(slot.reset, 0)
            with pytest.raises(ScriptedFault):  # the other has a plan of its own
                await ask(other.reset, 0)

    run(main())


@both
def test_errors_of_construction_leave_open(kind: Kind) -> None:
    async def main() -> None:
        with pytest.raises(ScriptedFault, match="call -1"):
            async with opened(kind, scripted(faults={CONSTRUCTION: "raise"}), 4):
                pass

    run(main())


@both
@pytest.mark.parametrize(
    ("fault", "actions", "message"),
    [
        ("nan", ZERO, "observation: expected finite numbers, got NaN"),
        ("shape", ZERO, r"expected float32 of shape \(3,\), got"),
        (None, np.full((1, 2), np.nan, np.float32), "action: expected finite"),
        (None, np.zeros((1, 3), np.float32), "action: expected float32"),
        (None, np.zeros((1, 2), np.complex64), "action: expected float32"),
        (None, [[0.0], [0.0, 1.0]], "action: expected an array, got list"),
        (None, torch.zeros(1, 2, requires_grad=True), "action: expected an array, got Tensor"),
    ],
)
def test_wrong_data_is_refused(kind: Kind, fault: Any, actions: Any, message: str) -> None:
    async def main() -> None:
        async with opened(kind, scripted(faults={1: fault} if fault else None)) as host:
            await ask(host.slots[0].reset, 0)
            with pytest.raises(InvalidData, match=message):
                await ask(host.slots[0].step, actions)

    run(main())


class Awkward(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("awkward")


def raise_awkward(env: Any) -> None:
    raise Awkward(1, 2)


def leave(env: Any) -> None:
    sys.exit(4)


def stop(env: Any) -> None:
    raise StopIteration


def large(env: Any) -> bytes:
    return bytes(3_000_000)


def pid(env: Any) -> int:
    return os.getpid()


def drift(env: ScriptedEnv) -> float:
    return env._drift


@both
@pytest.mark.hogs("megabytes are pickled on the loop, as fast as the machine does it")
def test_call_runs_on_the_simulator_between_steps(kind: Kind) -> None:
    async def main() -> None:
        async with opened(kind, scripted(), 2) as host:
            slot = host.slots[1]
            await ask(slot.reset, 5)
            assert await ask(slot.call, drift) == pytest.approx(np.random.default_rng(5).uniform(-0.1, 0.1))
            assert (await ask(slot.call, pid) == os.getpid()) == (kind == "thread")
            big = functools.partial(len_of, bytes(2_000_000))
            answers = [ask(s.call, fn) for s in host.slots for fn in (large, big, large)]
            assert [len(a) if isinstance(a, bytes) else a for a in await asyncio.gather(*answers)] == [
                3_000_000, 2_000_000, 3_000_000] * 2  # fmt: skip
            await ask(slot.step, ZERO)

    run(main())


def len_of(data: bytes, env: Any) -> int:
    return len(data)


@pytest.mark.parametrize(
    ("fn", "message"),
    [(raise_awkward, "Awkward: awkward"), (leave, "SystemExit: 4"), (stop, "StopIteration")],
)
def test_what_cannot_travel_becomes_a_simulator_error(fn: Any, message: str) -> None:
    async def main() -> None:
        async with opened("process", scripted()) as host:
            with pytest.raises(SimulatorError, match=message):
                await ask(host.slots[0].call, fn)
            with pytest.raises(ConfigError, match="cannot be sent to a process"):
                await ask(host.slots[0].call, lambda env: env)
            with pytest.raises((AttributeError, TypeError)):
                await ask(host.slots[0].call, make_lambda)
            await ask(host.slots[0].reset, 0)

    run(main())


def make_lambda(env: Any) -> Any:
    return lambda: env


def crash(how: str, env: Any) -> None:
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    os._exit(7)


@pytest.mark.parametrize(("how", "message"), [("exit", "exit code 7"), ("signal", "signal SIGSEGV")])
@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_death_of_the_child_fails_everything_pending_and_later(how: str, message: str, loop: Any) -> None:
    async def main() -> None:
        async with opened("process", scripted(), 3) as host:
            await asyncio.gather(*(ask(slot.reset, 0) for slot in host.slots))
            pending = [ask(host.slots[0].call, functools.partial(crash, how)), ask(host.slots[1].step, ZERO)]
            held = ask(host.slots[0].step, ZERO)
            for future in (pending[0], held):
                with pytest.raises(HostDied, match=f"host ended by itself: {message}"):
                    await future
            await asyncio.wait(pending)
            pending[1].exception()
            with pytest.raises(HostDied, match=message):
                await ask(host.slots[2].step, ZERO)

    run(main(), loop)


def test_a_process_that_died_is_started_again_by_who_builds_first() -> None:
    async def main() -> None:
        async with opened("process", scripted(), 2) as host:
            slot, other = host.slots
            await asyncio.gather(ask(slot.reset, 0), ask(other.reset, 0))
            with pytest.raises(HostDied):
                await ask(slot.call, functools.partial(crash, "exit"))
            assert (slot.built, other.built) == (False, False)
            assert (slot.innocent, other.innocent) == (False, True)
            building = slot.build()
            with pytest.raises(HostDied, match="exit code 7"):  # it is gone, and must not disturb the new process
                await ask(other.step, ZERO)
            await building
            with pytest.raises(HostDied, match="exit code 7"):
                await ask(other.step, ZERO)
            first, _ = await ask(slot.reset, 0)
            await other.build()
            again, _ = await ask(other.reset, 0)
            assert np.array_equal(first, again)
            assert (slot.built, other.built) == (True, True)
            assert (slot.innocent, other.innocent) == (False, False)
            assert host.busy_s > 0

    run(main())


@both
def test_one_that_is_retired_is_not_there_any_more(kind: Kind) -> None:
    async def main() -> None:
        async with opened(kind, scripted()) as host:
            (slot,) = host.slots
            assert slot.built
            slot.retire()
            with pytest.raises(SimulatorError, match="closed"):
                await ask(slot.reset, 0)
            assert not slot.built

    run(main())


def test_death_while_building_leaves_open() -> None:
    async def main() -> None:
        with pytest.raises(HostDied, match="exit code 3"):
            async with opened("process", scripted(faults={CONSTRUCTION: "exit"})):
                pass

    run(main())


def test_next_operation_waits_behind_a_cancelled_one() -> None:
    async def main() -> None:
        async with opened("process", scripted(), 1) as host:
            slot = host.slots[0]
            await ask(slot.reset, 1)
            reference = [(await ask(slot.step, np.full((1, 2), x, np.float32))).rewards for x in (0.1, 0.2, 0.3)]
            await ask(slot.reset, 1)
            await ask(slot.step, np.full((1, 2), 0.1, np.float32))
            sent = ask(slot.step, np.full((1, 2), 0.2, np.float32))
            await asyncio.sleep(0)  # it has left, and its answer is dropped
            sent.cancel()
            unsent = ask(slot.step, np.full((1, 2), 0.9, np.float32))
            unsent.cancel()  # never runs
            last = await ask(slot.step, np.full((1, 2), 0.3, np.float32))
            assert last.rewards == reference[2]

    run(main())


def test_cancelled_before_the_pool_lent_a_unit() -> None:
    async def main() -> None:
        machine, pool = LocalMachine(), Pool("cores", 1)
        host = ProcessHost([scripted()] * 2, machine, pool, "host")
        await host.open()
        await ask(host.slots[0].reset, 0)
        lease = await pool.acquire()
        future, other = ask(host.slots[0].step, ZERO), ask(host.slots[1].reset, 0)
        await asyncio.sleep(0)
        assert pool.statistics().waiting == ("host",)
        future.cancel()
        lease.release()
        await other
        await ask(host.slots[0].step, ZERO)
        assert pool.statistics().free == 1
        assert await host.aclose(DEADLINE_S) == []
        await machine.aclose(deadline_s=1.0)

    run(main())


class Bits:
    """A socket that takes and gives a few bytes at a time, and is full every other time."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._turn = 0

    def send(self, data: Any) -> int:
        self._turn += 1
        if self._turn % 2:
            raise BlockingIOError
        return int(self._sock.send(bytes(data[:3])))

    def recv(self, num: int) -> bytes:
        return bytes(self._sock.recv(3))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_partial_sends_and_receives(monkeypatch: pytest.MonkeyPatch, loop: Any) -> None:
    init = Link.__init__

    def patched(self: Link, *args: Any) -> None:
        init(self, *args)
        self._sock = Bits(self._sock)  # type: ignore[assignment]

    spec = scripted(length=7)

    async def main(kind: Kind) -> Any:
        async with opened(kind, spec, 19) as host:
            trace = await play(host, 20, spec)
            assert await ask(host.slots[3].call, drift) != 0
            return plain(trace)

    reference = run(main("thread"))
    monkeypatch.setattr(Link, "__init__", patched)
    assert run(main("process"), loop) == reference


def test_more_actions_than_shared_memory_has() -> None:
    async def main() -> None:
        async with opened("process", scripted(length=2 * MAX_CHUNK)) as host:
            await ask(host.slots[0].reset, 0)
            assert (await ask(host.slots[0].step, np.zeros((MAX_CHUNK, 2), np.float32))).num_steps == MAX_CHUNK
            with pytest.raises(ConfigError, match="at most 1024 actions in one step, got 1025: do them in several"):
                await ask(host.slots[0].step, np.zeros((MAX_CHUNK + 1, 2), np.float32))

    run(main())


def test_what_cannot_be_sent_names_itself() -> None:
    async def main() -> None:
        spec = replace(scripted(), make=lambda: ScriptedEnv())
        with pytest.raises(ConfigError, match=r"make=<function .*lambda.*top of a module, or pass host=\"thread\""):
            async with opened("process", spec):
                pass

    run(main())


@both
def test_a_closed_host_refuses(kind: Kind) -> None:
    async def main() -> None:
        async with opened(kind, scripted()) as host:
            await ask(host.slots[0].reset, 0)
        with pytest.raises(Closed):
            await ask(host.slots[0].step, ZERO)
        assert await host.aclose(0.1) == []

    run(main())


def test_a_hanging_child_is_killed_and_named() -> None:
    async def main() -> None:
        async with opened("process", scripted(faults={1: "hang"}), expect=["host"]) as host:
            await ask(host.slots[0].reset, 0)
            future = ask(host.slots[0].step, ZERO)
            await asyncio.sleep(0)
        with pytest.raises(Closed):
            await future

    run(main())


def test_a_hanging_thread_is_given_up_and_named() -> None:
    gate = threading.Event()

    async def main() -> None:
        spec = scripted(faults={1: "hang"}, gate=gate)
        async with opened("thread", spec, 2, num_cores=1, expect=["sim-0", "sim-1"]) as host:
            await ask(host.slots[0].reset, 0)
            future = ask(host.slots[0].step, ZERO)
            await asyncio.sleep(0)
        assert not future.done()

    try:
        run(main())
    finally:
        gate.set()


def test_opening_can_be_cancelled() -> None:
    async def main() -> None:
        machine = LocalMachine()
        host = ProcessHost([scripted()], machine, None, "host")
        task = asyncio.ensure_future(host.open())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await host.aclose(DEADLINE_S)
        await machine.aclose(deadline_s=1.0)

    run(main())


def test_environments_stay_on_their_lane_for_life() -> None:
    async def main() -> None:
        async with opened("thread", scripted(), 7) as host:
            names = [slot.lane_name for slot in host.slots]
            assert names == [f"sim-{index % 3}" for index in range(7)]
            threads = [await ask(slot.call, lambda env: threading.current_thread().name) for slot in host.slots]
            assert threads == [f"ebrl-{name}" for name in names]

    run(main())


def test_thread_host_on_a_virtual_machine() -> None:
    async def main() -> float:
        machine = VirtualMachine({"sim": lambda n, rng: 0.5}, num_cores=2)
        host = ThreadHost([scripted()] * 4, machine, None, 4)
        await host.open()
        await asyncio.gather(*(ask(slot.reset, 0) for slot in host.slots))
        now = asyncio.get_running_loop().time()
        assert await host.aclose(1.0) == []
        return now

    assert run_virtual(main()) == 1.0


def test_process_host_needs_a_real_machine() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match='host="thread"'):
            ProcessHost([scripted()], VirtualMachine({}), None, "host")
        with pytest.raises(ConfigError, match="simulators must be"):
            ProcessHost([], LocalMachine(), None, "host")

    run_virtual(main())
