"""The default transport: aiohttp, one pooled session per process and endpoint."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.transports.base import (
    LINGER_S,
    KeepAlive,
    Reply,
    broken,
    connect_timeout,
    connection_fault,
    cut,
    first_byte_timeout,
    idle_timeout,
    not_connected,
    proxy_refused,
    untrusted,
)
from hermes_rl.text import clean

_LARGE = 1 << 20
"""Bytes from which a body is written in pieces, so that the loop stays free."""

_IDLE_S = {"plain": 4.0, "tls": 30.0}
"""Seconds after which an idle connection is given up. Engines close theirs after 5 s, and a request
that meets the closing one is lost; gateways wait for a minute or more, and TLS is dear to begin."""


class HttpTransport:
    """Connections to one endpoint. No redirects, cookies, hidden retries or environment proxies."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._host = endpoint.host
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        """Whether connections are used once -> the session."""
        self._keep = KeepAlive(plain=endpoint.base_url.startswith("http:"))

    @asynccontextmanager
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Reply]:
        """See `Transport.post`."""
        started = time.monotonic()
        response = await self._open(url, body, headers)
        try:
            reply = _HttpReply(response, time.monotonic() - started, self._endpoint)
            yield reply
            await _settle(response)
            await self._keep.watch(reply.headers, response.hung_up)
        finally:
            response.close()  # a no-op when the body was read to its end

    async def aclose(self) -> None:
        """Close all connections."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def _open(self, url: str, body: bytes, headers: Mapping[str, str]) -> _Response:
        host, patience = self._host, self._endpoint.timeouts
        once = self._keep.once
        session = self._sessions.get(once) or self._connect(once)
        data = body if len(body) < _LARGE else io.BytesIO(body)
        try:
            async with asyncio.timeout(patience.first_byte_s):
                response = await session.post(
                    url,
                    data=data,
                    headers=headers,
                    allow_redirects=False,
                    proxy=self._endpoint.proxy,
                )
                assert isinstance(response, _Response)
                return response
        except aiohttp.ConnectionTimeoutError:
            raise connect_timeout(host, patience.connect_s) from None
        except TimeoutError:
            raise first_byte_timeout(host, patience.first_byte_s) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise untrusted(host, str(error.certificate_error)) from None
        except aiohttp.ClientHttpProxyError as error:
            raise proxy_refused(host, error.status) from None
        except aiohttp.ClientConnectorError as error:
            raise not_connected(host, connection_fault(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            self._keep.lost()
            raise broken(host, _reason(error)) from None

    def _connect(self, once: bool) -> aiohttp.ClientSession:
        """Made at the first request: a session belongs to the loop that runs then.

        Args:
            once: close connections after one answer, also where the server does not say so.
        """
        endpoint = self._endpoint
        tls = endpoint.tls()
        connector = aiohttp.TCPConnector(
            limit=endpoint.pool_size,
            ssl=True if tls is None else tls,
            force_close=once,
            keepalive_timeout=None if once else _IDLE_S["plain" if tls is None else "tls"],
        )
        patience = aiohttp.ClientTimeout(total=None, sock_connect=endpoint.timeouts.connect_s)
        session = self._sessions[once] = aiohttp.ClientSession(
            connector=connector,
            response_class=_Response,
            timeout=patience,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "hermes-rl"},
            skip_auto_headers=("Accept-Encoding",),
        )
        return session


async def fetch_status(endpoint: Endpoint, url: str, headers: Mapping[str, str]) -> int | None:
    """The status of a GET request; None when nothing answers."""
    try:
        async with (
            aiohttp.ClientSession(headers={"User-Agent": "hermes-rl"}) as session,
            session.get(
                url,
                headers=headers,
                ssl=endpoint.tls() or True,
                proxy=endpoint.proxy,
                allow_redirects=False,
            ) as response,
        ):
            return response.status
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


class _Response(aiohttp.ClientResponse):
    """Remembers its connection, which it gives back when it has ended."""

    _way: asyncio.BaseTransport | None = None

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        self._way = connection.transport
        return await super().start(connection)

    def hung_up(self) -> bool:
        """Whether its connection is closed by now."""
        return self._way is None or self._way.is_closing()


class _HttpReply:
    def __init__(
        self, response: aiohttp.ClientResponse, first_byte_s: float, endpoint: Endpoint
    ) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = {
            # aiohttp keeps bytes that are no UTF-8 as half surrogates, which no record can hold.
            name.lower(): clean(value)
            for name, value in response.headers.items()
        }
        self.first_byte_s = first_byte_s
        self._response = response
        self._endpoint = endpoint

    async def chunks(self) -> AsyncIterator[bytes]:
        content = self._response.content
        idle = self._endpoint.timeouts.idle_s
        try:
            while not content.at_eof():
                # A small answer is all there by now: no timer for that.
                piece = content.read_nowait()
                if not piece:
                    async with asyncio.timeout(idle):
                        piece = await content.readany()
                if piece:
                    yield piece
        except TimeoutError:
            raise idle_timeout(self._endpoint.host, idle) from None
        except (aiohttp.ClientError, OSError) as error:
            raise cut(self._endpoint.host, _reason(error)) from None


async def _settle(response: _Response) -> None:
    """Read what is left of an answer that was complete before its connection was free."""
    if response.content.at_eof():
        return
    try:
        async with asyncio.timeout(LINGER_S):
            while not response.content.at_eof():
                await response.content.readany()
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass  # the answer is whole; only the connection is lost


def _reason(error: Any) -> str:
    return clean(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
