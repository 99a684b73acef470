"""Lanes, simulators at once, promises and pins in the real runtime on modelled hardware."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ebrl.core.errors import ConfigError
from ebrl.core.machine import LocalMachine
from ebrl.core.readings import Move
from ebrl.core.records import Array
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_gpu import GpuModel
from ebrl.core.virtual_machine import VirtualMachine, spend
from ebrl.gen.batcher import Batcher
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.times import CallTimes
from tests.helpers import scripted_spec, virtually
from tests.pipeline import Laws, rig

CPU = ("sim", "gen", "train")  # all stages share the cores
GENERATION = Laws(step_s=0.002, fixed_s=0.004, per_request_s=1e-3)
SIMULATION = Laws(step_s=0.02, fixed_s=0.002, per_request_s=1e-4)
Kept = tuple[float, float, tuple[Move, ...]]

# Lanes of generation.


def on_four_cores(laws: Laws, seconds: float = 8.0, **options: Any) -> Kept:
    """Return the rate of the second half, the lanes at the end, and the moves."""

    async def main() -> Kept:
        async with rig(replace(laws), machine=laws.machine(num_cores=4, on_cores=CPU), **options) as r:
            await asyncio.sleep(seconds / 2)
            return await r.rate(seconds / 2), r.gen.statistics()["lanes"], r.moves

    return run_virtual(main())


@pytest.mark.slow
def test_where_generation_is_the_limit_and_cores_are_free_it_gets_more_lanes() -> None:
    rate, lanes, moves = on_four_cores(GENERATION)
    one, single, others = on_four_cores(GENERATION, lanes=1)
    assert 2 <= lanes <= 4
    assert single == 1
    assert rate > 1.2 * one
    assert [move.new.num_lanes for move in moves if move.knob == "lanes"] == list(range(2, int(lanes) + 1))
    assert not [move for move in others if move.knob == "lanes"]


@pytest.mark.slow
def test_a_batcher_of_the_user_is_kept_and_gets_more_lanes() -> None:
    rule = Batcher(1, 32, 1.0)
    rate, lanes, moves = on_four_cores(GENERATION, batcher=rule)
    one, *_ = on_four_cores(GENERATION, batcher=rule, lanes=1)
    assert lanes > 1
    assert rate > one
    assert {move.new[:3] for move in moves if move.service == "gen"} == {(1, 32, 1.0)}


@pytest.mark.slow
def test_where_simulators_have_the_cores_generation_keeps_one_lane() -> None:
    rate, lanes, moves = on_four_cores(SIMULATION)
    one, *_ = on_four_cores(SIMULATION, lanes=1)
    assert lanes == 1
    assert not [move for move in moves if move.knob == "lanes"]
    assert rate == pytest.approx(one, rel=0.02)


def test_lanes_are_one_where_generation_takes_no_cores() -> None:
    async def main() -> None:
        async with rig(replace(GENERATION), machine=GENERATION.machine(num_cores=4)) as r:
            await asyncio.sleep(5)
            assert r.gen.reading().lanes == range(1, 2)
            assert r.gen.statistics()["lanes"] == 1

    run_virtual(main())


@virtually
async def test_a_machine_says_what_takes_cores() -> None:
    async with Runtime(VirtualMachine({}, num_cores=2, on_cores=CPU)) as rt:
        assert all(rt.claim(kind) is not None for kind in CPU)
    async with Runtime(VirtualMachine({})) as rt:
        assert [kind for kind in CPU if rt.claim(kind) is not None] == ["sim"]


# Simulators at once.


class Watched(ScriptedEnv):
    """Its calls take some time, and are written down."""

    def __init__(self, calls: list[tuple[float, float]], call_s: float) -> None:
        super().__init__(3, 2, length=20)
        self.calls, self.call_s = calls, call_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self.note()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.note()
        return super().step(action)

    def note(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self.calls.append((now_s, now_s + self.call_s))
        spend(self.call_s)


def at_once(calls: list[tuple[float, float]], since_s: float = 0.0, until_s: float = 1e9) -> int:
    """Return how many ran at once, at most, of those that began in a time."""
    began = [call for call in calls if since_s <= call[0] < until_s]
    ends = [(start_s, 1) for start_s, _ in began] + [(end_s - 1e-9, -1) for _, end_s in began]
    running = most = 0
    for _, change in sorted(ends):
        running += change
        most = max(most, running)
    return most


def waiting_in(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulators say that they compute in that part of their time; what runs on a model says nothing."""
    monkeypatch.setattr(CallTimes, "cpu_part", lambda self: part)


def watched(seconds: float, num_cores: int = 4, **runtime: Any) -> tuple[list[tuple[float, float]], tuple[Move, ...]]:
    """Return all calls of 16 simulators, and the moves of concurrency."""
    calls: list[tuple[float, float]] = []

    async def main() -> tuple[Move, ...]:
        spec = scripted_spec(make=lambda: Watched(calls, 0.01))
        laws = Laws(fixed_s=5e-4, per_request_s=1e-5)
        machine = VirtualMachine({"gen": laws.gen}, num_cores=num_cores)
        async with rig(laws, 16, machine=machine, spec=spec, runtime=runtime) as r:
            await asyncio.sleep(seconds)
            return r.moves

    moves = run_virtual(main())
    return calls, tuple(move for move in moves if move.knob == "concurrency")


@pytest.mark.slow
def test_fewer_simulators_are_tried_where_they_wait_and_all_run_again_where_that_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting_in(0.3, monkeypatch)
    calls, moves = watched(10)
    assert [(move.old, move.new) for move in moves] == [(4, 2), (2, 4)]
    began_s, ended_s = (move.time_s for move in moves)
    assert at_once(calls, 0, began_s) == 4
    assert at_once(calls, began_s + 0.01, ended_s - 0.01) == 2, "but for those that ran when it was turned"
    assert at_once(calls, ended_s + 0.1) == 4
    assert "taken back" in moves[1].reason


@pytest.mark.slow
def test_a_trial_of_fewer_ends_by_its_judgement_and_no_new_regime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulators that sleep answer later where fewer may run: that is what was turned, and nothing else."""
    waiting_in(0.0, monkeypatch)
    _, moves = watched(20, num_cores=16)
    assert [(move.old, move.new) for move in moves] == [(16, 8), (8, 16)]
    assert moves[1].time_s - moves[0].time_s < 3
    assert "taken back" in moves[1].reason


@pytest.mark.slow
def test_a_number_of_simulators_that_is_pinned_is_never_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting_in(0.3, monkeypatch)
    calls, moves = watched(5, pin={"concurrency": 2})
    assert len(calls) > 900
    assert at_once(calls) == 2
    assert moves == ()


def test_the_tuner_is_told_how_many_may_run() -> None:
    async def main() -> None:
        laws = replace(SIMULATION)
        async with rig(laws, 8, machine=laws.machine(num_cores=6), runtime={"pin": {"concurrency": 3}}) as r:
            assert r.envs.reading().num_cores == 3
        async with rig(laws, 8, machine=laws.machine(num_cores=6)) as r:
            assert r.envs.reading().num_cores == 6

    run_virtual(main())


# Pins.


def promised(rt: Runtime) -> dict[str, float]:
    return {kind: claim.statistics().rate for kind in CPU if (claim := rt.claim(kind)) is not None}


@pytest.mark.slow
def test_promises_follow_use_unless_they_are_pinned() -> None:
    async def main(pin: Mapping[str, Any] | None) -> tuple[dict[str, float], int]:
        async with rig(
            replace(SIMULATION), machine=SIMULATION.machine(num_cores=4, on_cores=CPU), runtime={"pin": pin}
        ) as r:
            await asyncio.sleep(20)
            return promised(r.rt), sum(move.knob == "cores" for move in r.moves)

    found, num = run_virtual(main(None))
    assert num == 1
    assert found["sim"] > 3.0 > 1.0 > found["gen"]
    assert run_virtual(main({"cores": {"sim": 1.0, "gen": 2.5}})) == ({"sim": 1.0, "gen": 2.5, "train": 1.0}, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("num_cores", "update_s"), [(2, 20.0), (2, 6.0), (4, 3.0)])
def test_promises_are_not_made_anew_with_every_phase_of_a_cycle(num_cores: int, update_s: float) -> None:
    """Within a cycle of updates the cores go to something else all the time; over whole cycles to the same."""
    laws = Laws(step_s=0.05, fixed_s=0.05, per_request_s=2e-3, update_s=update_s)

    async def main() -> list[Move]:
        machine = laws.machine(num_cores=num_cores, on_cores=CPU, servers={"gen": 8, "train": 1})
        async with rig(laws, 4 * num_cores, machine=machine, max_lag=1, rounds=100) as r:
            await asyncio.sleep(240)
            return [move for move in r.moves if move.knob == "cores"]

    # One in ten or so is taken back for what was chance, and made again. With every phase there would be dozens.
    assert len(run_virtual(main())) <= 3


def gpu_machine(num_cores: int = 64, laws: Laws = SIMULATION) -> VirtualMachine:
    speed: Callable[[float], float] = lambda units: units / 8 * 3 / (units / 8 + 2)  # noqa: E731
    return laws.machine(num_cores=num_cores, gpu=GpuModel(8, {"gen": speed, "train": speed}, {}))


@pytest.mark.slow
@pytest.mark.parametrize("units", [0, 6])
def test_a_division_that_is_pinned_holds_until_the_end(units: int) -> None:
    laws = Laws(step_s=0.01, fixed_s=0.01, per_request_s=0.001, update_s=0.45)
    machine = gpu_machine(laws=laws)
    division = {"gen": 6, "train": 2} if units else None

    async def main(pin: Mapping[str, Any]) -> list[Move]:
        async with rig(laws, 16, machine=machine, max_lag=2, runtime={"pin": pin}) as r:
            assert machine.gpu is not None
            assert machine.gpu.partition == division
            await asyncio.sleep(20)
            assert machine.gpu.partition == division
            return [move for move in r.moves if move.knob == "partition"]

    assert run_virtual(main({"partition": units})) == []
    assert machine.gpu is not None
    assert machine.gpu.partition is None, "the next runtime finds it whole"


@pytest.mark.parametrize("options", [{"tune": False}, {"deterministic": True}])
def test_pins_hold_where_nothing_is_tuned(options: dict[str, Any]) -> None:
    async def main() -> None:
        machine = gpu_machine(4)
        pin: dict[Any, Any] = {"concurrency": 2, "cores": {"sim": 1.5}, "partition": 5}
        async with Runtime(machine, pin=pin, **options) as rt:
            claim = rt.claim("sim")
            assert claim is not None
            assert (claim.statistics().ceiling, claim.statistics().rate) == (2, 1.5)
            assert machine.gpu is not None
            assert machine.gpu.partition == {"gen": 5, "train": 3}
            assert rt.resources.pool("sm").statistics().holding == {"gen": 5, "train": 3}

    run_virtual(main())


OWN = r"a generator is told by its own arguments: Generator\(policy"


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"speed": 1}, "pin: 'speed' is no knob of this machine, which has concurrency, cores, partition"),
        (
            {"batching": 4},
            rf"pin: 'batching' is no knob of this machine.*; {OWN}, batcher=Batcher\(threshold=8\)\)",
        ),
        (
            {"threshold": 8},
            rf"pin: 'threshold' is no knob of this machine.*; {OWN}, batcher=Batcher\(threshold=8\)\)",
        ),
        ({"lanes": 2}, rf"pin: 'lanes' is no knob of this machine.*; {OWN}, lanes=2\)"),
        ({"concurrency": 0}, "pin: 'concurrency' must be a whole number from 1 to 4, got 0"),
        ({"concurrency": 5}, "pin: 'concurrency' must be a whole number from 1 to 4, got 5"),
        ({"concurrency": 1.5}, "pin: 'concurrency' must be a whole number from 1 to 4, got 1.5"),
        ({"concurrency": True}, "pin: 'concurrency' must be a whole number from 1 to 4, got True"),
        ({"concurrency": "two"}, "pin: 'concurrency' must be a whole number from 1 to 4, got 'two'"),
        ({"partition": 8}, "pin: 'partition' must be a whole number from 0 to 7, got 8"),
        ({"partition": -1}, "pin: 'partition' must be a whole number from 0 to 7, got -1"),
        ({"cores": 3}, r"pin: 'cores' must be units by stage \(sim\), got 3"),
        ({"cores": {}}, r"pin: 'cores' must be units by stage \(sim\), got {}"),
        ("concurrency", r"pin: must be values by knob, such as {'concurrency': 2}, got 'concurrency'"),
        ({"cores": {"gpu": 1}}, "pin: no stage 'gpu' shares the cores; these do: sim"),
        ({"cores": {"sim": 0}}, "pin: 'cores' of 'sim' must be a number above 0, got 0"),
        ({"cores": {"sim": float("nan")}}, "pin: 'cores' of 'sim' must be a number above 0, got nan"),
        ({"cores": {"sim": True}}, "pin: 'cores' of 'sim' must be a number above 0, got True"),
        ({"cores": {"sim": 10**400}}, "pin: 'cores' of 'sim' must be from 1e-09 to .{1,60}"),
        ({"cores": {"sim": "all"}}, "pin: 'cores' of 'sim' must be a number above 0, got 'all'"),
        ({"partition": 2, "cores": {"sim": -1}}, "pin: 'cores' of 'sim' must be a number above 0, got -1"),
    ],
)
def test_a_pin_that_cannot_be_says_so_at_once(pin: Any, message: str) -> None:
    machine = gpu_machine(4)
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Runtime(machine, pin=pin)
    assert machine.gpu is not None
    assert machine.gpu.partition is None


def test_what_a_machine_lacks_cannot_be_pinned() -> None:
    with pytest.raises(ConfigError, match=r"'partition' is no knob of this machine, which has concurrency, cores$"):
        Runtime(LocalMachine(2), pin={"partition": 1})
    with pytest.raises(ConfigError, match=r"'concurrency' is no knob of this machine, which has none$"):
        Runtime(VirtualMachine({}, on_cores=()), pin={"concurrency": 1})


def test_pins_are_of_this_runtime_alone() -> None:
    async def main() -> list[int]:
        machine, ceilings = VirtualMachine({}, num_cores=4), []
        for pin in ({"concurrency": 2}, None):
            async with Runtime(machine, pin=pin) as rt:  # type: ignore[arg-type]
                claim = rt.claim("sim")
                assert claim is not None
                ceilings.append(claim.statistics().ceiling)
        return ceilings

    assert run_virtual(main()) == [2, 4]
