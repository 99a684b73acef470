"""`run`: the event loop of a program that uses EBRL."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ebrl.core.errors import ConfigError

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end, on uvloop where it is installed (a fifth to two thirds less loop time), else on asyncio.

    The first Ctrl-C, or a first SIGTERM for which nobody has a handler, cancels `main`, so that everything in it closes
    in order; then `KeyboardInterrupt` is raised, with the argument ``"SIGTERM"`` where it was that. Where something
    blocks the loop, so that the first cannot be heeded, a second of the same kind raises it there and then.

    Args:
        main: The program.

    Raises:
        ConfigError: An event loop runs here, as in a notebook.
    """
    if asyncio._get_running_loop() is not None:
        main.close()
        raise ConfigError("an event loop runs here, as in a notebook: await main() instead of ebrl.run(main())")
    terminated: list[bool] = []
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            return runner.run(_heeding_sigterm(main, terminated))
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            if terminated or isinstance(error.__context__, asyncio.CancelledError):
                names = [signal.SIGTERM.name] if terminated else []
                raise KeyboardInterrupt(*names) from None  # what was cancelled is nobody's mistake, and no news
            raise


async def _heeding_sigterm(main: Coroutine[Any, Any, T], terminated: list[bool]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    asked = False

    def end() -> None:
        terminated.append(True)
        task.cancel()

    def heed(*_: Any) -> None:
        nonlocal asked
        if not asked:
            asked = True
            loop.call_soon_threadsafe(end)
        elif not terminated:  # something blocks the loop; later ones leave alone what closes because of the first
            raise KeyboardInterrupt(signal.SIGTERM.name)

    if ours:
        signal.signal(signal.SIGTERM, heed)
    try:
        return await main
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes uvloop's event loops where it is installed; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
