"""The child process of a host: scripts with and without a guard, its parent's end, and what it does not import."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebrl.core.machine import LocalMachine
from ebrl.sim.fake import ScriptedEnv
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


def test_child_is_single_threaded_and_ignores_ctrl_c() -> None:
    async def main() -> None:
        machine = LocalMachine()
        host = ProcessHost([env_spec(ScriptedEnv)], machine, None, "host")
        try:
            await host.open()
            for fn, expected in ((blas_threads, "1"), (sigint_ignored, True)):
                future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                host.slots[0].call(future, fn)
                assert await future == expected
        finally:
            await host.aclose(10.0)
            await machine.aclose(deadline_s=1.0)

    asyncio.run(main())


def test_order_names_the_main_module_only_where_it_is_needed() -> None:
    order = make_order([env_spec(ScriptedEnv)] * 2)
    assert (order.main_name, order.main_path) == (None, None)
