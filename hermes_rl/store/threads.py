"""Blocking work beside the event loop, never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(work: Callable[..., _T], *args: object) -> _T:
    """Run blocking work in a thread. A cancellation waits for its end: what the thread writes
    is never still being written when the caller has moved on.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        raise
