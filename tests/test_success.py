"""Success, as simulators tell of it: in any step of a chunk, and the same in both hosts."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.faulty import Told
from tests.test_hosts import Kind, ask, both, opened, run, scripted

FLAGS = [
    ((True, False, False), True),
    ((None, True, None), True),
    ((False, None, None), False),
    ((math.nan, False, math.nan), False),
    ((None, math.nan, None), None),
]


@both
@pytest.mark.parametrize("name", ["success", "is_success"])
@pytest.mark.parametrize(("action_repeat", "num"), [(1, 3), (3, 1), (2, 2)])
def test_success_in_any_step_of_a_chunk_counts(kind: Kind, name: str, action_repeat: int, num: int) -> None:
    """And is a bool in both."""

    async def main() -> list[Any]:
        found = []
        for flags, _ in FLAGS:
            make = functools.partial(Told, name, *flags)
            spec = replace(scripted(action_repeat=action_repeat), make=make, info_keys=(name,))
            async with opened(kind, spec) as host:
                await ask(host.slots[0].reset, 0)
                result = await ask(host.slots[0].step, np.zeros((num, 2), np.float32))
                assert result.num_steps == num * action_repeat
                found.append(result.info.get(name))
        return found

    found = run(main())
    assert [type(flag) for flag in found] == [type(flag) for _, flag in FLAGS]
    assert found == [flag for _, flag in FLAGS]
