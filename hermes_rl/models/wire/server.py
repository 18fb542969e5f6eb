"""The contract of dialects, server side: for servers of ours that answer in a provider's wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes_rl.messages import Message
from hermes_rl.models.base import CacheTime, Completion, Sampling


@dataclass(frozen=True)
class ServedRequest:
    """A request as a server understood it, in the internal form."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI function schemas, whatever the wire calls them."""
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    include_usage: bool = True
    """The answer says its usage: always, but for Chat Completions streams that do not ask."""
    logprobs: bool = False
    token_ids: bool = False
    cache_marks: int | None = None
    """Places that the request marks for the cache; None on wires that cache without being asked.
    """
    cache: CacheTime | None = None
    """How long what is marked is to be kept."""


class ServerDialect(Protocol):
    """The server's side of one wire format. Without state."""

    name: str
    path: str
    """How the route ends."""

    def decode_request(self, body: bytes) -> ServedRequest:
        """Raises: ValueError (UserError is one) when the body is no request of this wire."""
        ...

    def key_of(self, headers: Mapping[str, str]) -> str:
        """The API key that a request carries; names are in lower case."""
        ...

    def encode_answer(self, answer: Completion, *, answer_id: str, created: int = 0) -> bytes:
        """An answer in one body."""
        ...

    def encode_stream(
        self, answer: Completion, *, answer_id: str, created: int = 0, include_usage: bool = True
    ) -> list[bytes]:
        """An answer as server-sent events."""
        ...

    def encode_error(
        self, message: str, *, status: int, kind: str, code: str | int | None = None
    ) -> bytes:
        """The body of a refusal."""
        ...


def bearer(headers: Mapping[str, str]) -> str:
    """The key in an `authorization` header; empty when there is none."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else ""
