"""Answers of a policy whose form is not what was agreed on are refused by a run, before anybody uses them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from ebrl.core.errors import ConfigError, PolicyError
from ebrl.core.protocols import PolicyOut
from ebrl.core.runtime import Runtime
from ebrl.core.virtual_machine import VirtualMachine
from ebrl.gen.fake import ScriptedPolicy
from ebrl.gen.generator import Generator
from ebrl.sim.group import EnvGroup
from tests.helpers import scripted_spec, the_failure


class Reshaped(ScriptedPolicy):
    """Answers in forms of its own."""

    def __init__(self, **change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(scripted_spec(), horizon=3)
        self.change = change

    def act(self, batch: dict[str, Tensor], noise: Tensor, deterministic: bool = False) -> PolicyOut:
        out = super().act(batch, noise, deterministic)
        changes: Any = {name: fn(getattr(out, name)) for name, fn in self.change.items()}
        return replace(out, **changes)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("value", lambda x: x[:, None], r"value has shape \(1, 1\) and not \(1,\)"),
        ("log_prob", lambda x: x[:, 0], r"action and log_prob have shapes .*, where B, H = \(1, 3\)"),
        ("log_prob", lambda x: x[..., 0], r"action and log_prob have shapes \(1, 3, \d\) and \(1, 3\) and not"),
        ("action", lambda x: x[:, 0], r"action and log_prob have shapes"),
        ("action", lambda x: x[:, :1], r"action and log_prob have shapes"),
        ("action", lambda x: x[:0], r"action and log_prob have shapes"),
        ("value", lambda x: x[:0], r"value has shape \(0,\) and not \(1,\)"),
    ],
)
def test_a_run_refuses_answers_of_a_wrong_form(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    async def main() -> None:
        async with Runtime(VirtualMachine({})) as rt:
            gen = rt.start(Generator(Reshaped(**{name: change})))
            envs = rt.start(EnvGroup(scripted_spec(), actor=gen, count=1))
            envs.open_training(10, max_lag=1)
            await asyncio.get_running_loop().create_future()

    error = the_failure(main())
    assert isinstance(error, PolicyError)
    assert re.search(f"the policy failed for env 0 .*: {message}.*; see ebrl.check_policy", str(error))


def test_a_batcher_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be a Batcher, such as Batcher\(threshold=8\), got 8"):
        Generator(ScriptedPolicy(scripted_spec()), batcher=8)  # type: ignore[arg-type]
