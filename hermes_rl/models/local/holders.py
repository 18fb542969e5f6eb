"""What the server process of an embedded model and its holders agree on: settings and connections.

A holder connects to a unix-domain socket, reads one line with the server's address and key, and
keeps the connection open. The kernel closes the connection with the holder's process, and the
server ends soon after the last one closes, however its holder died.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hermes_rl.models.local.engine import EngineSettings

READY = "ready"
TAKEN = "another process is the server of this model already"


@dataclass(frozen=True)
class ServerSettings:
    """What one server process serves, and where its holders connect."""

    socket: Path
    """The socket that holders connect to, in a folder that only its user can enter."""
    model: str
    description: str
    engine: EngineSettings

    def arguments(self) -> list[str]:
        """Return the command line for these settings. Nothing on it is secret."""
        return [
            *("--socket", str(self.socket), "--model", self.model),
            *("--description", self.description, "--weights", str(self.engine.weights)),
            *("--slots", str(self.engine.slots), "--context", str(self.engine.context)),
            *("--threads", str(self.engine.threads)),
        ]


def parse_arguments(arguments: list[str]) -> ServerSettings:
    """Read the settings from a command line."""
    parser = argparse.ArgumentParser(prog="python -m hermes_rl.models.local.server")
    parser.add_argument("--socket", type=Path, required=True, help="where holders connect")
    parser.add_argument("--model", required=True, help="the name that requests give")
    parser.add_argument("--description", default="", help="what the model is")
    parser.add_argument("--weights", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--slots", type=int, default=4, help="requests decoded in parallel")
    parser.add_argument("--context", type=int, default=4096, help="tokens per slot")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    parsed = parser.parse_args(arguments)
    engine = EngineSettings(
        weights=parsed.weights, slots=parsed.slots, context=parsed.context, threads=parsed.threads
    )
    return ServerSettings(
        socket=parsed.socket, model=parsed.model, description=parsed.description, engine=engine
    )


_GRACE_S = 2.0
_UNCLAIMED_S = 30.0
_PATH_LIMIT = 100
"""A unix socket's address has 108 bytes."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The greeting that a holder reads when it connects."""

    base_url: str
    api_key: str
    model: str
    description: str


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield an address for the unix socket at `path`, however long the path is."""
    if len(os.fsencode(path)) <= _PATH_LIMIT:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


class Holders:
    """Counts the open connections; `wait_until_unheld` returns when the last one is closed."""

    def __init__(self, hello: Hello) -> None:
        self._hello = msgspec.json.encode(hello) + b"\n"
        self._open = 0
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accept holders at `path`, replacing the socket of a dead server."""
        path.unlink(missing_ok=True)
        with short_path(path) as address:
            server = await asyncio.start_unix_server(self._serve, address)
        try:
            yield
        finally:
            server.close()

    async def wait_until_unheld(self) -> None:
        """Return once there has been no holder for the grace period."""
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
                pass  # holders send nothing
        except ConnectionError:
            pass  # the holder is gone
        finally:
            self._open -= 1
            self._changed.set()
            writer.close()
