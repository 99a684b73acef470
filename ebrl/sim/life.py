"""A program, called again and again: what ends it, and what does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Final, Protocol, TypeVar

from ebrl.core.errors import ProgramError, note
from ebrl.core.scope import Scope
from ebrl.sim.recovery import Failing

IDLE: Final = 100  # times in a row that a program may come back without having acted


class Living(Failing, Protocol):
    """What a program drives, with what its calls are counted by.

    Attributes:
        num_calls: Of its methods, so far.
        num_asides: Those of them that neither ask the policy nor step.
    """

    num_calls: int
    num_asides: int

    def finish_episode(self) -> None:
        """Close what is open: the program has returned."""


E = TypeVar("E", bound=Living)


async def live(program: Callable[[E], Awaitable[None]], env: E, scope: Scope) -> None:
    """Call a program until its scope ends or it raises; failures of its simulator are survived (`ebrl.sim.recovery`).

    Raises:
        ProgramError: It is no coroutine function, called nothing, never acts, or was cancelled by somebody else.
        Exception: What else it raised, with a note that says where.
    """
    recovery, num_idle = env.recovery, 0
    while True:
        before, acted = env.num_calls, env.num_calls - env.num_asides
        try:
            running: object = program(env)
            if not isawaitable(running):
                raise ProgramError(
                    f"the program returned {type(running).__name__} and no coroutine: define it with `async def`"
                )
            await running
            if scope.ending:  # it has kept its cancellation to itself, and what it was doing is not done
                return
            env.finish_episode()
            if env.num_calls == before:
                raise ProgramError(
                    "the program returned without a single call of its environment: it would be called again "
                    "for ever; await env.reset() in it"
                )
            if env.num_calls - env.num_asides > acted:
                num_idle = 0
            elif env.fault is None:  # otherwise it had no simulator that it could have acted in
                num_idle += 1
            if num_idle == IDLE:
                raise ProgramError(
                    f"the program returned {IDLE} times in a row without a decision or a step, and would go on so: "
                    "after env.reset(), await env.act_step(obs), or act, step or intervene"
                )
        except asyncio.CancelledError as error:
            if env.index in recovery.dropped:
                return
            if scope.ending:
                raise
            stray = ProgramError(
                f"{error!r} left the program, which the run had not cancelled: its own code cancelled it, or a task "
                "that it awaits"
            )
            _note(stray, env.where())
            raise stray from error
        except Exception as error:
            if not recovery.takes(env, error):
                _note(error, recovery.place(env, error))
                raise
            env.finish_episode()


def _note(error: BaseException, where: str) -> None:
    """Say on every error where it happened, also on those that a TaskGroup of the program has gathered."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            _note(part, where)
    else:
        note(error, where)
