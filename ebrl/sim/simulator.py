"""`Simulator`: one blocking simulator behind its `Border`, the same on a lane and in a child process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn

from ebrl.core.errors import SimulatorError
from ebrl.core.records import Array, EnvSpec, Observation, StepResult
from ebrl.sim.border import Border


class Turns:
    """A reentrant lock that can be taken away from a thread which hangs, so that it holds up nobody for ever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: set[int] = set()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._waiting.add(me)
            try:
                self._changed.wait_for(lambda: self._owner in (None, me))
            finally:
                self._waiting.remove(me)
            self._owner = me
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            if self._owner == threading.get_ident():
                self._depth -= 1
                if not self._depth:
                    self._free()

    def is_awaited_by(self, thread: int | None) -> bool:
        """Whether a thread waits for its turn."""
        return thread in self._waiting

    def take_from(self, thread: int | None) -> None:
        """Let the next one have its turn if it is that thread's, which does not end it."""
        with self._changed:
            if thread is not None and self._owner == thread:
                self._free()

    def _free(self) -> None:
        self._owner, self._depth = None, 0
        self._changed.notify_all()


construction_lock: Final = Turns()
"""Held while a simulator is imported and built.

Meta-World swaps numpy's global generator while building: four builders at once gave 0 of 12 reproducible runs, and
16 of 16 under this lock. Reentrant, since a user's factory may itself ask for a spec.
"""


class Simulator:
    """One simulator. Not thread-safe: one lane owns it for life."""

    def __init__(self, spec: EnvSpec) -> None:
        """Build the environment; waits for other constructions of this process.

        Args:
            spec: What to build, and what to expect of it. Whatever ``spec.make`` raises leaves unchanged.
        """
        self.spec = spec
        self._border = Border(spec)
        with construction_lock:
            self._env = spec.make()

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: Decides everything random in it.

        Raises:
            SimulatorError: The simulator broke its interface.
        """
        self._border.interrupt()
        return self._border.begin(self._env.reset(seed=seed))

    def step(self, actions: Array, finite: bool = False) -> StepResult:
        """Execute a chunk until its end or the end of the episode, whichever is first.

        Args:
            actions: ``[H, *action.shape]``, or ``[*action.shape]`` for one; each is applied `action_repeat` times.
            finite: They are known to be finite: a generator looks at a whole batch at once.

        Returns:
            Exactly one of `terminated` and `truncated` is set at the end of an episode; termination wins.

        Raises:
            InvalidAction: Actions contradict the spec.
            InvalidData: Observation, reward or success contradict it.
            SimulatorError: No episode is running, or the simulator broke its interface.
        """
        border = self._border
        for action in border.take(actions, finite):
            result = self._env.step(action)
            if border.note(result):
                break
        return border.give(result)

    def call(self, fn: Callable[[Any], Any]) -> Any:
        """Return ``fn(env)``, where `env` is what ``spec.make`` returned."""
        return fn(self._env)

    def close(self) -> None:
        """Close the environment."""
        self._border.interrupt("step after close")
        self._env.close()


class Missing:
    """Stands in for a simulator that is not there: every call raises."""

    def __init__(self, error: SimulatorError) -> None:
        self._error = error

    def step(self, *args: Any) -> NoReturn:
        """Raise, as the others do: an exception of its own each time, since tracebacks belong to one raise."""
        raise type(self._error)(*self._error.args)

    reset = call = step

    def close(self) -> None:
        """There is nothing to close."""
