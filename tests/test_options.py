"""Options of another type, range or kind are refused in one line that names them, before anything runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebrl.core.errors import Closed, ConfigError, PolicyError, ProgramError
from ebrl.core.records import GroupRule, TrainBatch
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.cpu import copy_weights
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.gen.policies import CategoricalPolicy, GaussianPolicy, RecurrentPolicy, default_policy
from ebrl.replayer import replay
from ebrl.sim.group import EnvGroup
from ebrl.train.checkpoint import Checkpointer
from ebrl.train.evaluate import evaluate
from ebrl.train.grpo import GRPO, GRPOConfig
from ebrl.train.ppo import PPO, PPOConfig
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner, VersionedPolicy, scripted_spec, the_failure, virtually

SPEC = scripted_spec(length=5)
WHOLE, NUMBER, FLAG = "must be a whole number", "must be a number", "must be True or False"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 128.0}, WHOLE),
        ({"minibatch_size": 32.0}, WHOLE),
        ({"epochs": 1.5}, WHOLE),
        ({"epochs": True}, WHOLE),
        ({"seed": 1.5}, WHOLE),
        ({"anneal_updates": 2.5}, WHOLE),
        ({"clip_range": "0.2"}, NUMBER),
        ({"clip_range_high": "0.2"}, NUMBER),
        ({"learning_rate": None}, NUMBER),
        ({"gamma": "0.9"}, NUMBER),
        ({"normalize_advantage": "no"}, FLAG),
    ],
)
def test_options_of_recipes(options: dict[str, Any], words: str) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError) as caught:
        PPOConfig(**options)
    assert str(caught.value) == f"PPOConfig.{name}={value!r}: {words}"


def test_numbers_of_any_kind_are_numbers() -> None:
    sizes: dict[str, Any] = {"batch_size": np.int64(128), "minibatch_size": np.int64(64)}
    options: dict[str, Any] = {**sizes, "clip_range": np.float32(0.1), "learning_rate": 1}
    assert PPOConfig(**options).batch_size == 128


@pytest.mark.parametrize("bounds", [0.5, (0.1,), ("a", "b"), (0.9, 0.1), (-1.0, 0.5)])
def test_bounds_of_success(bounds: Any) -> None:
    with pytest.raises(ConfigError, match=r"success_bounds must be two numbers in 0 \.\. 1, the lower one first, got"):
        GroupRule(success_bounds=bounds)


def learner() -> RecordingLearner:
    return RecordingLearner(VersionedPolicy(SPEC), 8)


def envs(**options: Any) -> EnvGroup:
    return EnvGroup(SPEC, actor=Generator(ScriptedPolicy(SPEC)), **{"count": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": float("nan")}, "updates must be a whole number of at least 1, got nan"),
        ({"updates": 2.5}, "updates must be a whole number of at least 1, got 2.5"),
        ({"updates": "2"}, "updates must be a whole number of at least 1, got '2'"),
        ({"updates": 0}, "updates must be a whole number of at least 1, got 0"),
        ({"max_lag": float("nan")}, "max_lag must be a whole number of at least 0, got nan"),
        ({"max_lag": 0.5}, "max_lag must be a whole number of at least 0, got 0.5"),
        ({"max_lag": -1}, "max_lag must be a whole number of at least 0, got -1"),
        ({"threads": 1.5}, "Trainer.threads must be a whole number of at least 1, got 1.5"),
        ({"sampling": ["quota"]}, "sampling must be one of ('arrival', 'quota', 'weighted') or None, got ['quota']"),
        (
            {"learner": RecordingLearner(VersionedPolicy(SPEC), 2.5)},  # type: ignore[arg-type]
            "RecordingLearner.batch_size must be a whole number of at least 1, got 2.5",
        ),
        (
            {"resume": "runs/x"},
            "resume must be a checkpoint, as Checkpointer(folder).latest() returns, or None: this is a str",
        ),
        (
            {"learner": "PPO"},
            "learner must have update(batch), batch_size and policy, as ebrl.PPO(policy, config) has: this is a str",
        ),
    ],
)
def test_options_of_trainers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(envs(), **{"learner": learner(), "updates": 1, **options})
    assert str(caught.value) == message


def test_a_trainer_wants_an_actor_that_samples() -> None:
    greedy = Generator(ScriptedPolicy(SPEC), deterministic=True, name="judge")
    with pytest.raises(ConfigError) as caught:
        Trainer(EnvGroup(SPEC, actor=greedy, count=2), learner(), updates=1)
    assert str(caught.value) == (
        "judge takes the mode of its policy (deterministic=True), from which nothing is learnt: "
        "train with an EnvGroup whose Generator samples, and evaluate with another"
    )


@virtually
async def test_two_loops_over_one_trainer_are_one_too_many() -> None:
    async with Runtime(VirtualMachine({})) as rt:
        gen = rt.start(Generator(VersionedPolicy(SPEC)))
        group = rt.start(EnvGroup(SPEC, actor=gen, count=2))
        trainer = rt.start(Trainer(group, learner(), updates=2))
        first = asyncio.create_task(anext(trainer))
        await asyncio.sleep(0)
        with pytest.raises(ProgramError, match="two tasks iterate over trainer at once"):
            await anext(trainer)
        assert (await first).update == 1
        assert (await anext(trainer)).update == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "must return metrics by name, {} if it has none: got None"),
        ({"loss": torch.ones(())}, "must return numbers, but metric 'loss' is a Tensor: give float(value)"),
        ({"a": 1, "b": "x"}, "must return numbers, but metric 'b' is a str: give float(value)"),
        ({"a": np.zeros(2)}, "must return numbers, but metric 'a' is a ndarray: give float(value)"),
    ],
)
def test_a_learner_returns_metrics(returned: Any, message: str) -> None:
    class Silent(RecordingLearner):
        def update(self, batch: TrainBatch) -> Any:
            super().update(batch)
            return returned

    async def main() -> None:
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(VersionedPolicy(SPEC)))
            group = rt.start(EnvGroup(SPEC, actor=gen, count=2))
            await anext(rt.start(Trainer(group, Silent(VersionedPolicy(SPEC), 8), updates=2)))

    error = the_failure(main())
    assert isinstance(error, ConfigError)
    assert str(error) == f"Silent.update() {message}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 2.0}, "count must be a whole number of at least 1, got 2.0"),
        ({"count": "2"}, "count must be a whole number of at least 1, got '2'"),
        ({"count": None}, "count must be a whole number of at least 1, got None"),
        ({"group_size": None}, "group_size must be a whole number of at least 1, got None"),
        ({"segment_length": 0}, "segment_length must be a whole number of at least 1, got 0"),
        ({"failures": "drop"}, "failures must be a FailurePolicy, as FailurePolicy(\"drop\"), or None, got 'drop'"),
        ({"failures": 0}, 'failures must be a FailurePolicy, as FailurePolicy("drop"), or None, got 0'),
        ({"group_size": 2.5}, "group_size must be a whole number of at least 1, got 2.5"),
        ({"lanes": 0}, "lanes must be a whole number of at least 1, got 0"),
        ({"host": "proces"}, "host must be one of ('thread', 'process', 'inline', 'auto') or None, got 'proces'"),
        ({"on_resume": "reply"}, "on_resume must be one of ('next', 'replay') or None, got 'reply'"),
        ({"count": 10, "group_size": 4}, "count=10 is no multiple of group_size=4: use count=12"),
    ],
)
def test_options_of_groups(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        envs(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize("spec", ["CartPole-v1", None, [SPEC, "scripted"]])
def test_specs_of_groups(spec: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"spec must be an EnvSpec, as env_spec\(...\) returns, or several of them, got"
    ):
        EnvGroup(spec, actor=Generator(ScriptedPolicy(SPEC)), count=2)


def test_checkpoints_that_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep must be a whole number of at least 1, got 1\.5"):
        Checkpointer(tmp_path, keep=1.5)  # type: ignore[arg-type]


def test_a_recipe_wants_its_own_options() -> None:
    policy = GaussianPolicy.for_spec(SPEC)
    with pytest.raises(ConfigError, match="PPO takes a PPOConfig, got a GRPOConfig"):
        PPO(policy, GRPOConfig())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="GRPO takes a GRPOConfig, got a PPOConfig"):
        GRPO(policy, PPOConfig())  # type: ignore[arg-type]


@virtually
async def test_an_evaluation_needs_a_group_that_runs_and_seeds() -> None:
    with pytest.raises(Closed, match=r"envs was not started: call rt\.start\(envs\) before the evaluation"):
        await evaluate(envs(), [1])
    async with Runtime(VirtualMachine({})) as rt:
        gen = rt.start(Generator(ScriptedPolicy(SPEC)))
        group = rt.start(EnvGroup(SPEC, actor=gen, count=2))
        with pytest.raises(ConfigError, match=r"the seeds of its episodes, not their number: give range\(20\)"):
            await evaluate(group, 20)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"evaluate takes the seeds of its episodes, range\(20\) say, got None"):
            await evaluate(group, None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="evaluate runs the environments of a started EnvGroup, got <ebrl"):
            await evaluate(gen, range(3))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="evaluate needs at least one seed"):
            await evaluate(group, [])
        for seed in (-1, 2**63, 1.5):
            with pytest.raises(ConfigError, match="a seed of an episode must be a whole number from 0 to"):
                await evaluate(group, [seed])  # type: ignore[list-item]
        report = await evaluate(group, np.arange(3))
        assert [episode.seed for episode in report.episodes] == [0, 1, 2]


@pytest.mark.hogs("the first update of a process imports parts of torch")
def test_a_learner_of_another_policy_is_named_by_the_first_parameter() -> None:
    acting, trained = (GaussianPolicy.for_spec(SPEC, hidden=(width,)) for width in (8, 16))
    other = PPO(trained, PPOConfig(batch_size=8, minibatch_size=8))

    async def main() -> None:
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(acting))
            group = rt.start(EnvGroup(SPEC, actor=gen, count=2))
            async for _ in rt.start(Trainer(group, other, updates=2)):
                pass

    error = the_failure(main())
    assert isinstance(error, PolicyError)
    assert "the learner's policy is not of the form of the generator's: " in str(error)
    assert "is of shape (16, 3) there and (8, 3) here; give both the same policy" in str(error)


@pytest.mark.parametrize(
    ("source", "buffer", "words"),
    [
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False), "bias is of shape (2,) there and None here"),
        (torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2), "bias is of shape None there and (2,) here"),
        (torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2, affine=False), "weight is of shape (2,) there and None here"),
    ],
)
def test_weights_of_another_form_are_not_copied(source: torch.nn.Module, buffer: torch.nn.Module, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        copy_weights(source, buffer)
    assert words in str(caught.value)


def test_a_replay_cannot_be_run_by_a_loop(tmp_path: Path) -> None:
    async def main() -> None:
        replay(tmp_path / "events", SPEC, learner())

    with pytest.raises(ConfigError, match=r"an event loop runs here: await asyncio\.to_thread\(ebrl\.replay, log"):
        asyncio.run(main())
    with pytest.raises(ConfigError, match="replay takes the one spec of the recorded run, got a list"):
        replay(tmp_path / "events", [SPEC], learner())  # type: ignore[arg-type]


def test_an_evaluation_in_the_same_run_measures_what_was_published() -> None:
    async def main() -> tuple[int, int]:
        policy = VersionedPolicy(SPEC)
        async with Runtime(VirtualMachine({})) as rt:
            greedy = rt.start(Generator(policy, name="greedy"))
            judges = rt.start(EnvGroup(SPEC, actor=greedy, count=2))
            (before,) = (await evaluate(judges, [0])).episodes
            await greedy.publish(policy)
            (after,) = (await evaluate(judges, [0])).episodes
            return before.version, after.version

    assert run_virtual(main()) == (0, 1)


@pytest.mark.parametrize("make", [CategoricalPolicy.for_spec, RecurrentPolicy.for_spec, default_policy])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 64}, "hidden must be the widths of the hidden layers, as (64, 64), got 64"),
        ({"hidden": "64"}, "hidden must be the widths of the hidden layers, as (64, 64), got '64'"),
        ({"hidden": (0,)}, "a width in hidden must be a whole number of at least 1, got 0"),
        ({"hidden": (8, 2.5)}, "a width in hidden must be a whole number of at least 1, got 2.5"),
        ({"seed": 2**65}, f"seed must be a whole number from 0 to {2**64 - 1}, got {2**65}"),
        ({"seed": 1.5}, f"seed must be a whole number from 0 to {2**64 - 1}, got 1.5"),
        ({"seed": -1}, f"seed must be a whole number from 0 to {2**64 - 1}, got -1"),
    ],
)
def test_options_of_policies(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(scripted_spec(num_actions=3), **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecurrentPolicy.for_spec(SPEC, memory_size=2.5), "memory_size must be a whole number of at least 1"),  # type: ignore[arg-type]
        (lambda: RecurrentPolicy.for_spec(SPEC, memory_size=0), "memory_size must be a whole number of at least 1"),
        (lambda: GaussianPolicy.for_spec(SPEC, horizon=1.5), "horizon must be a whole number of at least 1, got 1.5"),  # type: ignore[arg-type]
        (lambda: GaussianPolicy.for_spec(SPEC, log_std="x"), "log_std must be a finite number, got 'x'"),  # type: ignore[arg-type]
        (lambda: GaussianPolicy.for_spec(SPEC, log_std=float("nan")), "log_std must be a finite number, got nan"),
        (lambda: GaussianPolicy.for_spec([SPEC]), "GaussianPolicy.for_spec takes an EnvSpec"),  # type: ignore[arg-type]
        (lambda: CategoricalPolicy.for_spec([SPEC]), "CategoricalPolicy.for_spec takes an EnvSpec"),  # type: ignore[arg-type]
        (lambda: RecurrentPolicy.for_spec([SPEC]), "RecurrentPolicy.for_spec takes an EnvSpec"),  # type: ignore[arg-type]
        (lambda: default_policy([SPEC]), "default_policy takes an EnvSpec, as env_spec(...) returns"),  # type: ignore[arg-type]
        (lambda: PPO(None, PPOConfig()), "PPO trains a policy that is a torch.nn.Module, as TorchPolicy is, got None"),
        (lambda: GRPO("x", GRPOConfig()), "GRPO trains a policy that is a torch.nn.Module, as TorchPolicy is, got 'x'"),
        (lambda: Generator(None, deterministic="no"), "Generator.deterministic must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: Checkpointer(None), "folder must be a path, got None"),  # type: ignore[arg-type]
        (lambda: Runtime(record=3), "record must be a path, got 3"),  # type: ignore[arg-type]
        (lambda: Runtime(deterministic="no"), "deterministic must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: Runtime(tune=1), "tune must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: replay("x", SPEC, PPO), "learner must have update(batch), batch_size and policy"),  # type: ignore[arg-type]
        (lambda: replay(None, SPEC, learner()), "log must be a path, got None"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
