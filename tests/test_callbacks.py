"""What raises in a callback of the loop, where no task would, ends the run as any other error does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import uvloop

from ebrl.core.lanes import ThreadLane
from ebrl.core.machine import LocalMachine
from ebrl.core.profile import StageProfile
from ebrl.core.protocols import Machine
from ebrl.core.runtime import Runtime
from ebrl.core.virtual import VirtualLoop
from ebrl.core.virtual_machine import VirtualLane, VirtualMachine
from ebrl.gen.batcher import Batcher
from ebrl.gen.service import BatchService
from tests.helpers import leaves, scripted_spec, training, virtually

SPEC = scripted_spec()
Main = Callable[[Machine, Batcher | None], Coroutine[Any, Any, None]]


class Broken(ValueError):
    """What is raised where it should not be."""


class BrokenBatcher(Batcher):
    """Raises when it is asked."""

    def decide(self, num_waiting: int, oldest_age_s: float) -> tuple[int, float | None]:
        raise Broken


class LateBatcher(Batcher):
    """Raises when it is asked again by a timer."""

    def decide(self, num_waiting: int, oldest_age_s: float) -> tuple[int, float | None]:
        if oldest_age_s > 0.0:
            raise Broken
        return 0, 1e-6


def broken(*args: Any, **kwargs: Any) -> Any:
    raise Broken


def broken_launch(patch: pytest.MonkeyPatch) -> None:
    for kind in (ThreadLane, VirtualLane):
        run = kind.run
        patch.setattr(kind, "run", lambda lane, fn, *args, n=1, run=run: broken() if n else run(lane, fn, *args, n=n))


def broken_landing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StageProfile, "observe", broken)


async def generate(machine: Machine, batcher: Batcher | None) -> None:
    async with training(SPEC, machine, batcher=batcher) as stage:
        async for _ in stage.trainer:
            pass


async def serve(machine: Machine, batcher: Batcher | None) -> None:
    async with Runtime(machine) as rt:
        service: BatchService[int, int] = rt.start(BatchService(lambda items: list(items), batcher=batcher))
        await service(1)


@pytest.mark.parametrize("main", [generate, serve])
@pytest.mark.parametrize(
    ("batcher", "prepare"),
    [(BrokenBatcher(), None), (LateBatcher(), None), (None, broken_launch), (None, broken_landing)],
    ids=["batcher", "batcher at its timer", "launch", "landing"],
)
@pytest.mark.parametrize("loop", [VirtualLoop, asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_an_error_on_the_way_of_a_batch_ends_the_run(
    main: Main,
    batcher: Batcher | None,
    prepare: Callable[[pytest.MonkeyPatch], None] | None,
    loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if prepare is not None:
        prepare(monkeypatch)
    machine = VirtualMachine({}) if loop is VirtualLoop else LocalMachine(1)
    with pytest.raises(ExceptionGroup) as caught, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main(machine, batcher))
    assert {type(error) for error in leaves(caught.value)} == {Broken}


@virtually
async def test_a_law_of_a_model_that_raises_ends_the_run() -> None:
    def law(n: int, rng: np.random.Generator) -> float:
        raise Broken

    with pytest.raises(ExceptionGroup) as caught:
        await generate(VirtualMachine({"gen": law}), None)
    assert [type(error) for error in leaves(caught.value)] == [Broken]


@virtually
async def test_a_cancellation_that_leaves_a_callback_is_an_error_too() -> None:
    class Cancels(Batcher):
        def decide(self, num_waiting: int, oldest_age_s: float) -> tuple[int, float | None]:
            raise asyncio.CancelledError

    with pytest.raises(ExceptionGroup) as caught:
        await serve(VirtualMachine({}), Cancels())
    (error,) = leaves(caught.value)
    assert str(error) == "CancelledError() left a callback of the loop"


@virtually
async def test_callbacks_of_others_are_none_of_its_business() -> None:
    heard: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()

    def hear(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        heard.append(context)

    loop.set_exception_handler(hear)
    async with Runtime(VirtualMachine({})):
        loop.call_soon(broken)
        await asyncio.sleep(1)
        loop.call_exception_handler({"message": "no callback"})
    assert [context.get("exception", context["message"]) for context in heard][1:] == ["no callback"]
    assert isinstance(heard[0]["exception"], Broken)
    assert loop.get_exception_handler() is hear
