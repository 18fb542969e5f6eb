"""The egress proxy: the one way out of a sandbox whose network is a list of hosts.

The sandbox has a network of its own with nothing in it but a loopback, on which the worker listens
(see `egress_listener`). The proxy runs on the worker's loop, one for each sandbox, and is all that
can be reached. It tunnels (`CONNECT`) and forwards plain HTTP requests with an absolute address:

1. The host and port must be in the list. All that a request says elsewhere of its host is ignored.
2. Only the proxy resolves names. Of the addresses it connects to those that are public, or that the
   list names, and to the very address that it looked at: a second look could find another one.
3. A connection carries one request. The proxy writes its head and its framing again, so that no
   server on the way can find a second request in it, for a host that is not in the list.

What is in a tunnel is not looked at: a server that serves many hosts serves all of them there.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any

from hermes_rl.aio import in_thread
from hermes_rl.errors import SandboxStartError
from hermes_rl.network import (
    PROXY_CONNECTIONS,
    PROXY_PORT,
    Address,
    AllowedHosts,
    Host,
    parse_host,
)
from hermes_rl.sandboxes import egress_listener
from hermes_rl.sandboxes.base import Connection

_OPEN_S = 20.0
"""How long the listener may take to open."""
_CHUNK = 1 << 16
_UNREAD = 1 << 20
"""Bytes of a refused request that are still read."""
_ADDRESSES = 4
"""Of a name that are tried."""


@dataclass(frozen=True)
class Bounds:
    """What one sandbox may ask of its proxy."""

    head_bytes: int = 1 << 15
    """Of a request's or an answer's head."""
    head_s: float = 30.0
    """How long the head of a request may take."""
    connect_s: float = 20.0
    """How long a host may take to be resolved, and again to be connected to."""
    idle_s: float = 300.0
    """How long a connection may be silent in both directions."""
    pause_s: float = 0.005
    """Between two connections: a sandbox that connects all the time cannot keep the loop busy."""


class _Refused(Exception):
    """A request that is not forwarded.

    Args:
        status: of HTTP, with its reason.
        why: one line for the client.
    """

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


_BAD, _FORBIDDEN, _GATEWAY = "400 Bad Request", "403 Forbidden", "502 Bad Gateway"


@dataclass(frozen=True)
class _Request:
    """The head of a request, read."""

    method: str
    host: Host
    port: int
    target: str = ""
    """Path and query; empty for a tunnel."""
    headers: tuple[tuple[str, str], ...] = ()
    """Those that are forwarded."""
    length: int = 0
    """Bytes of its body; -1 for one in chunks."""
    version: str = "HTTP/1.1"

    def head(self) -> bytes:
        """As it is sent to the host."""
        port = "" if self.port == 80 else f":{self.port}"
        name = str(Host(self.host.name, self.host.address, None))
        lines = [f"{self.method} {self.target} {self.version}", f"Host: {name}{port}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.length < 0:
            lines.append("Transfer-Encoding: chunked")
        elif self.length or self.method in ("POST", "PUT", "PATCH"):
            lines.append(f"Content-Length: {self.length}")
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}) ([\x21-\x7e]+) (HTTP/1\.[01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_URL = re.compile(r"(?i:http)://([^/?#]*)([/?][^#]*)?")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})[ \r]")
_KEPT_ALIVE = (b"connection", b"keep-alive", b"proxy-connection")
_HOP = {"connection", "proxy-connection", "keep-alive", "te", "trailer", "upgrade", "host"} | {
    *("transfer-encoding", "content-length", "proxy-authorization", "proxy-authenticate")
}
"""Headers between two neighbours, which the proxy writes itself or leaves out."""


def read_request(head: bytes) -> _Request:
    """Read the head of a request strictly: what servers read in different ways is refused.

    Raises: _Refused.
    """
    line, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    found = _LINE.fullmatch(line)
    if found is None:
        raise _Refused(_BAD, "not a request line of HTTP/1.1")
    method, target, version = found.groups()
    headers = []
    for text in rest:
        header = _HEADER.fullmatch(text)
        if header is None:
            raise _Refused(_BAD, "not a valid header line")
        headers.append((header[1], header[2]))
    try:
        if method == "CONNECT":
            host = parse_host(target)
            if host.port is None:
                raise _Refused(_BAD, "CONNECT needs host:port")
            return _Request(method, host, host.port)
        url = _URL.fullmatch(target)
        if url is None:
            raise _Refused(_BAD, "this is a proxy: it takes CONNECT and http:// addresses")
        host = parse_host(url[1])
    except ValueError as error:
        raise _Refused(_BAD, str(error)) from None
    path = url[2] or "/"
    return _Request(
        method,
        host,
        host.port or 80,
        path if path.startswith("/") else f"/{path}",
        _forwarded(headers),
        _body_length(headers, version),
        version,
    )


def _forwarded(headers: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    named = [value.lower() for name, value in headers if name.lower() == "connection"]
    left_out = _HOP | {part.strip() for value in named for part in value.split(",")}
    return tuple((name, value) for name, value in headers if name.lower() not in left_out)


def _body_length(headers: list[tuple[str, str]], version: str) -> int:
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    codings = [value for name, value in headers if name.lower() == "transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise _Refused(_BAD, "more than one Content-Length or Transfer-Encoding")
    if codings:
        if codings[0].lower() != "chunked" or version != "HTTP/1.1":
            raise _Refused(_BAD, "a Transfer-Encoding other than chunked in HTTP/1.1")
        return -1
    if not lengths:
        return 0
    if not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
        raise _Refused(_BAD, "not a valid Content-Length")
    return int(lengths[0])


@dataclass
class _Stream:
    """One end of a connection, and how much went over it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    written: int = 0

    async def send(self, data: bytes) -> None:
        """Write, no faster than the other side reads. Raises: OSError."""
        self.writer.write(data)
        self.written += len(data)
        await self.writer.drain()

    def finish(self) -> None:
        """Send the end of file. Raises: OSError."""
        if not self.writer.is_closing():
            self.writer.write_eof()


@dataclass
class _Exchange:
    """One connection of the sandbox, for the record."""

    client: _Stream
    host: str = ""
    port: int = 0
    outcome: str = "refused"
    why: str = ""
    server: _Stream | None = None
    received: int = 0
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)

    def record(self) -> Connection:
        return Connection(
            host=self.host,
            port=self.port,
            outcome=self.outcome,
            reason=self.why,
            sent_bytes=self.server.written if self.server else 0,
            received_bytes=self.received,
            started_at=self.started_at,
            seconds=time.monotonic() - self.started,
        )


class EgressProxy:
    """The proxy of one sandbox; `aclose` ends it.

    Args:
        listener: where it is asked; owned from here on.
        hosts: what may be reached.
        note: takes each connection when it ends.
    """

    def __init__(
        self,
        listener: socket.socket,
        hosts: AllowedHosts,
        note: Callable[[Connection], None],
        bounds: Bounds = Bounds(),
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._hosts = hosts
        self._note = note
        self._bounds = bounds
        # Names that nobody answers for must not take the threads of other work.
        self._resolver = ThreadPoolExecutor(2, thread_name_prefix="sandbox-resolve")
        self._free = asyncio.Semaphore(PROXY_CONNECTIONS)
        self._serving: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                connected, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor left: others will be closed
                self._free.release()
                await asyncio.sleep(1.0)
                continue
            except asyncio.CancelledError:
                self._free.release()
                raise
            task = asyncio.create_task(self._serve(connected))
            self._serving.add(task)
            task.add_done_callback(self._served)
            await asyncio.sleep(self._bounds.pause_s)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._free.release()

    async def _serve(self, connected: socket.socket) -> None:
        limit = self._bounds.head_bytes
        try:
            client = _Stream(*await asyncio.open_connection(sock=connected, limit=limit))
        except OSError:  # it was closed at once
            connected.close()
            return
        exchange = _Exchange(client)
        try:
            async with asyncio.timeout(None) as idle:
                await self._answer(exchange, idle)
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side went away, or was silent for too long
        finally:
            for stream in (client, exchange.server):
                if stream is not None:
                    stream.writer.transport.abort()

    async def _answer(self, exchange: _Exchange, idle: asyncio.Timeout) -> None:
        client, refused = exchange.client, None
        try:
            if (head := await self._head(client)) is None:
                return
            request = read_request(head)
            exchange.host, exchange.port = request.host.name, request.port
            exchange.server = await self._connect(request, exchange)
            await self._carry(request, exchange, exchange.server, idle)
        except _Refused as error:
            refused, exchange.why = error, str(error)
        finally:
            if exchange.host or exchange.why:
                self._note(exchange.record())
        if refused is not None and client.written == 0:
            await self._refuse(client, refused)
        client.writer.close()
        await client.writer.wait_closed()

    async def _head(self, client: _Stream) -> bytes | None:
        """The head of a request; None where nothing was sent. Raises: _Refused."""
        seconds = self._bounds.head_s
        try:
            async with asyncio.timeout(seconds):
                return await client.reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise _Refused("408 Request Timeout", f"no request within {seconds:g} s") from None
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise _Refused(_BAD, "an incomplete request") from None
        except asyncio.LimitOverrunError:
            size = self._bounds.head_bytes
            raise _Refused(
                "431 Request Header Fields Too Large", f"headers of more than {size:,} bytes"
            ) from None

    async def _refuse(self, client: _Stream, refused: _Refused) -> None:
        text = f"{refused}\n".encode("latin-1", "replace")
        head = (
            f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        async with asyncio.timeout(self._bounds.head_s):
            await client.send(head.encode() + text)
            client.finish()
            # Closed with something unread, the answer would be lost on its way.
            left = _UNREAD
            while left > 0 and (data := await client.reader.read(_CHUNK)):
                left -= len(data)

    async def _connect(self, request: _Request, exchange: _Exchange) -> _Stream:
        """Raises: _Refused."""
        host, port, bounds = request.host, request.port, self._bounds
        if not self._hosts.allow(host, port):
            raise _Refused(
                _FORBIDDEN, f"{host.name}:{port} is not a host that this sandbox may reach"
            )
        exchange.outcome = "failed"
        found = [host.address] if host.address is not None else await self._resolve(host.name)
        reachable = [address for address in found if self._hosts.allow_address(address, port)]
        if not reachable:
            exchange.outcome = "refused"
            raise _Refused(_FORBIDDEN, f"{host.name} is at a private address: {found[0]}")
        for address in reachable[:_ADDRESSES]:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(bounds.connect_s):
                    reader, writer = await asyncio.open_connection(
                        str(address), port, limit=bounds.head_bytes
                    )
                exchange.outcome = "allowed"
                return _Stream(reader, writer)
        raise _Refused(_GATEWAY, f"{host.name}:{port} does not answer")

    async def _resolve(self, name: str) -> list[Address]:
        """All addresses of a name. Raises: _Refused."""
        loop = asyncio.get_running_loop()
        look_up = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(self._bounds.connect_s):
                found = await loop.run_in_executor(self._resolver, look_up)
            return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, socket.gaierror) else "no answer"
            raise _Refused(_GATEWAY, f"{name} cannot be resolved: {why}") from None

    async def _carry(
        self, request: _Request, exchange: _Exchange, server: _Stream, idle: asyncio.Timeout
    ) -> None:
        """Move bytes both ways. Raises: _Refused, OSError, asyncio.IncompleteReadError."""
        client, loop = exchange.client, asyncio.get_running_loop()

        def moved(received: int = 0) -> None:
            exchange.received += received
            idle.reschedule(loop.time() + self._bounds.idle_s)

        moved()
        if request.method == "CONNECT":
            await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await _until_first(
                _pump(server, client, moved), _pump(client, server, lambda _: moved())
            )
            return
        await server.send(request.head())
        await _until_first(
            _relay_answer(server, client, moved), _send_body(request, client, server, moved)
        )

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        self._accepting.cancel()
        for task in (ending := [self._accepting, *self._serving]):
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._listener.close()
        self._resolver.shutdown(wait=False, cancel_futures=True)


async def _until_first(main: Coroutine[Any, Any, None], side: Coroutine[Any, Any, None]) -> None:
    """Run both until `main` has ended or one has failed."""
    tasks = [asyncio.ensure_future(main), asyncio.ensure_future(side)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: _Stream, target: _Stream, moved: Callable[[int], None]) -> None:
    """Copy up to the end of file, and that too. Raises: OSError."""
    while data := await source.reader.read(_CHUNK):
        moved(len(data))
        await target.send(data)
    target.finish()


async def _relay_answer(server: _Stream, client: _Stream, moved: Callable[[int], None]) -> None:
    """Copy the answer of a server, which closes the connection at its end.

    Raises: _Refused, OSError.
    """
    status = 100
    while status < 200:
        try:
            head = await server.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise _Refused(_GATEWAY, "the host's answer has no valid head") from None
        found = _STATUS.match(head)
        if found is None or (status := int(found[1])) == 101:
            raise _Refused(_GATEWAY, "the host's answer has no valid head")
        moved(len(head))
        if status >= 200:  # the client must not wait for more on this connection
            lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
            kept = [x for x in lines if x.partition(b":")[0].strip().lower() not in _KEPT_ALIVE]
            head = b"\r\n".join([*kept, b"Connection: close", b"", b""])
        await client.send(head)
    await _pump(server, client, moved)


async def _send_body(
    request: _Request, client: _Stream, server: _Stream, moved: Callable[[], None]
) -> None:
    """Copy the body of a request and nothing beyond it.

    Raises: _Refused for chunks that are not valid; asyncio.IncompleteReadError.
    """
    with contextlib.suppress(OSError):  # a server may answer before it has read everything
        if request.length >= 0:
            await _copy(client, server, request.length, moved)
            return
        while True:
            try:
                size = _SIZE.fullmatch(await client.reader.readuntil(b"\r\n"))
            except asyncio.LimitOverrunError:
                size = None
            if size is None:
                raise _Refused(_BAD, "not a valid chunk")
            length = int(size[1], 16)
            await server.send(b"%x\r\n" % length)
            await _copy(client, server, length, moved)
            if length == 0:
                await server.send(b"\r\n")
                return
            if await client.reader.readexactly(2) != b"\r\n":
                raise _Refused(_BAD, "not a valid chunk")
            await server.send(b"\r\n")


async def _copy(client: _Stream, server: _Stream, left: int, moved: Callable[[], None]) -> None:
    while left > 0:
        data = await client.reader.read(min(left, _CHUNK))
        if not data:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(data)
        moved()
        await server.send(data)


async def open_egress(
    pid: int, uid: int | None, hosts: Iterable[str], note: Callable[[Connection], None]
) -> EgressProxy:
    """Open the way out of a sandbox, before anything of the agent runs in it.

    Args:
        pid: a process in its network.
        uid: who made its user namespace; None is ourselves.
        hosts: what may be reached.
        note: takes each connection when it ends.

    Raises: SandboxStartError where this process may not enter the network.
    """
    listener = await in_thread(_listener, pid, -1 if uid is None else uid)
    return EgressProxy(listener, AllowedHosts(hosts), note)


def _listener(pid: int, uid: int) -> socket.socket:
    taking, passing = socket.socketpair()
    with taking:
        with passing:
            arguments = map(str, (pid, uid, PROXY_PORT, passing.fileno()))
            command = [sys.executable, "-I", "-S", egress_listener.__file__, *arguments]
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    pass_fds=(passing.fileno(),),
                    env={},
                    cwd="/",
                    timeout=_OPEN_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise SandboxStartError(_NO_EGRESS.format(f"no answer in {_OPEN_S:g} s")) from None
        message, descriptors, _, _ = socket.recv_fds(taking, 4096, 1)
    if not descriptors:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        why = message.decode("utf-8", "replace") or "".join(last) or f"exit {done.returncode}"
        raise SandboxStartError(_NO_EGRESS.format(why))
    return socket.socket(fileno=descriptors[0])


_NO_EGRESS = (
    "the network of a sandbox cannot be limited to hosts here: its egress proxy cannot listen in "
    "it ({}). Use --network off, or on"
)
