"""The profiles of the twin: all there, all with sources, refused with one clear line, and bounded as by hand."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from bench.loading import SCHEMA, load_convergence, load_pair, load_w, pairs
from bench.probed import simulator
from bench.profiles import PROFILES, Within, names, rules
from bench.workload import (
    MachineProfile,
    PolicyProfile,
    SimulatorProfile,
    TrainingProfile,
    Workload,
    bound,
    limits,
    speedup,
)
from ebrl.core.errors import ConfigError
from ebrl.core.profile import StageProfile, StageRecord

ALL_W = ["W1", "W2", "W3", "W4", "W5a", "W5b"]
MACHINES = ["a100", "h200", "rtx4090"]
EVERY = [(*pair, machine) for pair in pairs() for machine in MACHINES]
Law = Literal["uniform", "success"]
Damage = Callable[[dict[str, Any]], object]


def test_what_there_is() -> None:
    assert names("simulators") == ["libero", "maniskill", "metaworld", "robocasa"]
    assert names("policies") == ["gr00t", "openvla", "openvla-oft", "pi05"]
    assert names("machines") == MACHINES
    assert names("w") == ALL_W
    assert names("convergence") == ["libero", "long-tail", "robocasa", "train-heavy"]
    assert len(pairs()) == 16
    assert {path.name for path in PROFILES.iterdir() if path.is_dir()} - {"__pycache__"} == set(SCHEMA)


@pytest.mark.parametrize(("simulator", "policy", "machine"), EVERY)
def test_every_pair_loads_with_a_source_for_every_number(simulator: str, policy: str, machine: str) -> None:
    workload = load_pair(simulator, policy, machine)
    assert workload.training is not None
    numbers = {
        f"{section}.{name}": getattr(record, name)
        for section, record in vars(workload).items()
        if isinstance(record, SimulatorProfile | PolicyProfile | TrainingProfile | MachineProfile)
        for name, rule in rules(type(record)).items()
        if isinstance(rule, Within)
    }
    assert workload.numbers == numbers
    assert set(workload.assumed()) < set(numbers)
    for path, source in workload.sources.items():
        assert "\n" not in source
        assert "/work" not in source
        assert (path in workload.assumed()) == bool(re.match("assumed: .{8}", source))
    limit = limits(workload)
    assert 0 < bound(workload) <= min(limit.simulation, limit.generation, limit.latency)
    assert 0 < limit.training < math.inf


@pytest.mark.parametrize(("simulator", "policy", "machine"), EVERY)
def test_every_assumed_number_can_be_halved_and_doubled(simulator: str, policy: str, machine: str) -> None:
    workload = load_pair(simulator, policy, machine)
    for path in workload.assumed():
        for factor in (0.5, 2.0):
            scaled = workload.scaled({path: factor})
            assert {key for key, value in scaled.numbers.items() if value != workload.numbers[key]} <= {path}
            assert bound(scaled) > 0


def test_the_pairs_follow_the_published_settings() -> None:
    settings = {
        (simulator, policy): (w.simulator.num_envs, w.simulator.horizon, w.policy.chunk, w.batch_size)
        for simulator, policy in pairs()
        for w in [load_pair(simulator, policy, "h200")]
    }
    assert settings["libero", "pi05"] == (64, 240, 5, 64 * 48)
    assert settings["libero", "openvla-oft"] == (64, 240, 8, 64 * 30)
    assert settings["robocasa", "gr00t"] == (160, 320, 10, 160 * 32)
    assert settings["maniskill", "openvla"] == (320, 80, 1, 320 * 80)
    assert settings["metaworld", "openvla-oft"] == (64, 100, 8, 64 * 13)


def test_the_laws_of_the_policies_are_the_published_ones() -> None:
    rows = 7
    laws = {policy: load_pair("libero", policy, "h200").generation_s(rows) for policy in names("policies")}
    assert laws["pi05"] == pytest.approx(0.012 + 0.006 * rows)
    assert laws["gr00t"] == pytest.approx(0.030 + 0.012 * rows)
    on_a100 = {policy: load_pair("libero", policy, "a100").generation_s(1) for policy in names("policies")}
    assert on_a100["openvla"] == pytest.approx(0.240, rel=0.01)
    assert on_a100["openvla-oft"] == pytest.approx(0.073, rel=0.01)


def test_the_w_numbers_are_those_of_the_comparison_with_peers() -> None:
    table = {}
    for name in ALL_W:
        w = load_w(name, 64)
        s = w.simulator
        assert (s.shortest_episode, s.horizon, s.mean_episode) == (25, 75, 50)
        assert (s.num_envs, w.num_units, w.machine.num_cores, w.policy.chunk) == (64, 64, 64, 1)
        assert (w.training, w.batch_size, w.update_s(), s.calm_factor) == (None, 0, 0.0, 1.0)
        assert not w.assumed()
        table[name] = s.step_s, s.step_cv, s.reset_s, w.policy.fixed_s, w.policy.per_sample_s, round(bound(w))
    assert table == {
        "W1": (0.020, 0.0, 0.0, 0.002, 0.00002, 2906),
        "W2": (0.020, 0.5, 0.0, 0.002, 0.00002, 2906),
        "W3": (0.020, 1.5, 0.0, 0.002, 0.00002, 2906),
        "W4": (0.010, 0.0, 0.5, 0.002, 0.00002, 2906),
        "W5a": (0.005, 0.5, 0.0, 0.020, 0.0001, 2424),
        "W5b": (0.020, 0.5, 0.0, 0.002, 0.0004, 2319),
    }


def made(**changes: Any) -> Workload:
    """Two cores and ten environments: 10 ms a step, a reset of 1 s every 50 steps, chunks of 4."""
    base = load_w("W1", 10)
    simulator = replace(base.simulator, step_s=0.01, reset_s=1.0, **changes)
    policy = replace(base.policy, chunk=4, fixed_s=0.1, per_sample_s=0.01)
    training = TrainingProfile(samples_per_s=50.0, epochs=2, rollout_epochs=1, linearity=1.0, bandwidth=0.4)
    machine = replace(base.machine, num_cores=2, generation_speed=0.5, training_speed=0.2, memory_bandwidth=0.25)
    return replace(base, simulator=simulator, policy=policy, training=training, machine=machine)


@pytest.mark.parametrize("name", ["libero", "robocasa"])
def test_convergence_profiles_of_simulators_are_the_numbers_of_the_pair(name: str) -> None:
    workload, pair = load_convergence(name), load_pair(name, "pi05", "h200")
    own = {path: number for path, number in workload.numbers.items() if path != "simulator.num_envs"}
    assert own == {path: pair.numbers[path] for path in own}
    assert {path: workload.sources[path] for path in own} == {path: pair.sources[path] for path in own}
    assert workload.num_units == workload.machine.num_cores == 16
    assert workload.generation_s(10) == pytest.approx(pair.generation_s(10))


@pytest.mark.parametrize(("name", "batch_s"), [("long-tail", 6.0), ("train-heavy", 15.0)])
def test_convergence_profiles_of_chunks_are_for_batches_of_512(name: str, batch_s: float) -> None:
    workload = load_convergence(name)
    assert workload.training is not None
    assert workload.num_units == workload.machine.num_cores == 32
    assert 512 * workload.training.epochs / workload.training.samples_per_s == pytest.approx(batch_s, rel=1e-4)


def test_limits_by_hand() -> None:
    limit = limits(made())
    assert limit.simulation == pytest.approx(2 * 4 / (4 * (0.01 + 1.0 / 50)))
    assert limit.generation == pytest.approx(10 * 4 / ((0.1 + 0.01 * 10) / 0.5))
    assert limit.latency == pytest.approx(10 * 4 / (0.12 + (0.1 + 0.01) / 0.5))
    assert limit.training == pytest.approx(4 * 50 * 0.2 / 2)
    assert bound(made()) == pytest.approx(2 * 4 / 0.12)


def test_limits_of_a_batched_simulator_by_hand() -> None:
    batched = made(kind="gpu-batched", slots_per_unit=5, slot_s=0.002, sm_share=0.8)
    limit = limits(batched)
    decision_s = 4 * (0.01 + 5 * 0.002 + 1.0 / 50)
    assert batched.num_units == 2
    assert batched.decision_s == pytest.approx(decision_s)
    assert limit.simulation == pytest.approx(5 * 4 / 0.8 / decision_s)
    assert limit.latency == pytest.approx(10 * 4 / (decision_s + (0.1 + 0.05) / 0.5))
    slow = replace(batched, machine=replace(batched.machine, simulation_speed=0.5))
    assert limits(slow).simulation == pytest.approx(limit.simulation / 2)


def test_times_on_a_share_of_the_machine() -> None:
    workload = made()
    assert speedup(1.0, 0.5) == 1.0
    assert speedup(0.25, 0.5) == pytest.approx(0.5)
    assert speedup(0.25, 1000) == pytest.approx(0.25, rel=0.001)
    assert workload.batch_size == 10 * 19
    assert workload.generation_s(1, share=0.5) == pytest.approx(0.11 / 0.5 / (2 / 3))
    assert workload.update_s(share=0.5) == pytest.approx(190 * 2 / 50 / 0.2 / (2 / 3))
    assert workload.bandwidth("training") == pytest.approx(0.4 * 0.2 / 0.25)
    assert workload.bandwidth("generation") == 0.0
    fast = replace(workload, machine=replace(workload.machine, core_speed=2.0))
    assert (fast.call_s, fast.reset_s) == (0.005, 0.5)


@pytest.mark.parametrize("changes", [{}, {"success_rate": 0.0}, {"success_rate": 0.99}, {"shortest_episode": 240}])
@pytest.mark.parametrize("law", ["uniform", "success"])
def test_the_mean_episode_is_the_mean_of_the_drawn_ones(
    law: Literal["uniform", "success"], changes: dict[str, Any]
) -> None:
    simulator = replace(load_pair("libero", "pi05", "h200").simulator, episode_law=law, **changes)
    rng = np.random.default_rng(0)
    lengths = np.array([simulator.draw_episode(rng) for _ in range(4000)])
    assert lengths.min() >= simulator.shortest_episode
    assert lengths.max() <= simulator.horizon
    assert lengths.mean() == pytest.approx(simulator.mean_episode, rel=0.02)
    if law == "success" and simulator.shortest_episode < simulator.horizon:
        early = float(np.mean(lengths < simulator.horizon))
        assert early == pytest.approx(simulator.success_rate, abs=0.04)


def test_bursts_and_stalls_leave_the_mean_as_it_is() -> None:
    simulator = load_pair("libero", "pi05", "h200").simulator
    calm = simulator.calm_factor
    burst = (1 - simulator.burst_share) + simulator.burst_share * simulator.burst_factor
    stall = (1 - simulator.stall_probability) + simulator.stall_probability * simulator.stall_factor
    assert calm * burst * stall == pytest.approx(1.0)
    assert calm < 0.9


def test_scaled_changes_exactly_that_number() -> None:
    workload = load_pair("maniskill", "pi05", "h200")
    scaled = workload.scaled({"policy.fixed_s": 2.0})
    assert scaled == replace(workload, policy=replace(workload.policy, fixed_s=0.024))
    assert scaled.sources == workload.sources
    both = workload.scaled({"policy.fixed_s": 0.5, "policy.per_sample_s": 2.0, "machine.num_cores": 2.0})
    assert (both.policy.fixed_s, both.policy.per_sample_s, both.machine.num_cores) == (0.006, 0.012, 32)
    assert workload.scaled({}) == workload


@pytest.mark.parametrize(
    ("path", "factor", "value"),
    [
        ("simulator.success_rate", 2.0, 0.99),
        ("simulator.sm_share", 4.0, 1.0),
        ("simulator.shortest_episode", 0.49, 12),
        ("training.rollout_epochs", 0.5, 1),
        ("simulator.burst_factor", 0.5, 1.0),
    ],
)
def test_scaled_stays_in_the_range_of_the_field(path: str, factor: float, value: float) -> None:
    scaled = load_pair("maniskill", "pi05", "h200").scaled({path: factor}).numbers[path]
    assert scaled == value
    assert type(scaled) is type(value)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"policy.speed": 2.0}, "no number 'policy.speed'"),
        ({"simulator.kind": 2.0}, "no number 'simulator.kind'"),
        ({"policy.fixed_s": 0.0}, "policy.fixed_s cannot be multiplied by 0"),
        ({"policy.fixed_s": math.inf}, "policy.fixed_s cannot be multiplied by inf"),
        ({"simulator.shortest_episode": 10.0}, "shortest_episode is 720; allowed: at most the horizon, 240"),
        ({"simulator.cores_per_unit": 17.0}, "cores_per_unit is 17; allowed: at most the 16 of the machine"),
    ],
)
def test_scaled_refuses_what_makes_no_sense(factors: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_pair("libero", "pi05", "h200").scaled(factors)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    loads: list[Callable[[], Workload]] = [
        lambda: load_pair("gazebo", "pi05", "h200"),
        lambda: load_pair("libero", "../policies/pi05", "h200"),
        lambda: load_pair("libero", "pi05", "H200"),
        lambda: load_w("W6", 4),
    ]
    for load in loads:
        with pytest.raises(ConfigError, match=r"^no profile '.*' in \w+; there are: \w+, "):
            load()


def test_there_must_be_environments() -> None:
    with pytest.raises(ConfigError, match=r"^w/W1.json: simulator.num_envs is 0; allowed: at least 1$"):
        load_w("W1", 0)


def fields_in(section: str, name: str, **entry: Any) -> Damage:
    return lambda raw: raw[section].update({name: {"value": 1.0, "source": "a source of this number"} | entry})


STEP = "simulators/libero.json: simulator.step_s"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no section": (lambda raw: raw.pop("simulator"), "simulators/libero.json has no field 'simulator'; needed: sim"),
    "other section": (lambda raw: raw.update(policy={}), "simulators/libero.json has an unknown field 'policy'; allo"),
    "section is a list": (lambda raw: raw.update(simulator=[]), "simulators/libero.json: simulator is []; needed: an"),
    "no field": (lambda raw: raw["simulator"].pop("step_s"), "json: simulator has no field 'step_s'; needed: kind, n"),
    "typing error": (fields_in("simulator", "step_ms"), "json: simulator has an unknown field 'step_ms'; allowed: ki"),
    "bare number": (lambda raw: raw["simulator"].update(step_s=0.02), f"{STEP} is 0.02; needed: an object with value"),
    "no source": (lambda raw: raw["simulator"]["step_s"].pop("source"), f"{STEP} has no field 'source'; needed: val"),
    "a third key": (fields_in("simulator", "step_s", unit="ms"), f"{STEP} has an unknown field 'unit'; allowed: val"),
    "text": (fields_in("simulator", "step_s", value="0.02"), f"{STEP} is '0.02'; allowed: from 1e-06 to 3600, in s"),
    "null": (fields_in("simulator", "step_s", value=None), f"{STEP} is None; allowed: from 1e-06 to 3600, in s"),
    "bool": (fields_in("simulator", "step_s", value=True), f"{STEP} is True; allowed: from 1e-06 to 3600, in s"),
    "nan": (fields_in("simulator", "step_s", value=math.nan), f"{STEP} is nan; allowed: from 1e-06 to 3600, in s"),
    "negative": (fields_in("simulator", "step_s", value=-1), f"{STEP} is -1; allowed: from 1e-06 to 3600, in s"),
    "too long": (fields_in("simulator", "step_s", value=4000), f"{STEP} is 4000; allowed: from 1e-06 to 3600, in s"),
    "share": (fields_in("simulator", "burst_share", value=5), "burst_share is 5; allowed: from 0 to 0.5, in 1"),
    "half": (fields_in("simulator", "num_envs", value=1.5), "num_envs is 1.5; allowed: whole numbers from 1 to 1e+06"),
    "whole float": (fields_in("simulator", "num_envs", value=64.0), "num_envs is 64.0; allowed: whole numbers from 1"),
    "empty source": (fields_in("simulator", "step_s", source=""), f"{STEP} has the source ''; needed: one line that"),
    "blank source": (fields_in("simulator", "step_s", source=" " * 20), f"{STEP} has the source '     "),
    "two lines": (fields_in("simulator", "step_s", source="first line\nsecond"), f"{STEP} has the source 'first line"),
    "source number": (fields_in("simulator", "step_s", source=7), f"{STEP} has the source 7; needed: one line that"),
    "no reason": (fields_in("simulator", "step_s", source="assumed:"), f"{STEP} has the source 'assumed:'; needed: 'a"),
    "odd case": (fields_in("simulator", "step_s", source="Assumed, as I say so"), "needed: 'assumed: ' and the reas"),
    "kind": (lambda raw: raw["simulator"].update(kind="tpu"), "simulator.kind is 'tpu'; allowed: cpu, gpu-batched"),
    "kind list": (lambda raw: raw["simulator"].update(kind=["cpu"]), "simulator.kind is ['cpu']; allowed: cpu, gpu-ba"),
    "short horizon": (fields_in("simulator", "horizon", value=50), "simulator.shortest_episode is 72; allowed: at mos"),
    "slots": (fields_in("simulator", "slots_per_unit", value=7), "simulator.num_envs is 64; allowed: a multiple of sl"),
    "cpu slots": (fields_in("simulator", "slots_per_unit", value=8), "slots_per_unit is 8; allowed for kind cpu: 1"),
    "cpu share": (fields_in("simulator", "sm_share", value=0.5), "simulator.sm_share is 0.5; allowed for kind cpu: 0"),
    "gpu share": (lambda raw: raw["simulator"].update(kind="gpu-batched"), "allowed for kind gpu-batched: above 0"),
    "cores": (fields_in("simulator", "cores_per_unit", value=17), "cores_per_unit is 17; allowed: at most the 16 of"),
}  # fmt: skip


def copy(folder: Path) -> Path:
    return Path(shutil.copytree(PROFILES, folder / "profiles"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_gives_one_line_that_names_file_field_and_what_is_allowed(damage: str, tmp_path: Path) -> None:
    folder = copy(tmp_path)
    path = folder / "simulators" / "libero.json"
    break_it, message = DAMAGES[damage]
    raw = json.loads(path.read_text())
    break_it(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as caught:
        load_pair("libero", "pi05", "h200", folder)
    assert message in str(caught.value)
    assert str(caught.value).startswith("simulators/libero.json")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "needed: an object with simulator, policy"),
        ('{"simulator": {},', "Expecting property name"),
        ('{"simulator": {}, "simulator": {}}', "an object has 'simulator' twice"),
        ("\udcff", "invalid start byte"),
    ],
)
def test_what_is_no_json_is_said_to_be_none(text: str, message: str, tmp_path: Path) -> None:
    folder = copy(tmp_path)
    (folder / "w" / "W1.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_w("W1", 4, folder)
    assert str(caught.value).startswith("w/W1.json ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", SCHEMA)
def test_the_tables_of_the_readme_are_the_schema(kind: str) -> None:
    text = (PROFILES / "README.md").read_text()
    chapter = text.split(f"## `{kind}/*.json`")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (\S+) \| (.+?) \| (.+?) \|$", chapter, re.MULTILINE)
    documented = {path: (unit, allowed) for path, unit, allowed, _ in rows}
    assert len(documented) == len(rows)
    schema = {f"{section}.{name}": rule for section, fields in SCHEMA[kind].items() for name, rule in fields.items()}
    assert documented == {
        path: (rule.unit, str(rule)) if isinstance(rule, Within) else ("-", ", ".join(rule))
        for path, rule in schema.items()
    }
    in_files = {
        f"{section}.{name}"
        for path in (PROFILES / kind).glob("*.json")
        for section, fields in json.loads(path.read_text()).items()
        for name in fields
    }
    assert in_files == set(documented)


def known(seconds: Iterable[float]) -> StageRecord:
    profile = StageProfile("step", "envs", num_samples=20_000)
    profile.latency.extend(seconds)
    return profile.record()


@pytest.mark.parametrize(("true", "found"), [(0.5, 0.48), (1.0, 0.94), (2.0, 1.6)])
def test_the_variation_of_what_was_measured_lacks_its_tail(true: float, found: float) -> None:
    sigma = math.sqrt(math.log1p(true**2))
    normal = np.random.default_rng(0).standard_normal(20_000)
    record = known(np.exp(sigma * normal - sigma**2 / 2).tolist())
    assert simulator(record, None)["step_cv"] == pytest.approx(found, abs=0.06)
    assert simulator(record, None)["step_s"] == pytest.approx(1.0, rel=0.03)


def test_rare_stalls_are_in_the_mean_and_hardly_in_the_variation() -> None:
    record = known(([1.0] * 199 + [50.0]) * 100)
    assert simulator(record, None)["step_s"] == pytest.approx(1.245)
    assert simulator(record, None)["step_cv"] == pytest.approx(1.0, abs=0.1), "and not 2.8"
