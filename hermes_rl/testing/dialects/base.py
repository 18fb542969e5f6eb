"""The server side of a wire format: the contract, and what the fake server's dialects share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes_rl.messages import Message
from hermes_rl.models.base import CacheTime, Completion, Sampling
from hermes_rl.text import decode_json, encode_json
from hermes_rl.usage import Usage


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
    """Send the usage: always, except for Chat Completions streams that do not ask for it."""
    logprobs: bool = False
    token_ids: bool = False
    cache_marks: int | None = None
    """Cache markers of the request; None on wires that cache automatically."""
    cache: CacheTime | None = None
    """How long what is marked is to be kept."""


class ServerDialect(Protocol):
    """The server's side of one wire format. Without state."""

    name: str
    path: str
    """How the route ends."""

    def decode_request(self, body: bytes) -> ServedRequest:
        """Raises: ValueError (UserError is one) when the body is not a request of this wire."""
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


def openai_error(message: str, kind: str, code: str | int | None) -> bytes:
    """The body of a refusal on OpenAI's wires."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return encode_json({"error": error})


def openai_sampling(body: Any, max_tokens: int | None, effort: Any) -> Sampling:
    """The sampling parameters of a request on OpenAI's wires."""
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        max_tokens=max_tokens,
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        reasoning=effort if isinstance(effort, str) else None,
    )


def usage_form(answer: Completion, write: Callable[[Usage], dict[str, Any]]) -> Any:
    """The usage object to send: `usage_raw` if it is set, else the known counts, else None.

    A fake may send half an object on purpose.

    Args:
        write: encodes a usage record for the wire.
    """
    if answer.usage_raw is not None:
        return decode_json(answer.usage_raw.encode())
    return None if answer.usage is None else write(answer.usage)


def encode_event(data: bytes, name: str | None = None) -> bytes:
    """One server-sent event, named if the wire names its events."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return head + b"data: " + data + b"\n\n"


def known(form: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not None."""
    return {k: v for k, v in form.items() if v is not None}


def pieces(text: str, size: int) -> list[str]:
    """A text in pieces of `size` characters."""
    return [text[i : i + size] for i in range(0, len(text), size)]
