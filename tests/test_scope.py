"""Scopes: the owner's exit ends the children, the first error ends everybody, everybody is awaited."""

from __future__ import annotations

import asyncio

import pytest

from ebrl.core.scope import Scope
from ebrl.core.testing import settle
from tests.helpers import virtually


async def for_ever(log: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(1)  # an end that takes time is waited for
        log.append(name)


async def fail(after_s: float, error: Exception) -> None:
    await asyncio.sleep(after_s)
    raise error


@virtually
async def test_leaving_the_block_ends_and_awaits_the_children() -> None:
    log: list[str] = []
    async with Scope() as scope:
        tasks = [scope.start(for_ever(log, name), name) for name in "ab"]
        await settle()
    assert sorted(log) == ["a", "b"]
    assert all(task.cancelled() for task in tasks)


@virtually
async def test_tasks_have_names_and_results() -> None:
    async with Scope() as scope:
        task = scope.start(asyncio.sleep(1, "result"), "sleeper")
        assert task.get_name() == "sleeper"
        assert await task == "result"


@virtually
async def test_a_child_that_raises_ends_the_others_and_the_owner() -> None:
    log: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with Scope() as scope:
            scope.start(for_ever(log, "other"), "other")
            scope.start(fail(3, ValueError("broken")), "failing")
            await for_ever(log, "owner")
    assert [repr(error) for error in caught.value.exceptions] == ["ValueError('broken')"]
    assert sorted(log) == ["other", "owner"]


@virtually
async def test_errors_of_several_children_leave_together() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with Scope() as scope:
            scope.start(fail(1, ValueError("one")), "one")
            scope.start(fail(1, KeyError("two")), "two")
            await asyncio.Event().wait()
    assert {type(error) for error in caught.value.exceptions} == {ValueError, KeyError}


@virtually
async def test_an_error_from_outside_of_all_tasks_ends_everybody_once() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with Scope() as scope:
            child = scope.start(asyncio.Event().wait(), "child")
            assert scope.fail(ValueError("first"))
            try:
                await asyncio.Event().wait()
            finally:
                assert not scope.fail(ValueError("it ends already"))
    assert [repr(error) for error in caught.value.exceptions] == ["ValueError('first')"]
    assert child.cancelled()
    assert not scope.fail(ValueError("it has ended"))


@virtually
async def test_an_error_of_the_owner_ends_the_children() -> None:
    log: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with Scope() as scope:
            scope.start(for_ever(log, "child"), "child")
            await settle()
            raise ValueError("owner")
    assert caught.group_contains(ValueError, match="owner")
    assert log == ["child"]


@virtually
async def test_cancelling_the_owner_ends_the_children_and_is_not_swallowed() -> None:
    log: list[str] = []

    async def owner() -> None:
        async with Scope() as scope:
            scope.start(for_ever(log, "child"), "child")
            await asyncio.Event().wait()

    async with Scope() as outer:
        task = outer.start(owner(), "owner")
        await settle()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert log == ["child"]


@virtually
async def test_cancel_ends_the_children_and_the_block_goes_on() -> None:
    log: list[str] = []
    async with Scope() as scope:
        scope.start(for_ever(log, "child"), "child")
        await settle()
        scope.cancel()
        await asyncio.sleep(5)
        assert log == ["child"]
        assert await scope.start(asyncio.sleep(1, 7), "later") == 7


@virtually
async def test_children_are_cancelled_in_the_order_of_their_start() -> None:
    """Sets of tasks iterate by address: with them, two equal runs would end differently."""
    log: list[int] = []

    async def child(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            log.append(number)

    async with Scope() as scope:
        for number in range(200):
            scope.start(child(number), f"{number}")
        await settle()
    assert log == list(range(200))
