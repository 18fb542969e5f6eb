"""The HTTP/1.1 server of the fakes: cheaper than what it measures, on a free port of loopback.

async with FakeServer(FakeConfig()) as server:
    client = connect(Endpoint(server.base_url))
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

_MAX_HEAD = 65_536
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 500: "Error"}


class Incoming(NamedTuple):
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


def head(status: int, headers: Mapping[str, str], length: int | None) -> bytes:
    """Encode the head of an answer; without a length its body is chunked."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return "\r\n".join((*lines, framing, "\r\n")).encode("latin-1")


def chunked(data: bytes, size: int = 512) -> bytes:
    """Encode a body in chunks of fixed size, without the last chunk."""
    pieces = (data[i : i + size] for i in range(0, len(data), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)


LAST_CHUNK = b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client, whose requests are answered one by one."""

    def __init__(self, server: Server, connections: set[Connection]) -> None:
        self._server, self._connections = server, connections
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._busy:
            self._busy = False
            self._server.lost(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def send(self, data: bytes, *, last: bool = True) -> None:
        """Write; `last` ends the answer, and the next request is read."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
        if last and self._busy:
            self._busy = False
            self._next()

    def close(self) -> None:
        """Close the connection after what was written."""
        self._busy = False
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Reset the connection."""
        self._busy = False
        if self._transport is not None:
            raw = self._transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def _next(self) -> None:
        if self._busy:
            return
        request = self._parse()
        if request is not None:
            self._busy = True
            self._server.handle(self, request)

    def _parse(self) -> Incoming | None:
        """Take one complete request off the buffer."""
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > _MAX_HEAD:
                self.close()
            return None
        first, *lines = buffer[:end].decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = headers.get("content-length", "0")
        method, _, rest = first.partition(" ")
        if not length.isdigit() or "transfer-encoding" in headers:
            self.send(head(411, {"connection": "close"}, 0))
            self.close()
            return None
        stop = end + 4 + int(length)
        if len(buffer) < stop:
            if headers.get("expect", "").lower() == "100-continue":
                self.send(b"HTTP/1.1 100 Continue\r\n\r\n", last=False)
            return None
        body = bytes(buffer[end + 4 : stop])
        del buffer[:stop]
        return Incoming(method, rest.partition(" ")[0], headers, body)


class Server(ABC):
    """A server on 127.0.0.1.

    Args:
        port: 0 takes a free one.
    """

    def __init__(self, port: int) -> None:
        self.requests = 0
        """Model requests so far."""
        self.connections: set[Connection] = set()
        self._prefix = os.urandom(4).hex()
        """Makes the ids of this server's answers unique."""
        self._wanted_port = port
        self._server: asyncio.Server | None = None

    @abstractmethod
    def handle(self, connection: Connection, request: Incoming) -> None:
        """Answer now, or later by the connection's methods; one answer per request."""

    @abstractmethod
    def lost(self, connection: Connection) -> None:
        """Handle a client that closed the connection before its answer."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, "127.0.0.1", self._wanted_port, backlog=4096
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening, and close every connection."""
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
        """The `base_url` for clients."""
        return f"{self.root_url}/v1"


def program_parser(name: str, about: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all servers."""
    parser = argparse.ArgumentParser(prog=name, description=about)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--faults", default="{}", help="a fault plan as JSON")
    parser.add_argument("--log", type=Path, help="appended to, one JSON line per request")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--until-eof", action="store_true", help="stop when stdin closes")
    return parser


async def serve(server: Server, *, until_eof: bool) -> None:
    """Print the address as JSON, then serve until SIGTERM, SIGINT or the end of stdin."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    async with server:
        print_json({"port": server.port, "base_url": server.base_url, "pid": os.getpid()})
        await stop.wait()


def print_json(form: dict[str, Any]) -> None:
    """Print one line of JSON, and flush."""
    sys.stdout.write(msgspec.json.encode(form).decode() + "\n")
    sys.stdout.flush()
