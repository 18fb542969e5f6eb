"""A lock between processes that ends with its holder, and whose waiters do not wait for ever."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

_POLL_S = 0.1


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Takes the exclusive lock on `path` if it is free; yields whether it was.

    The file is made if missing and never removed. The kernel frees the lock when its holder ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _try(descriptor)
    finally:
        os.close(descriptor)


@contextlib.asynccontextmanager
async def hold(
    path: Path, *, stalled_after_s: float, sign_of_life: Callable[[], int]
) -> AsyncIterator[None]:
    """Holds the exclusive lock on `path`, waiting for it.

    A waiter gives up once `sign_of_life`, any number that changes while the holder gets on, has
    stood still for `stalled_after_s` seconds.

    Raises:
        TimeoutError: another process holds the lock and does not get on.
    """
    last: int | None = None
    since = time.monotonic()
    while True:
        with try_lock(path) as ours:
            if ours:
                yield
                return
        now = sign_of_life()
        if now != last:
            last, since = now, time.monotonic()
        if time.monotonic() - since > stalled_after_s:
            raise TimeoutError(f"{path} is held by another process")
        await asyncio.sleep(_POLL_S)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
