"""A client is a dialect on a transport: `connect(Endpoint(...))`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from hermes_rl.errors import (
    AuthError,
    ConnectionLost,
    ModelError,
    ModelTimeout,
    Overloaded,
    ProtocolError,
    ServerError,
    UserError,
)
from hermes_rl.models.base import Completion, ModelClient, ModelRequest
from hermes_rl.models.endpoint import Endpoint, Timeouts
from hermes_rl.models.errors import classify_response
from hermes_rl.models.wire import Decoder, Dialect, ReplyHead, StreamedText

if TYPE_CHECKING:
    from hermes_rl.models.transports import Reply, Transport

__all__ = ["Endpoint", "Timeouts", "WireClient", "connect"]

CALL_ID_HEADER = "x-hermes-call-id"
_ERROR_BYTES = 65_536
"""The most bytes that are read of an error's body."""
_START_BYTES = 64
_FORM = re.compile(rb"(\xef\xbb\xbf)?\s*([{\[]|data:|event:|id:|retry:|:)")
"""How JSON and event streams begin."""
_MIN_AGE_S = 30.0
"""Minimum age of connections that are replaced: many rollouts may request it at once."""


def connect(endpoint: Endpoint, dialect: Dialect | None = None) -> ModelClient:
    """Return a client for an endpoint. Nothing is sent yet; close the client with `aclose`.

    Args:
        dialect: None takes the one that `endpoint.api_mode` names.

    Raises: UserError for an invalid address, key, mode or transport.
    """
    endpoint.check()
    return WireClient(endpoint, dialect or dialect_for(endpoint), _transport(endpoint))


_CUT = (ConnectionLost, ModelTimeout, ProtocolError, ServerError, Overloaded)
"""Errors within an answer whose beginning may be kept."""


class _TooLong(ProtocolError):
    """The answer exceeds the maximum size."""


@dataclass
class _Connections:
    """A transport and the number of its requests in flight."""

    transport: Transport
    since: float = field(default_factory=time.monotonic)
    requests: int = 0
    retired: bool = False

    async def end_request(self) -> None:
        """End a request; the last one closes a retired transport."""
        self.requests -= 1
        if self.retired and not self.requests:
            await self.transport.aclose()


class WireClient:
    """One per process, endpoint and account; shared by all rollouts."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect, transport: Transport) -> None:
        self.api_mode = dialect.name
        self.endpoint = endpoint.host
        self._dialect, self._connections, self._endpoint = (
            dialect,
            _Connections(transport),
            endpoint,
        )
        self._url = endpoint.url(dialect.path)
        self._headers = self._headers_with(endpoint.api_key)
        self._secrets = endpoint.secrets
        self._answer_bytes = endpoint.answer_bytes

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`. If a refused key could be renewed, the refusal is raised as
        `KeyRenewed`."""
        live = self._endpoint.live_key
        if live is None:
            return await self._send(request, self._headers)
        key = await live.current()
        try:
            answer = await self._send(request, self._headers_with(key))
        except AuthError as error:
            renewed = await live.refused(key, error)
            if renewed is error:
                raise
            raise renewed from error
        live.accepted()
        return answer

    def _headers_with(self, key: str | None) -> dict[str, str]:
        return {**self._dialect.headers(key), **self._endpoint.headers}

    async def _send(self, request: ModelRequest, endpoint_headers: Mapping[str, str]) -> Completion:
        headers = {**endpoint_headers, CALL_ID_HEADER: request.call_id}
        body = self._dialect.encode(request)
        streamed = StreamedText(request)
        connections, start = self._connections, bytearray()
        connections.requests += 1
        try:
            async with connections.transport.post(self._url, body, headers) as reply:
                if not 200 <= reply.status < 300:
                    raise await self._refusal(reply)
                head = ReplyHead(reply.headers, reply.first_byte_s)
                decoder = self._dialect.decoder(streamed.request, head)
                with streamed.errors_with_text(decoder), _gateway_answers_as_outages(head, start):
                    try:
                        await self._read(reply, decoder, start)
                    except _CUT:
                        if (so_far := decoder.cut_off()) is None:
                            raise
                        return so_far
        finally:
            await connections.end_request()
        with streamed.errors_with_text(decoder), _gateway_answers_as_outages(head, start):
            return decoder.finish()

    async def _refusal(self, reply: Reply) -> ModelError:
        text = bytearray()
        with suppress(ModelError):  # the status is known even if the body breaks off
            async for piece in reply.chunks():
                text += piece
                if len(text) > _ERROR_BYTES:
                    break
        return classify_response(
            reply.status, reply.headers, bytes(text), secrets=self._secrets, url=self._url
        )

    async def _read(self, reply: Reply, decoder: Decoder, start: bytearray) -> None:
        """Feed the answer to its decoder and store its first bytes in `start`.

        Raises: ModelError.
        """
        received = 0
        async for piece in reply.chunks():
            received += len(piece)
            if len(start) < _START_BYTES:
                start += piece[:_START_BYTES] if start else piece.lstrip()[:_START_BYTES]
            if received > self._answer_bytes:
                raise _TooLong(f"an answer of over {self._answer_bytes} bytes", served=True)
            decoder.feed(piece)
            if decoder.done:
                break

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`."""
        return self._dialect.bound(request)

    async def responds(self) -> bool:
        """Return whether a local server answers `GET {base_url}/models` with a status below 500
        while model calls wait. False for other servers, which are not asked."""
        if not self._endpoint.local:
            return False
        from hermes_rl.models.transports import exchange

        try:
            answer = await exchange(self._endpoint, self._endpoint.url("/models"), self._headers)
        except ModelError:
            return False
        return answer.status < 500

    async def renew(self, *, min_age_s: float = _MIN_AGE_S) -> None:
        """Use new connections from now on. Requests in flight complete on the old ones.

        Args:
            min_age_s: younger connections are kept.
        """
        old = self._connections
        if time.monotonic() - old.since < min_age_s:
            return
        self._connections = _Connections(_transport(self._endpoint))
        old.retired = True
        if not old.requests:
            await old.transport.aclose()

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        await self._connections.transport.aclose()


@contextmanager
def _gateway_answers_as_outages(head: ReplyHead, start: bytearray) -> Iterator[None]:
    """Turn the answer of a gateway into an outage.

    A web page with status 200 comes from a proxy or a login form, and text that is neither JSON nor
    events from a gateway. The model behind a gateway may have been at work.

    Raises: ServerError in place of ProtocolError.
    """
    try:
        yield
    except _TooLong:
        raise
    except ProtocolError as error:
        page = head.headers.get("content-type", "").startswith("text/html")
        if not page and _FORM.match(start):
            raise
        what = "a web page" if page else "something else" if start.strip() else "nothing"
        raise ServerError(
            f"{what} came in place of an answer: {error}",
            status=200,
            request_id=error.request_id,
            served=not page,
        ) from error


DIALECTS: dict[str, tuple[str, str]] = {
    "chat_completions": ("chat", "ChatCompletions"),
    "anthropic_messages": ("anthropic", "AnthropicMessages"),
    "codex_responses": ("responses", "Responses"),
}
"""api_mode -> module in `wire` and class; loaded with the first client."""


def dialect_for(endpoint: Endpoint) -> Dialect:
    """Return the dialect of an endpoint with its provider's quirks. Raises: UserError."""
    if endpoint.api_mode not in DIALECTS:
        raise UserError(
            f"api_mode {endpoint.api_mode!r} is unknown. Use one of {', '.join(DIALECTS)}"
        )
    from hermes_rl.models.providers import find_quirks  # loads pydantic, so late

    module, kind = DIALECTS[endpoint.api_mode]
    loaded = import_module(f"hermes_rl.models.wire.{module}")
    by_host = endpoint.api_mode == "anthropic_messages"
    quirks = endpoint.host if by_host else endpoint.quirks or find_quirks(endpoint.host)
    dialect: Dialect = getattr(loaded, kind)(quirks, secrets=endpoint.secrets)
    return dialect


def _transport(endpoint: Endpoint) -> Transport:
    if endpoint.transport == "http":
        from hermes_rl.models.transports import HttpTransport

        return HttpTransport(endpoint)
    if endpoint.transport == "sdk":
        from hermes_rl.models.transports import SdkTransport

        return SdkTransport(endpoint)
    raise UserError(f"transport {endpoint.transport!r} is unknown. Use http or sdk")
