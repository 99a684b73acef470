"""What a user sees when something goes wrong: one clear line, the place, a clean end, and nothing half-written."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from safetensors.numpy import load_file
from torch import Tensor

from ebrl.cli import main
from ebrl.core.errors import InvalidData, PolicyError
from ebrl.core.protocols import PolicyOut
from ebrl.core.records import EnvSpec, TrainBatch
from ebrl.core.rng import episode_seed
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.context import EnvContext
from ebrl.sim.failures import FailurePolicy
from ebrl.sim.fake import CONSTRUCTION, ScriptedEnv, ScriptedFault
from ebrl.sim.group import EnvGroup, EnvProgram
from ebrl.sim.programs import rollout
from ebrl.train.checkpoint import load
from ebrl.train.trainer import Trainer
from tests.helpers import RecordingLearner, leaves, scripted_spec

SMALL = ["--num-envs", "4", "--ppo.batch-size", "32", "--ppo.minibatch-size", "16", "--ppo.epochs", "1"]


class NanReward(ScriptedEnv):
    """Its fifth reward is not a number."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, float("nan") if self._left == 95 else reward, terminated, truncated, info


class Liar(ScriptedEnv):
    """Declares other observations than it makes."""

    def __init__(self, dtype: str = "float32", extra: int = 1) -> None:
        super().__init__(3, 2)
        self.observation_space = spaces.Box(0, 9, (3 + extra,), np.dtype(dtype).type)


class Picture(ScriptedEnv):
    """Shows what no stock policy reads."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.observation_space = spaces.Box(-9, 9, (3, 4, 4), np.float32)

    def reset(self, **options: Any) -> Any:
        return np.zeros((3, 4, 4), np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros((3, 4, 4), np.float32), 0.0, False, False, {}


@pytest.fixture(autouse=True)
def ids() -> Iterator[None]:
    """Make the environments of this file known to gymnasium."""
    classes = {"Scripted": ScriptedEnv, "NanReward": NanReward, "Liar": Liar, "Picture": Picture}
    for name, env in classes.items():
        gymnasium.register(f"{name}Test-v0", env)  # type: ignore[arg-type]  # a class is a creator too
    yield
    for name in classes:
        del gymnasium.registry[f"{name}Test-v0"]


# On the command line.


class Command:
    """Runs `ebrl` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.folder = folder
        self._capsys = capsys

    def fails(self, *args: str, status: int) -> str:
        """Run ``ebrl train``, and return its one line on stderr."""
        self._capsys.readouterr()
        try:
            found = main(["train", *args, "--run-dir", str(self.folder)])
        except SystemExit as end:
            found = int(end.code or 0)
        lines = self._capsys.readouterr().err.splitlines()
        assert found == status, lines
        assert len(lines) == 1, "\n".join(lines)
        assert lines[0].startswith("error: ")
        return lines[0]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path / "run")


BAD_INPUT: dict[str, tuple[list[str], list[str]]] = {
    "unknown id": (["--env", "CartPole-v9"], ["no environment 'CartPole-v9'", "nearest: CartPole-v"]),
    "unknown Meta-World task": (
        ["--env", "Meta-World/MT1", "--env-kwargs", "env_name", "reech-v3"],
        ["reech-v3", "reach-v3"],
    ),
    "unknown module": (["--env", "no_such_module:Env-v0"], ["no_such_module", "not installed"]),
    "no id": (["--env", ""], ["no environment ''"]),
    "unknown option of the environment": (["--env", "CartPole-v1", "--env-kwargs", "colour", "1"], ["colour"]),
    "discrete observations": (["--env", "FrozenLake-v1"], ["Discrete", "FlattenObservation"]),
    "pictures": (["--env", "PictureTest-v0"], ["(3, 4, 4)", "without cameras", "TorchPolicy that sees"]),
    "other shape": (["--env", "LiarTest-v0"], ["observation", "float32 of shape (4,)", "float32 of shape (3,)"]),
    "other dtype": (
        ["--env", "LiarTest-v0", "--env-kwargs", "dtype", "uint8", "extra", "0"],
        ["observation", "uint8 of shape (3,)", "float32 of shape (3,)"],
    ),
    "environments": (["--env", "CartPole-v1", "--num-envs", "0"], ["--num-envs must be at least 1, got 0"]),
    "horizon": (["--env", "CartPole-v1", "--horizon", "0"], ["horizon", "at least 1, got 0"]),
    "repeat": (["--env", "CartPole-v1", "--action-repeat", "0"], ["action-repeat must be at least 1, got 0"]),
    "lanes": (["--env", "CartPole-v1", "--lanes", "0"], ["lanes must be at least 1, got 0"]),
    "lag": (["--env", "CartPole-v1", "--max-lag", "-1"], ["--max-lag must be at least 0, got -1"]),
    "seed": (["--env", "CartPole-v1", "--seed", "-1"], ["--seed must be at least 0, got -1"]),
    "no width": (["--env", "CartPole-v1", "--hidden", "0"], ["hidden", "0"]),
    "negative width": (["--env", "CartPole-v1", "--hidden", "-4"], ["hidden", "-4"]),
    "memory": (["--env", "CartPole-v1", "--memory-size", "-1"], ["--memory-size must be at least 0, got -1"]),
    "batch": (["--env", "CartPole-v1", "--ppo.batch-size", "0"], ["batch_size", "at least 1"]),
    "minibatch": (["--env", "CartPole-v1", "--ppo.minibatch-size", "100"], ["minibatch_size=100", "divisor"]),
    "discount": (["--env", "CartPole-v1", "--ppo.gamma", "1.5"], ["gamma=1.5", "0..1"]),
    "target": (["--env", "CartPole-v1", "--target-success", "95"], ["--target-success must be between 0 and 1"]),
    "no target": (["--env", "CartPole-v1", "--target-return", "nan"], ["--target-return must be a finite number"]),
    "huge seed": (["--env", "CartPole-v1", "--seed", "9" * 26], ["--seed must be below 2**63"]),
    "deterministic lag": (["--env", "CartPole-v1", "--deterministic"], ["--deterministic needs --max-lag 0"]),
    "dropped where all are needed": (
        ["--env", "CartPole-v1", "--sampling", "quota", "--failures.action", "drop"],
        ["--sampling quota needs all environments", "--failures.action restart"],
    ),
    "a deadline that is none": (
        ["--env", "CartPole-v1", "--failures.call-s", "0"],
        ["FailurePolicy.call_s must be a number above 0, got 0.0"],
    ),
    "more spares than environments": (
        ["--env", "CartPole-v1", "--num-envs", "4", "--spares", "5"],
        ["--spares 5 are more than environments: --num-envs 4"],
    ),
    "unequal shares": (
        ["--env", "CartPole-v1", "--deterministic", "--max-lag", "0", "--num-envs", "7"],
        ["1024 is no multiple of"],
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_nothing_is_written(command: Command, case: str) -> None:
    args, words = BAD_INPUT[case]
    line = command.fails(*args, "--updates", "1", status=2)
    for word in words:
        assert word in line
    assert not command.folder.exists()


def test_a_folder_that_exists_is_left_alone(command: Command) -> None:
    command.folder.mkdir()
    (command.folder / "config.json").write_text("mine")
    line = command.fails("--env", "CartPole-v1", status=2)
    assert "exists" in line
    assert "--run-dir" in line
    assert [path.name for path in command.folder.iterdir()] == ["config.json"]
    assert (command.folder / "config.json").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_one_line(command: Command) -> None:
    command.folder.write_text("a file")
    command.folder /= "run"
    assert str(command.folder) in command.fails("--env", "CartPole-v1", "--updates", "1", status=2)


def assert_whole(folder: Path) -> None:
    """Nothing in the folder of a run is half-written."""
    assert {path.suffix for path in folder.iterdir() if path.is_file()} <= {".json", ".jsonl", ".safetensors"} | {
        path.suffix for path in folder.glob("events.*")
    }
    assert json.loads((folder / "config.json").read_text())["env"]
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["update"] >= 1
    assert np.isfinite(np.concatenate([x.ravel() for x in load_file(folder / "policy.safetensors").values()])).all()
    for path in folder.glob("checkpoints/*"):
        assert load(path).update >= 1


@pytest.mark.parametrize("num_envs", ["1", "4"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--env", "ScriptedTest-v0", "--env-kwargs", "faults", "{5: 'nan'}"], ["observation", "NaN"]),
        (["--env", "ScriptedTest-v0", "--env-kwargs", "faults", "{5: 'shape'}"], ["(39,)", "(40,)"]),
        (["--env", "NanRewardTest-v0"], ["reward", "nan"]),
    ],
)
def test_bad_data_of_a_simulator_is_one_line_with_its_place(
    command: Command, args: list[str], words: list[str], num_envs: str
) -> None:
    options = [*SMALL, "--num-envs", num_envs, "--updates", "9", "--failures.action", "raise"]
    line = command.fails(*args, *options, status=1)
    for word in (*words, "env ", "episode 0", "decision 4", "last action"):
        assert word in line
    assert_whole(command.folder)


def test_a_run_that_failures_end_before_its_first_checkpoint_leaves_one(command: Command) -> None:
    command.fails("--env", "NanRewardTest-v0", *SMALL, "--updates", "9", "--failures.action", "drop", status=1)
    (saved,) = (command.folder / "checkpoints").iterdir()
    assert load(saved).update == 0
    assert main(["train", "--resume", str(command.folder)]) == 1, "it goes on, and fails again"


def test_a_run_has_the_budget_and_the_spares_that_it_was_told(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares: list[tuple[str, int]] = []

    class Seen(EnvGroup):
        def __init__(self, *args: Any, **options: Any) -> None:
            spares.append((options["name"], options["spares"]))
            super().__init__(*args, **options)

    monkeypatch.setattr("ebrl.cli.train.EnvGroup", Seen)
    options = [*SMALL, "--spares", "2", "--failures.per-env", "0"]
    line = command.fails("--env", "NanRewardTest-v0", *options, "--updates", "9", status=1)
    assert "was restarted 0 times within an hour, which is its budget" in line
    assert spares == [("envs", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("memory_size", ["0", "3"])
def test_a_run_can_be_evaluated_afterwards(
    memory_size: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, options = str(tmp_path / "run"), [*SMALL, "--memory-size", memory_size]
    assert main(["train", "--env", "CartPole-v1", *options, "--updates", "2", "--run-dir", folder]) == 0
    assert_whole(tmp_path / "run")
    capsys.readouterr()
    printed = []
    for _ in range(2):
        assert main(["eval", folder, "--episodes", "5"]) == 0
        printed.append(capsys.readouterr())
    assert "over 5 episodes" in printed[0].out
    assert printed[0] == printed[1], "the same policy on the same seeds"
    assert printed[0].err == ""


@pytest.mark.parametrize("broken", ["no folder", "no policy", "no configuration", "another policy"])
def test_what_is_no_run_cannot_be_evaluated(
    broken: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: Command
) -> None:
    folder = command.folder
    if broken != "no folder":
        assert main(["train", "--env", "CartPole-v1", *SMALL, "--updates", "1", "--run-dir", str(folder)]) == 0
    if broken == "no policy":
        (folder / "policy.safetensors").unlink()
    elif broken == "no configuration":
        (folder / "config.json").write_text("{")
    elif broken == "another policy":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden": [3]}))
    capsys.readouterr()
    assert main(["eval", str(folder)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, "\n".join(lines)
    assert str(folder) in lines[0]


# In the library.


def failures(
    spec: EnvSpec,
    program: EnvProgram = rollout,
    *,
    count: int = 1,
    policy: ScriptedPolicy | None = None,
    learner: RecordingLearner | None = None,
    **group: Any,
) -> list[BaseException]:
    """Train until something fails, nothing being done about it, and return the leaves of what was raised."""
    group = {"failures": FailurePolicy("raise"), **group}
    policy = policy or ScriptedPolicy(spec)
    learner = learner or RecordingLearner(policy, 8 * count)

    async def main() -> None:
        async with Runtime(VirtualMachine({"sim": lambda n, rng: 1.0})) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(spec, actor=gen, count=count, program=program, **group))
            async for _ in rt.start(Trainer(envs, learner, updates=10)):
                pass

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main())
    return list(leaves(caught.value))


def assert_place(error: BaseException, env: int = 0, episode: int = 0, decision: int = 0) -> None:
    """One note says where, by the numbers that the record has."""
    (note,) = error.__notes__
    seed = episode_seed(0, env, episode)
    assert note.startswith(f"env {env} episode {episode} decision {decision} seed {seed} version ")
    assert note.partition(" last action ")[0].endswith(f"lane envs-{env}")


async def by_hand(env: EnvContext) -> None:
    obs, _ = await env.reset()
    while not env.done:
        obs = (await env.step((await env.act(obs)).action)).obs


@pytest.mark.parametrize("program", [rollout, by_hand])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan", "observation: expected finite numbers, got NaN at (2,)"),
        ("shape", "observation: expected float32 of shape (3,), got float32 of shape (4,)"),
        ("dtype", "observation: expected float32 of shape (3,), got complex64 of shape (3,)"),
    ],
)
def test_an_observation_that_contradicts_its_space_names_its_place(fault: str, words: str, program: EnvProgram) -> None:
    (error,) = failures(scripted_spec(length=4, faults={8: fault}), program)  # reset, 4 steps, reset, 3 steps
    assert isinstance(error, InvalidData)
    assert words in str(error)
    assert_place(error, 0, 1, 6)


@pytest.mark.parametrize("program", [rollout, by_hand])
def test_a_reward_that_is_no_number_names_its_place(program: EnvProgram) -> None:
    (error,) = failures(scripted_spec(make=lambda: NanReward(3, 2)), program)
    assert isinstance(error, InvalidData)
    assert "reward: expected a finite number, got nan" in str(error)
    assert_place(error, decision=4)


def test_an_action_of_a_program_that_is_no_number_names_its_place() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        while not env.done:
            out = await env.act(obs)
            bad = env.recorder.num_decisions == 3
            obs = (await env.step(out.action * (np.nan if bad else 1.0))).obs

    (error,) = failures(scripted_spec(), program)
    assert isinstance(error, InvalidData)
    assert "action: expected finite numbers, got NaN" in str(error)
    assert_place(error, decision=2)


def test_an_error_of_a_simulator_leaves_unchanged_with_its_place() -> None:
    numbers = itertools.count()
    spec = scripted_spec(make=lambda: ScriptedEnv(3, 2, faults={4: "raise"} if next(numbers) == 1 else {}))
    (error,) = failures(spec, count=3)
    assert isinstance(error, ScriptedFault)
    assert_place(error, 1, 0, 3)


def test_an_error_in_a_reset_names_the_episode_that_would_have_begun() -> None:
    (first,) = failures(scripted_spec(length=4, faults={0: "raise"}))
    assert isinstance(first, ScriptedFault)
    assert_place(first, 0, 0, 0)
    (later,) = failures(scripted_spec(length=4, faults={5: "nan"}))
    assert isinstance(later, InvalidData)
    assert later.__notes__[0].startswith("env 0 episode 1 decision ")
    assert f" seed {episode_seed(0, 0, 1)} " in later.__notes__[0]


def test_an_error_while_a_simulator_is_built_ends_the_run() -> None:
    (error,) = failures(scripted_spec(faults={CONSTRUCTION: "raise"}))
    assert isinstance(error, ScriptedFault)


def test_environments_that_fail_at_once_have_a_note_each() -> None:
    errors = failures(scripted_spec(faults={3: "raise"}), count=3)
    assert errors
    for error in errors:
        assert isinstance(error, ScriptedFault)
        (note,) = error.__notes__
        assert_place(error, int(note.split()[1]), 0, 2)


def test_an_error_in_a_program_carries_its_place() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        for _ in range(3):
            obs = (await env.act_step(obs)).obs
        raise KeyError("mine")

    (error,) = failures(scripted_spec(), program)
    assert isinstance(error, KeyError)
    assert error.__notes__[0].startswith("env 0 episode 0 decision 2 ")


def test_an_error_in_a_task_of_a_program_carries_its_place() -> None:
    async def program(env: EnvContext) -> None:
        obs, _ = await env.reset()
        async with asyncio.TaskGroup() as group:
            group.create_task(env.act_step(obs))

    (error,) = failures(scripted_spec(faults={1: "raise"}), program)
    assert isinstance(error, ScriptedFault)
    assert_place(error)


def test_an_error_in_observe_carries_its_place() -> None:
    def observe(obs: Any) -> Any:
        raise KeyError("mine")

    (error,) = failures(scripted_spec(), observe=observe)
    assert isinstance(error, KeyError)
    assert_place(error)


class Broken(ScriptedPolicy):
    """Fails as soon as an observation has left the first episode's start far behind."""

    error: type[Exception] = ValueError
    times = 0

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        self.times += 1
        if self.times > 3:
            raise self.error("mine")
        return super().act(batch, noise, deterministic)


@pytest.mark.parametrize(
    "kind", [ValueError, RuntimeError, KeyError, AssertionError, AttributeError, ZeroDivisionError]
)
def test_an_error_in_the_policy_names_the_place_of_the_environment_it_failed_for(kind: type[Exception]) -> None:
    spec = scripted_spec()
    policy = Broken(spec)
    policy.error = kind
    (error,) = failures(spec, policy=policy)
    assert "mine" in str(error)
    assert isinstance(error, (PolicyError, kind))
    assert_place(error, decision=3)


class NanPolicy(Broken):
    """Chooses what is no number."""

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = ScriptedPolicy.act(self, batch, noise, deterministic)
        self.times += 1
        out.action = out.action * (float("nan") if self.times > 3 else 1.0)
        return out


def test_an_action_of_the_policy_that_is_no_number_names_its_place() -> None:
    spec = scripted_spec()
    (error,) = failures(spec, policy=NanPolicy(spec))
    assert isinstance(error, PolicyError)
    assert "not finite for env 0 episode 0 decision 3" in str(error)
    assert_place(error, decision=3)


def test_an_error_in_the_learner_ends_everything_in_order() -> None:
    class Fails(RecordingLearner):
        def update(self, batch: TrainBatch) -> Mapping[str, float]:
            if len(self.batches) == 2:
                raise ArithmeticError("diverged")
            return super().update(batch)

    closed = []

    class Closing(ScriptedEnv):
        def close(self) -> None:
            closed.append(self)

    spec = scripted_spec(make=lambda: Closing(3, 2))
    policy = ScriptedPolicy(spec)
    (error,) = failures(spec, count=3, policy=policy, learner=Fails(policy, 6))
    assert isinstance(error, ArithmeticError)
    assert str(error) == "diverged"
    assert len(closed) == 3


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interruption_is_no_error_and_closes_everything(kind: type[BaseException]) -> None:
    closed = []

    class Closing(ScriptedEnv):
        def close(self) -> None:
            closed.append(self)

    async def main() -> None:
        spec = scripted_spec(make=lambda: Closing(3, 2))
        policy = ScriptedPolicy(spec)
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(policy))
            envs = rt.start(EnvGroup(spec, actor=gen, count=3))
            async for report in rt.start(Trainer(envs, RecordingLearner(policy, 6), updates=10)):
                if report.update == 3:
                    raise kind

    with pytest.raises(kind):
        run_virtual(main())
    assert len(closed) == 3
