"""`Rows`: the memory that a process host shares with its child, one row per simulator; and the words on their socket.

The memory is an anonymous file that both map. It has no name: nothing is left behind however either process ends, and
no tracker has to be told. Who may touch a row: the parent, until it sends the row's number; then the child, until it
sends it back.

On the socket: two-byte row numbers, both ways. A number is followed by a frame (eight bytes of length, then a pickle)
where the row's `op` is `CALL`, or on the way back its `status` is `FRAME`; and always after `CONTROL`, with which the
parent says what there is to do, and the child that it can begin and, in the end, how it closed each simulator.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ebrl.core.records import Array, ArraySpec, EnvSpec, Observation

RESET: Final = 0
STEP: Final = 1
CALL: Final = 2
BUILD: Final = 3
CLOSE: Final = 4

PLAIN: Final = 0  # status: everything is in the row
FRAME: Final = 1  # status: a frame follows, with an error or the result of a call

CONTROL: Final = 0xFFFF  # number of no row
HEADER: Final = struct.Struct("<Q")
MAX_CHUNK: Final = 1024  # actions in one step; memory that nobody touches costs nothing
_ALIGN: Final = 64


def frame(payload: bytes) -> bytes:
    """Return `payload` behind its length."""
    return HEADER.pack(len(payload)) + payload


def frame_end(data: bytearray, start: int) -> int | None:
    """Return where the frame at `start` ends; None if it is not complete."""
    if len(data) < start + HEADER.size:
        return None
    end: int = start + HEADER.size + HEADER.unpack_from(data, start)[0]
    return end if end <= len(data) else None


def anonymous_file(size: int) -> int:
    """Return a descriptor of memory without a name, `size` bytes of zeros; the caller closes it."""
    try:
        fd = os.memfd_create("ebrl-rows")
    except AttributeError:  # not on this operating system
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class Rows:
    """Views of the shared memory.

    Scalars are memoryviews, which give Python numbers several times faster than arrays do.

    Attributes:
        op: ``[k]`` what is asked.
        status: ``[k]`` how the answer comes.
        seed: ``[k]`` of a reset.
        num_actions: ``[k]`` H.
        num_steps: ``[k]`` simulator steps that ran.
        terminated: ``[k]``
        truncated: ``[k]``
        busy_s: ``[1]`` seconds the child has worked.
        call_s: ``[k]`` seconds of the last reset or step.
        running: ``[1]`` number of the row that the child works at, from 1; 0: none.
        rewards: ``[k * reward_stride]``
        infos: ``[k * num_infos]``, NaN where there is none.
        actions: k arrays ``[MAX_CHUNK, *action.shape]``.
        obs: k arrays, or dictionaries of arrays.
        info_keys: Entries of ``info`` that any of the simulators passes on.
    """

    def __init__(self, specs: Sequence[EnvSpec], fd: int) -> None:
        """Map the memory.

        Args:
            specs: Of the k simulators, alike in what they observe and how they act.
            fd: Of an anonymous file of `size_of` them.
        """
        observed, count = specs[0].observation, len(specs)
        self.reward_stride = _reward_stride(specs)
        self.info_keys = _info_keys(specs)
        self.num_infos = len(self.info_keys)
        forms = _forms(specs)
        offsets, size = _place(forms)
        memory = mmap.mmap(fd, size)
        self.busy_s: Any
        self.call_s: Any
        self.running: Any
        self.rewards: Any
        self.infos: Any
        arrays: list[Array] = [
            np.ndarray(shape, dtype, memory, offset) for (shape, dtype), offset in zip(forms, offsets, strict=True)
        ]
        (self.op, self.status, self.seed, self.num_actions, self.num_steps, self.terminated, self.truncated,
         self.busy_s, self.call_s, self.running, self.rewards, self.infos) = (
            array.data for array in arrays[:12])  # fmt: skip
        self.actions: list[Array] = [arrays[12][row, ...] for row in range(count)]
        self.obs: list[Observation] = (
            [arrays[13][row, ...] for row in range(count)]
            if isinstance(observed, ArraySpec)
            else [
                {key: array[row, ...] for key, array in zip(observed, arrays[13:], strict=True)} for row in range(count)
            ]
        )


def size_of(specs: Sequence[EnvSpec]) -> int:
    """Return the bytes that `Rows` of such simulators take."""
    return _place(_forms(specs))[1]


def _reward_stride(specs: Sequence[EnvSpec]) -> int:
    return MAX_CHUNK * max(spec.action_repeat for spec in specs)


def _info_keys(specs: Sequence[EnvSpec]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for spec in specs for key in spec.info_keys))


def _forms(specs: Sequence[EnvSpec]) -> list[tuple[tuple[int, ...], Any]]:
    action, observed, count = specs[0].action, specs[0].observation, len(specs)
    parts = [observed] if isinstance(observed, ArraySpec) else observed.values()
    return [
        ((count,), np.uint8), ((count,), np.uint8), ((count,), np.int64), ((count,), np.int32),
        ((count,), np.int32), ((count,), np.uint8), ((count,), np.uint8), ((1,), np.float64),
        ((count,), np.float64), ((1,), np.int32), ((count * _reward_stride(specs),), np.float64),
        ((count * len(_info_keys(specs)),), np.float64),
        ((count, MAX_CHUNK, *action.shape), np.dtype(action.dtype)),
        *(((count, *part.shape), np.dtype(part.dtype)) for part in parts),
    ]  # fmt: skip


def _place(forms: list[tuple[tuple[int, ...], Any]]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for shape, dtype in forms:
        offsets.append(end)
        end += int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        end += -end % _ALIGN
    return offsets, end
