"""Meta-World in lanes and processes: bit for bit what a sequential loop gives."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from ebrl.core.errors import ConfigError, UnknownEnv
from ebrl.core.machine import LocalMachine
from ebrl.core.records import ArraySpec, EnvSpec
from ebrl.core.scope import finish
from ebrl.sim.hosts import SimHost, ThreadHost
from ebrl.sim.process import ProcessHost
from ebrl.sim.simulator import Simulator
from ebrl.sim.spec import env_spec, env_specs
from ebrl.sim.tasks import as_specs

pytest.importorskip("metaworld")
from metaworld.env_dict import MT10_V3

pytestmark = [pytest.mark.sims, pytest.mark.slow]

EPISODES = (3, 4, 3)  # seeds; the first again at the end, after another one
STEPS = 15


@pytest.fixture(scope="module")
def spec() -> EnvSpec:
    return env_spec("Meta-World/MT1", env_name="reach-v3", horizon=2 * STEPS, action_repeat=2)


def actions(seed: int) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (STEPS, 4)).astype(np.float32)


def sequential(spec: EnvSpec) -> list[Any]:
    sim = Simulator(spec)
    trace: list[Any] = []
    for seed in EPISODES:
        obs: Any = sim.reset(seed)[0]
        trace.append(obs["state"].tobytes())
        for action in actions(seed):
            result = sim.step(action)
            obs = result.obs
            trace += [obs["state"].tobytes(), result.rewards, result.truncated, result.info["success"]]
    sim.close()
    return trace


async def in_host(host: SimHost) -> list[list[Any]]:
    loop = asyncio.get_running_loop()

    async def one(slot: Any) -> list[Any]:
        trace: list[Any] = []
        for seed in EPISODES:
            started: asyncio.Future[Any] = loop.create_future()
            slot.reset(started, seed)
            trace.append((await started)[0]["state"].tobytes())
            for action in actions(seed):
                stepped: asyncio.Future[Any] = loop.create_future()
                slot.step(stepped, action)
                result = await stepped
                trace += [result.obs["state"].tobytes(), result.rewards, result.truncated, result.info["success"]]
        return trace

    return list(await asyncio.gather(*(one(slot) for slot in host.slots)))


def test_lanes_and_processes_equal_a_sequential_loop(spec: EnvSpec) -> None:
    expected = sequential(spec)

    async def main() -> None:
        machine = LocalMachine()
        hosts: list[SimHost] = [ThreadHost([spec] * 4, machine, None, 4)]
        hosts += [ProcessHost([spec] * 2, machine, None, f"host-{index}") for index in range(2)]
        try:
            await asyncio.gather(*(host.open() for host in hosts))
            for traces in await asyncio.gather(*(in_host(host) for host in hosts)):
                assert all(trace == expected for trace in traces)
        finally:
            for host in hosts:
                assert await finish(host.aclose(5.0), "close") == []
            await machine.aclose(deadline_s=1.0)

    asyncio.run(main())
    per_episode = 1 + 4 * STEPS
    assert expected[:per_episode] == expected[2 * per_episode :]
    assert expected[:per_episode] != expected[per_episode : 2 * per_episode]


def test_spec(spec: EnvSpec) -> None:
    assert (spec.id, spec.task) == ("Meta-World/MT1:reach-v3", "reach-v3")
    assert (spec.host, spec.horizon) == ("process", 2 * STEPS)
    assert spec.observation == {"state": ArraySpec((39,), "float32")}
    assert spec.action == ArraySpec((4,), "float32")
    assert "success" in spec.info_keys


def test_building_leaves_the_global_generator_alone(spec: EnvSpec) -> None:
    before = np.random.get_state(legacy=False)
    sim = Simulator(spec)
    sim.reset(0)
    assert str(np.random.get_state(legacy=False)) == str(before)
    sim.close()


def test_whole_episode_ends_by_truncation_and_success_is_a_bool() -> None:
    spec = env_spec("Meta-World/MT1", env_name="reach-v3", host="thread")
    assert (spec.horizon, spec.host) == (500, "thread")
    sim = Simulator(spec)
    for _ in range(2):
        sim.reset(1)
        result = sim.step(np.zeros((600, 4), np.float32))
        assert (result.num_steps, result.terminated, result.truncated) == (500, False, True)
        assert type(result.info["success"]) is bool
    sim.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Meta-World/MT1", {"env_name": "reach-v2"}, "no environment 'reach-v2'; nearest: reach-v3"),
        ("Meta-World/MT7", {}, "nearest: Meta-World/MT1"),
        ("MT10", {}, r'env_specs\("Meta-World/MT10"\)'),
        ("reach-v3", {}, 'nearest: Meta-World/MT1 with env_name="reach-v3"'),
    ],
)
def test_unknown_tasks(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UnknownEnv, match=message):
        env_spec(name, **options)  # type: ignore[arg-type]


def test_options_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="needs a task"):
        env_spec("Meta-World/MT1")
    with pytest.raises(ConfigError, match="horizon must be no more, got 501"):
        env_spec("Meta-World/MT1", env_name="reach-v3", horizon=501)
    with pytest.raises(ConfigError, match=r'Meta-World/MT10 has 10 tasks: env_specs\("Meta-World/MT10"\)'):
        env_spec("Meta-World/MT10")
    with pytest.raises(ConfigError, match="takes no env_name"):
        env_specs("Meta-World/MT10", env_name="reach-v3")
    with pytest.raises(UnknownEnv, match="nearest: "):
        env_specs("Meta-World/MT11")


def test_mt10_is_ten_tasks_of_one_form_that_are_told_apart_by_a_one_hot_vector() -> None:
    specs = env_specs("Meta-World/MT10", horizon=20, memory_mib=7)
    assert [spec.task for spec in specs] == list(MT10_V3)
    assert as_specs(specs) == specs
    assert len({spec.id for spec in specs}) == 10
    for index in (0, 7):
        spec = specs[index]
        assert (spec.observation, spec.horizon, spec.host, spec.memory_mib) == (
            {"state": ArraySpec((49,), "float32")}, 20, "process", 7
        )  # fmt: skip
        sim, alone = Simulator(spec), Simulator(env_spec("Meta-World/MT1", env_name=spec.task, horizon=20))
        zero = np.zeros((1, 4), np.float32)
        seen: list[Any] = [sim.reset(3)[0], sim.step(zero).obs]
        parts: list[Any] = [alone.reset(3)[0], alone.step(zero).obs]
        for obs, part in zip(seen, parts, strict=True):
            expected = np.concatenate([part["state"], np.eye(10, dtype=np.float32)[index]])
            np.testing.assert_array_equal(obs["state"], expected)
        sim.close()
        alone.close()


def test_one_environment_is_a_benchmark_of_one_task(spec: EnvSpec) -> None:
    (found,) = env_specs("Meta-World/MT1", env_name="reach-v3", horizon=2 * STEPS, action_repeat=2)
    assert (found.id, found.task, found.observation) == (spec.id, spec.task, spec.observation)
