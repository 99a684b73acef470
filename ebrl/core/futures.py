"""Futures that are completed from elsewhere, and that perhaps nobody awaits any more."""

from __future__ import annotations

import asyncio
from typing import Any

from ebrl.core.errors import SimulatorError


def heed(future: asyncio.Future[Any]) -> None:
    """Look at what became of a future that perhaps nobody awaits, so that nobody complains."""
    if not future.cancelled():
        future.exception()


def complete(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Give a result to whoever still waits for it."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration | StopAsyncIteration):  # a future refuses the one, and the other ends a loop
        wrapped = SimulatorError(f"{error!r} left a simulator")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)
