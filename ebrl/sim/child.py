"""The child of a process host: owns its simulators, and answers until the parent hangs up.

Imports neither torch nor anything of a user interface, so that it starts fast and stays small. Started by
`ebrl.sim.process.ProcessHost`, never by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ebrl.core.errors import IN_CHILD, SimulatorError, note
from ebrl.core.records import EnvSpec, StepResult
from ebrl.sim.border import SCALARS
from ebrl.sim.shm import BUILD, CALL, CLOSE, CONTROL, FRAME, HEADER, PLAIN, RESET, STEP, Rows, frame, frame_end
from ebrl.sim.simulator import Simulator

FLUSH_S: Final = 5e-5
"""An answer waits this long for company: steps of microseconds leave together, others at once."""

ORPHAN_S: Final = 5.0
"""How long a call may still run once the parent is gone."""

PR_SET_PDEATHSIG: Final = 1

MAIN: Final = b"__main__"
"""In a pickle that refers to the user's script."""

_NAN: Final = float("nan")


@dataclass(frozen=True, slots=True)
class Order:
    """First message: what to build.

    Attributes:
        specs: Pickled tuple of one `EnvSpec` per simulator.
        main_name: Module name of the user's script, if it was started as one.
        main_path: Its file otherwise. The script is imported before something is unpickled that refers to it.
        argv: Of the parent, for the script that is imported.
    """

    specs: bytes
    main_name: str | None = None
    main_path: str | None = None
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to the parent.

    Attributes:
        error: Pickled, or None when that does not work.
        summary: One line.
        text: The traceback here.
    """

    error: bytes | None
    summary: str
    text: str


class Worker:
    """The simulators, and the loop that serves them."""

    def __init__(self, sock: socket.socket, memory_fd: int) -> None:
        self._sock = sock
        self._memory_fd = memory_fd
        self._in = bytearray()
        self._out = bytearray()
        self._pid = os.getpid()
        self._order: Order
        self._has_main = False
        self._specs: tuple[EnvSpec, ...] = ()
        self._sims: list[Simulator | None] = []
        self._rows: Rows

    def run(self) -> None:
        """Begin, serve until the parent hangs up, close."""
        say(self._sock, self._attempt(self._begin))
        try:
            self._serve()
        finally:
            for row in range(len(self._sims)):
                payload = self._attempt(partial(self._close, row))
                with contextlib.suppress(ConnectionError):  # the parent is gone; the others are closed all the same
                    say(self._sock, payload)

    def _begin(self) -> None:
        self._order = pickle.loads(self._read_frame())
        self._specs = self._unpickle(self._order.specs)
        self._rows = Rows(self._specs, self._memory_fd)
        os.close(self._memory_fd)
        self._sims = [None] * len(self._specs)

    def _build(self, row: int) -> None:
        self._sims[row] = Simulator(self._specs[row])
        if None not in self._sims:
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def _close(self, row: int) -> None:
        sim, self._sims[row] = self._sims[row], None
        if sim is not None:
            sim.close()

    def _serve(self) -> None:
        if not self._sims:  # it could not begin; the parent has heard why, and ends us
            self._receive()
            return
        clock, running = time.perf_counter, self._rows.running
        while self._in or self._receive():
            began = sent = last = clock()
            while len(self._in) >= 2:
                row = self._in[0] | self._in[1] << 8
                del self._in[:2]
                running[0] = row + 1
                self._answer(row)
                running[0] = 0
                now = clock()
                self._rows.call_s[row] = now - last
                last = now
                if now - sent > FLUSH_S:
                    self._flush()
                    sent = now
                    last = clock()
            self._rows.busy_s[0] += clock() - began
            self._flush()
            if self._in and not self._receive():  # half a number
                return

    def _answer(self, row: int) -> None:
        payload = self._operate(row)
        if os.getpid() != self._pid:  # a simulator has forked, and the other one has come back too
            os._exit(1)
        self._rows.status[row] = PLAIN if payload is None else FRAME
        self._out += row.to_bytes(2, "little")
        if payload is not None:
            self._out += frame(payload)

    def _operate(self, row: int) -> bytes | None:
        rows = self._rows
        op = rows.op[row]
        if op == BUILD:
            return self._attempt(partial(self._build, row))
        if op == CLOSE:
            return self._attempt(partial(self._close, row))
        if op == CALL:
            request = self._read_frame()
            return self._attempt(lambda: built(self._sims[row]).call(self._unpickle(request)))
        try:
            sim = built(self._sims[row])
            if op == STEP:
                result = sim.step(rows.actions[row][: rows.num_actions[row]])
                self._write_step(row, result)
            else:
                assert op == RESET
                self._write(row, *sim.reset(rows.seed[row]))
        except BaseException as error:  # the border of the process: it travels to the task that asked
            return pickle.dumps(failure(error))
        return None

    def _unpickle(self, data: bytes) -> Any:
        if MAIN in data and not self._has_main:
            import_main(self._order)
            self._has_main = True
        return pickle.loads(data)

    def _attempt(self, fn: Any) -> bytes:
        try:
            return pickle.dumps(fn())
        except BaseException as error:  # the border of the process: it travels to the task that asked
            return pickle.dumps(failure(error))

    def _write_step(self, row: int, result: StepResult) -> None:
        rows, rewards = self._rows, result.rewards
        start = row * rows.reward_stride
        for index, reward in enumerate(rewards, start):
            rows.rewards[index] = reward
        rows.num_steps[row] = len(rewards)
        rows.terminated[row] = result.terminated
        rows.truncated[row] = result.truncated
        self._write(row, result.obs, result.info)

    def _write(self, row: int, obs: Any, info: dict[str, Any]) -> None:
        target: Any = self._rows.obs[row]
        if isinstance(target, dict):
            for key, array in target.items():
                array[...] = obs[key]
        else:
            target[...] = obs
        infos = self._rows.infos
        for index, key in enumerate(self._rows.info_keys, row * self._rows.num_infos):
            value = info.get(key, _NAN)
            infos[index] = value if isinstance(value, SCALARS) else _NAN

    def _receive(self) -> bool:
        data = self._sock.recv(1 << 16)
        self._in += data
        return bool(data)

    def _read_frame(self) -> bytes:
        while (end := frame_end(self._in, 0)) is None:
            if not self._receive():
                raise ConnectionError("the parent hung up in the middle of a message")
        payload = bytes(self._in[HEADER.size : end])
        del self._in[:end]
        return payload

    def _flush(self) -> None:
        self._sock.sendall(self._out)
        self._out.clear()


def say(sock: socket.socket, payload: bytes) -> None:
    """Tell the parent what is no answer to an operation: that all is imported, and how each simulator was closed."""
    sock.sendall(CONTROL.to_bytes(2, "little") + frame(payload))


def built(sim: Simulator | None) -> Simulator:
    """Return a simulator that is there.

    Raises:
        SimulatorError: It was not built, or is closed.
    """
    if sim is None:
        raise SimulatorError("the simulator was not built, or is closed")
    return sim


def failure(error: BaseException) -> Failure:
    """Pack an exception; the type survives if it can be pickled there and back."""
    summary = traceback.format_exception_only(error)[-1].strip()
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception):  # SystemExit would end the parent's loop
        return Failure(None, summary, text)
    try:
        packed = pickle.dumps(error)
        if type(pickle.loads(packed)) is not type(error):
            return Failure(None, summary, text)
    except Exception:  # whatever a user's exception does when pickled
        return Failure(None, summary, text)
    return Failure(packed, summary, text)


def unpack(payload: bytes) -> tuple[Any, BaseException | None]:
    """Return what a frame holds: a value, or the exception to raise."""
    try:
        value = pickle.loads(payload)
        if not isinstance(value, Failure):
            return value, None
        error = SimulatorError(value.summary) if value.error is None else pickle.loads(value.error)
        note(error, f"in the simulator's process:\n{value.text.rstrip()}")
    except Exception as broken:  # the border of the process: whatever unpickling a user's object raises
        return None, broken
    return None, error


def import_main(order: Order) -> None:
    """Make the user's script importable under the name ``__main__``, as multiprocessing does."""
    from multiprocessing import spawn  # only scripts that define their own environment pay for the import

    sys.argv[:] = order.argv
    if order.main_name is not None:
        spawn._fixup_main_from_name(order.main_name)  # type: ignore[attr-defined]
    elif order.main_path is not None:
        spawn.import_main_path(order.main_path)


def end_with(parent: int) -> None:
    """Have the kernel end this process with its parent: a call may hold the interpreter lock for ever.

    Where the kernel cannot, there is `watch_parent`.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0 and os.getppid() != parent:
            os._exit(1)  # it was gone before


def watch_parent(sock: socket.socket) -> None:
    """End the process when the parent is gone and a call still runs: nobody would be left to kill it."""
    poll = select.poll()
    poll.register(sock, 0)  # only the end of both directions, which a living parent does not bring about

    def wait() -> None:
        poll.poll()
        threading.Event().wait(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=wait, name="ebrl-parent", daemon=True).start()


def main() -> None:
    """Run; descriptors of socket and memory are the arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.environ[IN_CHILD] = "1"
    sock_fd, memory_fd, parent = map(int, sys.argv[1:4])
    del sys.argv[1:]
    end_with(parent)
    for fd in (sock_fd, memory_fd):
        os.set_inheritable(fd, False)
    sock = socket.socket(fileno=sock_fd)
    watch_parent(sock)
    try:
        Worker(sock, memory_fd).run()
    except ConnectionError:  # the parent is gone
        sys.exit(1)
