"""`check_policy`: does a policy keep the contract of `ebrl.core.protocols.Policy`?

Run it once on your own policy, in a test. Most violations that it finds do not crash a run: they make it learn
something else (rows that leak into each other, statistics that are not published, noise that nobody can repeat).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ebrl.core.errors import ConfigError, PolicyError
from ebrl.core.protocols import MEMORY, PolicyOut
from ebrl.core.records import Array, ArraySpec, EnvSpec, Observation
from ebrl.core.rng import Domain, stream

TOLERANCE = 1e-5
NUM_STEPS = 3  # decisions in a row, of a policy with memory


def check_policy(policy: Any, spec: EnvSpec, *, batch_size: int = 5, seed: int = 0) -> None:
    """Check a policy on observations drawn from the spec; the policy itself is not changed.

    Args:
        policy: A ``torch.nn.Module`` that is a `Policy`.
        spec: Environment that it is for. Only the forms of its arrays are used; nothing is simulated.
        batch_size: B, rows of the examples, at least 2.
        seed: Of the examples.

    Raises:
        PolicyError: The first violation, in one line.
        ConfigError: `batch_size` is below 2.
    """
    if batch_size < 2:
        raise ConfigError(f"batch_size={batch_size}: 2 rows at least, to see whether they depend on each other")
    _Check(_copy(policy), spec, batch_size, seed).run()


def example_observations(spec: EnvSpec, count: int, rng: np.random.Generator) -> list[Observation]:
    """Draw observations of the declared form.

    Args:
        spec: Of the environment.
        count: How many.
        rng: Source of the numbers.
    """
    arrays = spec.observation
    if isinstance(arrays, ArraySpec):
        return [_example(arrays, rng) for _ in range(count)]
    return [{name: _example(array, rng) for name, array in arrays.items()} for _ in range(count)]


def _example(array: ArraySpec, rng: np.random.Generator) -> Array:
    dtype = np.dtype(array.dtype)
    if array.num_values is not None:
        return np.asarray(rng.integers(array.num_values, size=array.shape), dtype)
    if dtype == np.uint8 or dtype == np.bool_:
        return rng.integers(2 if dtype == np.bool_ else 256, size=array.shape).astype(dtype)
    low = np.asarray(-np.inf if array.low is None else array.low, np.float64)
    high = np.asarray(np.inf if array.high is None else array.high, np.float64)
    # Bounds such as +-3.4e38 are declared and never met: draw near zero there.
    narrow = (low > -1e6) & (high < 1e6)
    uniform = rng.uniform(np.where(narrow, low, 0.0), np.where(narrow, high, 1.0), array.shape)
    return np.where(narrow, uniform, rng.standard_normal(array.shape).clip(low, high)).astype(dtype)


def _copy(policy: Any) -> Any:
    if not isinstance(policy, nn.Module):
        raise PolicyError(f"a policy is a torch.nn.Module, but this is a {type(policy).__name__}")
    try:
        return copy.deepcopy(policy)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise PolicyError(
            f"{type(policy).__name__}: copy.deepcopy fails ({error}); the generator acts with copies, so keep files, "
            "locks and tensors with gradients out of the module"
        ) from error


class _Check:
    """One run of the check; the methods are in the order in which they run."""

    def __init__(self, policy: Any, spec: EnvSpec, batch_size: int, seed: int) -> None:
        self.policy = policy
        self.spec = spec
        self.name = type(policy).__name__
        self.num = batch_size
        rng = stream(seed, Domain.NOISE)
        self.require(policy.horizon >= 1, f"horizon is {policy.horizon}; a chunk has at least 1 action")
        self.require(policy.noise_dim >= 0, f"noise_dim is {policy.noise_dim}; it counts numbers")
        self.require(policy.memory_size >= 0, f"memory_size is {policy.memory_size}; it counts numbers")
        self.observations = example_observations(spec, batch_size, rng)
        size = (2, batch_size, policy.noise_dim)
        self.noise, self.other_noise = torch.from_numpy(rng.standard_normal(size, np.float32))

    def require(self, fine: bool, message: str) -> None:
        if not fine:
            raise PolicyError(f"{self.name}: {message}")

    def run(self) -> None:
        state = torch.get_rng_state()
        self.batch = self.policy.collate(self.observations)
        self.check_rows("collate", self.batch)
        self.require(MEMORY not in self.batch, f"collate has an entry {MEMORY!r}; that is where the memory goes")
        if self.policy.memory_size:
            self.batch[MEMORY] = torch.zeros(self.num, self.policy.memory_size)
            first = self.act(noise=self.other_noise)
            self.check_act(first)
            self.batch[MEMORY] = first.memory
        out = self.act()
        self.check_act(out)
        self.check_generator("act", state)
        self.check_same(out, self.act(), "act gives two results for the same noise; take all randomness from `noise`")
        self.check_deterministic()
        self.check_row_independence(out)
        scores = self.policy.evaluate(self.batch, out.aux)
        self.check_scores("evaluate", scores, out.log_prob, out.value)
        self.check_generator("evaluate", state)
        self.check_gradients(scores)
        self.check_state(out)
        if self.policy.memory_size:
            self.check_unroll()

    def act(
        self, rows: Any = slice(None), *, policy: Any = None, noise: Tensor | None = None, deterministic: bool = False
    ) -> PolicyOut:
        policy = self.policy if policy is None else policy
        noise = self.noise if noise is None else noise
        batch = {name: x[rows] for name, x in self.batch.items()}
        before = batch[MEMORY].clone() if MEMORY in batch else None
        with torch.no_grad():
            out = policy.act(batch, noise[rows], deterministic)
        self.require(isinstance(out, PolicyOut), f"act must return a PolicyOut, got {type(out).__name__}")
        if before is not None:
            self.require(torch.equal(before, batch[MEMORY]), "act writes into the memory that it is given")
            self.require(MEMORY not in out.aux, f"aux has an entry {MEMORY!r}; the generator puts the memory there")
            out.aux = {**out.aux, MEMORY: before}
        return out  # type: ignore[no-any-return]

    def check_rows(self, what: str, tensors: Any) -> None:
        self.require(isinstance(tensors, dict), f"{what} must be a dict of tensors, got {type(tensors).__name__}")
        for name, x in tensors.items():
            fine = isinstance(x, Tensor) and x.ndim > 0 and len(x) == self.num
            self.require(fine, f"{what}[{name!r}] must be a tensor with {self.num} rows, got {_form(x)}")

    def check_array(self, what: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        fine = isinstance(x, Tensor) and x.shape == shape and x.dtype == dtype
        self.require(fine, f"{what} must be {dtype} {list(shape)}, got {_form(x)}")
        self.require(bool(torch.isfinite(x).all()), f"{what} has NaN or infinity")

    def check_act(self, out: PolicyOut) -> None:
        action, num, horizon = self.spec.action, self.num, self.policy.horizon
        dtype = torch.from_numpy(np.zeros(0, action.dtype)).dtype
        # A policy computes in float32 whatever precision the simulator declares.
        dtype = torch.float32 if dtype.is_floating_point else dtype
        self.check_array("action", out.action, (num, horizon, *action.shape), dtype)
        self.check_array("log_prob of act", out.log_prob, (num, horizon, action.size))
        self.check_array("value of act", out.value, (num,))
        self.check_rows("aux", out.aux)
        if self.policy.memory_size:
            self.check_array("memory of act", out.memory, (num, self.policy.memory_size))
        self.require(bool(self.policy.memory_size) or out.memory is None, "act returns a memory, but memory_size is 0")
        with_gradient = any(x.requires_grad for x in _tensors(out))
        self.require(not with_gradient, "act returns a view of a parameter, which has a gradient; detach it")
        chosen = out.action.numpy()
        low, high = (action.low, action.high) if action.num_values is None else (0, action.num_values - 1)
        inside = (low is None or (chosen >= low).all()) and (high is None or (chosen <= high).all())
        self.require(bool(inside), f"action leaves the bounds of {self.spec.id}; clip it, and keep the sample in aux")

    def check_generator(self, what: str, state: Tensor) -> None:
        self.require(
            torch.equal(state, torch.get_rng_state()),
            f"{what} uses torch's global generator (dropout, Normal.sample?); take all randomness from `noise`",
        )

    def check_same(self, a: PolicyOut, b: PolicyOut, message: str) -> None:
        self.require(all(_close(x, y) for x, y in zip(_tensors(a), _tensors(b), strict=True)), message)

    def check_deterministic(self) -> None:
        a = self.act(deterministic=True)
        self.check_act(a)
        b = self.act(noise=self.other_noise, deterministic=True)
        self.check_same(a, b, "act(deterministic=True) depends on the noise; take the mode")

    def check_row_independence(self, out: PolicyOut) -> None:
        order, half = torch.arange(self.num).flip(0), self.num // 2
        parts = {
            "order": order,
            "company (the batch split in two)": torch.arange(half),
            "company (one row alone)": torch.tensor([self.num - 1]),
            "padding": torch.cat([torch.arange(self.num), torch.zeros(3, dtype=torch.long)]),
        }
        for what, rows in parts.items():
            aux = {name: x[rows] for name, x in out.aux.items()}
            memory = None if out.memory is None else out.memory[rows]
            expected = PolicyOut(out.action[rows], out.log_prob[rows], out.value[rows], aux, memory)
            message = f"rows depend on their {what}; a decision must not depend on who shares its batch"
            self.check_same(expected, self.act(rows), message)

    def check_scores(self, method: str, scores: Any, log_prob: Tensor, value: Tensor) -> None:
        kind = f"tuple of {len(scores)}" if isinstance(scores, tuple) else type(scores).__name__
        self.require(kind == "tuple of 3", f"{method} must return (log_prob, value, entropy), got {kind}")
        for what, x in zip(("log_prob", "value", "entropy"), scores, strict=True):
            self.check_array(f"{what} of {method}", x, tuple(value.shape if what == "value" else log_prob.shape))
        ours, critic, _ = (x.detach() for x in scores)
        self.require(
            _close(ours, log_prob),
            f"{method}'s log_prob differs from act's by up to {float((ours - log_prob).abs().max()):.3g}; "
            "the ratio at lag 0 must be 1",
        )
        self.require(_close(critic, value), f"{method}'s value differs from act's")

    def check_gradients(self, scores: tuple[Tensor, ...]) -> None:
        total = torch.stack([x.sum() for x in scores]).sum()
        trainable = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        self.require(bool(trainable), "no parameter requires a gradient; there is nothing to learn")
        self.require(total.requires_grad, "evaluate's outputs carry no gradient; do not use no_grad or detach there")
        gradients = torch.autograd.grad(total, list(trainable.values()), allow_unused=True)
        for name, gradient in zip(trainable, gradients, strict=True):
            self.require(gradient is not None, f"no gradient reaches {name!r}; freeze it (requires_grad=False)")
            self.require(bool(torch.isfinite(gradient).all()), f"the gradient of {name!r} has NaN or infinity")

    def check_state(self, out: PolicyOut) -> None:
        state = self.policy.state_dict()
        for name, _ in self.policy.named_buffers():
            self.require(name in state, f"buffer {name!r} is not in state_dict; register it with persistent=True")
        before, after = _copy(self.policy), _copy(self.policy)
        self.check_same(out, self.act(policy=before), "a deepcopy acts differently from its original")
        after.observe(self.batch)
        before.load_state_dict(after.state_dict())
        message = "what observe learns is not in state_dict, so it would never be published; keep it in buffers"
        self.check_same(self.act(policy=after), self.act(policy=before), message)

    def check_unroll(self) -> None:
        """Act a few times in a row in every environment, then score the decisions as sequences, whole and cut."""
        self.require(callable(getattr(self.policy, "unroll", None)), "a policy with memory needs a method unroll")
        outs, batches = [], []
        for _ in range(NUM_STEPS):
            outs.append(self.act())
            batches.append({name: x for name, x in self.batch.items() if name != MEMORY})
            self.batch = {name: x.roll(1, 0) for name, x in batches[-1].items()} | {MEMORY: outs[-1].memory}
        # From one step after another to one environment after another.
        order = torch.arange(NUM_STEPS * self.num).view(NUM_STEPS, self.num).T.flatten()
        batch, aux = _stack(batches, order), _stack([out.aux for out in outs], order)
        log_prob = torch.cat([out.log_prob for out in outs])[order]
        value = torch.cat([out.value for out in outs])[order]
        for cut in (NUM_STEPS, 1):
            lengths = [n for _ in range(self.num) for n in (cut, NUM_STEPS - cut) if n]
            scores = self.policy.unroll(batch, aux, lengths)
            self.check_scores("unroll", scores, log_prob, value)
        self.check_gradients(scores)


def _stack(parts: list[dict[str, Tensor]], order: Tensor) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def _tensors(out: PolicyOut) -> list[Tensor]:
    memory = [] if out.memory is None else [out.memory]
    return [out.action, out.log_prob, out.value, *(out.aux[name] for name in sorted(out.aux)), *memory]


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.isclose(a, b, TOLERANCE, TOLERANCE).all())


def _form(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
