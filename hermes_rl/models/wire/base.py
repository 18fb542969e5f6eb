"""The contract of dialects, client side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hermes_rl.models.base import Completion, ModelRequest


@dataclass(frozen=True)
class ReplyHead:
    """What a decoder needs to know of an answer's head."""

    headers: Mapping[str, str]
    """Names in lower case."""
    first_byte_s: float | None = None


class Decoder(Protocol):
    """Takes one answer's bytes as they come."""

    done: bool
    """The answer said that it is complete; what follows is of no interest."""

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun: what is missing of a broken answer is then a call."""
        ...

    def feed(self, piece: bytes) -> None:
        """Take the next bytes. Raises: ModelError when they hold an error."""
        ...

    def finish(self) -> Completion:
        """The answer. Raises: ModelError when it is not complete."""
        ...


class Dialect(Protocol):
    """One wire format."""

    name: str
    path: str
    """Added to the endpoint's base URL."""

    def encode(self, request: ModelRequest) -> bytes:
        """The body of a request. Within a conversation, without its last bytes (`tail`), it is a
        prefix of every later body with the same parameters."""
        ...

    def bound(self, request: ModelRequest) -> int:
        """An upper bound on the prompt's tokens: about the body's bytes."""
        ...

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Headers of every request."""
        ...

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """A decoder for the answer to `request`."""
        ...
