"""What every test is held to: nothing left behind, nothing that blocks the loop, no callback that hogs it.

A test opts out of one rule with ``@pytest.mark.leaks(reason)``, ``blocks(reason)`` or ``hogs(reason)``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster
from hypothesis import settings

CALLBACK_LIMIT_S = 0.05
FD_TOLERANCE = 3  # a module imported inside a test may keep a file or /dev/urandom open
PATIENCE_S = 2.0  # for threads and processes that are on their way out
INLINE_ON_PURPOSE = ("VirtualLane._finish", "VirtualLane._begin")  # a virtual machine runs the work itself on the loop

settings.register_profile("ebrl", database=None, deadline=None, derandomize=True)
settings.load_profile("ebrl")


@pytest.fixture(scope="session")
def empty_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of all tests, so that whatever appears there was left by one of them."""
    return tmp_path_factory.mktemp("cwd")


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, empty_directory: Path
) -> Iterator[None]:
    """Fail a test that leaves a task, thread, process, segment of shared memory, open file or file behind."""
    allowed = reason_of(request, "leaks")
    monkeypatch.chdir(empty_directory)
    left_tasks = watch_tasks(monkeypatch)
    segments = watch_segments(monkeypatch)
    threads, children, fds = set(threading.enumerate()), child_processes(), open_files()
    yield
    leaks = [f"task {name}" for name in left_tasks]
    leaks += [f"thread {thread.name}" for thread in living(threads)]
    leaks += [f"process {pid}: {name}" for pid, name in living_children(children).items()]
    leaks += [f"shared memory {name}" for name in segments if (Path("/dev/shm") / name).exists()]
    leaks += leaked_files(fds)
    for path in sorted(empty_directory.iterdir()):
        leaks.append(f"file {path.name} in the working directory")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if leaks and allowed is None:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def blockbuster(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """Make known blocking calls raise `blockbuster.BlockingError` where an event loop runs in the same thread."""
    if reason_of(request, "blocks") is not None:
        yield None
        return
    guard = BlockBuster()
    guard.functions["os.getcwd"].deactivate()
    for function in guard.functions.values():
        function.can_block_in("ebrl/core/lanes.py", {"execute"})  # inline on the loop only on a virtual machine
        function.can_block_in("<frozen importlib._bootstrap>", {"_find_and_load"})
        function.can_block_in("traceback.py", {"extract_stack", "extract", "_extract_from_extended_frame_gen"})
        function.can_block_in("logging/__init__.py", {"emit", "acquire", "flush"})
        function.can_block_in("asyncio/runners.py", {"_lazy_init", "close"})
        function.can_block_in("_pytest/assertion/rewrite.py", {"exec_module", "find_spec"})
    for name in ("os.path.abspath", "os.getcwd", "os.path.samestat"):  # arithmetic, or a system call without a disk
        del guard.functions[name]
    guard.activate()
    try:
        yield guard
    finally:
        guard.deactivate()


@pytest.fixture(autouse=True)
def no_callback_hogs_the_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which one callback of an asyncio loop used more than 50 ms of its thread's CPU time.

    uvloop has callbacks of its own, which are not seen here. Garbage collections do not count: how long they take
    depends on all that the test process has imported, and they hit whoever runs at the time. What a hypervisor takes
    away does count as CPU time, so pyproject.toml has a test that fails by this rule alone run a second time.
    """
    allowed = reason_of(request, "hogs")
    hogs: list[str] = []
    collecting, collect_began = threading.local(), threading.local()

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collect_began.at = time.thread_time()
        else:
            collecting.total = getattr(collecting, "total", 0.0) + time.thread_time() - collect_began.at

    run: Callable[[asyncio.Handle], None] = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        what = handle._callback  # type: ignore[attr-defined]  # gone once it has run and was cancelled
        began, garbage = time.thread_time(), getattr(collecting, "total", 0.0)
        run(handle)
        used = time.thread_time() - began - (getattr(collecting, "total", 0.0) - garbage)
        if used > CALLBACK_LIMIT_S and getattr(what, "__qualname__", "") not in INLINE_ON_PURPOSE:
            hogs.append(f"{used * 1e3:.0f} ms in {what!r} of {getattr(what, '__self__', None)!r}")

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    gc.callbacks.append(collected)
    yield
    gc.callbacks.remove(collected)
    if hogs and allowed is None:
        pytest.fail("callbacks that hogged the loop: " + "; ".join(hogs), pytrace=False)


def reason_of(request: pytest.FixtureRequest, marker: str) -> str | None:
    """Return why the test opted out of a rule, or None if it did not."""
    found = request.node.get_closest_marker(marker)
    if found is None:
        return None
    reason = found.args[0] if found.args else found.kwargs.get("reason", "")
    if not isinstance(reason, str) or len(reason) < 8:
        pytest.fail(f"@pytest.mark.{marker} needs a reason", pytrace=False)
    return reason


def watch_tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that fills with the tasks that `asyncio.Runner` found alive after its main task had ended."""
    left: list[str] = []
    cancel_all: Callable[[asyncio.AbstractEventLoop], None] = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]

    def watched(loop: asyncio.AbstractEventLoop) -> None:
        left.extend(sorted(task.get_name() for task in asyncio.all_tasks(loop)))
        cancel_all(loop)

    monkeypatch.setattr(asyncio.runners, "_cancel_all_tasks", watched)
    return left


def watch_segments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that fills with the names of shared memory made in this process.

    /dev/shm belongs to the whole machine: comparing listings would blame a test for what a neighbour did.
    """
    made: list[str] = []
    init = shared_memory.SharedMemory.__init__

    def watched(self: shared_memory.SharedMemory, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self.name.lstrip("/"))

    monkeypatch.setattr(shared_memory.SharedMemory, "__init__", watched)
    return made


def living(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return threads that are new and do not end by themselves."""
    deadline = time.monotonic() + PATIENCE_S
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in new if thread.is_alive()]


def child_processes() -> dict[int, str]:
    """Return the children of this process, except the resource tracker, which multiprocessing keeps for life."""
    children: dict[int, str] = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:  # the thread has ended
            continue
        for pid in pids:
            try:
                command = (Path("/proc") / pid / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "resource_tracker" not in command:
                children[int(pid)] = command or "(zombie)"
    return children


def living_children(before: dict[int, str]) -> dict[int, str]:
    """Return children that are new and do not end by themselves."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        new = {pid: name for pid, name in child_processes().items() if pid not in before}
        if not new or time.monotonic() > deadline:
            return new
        time.sleep(0.02)


def open_files() -> dict[int, str]:
    """Return what every open file descriptor of this process refers to."""
    files: dict[int, str] = {}
    try:
        fds = os.listdir("/proc/self/fd")
    except OSError:  # not on this operating system
        return files
    for fd in fds:
        try:
            files[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one that read the listing
            continue
    return files


def leaked_files(before: dict[int, str]) -> list[str]:
    """Return file descriptors that are new, if they are more than the tolerance even after a collection."""
    if len(open_files()) - len(before) <= FD_TOLERANCE:
        return []
    gc.collect()
    new = {fd: name for fd, name in open_files().items() if before.get(fd) != name}
    if len(open_files()) - len(before) <= FD_TOLERANCE:
        return []
    return [f"open file {name}" for name in new.values()]
