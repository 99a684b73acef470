"""The guards of conftest.py catch what they are there for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

CULPRITS = """
import asyncio, subprocess, sys, threading, time
from multiprocessing import shared_memory
from pathlib import Path
import pytest
KEEP = []

async def for_ever():
    await asyncio.Event().wait()

def test_task():
    async def main():
        KEEP.append(asyncio.create_task(for_ever(), name="orphan"))
        await asyncio.sleep(0)
    asyncio.run(main())

def test_thread():
    threading.Thread(target=time.sleep, args=(6,), name="sleepy", daemon=True).start()

def test_process():
    KEEP.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6)"]))

def test_segment():
    KEEP.append(shared_memory.SharedMemory(create=True, size=8))

def test_open_files():
    KEEP.extend(open("/dev/null") for _ in range(9))

def test_file():
    Path("left.txt").write_text("x")

def test_blocking():
    async def main():
        time.sleep(0.01)
    asyncio.run(main())

def test_hog():
    async def main():
        end = time.thread_time() + 0.08
        while time.thread_time() < end:
            pass
    asyncio.run(main())

def test_slow_once():
    async def main():
        end = time.thread_time() + (0.0 if "slow once" in KEEP else 0.08)
        while time.thread_time() < end:
            pass
    asyncio.run(main())
    KEEP.append("slow once")

def test_fails_once():
    KEEP.append("failed")
    assert KEEP.count("failed") == 2

@pytest.mark.hogs("")
def test_reason():
    pass

@pytest.mark.leaks("shows that a reason opts out")
@pytest.mark.blocks("shows that a reason opts out")
@pytest.mark.hogs("shows that a reason opts out")
def test_excused():
    async def main():
        time.sleep(0.01)
        end = time.thread_time() + 0.08
        while time.thread_time() < end:
            pass
    asyncio.run(main())
    Path("left.txt").write_text("x")

def test_innocent():
    async def main():
        await asyncio.to_thread(time.sleep, 0.01)
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0.01))
    asyncio.run(main())

def teardown_module():
    for thing in KEEP:
        if isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
        elif isinstance(thing, shared_memory.SharedMemory):
            thing.close()
            thing.unlink()
"""
OPTIONS = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", ".", "-W", "ignore", "-q", "test_culprits.py"]
EXPECTED = {
    "task": "left behind: task orphan",
    "thread": "left behind: thread sleepy",
    "process": "left behind: process",
    "segment": "left behind: shared memory",
    "open_files": "left behind: open file /dev/null",
    "file": "left behind: file left.txt in the working directory",
    "blocking": "Blocking call to time.sleep",
    "fails_once": "assert 1 == 2",
    "hog": "callbacks that hogged the loop",
    "reason": "@pytest.mark.hogs needs a reason",
}


@pytest.mark.slow
def test_every_culprit_is_caught_and_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "test_culprits.py").write_text(CULPRITS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *OPTIONS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    summary = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    caught = {line.split("::test_")[1].split(" ")[0] for line in summary}
    assert caught == set(EXPECTED), done.stdout + done.stderr
    for name, message in EXPECTED.items():
        assert message in done.stdout, f"{name}: {done.stdout}"
