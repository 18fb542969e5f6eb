"""The door of the fake servers: a free port of loopback, as an async context manager, or a program.

async with FakeServer(FakeConfig()) as server:
    client = connect(Endpoint(server.base_url))
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from hermes_rl.testing.wire import Connection, Incoming


class Listening(ABC):
    """A server on 127.0.0.1; see `wire.Handler`.

    Args:
        port: 0 is any free one.
    """

    def __init__(self, port: int) -> None:
        self.requests = 0
        """Model requests so far."""
        self.connections: set[Connection] = set()
        self._prefix = os.urandom(4).hex()
        """Tells the ids of this server's answers from those of others."""
        self._wanted_port = port
        self._server: asyncio.Server | None = None

    @abstractmethod
    def handle(self, connection: Connection, request: Incoming) -> None:
        """See `Handler.handle`."""

    @abstractmethod
    def lost(self, connection: Connection) -> None:
        """See `Handler.lost`."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, "127.0.0.1", self._wanted_port, backlog=4096
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening and hang up on everybody."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self.connections):
            connection.close()
        await self._server.wait_closed()
        self._server = None

    def _accept(self) -> Connection:
        return Connection(self, self.connections)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def root_url(self) -> str:
        """Its address without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What a client takes as `base_url`."""
        return f"{self.root_url}/v1"


def program(name: str, about: str) -> argparse.ArgumentParser:
    """The options that all servers have as programs."""
    parser = argparse.ArgumentParser(prog=name, description=about)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--faults", default="{}", help="a fault plan as JSON")
    parser.add_argument("--log", type=Path, help="appended to, one JSON line per request")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--until-eof", action="store_true", help="stop when stdin closes")
    return parser


async def serve(listening: Listening, *, until_eof: bool) -> None:
    """Serve until SIGTERM or SIGINT, or the end of stdin; the first line printed says where."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    async with listening as server:
        say({"port": server.port, "base_url": server.base_url, "pid": os.getpid()})
        await stop.wait()


def say(form: dict[str, Any]) -> None:
    """Print one line of JSON, at once."""
    sys.stdout.write(msgspec.json.encode(form).decode() + "\n")
    sys.stdout.flush()
