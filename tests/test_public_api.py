"""The names that users may rely on."""

from __future__ import annotations

import inspect
import typing

import pytest

import ebrl
from tests.helpers import run_python

NAMES = [
    "ActionOut",
    "BatchService",
    "Batcher",
    "CategoricalPolicy",
    "Checkpoint",
    "Checkpointer",
    "Deadlock",
    "EbrlError",
    "EnvContext",
    "EnvGroup",
    "EnvSpec",
    "FailurePolicy",
    "GRPO",
    "GRPOConfig",
    "GaussianPolicy",
    "Generator",
    "GroupRule",
    "PPO",
    "PPOConfig",
    "Policy",
    "PolicyOut",
    "RecurrentPolicy",
    "Runtime",
    "SimulatorError",
    "TorchPolicy",
    "Trace",
    "Trainer",
    "UpdateReport",
    "VectorContext",
    "VectorGroup",
    "VirtualMachine",
    "check_env",
    "check_policy",
    "check_vector_env",
    "env_spec",
    "env_specs",
    "evaluate",
    "replay",
    "rollout",
    "run",
    "run_virtual",
]


def test_the_list_is_exact() -> None:
    assert sorted(ebrl.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves_and_is_documented(name: str) -> None:
    thing = getattr(ebrl, name)
    assert inspect.getdoc(thing), f"ebrl.{name} has no docstring"
    if inspect.isclass(thing) and not typing.is_typeddict(thing):
        assert thing.__name__ == name
        for member, value in vars(thing).items():
            if not member.startswith("_") and inspect.isfunction(value):
                assert inspect.getdoc(value), f"ebrl.{name}.{member} has no docstring"


def test_dir_shows_the_names_and_an_unknown_one_raises() -> None:
    assert set(NAMES) <= set(dir(ebrl))
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(ebrl, "no_such_name")  # noqa: B009  # a literal attribute would not pass the type checker


@pytest.mark.slow
def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, ebrl; print([m for m in ('torch', 'gymnasium', 'numpy', 'rich', 'tyro') if m in sys.modules])"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "gymnasium"} & set(eval(done.stdout)), done.stdout
