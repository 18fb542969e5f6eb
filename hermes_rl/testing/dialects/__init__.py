"""The server sides of the wire formats that the fake model server speaks, by route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hermes_rl.testing.dialects.anthropic import AnthropicServer
from hermes_rl.testing.dialects.base import ServerDialect
from hermes_rl.testing.dialects.chat import ChatServer
from hermes_rl.testing.dialects.responses import ResponsesServer


class Wire(NamedTuple):
    """One dialect and the headers around its bodies."""

    dialect: ServerDialect
    answer_prefix: str
    """Prefix of answer ids."""
    id_header: str = "x-request-id"
    """The header with the id of a request."""
    remaining_header: str = "x-ratelimit-remaining-requests"
    """The header with the number of requests that the account has left."""


CHAT = Wire(ChatServer(), "chatcmpl-")
WIRES: dict[str, Wire] = {
    "/chat/completions": CHAT,
    "/messages": Wire(
        AnthropicServer(), "msg_", "request-id", "anthropic-ratelimit-requests-remaining"
    ),
    "/responses": Wire(ResponsesServer(), "resp_"),
}
"""End of a route -> its wire."""


def wire_of(path: str) -> Wire | None:
    """Return the wire of a route, whatever its query; None for an unknown route."""
    path = path.partition("?")[0]
    return next((wire for ending, wire in WIRES.items() if path.endswith(ending)), None)


def any_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request whose wire is unknown (the list of models)."""
    return AnthropicServer().key_of(headers)
