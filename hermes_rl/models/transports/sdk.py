"""The transport `sdk`: the official packages, without retries, with their connection handling.

The anthropic package carries the Messages API, the openai package all other wires. They need ten
times the CPU of `http`. They serve as the reference for our wire formats, and endpoints that only
the official package supports. Bodies are passed as bytes, with our own timeouts: the anthropic
package would refuse a long answer that is not streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from hermes_rl.errors import ModelError
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.transports.http import (
    Reply,
    Transport,
    answer_broken_off,
    connect_timeout,
    connection_broken,
    describe_exception,
    first_byte_timeout,
    proxy_refused,
    unreachable,
    untrusted_server,
)


@dataclass(frozen=True)
class _Package:
    """The names of one official package; the same generator made both."""

    client: Callable[..., Any]
    omit: Any
    """Marks a header that is not sent."""
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


class SdkTransport(Transport):
    """Connections of one `AsyncOpenAI` or `AsyncAnthropic`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._sdk = _anthropic() if endpoint.api_mode == "anthropic_messages" else _openai()
        self.errors = (TimeoutError, httpx2.HTTPError, self._sdk.connection_error)

    async def _send(self, client: Any, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        # Only the dialect's headers are sent, without the header that the packages add for the key.
        sent_headers = {"Authorization": self._sdk.omit, **_titled(headers)}
        try:
            response = await client.post(
                url,
                content=body,
                cast_to=httpx2.Response,
                options={"headers": sent_headers, "follow_redirects": False},
                stream=True,  # do not read the body
            )
        except self._sdk.status_error as error:
            response = error.response
        return _SdkReply(response, self._host, self._endpoint.timeouts.idle_s)

    def _typed_error(self, error: Any) -> ModelError:
        host, cause = self._host, error.__cause__ or error
        if isinstance(error, self._sdk.timeout_error) and isinstance(cause, httpx2.ConnectTimeout):
            return connect_timeout(self._endpoint)
        if isinstance(error, self._sdk.timeout_error | TimeoutError):
            return first_byte_timeout(self._endpoint)
        if isinstance(error, httpx2.HTTPError):  # the package reads the body of a refusal itself
            return answer_broken_off(host, describe_exception(error))
        if "CERTIFICATE_VERIFY_FAILED" in str(cause):
            return untrusted_server(host, str(cause))
        if isinstance(cause, httpx2.ProxyError):
            status = str(cause)[:3]
            return proxy_refused(host, int(status) if status.isdecimal() else 502)
        make_error = unreachable if isinstance(cause, httpx2.ConnectError) else connection_broken
        return make_error(host, describe_exception(cause))

    def _connect(self, once: bool) -> Any:
        endpoint = self._endpoint
        tls = endpoint.tls()
        timeout = httpx2.Timeout(None, connect=endpoint.timeouts.connect_s)
        http = httpx2.AsyncClient(
            timeout=timeout,
            limits=httpx2.Limits(max_keepalive_connections=0 if once else None),
            verify=True if tls is None else tls,
            proxy=endpoint.proxy,
            trust_env=False,
        )
        return self._sdk.client(
            api_key=endpoint.api_key or "none",
            base_url=endpoint.base_url,
            max_retries=0,
            timeout=timeout,
            http_client=http,
        )


def _titled(headers: Mapping[str, str]) -> dict[str, str]:
    """Spell header names as the packages do, which merge headers by exact name."""
    return {"Authorization" if k.lower() == "authorization" else k: v for k, v in headers.items()}


class _SdkReply(Reply):
    def __init__(self, response: httpx2.Response, host: str, idle_s: float) -> None:
        headers = dict(response.headers)
        super().__init__(response.status_code, headers, host, idle_s, (httpx2.HTTPError,))
        self._response = response
        self._pieces = aiter(response.aiter_bytes())

    async def _read(self, idle_s: float) -> bytes:
        async with asyncio.timeout(idle_s):
            return await anext(self._pieces, b"")

    def _at_end(self) -> bool:
        return self._response.is_closed

    def closed_by_server(self) -> bool:
        stream = self._response.extensions.get("network_stream")
        return stream is None or bool(stream.get_extra_info("is_readable"))

    async def aclose(self) -> None:
        await self._response.aclose()
