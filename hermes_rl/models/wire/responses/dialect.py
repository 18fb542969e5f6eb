"""The dialect `codex_responses`: OpenAI's Responses API, without its state on the server.

Nothing is stored there (`store: false`): each request holds the whole conversation as input items,
with the encrypted reasoning items of earlier answers before the calls that followed them. The
system prompt is `instructions`; it stands before the input, so a conversation's body is a prefix of
the next turn's. Client side; the other side is `server`.

This wire has no place for token ids, and returns no prompt logprobs; caching is automatic, helped
by a key where the provider takes one (`cache_key`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hermes_rl.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from hermes_rl.models.base import ModelRequest
from hermes_rl.models.prepare import outgoing
from hermes_rl.models.providers.quirks import Quirks, sendable
from hermes_rl.models.providers.table import quirks_at
from hermes_rl.models.wire.base import Decoder, ReplyHead
from hermes_rl.models.wire.decoding import decoder_for, fitting_id
from hermes_rl.models.wire.heads import ToolField, bearer_headers
from hermes_rl.models.wire.lenient import encode_json
from hermes_rl.models.wire.responses.answer import read_body
from hermes_rl.models.wire.responses.items import REASONING, Piece, is_replayable, pieces_of
from hermes_rl.models.wire.responses.stream import StreamDecoder

NAME = "codex_responses"
TAIL = b"]}"
"""The last bytes of every body. A turn's body without them begins the next turn's."""
MOST_ID = 64
"""Characters of a call's id; other providers have longer ones."""

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


class Responses:
    """One per client.

    Args:
        host: of the endpoint.
        secrets: texts that no error may show.
        quirks: the provider's own ways; None takes those that the host is known for.
    """

    name = NAME
    path = "/responses"

    def __init__(
        self, host: str = "", secrets: Iterable[str] = (), quirks: Quirks | None = None
    ) -> None:
        self._quirks = quirks or quirks_at(host)
        self._secrets = secrets
        self._tools = ToolField(_flat)

    def encode(self, request: ModelRequest) -> bytes:
        """See `Dialect.encode`. The input comes last; what stands before it does not change from
        turn to turn."""
        system, items = self._input(request)
        head = encode_json(_fields(request, system, self._quirks))[:-1]
        tools = self._tools.encoded(request)
        return b"".join((head, tools, b',"input":[', b",".join(items), TAIL))

    def bound(self, request: ModelRequest) -> int:
        """See `Dialect.bound`: the bytes of instructions, items and tools, and what images may
        cost."""
        system, items = self._input(request)
        given = len((system or "").encode("utf-8", "replace"))
        given += outgoing(request).image_tokens(request.model)
        return given + sum(map(len, items)) + len(items) + len(self._tools.encoded(request))

    def headers(self, api_key: str | None) -> dict[str, str]:
        """See `Dialect.headers`."""
        return bearer_headers(api_key)

    def decoder(self, request: ModelRequest, head: ReplyHead) -> Decoder:
        """See `Dialect.decoder`."""
        return decoder_for(
            request,
            head,
            body=read_body,
            stream=StreamDecoder,
            streamed=request.stream,
            secrets=self._secrets,
        )

    def _input(self, request: ModelRequest) -> tuple[str | None, Sequence[bytes]]:
        """The instructions, and the items of each message, encoded once."""
        ready = outgoing(request)
        encoded = ready.encoded(NAME, encode_message)[ready.lead :]
        return ready.system, [items for items in encoded if items]


def encode_message(message: Message) -> bytes:
    """One message as input items, separated by commas; empty when it has none."""
    return b",".join(encode_json(item) for item in _items(message))


def _fields(request: ModelRequest, system: str | None, quirks: Quirks) -> dict[str, Any]:
    """All of a body but its tools and its input."""
    include = [] if "no_encrypted_reasoning" in request.adaptations else [ENCRYPTED]
    if request.logprobs:
        include.append(LOGPROBS)
    fields: dict[str, Any] = {"model": request.model, "store": False}
    if include:
        fields["include"] = include
    if request.stream:
        fields["stream"] = True
    for name, value in sendable(request.sampling, NAME, quirks).as_dict().items():
        if name == "max_tokens":
            fields["max_output_tokens"] = value
        elif name == "reasoning":
            fields["reasoning"] = {"effort": value, "summary": "auto"}
        else:
            fields[name] = value
    if request.cache is not None and quirks.cache_key:
        fields["prompt_cache_key"] = outgoing(request).cache_key
    fields.update(request.extra)
    if system is not None:
        fields["instructions"] = system
    return fields


def _flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A function schema in this wire's form. Left to itself, the API would make it strict."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    return {"type": "function", "strict": False, **function}


def _items(message: Message) -> list[dict[str, Any]]:
    if isinstance(message, AssistantMessage):
        return [item for p in pieces_of(message) if (item := _item(p)) is not None]
    if isinstance(message, ToolMessage):
        call_id = fitting_id(message.tool_call_id, MOST_ID)
        output = {"call_id": call_id, "output": message.content}
        return [{"type": "function_call_output", **output}]
    role = "developer" if isinstance(message, SystemMessage) else "user"
    return [{"type": "message", "role": role, "content": _parts(message)}]


def _item(piece: Piece) -> dict[str, Any] | None:
    if piece.kind == REASONING:
        return _replayed(piece.block) if is_replayable(piece.block) else None
    if piece.call is not None:
        call = piece.call
        named = {
            "call_id": fitting_id(call.id, MOST_ID),
            "name": call.name,
            "arguments": call.arguments,
        }
        return {"type": "function_call", **named}
    item = {"type": "message", "role": "assistant", "content": piece.text}
    return {**item, "phase": piece.phase} if piece.phase else item


def _replayed(block: Any) -> dict[str, Any]:
    """A reasoning item as it came; what only an answer says (status, nulls) is left out."""
    item = {k: v for k, v in block.items() if v is not None and k != "status"}
    return {**item, "summary": item.get("summary", [])}


def _parts(message: SystemMessage | UserMessage) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"type": "input_text", "text": message.content}]
    return [_part(part) for part in message.content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """A content part of Chat Completions in this wire's form; others go as they are."""
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part.get("text", "")}
    if kind == "image_url":
        given = part.get("image_url")
        image = given if isinstance(given, dict) else {"url": given}
        detail = image.get("detail") or "auto"
        return {"type": "input_image", "image_url": image.get("url"), "detail": detail}
    if kind == "file" and isinstance(part.get("file"), dict):
        return {"type": "input_file", **part["file"]}
    return part
