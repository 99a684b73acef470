"""EBRL: asynchronous reinforcement learning of robot policies, in one process.

Names are resolved when first used (PEP 562), so that ``import ebrl`` costs nothing and its parts can be used without
the packages that only others need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ebrl.core.errors import Deadlock, EbrlError, SimulatorError
    from ebrl.core.protocols import Policy, PolicyOut
    from ebrl.core.records import ActionOut, EnvSpec, GroupRule, UpdateReport
    from ebrl.core.run import run
    from ebrl.core.runtime import Runtime
    from ebrl.core.trace import Trace
    from ebrl.core.virtual import run_virtual
    from ebrl.core.virtual_machine import VirtualMachine
    from ebrl.gen.batcher import Batcher
    from ebrl.gen.check import check_policy
    from ebrl.gen.generator import Generator
    from ebrl.gen.policies.base import TorchPolicy
    from ebrl.gen.policies.categorical import CategoricalPolicy
    from ebrl.gen.policies.gaussian import GaussianPolicy
    from ebrl.gen.policies.recurrent import RecurrentPolicy
    from ebrl.gen.service import BatchService
    from ebrl.replayer import replay
    from ebrl.sim.check import check_env
    from ebrl.sim.context import EnvContext
    from ebrl.sim.failures import FailurePolicy
    from ebrl.sim.group import EnvGroup
    from ebrl.sim.programs import rollout
    from ebrl.sim.spec import env_spec, env_specs
    from ebrl.sim.vector import VectorGroup
    from ebrl.sim.vector_check import check_vector_env
    from ebrl.sim.vector_context import VectorContext
    from ebrl.train.checkpoint import Checkpoint, Checkpointer
    from ebrl.train.evaluate import evaluate
    from ebrl.train.grpo import GRPO, GRPOConfig
    from ebrl.train.ppo import PPO, PPOConfig
    from ebrl.train.trainer import Trainer

_HOMES = {
    "ActionOut": "core.records",
    "BatchService": "gen.service",
    "Batcher": "gen.batcher",
    "CategoricalPolicy": "gen.policies.categorical",
    "Checkpoint": "train.checkpoint",
    "Checkpointer": "train.checkpoint",
    "Deadlock": "core.errors",
    "EbrlError": "core.errors",
    "EnvContext": "sim.context",
    "EnvGroup": "sim.group",
    "EnvSpec": "core.records",
    "FailurePolicy": "sim.failures",
    "GRPO": "train.grpo",
    "GRPOConfig": "train.grpo",
    "GaussianPolicy": "gen.policies.gaussian",
    "Generator": "gen.generator",
    "GroupRule": "core.records",
    "PPO": "train.ppo",
    "PPOConfig": "train.ppo",
    "Policy": "core.protocols",
    "PolicyOut": "core.protocols",
    "RecurrentPolicy": "gen.policies.recurrent",
    "Runtime": "core.runtime",
    "SimulatorError": "core.errors",
    "TorchPolicy": "gen.policies.base",
    "Trace": "core.trace",
    "Trainer": "train.trainer",
    "UpdateReport": "core.records",
    "VectorContext": "sim.vector_context",
    "VectorGroup": "sim.vector",
    "VirtualMachine": "core.virtual_machine",
    "check_env": "sim.check",
    "check_policy": "gen.check",
    "check_vector_env": "sim.vector_check",
    "env_spec": "sim.spec",
    "env_specs": "sim.spec",
    "evaluate": "train.evaluate",
    "replay": "replayer",
    "rollout": "sim.programs",
    "run": "core.run",
    "run_virtual": "core.virtual",
}

__all__ = [
    "GRPO",
    "PPO",
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
    "GRPOConfig",
    "GaussianPolicy",
    "Generator",
    "GroupRule",
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


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ebrl' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"ebrl.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
