"""Just enough HTTP/1.1 for a fake server that costs less than what it is there to measure."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple, Protocol

_MAX_HEAD = 65_536
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 500: "Error"}


class Incoming(NamedTuple):
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class Handler(Protocol):
    """What a connection serves."""

    def handle(self, connection: Connection, request: Incoming) -> None:
        """Answer now, or later by the connection's methods; one answer per request."""
        ...

    def lost(self, connection: Connection) -> None:
        """The client hung up while it was owed an answer."""
        ...


def head(status: int, headers: Mapping[str, str], length: int | None) -> bytes:
    """The head of an answer; without a length its body is chunked."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return "\r\n".join((*lines, framing, "\r\n")).encode("latin-1")


def chunked(data: bytes, size: int = 512) -> bytes:
    """A body in chunks that do not respect what is in it, without the last one."""
    pieces = (data[i : i + size] for i in range(0, len(data), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)


LAST_CHUNK = b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client; its requests are answered one after the other."""

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler, self._connections = handler, connections
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
            self._handler.lost(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def send(self, data: bytes, *, last: bool = True) -> None:
        """Write; `last` ends the answer and lets the next request in."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
        if last and self._busy:
            self._busy = False
            self._next()

    def close(self) -> None:
        """Hang up after what was written."""
        self._busy = False
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Break the connection so that the client sees a reset."""
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
            self._handler.handle(self, request)

    def _parse(self) -> Incoming | None:
        """Take one whole request off the buffer."""
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
