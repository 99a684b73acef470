"""Environments that need one kind of host, for tests of ``host="auto"``; imported by children, and so light."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

from ebrl.core.errors import ConfigError
from ebrl.sim.fake import ScriptedEnv, ScriptedFault

STEP_S = 0.03


class Holding(ScriptedEnv):
    """Each step holds the interpreter lock. It does not compute, so that two may do so at once on one core."""

    def step(self, action: Any) -> Any:
        ctypes.PyDLL(None).usleep(round(1e6 * STEP_S))
        return super().step(action)


class OnlyAlone(ScriptedEnv):
    """Fails where another one of its kind is in the same process.

    Args:
        how: ``"crash"``, ``"raise"`` or ``"hang"``.
    """

    num = 0

    def __init__(self, how: str) -> None:
        super().__init__(3, 2, length=4)
        OnlyAlone.num += 1
        if OnlyAlone.num == 1:
            return
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "raise":
            raise ScriptedFault("another one is here")
        threading.Event().wait()

    def close(self) -> None:
        OnlyAlone.num -= 1


class OnlyInCompany(ScriptedEnv):
    """Fails in the main thread of a process, where a simulator is that has a process of its own.

    Args:
        how: ``"crash"`` or ``"raise"``.
    """

    def __init__(self, how: str) -> None:
        super().__init__(3, 2, length=4)
        self.how = how

    def step(self, action: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            if self.how == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise ScriptedFault("in the main thread")
        return super().step(action)


def refuse() -> None:
    """Make no environment."""
    raise ConfigError("pictures need a display")
