"""`Link`: the child process of a `ebrl.sim.process.ProcessHost`, and the socket to it. The loop never blocks on either.

A lane starts the process and then waits for its end, so that nobody polls. A plain subprocess is used rather than
``multiprocessing.Process``: scripts need no ``__main__`` guard unless they define the environment themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from ebrl.core.errors import IN_CHILD, UNGUARDED, ConfigError, EbrlError, HostDied
from ebrl.core.futures import heed
from ebrl.core.protocols import Lane
from ebrl.core.records import EnvSpec
from ebrl.sim import child
from ebrl.sim.shm import frame

# Importing multiprocessing also makes "__mp_main__" an alias of the script here, under which name exceptions that a
# script defines come back from a child.
assert multiprocessing.current_process() is not None

# The search path first: the package may have been found through a path that only this process knows.
_BOOT: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {path!r}; "
    "from ebrl.sim.child import main; main()"
)
_ONE_THREAD: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
KILL_S: Final = 2.0  # for the kernel to end a killed process


class OutOfReach(ConfigError):
    """What a process is to build cannot be sent to it, or is not to be found there."""


class Link:
    """One child and the socket to it."""

    def __init__(
        self,
        name: str,
        lane: Lane,
        memory: int,
        take: Callable[[bytearray], int],
        end: Callable[[EbrlError], None],
    ) -> None:
        """Open the socket; `start` starts the process.

        Args:
            name: Of the host, for messages.
            lane: Starts the process and waits for its end; nobody else uses it.
            memory: Descriptor for the child; closed here.
            take: Given all bytes that arrived; returns how many it used.
            end: Called when the process has ended, and nobody has asked it to; completes `ready` if need be.
        """
        self.lane = lane
        self._name = name
        self._memory = memory
        self._take = take
        self._end = end
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(heed)
        self._sock, self._theirs = socket.socketpair()
        self._sock.setblocking(False)
        self._process: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[int] | None = None
        self._spawned: asyncio.Future[None] | None = None
        self._in = bytearray()
        self._out = bytearray()
        self._open = True
        self._closing = False

    def start(self, order: bytes) -> None:
        """Start the child; `ready` tells when it can build simulators."""
        self._spawned = self.lane.run(self._spawn, n=0)
        self._spawned.add_done_callback(lambda spawned: self._connect(spawned, order))

    def kill(self) -> None:
        """End the child at once; `end` is called when it has ended."""
        process = self._process
        if process is not None and process.returncode is None:  # Popen.kill would look whether it has ended, and reap
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def send(self, data: bytes | bytearray) -> None:
        """Send in order, at once as far as the socket takes it."""
        if not self._open:
            return
        if not self._out:
            data = data[self._write(data) :]
            if not data:
                return
            self._loop.add_writer(self._sock.fileno(), self._drain)
        self._out += data

    async def aclose(self, deadline_s: float) -> bool:
        """Hang up, wait for the child to close its simulators, and kill it at the deadline.

        Returns:
            Whether it had to be killed.
        """
        self._closing = True
        if self._spawned is not None:
            await asyncio.wait([self._spawned])
        killed = False
        exited = self._watch()
        if exited is not None and self._process is not None:
            with contextlib.suppress(OSError):  # the child is gone already
                self._sock.shutdown(socket.SHUT_WR)
            if not self.ready.done():  # it imports, and would hear of the end only afterwards
                self.kill()
            done, _ = await asyncio.wait([exited], timeout=deadline_s)
            if not done:
                killed = True
                self.kill()
                await asyncio.wait([exited], timeout=KILL_S)
        self._hang_up()
        if self._spawned is None:
            self._close_theirs()
        self.ready.cancel()
        return killed

    def _connect(self, spawned: asyncio.Future[None], order: bytes) -> None:
        if self._closing:
            return
        if spawned.cancelled() or spawned.exception() is not None:
            why = "its lane has ended" if spawned.cancelled() else spawned.exception()
            self._hang_up()
            self._end(HostDied(f"the process of {self._name} could not be started: {why}"))
            return
        self._watch()
        self._loop.add_reader(self._sock.fileno(), self._receive)
        self.send(frame(order))

    def _spawn(self) -> None:
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        fds = (self._theirs.fileno(), self._memory)
        numbers = map(str, (*fds, os.getpid()))
        command = [sys.executable, *flags, "-c", _BOOT.format(path=list(map(str, sys.path))), *numbers]
        env = {**os.environ, **_ONE_THREAD}
        try:  # in a group of its own: signals to ours are our business, and what it starts can be found again
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=env, process_group=0)
        finally:
            self._close_theirs()

    def _close_theirs(self) -> None:
        self._theirs.close()
        os.close(self._memory)

    def _watch(self) -> asyncio.Future[int] | None:
        if self._exited is None and self._process is not None:
            self._exited = self.lane.run(wait_for, self._process, n=0)
            self._exited.add_done_callback(self._ended)
        return self._exited

    def _ended(self, exited: asyncio.Future[int]) -> None:
        while self._open and self._receive():  # what it still answered
            pass
        self._hang_up()
        if self._closing or exited.cancelled():
            return
        code = exited.result()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._end(HostDied(f"the process of {self._name} ended by itself: {how}"))

    def _receive(self) -> bool:
        try:
            data = self._sock.recv(1 << 16)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._hang_up()
            self.kill()  # it hung up, so it ends or is of no use; its exit code stays if it has one
            return False
        self._in += data
        del self._in[: self._take(self._in)]
        return True

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError:  # the end of the process is reported by `_ended`
            return len(data)

    def _drain(self) -> None:
        del self._out[: self._write(self._out)]
        if not self._out:
            self._loop.remove_writer(self._sock.fileno())

    def _hang_up(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()


def make_order(specs: Sequence[EnvSpec]) -> child.Order:
    """Pickle what the child has to build, one simulator per spec.

    Raises:
        ConfigError: It cannot be pickled, or is defined where a child cannot find it.
    """
    if IN_CHILD in os.environ:
        raise ConfigError(UNGUARDED)
    for spec in {id(spec): spec for spec in specs}.values():
        packed(spec, f"{spec.id}: make={spec.make!r}")
    return child.Order(pickle.dumps(tuple(specs)), *_main(), tuple(sys.argv))


def packed(value: Any, what: str) -> bytes:
    """Pickle something for a child.

    Args:
        value: It may refer to the script that runs, which the child then imports.
        what: It is, for messages.

    Raises:
        OutOfReach: It cannot be pickled, or is defined where a child cannot find it.
    """
    try:
        data = pickle.dumps(value)
    except Exception as error:  # whatever a user's object does when it is pickled
        raise unsendable(what, error) from error
    if child.MAIN in data and (where := _hidden_main()) is not None:
        out = 'put it into a module, or pass host="thread"'
        raise OutOfReach(f"{what} is defined in {where}, where a process cannot find it: {out}")
    return data


def unsendable(what: str, error: Exception) -> OutOfReach:
    """Return what is said of something that cannot be pickled, or not there and back."""
    out = 'define it at the top of a module, or pass host="thread"'
    return OutOfReach(f"{what} cannot be sent to a process ({error}): {out}")


def not_found(name: str, error: Exception) -> OutOfReach:
    """Return what the child of a host says that cannot find what it is to build."""
    out = 'at the top of a module, outside of if __name__ == "__main__", or pass host="thread"'
    return OutOfReach(f"{name}: its process cannot find what it needs ({error}): define it {out}")


def _main() -> tuple[str | None, str | None]:
    """Return the name of the module that was started as one, or else the file of the script, if there is one."""
    main = sys.modules["__main__"]
    return (None, getattr(main, "__file__", None)) if main.__spec__ is None else (main.__spec__.name, None)


def _hidden_main() -> str | None:
    """Return what runs where a child cannot import it; None: it can."""
    name, path = _main()
    if name is not None:
        return f"the module {name}" if name.rpartition(".")[2] == "__main__" else None
    return None if path is not None and os.path.isfile(path) else "an interactive session"


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Wait until a child has ended, end what it has started and left behind, and return its exit code."""
    if sys.platform == "linux":
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its number is still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
