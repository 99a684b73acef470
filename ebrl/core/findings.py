"""`Findings`: what is found out once in a runtime, whoever asks for it and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Findings:
    """Answers that services share. One is looked for at a time, so that nothing disturbs what is measured for another.

    Example:
        >>> async def measure() -> int:
        ...     print("once")
        ...     return 7
        >>> async def ask() -> list[int]:
        ...     findings = Findings()
        ...     return await asyncio.gather(*(findings.get("key", measure) for _ in range(2)))
        >>> asyncio.run(ask())
        once
        [7, 7]
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}
        self._looking = asyncio.Lock()

    async def get(self, key: Hashable, find: Callable[[], Awaitable[T]]) -> T:
        """Return what is known under a key; whoever asks first finds it, and the others wait for that.

        Args:
            key: Of one kind of finding; it has one type.
            find: Awaited where nothing is known. If it raises or is cancelled, the next one that asks looks again.
        """
        if key not in self._found:
            async with self._looking:
                if key not in self._found:
                    self._found[key] = await find()
        found: T = self._found[key]
        return found
