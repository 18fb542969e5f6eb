"""The server's pipes: one unix-domain connection per holder, closed by the kernel with its process.

A holder connects, reads one line with the server's address and key, and keeps the connection open.
The server ends itself soon after the last one closes, however its holder died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

_GRACE_S = 2.0
_UNCLAIMED_S = 30.0
_PATH_LIMIT = 100
"""A unix socket's address has 108 bytes."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The line that a holder reads when it connects."""

    base_url: str
    api_key: str
    model: str
    description: str


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """An address for a unix socket at `path`, however long that is."""
    if len(os.fsencode(path)) <= _PATH_LIMIT:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


class Holders:
    """Counts the open pipes; `wait_until_unheld` returns when the server is wanted no more."""

    def __init__(self, hello: Hello) -> None:
        self._hello = msgspec.json.encode(hello) + b"\n"
        self._open = 0
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accepts holders at `path`, replacing a dead server's socket there."""
        path.unlink(missing_ok=True)
        with short_path(path) as address:
            server = await asyncio.start_unix_server(self._serve, address)
        try:
            yield
        finally:
            server.close()

    async def wait_until_unheld(self) -> None:
        """Returns once no holder has been there for the grace time."""
        patience = _UNCLAIMED_S
        while True:
            self._changed.clear()
            if self._open:
                await self._changed.wait()
                patience = _GRACE_S
                continue
            try:
                await asyncio.wait_for(self._changed.wait(), patience)
            except TimeoutError:
                return
            patience = _GRACE_S

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if peer_of(writer.get_extra_info("socket"))[1] not in (os.getuid(), 0):
            writer.close()
            return
        self._open += 1
        self._changed.set()
        try:
            writer.write(self._hello)
            await writer.drain()
            while await reader.read(1024):
                pass  # a holder has nothing to say
        except ConnectionError:
            pass  # it is gone: the same as its end
        finally:
            self._open -= 1
            self._changed.set()
            writer.close()
