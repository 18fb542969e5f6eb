"""What the requests of all dialects share before their messages: headers, and tools as a field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hermes_rl.models.base import ModelRequest
from hermes_rl.models.prepare import without_grammar
from hermes_rl.models.wire.lenient import encode_json

JSON_HEADERS = {
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
}
"""Of every request; answers may be a body or a stream."""


def bearer_headers(api_key: str | None) -> dict[str, str]:
    """The headers of a request on OpenAI's wires."""
    return {**JSON_HEADERS, **({"authorization": f"Bearer {api_key}"} if api_key else {})}


class ToolField:
    """The tools of requests as a body field; encoded once per tuple, since turns share theirs.

    Args:
        form: a tool in the wire's form, from OpenAI's schema.
    """

    def __init__(self, form: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._form = form
        self._known: tuple[Any, bool, bytes] = ((), False, b"")

    def encoded(self, request: ModelRequest) -> bytes:
        """The field with the comma before it; empty where the request has no tools."""
        if not request.tools:
            return b""
        plain = "no_grammar" in request.adaptations
        known, was_plain, encoded = self._known
        if known is not request.tools or was_plain is not plain:
            tools = without_grammar(request.tools) if plain else request.tools
            encoded = b',"tools":' + encode_json([self._form(tool) for tool in tools])
            self._known = (request.tools, plain, encoded)
        return encoded
