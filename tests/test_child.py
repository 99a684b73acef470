"""The child process of a host: scripts with and without a guard, its parent's end, and what it does not import."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebrl.core.errors import ConfigError, HostDied
from ebrl.core.machine import LocalMachine
from ebrl.sim.fake import ScriptedEnv
from ebrl.sim.hosts import Slot
from ebrl.sim.link import make_order
from ebrl.sim.process import ProcessHost
from ebrl.sim.spec import env_spec

ROOT = Path(__file__).parent.parent

SCRIPT = """
import asyncio, functools
from ebrl.core.machine import LocalMachine
from ebrl.sim.process import ProcessHost
from ebrl.sim.spec import env_spec
from ebrl.sim.fake import ScriptedEnv
{definition}
async def main():
    machine = LocalMachine()
    host = ProcessHost([env_spec({make})], machine, None, "host")
    try:
        await host.open()
        future = asyncio.get_running_loop().create_future()
        host.slots[0].reset(future, 1)
        print("obs", len((await future)[0]))
    finally:
        await host.aclose(5.0)
        await machine.aclose(deadline_s=1.0)
{start}
"""
MINE = "class Mine(ScriptedEnv):\n    pass\n"


@pytest.mark.parametrize(
    ("definition", "make", "start", "output"),
    [
        ("", "ScriptedEnv", "asyncio.run(main())", "obs 39"),
        (MINE, "Mine", 'if __name__ == "__main__": asyncio.run(main())', "obs 39"),
        (MINE, "Mine", "asyncio.run(main())", 'put what it runs behind if __name__ == "__main__"'),
    ],
    ids=["no-guard", "own-class-with-guard", "own-class-without-guard"],
)
def test_scripts(tmp_path: Path, definition: str, make: str, start: str, output: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(definition=definition, make=make, start=start))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=30, check=False,
    )  # fmt: skip
    assert output in done.stdout + done.stderr
    assert "resource_tracker" not in done.stderr


NUDGE = "def nudge(env):\n    print('nudged', type(env).__name__, flush=True)\n"
CALLED = """
        future = asyncio.get_running_loop().create_future()
        host.slots[0].call(future, nudge)
        await future
    finally:
"""


def script_in(folder: Path, name: str, **parts: str) -> Path:
    (folder / name).parent.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(SCRIPT.format(**parts).replace("\n    finally:\n", CALLED))
    return path


def outcome(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=30, check=False, cwd=cwd,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_function_of_the_script_may_be_called_with_a_simulator_of_the_library(tmp_path: Path) -> None:
    start = 'if __name__ == "__main__": asyncio.run(main())'
    script = script_in(tmp_path, "script.py", definition=NUDGE, make="ScriptedEnv", start=start)
    assert "nudged ScriptedEnv" in outcome(str(script), cwd=tmp_path)


def test_what_a_script_defines_under_its_guard_is_nowhere_in_a_process(tmp_path: Path) -> None:
    guarded = 'if __name__ == "__main__":\n    ' + MINE.replace("\n    ", "\n        ")
    start = 'if __name__ == "__main__": asyncio.run(main())'
    script = script_in(tmp_path, "script.py", definition=guarded, make="Mine", start=start)
    last = outcome(str(script), cwd=tmp_path).strip().splitlines()[-1]
    assert "host: its process cannot find what it needs (Can't get" in last
    assert last.endswith(
        'define it at the top of a module, outside of if __name__ == "__main__", or pass host="thread"'
    )


@pytest.mark.parametrize(
    ("definition", "make", "what"),
    [(NUDGE, "ScriptedEnv", r"call(<function nudge"), (MINE + NUDGE, "Mine", "make=<class '__main__.Mine'>")],
)
def test_what_a_child_cannot_find_is_named(tmp_path: Path, definition: str, make: str, what: str) -> None:
    """A package that is run has a module that can be imported under no name."""
    start = 'if __name__ == "__main__": asyncio.run(main())'
    script_in(tmp_path, "mine/__main__.py", definition=definition, make=make, start=start)
    last = outcome("-m", "mine", cwd=tmp_path).strip().splitlines()[-1]
    assert what in last
    assert "is defined in the module mine.__main__, where a process cannot find it: put it into a module" in last


def test_child_ends_when_its_parent_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = SCRIPT.format(definition="import os", make="ScriptedEnv", start="asyncio.run(main())")
    script.write_text(
        text.replace('print("obs", len((await future)[0]))', "print(host._link._process.pid, flush=True); os._exit(0)")
    )
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=30, check=True,
    )  # fmt: skip
    child = int(done.stdout)
    try:
        descriptor = os.pidfd_open(child)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 5.0)[0]
    finally:
        os.close(descriptor)


def test_child_imports_nothing_heavy() -> None:
    code = (
        "import sys, ebrl.sim.child; "
        "print([m for m in ('torch', 'tyro', 'rich', 'gymnasium', 'uvloop', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def blas_threads(env: Any) -> str:
    return os.environ["OMP_NUM_THREADS"]


def sigint_ignored(env: Any) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def has_its_own_group(env: Any) -> bool:
    return os.getpgrp() == os.getpid()


@asynccontextmanager
async def hosted(env: type[ScriptedEnv]) -> AsyncIterator[Slot]:
    machine = LocalMachine()
    host = ProcessHost([replace(env_spec(ScriptedEnv), make=env)], machine, None, "host")
    try:
        await host.open()
        yield host.slots[0]
    finally:
        await host.aclose(10.0)
        await machine.aclose(deadline_s=1.0)


async def ask(post: Callable[..., None], *args: Any) -> Any:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    post(future, *args)
    return await future


def test_child_is_single_threaded_and_heeds_no_signal_of_the_terminal() -> None:
    async def main() -> None:
        async with hosted(ScriptedEnv) as slot:
            assert await ask(slot.call, blas_threads) == "1"
            assert await ask(slot.call, sigint_ignored)
            assert await ask(slot.call, has_its_own_group)

    asyncio.run(main())


class Forks(ScriptedEnv):
    """In a step there are two of it; the second leaves the step as it may."""

    leave: Callable[[], None] = staticmethod(lambda: None)

    def step(self, action: Any) -> Any:
        if (pid := os.fork()) == 0:
            self.leave()
        else:
            os.waitpid(pid, 0)
        return super().step(action)


class ForksAndExits(Forks):
    leave = staticmethod(sys.exit)


@pytest.mark.parametrize("env", [Forks, ForksAndExits])
def test_a_fork_that_comes_back_answers_nobody(env: type[Forks]) -> None:
    async def main() -> None:
        async with hosted(env) as slot:
            await ask(slot.reset, 0)
            for _ in range(5):
                assert (await ask(slot.step, np.zeros((1, 4), np.float32))).num_steps == 1

    asyncio.run(main())


class HasServer(ScriptedEnv):
    """With a process of its own, which nobody ends."""

    def __init__(self) -> None:
        super().__init__()
        self.server = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


def server_of(env: HasServer) -> int:
    return env.server.pid


def die(env: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_what_a_simulator_started_ends_with_its_process(end: str) -> None:
    async def main() -> None:
        async with hosted(HasServer) as slot:
            server = os.pidfd_open(await ask(slot.call, server_of))
            if end == "killed":
                with pytest.raises(HostDied, match="SIGKILL"):
                    await ask(slot.call, die)
        try:
            assert select.select([server], [], [], 5.0)[0]
        finally:
            os.close(server)

    asyncio.run(main())


def test_what_cannot_be_pickled_for_whatever_reason_is_one_line() -> None:
    unpicklable: Any = ctypes.pointer(ctypes.c_int())
    spec = replace(env_spec(ScriptedEnv), make=functools.partial(ScriptedEnv, unpicklable))
    with pytest.raises(ConfigError, match=r"cannot be sent to a process \(ctypes objects containing pointers"):
        make_order([spec])
