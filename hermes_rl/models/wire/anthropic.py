"""The dialect `anthropic_messages`: Anthropic's Messages API and the servers that speak it.

Client side: a request's body and a decoder for its answer. The server side is `server`.

How the internal form becomes this wire:

- The system prompt stands apart. Tool results and what the user says become blocks of one user
  message, results first; images become `image` blocks. Blank texts are left out, since the API
  refuses them.
- `thinking` and `redacted_thinking` blocks go back exactly as they came and where they stood.
- Arguments of tool calls must be an object here: other text is sent as `{"_unparsed": text}`.
- `max_tokens` is required: `DEFAULT_MAX_TOKENS` where the request says none.
- Sampling: values that are the API's own defaults (temperature 1, top_p 1, top_k -1) are not sent,
  because models since Claude Opus 4.7 refuse the parameters and mean the same without them. `seed`,
  `min_p`, logprobs and token ids have no place in this wire and are left out.
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
from hermes_rl.models.prepare import NO_CONTENT, Outgoing, cache_marks, outgoing
from hermes_rl.models.wire.anthropic_answers import AT, THINKING, StreamDecoder, read_body
from hermes_rl.models.wire.base import JSON_HEADERS, MessageDialect
from hermes_rl.models.wire.decoding import EventDecoder, Reading
from hermes_rl.text import encode_json

ANTHROPIC_MESSAGES = "anthropic_messages"
_ANTHROPIC = "api.anthropic.com"
VERSION = "2023-06-01"
"""Sent as `anthropic-version`. Version 2026-10-21 removes the sampling parameters; the headers of
an endpoint may ask for it."""

BETAS = "interleaved-thinking-2025-05-14"
"""Sent as `anthropic-beta` to Anthropic itself: without it models before Claude 4.6 think only
before their first tool call. Other models take no notice of it."""

DEFAULT_MAX_TOKENS = 32_000
"""Output tokens per call where the request says nothing: the least that the models in service since
Claude 4 allow."""

IMAGE_TOKENS = 4_800
"""The most that an image costs, at the highest resolution; its address says nothing of its size."""

LONGEST_WHOLE = 21_333
"""Answers that may have more tokens are streamed whether or not somebody listens: they may take
more than ten minutes (the API counts on 128,000 tokens an hour), and silent connections do not live
so long. The official package refuses to ask for them in one piece."""

_LEAST_TOP_P = 0.95
"""The API takes no smaller one beside thinking."""

TAIL = b"]}]}"
"""The last bytes of every body. Apart from cache markers, a turn's body without them begins the
next turn's."""

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
"""Effort -> thinking tokens, for models that take a budget."""

_LEAST = 1_024
"""The API takes no smaller budget."""

_OFF = ("none", "off", "disabled")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ALWAYS = ("claude-fable", "claude-mythos")
"""They refuse to have their thinking turned off."""

_CLAUDE = re.compile(r"claude-(?:[a-z]+)-(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)")


class AnthropicMessages(MessageDialect):
    """One per client.

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
        ready = outgoing(request)
        messages = ready.messages[ready.lead :]
        marks = cache_marks(ready.messages) if request.cache else ()
        blocks = _ended(messages, _marked(ready, marks, request.cache))
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
        """See `Dialect.bound`. A marker is no token."""
        pieces = self._pieces(request)
        images = IMAGE_TOKENS * sum(map(_images, outgoing(request).messages))
        return sum(map(len, pieces)) + 16 * len(pieces) + len(self._tools(request)) + images

    def headers(self, api_key: str | None) -> dict[str, str]:
        """See `Dialect.headers`."""
        betas = {"anthropic-beta": BETAS} if self._host == _ANTHROPIC else {}
        own = {"anthropic-version": VERSION, **betas}
        return {**JSON_HEADERS, **own, **_key_headers(self._host, api_key)}

    def read_body(self, data: bytes, reading: Reading) -> Completion:
        return read_body(data, reading)

    def stream(self, reading: Reading) -> EventDecoder:
        return StreamDecoder(reading)

    def _is_streamed(self, request: ModelRequest) -> bool:
        """See `LONGEST_WHOLE`."""
        most = request.sampling.max_tokens or DEFAULT_MAX_TOKENS
        return request.stream or most > LONGEST_WHOLE

    def _pieces(self, request: ModelRequest) -> Sequence[bytes]:
        return outgoing(request).encoded(ANTHROPIC_MESSAGES, _encode)

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """A tool that has no `function` is a provider's own."""
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
        fields.update(_sampled(sampling, thinking.on))
        if stops := [text for text in sampling.stop if text.strip()]:  # blank ones are refused
            fields["stop_sequences"] = stops
        fields.update(request.extra)
        return encode_json(fields)[:-1]


def _key_headers(host: str, key: str | None) -> dict[str, str]:
    """Anthropic and Azure take a key as `x-api-key`, and Azure a token of its directory as bearer.
    Other servers that speak this wire look in one place or the other: they get both."""
    if not key:
        return {}
    bearer = {"authorization": f"Bearer {key}"}
    if host == _ANTHROPIC:
        return {"x-api-key": key}
    if host.endswith(".azure.com"):
        return bearer if key.startswith("eyJ") else {"x-api-key": key}  # the head of every JWT
    return {"x-api-key": key, **bearer}


def _images(message: Message) -> int:
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return 0
    return sum(part.get("type") != "text" for part in message.content)


def _sampled(sampling: Sampling, thinks: bool) -> dict[str, float]:
    """Temperature, top_p and top_k where they are not the API's defaults and may be sent."""
    given: dict[str, float] = {}
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if temperature is not None and temperature != 1 and not thinks:
        given["temperature"] = temperature
    if top_p is not None and top_p != 1 and (not thinks or top_p >= _LEAST_TOP_P):
        given["top_p"] = top_p
    if top_k is not None and top_k > 0 and not thinks:
        given["top_k"] = top_k
    return given


def _tools_of(messages: Sequence[Message]) -> bytes:
    """Tools as body fields for a request without any whose history has calls: the API refuses calls
    of tools that are not defined, so they are, and may not be used."""
    calls = (c for m in messages if isinstance(m, AssistantMessage) for c in m.tool_calls)
    names = sorted({tool_name(call.name) for call in calls})
    if not names:
        return b""
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
    return b',"tools":' + encode_json(tools) + b',"tool_choice":{"type":"none"}'


def _ended(messages: Sequence[Message], blocks: Sequence[bytes]) -> Sequence[bytes]:
    """The blocks, without white space at the end of an answer that is to be gone on from: the API
    refuses it."""
    last = messages[-1] if messages else None
    if not isinstance(last, AssistantMessage) or last.tool_calls:
        return blocks
    text = last.content.rstrip()
    if text == last.content:
        return blocks
    return [*blocks[:-1], _encode(msgspec.structs.replace(last, content=text))]


def _marker(cache: CacheTime) -> dict[str, str]:
    return {"type": "ephemeral", **({} if cache == "5m" else {"ttl": cache})}


def _system(ready: Outgoing, cache: CacheTime | None) -> bytes:
    """The system prompt as a body field."""
    text = ready.system
    if not text or not text.strip():
        return b""
    block: dict[str, Any] = text_block(text)
    if cache:
        block["cache_control"] = _marker(cache)
    return b',"system":[' + encode_json(block) + b"]"


def _encode(message: Message) -> bytes:
    """The blocks of a message, without the brackets around them."""
    return b",".join(encode_json(block) for block in blocks_of(message))


def _marked(ready: Outgoing, places: Iterable[int], cache: CacheTime | None) -> Sequence[bytes]:
    """The blocks of each message behind the system prompt; those at `places` carry a marker."""
    encoded = ready.encoded(ANTHROPIC_MESSAGES, _encode)
    wanted = [place for place in places if place >= ready.lead]
    if not wanted or cache is None:
        return encoded[ready.lead :]
    out = list(encoded)
    for place in wanted:
        out[place] = _with_marker(ready.messages[place], _marker(cache))
    return out[ready.lead :]


def _with_marker(message: Message, marker: dict[str, str]) -> bytes:
    blocks = blocks_of(message)
    if blocks and blocks[-1].get("type") not in ("thinking", "redacted_thinking"):
        blocks[-1] = {**blocks[-1], "cache_control": marker}
    return b",".join(map(encode_json, blocks))


def _grouped(messages: Sequence[Message], blocks: Sequence[bytes]) -> Iterable[bytes]:
    """The pieces of the messages array but for its end: neighbours of one role share a message."""
    role: str | None = None
    for message, encoded in zip(messages, blocks, strict=True):
        if not encoded:
            continue
        its = "assistant" if isinstance(message, AssistantMessage) else "user"
        if its == role:
            yield b","
        else:
            if role is None and its == "assistant":
                yield b'{"role":"user","content":[' + _OPENING
                role = "user"
            yield b"" if role is None else b"]},"
            yield b'{"role":"%b","content":[' % its.encode()
            role = its
        yield encoded
    if role is None:
        yield b'{"role":"user","content":[' + _OPENING


def text_block(text: str) -> Block:
    """A block of text."""
    return {"type": "text", "text": text}


def blocks_of(message: Message) -> list[Block]:
    """The content blocks of one message."""
    if isinstance(message, AssistantMessage):
        return assistant_blocks(message, _tool_use)
    if isinstance(message, ToolMessage):
        result: Block = {"type": "tool_result", "tool_use_id": _id(message.tool_call_id)}
        return [{**result, "content": message.content} if message.content else result]
    parts = message.content
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    blocks = [block for part in parts if (block := _part(part)) is not None]
    return blocks or [text_block(NO_CONTENT)]


def _part(part: Mapping[str, Any]) -> Block | None:
    """One of OpenAI's content parts; what is none of them is passed on. None for a blank text."""
    if isinstance(part.get("text"), str):
        return text_block(part["text"]) if part["text"].strip() else None
    if part.get("type") != "image_url":
        return dict(part)
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return {"type": "image", "source": _source(url if isinstance(url, str) else "")}


def _source(url: str) -> dict[str, str]:
    """Where an image comes from: a `data:` URL is unpacked, any other stays one."""
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
    """Thinking where it stood, text, and calls."""
    text, calls = message.content, message.tool_calls
    out: list[Block] = []
    said = made = 0
    for block in _thoughts(message.reasoning_details):
        chars, before = block.get(AT) or (0, 0)
        _add_text(out, text[said:chars])
        out += map(tool_use, calls[made:before])
        said, made = max(said, chars), max(made, before)
        out.append({k: v for k, v in block.items() if k != AT})
    _add_text(out, text[said:])
    return [*out, *map(tool_use, calls[made:])]


def _add_text(out: list[Block], text: str) -> None:
    if text.strip():
        out.append(text_block(text))


def _thoughts(details: Any) -> list[Block]:
    """The opaque blocks of this wire; a thought without a signature would be refused."""
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
        "id": _id(call.id),
        "name": tool_name(call.name),
        "input": input_of(call.arguments),
    }


def input_of(arguments: str) -> Any:
    """The arguments as an object, in the text's own spelling."""
    if parse_arguments(arguments) is not None:
        return msgspec.Raw(arguments.encode())
    return {UNPARSED: arguments} if arguments.strip() else {}


def _id(given: str) -> str:
    """An id (or name) with the characters that this API takes; ids of other providers may have
    more."""
    return _NOT_IN_ID.sub("_", given)


def tool_name(given: str) -> str:
    """A tool's name with the characters and length that this API takes."""
    return _id(given)[:128] or "unknown"


_OPENING = encode_json(text_block("(start)"))
"""The first user message if a conversation begins with the assistant or is empty."""


class Thinking(NamedTuple):
    """What a body says of thinking."""

    on: bool
    fields: dict[str, Any]


def thinking_config(
    model: str, effort: str | None, max_tokens: int, *, replayed: bool = True
) -> Thinking:
    """The fields of a body for a reasoning effort.

    Claude models since 4.6 decide for themselves how much to think (`adaptive`) and take the effort
    as it is; their thinking is asked for as text. Others take a budget: `BUDGETS`, or the number
    that `effort` is, but at most three quarters of `max_tokens`, of which it is a part; where less
    than 1,024 tokens are left for it the model does not think. `none` turns thinking off, and is
    not said to the models that always think.

    Args:
        replayed: thinking blocks of earlier turns are sent. Without them a model that takes a
            budget does not think, because the API wants every tool turn to begin with its thinking.
    """
    if effort is None:
        return Thinking(False, {})
    if effort in _OFF:
        always = any(family in model for family in _ALWAYS)
        return Thinking(False, {} if always else {"thinking": {"type": "disabled"}})
    if is_adaptive(model) and not effort.isdigit():
        level = effort if effort in _EFFORTS else "low"
        shown = {"type": "adaptive", "display": "summarized"}
        return Thinking(True, {"thinking": shown, "output_config": {"effort": level}})
    wanted = int(effort) if effort.isdigit() else BUDGETS.get(effort, BUDGETS["medium"])
    budget = min(wanted, max_tokens * 3 // 4)
    if budget < _LEAST or not replayed:
        return Thinking(False, {})
    return Thinking(True, {"thinking": {"type": "enabled", "budget_tokens": budget}})


def is_adaptive(model: str) -> bool:
    """The model decides for itself how much to think, and may refuse a budget."""
    if "claude-mythos-preview" in model:
        return True
    found = _CLAUDE.search(model)
    return found is not None and (int(found[1]), int(found[2] or 0)) >= (4, 6)
