"""The default transport: aiohttp, one pooled session per process and endpoint."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Any

import aiohttp

from hermes_rl.errors import ModelError
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.transports.base import (
    Reply,
    Transport,
    broken,
    connect_timeout,
    connection_fault,
    first_byte_timeout,
    not_connected,
    proxy_refused,
    reason_of,
    untrusted,
)
from hermes_rl.text import clean

_LARGE = 1 << 20
"""Bytes from which a body is written in pieces, so that the loop stays free."""

_IDLE_S = {"plain": 4.0, "tls": 30.0}
"""Seconds after which an idle connection is given up. Engines close theirs after 5 s, and a request
that meets the closing one is lost; gateways wait for a minute or more, and TLS is dear to begin."""

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
        return _HttpReply(response, self._endpoint)

    def _fault(self, error: Any) -> ModelError:
        host = self._host
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return connect_timeout(self._endpoint)
        if isinstance(error, TimeoutError):
            return first_byte_timeout(self._endpoint)
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return untrusted(host, str(error.certificate_error))
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return proxy_refused(host, error.status)
        if isinstance(error, aiohttp.ClientConnectorError):
            return not_connected(host, connection_fault(error))
        return broken(host, reason_of(error))

    def _connect(self, once: bool) -> aiohttp.ClientSession:
        endpoint = self._endpoint
        tls = endpoint.tls()
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=endpoint.pool_size,
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


async def fetch_status(endpoint: Endpoint, url: str, headers: Mapping[str, str]) -> int | None:
    """The status of a GET request; None when nothing answers."""
    tls = endpoint.tls() or True
    try:
        async with (
            aiohttp.ClientSession(headers=_AGENT) as session,
            session.get(
                url, headers=headers, ssl=tls, proxy=endpoint.proxy, allow_redirects=False
            ) as response,
        ):
            return response.status
    except _ERRORS:
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


class _HttpReply(Reply):
    def __init__(self, response: _Response, endpoint: Endpoint) -> None:
        # aiohttp keeps bytes that are not valid UTF-8 as half surrogates, which no record can hold.
        headers = {name.lower(): clean(value) for name, value in response.headers.items()}
        super().__init__(response.status, headers, endpoint, _ERRORS)
        self._response = response

    async def _read(self, idle_s: float) -> bytes:
        content = self._response.content
        while not content.at_eof():
            # A small answer is all there by now: no timer for that.
            piece = content.read_nowait()
            if not piece:
                async with asyncio.timeout(idle_s):
                    piece = await content.readany()
            if piece:
                return piece
        return b""

    def _is_read(self) -> bool:
        return self._response.content.at_eof()

    def hung_up(self) -> bool:
        return self._response.hung_up()

    async def aclose(self) -> None:
        self._response.close()
