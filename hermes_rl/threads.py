"""Work that is never left half done behind a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")


async def to_end(work: Awaitable[_T]) -> _T:
    """Await something; a cancellation is raised only once it has ended by itself."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # seen: the cancellation goes first
        raise


async def in_thread(work: Callable[..., _T], *args: object) -> _T:
    """Run blocking work in a thread, to its end: what it writes is never still being written when
    the caller has moved on.
    """
    return await to_end(asyncio.to_thread(work, *args))
