"""The CPU backend of generation: what runs on a lane, and what comes back.

Rows are checked here, once per batch: an action that is not a number fails the request that would have executed it,
and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ebrl.core.errors import PolicyError
from ebrl.core.protocols import MEMORY, Request
from ebrl.core.records import ActionOut, Array, BatchOut, Observation

FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
HINT = "; see ebrl.check_policy"


class WrongRows(PolicyError):
    """Not one row per observation, or not of the form that was agreed on: no request can be answered."""


def copy_weights(source: torch.nn.Module, buffer: torch.nn.Module) -> None:
    """Copy parameters and buffers of one module into another of the same form.

    Raises:
        PolicyError: It has another form.
    """
    with torch.no_grad():
        for kind in ("parameters", "buffers"):
            theirs, ours = list(getattr(source, kind)()), list(getattr(buffer, kind)())
            if [x.shape for x in ours] != [x.shape for x in theirs]:
                raise PolicyError(_difference(source, buffer))
            if ours:
                torch._foreach_copy_(ours, theirs)


def _difference(source: torch.nn.Module, buffer: torch.nn.Module) -> str:
    """Return words for the first tensor in which two modules differ in form."""
    theirs, ours = (
        {name: tuple(x.shape) for name, x in [*module.named_parameters(), *module.named_buffers()]}
        for module in (source, buffer)
    )
    different = [name for name in [*theirs, *ours] if theirs.get(name) != ours.get(name)]
    what = "its tensors come in another order"
    if different:
        name = different[0]
        what = f"{name} is of shape {theirs.get(name)} there and {ours.get(name)} here"
    return f"the learner's policy is not of the form of the generator's: {what}; give both the same policy"


def infer(
    policy: Any, requests: Sequence[Request], version: int, deterministic: bool, pad_to: int | None
) -> list[ActionOut | PolicyError]:
    """Answer a batch of requests; runs on a generation lane.

    A failure of a batch is looked for row by row, so that the environment at fault is named and the others go on.

    Args:
        policy: An `ebrl.core.protocols.Policy`.
        requests: B of them.
        version: Of the weights in `policy`.
        deterministic: Take the mode.
        pad_to: Run the network on exactly so many rows at a time, since results may depend on the number of rows in the
            last bit.
    """
    if pad_to is not None and len(requests) > pad_to:
        parts = [requests[i : i + pad_to] for i in range(0, len(requests), pad_to)]
        return [answer for part in parts for answer in infer(policy, part, version, deterministic, pad_to)]
    size = policy.noise_dim
    if deterministic or not size:
        noise = np.zeros((len(requests), size), np.float32)
    else:
        noise = np.concatenate([request.noise.row(request.index, size) for request in requests]).reshape(-1, size)
    try:
        return _infer(policy, requests, noise, version, deterministic, pad_to)
    except WrongRows as error:
        return [_blame(request, error) for request in requests]
    except FAILURES as error:
        if len(requests) == 1:
            return [_blame(requests[0], error)]
    answers: list[ActionOut | PolicyError] = []
    for i, request in enumerate(requests):
        try:
            answers += _infer(policy, [request], noise[i : i + 1], version, deterministic, pad_to)
        except FAILURES as error:
            answers.append(_blame(request, error))
    return answers


def failure(name: str, error: BaseException) -> PolicyError:
    """Return what one of many askers is told when a batch of service `name` has failed."""
    failed = PolicyError(f"{name} failed: {error!r}")
    failed.__cause__ = error
    return failed


def _blame(request: Request, error: Exception) -> PolicyError:
    blamed = PolicyError(f"the policy failed for {request.where()}: {error}")
    blamed.__cause__ = error
    return blamed


def _own(rows: torch.Tensor) -> Array:
    """Return an array that the next version of the weights cannot change: views of them are copied."""
    array: Array = (rows if rows.is_inference() else rows.clone()).numpy()
    return array


def _infer(
    policy: Any, requests: Sequence[Request], noise: np.ndarray, version: int, deterministic: bool, pad_to: int | None
) -> list[ActionOut | PolicyError]:
    num = len(requests)
    observations = [request.obs for request in requests]
    if pad_to is not None and num < pad_to:
        observations += [observations[-1]] * (pad_to - num)
        noise = np.concatenate([noise, np.zeros((pad_to - num, noise.shape[1]), np.float32)])
    memory = _memories(requests, len(observations), policy.memory_size) if policy.memory_size else None
    batch = _act(policy, observations, memory, noise, deterministic)
    answers: list[ActionOut | PolicyError] = [
        ActionOut(row, version, batch, i) for i, row in enumerate(batch.action[:num])
    ]
    for what, array in (
        ("an action", batch.action),
        ("a log-probability", batch.log_prob),
        ("a value", batch.value),
        ("a memory", batch.memory),
    ):
        if array is not None and array.dtype.kind == "f" and not np.isfinite(array[:num]).all():
            for i in range(num):
                if not np.isfinite(array[i]).all():
                    answers[i] = PolicyError(f"the policy gave {what} that is not finite for {requests[i].where()}")
    return answers


def _act(
    policy: Any, observations: Sequence[Observation], memory: Array | None, noise: np.ndarray, deterministic: bool
) -> BatchOut:
    """Call the policy, and see that every observation has its row."""
    with torch.inference_mode():
        inputs = policy.collate(observations)
        if memory is not None:
            inputs[MEMORY] = torch.from_numpy(memory)
        out = policy.act(inputs, torch.from_numpy(noise), deterministic)
        batch = BatchOut(
            _own(out.action),
            _own(out.log_prob.float()),
            _own(out.value.float()),
            {name: _own(rows) for name, rows in out.aux.items()},
            None if out.memory is None else _own(out.memory.float()),
        )
    num = len(observations)
    chunk = num, policy.horizon
    if batch.action.shape[:2] != chunk or batch.log_prob.shape[:2] != chunk or batch.log_prob.ndim != 3:
        shapes = f"{batch.action.shape} and {batch.log_prob.shape}"
        raise WrongRows(
            f"action and log_prob have shapes {shapes} and not [B, H, ...] and [B, H, A], where B, H = {chunk}{HINT}"
        )
    if batch.value.shape != (num,):
        raise WrongRows(f"value has shape {batch.value.shape} and not {(num,)}{HINT}")
    for name, array in batch.aux.items():
        if array.shape[:1] != (num,):
            raise WrongRows(f"aux[{name!r}] has shape {array.shape} for {num} observations{HINT}")
    forms = [None if array is None else array.shape for array in (batch.memory, memory)]
    if forms[0] != forms[1]:
        expected = f"{forms[1]}, as memory_size={policy.memory_size} says"
        raise WrongRows(f"memory has shape {forms[0]} and not {expected}{HINT}")
    if memory is not None:
        batch.aux[MEMORY] = memory
    return batch


def _memories(requests: Sequence[Request], num_rows: int, size: int) -> Array:
    """Return ``[num_rows, size]``: zeros at the start of an episode, and for padding."""
    memory = np.zeros((num_rows, size), np.float32)
    for i, request in enumerate(requests):
        if request.memory is not None:
            memory[i] = request.memory
    return memory
