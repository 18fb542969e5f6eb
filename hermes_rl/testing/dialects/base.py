"""The server side of a wire format: the contract, and what the fake server's dialects share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hermes_rl.messages import Message
from hermes_rl.models import CacheTime, Completion, Sampling
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


class RequestBody(msgspec.Struct, kw_only=True):
    """What the bodies of all requests have; unknown fields are left out."""

    model: str
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class OpenAIBody(RequestBody, kw_only=True):
    """What the bodies of requests on OpenAI's wires have."""

    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def sampling(self, max_tokens: int | None, effort: Any) -> Sampling:
        """The sampling parameters of the request."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=max_tokens,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            reasoning=effort if isinstance(effort, str) else None,
        )


class ServerDialect(ABC):
    """The server's side of one wire format. Without state.

    Args:
        piece_chars: length of a stream's pieces of text.
    """

    name: str
    path: str
    """How the route ends."""

    def __init__(self, piece_chars: int = 24) -> None:
        self._piece_chars = piece_chars

    @abstractmethod
    def decode_request(self, body: bytes) -> ServedRequest:
        """Raises: ValueError (UserError is one) when the body is not a request of this wire."""

    @abstractmethod
    def encode_answer(self, answer: Completion, *, answer_id: str) -> bytes:
        """An answer in one body."""

    @abstractmethod
    def encode_stream(
        self, answer: Completion, *, answer_id: str, include_usage: bool = True
    ) -> list[bytes]:
        """An answer as server-sent events."""

    def key_of(self, headers: Mapping[str, str]) -> str:
        """The API key that a request carries, empty without one; names are in lower case."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        return key if kind.lower() == "bearer" else ""

    def encode_error(
        self, message: str, *, status: int, kind: str, code: str | int | None = None
    ) -> bytes:
        """The body of a refusal: here of OpenAI's wires."""
        error = {"message": message, "type": kind, "param": None, "code": code}
        return encode_json({"error": error})


def openai_usage(usage: Usage, prompt: str, output: str) -> dict[str, Any]:
    """The usage object of OpenAI's wires: what is known.

    Args:
        prompt: what the wire calls the tokens of the prompt.
        output: what it calls those of the answer.
    """
    cached = known(
        {
            "cached_tokens": usage.cache_read_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        }
    )
    return known(
        {
            prompt: usage.input_tokens,
            f"{prompt}_details": cached or None,
            output: usage.output_tokens,
            f"{output}_details": known({"reasoning_tokens": usage.reasoning_tokens}) or None,
            "total_tokens": usage.total_tokens,
        }
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
