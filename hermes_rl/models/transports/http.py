"""Transports (one POST, one reply, no retry, typed errors), and the default one, on aiohttp.

A transport does not look into bodies. It maps failures below HTTP to typed errors; the client
handles statuses. The connection pool, timeouts and reading are shared; `HttpTransport` and `sdk`
only send and receive.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import aiohttp

from hermes_rl.errors import AuthError, ConnectionLost, ModelError, ModelTimeout, ProtocolError
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.text import clean, scrub

_ERRNO = re.compile(r"\[Errno (\d+)\]")

DRAIN_S = 0.25
"""Maximum time for the rest of a complete answer, so that its connection can be reused."""

WATCH_S, WATCHES = 0.05, 25
"""How long and how often the end of a stream is watched. A server that closes its connections does
so at once."""


class Reply(ABC):
    """The head of an answer, and its body in chunks.

    Args:
        headers: names in lower case.
        errors: exceptions of a connection that breaks off.
    """

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        host: str,
        idle_s: float,
        errors: tuple[type[Exception], ...],
    ) -> None:
        self.status, self.headers = status, headers
        self.first_byte_s = 0.0
        """Seconds from the start of the request to this head."""
        self._host, self._idle_s, self._errors = host, idle_s, errors

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises: ModelTimeout, ProtocolError."""
        try:
            while piece := await self._read(self._idle_s):
                yield piece
        except TimeoutError:
            text = f"the answer of {self._host} stalled for {self._idle_s:g} s"
            raise ModelTimeout(text, served=True) from None
        except self._errors as error:
            raise answer_broken_off(self._host, describe_exception(error)) from None

    async def drain(self) -> None:
        """Read the rest of a complete answer, so that its connection can be reused."""
        if self._at_end():
            return
        with suppress(TimeoutError, *self._errors):  # the answer is complete already
            async with asyncio.timeout(DRAIN_S):
                while await self._read(DRAIN_S):
                    pass

    @abstractmethod
    def closed_by_server(self) -> bool:
        """Return whether the connection is closed."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connection, unless the body was read to its end."""

    @abstractmethod
    async def _read(self, idle_s: float) -> bytes:
        """Return the next chunk, empty at the end. Raises: TimeoutError after `idle_s`."""

    @abstractmethod
    def _at_end(self) -> bool:
        """Return whether the body was read to its end."""


class Transport(ABC):
    """Connections to one endpoint. No redirects, cookies, hidden retries or environment proxies."""

    errors: tuple[type[Exception], ...]
    """Exceptions of sending when no answer begins."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._host = endpoint, endpoint.host
        self._clients: dict[bool, Any] = {}
        """Whether connections are used once -> the package's client."""
        self._keep = KeepAlive(plain=endpoint.base_url.startswith("http:"))

    @asynccontextmanager
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Reply]:
        """One request. Raises: ModelTimeout, ConnectionLost."""
        started = time.monotonic()
        once = self._keep.once
        if once not in self._clients:  # not earlier: clients belong to the running loop
            self._clients[once] = self._connect(once)
        try:
            async with asyncio.timeout(self._endpoint.timeouts.first_byte_s):
                reply = await self._send(self._clients[once], url, body, headers)
        except self.errors as error:
            typed = self._typed_error(error)
            if isinstance(typed, ConnectionLost) and typed.served:
                self._keep.lost()
            raise typed from None
        reply.first_byte_s = time.monotonic() - started
        try:
            yield reply
            await reply.drain()
            await self._keep.watch(reply.headers, reply.closed_by_server)
        finally:
            await reply.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    @abstractmethod
    def _connect(self, once: bool) -> Any:
        """Return a client of the package.

        Args:
            once: close connections after one answer.
        """

    @abstractmethod
    async def _send(self, client: Any, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """One request. Raises: one of `errors`."""

    @abstractmethod
    def _typed_error(self, error: Any) -> ModelError:
        """Return the typed error for one of `errors`; a TimeoutError means that no answer began."""


class KeepAlive:
    """Detects whether a server keeps its connections open after a stream.

    Some engines (llama.cpp) close them without notice, and a request on a closing connection is
    lost. So the end of the first stream is watched, and if the server closes its connection, each
    one is used only once.

    Args:
        plain: without TLS. With TLS nothing is watched.
    """

    def __init__(self, *, plain: bool) -> None:
        self.once = False
        """Use each connection for one request."""
        self._plain = plain
        self._known = not plain

    def lost(self) -> None:
        """A request was lost before its first byte: watch again."""
        self._known = not self._plain

    async def watch(self, headers: Mapping[str, str], closed: Callable[[], bool]) -> None:
        """Watch whether a server closes its connection after an answer.

        Args:
            headers: of the answer.
            closed: returns whether its connection is closed.
        """
        streamed = "event-stream" in headers.get("content-type", "")
        if self._known or self.once or not streamed:
            return
        for _ in range(WATCHES):
            if closed():
                break
            await asyncio.sleep(WATCH_S / WATCHES)
        self.once = self.once or closed()
        self._known = True


def describe_connection_error(error: Exception) -> str:
    """Describe a failed connection as the system does: `connection refused`.

    aiohttp's own text mentions ssl for plain HTTP too.
    """
    inner = getattr(error, "os_error", None) or error
    if isinstance(inner, ssl.SSLError):  # its numbers are not the system's
        plain = inner.reason == "WRONG_VERSION_NUMBER"
        return "the server does not speak TLS (use http:// there)" if plain else str(inner)
    text = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    number = getattr(inner, "errno", None) or 0
    if number <= 0 and (found := _ERRNO.search(text)):  # several addresses were tried
        number = int(found[1])
    if number > 0:
        text = os.strerror(number)
    return text[0].lower() + text[1:]


def describe_exception(error: Exception) -> str:
    """Return the type of an error and its text, if it has one."""
    return clean(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def connect_timeout(endpoint: Endpoint) -> ModelTimeout:
    """Return the error for a connection that timed out: nothing was served."""
    seconds = endpoint.timeouts.connect_s
    return ModelTimeout(f"no connection to {endpoint.host} within {seconds:g} s")


def first_byte_timeout(endpoint: Endpoint) -> ModelTimeout:
    """Return the error for a request without an answer: it may be served, and billed."""
    seconds = endpoint.timeouts.first_byte_s
    return ModelTimeout(f"no answer from {endpoint.host} within {seconds:g} s", served=True)


def unreachable(host: str, reason: str) -> ConnectionLost:
    """Return the error for a refused connection: nothing was served."""
    return ConnectionLost(f"cannot reach {host}: {reason}")


def proxy_refused(host: str, status: int) -> ModelError:
    """Return the error of a proxy. The packages' own messages may contain its password."""
    if status == 407:
        text = f"the proxy for {host} refuses its user and password (407). Check endpoint.proxy"
        return AuthError(text, status=status)
    return unreachable(host, f"the proxy answered {status}")


def untrusted_server(host: str, reason: str) -> AuthError:
    """Return the error for an untrusted certificate: no key was sent, and retries cannot help."""
    return AuthError(
        f"cannot trust {host}: {reason}. Set endpoint.ca_file if its certificate is your own",
        reason="ssl_cert_verification",
    )


def connection_broken(host: str, reason: str) -> ConnectionLost:
    """Return the error for a connection that broke off after the request was sent."""
    return ConnectionLost(f"connection to {host} broke off: {reason}", served=True)


def answer_broken_off(host: str, reason: str) -> ProtocolError:
    """Return the error for an answer that broke off within its body."""
    return ProtocolError(f"the answer of {host} broke off: {reason}", served=True)


_LARGE = 1 << 20
"""Larger bodies are written in chunks, so that the event loop is not blocked."""

_IDLE_S = {"plain": 4.0, "tls": 30.0}
"""Seconds after which an idle connection is closed. Engines close idle connections after 5 s, and a
request on a closing connection is lost. Gateways wait a minute or more, and TLS handshakes are
expensive."""

_PLAIN_BYTES = 4 << 20

_AGENT = {"User-Agent": "hermes-rl"}
_ERRORS = (aiohttp.ClientError, OSError)


class HttpTransport(Transport):
    """Connections of one `aiohttp.ClientSession`."""

    errors = _ERRORS

    async def _send(
        self, client: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str]
    ) -> Reply:
        response = await client.post(
            url,
            data=body if len(body) < _LARGE else io.BytesIO(body),
            headers=headers,
            allow_redirects=False,
            proxy=self._endpoint.proxy,
        )
        assert isinstance(response, _Response)
        return _HttpReply(response, self._host, self._endpoint.timeouts.idle_s)

    def _typed_error(self, error: Any) -> ModelError:
        host = self._host
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return connect_timeout(self._endpoint)
        if isinstance(error, TimeoutError):
            return first_byte_timeout(self._endpoint)
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return untrusted_server(host, str(error.certificate_error))
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return proxy_refused(host, error.status)
        if isinstance(error, aiohttp.ClientConnectorError):
            return unreachable(host, describe_connection_error(error))
        return connection_broken(host, describe_exception(error))

    def _connect(self, once: bool) -> aiohttp.ClientSession:
        endpoint = self._endpoint
        tls = endpoint.tls()
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # only the limiter decides
                ssl=True if tls is None else tls,
                force_close=once,
                keepalive_timeout=None if once else _IDLE_S["plain" if tls is None else "tls"],
            ),
            response_class=_Response,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=endpoint.timeouts.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_AGENT,
            skip_auto_headers=("Accept-Encoding",),
        )


class PlainAnswer(NamedTuple):
    """The response to a plain request."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """Its first 4 MiB."""


async def exchange(
    endpoint: Endpoint, url: str, headers: Mapping[str, str], data: bytes | None = None
) -> PlainAnswer:
    """Make one plain request on a separate connection: a GET, or a POST of `data`.

    The caller limits the time. Raises: ModelError when no response comes.
    """
    try:
        async with (
            aiohttp.ClientSession(headers=_AGENT) as session,
            session.request(
                "GET" if data is None else "POST",
                url,
                data=data,
                headers={**headers, **endpoint.headers},
                ssl=endpoint.tls() or True,
                proxy=endpoint.proxy,
                allow_redirects=False,
            ) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) >= _PLAIN_BYTES:
                    break
            low = {name.lower(): value for name, value in response.headers.items()}
            return PlainAnswer(response.status, low, bytes(body[:_PLAIN_BYTES]))
    except aiohttp.ClientConnectorCertificateError as error:
        raise untrusted_server(endpoint.host, str(error.certificate_error)) from None
    except aiohttp.ClientHttpProxyError as error:
        raise proxy_refused(endpoint.host, error.status) from None
    except aiohttp.ClientConnectorError as error:
        raise ConnectionLost(f"{endpoint.host}: {describe_connection_error(error)}") from None
    except _ERRORS as error:
        reason = scrub(str(error) or type(error).__name__, endpoint.secrets)
        raise ConnectionLost(f"{endpoint.host}: {reason}") from None


class _Response(aiohttp.ClientResponse):
    """Keeps its connection, which aiohttp releases at the end."""

    _transport: asyncio.BaseTransport | None = None

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        self._transport = connection.transport
        return await super().start(connection)

    def closed_by_server(self) -> bool:
        """Whether its connection is closed by now."""
        return self._transport is None or self._transport.is_closing()


class _HttpReply(Reply):
    def __init__(self, response: _Response, host: str, idle_s: float) -> None:
        # aiohttp decodes invalid UTF-8 as lone surrogates, which no record can contain.
        headers = {name.lower(): clean(value) for name, value in response.headers.items()}
        super().__init__(response.status, headers, host, idle_s, _ERRORS)
        self._response = response

    async def _read(self, idle_s: float) -> bytes:
        content = self._response.content
        while not content.at_eof():
            # A small answer has arrived completely: no timer is needed.
            piece = content.read_nowait()
            if not piece:
                async with asyncio.timeout(idle_s):
                    piece = await content.readany()
            if piece:
                return piece
        return b""

    def _at_end(self) -> bool:
        return self._response.content.at_eof()

    def closed_by_server(self) -> bool:
        return self._response.closed_by_server()

    async def aclose(self) -> None:
        self._response.close()
