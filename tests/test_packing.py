"""States and segments survive the way to a file and back, bit by bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from ebrl.core.errors import ConfigError
from ebrl.core.records import ActionOut, BatchOut, Decision, Observation, Segment
from ebrl.train.packing import pack_segments, unpack_segments
from ebrl.train.tree import copied, pack, unpack
from tests.helpers import make_decision, make_segment


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal in types, forms and every bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and same(a.numpy(), b.numpy())
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def through_files(state: Any) -> Any:
    """Return a state as another process reads it."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(copied(state), tensors, "state"))
    return unpack(json.loads(text), load(save(tensors)))


KEYS = st.one_of(st.text(max_size=4), st.sampled_from(["$tensor", "$dict", "a/b", "a", "b"]), st.integers(-3, 3))
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(["float64", "float32", "float16", "int64", "int8", "uint8", "uint16", "bool"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
TENSORS = st.one_of(ARRAYS.map(torch.from_numpy), st.just(torch.ones(2, 3, dtype=torch.bfloat16).view(torch.int16)))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), ARRAYS, TENSORS)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(STATES)
def test_a_state_survives(state: Any) -> None:
    assert same(through_files(state), state)


def test_bfloat16_survives_and_numbers_of_numpy_become_plain_ones() -> None:
    weights = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T.contiguous()
    found = through_files({"w": weights, "lr": np.float64(0.5), "n": np.int32(3)})
    assert found["w"].dtype == torch.bfloat16
    assert torch.equal(found["w"], weights)
    assert same([found["lr"], found["n"]], [0.5, 3])


@pytest.mark.parametrize("alien", [object(), {1, 2}, np.array(["text"]), b"bytes"])
def test_what_cannot_be_saved_is_named(alien: Any) -> None:
    with pytest.raises(ConfigError, match=r"^learner/rng/0: .* cannot be saved"):
        pack({"rng": [alien]}, {}, "learner")


def test_a_copy_shares_nothing() -> None:
    weights = torch.zeros(2, 3).T
    state: dict[str, Any] = {"w": weights, "open": {0: (1, 2.0)}, "list": [np.zeros(2)]}
    copy = copied(state)
    weights += 1
    state["list"][0] += 1
    state["open"][1] = (0, 0.0)
    assert same(copy, {"w": torch.zeros(3, 2), "open": {0: (1, 2.0)}, "list": [np.zeros(2)]})
    assert copy["w"].is_contiguous()


# Segments.


def random_obs(kind: str, rng: np.random.Generator) -> Observation:
    if kind == "vector":
        return rng.normal(size=3).astype(np.float32)
    if kind == "scalar":
        return np.array(rng.normal())
    return {"image": rng.integers(0, 256, (2, 2, 3), np.uint8), "state": rng.normal(size=2)}


def random_batch(discrete: bool, aux: bool, rows: int, rng: np.random.Generator) -> BatchOut:
    action = rng.integers(0, 5, (rows, 2)) if discrete else rng.normal(size=(rows, 2, 3)).astype(np.float32)
    log_prob = rng.normal(size=(rows, 2, 3)).astype(np.float32)
    extra: dict[str, np.ndarray] = {
        "u": rng.normal(size=(rows, 4)).astype(np.float32),
        "choice": rng.integers(0, 9, rows),
    }
    return BatchOut(action, log_prob, rng.normal(size=rows).astype(np.float32), extra if aux else {})


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    """Segments of one policy in one kind of environment; answers share batches, as they do in a run."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["vector", "scalar", "dict"]))
    discrete, aux = draw(st.booleans()), draw(st.booleans())
    batches = [random_batch(discrete, aux, 3, rng) for _ in range(2)]
    found = []
    for env, length in enumerate(draw(st.lists(st.integers(1, 4), max_size=4))):
        decisions = []
        for index in range(length):
            batch, row = batches[int(rng.integers(2))], int(rng.integers(3))
            out = ActionOut(batch.action[row], int(rng.integers(9)), batch, row)
            rewards = tuple(rng.normal(size=draw(st.integers(1, 3))).tolist())
            flags = [bool(flag) for flag in rng.integers(0, 2, 3)]
            decisions.append(Decision(env, 7, index, random_obs(kind, rng), out, rewards, len(rewards), *flags))
        advantage = draw(st.one_of(st.none(), st.floats(allow_nan=False)))
        found.append(Segment(env, draw(st.text(max_size=3)), decisions, random_obs(kind, rng), "taken", advantage))
    return found


def plain(segment: Segment) -> list[Any]:
    """Return all that is in a segment, but for who shared a batch."""
    numbers = [
        [d.env, d.episode, d.index, d.obs, d.rewards, d.num_steps, d.terminated, d.truncated, d.intervened]
        for d in segment.decisions
    ]
    outs = [
        [d.out.action, d.out.version, d.out.log_prob, d.out.value, {k: np.asarray(v) for k, v in d.out.aux.items()}]
        for d in segment.decisions
    ]
    return [segment.env, segment.task, segment.reason, segment.advantage, segment.last_obs, numbers, outs]


@pytest.mark.slow
@given(segments())
def test_segments_survive(found: list[Segment]) -> None:
    restored = unpack_segments(through_files(pack_segments(found)))
    assert same([plain(segment) for segment in restored], [plain(segment) for segment in found])


def test_what_is_restored_is_one_batch_of_generation() -> None:
    restored = unpack_segments(pack_segments([make_segment(3), make_segment(2, env=1)]))
    decisions = [decision for segment in restored for decision in segment.decisions]
    assert len({id(decision.out.batch) for decision in decisions}) == 1
    assert [decision.out.row for decision in decisions] == list(range(5))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.zeros(3), np.zeros(2)),
        (np.zeros(3), np.zeros(3, np.float32)),
        ({"a": np.zeros(1)}, {"a": np.zeros(1), "b": np.zeros(1)}),
        ({"a": np.zeros(1)}, np.zeros(1)),
    ],
)
def test_observations_of_several_forms_are_refused(first: Observation, second: Observation) -> None:
    pair = [make_decision(0, 0, obs=first), make_decision(0, 1, obs=second)]
    with pytest.raises(ConfigError, match="of several forms cannot be saved"):
        pack_segments([make_segment(decisions=pair, last_obs=first)])
