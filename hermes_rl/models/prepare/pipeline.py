"""How the messages of a request are made from the stored ones: small pure steps, list to list.

Every dialect builds its body from `outgoing(request)`, never from the conversation itself:

    ready = outgoing(request)
    ready.system                      # the system prompt with the ephemeral layer, or None
    ready.messages                    # system first (`ready.lead` messages), prefill, then the rest
    ready.encoded(key, encode)        # bytes of each of them, made once per message and key
    cache_marks(ready.messages, ...)  # which of them carry a cache marker

Steps, in this order: repair the arguments of tool calls; repair the alternation of roles; put the
ephemeral layer behind the system prompt; drop internal fields; put the prefill after the system
prompt; pair tool results with their calls; drop assistant turns that hold only thinking, and merge
the neighbours that this makes; fill empty user messages; write arguments as canonical JSON; clean
half surrogates; last, what `request.adaptations` ask for. Cache markers are the dialect's, since
each has its own: they are put on copies of a few messages' bytes. What needs no change stays the
same object, so that its bytes are reused. With `request.exact` only the ephemeral layer, the
prefill (repaired like any history) and the adaptations remain; `repaired_roles` then repairs the
prompt before the first request.

Tool schemas: `without_grammar`. What images may cost: `ready.image_tokens(model)`.
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
from hermes_rl.models.base import Adaptation, ModelRequest, View
from hermes_rl.models.prepare.images import small_part
from hermes_rl.text import clean

_sorted = msgspec.json.Encoder(order="sorted").encode

_first_value = json.JSONDecoder(strict=False).raw_decode

_COMMA = re.compile(r",(\s*[}\]])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*', re.DOTALL)
"""A string of JSON without its end, if it has one."""
_CONTROL = re.compile(r"[\x00-\x1f]")
_LITERAL_CHARS = 100_000
"""Longer texts are not tried as a Python literal: its parser is slow and deep."""
_MOST_CHARS = 1_000_000
"""Longer texts are not repaired: each character is looked at while nothing else runs."""


def repair_arguments(messages: list[Message]) -> list[Message]:
    """Every call's arguments are a JSON object; see `repaired_arguments`."""
    return _each_call(messages, repaired_arguments)


def canonical_arguments(messages: list[Message]) -> list[Message]:
    """JSON objects in one spelling: keys sorted, no spaces. Other text stays."""
    return _each_call(messages, canonical_json)


def canonical_json(text: str) -> str:
    """One spelling of a JSON object; text that is none, or that cannot be written, stays."""
    value = parse_arguments(text)
    if value is None:
        return text
    try:
        return _sorted(value).decode()
    except (ValueError, RecursionError, OverflowError):
        return text


def repaired_arguments(text: str) -> str:
    """A JSON object for any text: the text itself, what it must have meant (cut short, in a code
    fence, with a comma too many, as a Python literal, encoded twice), else
    `{"_unparsed": text}`."""
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
    """What stands in a code fence, where the text is one."""
    if not text.startswith("```"):
        return text
    _, _, inner = text.removesuffix("```").partition("\n")
    return inner.strip()


def _lenient(text: str) -> Any:
    """JSON with control characters in its strings."""
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
    """JSON that was cut short: open strings and brackets are closed, and what is left of a pair or
    element without a value is left out. Brackets too many at the end do no harm."""
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
    """A string of JSON without raw control characters."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", string[0])


def _written(value: Any) -> str | None:
    """The object as JSON that every reader takes; None when it is no such object."""
    if not isinstance(value, dict):
        return None
    try:
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        written = clean(written)
    except (ValueError, TypeError, RecursionError):
        return None
    return written if parse_arguments(written) is not None else None


def _each_call(messages: list[Message], change: Callable[[str], str]) -> list[Message]:
    """`change` applied to the arguments of every call; what it leaves alone is the same object."""

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
"""Stands for an image that is not sent."""

IMAGE_TOKENS = 5_000
"""The most that an image costs with OpenAI's models and open ones (2026-11): its address says
nothing of its size, and few bytes may be many tokens."""
_DEAR = ("4o-mini", 50_000)
"""One model counts 33 times as much for an image, at a price per token that makes up for it."""

_IMAGES = ("image_url", "image", "input_image")
_SIGNED = ("thinking", "redacted_thinking")

NO_RESULT = "No result: the call was interrupted."
"""Stands for the result of a call that has none."""
ORPHAN = "[Result of a tool call that is not part of this conversation]"
"""Introduces the text of a tool result without a call."""
NO_CONTENT = "(no content)"
"""Stands for the content of an empty user message."""


def alternate(messages: list[Message]) -> list[Message]:
    """Neighbouring user messages become one, and so do neighbouring assistant messages, unless the
    first has tool calls (its results are then missing: see `pair_results`) or one of them says
    nothing (see `drop_thinking_only`)."""
    out: list[Message] = []
    for message in messages:
        last = out[-1] if out else None
        if isinstance(message, UserMessage) and isinstance(last, UserMessage):
            out[-1] = UserMessage(content=_joined(last.content, message.content))
        elif (
            isinstance(message, AssistantMessage)
            and isinstance(last, AssistantMessage)
            and not last.tool_calls
            and says_something(last)
            and says_something(message)
        ):
            out[-1] = _one_assistant(last, message)
        else:
            out.append(message)
    return out


def pair_results(messages: list[Message]) -> list[Message]:
    """Each tool result follows the message with its call: a call without a result gets `NO_RESULT`,
    and a result without a call becomes a user message behind the results of its place."""
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
    """Assistant messages without text and calls are left out: providers refuse them."""
    return [m for m in messages if not isinstance(m, AssistantMessage) or says_something(m)]


def fill_empty(messages: list[Message]) -> list[Message]:
    """A user message without any content gets `NO_CONTENT`: most providers refuse it otherwise."""
    return [
        UserMessage(content=NO_CONTENT)
        if isinstance(message, UserMessage) and not has_content(message)
        else message
        for message in messages
    ]


def says_something(message: AssistantMessage) -> bool:
    """Whether a message has a text or a call."""
    return bool(message.tool_calls) or bool(message.content.strip())


def cut(messages: list[Message], start: int) -> int:
    """The last place before an assistant message at which the steps of this file (and all that look
    at one message only) never look across: what stands before it is a user message, or an
    assistant message with calls (and its results)."""
    for place in range(len(messages) - 1, start, -1):
        here = messages[place]
        speaks = isinstance(here, AssistantMessage) and says_something(here)
        if speaks and _is_closed(messages, start, place):
            return place
    return start


def _is_closed(messages: list[Message], start: int, place: int) -> bool:
    for index in range(place - 1, start - 1, -1):
        before = messages[index]
        if isinstance(before, UserMessage | SystemMessage):
            return True
        if isinstance(before, AssistantMessage) and says_something(before):
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
    """Two texts with an empty line between them, if both are there."""
    return f"{first}\n\n{second}" if first and second else first or second


def _one_assistant(first: AssistantMessage, second: AssistantMessage) -> AssistantMessage:
    thoughts = join_texts(first.reasoning_content or "", second.reasoning_content or "")
    details: list[Any] = []
    for given in (first.reasoning_details, second.reasoning_details):
        details += given if isinstance(given, list) else [] if given is None else [given]
    return msgspec.structs.replace(
        second,
        content=join_texts(first.content, second.content),
        reasoning_content=thoughts or None,
        raw_content=None,
        reasoning_details=details or None,
    )


def drop_internal(messages: list[Message]) -> list[Message]:
    """Parts lose the keys that begin with an underscore: they are ours. (Other internal fields are
    fields of our structs, which no dialect writes.)"""
    return [parts_of(m, _without_own_keys) for m in messages]


def clean_surrogates(messages: list[Message]) -> list[Message]:
    """Half surrogates, which no wire can carry, become U+FFFD."""
    return [_cleaned(m) for m in messages]


def small_images(messages: list[Message]) -> list[Message]:
    """Adaptation `small_images`: images in `data:` URLs become smaller."""
    return [parts_of(m, small_part) for m in messages]


def without_images(messages: list[Message]) -> list[Message]:
    """Adaptation `no_images`: a text stands for each image."""
    return [parts_of(m, _no_image) for m in messages]


def text_only(messages: list[Message]) -> list[Message]:
    """Adaptation `text_only`: content in parts becomes one text."""
    return [_as_text(m) for m in messages]


def without_signatures(messages: list[Message]) -> list[Message]:
    """Adaptation `no_signatures`: signed and redacted thinking is not replayed, and no blocks of
    aggregators (`reasoning.text` and the like)."""
    return [_without_blocks(m, _is_signed) for m in messages]


def without_encrypted(messages: list[Message]) -> list[Message]:
    """Adaptation `no_encrypted_reasoning`: encrypted reasoning is not replayed."""
    return [_without_blocks(m, _is_encrypted) for m in messages]


def images_in(message: Message) -> int:
    """How many images a message holds."""
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return 0
    return sum(part.get("type") in _IMAGES for part in message.content)


def tokens_of_images(count: int, model: str) -> int:
    """An upper bound on the tokens of so many images."""
    return count * (_DEAR[1] if _DEAR[0] in model else IMAGE_TOKENS)


def blocks_of(message: AssistantMessage) -> list[dict[str, Any]]:
    """The opaque reasoning blocks of a message, in order."""
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
    """The message, `change` applied to each part of its content; itself where nothing changes."""
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return message
    parts = [change(part) for part in message.content]
    if all(a is b for a, b in zip(parts, message.content, strict=True)):
        return message
    return UserMessage(content=parts)


def _no_image(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": NO_IMAGE} if part.get("type") in _IMAGES else part


def _as_text(message: Message) -> Message:
    if not isinstance(message, UserMessage) or isinstance(message.content, str):
        return message
    texts = [_no_image(part).get("text") for part in message.content]
    return UserMessage(content="\n".join(t for t in texts if isinstance(t, str)))


def _without_own_keys(part: dict[str, Any]) -> dict[str, Any]:
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
"""The steps of adaptations; `no_grammar` concerns tools alone."""


def prepare(
    messages: Sequence[Message],
    *,
    exact: bool = False,
    adaptations: frozenset[Adaptation] = frozenset(),
) -> list[Message]:
    """The messages as they are sent, but for the ephemeral layer and the prefill. Idempotent."""
    return _pipeline(exact, adaptations).run(list(messages))


def repaired_roles(messages: Sequence[Message]) -> list[Message]:
    """The messages with roles that alternate and each call beside its result, for a request that is
    otherwise sent as it is stored (`exact`). What needs no repair is the same object. Idempotent.
    """
    repaired = alternate(list(messages))
    for step in _ROLES:
        repaired = step(repaired)
    return repaired


@dataclass(frozen=True)
class Outgoing:
    """The messages of one request."""

    messages: Sequence[Message]
    """All of them, in order."""
    lead: int
    """So many of them, at the head, are system messages."""
    added: tuple[tuple[int, int], ...]
    """(place in `messages`, stored messages that it stands for): the ephemeral layer and the
    prefill, which are encoded at each call."""
    view: View

    @property
    def system(self) -> str | None:
        """The system prompt as one text; None when there is none."""
        texts = [str(m.content) for m in self.messages[: self.lead]]
        return "\n\n".join(texts) if texts else None

    def encoded(self, key: str, encode: Callable[[Message], bytes]) -> Sequence[bytes]:
        """`encode` of each of `messages`; each stored one is encoded once. Not to be changed.

        Args:
            key: names `encode`; the adaptations need not be in it.
        """
        stored = self.view.encoded(key, encode)
        if not self.added:
            return stored
        out = list(stored)
        for place, stands_for in self.added:
            out[place : place + stands_for] = [encode(self.messages[place])]
        return out

    @property
    def cache_key(self) -> str:
        """Names the conversation for a provider's cache: the same at each turn, and for each
        repeat of a task."""
        first = self.messages[: self.lead + 1]
        return blake2b(repr(first).encode("utf-8", "replace"), digest_size=16).hexdigest()

    def image_tokens(self, model: str) -> int:
        """An upper bound on the tokens of all images."""
        # One byte for each, so that each message is looked at once, like its encoding.
        counts = self.encoded("images", lambda message: b"i" * images_in(message))
        return tokens_of_images(sum(map(len, counts)), model)


def outgoing(request: ModelRequest) -> Outgoing:
    """What a request sends."""
    pipeline = _pipeline(request.exact, request.adaptations)
    view = request.conversation.view(pipeline, pipeline)
    messages = view.messages()
    lead = next(
        (i for i, m in enumerate(messages) if not isinstance(m, SystemMessage)), len(messages)
    )
    if not request.ephemeral and not request.prefill:
        return Outgoing(messages, lead, (), view)
    out = list(messages)
    added: list[tuple[int, int]] = []
    if request.ephemeral:
        before = str(out[lead - 1].content) if lead else ""
        place, stands_for = max(lead - 1, 0), min(lead, 1)
        out[place : place + stands_for] = [
            SystemMessage(content=join_texts(before, request.ephemeral))
        ]
        added.append((place, stands_for))
        lead = place + 1
    ahead = _pipeline(False, request.adaptations).run(list(request.prefill))
    joined = alternate([ahead[-1], out[lead]]) if ahead and lead < len(out) else []
    merged = len(joined) == 1
    if merged:  # the prefill ends with the role that the conversation begins with
        ahead[-1:] = joined
    out[lead : lead + merged] = ahead
    for place in range(lead, lead + len(ahead)):
        added.append((place, 1 if merged and place == lead + len(ahead) - 1 else 0))
    return Outgoing(out, lead, tuple(added), view)


def cache_marks(messages: Sequence[Message], *, last: int = 3, tools: bool = True) -> list[int]:
    """The places that carry a cache marker (`system_and_3`): the last system message of the head,
    and the `last` messages that have a text.

    Args:
        tools: tool results can carry a marker in this wire.
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
    """Adaptation `no_grammar`: schemas without the keywords `pattern` and `format`, which some
    engines cannot turn into a grammar. Properties of these names stay."""
    return tuple(_plain(tool) for tool in tools)


def _plain(schema: Any, *, names: bool = False) -> Any:
    """A schema without the keywords; `names`: its keys are names of properties."""
    if isinstance(schema, list):
        return [_plain(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    kept = schema if names else {k: v for k, v in schema.items() if not _is_grammar(k, v)}
    return {
        k: _plain(v, names=not names and k in ("properties", "$defs", "definitions"))
        for k, v in kept.items()
    }


def _is_grammar(key: str, value: Any) -> bool:
    return key in ("pattern", "format") and isinstance(value, str)


class _Pipeline:
    """See `Preparation`."""

    def __init__(self, exact: bool, adaptations: frozenset[Adaptation]) -> None:
        asked = tuple(step for name, step in ADAPTATIONS.items() if name in adaptations)
        self._steps = asked if exact else (*REPAIRS, *asked)
        self._exact = exact

    def run(self, messages: list[Message]) -> list[Message]:
        """See `Preparation.run`."""
        for step in self._steps:
            messages = step(messages)
        return messages

    def cut(self, messages: list[Message], start: int) -> int:
        """See `Preparation.cut`."""
        return len(messages) if self._exact else cut(messages, start)


@lru_cache
def _pipeline(exact: bool, adaptations: frozenset[Adaptation]) -> _Pipeline:
    """The same object for the same question: it is the key of a conversation's view."""
    return _Pipeline(exact, adaptations)
