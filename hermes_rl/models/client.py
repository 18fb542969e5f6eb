"""A client is a dialect on a transport: `connect(Endpoint(...))`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from hermes_rl.errors import AuthError, ModelError, ProtocolError, ServerError, UserError
from hermes_rl.models.base import Completion, ModelClient, ModelRequest
from hermes_rl.models.endpoint import Endpoint, Timeouts
from hermes_rl.models.errors import classify_response
from hermes_rl.models.wire import Beginning, Decoder, Dialect, ReplyHead

if TYPE_CHECKING:
    from hermes_rl.models.transports import Reply, Transport

__all__ = ["Endpoint", "Timeouts", "WireClient", "connect"]

CALL_ID_HEADER = "x-hermes-call-id"
_ERROR_BYTES = 65_536
"""The most bytes that are read of an error's body."""
_START_BYTES = 64
_FORM = re.compile(rb"(\xef\xbb\xbf)?\s*([{\[]|data:|event:|id:|retry:|:)")
"""How JSON and event streams begin."""
_YOUNG_S = 30.0
"""Connections are renewed at most this often: many rollouts request it at once."""


def connect(endpoint: Endpoint, dialect: Dialect | None = None) -> ModelClient:
    """A client for an endpoint. Nothing is sent yet; close it with `aclose`.

    Args:
        dialect: to speak; None is the one that `endpoint.api_mode` names.

    Raises: UserError for an address, key, mode or transport that can never work.
    """
    endpoint.check()
    return WireClient(endpoint, dialect or dialect_for(endpoint), _transport(endpoint))


class _TooLong(ProtocolError):
    """The answer exceeds the maximum size."""


@dataclass
class _Line:
    """A transport and the number of its requests in flight."""

    transport: Transport
    since: float = field(default_factory=time.monotonic)
    requests: int = 0
    retired: bool = False

    async def left(self) -> None:
        """A request ended; the last one closes what was retired."""
        self.requests -= 1
        if self.retired and not self.requests:
            await self.transport.aclose()


class WireClient:
    """One per process, endpoint and account; shared by all rollouts."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect, transport: Transport) -> None:
        self.api_mode = dialect.name
        self.endpoint = endpoint.host
        self._dialect, self._line, self._where = dialect, _Line(transport), endpoint
        self._url = endpoint.url(dialect.path)
        self._headers = self._headers_with(endpoint.api_key)
        self._secrets = endpoint.secrets
        self._answer_bytes = endpoint.answer_bytes

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`. A key that a command prints may be replaced meanwhile; the
        refusal is raised all the same, as `KeyRenewed`."""
        live = self._where.live_key
        if live is None:
            return await self._send(request, self._headers)
        key = await live.current()
        try:
            answer = await self._send(request, self._headers_with(key))
        except AuthError as error:
            meant = await live.refused(key, error)
            if meant is error:
                raise
            raise meant from error
        live.accepted()
        return answer

    def _headers_with(self, key: str | None) -> dict[str, str]:
        return {**self._dialect.headers(key), **self._where.headers}

    async def _send(self, request: ModelRequest, of_endpoint: Mapping[str, str]) -> Completion:
        headers = {**of_endpoint, CALL_ID_HEADER: request.call_id}
        body = self._dialect.encode(request)
        beginning = Beginning(request)
        line, start = self._line, bytearray()
        line.requests += 1
        try:
            async with line.transport.post(self._url, body, headers) as reply:
                if not 200 <= reply.status < 300:
                    raise await self._refusal(reply)
                head = ReplyHead(reply.headers, reply.first_byte_s)
                decoder = self._dialect.decoder(beginning.request, head)
                with beginning.kept(decoder), _no_answer(head, start):
                    await self._read(reply, decoder, start)
        finally:
            await line.left()
        with beginning.kept(decoder), _no_answer(head, start):
            return decoder.finish()

    async def _refusal(self, reply: Reply) -> ModelError:
        text = bytearray()
        with suppress(ModelError):  # the status is known, however the body ends
            async for piece in reply.chunks():
                text += piece
                if len(text) > _ERROR_BYTES:
                    break
        return classify_response(reply.status, reply.headers, bytes(text), secrets=self._secrets)

    async def _read(self, reply: Reply, decoder: Decoder, start: bytearray) -> None:
        """Feed the answer to its decoder, and keep its first bytes in `start`.

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
        """Whether the user's own server answers `GET {base_url}/models` with a status below 500,
        though it keeps its callers waiting. False for every other server: it is not asked."""
        if not self._where.local:
            return False
        from hermes_rl.models.transports import exchange

        try:
            answer = await exchange(self._where, self._where.url("/models"), self._headers)
        except ModelError:
            return False
        return answer.status < 500

    async def renew(self, *, young_s: float = _YOUNG_S) -> None:
        """Use new connections from now on; what is under way on the old ones goes on there.

        Args:
            young_s: connections of that age are kept.
        """
        old = self._line
        if time.monotonic() - old.since < young_s:
            return
        self._line = _Line(_transport(self._where))
        old.retired = True
        if not old.requests:
            await old.transport.aclose()

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""
        await self._line.transport.aclose()


@contextmanager
def _no_answer(head: ReplyHead, start: bytearray) -> Iterator[None]:
    """A web page with status 200 is a proxy's or a login's, and a text that is neither JSON nor
    events is a gateway's: they say nothing of the request. It is an outage, not a bad answer; the
    model may have been at work behind a gateway. Raises: ServerError in place of ProtocolError."""
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
            f"{what} came in the place of an answer: {error}",
            status=200,
            request_id=error.request_id,
            served=not page,
        ) from error


DIALECTS: dict[str, tuple[str, str]] = {
    "chat_completions": ("chat", "ChatCompletions"),
    "anthropic_messages": ("anthropic", "AnthropicMessages"),
    "codex_responses": ("responses", "Responses"),
}
"""api_mode -> module in `wire` and class; loaded when a client is made."""


def dialect_for(endpoint: Endpoint) -> Dialect:
    """The dialect of an endpoint, with the quirks of its provider. Raises: UserError."""
    if endpoint.api_mode not in DIALECTS:
        raise UserError(
            f"api_mode {endpoint.api_mode!r} is unknown. Use one of {', '.join(DIALECTS)}"
        )
    from hermes_rl.models.providers import quirks_at  # loads pydantic, so late

    module, kind = DIALECTS[endpoint.api_mode]
    loaded = import_module(f"hermes_rl.models.wire.{module}")
    by_host = endpoint.api_mode == "anthropic_messages"
    ways = endpoint.host if by_host else endpoint.quirks or quirks_at(endpoint.host)
    dialect: Dialect = getattr(loaded, kind)(ways, secrets=endpoint.secrets)
    return dialect


def _transport(endpoint: Endpoint) -> Transport:
    if endpoint.transport == "http":
        from hermes_rl.models.transports import HttpTransport

        return HttpTransport(endpoint)
    if endpoint.transport == "sdk":
        from hermes_rl.models.transports import SdkTransport

        return SdkTransport(endpoint)
    raise UserError(f"transport {endpoint.transport!r} is unknown. Use http or sdk")
