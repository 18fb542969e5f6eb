"""Prepare stored messages for sending, in small pure steps.

Every dialect builds its body from `prepare_request(request)`, never from the conversation itself:

    prepared = prepare_request(request)
    prepared.system                   # the system prompt with the ephemeral layer, or None
    prepared.messages                 # system (`prepared.lead` messages), prefill, then the rest
    prepared.encoded(key, encode)     # bytes of each of them, encoded once per message and key
    cache_marks(prepared.messages)    # which of them carry a cache marker

The order of the steps: repair tool arguments; make roles alternate; append the ephemeral layer to
the system prompt; drop internal fields; insert the prefill after the system prompt; pair tool
results with their calls; drop assistant turns that have only reasoning, and merge their neighbors;
fill empty user messages; write arguments as canonical JSON; replace lone surrogates; apply
`request.adaptations`. Dialects add cache markers to copies of a few encoded messages. A message
that needs no change stays the same object, so that its bytes are reused. With `request.exact` only
the ephemeral layer, the prefill (repaired like any history) and the adaptations apply;
`repaired_roles` repairs the prompt before the first request.

Tool schemas: `without_grammar`. Bound on image tokens: `prepared.image_tokens(model)`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

from hermes_rl.messages import (
    UNPARSED,
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    has_content,
    parse_arguments,
)
from hermes_rl.models.base import Adaptation, ModelRequest, PreparedView
from hermes_rl.models.prepare.images import shrink_image_part
from hermes_rl.text import clean

_sorted = msgspec.json.Encoder(order="sorted").encode

_first_value = json.JSONDecoder(strict=False).raw_decode

_COMMA = re.compile(r",(\s*[}\]])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*', re.DOTALL)
"""A JSON string without its closing quote."""
_CONTROL = re.compile(r"[\x00-\x1f]")
_LITERAL_CHARS = 100_000
"""Longer texts are not parsed as Python literals: that parser is slow and recursive."""
_MOST_CHARS = 1_000_000
"""Longer texts are not repaired, because repair blocks the event loop."""


def repair_arguments(messages: list[Message]) -> list[Message]:
    """Make every call's arguments a JSON object; see `repaired_arguments`."""
    return _each_call(messages, repaired_arguments)


def canonical_arguments(messages: list[Message]) -> list[Message]:
    """Write arguments that are JSON objects in canonical form."""
    return _each_call(messages, canonical_json)


def canonical_json(text: str) -> str:
    """Return a JSON object with sorted keys and no spaces; other text unchanged."""
    value = parse_arguments(text)
    if value is None:
        return text
    try:
        return _sorted(value).decode()
    except (ValueError, RecursionError, OverflowError):
        return text


def repaired_arguments(text: str) -> str:
    """Return a JSON object for any text.

    It is the text itself, a repaired form (truncated, in a code fence, with trailing commas, a
    Python literal, encoded twice), or else `{"_unparsed": text}`.
    """
    if parse_arguments(text) is not None:
        return text
    stripped = text.strip()
    if not stripped:
        return "{}"
    inner = _unfenced(stripped)
    attempts = (_lenient, _without_commas, _literal, _closed)
    for attempt in attempts if len(inner) <= _MOST_CHARS else ():
        value = attempt(inner)
        if isinstance(value, str):  # encoded twice
            value = parse_arguments(value)
        written = _written(value)
        if written is not None:
            return written
    return _written({UNPARSED: text}) or "{}"


def _unfenced(text: str) -> str:
    """Return the content of a code fence; other text unchanged."""
    if not text.startswith("```"):
        return text
    _, _, inner = text.removesuffix("```").partition("\n")
    return inner.strip()


def _lenient(text: str) -> Any:
    """Parse JSON that may have control characters in its strings."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _without_commas(text: str) -> Any:
    return _lenient(_COMMA.sub(r"\1", text))


def _literal(text: str) -> Any:
    if len(text) > _LITERAL_CHARS or not text.startswith("{"):
        return None
    with warnings.catch_warnings():  # on odd escapes
        warnings.simplefilter("ignore")
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None


def _closed(text: str) -> Any:
    """Parse truncated JSON: close open strings and brackets, and drop incomplete members.
    Superfluous closing brackets at the end are ignored."""
    if not text.startswith("{"):
        return None
    from pydantic import TypeAdapter  # only broken arguments need it

    try:
        value, end = _first_value(text)
        return value if not text[end:].strip("}] \n") else None
    except (ValueError, RecursionError):
        pass
    try:
        plain = _STRING.sub(_escaped, clean(text))
        value = TypeAdapter(dict[str, Any]).validate_json(
            plain, experimental_allow_partial="trailing-strings"
        )
    except ValueError:
        return None
    return value


def _escaped(string: re.Match[str]) -> str:
    """Escape raw control characters in a JSON string."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", string[0])


def _written(value: Any) -> str | None:
    """Write an object as strict JSON; None for other values."""
    if not isinstance(value, dict):
        return None
    try:
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        written = clean(written)
    except (ValueError, TypeError, RecursionError):
        return None
    return written if parse_arguments(written) is not None else None


def _each_call(messages: list[Message], change: Callable[[str], str]) -> list[Message]:
    """Apply `change` to the arguments of every call. Unchanged messages stay the same object."""

    def changed(call: ToolCall) -> ToolCall:
        text = change(call.arguments)
        return call if text == call.arguments else msgspec.structs.replace(call, arguments=text)

    def of(message: Message) -> Message:
        if not isinstance(message, AssistantMessage) or not message.tool_calls:
            return message
        calls = tuple(map(changed, message.tool_calls))
        if all(a is b for a, b in zip(calls, message.tool_calls, strict=True)):
            return message
        return msgspec.structs.replace(message, tool_calls=calls)

    return [of(message) for message in messages]


NO_IMAGE = "[image left out: the model takes none]"
"""Replaces an image that is not sent."""

IMAGE_TOKENS = 5_000
"""Maximum tokens of an image with OpenAI's and open models (2026-11). A URL does not show an
image's size, and few bytes may be many tokens."""
_EXPENSIVE_IMAGES = ("4o-mini", 50_000)
"""This model counts 33 times as many tokens for an image, at a lower price per token."""

_IMAGES = ("image_url", "image", "input_image")
_SIGNED = ("thinking", "redacted_thinking")

NO_RESULT = "No result: the call was interrupted."
"""Replaces a missing tool result."""
ORPHAN = "[Result of a tool call that is not part of this conversation]"
"""Precedes the text of a tool result without a call."""
NO_CONTENT = "(no content)"
"""Replaces the content of an empty user message."""


def alternate(messages: list[Message]) -> list[Message]:
    """Merge adjacent user messages, and adjacent assistant messages unless the first has tool calls
    (its results are missing: see `pair_results`) or one has neither text nor calls (see
    `drop_thinking_only`)."""
    out: list[Message] = []
    for message in messages:
        last = out[-1] if out else None
        if isinstance(message, UserMessage) and isinstance(last, UserMessage):
            out[-1] = UserMessage(content=_joined(last.content, message.content))
        elif (
            isinstance(message, AssistantMessage)
            and isinstance(last, AssistantMessage)
            and not last.tool_calls
            and has_text_or_calls(last)
            and has_text_or_calls(message)
        ):
            out[-1] = _one_assistant(last, message)
        else:
            out.append(message)
    return out


def pair_results(messages: list[Message]) -> list[Message]:
    """Make each tool result follow its call. A call without a result gets `NO_RESULT`; a result
    without a call becomes a user message."""
    out: list[Message] = []
    waiting: list[tuple[str, str]] = []
    orphans: list[Message] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            found = next((w for w in waiting if w[0] == message.tool_call_id), None)
            if found is not None:
                waiting.remove(found)
                out.append(message)
            elif message.content.strip():
                orphans.append(UserMessage(content=f"{ORPHAN}\n{message.content}"))
            continue
        out += _stubs(waiting) + orphans
        waiting, orphans = [], []
        if isinstance(message, AssistantMessage):
            waiting = [(call.id, call.name) for call in message.tool_calls]
        out.append(message)
    return out + _stubs(waiting) + orphans


def drop_thinking_only(messages: list[Message]) -> list[Message]:
    """Drop assistant messages without text and calls, which providers refuse."""
    return [m for m in messages if not isinstance(m, AssistantMessage) or has_text_or_calls(m)]


def fill_empty(messages: list[Message]) -> list[Message]:
    """Fill empty user messages with `NO_CONTENT`: most providers refuse them."""
    return [
        UserMessage(content=NO_CONTENT)
        if isinstance(message, UserMessage) and not has_content(message)
        else message
        for message in messages
    ]


def has_text_or_calls(message: AssistantMessage) -> bool:
    """Return whether a message has text or calls."""
    return bool(message.tool_calls) or bool(message.content.strip())


def find_cut(messages: list[Message], start: int) -> int:
    """Return the last index before an assistant message across which no step looks: the message
    before it is a user message, or an assistant message with calls (and its results)."""
    for place in range(len(messages) - 1, start, -1):
        here = messages[place]
        has_output = isinstance(here, AssistantMessage) and has_text_or_calls(here)
        if has_output and _is_closed(messages, start, place):
            return place
    return start


def _is_closed(messages: list[Message], start: int, place: int) -> bool:
    for index in range(place - 1, start - 1, -1):
        before = messages[index]
        if isinstance(before, UserMessage | SystemMessage):
            return True
        if isinstance(before, AssistantMessage) and has_text_or_calls(before):
            return bool(before.tool_calls)
    return False


def _stubs(waiting: list[tuple[str, str]]) -> list[Message]:
    return [ToolMessage(tool_call_id=i, name=name, content=NO_RESULT) for i, name in waiting]


def _joined(
    first: str | list[dict[str, Any]], second: str | list[dict[str, Any]]
) -> str | list[dict[str, Any]]:
    if isinstance(first, str) and isinstance(second, str):
        return join_texts(first, second)
    return _as_parts(first) + _as_parts(second)


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}] if content else []


def join_texts(first: str, second: str) -> str:
    """Join two texts with an empty line; an empty text is left out."""
    return f"{first}\n\n{second}" if first and second else first or second


def _one_assistant(first: AssistantMessage, second: AssistantMessage) -> AssistantMessage:
    thoughts = join_texts(first.reasoning_content or "", second.reasoning_content or "")
    details: list[Any] = []
    for blocks in (first.reasoning_details, second.reasoning_details):
        details += blocks if isinstance(blocks, list) else [] if blocks is None else [blocks]
    return msgspec.structs.replace(
        second,
        content=join_texts(first.content, second.content),
        reasoning_content=thoughts or None,
        raw_content=None,
        reasoning_details=details or None,
    )


def drop_internal(messages: list[Message]) -> list[Message]:
    """Remove internal keys (with a leading underscore) from content parts. No dialect writes other
    internal fields."""
    return [parts_of(m, _without_internal_keys) for m in messages]


def clean_surrogates(messages: list[Message]) -> list[Message]:
    """Replace lone surrogates, which no wire can carry, by U+FFFD."""
    return [_cleaned(m) for m in messages]


def small_images(messages: list[Message]) -> list[Message]:
    """Adaptation `small_images`: shrink images in `data:` URLs."""
    return [parts_of(m, shrink_image_part) for m in messages]


def without_images(messages: list[Message]) -> list[Message]:
    """Adaptation `no_images`: replace each image by a text."""
    return [parts_of(m, _no_image) for m in messages]


def text_only(messages: list[Message]) -> list[Message]:
    """Adaptation `text_only`: join content parts into one text."""
    return [_join_parts(m) for m in messages]


def without_signatures(messages: list[Message]) -> list[Message]:
    """Adaptation `no_signatures`: drop signed and redacted thinking, and aggregators' blocks such
    as `reasoning.text`."""
    return [_without_blocks(m, _is_signed) for m in messages]


def without_encrypted(messages: list[Message]) -> list[Message]:
    """Adaptation `no_encrypted_reasoning`: drop encrypted reasoning."""
    return [_without_blocks(m, _is_encrypted) for m in messages]


def images_in(message: Message) -> int:
    """Count the images of a message."""
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return 0
    return sum(part.get("type") in _IMAGES for part in message.content)


def tokens_of_images(count: int, model: str) -> int:
    """Return an upper bound on the tokens of this many images."""
    return count * (_EXPENSIVE_IMAGES[1] if _EXPENSIVE_IMAGES[0] in model else IMAGE_TOKENS)


def blocks_of(message: AssistantMessage) -> list[dict[str, Any]]:
    """Return the opaque reasoning blocks of a message, in order."""
    details = message.reasoning_details
    listed = details if isinstance(details, list) else [details]
    return [block for block in listed if isinstance(block, dict)]


def _is_signed(block: dict[str, Any]) -> bool:
    kind = str(block.get("type"))
    return kind in _SIGNED or kind.startswith("reasoning.") or "signature" in block


def _is_encrypted(block: dict[str, Any]) -> bool:
    return block.get("type") in ("reasoning", "reasoning.encrypted")


def _without_blocks(message: Message, drop: Callable[[Any], bool]) -> Message:
    if not isinstance(message, AssistantMessage) or not isinstance(message.reasoning_details, list):
        return message
    kept = [b for b in message.reasoning_details if not (isinstance(b, dict) and drop(b))]
    if len(kept) == len(message.reasoning_details):
        return message
    return msgspec.structs.replace(message, reasoning_details=kept or None)


def parts_of(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """Apply `change` to each content part. An unchanged message stays the same object."""
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return message
    parts = [change(part) for part in message.content]
    if all(a is b for a, b in zip(parts, message.content, strict=True)):
        return message
    return UserMessage(content=parts)


def _no_image(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": NO_IMAGE} if part.get("type") in _IMAGES else part


def _join_parts(message: Message) -> Message:
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return message
    texts = [_no_image(part).get("text") for part in message.content]
    return UserMessage(content="\n".join(t for t in texts if isinstance(t, str)))


def _without_internal_keys(part: dict[str, Any]) -> dict[str, Any]:
    if not any(key.startswith("_") for key in part):
        return part
    return {k: v for k, v in part.items() if not k.startswith("_")}


def _cleaned(message: Message) -> Message:
    if isinstance(message, UserMessage) and not isinstance(message.content, str):
        return parts_of(message, _clean_part)
    assert isinstance(message.content, str)
    changed: dict[str, Any] = {"content": clean(message.content)}
    if isinstance(message, AssistantMessage):
        calls = message.tool_calls
        if any(clean(call.arguments) is not call.arguments for call in calls):
            calls = tuple(
                msgspec.structs.replace(call, arguments=clean(call.arguments)) for call in calls
            )
        thought = message.reasoning_content
        changed |= {"reasoning_content": thought and clean(thought), "tool_calls": calls}
    if all(getattr(message, name) is value for name, value in changed.items()):
        return message
    return msgspec.structs.replace(message, **changed)


def _clean_part(part: dict[str, Any]) -> dict[str, Any]:
    text = part.get("text")
    if not isinstance(text, str) or clean(text) is text:
        return part
    return {**part, "text": clean(text)}


Step = Callable[[list[Message]], list[Message]]

_ROLES: tuple[Step, ...] = (pair_results, drop_thinking_only, alternate, fill_empty)

REPAIRS: tuple[Step, ...] = (
    repair_arguments,
    alternate,
    drop_internal,
    *_ROLES,
    canonical_arguments,
    clean_surrogates,
)
"""The steps of every request that is not exact."""

ADAPTATIONS: dict[Adaptation, Step] = {
    "small_images": small_images,
    "no_images": without_images,
    "text_only": text_only,
    "no_signatures": without_signatures,
    "no_encrypted_reasoning": without_encrypted,
}
"""The steps of adaptations; `no_grammar` applies to tools only."""


def prepare(
    messages: Sequence[Message],
    *,
    exact: bool = False,
    adaptations: frozenset[Adaptation] = frozenset(),
) -> list[Message]:
    """Return the messages to send, without the ephemeral layer and the prefill. Idempotent."""
    return _pipeline(exact, adaptations).run(list(messages))


def repaired_roles(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with alternating roles and paired tool results, for an exact request.

    Messages that need no repair stay the same object. Idempotent.
    """
    repaired = alternate(list(messages))
    for step in _ROLES:
        repaired = step(repaired)
    return repaired


@dataclass(frozen=True)
class PreparedMessages:
    """The messages of one request."""

    messages: Sequence[Message]
    """All of them, in order."""
    lead: int
    """Number of system messages at the beginning."""
    added: tuple[tuple[int, int], ...]
    """(index in `messages`, number of stored messages that it replaces) of the ephemeral layer and
    the prefill, which are encoded at each call."""
    view: PreparedView

    @property
    def system(self) -> str | None:
        """The system prompt as one text, if there is one."""
        texts = [str(m.content) for m in self.messages[: self.lead]]
        return "\n\n".join(texts) if texts else None

    def encoded(self, key: str, encode: Callable[[Message], bytes]) -> Sequence[bytes]:
        """Return each of `messages` encoded, stored ones once. Do not change the list.

        Args:
            key: identifies `encode`; adaptations need not be part of it.
        """
        stored = self.view.encoded(key, encode)
        if not self.added:
            return stored
        out = list(stored)
        for place, replaced in self.added:
            out[place : place + replaced] = [encode(self.messages[place])]
        return out

    @property
    def cache_key(self) -> str:
        """Identifies the conversation for a provider's cache: the same at each turn and repeat."""
        first = self.messages[: self.lead + 1]
        return blake2b(repr(first).encode("utf-8", "replace"), digest_size=16).hexdigest()

    def image_tokens(self, model: str) -> int:
        """Return an upper bound on the tokens of all images."""
        # One byte per image, so that the count is cached like an encoding.
        counts = self.encoded("images", lambda message: b"i" * images_in(message))
        return tokens_of_images(sum(map(len, counts)), model)


def prepare_request(request: ModelRequest) -> PreparedMessages:
    """Prepare the messages of a request."""
    pipeline = _pipeline(request.exact, request.adaptations)
    view = request.conversation.view(pipeline, pipeline)
    messages = view.messages()
    lead = next(
        (i for i, m in enumerate(messages) if not isinstance(m, SystemMessage)), len(messages)
    )
    if not request.ephemeral and not request.prefill:
        return PreparedMessages(messages, lead, (), view)
    out = list(messages)
    added: list[tuple[int, int]] = []
    if request.ephemeral:
        before = str(out[lead - 1].content) if lead else ""
        place, replaced = max(lead - 1, 0), min(lead, 1)
        out[place : place + replaced] = [
            SystemMessage(content=join_texts(before, request.ephemeral))
        ]
        added.append((place, replaced))
        lead = place + 1
    ahead = _pipeline(False, request.adaptations).run(list(request.prefill))
    joined = alternate([ahead[-1], out[lead]]) if ahead and lead < len(out) else []
    merged = len(joined) == 1
    if merged:  # the prefill ends with the role of the first message
        ahead[-1:] = joined
    out[lead : lead + merged] = ahead
    for place in range(lead, lead + len(ahead)):
        added.append((place, 1 if merged and place == lead + len(ahead) - 1 else 0))
    return PreparedMessages(out, lead, tuple(added), view)


def cache_marks(messages: Sequence[Message], *, last: int = 3, tools: bool = True) -> list[int]:
    """Return the indices of messages that carry a cache marker (`system_and_3`): the last leading
    system message, and the `last` messages with text.

    Args:
        tools: whether tool results can carry a marker in this wire.
    """
    lead = 0
    while lead < len(messages) and isinstance(messages[lead], SystemMessage):
        lead += 1
    places: list[int] = []
    for place in range(len(messages) - 1, lead - 1, -1):
        if len(places) == last:
            break
        message = messages[place]
        if message.content and (tools or not isinstance(message, ToolMessage)):
            places.append(place)
    if lead and messages[lead - 1].content:
        places.append(lead - 1)
    return places[::-1]


def without_grammar(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Adaptation `no_grammar`: remove the keywords `pattern` and `format`, which some engines
    cannot compile into a grammar. Properties of these names stay."""
    return tuple(_without_keywords(tool) for tool in tools)


def _without_keywords(schema: Any, *, names: bool = False) -> Any:
    """Remove the keywords from a schema; `names`: its keys are property names."""
    if isinstance(schema, list):
        return [_without_keywords(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    kept = schema if names else {k: v for k, v in schema.items() if not _is_grammar(k, v)}
    return {
        k: _without_keywords(v, names=not names and k in ("properties", "$defs", "definitions"))
        for k, v in kept.items()
    }


def _is_grammar(key: str, value: Any) -> bool:
    return key in ("pattern", "format") and isinstance(value, str)


class _Pipeline:
    """See `Preparation`."""

    def __init__(self, exact: bool, adaptations: frozenset[Adaptation]) -> None:
        adapted = tuple(step for name, step in ADAPTATIONS.items() if name in adaptations)
        self._steps = adapted if exact else (*REPAIRS, *adapted)
        self._exact = exact

    def run(self, messages: list[Message]) -> list[Message]:
        """See `Preparation.run`."""
        for step in self._steps:
            messages = step(messages)
        return messages

    def cut(self, messages: list[Message], start: int) -> int:
        """See `Preparation.cut`."""
        return len(messages) if self._exact else find_cut(messages, start)


@lru_cache
def _pipeline(exact: bool, adaptations: frozenset[Adaptation]) -> _Pipeline:
    """Return the same object for the same arguments: it is the key of a conversation's view."""
    return _Pipeline(exact, adaptations)
