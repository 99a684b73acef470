"""Probing, warm starts and profiles that a run leaves: what is measured is what was there, and it is used again."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.probed import load_probed
from bench.suites import Ask
from bench.suites.probed import suite
from ebrl.cli import main
from ebrl.cli.config import ProbeConfig
from ebrl.cli.probe import make_plan
from ebrl.core.errors import ConfigError, PolicyError, SimulatorError
from ebrl.core.machine import LocalMachine
from ebrl.core.meters import Rate
from ebrl.core.profile import FitRecord, SimulationProfile, StageProfile, StageRecord
from ebrl.core.profile_file import SavedProfiles, load, save
from ebrl.core.profiles import Profiles, check_update, describe, update
from ebrl.core.protocols import PolicyOut
from ebrl.core.records import EnvSpec, Place
from ebrl.core.run import run
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import Law, VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.gen.policies import RecurrentPolicy
from ebrl.gen.probe import MAX_ROUNDS, PolicyProbe, probe_policy, sizes
from ebrl.gen.service import BatchService
from ebrl.sim.fake import ScriptedEnv, ScriptedFault
from ebrl.sim.group import EnvGroup
from ebrl.sim.players import SimulationProbe
from ebrl.sim.probe import probe_simulators, records
from ebrl.sim.simulator import Simulator
from ebrl.sim.times import SAMPLE_EVERY, CallTimes
from tests.helpers import leaves, scripted_spec, training, virtually

A_S, B_S = 0.004, 0.0005
SMALL = ["--num-envs", "4", "--ppo.batch-size", "32", "--ppo.minibatch-size", "16", "--ppo.epochs", "1"]
QUICK = ["--seconds", "0.04"]


@pytest.fixture(autouse=True)
def ids() -> Iterator[None]:
    gymnasium.register("ProbeTest-v0", ScriptedEnv)  # type: ignore[arg-type]  # a class is a creator too
    yield
    del gymnasium.registry["ProbeTest-v0"]


# Policies.


def line(n: int, rng: object = None) -> float:
    return A_S + B_S * n


def probed(machine: VirtualMachine, policy: Any = None, **options: Any) -> PolicyProbe:
    spec = scripted_spec()

    async def probe() -> PolicyProbe:
        async with Runtime(machine) as rt:
            return await probe_policy(rt, policy or ScriptedPolicy(spec), spec, **{"seconds": 5.0, **options})

    return run_virtual(probe())


def test_the_sizes_are_powers_of_two_and_the_largest() -> None:
    assert sizes(1) == [1]
    assert sizes(8) == [1, 2, 4, 8]
    assert sizes(24) == [1, 2, 4, 8, 16, 24]


def test_the_line_of_a_policy_is_found() -> None:
    found = probed(VirtualMachine({"gen": line}), max_batch=24)
    assert found.medians_s == pytest.approx({n: line(n) for n in sizes(24)})
    record = found.record("gen")
    assert (record.name, record.group) == ("gen", "gen")
    (fit,) = record.fits
    assert fit.share == 1.0
    assert (fit.a_s, fit.b_s) == pytest.approx((A_S, B_S))
    assert record.num == sum(n * len(times_s) for n, times_s in found.times_s.items())


def test_stalls_do_not_show() -> None:
    numbers = itertools.count()
    law = lambda n, rng: line(n) * (30.0 if next(numbers) % 11 == 0 else 1.0)  # noqa: E731
    (fit,) = probed(VirtualMachine({"gen": law}), max_batch=32).record("gen").fits
    assert (fit.a_s, fit.b_s) == pytest.approx((A_S, B_S), rel=1e-3)


def test_what_takes_no_time_ends_and_what_takes_long_is_tried_a_few_times() -> None:
    assert {len(times_s) for times_s in probed(VirtualMachine({}), max_batch=2).times_s.values()} == {MAX_ROUNDS}
    slow = probed(VirtualMachine({"gen": lambda n, rng: 60.0}), max_batch=2)
    assert {len(times_s) for times_s in slow.times_s.values()} == {5}


def test_a_policy_that_fails_says_so() -> None:
    class Broken(ScriptedPolicy):
        def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
            raise ValueError("mine")

    with pytest.raises(ExceptionGroup) as caught:
        probed(VirtualMachine({}), Broken(scripted_spec()))
    (error,) = leaves(caught.value)
    assert isinstance(error, PolicyError)
    assert str(error) == "the policy failed for a made-up observation: mine"


# Simulators.


@virtually
async def test_a_call_without_an_end_is_given_up() -> None:
    async with Runtime(VirtualMachine({"sim": lambda n, rng: 1e6})) as rt:
        with pytest.raises(SimulatorError, match="no end after 30 s"):
            await probe_simulators(rt, scripted_spec(), 1, seconds=1.0, host="thread")


def simulators(spec: EnvSpec, count: int, host: Place, seconds: float = 0.03) -> SimulationProbe:
    async def probe() -> SimulationProbe:
        async with Runtime(LocalMachine(2)) as rt:
            return await probe_simulators(rt, spec, count, seconds=seconds, host=host)

    return run(probe())


@pytest.mark.slow
@pytest.mark.parametrize("host", ["thread", "process"])
def test_every_step_and_every_reset_is_timed_where_it_runs(host: Place) -> None:
    found = simulators(scripted_spec(length=5), 2, host)
    assert found.num_simulators == 2
    assert found.num_resets >= 2
    assert found.num_resets <= found.num_steps <= 5 * found.num_resets
    assert len(found.resets_s) == found.num_resets
    assert len(found.steps_s) == found.num_steps
    assert min(found.steps_s) > 0.0
    assert max(found.steps_s) < found.elapsed_s
    assert found.steps_per_s == found.num_steps / found.elapsed_s


@pytest.mark.slow
def test_a_slow_simulator_does_one_reset_and_one_step_however_short_the_time() -> None:
    found = simulators(scripted_spec(length=50, latency_s=0.05), 1, "thread", seconds=1e-6)
    assert (found.num_steps, found.num_resets) == (1, 1)
    assert found.steps_s[0] >= 0.05


@pytest.mark.parametrize("fault", [0, 2, 7])
def test_a_simulator_that_fails_ends_the_probe(fault: int) -> None:
    spec = scripted_spec(length=50, faults={fault: "raise"})
    with pytest.raises(ExceptionGroup) as caught:
        simulators(spec, 2, "thread", seconds=5.0)
    assert all(isinstance(error, ScriptedFault) for error in leaves(caught.value))


def test_the_record_has_the_times_in_company_and_the_line_in_their_number() -> None:
    alone = SimulationProbe(1, 300, 3, 1.0, [0.001] * 300, [0.1] * 3)
    crowd = SimulationProbe(4, 500, 10, 1.0, [0.004] * 500, [0.2] * 10)
    step, reset = records([alone, crowd], "envs")
    assert [(stage.name, stage.group) for stage in (step, reset)] == [("step", "envs"), ("reset", "envs")]
    assert (step.mean_s, step.num, reset.mean_s, reset.num) == pytest.approx((0.004, 500, 0.2, 10))
    assert step.fits[0].a_s == pytest.approx(0.0, abs=1e-6), "four at once take four times as long: they take turns"
    assert step.fits[0].b_s == pytest.approx(0.001, rel=1e-3)
    (single, _) = records([alone], "envs")
    assert (single.fits[0].a_s, single.fits[0].b_s) == pytest.approx((0.001, 0.0))


def test_one_step_in_some_is_due_and_every_reset_is_timed() -> None:
    times, sim = CallTimes(), Simulator(scripted_spec(length=1000))
    due = [next(times.due) for _ in range(3 * SAMPLE_EVERY)]
    assert [number for number, one in enumerate(due, 1) if one] == [SAMPLE_EVERY, 2 * SAMPLE_EVERY, 3 * SAMPLE_EVERY]
    times.reset(sim, 0)
    for size in (1, 5):
        times.step(sim, np.zeros((size, 2), np.float32), True)
    assert min(times.steps) > 0.0
    assert times.resets[0] > 0.0
    profile = SimulationProfile("envs")
    times.move(profile)
    assert (len(profile.step.latency), len(profile.reset.latency), len(times.steps), len(times.resets)) == (2, 1, 0, 0)
    none = CallTimes(0)
    none.reset(sim, 0)
    assert not none.resets
    assert not any(itertools.islice(none.due, 100))
    assert all(itertools.islice(CallTimes(1).due, 100))


# What a run learns.


@pytest.mark.slow
@pytest.mark.parametrize("host", ["thread", "process"])
def test_a_group_knows_what_its_simulators_take(host: Place) -> None:
    spec = scripted_spec(length=7)

    async def train() -> tuple[EnvGroup, dict[str, dict[str, float]]]:
        async with training(spec, LocalMachine(2), count=4, batch_size=200, updates=4, host=host) as stage:
            async for _ in stage.trainer:
                pass
            numbers = stage.runtime.statistics()
        return stage.envs, {name: dict(values) for name, values in numbers.items()}

    envs, numbers = run(train())
    profile = envs.profile
    assert len(profile.step.latency) > 10
    assert len(profile.reset.latency) > 10
    assert len(profile.turnaround.latency) > 10
    assert profile.step.num == envs.env_steps
    assert 4 < profile.step.num / profile.reset.num <= 7
    for name in ("gen", "envs", "trainer"):
        assert numbers[name]["arrivals_per_s"] > 0
        assert 0 < numbers[name]["utilisation"] < 1.5


def test_turnarounds_and_use_of_a_model_are_exact() -> None:
    async def train() -> None:
        machine = VirtualMachine({"sim": lambda n, rng: 3.0, "gen": lambda n, rng: 1.0}, num_cores=1)
        async with training(scripted_spec(length=40), machine, count=1, batch_size=20, updates=20) as stage:
            async for _ in stage.trainer:
                pass
            numbers = stage.runtime.statistics()
            profile = stage.envs.profile
            assert set(profile.turnaround.latency.samples()) <= {3.0, 6.0}, "a step, or a step and a reset"
            assert len(profile.turnaround.latency) > 10
            assert (len(profile.step.latency), len(profile.reset.latency)) == (0, 0), "a model's clock says nothing"
            assert numbers["gen"]["utilisation"] == pytest.approx(0.25, rel=0.1)
            assert numbers["envs"]["utilisation"] == pytest.approx(0.75, rel=0.1)
            assert numbers["gen"]["arrivals_per_s"] == pytest.approx(0.25, rel=0.1)

    run_virtual(train())


@virtually
async def test_a_service_knows_what_it_takes() -> None:
    async with Runtime(VirtualMachine({"gen": lambda n, rng: 2.0 + n})) as rt:
        service: BatchService[int, int] = rt.start(BatchService(list, name="scores"))
        for num in (1, 4, 2):
            await asyncio.gather(*(service(i) for i in range(num)))
        numbers = service.statistics()
        assert numbers["utilisation"] == pytest.approx(1.0)
        assert numbers["arrivals_per_s"] == pytest.approx(7 / 13)
        ((key, profile),) = rt.profiles.known.items()
        assert key == ("gen", "scores")
        assert profile.predict(10) == pytest.approx(12.0)


def test_readings_of_counters() -> None:
    stage = StageProfile("gen", window_s=10.0)
    assert stage.read(0.0, 0, 0.0) == {"arrivals_per_s": 0.0, "utilisation": 0.0}
    for second in range(1, 40):
        numbers = stage.read(float(second), 8 * second, 0.5 * second, 2.0)
    assert numbers == {"arrivals_per_s": pytest.approx(8.0, rel=0.1), "utilisation": pytest.approx(0.25)}
    assert stage.read(39.0, 8 * 39, 0.5 * 39, 2.0) == numbers, "twice in a moment"
    assert stage.record().num == 8 * 39


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20), st.integers(0, 1000))
def test_a_counter_that_is_read_now_and_then_gives_a_constant_rate_exactly(gaps_s: list[float], per_s: int) -> None:
    rate, now_s = Rate(5.0), 1e4
    rate.read(now_s, 7)
    assert rate.per_s(now_s) == 0.0
    for gap_s in gaps_s:
        now_s += round(gap_s, 2) + 0.01
        rate.read(now_s, round(100 * per_s * (now_s - 1e4)) + 7)
        rate.read(now_s, 10**9)  # the same moment again: put off
    assert rate.per_s(now_s) == pytest.approx(100 * per_s, abs=200)
    rate.read(now_s + 100.0, round(100 * per_s * (now_s - 1e4)) + 7)
    assert rate.per_s(now_s + 100.0) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.slow
def test_batches_of_less_than_a_millisecond_are_measured_on_uvloop() -> None:
    async def train() -> Generator:
        async with training(scripted_spec(), LocalMachine(2), batch_size=100, updates=2) as stage:
            async for _ in stage.trainer:
                pass
        return stage.gen

    latencies_s = run(train()).reading().latencies_s
    assert (np.abs(1e3 * latencies_s - np.round(1e3 * latencies_s)) > 1e-3).any()


# Warm starts.

FORTY = tuple(np.linspace(0.004, 0.006, 33).tolist())
KNOWN = SavedProfiles(
    "16 virtual cores",
    (
        StageRecord("gen", "gen", (FitRecord(1.0, 0.02, 0.0001, 100.0),), 0.005, FORTY),
        StageRecord("turnaround", "gen", (), 0.005, FORTY),
    ),
)


def first_look(profile: SavedProfiles | None) -> tuple[float, int]:
    """Return what a batch of one is thought to take before there was any, and the tuner's moves at its first look."""
    spec = scripted_spec(length=50)
    laws: dict[str, Law] = {
        "sim": lambda n, rng: 0.005 * rng.lognormal(-0.125, 0.5),
        "gen": lambda n, rng: 0.02 + 0.0001 * n,
    }

    async def train() -> tuple[float, int]:
        async with Runtime(VirtualMachine(laws, num_cores=64), profile=profile) as rt:
            gen = rt.start(Generator(ScriptedPolicy(spec)))
            reading = gen.reading()
            envs = rt.start(EnvGroup(spec, actor=gen, count=64))
            envs.open_training(10_000, max_lag=1)
            while not rt.tuning.num_decisions:  # noqa: ASYNC110 - nothing in the library tells
                await asyncio.sleep(0.001)
            return reading.fixed_s + reading.per_request_s, len(rt.tuning.moves)

    return run_virtual(train())


def test_a_generator_that_starts_warm_is_tuned_at_the_first_look() -> None:
    warm = SavedProfiles("64 virtual cores", KNOWN.stages)
    assert first_look(warm) == pytest.approx((0.0201, 1))
    assert first_look(None) == (0.0, 0)


def test_what_is_used_is_logged_and_another_machine_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ebrl")

    async def start(cores: int) -> Generator:
        async with Runtime(VirtualMachine({}, num_cores=cores), profile=KNOWN) as rt:
            rt.start(Generator(ScriptedPolicy(scripted_spec()), name="other"))
            return rt.start(Generator(ScriptedPolicy(scripted_spec())))

    gen = run_virtual(start(16))
    assert len(gen.reading().latencies_s) == 32
    assert [record.getMessage() for record in caplog.records] == [
        "gen of gen begins with the profile of an earlier run",
        "turnaround of gen begins with the profile of an earlier run",
    ]
    caplog.clear()
    run_virtual(start(4))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "the profiles were measured on another machine (16 virtual cores; this one: 4 virtual cores)"


def test_a_runtime_takes_a_file(tmp_path: Path) -> None:
    save(tmp_path / "p.json", KNOWN.stages, KNOWN.machine)
    for path in (tmp_path / "p.json", str(tmp_path / "p.json")):
        Runtime(VirtualMachine({}), profile=path)
    with pytest.raises(ConfigError, match=r"none\.json: the profiles cannot be read"):
        Runtime(VirtualMachine({}), profile=tmp_path / "none.json")


def test_the_profiles_of_a_runtime_fill_a_file(tmp_path: Path) -> None:
    profiles, path = Profiles(VirtualMachine({})), tmp_path / "profile.json"
    profiles.add(StageProfile("step", "envs"))
    assert not profiles.save(path)
    assert not path.exists(), "nothing is known"
    old, new = StageProfile("gen", "gen"), StageProfile("gen", "gen")
    profiles.add(old, new)  # a service ended and another took its name
    new.observe(4, 0.5)
    assert profiles.save(path)
    assert load(path) == SavedProfiles("16 virtual cores", (new.record(),))


def test_an_update_keeps_what_it_does_not_replace(tmp_path: Path) -> None:
    machine, path = VirtualMachine({}), tmp_path / "profile.json"
    update(path, KNOWN.stages, machine)
    update(path, [StageRecord("gen", "gen"), StageRecord("step", "envs")], machine)
    assert [(stage.name, stage.mean_s) for stage in load(path).stages] == [
        ("turnaround", 0.005),
        ("gen", 0),
        ("step", 0),
    ]
    with pytest.raises(ConfigError, match=r"another machine \(16 virtual cores; this one: 2 virtual cores\)"):
        check_update(path, VirtualMachine({}, num_cores=2))
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        check_update(tmp_path / "none" / "profile.json", machine)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        check_update(path, machine)
    assert describe(LocalMachine(3)).startswith("3 cores, ")


# On the command line.


def names(path: Path) -> list[tuple[str, str]]:
    return [(stage.name, stage.group) for stage in load(path).stages]


@pytest.mark.slow
def test_an_environment_and_then_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = tmp_path / "profile.json", tmp_path / "run"
    assert main(["probe", "ProbeTest-v0", "--env-kwargs", "length", "9", "--out", str(out), *QUICK]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "ProbeTest-v0: random actions, a thread for each simulator" in printed.out
    assert f"profile written to {out}" in printed.out
    assert names(out) == [("step", "envs"), ("reset", "envs")]
    assert main(["train", "--env", "ProbeTest-v0", *SMALL, "--updates", "2", "--run-dir", str(folder)]) == 0
    capsys.readouterr()
    assert main(["probe", str(folder), "--out", str(out), *QUICK, "--max-batch", "4"]) == 0
    assert f"the policy of {folder}: batches on one thread" in capsys.readouterr().out
    assert names(out) == [("step", "envs"), ("reset", "envs"), ("gen", "gen")]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["profile.json"]
    assert load_probed(out, 4).simulator.horizon == round(1.5 * load(out).stages[0].num / load(out).stages[1].num)


@pytest.mark.slow
def test_a_run_leaves_a_profile_with_which_the_next_one_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", "--env", "ProbeTest-v0", *SMALL, "--updates", "9", "--run-dir", str(first)]) == 0
    assert {("gen", "gen"), ("turnaround", "gen"), ("step", "envs"), ("reset", "envs")} <= set(
        names(first / "profile.json")
    )
    assert not list(first.glob("*.partial"))
    caplog.set_level(logging.INFO, "ebrl")
    known = ["--profile", str(first / "profile.json")]
    assert main(["train", "--env", "ProbeTest-v0", *SMALL, "--updates", "1", "--run-dir", str(second), *known]) == 0
    assert "gen of gen begins with the profile of an earlier run" in caplog.messages
    assert json.loads((second / "config.json").read_text())["profile"] == known[1]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_that_fails_leaves_its_profile_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken = ["--env-kwargs", "faults", "{60: 'nan'}"]
    assert main(["train", "--env", "ProbeTest-v0", *broken, *SMALL, "--updates", "99", "--run-dir", str(folder)]) == 1
    assert ("gen", "gen") in names(folder / "profile.json")


BAD: dict[str, tuple[list[str], list[str]]] = {
    "unknown id": (["CartPole-v9"], ["no environment 'CartPole-v9'", "nor is it the folder of a run"]),
    "no run": (["runs/none"], ["no environment 'runs/none'", "nor is it the folder of a run"]),
    "option of the environment": (["ProbeTest-v0", "--env-kwargs", "colour", "1"], ["colour"]),
    "reserved": (["ProbeTest-v0", "--env-kwargs", "horizon", "1"], ["use --horizon"]),
    "seconds": (["ProbeTest-v0", "--seconds", "0"], ["--seconds must be a number above 0, got 0"]),
    "for ever": (["ProbeTest-v0", "--seconds", "inf"], ["--seconds must be a number above 0, got inf"]),
    "batch": (["ProbeTest-v0", "--max-batch", "0"], ["--max-batch must be at least 1, got 0"]),
    "seed": (["ProbeTest-v0", "--seed", "-1"], ["--seed must be at least 0, got -1"]),
    "horizon": (["ProbeTest-v0", "--horizon", "0"], ["--horizon must be at least 1, got 0"]),
    "a width": (["ProbeTest-v0", "--policy", "--hidden", "0"], ["hidden", "0"]),
    "a width of nothing": (["ProbeTest-v0", "--hidden", "8"], ["--hidden is about a policy: add --policy"]),
    "a batch of nothing": (["ProbeTest-v0", "--max-batch", "8"], ["--max-batch is about a policy: add --policy"]),
    "long name": (["x" * 300], ["no environment 'xxx", "nor is it the folder of a run"]),
    "observations": (["FrozenLake-v1"], ["Discrete"]),
}


def fails(args: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """Run the command, and return its one line on stderr."""
    capsys.readouterr()
    assert main(args) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, "\n".join(lines)
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, words = BAD[case]
    found = fails(["probe", "--out", str(tmp_path / "p.json"), *args], capsys)
    for word in words:
        assert word in found
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebrl.cli.probe.make_plan", pytest.fail)
    out = tmp_path / "p.json"
    (tmp_path / "file").write_text("")
    for place, why in {
        "no/p.json": "No such file",
        "file/p.json": "Not a directory",
        "x" * 250: "name too long",
    }.items():
        found = fails(["probe", "ProbeTest-v0", "--out", str(tmp_path / place)], capsys)
        assert "the profiles cannot be written: " in found
        assert why in found
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    out.write_text("mine")
    assert "is not JSON" in fails(["probe", "ProbeTest-v0", "--out", str(out)], capsys)
    assert out.read_text() == "mine"
    save(out, [], "another")
    assert "another machine" in fails(["probe", "ProbeTest-v0", "--out", str(out)], capsys)


@pytest.mark.slow
def test_the_policy_that_is_measured_is_the_one_that_a_run_begins_with() -> None:
    asked = ProbeConfig(target="CartPole-v1", policy=True, hidden=(8,), memory_size=5)
    policy = make_plan(asked).policy
    assert isinstance(policy, RecurrentPolicy)
    assert policy.memory_size == 10
    assert make_plan(ProbeConfig(target="CartPole-v1")).policy is None


def test_a_simulator_that_breaks_while_it_is_measured_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ["--env-kwargs", "faults", "{7: 'nan'}", "length", "50"]
    found = fails(["probe", "ProbeTest-v0", *broken, "--out", str(tmp_path / "p.json")], capsys, status=1)
    assert "NaN" in found
    assert not list(tmp_path.iterdir())


def test_a_profile_that_is_none_is_said_before_a_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--profile", str(tmp_path / "none.json"), "--run-dir", str(tmp_path / "run")]
    assert "none.json: the profiles cannot be read" in fails(["train", "--env", "ProbeTest-v0", *args], capsys)
    assert not list(tmp_path.iterdir())


def test_options_of_environments_are_refused_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = ["--horizon 0", "--host thread", "--policy", "--env-kwargs a 1", "--hidden 8 8", "--memory-size 0"]
    for option in map(str.split, options):
        found = fails(["probe", str(tmp_path), *option], capsys)
        assert f"{option[0]} is not for a run, and {tmp_path} is one" in found
    assert "is not what `ebrl train` wrote" in fails(["probe", str(tmp_path)], capsys)


# What the twin reads.


def measured(path: Path, **changes: Any) -> Path:
    rng = np.random.default_rng(0)
    step, reset, gen = StageProfile("step", "envs"), StageProfile("reset", "envs"), StageProfile("gen", "gen")
    step.latency.extend((0.02 * rng.lognormal(-0.125, 0.5, 512)).tolist())
    reset.latency.extend([0.3] * 50)
    step.num, reset.num = 4000, 40
    for n in (1, 8, 4, 16, 2) * 9:
        gen.observe(n, line(n))
    save(path, [stage for stage in (step, reset, gen) if changes.get(stage.name, True)], "16 cores")
    return path


def test_the_twin_reads_a_file(tmp_path: Path) -> None:
    workload = load_probed(measured(tmp_path / "p.json"), 8, chunk=4)
    simulator, policy = workload.simulator, workload.policy
    assert simulator.step_s == pytest.approx(0.02, rel=0.05)
    assert simulator.step_cv == pytest.approx(0.53, abs=0.08)
    assert (simulator.reset_s, simulator.reset_cv, simulator.num_envs) == pytest.approx((0.3, 0.0, 8))
    assert (simulator.shortest_episode, simulator.horizon, simulator.mean_episode) == (50, 150, 100)
    assert (policy.fixed_s, policy.per_sample_s, policy.chunk) == pytest.approx((A_S, B_S, 4))
    assert workload.training is None
    assert workload.machine.num_cores == LocalMachine().num_cores
    assert workload.sources["simulator.step_s"] == "measured on 16 cores"
    assert load_probed(measured(tmp_path / "q.json", reset=False), 8).simulator.reset_s == 0.0
    other = StageRecord("gen", "scores", (FitRecord(1.0, 9.0, 9.0, 9.0),), 9.0, (9.0, 9.0))
    save(tmp_path / "p.json", [other, *load(tmp_path / "p.json").stages])
    assert load_probed(tmp_path / "p.json", 8).policy.fixed_s == policy.fixed_s


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("step", "knows no simulator: measure one with `ebrl probe ENV --out "),
        ("gen", "knows no policy: measure that of a run with `ebrl probe FOLDER --out "),
    ],
)
def test_what_a_file_lacks_is_said_with_the_way_to_get_it(missing: str, words: str, tmp_path: Path) -> None:
    path = measured(tmp_path / "p.json", **{missing: False})
    with pytest.raises(ConfigError) as caught:
        load_probed(path, 8)
    assert str(caught.value).startswith(f"{path} {words}")


@pytest.mark.slow
@pytest.mark.blocks("workloads are read where they are run")
def test_the_twin_compares_schedulers_on_a_file(tmp_path: Path) -> None:
    path = str(measured(tmp_path / "p.json"))
    result = suite(Ask(0, smoke=True, schedulers=("wait-num:2",), profile=path, num_envs=4))
    assert result.checks == []
    runs = result.data["runs"]
    assert {"ebrl", "greedy", "lockstep", "fixed:1", "fixed:4", "wait-num:2"} <= runs.keys()
    assert all(0.2 < run["of_bound"] < 1.5 for run in runs.values())
    assert [line.split()[0] for line in result.lines[2:]] == ["scheduler", *runs]
