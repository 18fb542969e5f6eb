"""The dialect `anthropic_messages`: Anthropic's Messages API and the servers that speak it.

This is the client side: request bodies and answer decoders. The conversion from the internal form:

- The system prompt is a separate field. Tool results and user texts become blocks of one user
  message, results first; images become `image` blocks. Blank texts are omitted, because the API
  refuses them.
- `thinking` and `redacted_thinking` blocks are sent back unchanged and in their original places.
- Tool arguments must be an object: other text is sent as `{"_unparsed": text}`.
- `max_tokens` is required: `DEFAULT_MAX_TOKENS` if the request has none.
- Sampling values that equal the API's defaults (temperature 1, top_p 1, top_k -1) are not sent,
  because models since Claude Opus 4.7 refuse the parameters. `seed`, `min_p`, logprobs and token
  ids have no field in this wire.
- `reasoning` turns thinking on (`thinking_config`); temperature and top_k are then never sent, and
  top_p only from 0.95 on: the API refuses them beside thinking.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from hermes_rl.messages import (
    UNPARSED,
    AssistantMessage,
    Message,
    ToolCall,
    ToolMessage,
    UserMessage,
    parse_arguments,
)
from hermes_rl.models.base import CacheTime, Completion, ModelRequest, Sampling
from hermes_rl.models.prepare import NO_CONTENT, PreparedMessages, cache_marks, prepare_request
from hermes_rl.models.wire.anthropic_answers import POSITION, THINKING, StreamDecoder, read_body
from hermes_rl.models.wire.base import JSON_HEADERS, MessageDialect
from hermes_rl.models.wire.decoding import AnswerContext, EventDecoder
from hermes_rl.text import encode_json

ANTHROPIC_MESSAGES = "anthropic_messages"
_ANTHROPIC = "api.anthropic.com"
VERSION = "2023-06-01"
"""Sent as `anthropic-version`. Version 2026-10-21 removes the sampling parameters; the headers of
an endpoint may set it."""

BETAS = "interleaved-thinking-2025-05-14"
"""Sent as `anthropic-beta` to Anthropic: without it, models before Claude 4.6 think only before
their first tool call. Other models ignore it."""

DEFAULT_MAX_TOKENS = 32_000
"""Default output tokens per call: the minimum limit of the models in service since Claude 4."""

IMAGE_TOKENS = 4_800
"""Maximum tokens of an image, at the highest resolution: a URL does not show an image's size."""

MAX_UNSTREAMED_TOKENS = 21_333
"""Answers that may have more tokens are always streamed: they may take more than ten minutes (the
API assumes 128,000 tokens an hour), and idle connections do not last that long. The official
package refuses to request them in one piece."""

_MIN_TOP_P = 0.95
"""The API accepts no smaller one with thinking."""

TAIL = b"]}]}"
"""The last bytes of every body. Without them, and apart from cache markers, a turn's body is a
prefix of the next turn's."""

_NOT_IN_ID = re.compile(r"[^a-zA-Z0-9_-]")

Block = dict[str, Any]

BUDGETS = {
    "minimal": 1_024,
    "low": 4_096,
    "medium": 8_192,
    "high": 16_384,
    "xhigh": 24_576,
    "max": 32_768,
}
"""Effort -> thinking tokens, for models that accept a budget."""

_MIN_BUDGET = 1_024
"""The API accepts no smaller budget."""

_NO_THINKING = ("none", "off", "disabled")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ALWAYS_THINKING = ("claude-fable", "claude-mythos")
"""Models whose thinking cannot be turned off."""

_CLAUDE = re.compile(r"claude-(?:[a-z]+)-(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)")


class AnthropicMessages(MessageDialect):
    """The dialect of the Messages API. One per client.

    Args:
        host: of the endpoint; see `_key_headers`.
        secrets: texts that no error may show.
    """

    name = ANTHROPIC_MESSAGES
    path = "/v1/messages"

    def __init__(self, host: str = "", secrets: Iterable[str] = ()) -> None:
        super().__init__(secrets=secrets)
        self._host = host

    def encode(self, request: ModelRequest) -> bytes:
        ready = prepare_request(request)
        messages = ready.messages[ready.lead :]
        marks = cache_marks(ready.messages) if request.cache else ()
        blocks = _without_trailing_space(messages, _with_cache_markers(ready, marks, request.cache))
        return b"".join(
            (
                self._head(request),
                self._tools(request) or _tools_of(messages),
                _system(ready, request.cache),
                b',"messages":[',
                *_grouped(messages, blocks),
                TAIL,
            )
        )

    def bound(self, request: ModelRequest) -> int:
        """See `Dialect.bound`. Cache markers are not tokens."""
        pieces = self._pieces(request)
        images = IMAGE_TOKENS * sum(map(_count_images, prepare_request(request).messages))
        return sum(map(len, pieces)) + 16 * len(pieces) + len(self._tools(request)) + images

    def headers(self, api_key: str | None) -> dict[str, str]:
        """See `Dialect.headers`."""
        betas = {"anthropic-beta": BETAS} if self._host == _ANTHROPIC else {}
        versions = {"anthropic-version": VERSION, **betas}
        return {**JSON_HEADERS, **versions, **_key_headers(self._host, api_key)}

    def read_body(self, data: bytes, context: AnswerContext) -> Completion:
        return read_body(data, context)

    def stream(self, context: AnswerContext) -> EventDecoder:
        return StreamDecoder(context)

    def _is_streamed(self, request: ModelRequest) -> bool:
        """See `MAX_UNSTREAMED_TOKENS`."""
        most = request.sampling.max_tokens or DEFAULT_MAX_TOKENS
        return request.stream or most > MAX_UNSTREAMED_TOKENS

    def _pieces(self, request: ModelRequest) -> Sequence[bytes]:
        return prepare_request(request).encoded(ANTHROPIC_MESSAGES, _encode)

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """See `MessageDialect._tool`. A tool without `function` is one that the provider
        defines."""
        function = tool.get("function")
        if not isinstance(function, dict):
            return tool
        form = {"name": function.get("name", ""), "description": function.get("description")}
        known = {k: v for k, v in form.items() if v is not None}
        return {**known, "input_schema": function.get("parameters") or {"type": "object"}}

    def _head(self, request: ModelRequest) -> bytes:
        sampling = request.sampling
        most = sampling.max_tokens or DEFAULT_MAX_TOKENS
        fields: dict[str, Any] = {"model": request.model, "max_tokens": most}
        if self._is_streamed(request):
            fields["stream"] = True
        signed = "no_signatures" not in request.adaptations
        thinking = thinking_config(request.model, sampling.reasoning, most, replayed=signed)
        fields.update(thinking.fields)
        fields.update(_sampling_fields(sampling, thinking.on))
        if stops := [text for text in sampling.stop if text.strip()]:  # blank ones are refused
            fields["stop_sequences"] = stops
        fields.update(request.extra)
        return encode_json(fields)[:-1]


def _key_headers(host: str, key: str | None) -> dict[str, str]:
    """Return the headers for a key. Anthropic and Azure read `x-api-key`, and Azure a token of its
    directory as bearer. Other servers read one of the two, so both are sent."""
    if not key:
        return {}
    bearer = {"authorization": f"Bearer {key}"}
    if host == _ANTHROPIC:
        return {"x-api-key": key}
    if host.endswith(".azure.com"):
        return bearer if key.startswith("eyJ") else {"x-api-key": key}  # the beginning of every JWT
    return {"x-api-key": key, **bearer}


def _count_images(message: Message) -> int:
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return 0
    return sum(part.get("type") != "text" for part in message.content)


def _sampling_fields(sampling: Sampling, thinking: bool) -> dict[str, float]:
    """Return temperature, top_p and top_k that are allowed and not the API's defaults."""
    fields: dict[str, float] = {}
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if temperature is not None and temperature != 1 and not thinking:
        fields["temperature"] = temperature
    if top_p is not None and top_p != 1 and (not thinking or top_p >= _MIN_TOP_P):
        fields["top_p"] = top_p
    if top_k is not None and top_k > 0 and not thinking:
        fields["top_k"] = top_k
    return fields


def _tools_of(messages: Sequence[Message]) -> bytes:
    """Define the called tools for a request without tools: the API refuses calls of undefined
    tools. They may not be used."""
    calls = (c for m in messages if isinstance(m, AssistantMessage) for c in m.tool_calls)
    names = sorted({tool_name(call.name) for call in calls})
    if not names:
        return b""
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
    return b',"tools":' + encode_json(tools) + b',"tool_choice":{"type":"none"}'


def _without_trailing_space(
    messages: Sequence[Message], blocks: Sequence[bytes]
) -> Sequence[bytes]:
    """Remove trailing white space of a partial answer to be continued, which the API refuses."""
    last = messages[-1] if messages else None
    if not isinstance(last, AssistantMessage) or last.tool_calls:
        return blocks
    text = last.content.rstrip()
    if text == last.content:
        return blocks
    return [*blocks[:-1], _encode(msgspec.structs.replace(last, content=text))]


def _marker(cache: CacheTime) -> dict[str, str]:
    return {"type": "ephemeral", **({} if cache == "5m" else {"ttl": cache})}


def _system(ready: PreparedMessages, cache: CacheTime | None) -> bytes:
    """Return the system prompt as a body field."""
    text = ready.system
    if not text or not text.strip():
        return b""
    block: dict[str, Any] = text_block(text)
    if cache:
        block["cache_control"] = _marker(cache)
    return b',"system":[' + encode_json(block) + b"]"


def _encode(message: Message) -> bytes:
    """Encode the blocks of a message, without brackets."""
    return b",".join(encode_json(block) for block in blocks_of(message))


def _with_cache_markers(
    ready: PreparedMessages, places: Iterable[int], cache: CacheTime | None
) -> Sequence[bytes]:
    """Encode the messages after the system prompt; those at `places` carry a cache marker."""
    encoded = ready.encoded(ANTHROPIC_MESSAGES, _encode)
    wanted = [place for place in places if place >= ready.lead]
    if not wanted or cache is None:
        return encoded[ready.lead :]
    out = list(encoded)
    for place in wanted:
        out[place] = _encode_with_marker(ready.messages[place], _marker(cache))
    return out[ready.lead :]


def _encode_with_marker(message: Message, marker: dict[str, str]) -> bytes:
    blocks = blocks_of(message)
    if blocks and blocks[-1].get("type") not in ("thinking", "redacted_thinking"):
        blocks[-1] = {**blocks[-1], "cache_control": marker}
    return b",".join(map(encode_json, blocks))


def _grouped(messages: Sequence[Message], blocks: Sequence[bytes]) -> Iterable[bytes]:
    """Yield the parts of the messages array without its end. Adjacent messages of one role are
    merged."""
    role: str | None = None
    for message, encoded in zip(messages, blocks, strict=True):
        if not encoded:
            continue
        message_role = "assistant" if isinstance(message, AssistantMessage) else "user"
        if message_role == role:
            yield b","
        else:
            if role is None and message_role == "assistant":
                yield b'{"role":"user","content":[' + _OPENING
                role = "user"
            yield b"" if role is None else b"]},"
            yield b'{"role":"%b","content":[' % message_role.encode()
            role = message_role
        yield encoded
    if role is None:
        yield b'{"role":"user","content":[' + _OPENING


def text_block(text: str) -> Block:
    """Return a text block."""
    return {"type": "text", "text": text}


def blocks_of(message: Message) -> list[Block]:
    """Return the content blocks of one message."""
    if isinstance(message, AssistantMessage):
        return assistant_blocks(message, _tool_use)
    if isinstance(message, ToolMessage):
        result: Block = {"type": "tool_result", "tool_use_id": _valid_id(message.tool_call_id)}
        return [{**result, "content": message.content} if message.content else result]
    parts = message.content
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    blocks = [block for part in parts if (block := _part(part)) is not None]
    return blocks or [text_block(NO_CONTENT)]


def _part(part: Mapping[str, Any]) -> Block | None:
    """Convert an OpenAI content part; unknown ones pass unchanged. None for a blank text."""
    if isinstance(part.get("text"), str):
        return text_block(part["text"]) if part["text"].strip() else None
    if part.get("type") != "image_url":
        return dict(part)
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    return {"type": "image", "source": _image_source(url if isinstance(url, str) else "")}


def _image_source(url: str) -> dict[str, str]:
    """Return the source of an image; `data:` URLs are decoded."""
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    kind, _, data = url[len("data:") :].partition(",")
    media_type, *options = kind.split(";")
    if "base64" not in options:
        data = base64.b64encode(unquote_to_bytes(data)).decode()
    return {"type": "base64", "media_type": media_type or "image/png", "data": data}


def assistant_blocks(
    message: AssistantMessage, tool_use: Callable[[ToolCall], Block]
) -> list[Block]:
    """Return thinking in its original places, text, and calls."""
    text, calls = message.content, message.tool_calls
    out: list[Block] = []
    chars_done = calls_done = 0
    for block in _replayable_thinking(message.reasoning_details):
        chars, before = block.get(POSITION) or (0, 0)
        _add_text(out, text[chars_done:chars])
        out += map(tool_use, calls[calls_done:before])
        chars_done, calls_done = max(chars_done, chars), max(calls_done, before)
        out.append({k: v for k, v in block.items() if k != POSITION})
    _add_text(out, text[chars_done:])
    return [*out, *map(tool_use, calls[calls_done:])]


def _add_text(out: list[Block], text: str) -> None:
    if text.strip():
        out.append(text_block(text))


def _replayable_thinking(details: Any) -> list[Block]:
    """Return the thinking blocks that the API accepts: those with a signature or data."""
    listed = details if isinstance(details, list) else []
    return [
        block
        for block in listed
        if isinstance(block, dict)
        and block.get("type") in THINKING
        and ("signature" in block or "data" in block)
    ]


def _tool_use(call: ToolCall) -> Block:
    return {
        "type": "tool_use",
        "id": _valid_id(call.id),
        "name": tool_name(call.name),
        "input": input_of(call.arguments),
    }


def input_of(arguments: str) -> Any:
    """Return the arguments as an object, spelled as in the text."""
    if parse_arguments(arguments) is not None:
        return msgspec.Raw(arguments.encode())
    return {UNPARSED: arguments} if arguments.strip() else {}


def _valid_id(text: str) -> str:
    """Replace characters of an ID or name that this API refuses."""
    return _NOT_IN_ID.sub("_", text)


def tool_name(name: str) -> str:
    """Return a tool's name with the characters and length that this API accepts."""
    return _valid_id(name)[:128] or "unknown"


_OPENING = encode_json(text_block("(start)"))
"""The first user message if a conversation begins with the assistant or is empty."""


class Thinking(NamedTuple):
    """The thinking settings of a body."""

    on: bool
    fields: dict[str, Any]


def thinking_config(
    model: str, effort: str | None, max_tokens: int, *, replayed: bool = True
) -> Thinking:
    """Return the body fields for a reasoning effort.

    Claude models since 4.6 decide how much to think (`adaptive`) and accept the effort as it is;
    their thinking is requested as text. Others accept a budget: `BUDGETS`, or `effort` if it is a
    number, but at most three quarters of `max_tokens`, of which it is a part. With fewer than 1,024
    tokens the model does not think. `none` turns thinking off; models that always think do not get
    it.

    Args:
        replayed: whether thinking blocks of earlier turns are sent. Without them a model with a
            budget does not think, because the API requires every tool turn to begin with thinking.
    """
    if effort is None:
        return Thinking(False, {})
    if effort in _NO_THINKING:
        always = any(family in model for family in _ALWAYS_THINKING)
        return Thinking(False, {} if always else {"thinking": {"type": "disabled"}})
    if is_adaptive(model) and not effort.isdigit():
        level = effort if effort in _EFFORTS else "low"
        shown = {"type": "adaptive", "display": "summarized"}
        return Thinking(True, {"thinking": shown, "output_config": {"effort": level}})
    wanted = int(effort) if effort.isdigit() else BUDGETS.get(effort, BUDGETS["medium"])
    budget = min(wanted, max_tokens * 3 // 4)
    if budget < _MIN_BUDGET or not replayed:
        return Thinking(False, {})
    return Thinking(True, {"thinking": {"type": "enabled", "budget_tokens": budget}})


def is_adaptive(model: str) -> bool:
    """Return whether the model decides how much to think, and may refuse a budget."""
    if "claude-mythos-preview" in model:
        return True
    found = _CLAUDE.search(model)
    return found is not None and (int(found[1]), int(found[2] or 0)) >= (4, 6)
