"""Environments that fail in earnest, for tests with real threads and processes; imported by children, and so light."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ebrl.core.records import Array
from ebrl.sim.fake import ScriptedEnv, ScriptedFault

GATE = threading.Event()
"""What hangs in a thread goes on, and ends, when a test has opened it."""

ROOM = 64 * 2**20


class Faulty(ScriptedEnv):
    """Fails in one place, if it is the first of all with one `token` that comes there.

    Args:
        token: A file that does not exist.
        how: ``"raise"``, ``"hang"``, ``"memory"``, or another fault of a `ScriptedEnv`.
        where: ``"build"``, ``"reset"``, ``"step"`` or ``"close"``.
    """

    def __init__(self, token: str, how: str, where: str, length: int = 4) -> None:
        self.token, self.how, self.where = token, how, where
        self.num_resets = 0
        super().__init__(3, 2, length=length)
        self.come("build", self._obs)

    def reset(self, **options: Any) -> Any:
        self.num_resets += 1
        obs, info = super().reset(**options)
        return (self.come("reset", obs) if self.num_resets == 2 else obs), info  # the first episode is whole

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return (self.come("step", obs) if self.num_resets == 2 else obs), *rest

    def close(self) -> None:
        self.come("close", self._obs)

    def come(self, where: str, obs: Array) -> Array:
        if where != self.where:
            return obs
        try:
            os.close(os.open(self.token, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return obs
        if self.how == "raise":
            raise ScriptedFault(f"in {where}")
        if self.how == "memory":
            exhaust()
        if self.how == "hang":
            GATE.wait()
            return obs
        return self._fail(self.how, obs)  # type: ignore[arg-type]  # one of its faults


class ClosesBadly(Faulty):
    """Raises in a step, and hangs or raises when it is closed after that."""

    failed = False

    def __init__(self, token: str, then: str) -> None:
        super().__init__(token, "raise", "step")
        self.then = then

    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except ScriptedFault:
            self.failed = True
            raise

    def close(self) -> None:
        if self.failed and self.then == "raise":
            raise ScriptedFault("in close")
        if self.failed:
            GATE.wait()


class BuiltSlowly(Faulty):
    """Raises in a step, and whoever takes its place is not built before a test opens `gate`, a named pipe."""

    failed_in: ClassVar[set[int]] = set()  # threads

    def __init__(self, token: str, gate: str) -> None:
        super().__init__(token, "raise", "step")
        if threading.get_ident() in self.failed_in:
            self.failed_in.clear()
            os.close(os.open(gate, os.O_RDONLY))

    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except ScriptedFault:
            self.failed_in.add(threading.get_ident())
            raise


def exhaust() -> None:
    """Ask for more memory than this process may have."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    blocks = []
    while True:
        blocks.append(bytearray(2**20))


class Stuck(ScriptedEnv):
    """Its first step holds the interpreter lock for ever."""

    def step(self, action: Any) -> Any:
        os.write(1, b"stuck\n")
        ctypes.PyDLL(None).sleep(1000)
        return super().step(action)


@contextmanager
def opened_at_the_end() -> Iterator[None]:
    """Let threads that hang end with the block."""
    GATE.clear()
    try:
        yield
    finally:
        GATE.set()


class Slow(ScriptedEnv):
    """Its episodes have the length that their seed says, and its resets take longer than a step."""

    def __init__(self, reset_s: float = 0.01, **options: Any) -> None:
        super().__init__(3, 2, length=seeded_length, **options)
        self.reset_s = reset_s

    def reset(self, **options: Any) -> Any:
        time.sleep(self.reset_s)
        return super().reset(**options)


def seeded_length(rng: np.random.Generator) -> int:
    return int(rng.integers(3, 12))


class Told(ScriptedEnv):
    """Tells of success what it was given, step by step; not its own."""

    def __init__(self, name: str, *flags: Any) -> None:
        super().__init__(3, 2, length=len(flags) + 1)
        self.name, self.flags = name, flags

    def reset(self, **options: Any) -> Any:
        self.left = list(self.flags)
        return super().reset(**options)[0], {}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {self.name: self.left.pop(0)} if self.left else {}
