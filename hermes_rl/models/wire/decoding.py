"""What the decoders of all dialects share: an answer's bytes, events, reasoning, ids and usage.

A dialect has a function that reads a whole body and a subclass of `EventDecoder` that takes the
events of a stream. Readers of usage return None unless the counts of input and output tokens are
both present.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from hermes_rl.errors import ConnectionLost, ModelError, ModelTimeout, ProtocolError
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import (
    Completion,
    ModelRequest,
    TokenCapture,
    rate_headers,
    request_id,
)
from hermes_rl.models.errors import classify_in_answer
from hermes_rl.text import decode_json, encode_json, repair_json, scrub
from hermes_rl.usage import Usage

T = TypeVar("T")

DONE = b"[DONE]"
"""The data of the last event of Chat Completions."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message (or delta) that may hold reasoning text; the first that does counts, because
servers in transition send the same text in two."""

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ReplyHead:
    """The head of an answer, as far as decoders need it."""

    headers: Mapping[str, str]
    """Names in lower case."""
    first_byte_s: float | None = None


class Decoder(Protocol):
    """Decodes one answer as its bytes arrive."""

    done: bool
    """The answer is complete by its own statement; further bytes are ignored."""

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


class Envelope(msgspec.Struct):
    """The top level that the answers of all wires have. Usage stays as it came: it is evidence."""

    id: Any = None
    model: Any = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    policy_version: Any = None


@dataclass(frozen=True)
class Reading:
    """The context of one answer while it is read."""

    head: ReplyHead
    secrets: Iterable[str] = ()
    """Texts that must not appear in errors."""
    salt: str = ""
    """Makes ids of calls that came without one differ between turns."""
    on_delta: Callable[[str], None] | None = None
    """Called with the answer's text as it arrives."""

    def tell(self, text: str) -> None:
        """Pass visible text to `on_delta`."""
        if text and self.on_delta is not None:
            self.on_delta(text)

    def unreadable(self, why: str) -> ProtocolError:
        """The error for an answer that was served but cannot be read."""
        return self._broken(f"the answer cannot be read: {why}")

    def unfinished(self) -> ProtocolError:
        """The error for a stream that broke off."""
        return self._broken("the stream ended before its answer was complete")

    def fault(self, error: Any) -> ModelError:
        """The typed error of an error object inside an answer with status 200."""
        return classify_in_answer(error, self.head.headers, secrets=self.secrets)

    def parse(self, decode: Callable[[bytes], T], data: bytes, what: str = "JSON object") -> T:
        """Decode one JSON text, repaired where it is not valid UTF-8.

        Args:
            what: the kind of text that was expected, for the error.

        Raises: ProtocolError if it is not JSON.
        """
        try:
            return decode(data)
        except (ValueError, RecursionError):
            pass
        try:
            return decode(repair_json(data))
        except (ValueError, RecursionError):
            shown = data[:80].decode("utf-8", "replace")
            raise self.unreadable(f"no {what}: {shown!r}") from None

    def completion(
        self,
        envelope: Envelope,
        message: AssistantMessage,
        finish_reason: Any,
        read_usage: Callable[[Any], Usage | None],
        tokens: TokenCapture | None = None,
    ) -> Completion:
        """The answer in the internal form. An id in the headers goes before that in the answer, the
        answer's policy version before that in the headers."""
        raw = bytes(envelope.usage)
        version = envelope.policy_version or self.head.headers.get("x-policy-version")
        return Completion(
            message=message,
            finish_reason=finish_reason if isinstance(finish_reason, str) else None,
            usage=read_usage(_loose(raw)),
            usage_raw=None if raw == b"null" else raw.decode("utf-8", "replace"),
            request_id=request_id(self.head.headers) or text_or_none(envelope.id),
            served_model=text_or_none(envelope.model),
            first_byte_s=self.head.first_byte_s,
            tokens=tokens,
            policy_version=None if version is None else str(version),
            rate_limit=rate_headers(self.head.headers),
        )

    def _broken(self, text: str) -> ProtocolError:
        shown = scrub(text, self.secrets)
        return ProtocolError(shown, request_id=request_id(self.head.headers), served=True)


class BodyDecoder:
    """An answer in one JSON body.

    Args:
        read: what the dialect makes of the whole body. Raises: ModelError.
    """

    in_call = False
    """Of a broken body nothing is read."""

    def __init__(self, reading: Reading, read: Callable[[bytes, Reading], Completion]) -> None:
        self.done = False
        self._reading, self._read = reading, read
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> None:
        """See `Decoder.feed`."""
        self._pieces.append(piece)

    def finish(self) -> Completion:
        """See `Decoder.finish`."""
        answer = self._read(b"".join(self._pieces), self._reading)
        self._reading.tell(answer.message.content)
        return answer


class EventReader:
    """Cuts a byte stream into the data of its events.

    Lines end in LF, CR LF or CR; comments (lines that begin with a colon, as keep-alives do) and
    other fields are left out; an event's data lines are joined by LF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that are complete now."""
        buffer = self._rest + piece
        if b"\r" in buffer:
            held = buffer.endswith(b"\r")  # perhaps the first half of CR LF
            body = buffer[:-1] if held else buffer
            buffer = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if held else b"")
        *lines, self._rest = buffer.split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """The last event of a stream whose final blank line is missing."""
        events = self.feed(b"\n\n")
        self._rest, self._data = b"", []
        return events


class EventDecoder(ABC):
    """An answer in server-sent events. A stream is complete when it says so."""

    def __init__(self, reading: Reading) -> None:
        self.done = False
        self._reading = reading
        self._events = EventReader()

    @property
    @abstractmethod
    def in_call(self) -> bool:
        """Whether a tool call has begun."""

    def feed(self, piece: bytes) -> None:
        """See `Decoder.feed`."""
        for data in self._events.feed(piece):
            self._take(data)

    def finish(self) -> Completion:
        """See `Decoder.finish`."""
        for data in self._events.close():
            self._take(data)
        return self._answer()

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Take the data of one event. Raises: ModelError when it is an error."""

    @abstractmethod
    def _answer(self) -> Completion:
        """What the events made. Raises: ModelError when that is not complete."""


def read_call(
    name: Any,
    arguments: Any,
    ids: Iterable[Any],
    before: Sequence[ToolCall],
    salt: str,
    prefix: str = "call_",
) -> ToolCall:
    """A tool call of an answer. Its id is the first of `ids` that is a text; where there is none,
    or another call has it, one is made.

    Args:
        before: the calls that stand before it in the answer.
        salt: makes the ids differ between turns.
    """
    text = name if isinstance(name, str) else ""
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else encode_json(arguments).decode()
    given = next(filter(text_or_none, ids), None)
    if given is None or any(call.id == given for call in before):
        given = made_id(f"{salt}\0{len(before)}\0{text}\0{arguments}", prefix)
    return ToolCall(id=given, name=text, arguments=arguments)


def made_id(text: str, prefix: str = "call_") -> str:
    """An id for a call that came without one: the same text always gets the same."""
    return prefix + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]


def fitting_id(given: str, most: int) -> str:
    """An id of a call (or of its result) with at most `most` characters: another one, made of it,
    stands for one that is longer."""
    return given if len(given) <= most else made_id(given)


def text_or_none(value: Any) -> str | None:
    """The value where it is text that is not empty."""
    return value if isinstance(value, str) and value else None


def part_of(form: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in a field; an empty one where there is none."""
    value = form.get(name)
    return value if isinstance(value, Mapping) else {}


def _loose(raw: bytes) -> Any:
    try:
        return decode_json(raw)
    except ValueError:
        return None


class Thought(NamedTuple):
    """A text with its reasoning taken out."""

    content: str
    reasoning: str | None
    raw: str | None
    """The exact text, where taking out changed it."""


def reasoning_of(form: Mapping[str, Any]) -> str | None:
    """The reasoning text of a message or delta; None when it has none."""
    for name in REASONING_FIELDS:
        value = form.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def split_think(text: str) -> Thought:
    """Take `<think>…</think>` out of a text's head.

    An opening tag may be missing (templates that write it into the prompt), and so may the closing
    one (an answer cut by its length): then all of the text is reasoning.
    """
    if _OPEN not in text and _CLOSE not in text:
        return Thought(text, None, None)
    head = text.lstrip()
    if head.startswith(_OPEN):
        inner, closed, rest = head[len(_OPEN) :].partition(_CLOSE)
        return Thought(rest.lstrip() if closed else "", inner.strip(), text)
    inner, closed, rest = text.partition(_CLOSE)
    if closed and _OPEN not in inner:
        return Thought(rest.lstrip(), inner.strip(), text)
    return Thought(text, None, None)


def flatten(content: Any) -> tuple[str, str | None]:
    """Text and reasoning of a content field: text, null, or a list of parts."""
    if isinstance(content, str):
        return content, None
    if not isinstance(content, list):
        return "", None
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "thinking":
            inner = part.get("thinking")
            thoughts.append(inner if isinstance(inner, str) else flatten(inner)[0])
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "".join(texts), "".join(thoughts) or None


def merge_details(details: list[Any], more: Any) -> None:
    """Add the reasoning blocks of a stream's delta: pieces of one block are joined in place."""
    for block in more if isinstance(more, list) else ():
        last = details[-1] if details else None
        if last is not None and _same_block(last, block):
            for key, value in block.items():
                grows = key in ("text", "summary", "data") and isinstance(last.get(key), str)
                last[key] = last[key] + value if grows and isinstance(value, str) else value
        else:
            details.append(dict(block) if isinstance(block, dict) else block)


def _same_block(a: Any, b: Any) -> bool:
    if not isinstance(a, dict) or not isinstance(b, dict) or b.get("index") is None:
        return False
    return (a.get("type"), a.get("index")) == (b.get("type"), b.get("index"))


class BrokenOff(ConnectionLost):
    """A streamed answer broke off after some text, and the request was `continuable`.

    The caller can request the rest, so the request is not retried as a whole.

    Args:
        text: what had arrived, without reasoning.
        in_call: whether a tool call had begun behind it.
    """

    transient = False

    def __init__(
        self, error: ConnectionLost | ModelTimeout | ProtocolError, text: str, in_call: bool
    ):
        super().__init__(str(error), request_id=error.request_id, served=True, reason=error.reason)
        self.text = text
        self.in_call = in_call


class Beginning:
    """Collects the streamed text of one request.

    Args:
        request: only the text of `continuable` requests is collected.
    """

    def __init__(self, request: ModelRequest) -> None:
        self._pieces: list[str] = []
        self._on_delta = request.on_delta
        self._wanted = request.continuable
        self.request = replace(request, on_delta=self._collect) if self._wanted else request

    @contextmanager
    def kept(self, decoder: Decoder) -> Iterator[None]:
        """Around the reading of the answer. Raises: BrokenOff in place of an error behind text."""
        try:
            yield
        except (ConnectionLost, ModelTimeout, ProtocolError) as error:
            text = split_think("".join(self._pieces)).content
            if not text.strip():
                raise
            raise BrokenOff(error, text, decoder.in_call) from error

    def _collect(self, piece: str) -> None:
        self._pieces.append(piece)
        if self._on_delta is not None:
            self._on_delta(piece)


_ABSURD = 1 << 40
"""No call has so many tokens: a count like this is a server's error, and sums must fit 64 bits."""


def read_chat_usage(form: Any) -> Usage | None:
    """The usage of Chat Completions, in the spellings of several providers.

    Cached tokens: `prompt_tokens_details.cached_tokens` (OpenAI, vLLM, SGLang), or
    `prompt_cache_hit_tokens` (DeepSeek), or `cached_tokens` (Moonshot). Where a provider leaves
    reasoning out of `completion_tokens` (its total then is the sum of all three), it is added.
    Rejected predictions are part of `completion_tokens` already. `cost` is OpenRouter's.
    """
    if not isinstance(form, Mapping):
        return None
    prompt, output = count_of(form.get("prompt_tokens")), count_of(form.get("completion_tokens"))
    if prompt is None or output is None:
        return None
    given, taken = (
        part_of(form, "prompt_tokens_details"),
        part_of(form, "completion_tokens_details"),
    )
    reasoning = _first(taken.get("reasoning_tokens"), form.get("reasoning_tokens"))
    if reasoning and form.get("total_tokens") == prompt + output + reasoning:
        output += reasoning
    cached = _first(
        given.get("cached_tokens"), form.get("prompt_cache_hit_tokens"), form.get("cached_tokens")
    )
    written = _first(given.get("cache_write_tokens"), form.get("cache_write_tokens"))
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=_within(cached, prompt),
        cache_write_tokens=_within(written, prompt),
        output_tokens=output,
        reasoning_tokens=_within(reasoning, output),
        reported_cost=_amount(form.get("cost")),
    )


def read_responses_usage(form: Any) -> Usage | None:
    """The usage of the Responses API: input includes cached tokens, output includes reasoning."""
    if not isinstance(form, Mapping):
        return None
    prompt, output = count_of(form.get("input_tokens")), count_of(form.get("output_tokens"))
    if prompt is None or output is None:
        return None
    given, taken = part_of(form, "input_tokens_details"), part_of(form, "output_tokens_details")
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=_within(count_of(given.get("cached_tokens")), prompt),
        cache_write_tokens=_within(count_of(given.get("cache_write_tokens")), prompt),
        output_tokens=output,
        reasoning_tokens=_within(count_of(taken.get("reasoning_tokens")), output),
    )


def read_anthropic_usage(form: Any) -> Usage | None:
    """The usage of the Messages API.

    The wire's `input_tokens` leaves out tokens read from and written to the cache; our record
    includes them. `output_tokens` includes thinking.
    """
    if not isinstance(form, Mapping):
        return None
    fresh, output = count_of(form.get("input_tokens")), count_of(form.get("output_tokens"))
    if fresh is None or output is None:
        return None
    read = count_of(form.get("cache_read_input_tokens"))
    written = count_of(form.get("cache_creation_input_tokens"))
    hour = count_of(part_of(form, "cache_creation").get("ephemeral_1h_input_tokens"))
    thought = count_of(part_of(form, "output_tokens_details").get("thinking_tokens"))
    return Usage(
        input_tokens=fresh + (read or 0) + (written or 0),
        cache_read_tokens=read,
        cache_write_tokens=written,
        cache_write_1h_tokens=_within(hour, written),
        output_tokens=output,
        reasoning_tokens=_within(thought, output),
    )


def count_of(value: Any) -> int | None:
    """A count of tokens as a provider sends it; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _ABSURD else None


def _amount(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _ABSURD else None


def _first(*values: Any) -> int | None:
    return next((n for n in map(count_of, values) if n is not None), None)


def _within(part: int | None, whole: int | None) -> int | None:
    """A part that is larger than its whole is a provider's error: it counts as unknown."""
    return part if part is not None and whole is not None and part <= whole else None
