"""Many things at once, and no more of them than that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def at_once(
    items: AsyncGenerator[T, None], work: Callable[[T], Awaitable[bool]], most: int
) -> None:
    """Work through items as they come.

    Args:
        work: False begins nothing more; what is under way goes to its end.
        most: under way at once.

    Raises: the first error of `items` or `work`; what was under way is cancelled.
    """
    going, gate = True, asyncio.Semaphore(most)

    async def one(item: T) -> None:
        nonlocal going
        try:
            going = await work(item) and going
        finally:
            gate.release()

    try:
        async with asyncio.TaskGroup() as group, aclosing(items):
            async for item in items:
                await gate.acquire()
                if not going:
                    break
                group.create_task(one(item))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
