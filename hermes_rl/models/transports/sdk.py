"""The transport `sdk`: the official packages, retries off, their connection handling as it is.

The anthropic package carries the Messages API, the openai package all other wires. They cost ten
times the CPU of `http`; they are there as the oracles of our wire, and for endpoints whose ways
only the official package knows. Bodies go in and come out as bytes, with our own limits of time:
the anthropic package would refuse a long answer that is not streamed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.transports.base import (
    LINGER_S,
    KeepAlive,
    Reply,
    broken,
    connect_timeout,
    cut,
    first_byte_timeout,
    idle_timeout,
    not_connected,
    proxy_refused,
    untrusted,
)


@dataclass(frozen=True)
class _Package:
    """What one official package calls things; both come from the same generator."""

    client: Callable[..., Any]
    omit: Any
    """Stands for a header that is not sent."""
    status_error: type[Any]
    timeout_error: type[Exception]
    connection_error: type[Exception]


def _openai() -> _Package:
    import openai

    return _Package(
        openai.AsyncOpenAI,
        openai.Omit(),
        openai.APIStatusError,
        openai.APITimeoutError,
        openai.APIConnectionError,
    )


def _anthropic() -> _Package:
    import anthropic

    return _Package(
        anthropic.AsyncAnthropic,
        anthropic.Omit(),
        anthropic.APIStatusError,
        anthropic.APITimeoutError,
        anthropic.APIConnectionError,
    )


class SdkTransport:
    """Connections of one `AsyncOpenAI` or `AsyncAnthropic`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._host = endpoint.host
        self._clients: dict[bool, Any] = {}
        """Whether connections are used once -> the client."""
        self._keep = KeepAlive(plain=endpoint.base_url.startswith("http:"))
        self._sdk = _anthropic() if endpoint.api_mode == "anthropic_messages" else _openai()

    @asynccontextmanager
    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Reply]:
        """See `Transport.post`."""
        started = time.monotonic()
        response = await self._open(url, body, headers)
        try:
            reply = _SdkReply(response, time.monotonic() - started, self._endpoint)
            yield reply
            await reply.settle()
            await self._keep.watch(reply.headers, reply.hung_up)
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    async def _open(self, url: str, body: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        host, patience, sdk = self._host, self._endpoint.timeouts, self._sdk
        once = self._keep.once
        client = self._clients.get(once) or self._connect(once)
        # The packages put the key into a header of their own: the dialect's headers are all there
        # is.
        ours = {"Authorization": sdk.omit, **_titled(headers)}
        try:
            async with asyncio.timeout(patience.first_byte_s):
                response: httpx2.Response = await client.post(
                    url,
                    content=body,
                    cast_to=httpx2.Response,
                    options={"headers": ours, "follow_redirects": False},
                    stream=True,  # the body unread
                )
                return response
        except sdk.status_error as error:
            answered: httpx2.Response = error.response
            return answered
        except sdk.timeout_error as error:
            if isinstance(error.__cause__, httpx2.ConnectTimeout):
                raise connect_timeout(host, patience.connect_s) from None
            raise first_byte_timeout(host, patience.first_byte_s) from None
        except TimeoutError:
            raise first_byte_timeout(host, patience.first_byte_s) from None
        except (
            httpx2.HTTPError
        ) as error:  # of the body of a refusal, which the package reads itself
            raise cut(host, f"{type(error).__name__}: {error}") from None
        except sdk.connection_error as error:
            cause = error.__cause__ or error
            if "CERTIFICATE_VERIFY_FAILED" in str(cause):
                raise untrusted(host, str(cause)) from None
            if isinstance(cause, httpx2.ProxyError):
                status = str(cause)[:3]
                raise proxy_refused(host, int(status) if status.isdecimal() else 502) from None
            make = not_connected if isinstance(cause, httpx2.ConnectError) else broken
            if make is broken:
                self._keep.lost()
            raise make(host, f"{type(cause).__name__}: {cause}") from None

    def _connect(self, once: bool) -> Any:
        endpoint = self._endpoint
        tls = endpoint.tls()
        limit = endpoint.pool_size or None
        patience = httpx2.Timeout(None, connect=endpoint.timeouts.connect_s)
        http = httpx2.AsyncClient(
            timeout=patience,
            limits=httpx2.Limits(
                max_connections=limit, max_keepalive_connections=0 if once else limit
            ),
            verify=True if tls is None else tls,
            proxy=endpoint.proxy,
            trust_env=False,
        )
        client = self._clients[once] = self._sdk.client(
            api_key=endpoint.api_key or "none",
            base_url=endpoint.base_url,
            max_retries=0,
            timeout=patience,
            http_client=http,
        )
        return client


def _titled(headers: Mapping[str, str]) -> dict[str, str]:
    """The packages merge headers by their exact names."""
    return {"Authorization" if k.lower() == "authorization" else k: v for k, v in headers.items()}


class _SdkReply:
    def __init__(self, response: httpx2.Response, first_byte_s: float, endpoint: Endpoint) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = dict(response.headers)
        self.first_byte_s = first_byte_s
        self._response = response
        self._endpoint = endpoint
        self._pieces = aiter(response.aiter_bytes())

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._response.is_stream_consumed:  # the package reads the bodies of errors itself
            yield self._response.content
            return
        idle, host = self._endpoint.timeouts.idle_s, self._endpoint.host
        try:
            while True:
                async with asyncio.timeout(idle):
                    piece = await anext(self._pieces, b"")
                if not piece:
                    return
                yield piece
        except TimeoutError:
            raise idle_timeout(host, idle) from None
        except httpx2.HTTPError as error:
            raise cut(host, f"{type(error).__name__}: {error}") from None

    def hung_up(self) -> bool:
        """Whether its connection is closed by now."""
        stream = self._response.extensions.get("network_stream")
        return stream is None or bool(stream.get_extra_info("is_readable"))

    async def settle(self) -> None:
        """Read what is left of a complete answer, so that its connection is reused."""
        if self._response.is_closed:
            return
        try:
            async with asyncio.timeout(LINGER_S):
                while await anext(self._pieces, b""):
                    pass
        except (TimeoutError, httpx2.HTTPError):
            pass  # the answer is whole; only the connection is lost
