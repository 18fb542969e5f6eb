"""A lock between processes that ends with its holder, and whose waiters do not wait for ever."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

_POLL_S = 0.1


@contextlib.asynccontextmanager
async def hold(
    path: Path, *, stalled_after_s: float, sign_of_life: Callable[[], int] = lambda: 0
) -> AsyncIterator[None]:
    """Holds an exclusive lock on `path`, which is made if missing and never removed.

    The kernel frees it when its holder ends. A waiter gives up once `sign_of_life`,
    any number that changes while the holder gets on, has stood still for `stalled_after_s` seconds.

    Raises:
        TimeoutError: another process holds the lock and does not get on.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        last, since = None, time.monotonic()
        while not _try(descriptor):
            now = sign_of_life()
            if now != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > stalled_after_s:
                raise TimeoutError(f"{path} is held by another process")
            await asyncio.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
