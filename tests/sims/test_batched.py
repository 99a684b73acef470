"""Batched simulators for real: EnvPool in threads of its own, and ManiSkill's interface with the one slot of a CPU.

ManiSkill on a GPU is not exercised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ebrl
from ebrl.core.errors import ConfigError, UnknownEnv
from ebrl.core.run import run
from ebrl.sim.spec import env_spec
from ebrl.sim.vector_check import check_vector_env
from ebrl.sim.vector_simulator import VectorSimulator

pytestmark = [
    pytest.mark.sims,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaks("simulators keep files, devices and threads for as long as the process lives"),
    pytest.mark.blocks("simulators import, read and print what they like"),
    pytest.mark.hogs("imports of simulators hold the interpreter lock"),
]
KINDS: dict[str, dict[str, Any]] = {
    "EnvPool/HalfCheetah-v5": {"num_slots": 4, "num_threads": 1},
    "EnvPool/CartPole-v1": {"num_slots": 3, "num_threads": 1},
    "ManiSkill/PickCube-v1": {"num_slots": 1, "sim_backend": "physx_cpu"},
}
every = pytest.mark.parametrize("name", KINDS)


def needs(name: str) -> None:
    pytest.importorskip({"EnvPool": "envpool", "ManiSkill": "mani_skill"}[name.partition("/")[0]])


@every
def test_it_passes_its_checker_and_trains(name: str) -> None:
    needs(name)
    spec = env_spec(name, horizon=6, **KINDS[name])
    assert (spec.num_slots, spec.slot_seeds, spec.host) == (KINDS[name]["num_slots"], False, "thread")
    check_vector_env(spec)
    kind = ebrl.GaussianPolicy if spec.action.num_values is None else ebrl.CategoricalPolicy
    policy = kind.for_spec(spec)
    learner = ebrl.PPO(policy, ebrl.PPOConfig(batch_size=24, minibatch_size=12))

    async def main() -> list[int]:
        async with ebrl.Runtime(seed=0) as rt:
            gen = rt.start(ebrl.Generator(policy))
            envs = rt.start(ebrl.VectorGroup(spec, actor=gen))
            done = [report.num_decisions async for report in rt.start(ebrl.Trainer(envs, learner, updates=2))]
            assert envs.admission.ledger().balanced
        return done

    assert run(main()) == [24, 24]


def test_a_pool_is_seeded_once_and_resets_by_mask() -> None:
    needs("EnvPool/")
    spec = env_spec("EnvPool/CartPole-v1", num_slots=3, num_threads=1)
    traces = []
    for seed in (1, 1, 2):
        sim = VectorSimulator(spec)
        trace = [sim.reset({0: seed, 1: 0, 2: 0})[0]]
        assert len({row.tobytes() for row in np.asarray(trace[0])}) == 3
        while True:
            result = sim.step(np.zeros(3, np.int64))
            trace.append(result.obs)
            if result.terminated.any():
                break
        slot = int(result.terminated.argmax())
        again = np.asarray(sim.reset({slot: 9})[0])
        assert abs(again[slot]).max() < 0.06  # where CartPole begins
        assert abs(np.asarray(result.obs)[slot, 2]) > 0.2  # where it fell
        traces.append(b"".join(np.asarray(seen).tobytes() for seen in trace))
        sim.close()
    assert traces[0] == traces[1] != traces[2]


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("EnvPool/CartPole-v1", {}, ConfigError, r"say of how many slots, env_spec\(..., num_slots=8\)"),
        ("EnvPool/CartPoel-v1", {"num_slots": 2}, UnknownEnv, "nearest: EnvPool/CartPole"),
        ("EnvPool/CartPole-v1", {"num_slots": 2, "batch_size": 1}, ConfigError, "batch_size is given by num_slots"),
        ("EnvPool/CartPole-v1", {"num_slots": 2, "seed": 1}, ConfigError, "seed is given by Runtime"),
    ],
)
def test_wrong_names(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    needs(name)
    with pytest.raises(error, match=message):
        env_spec(name, **options)
