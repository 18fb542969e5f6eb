"""The wires that the fake model server speaks, by the route that a request comes in on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from hermes_rl.testing.dialects.base import ServerDialect


class Wire(NamedTuple):
    """One dialect and what stands around its bodies."""

    module: str
    kind: str
    """The class in that module."""
    answer_prefix: str
    """How the ids of its answers begin."""
    id_header: str = "x-request-id"
    """The header that names a request."""
    remaining_header: str = "x-ratelimit-remaining-requests"
    """The header that says how many requests the account has left."""


WIRES: dict[str, Wire] = {
    "/chat/completions": Wire("chat", "ChatServer", "chatcmpl-"),
    "/messages": Wire(
        "anthropic",
        "AnthropicServer",
        "msg_",
        "request-id",
        "anthropic-ratelimit-requests-remaining",
    ),
    "/responses": Wire("responses", "ResponsesServer", "resp_"),
}
"""How a route ends -> its wire."""

CHAT = WIRES["/chat/completions"]


def wire_of(path: str) -> Wire | None:
    """The wire of a route, whatever its query; None for a route that is not served."""
    path = path.partition("?")[0]
    return next((wire for ending, wire in WIRES.items() if path.endswith(ending)), None)


@lru_cache
def server_dialect(wire: Wire) -> ServerDialect:
    """The server's side of a wire; its module is loaded when the first request comes."""
    module = import_module(f"hermes_rl.testing.dialects.{wire.module}")
    dialect: ServerDialect = getattr(module, wire.kind)()
    return dialect


def any_key(headers: Mapping[str, str]) -> str:
    """The API key of a request whose wire is not known (the list of models)."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (key if kind.lower() == "bearer" else "")
