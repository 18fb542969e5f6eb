"""Shared parts of all answer decoders: bodies, events, reasoning, call IDs and usage.

A dialect has a function that reads a complete body and a subclass of `EventDecoder` for streams.
Usage readers return None unless both input and output tokens are counted.
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
    VersionSpan,
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
"""Fields of a message or delta that may contain reasoning text. Only the first one that does is
read, because some servers send the same text in two fields."""

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ReplyHead:
    """The parts of an answer's head that decoders need."""

    headers: Mapping[str, str]
    """Names in lower case."""
    first_byte_s: float | None = None


class Decoder(Protocol):
    """Decodes one answer as its bytes arrive."""

    done: bool
    """The answer says that it is complete; further bytes are ignored."""

    @property
    def in_call(self) -> bool:
        """Whether a tool call has begun, so that a broken-off answer is missing part of a call."""
        ...

    def feed(self, piece: bytes) -> None:
        """Decode the next bytes. Raises: ModelError for an error object in them."""
        ...

    def finish(self) -> Completion:
        """Return the answer. Raises: ModelError if it is not complete."""
        ...

    def cut_off(self) -> Completion | None:
        """Return what arrived, after the connection broke off; None if it cannot be continued."""
        return None


class Envelope(msgspec.Struct):
    """The fields that answers of all wires have. Usage is kept as received, as evidence."""

    id: Any = None
    model: Any = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    policy_version: Any = None


VERSION_HEADERS = ("x-policy-version", "x-weight-version")


@dataclass(frozen=True)
class AnswerContext:
    """What decoding one answer depends on besides its bytes."""

    head: ReplyHead
    secrets: Iterable[str] = ()
    """Texts that must not appear in errors."""
    salt: str = ""
    """Makes derived call IDs differ between turns."""
    on_delta: Callable[[str], None] | None = None
    """Called with the answer's text as it arrives."""
    on_reasoning: Callable[[str], None] | None = None
    """Called with its reasoning as it arrives."""

    def emit(self, text: str) -> None:
        """Pass streamed text to `on_delta`."""
        if text and self.on_delta is not None:
            self.on_delta(text)

    def emit_reasoning(self, text: object) -> None:
        """Pass streamed reasoning to `on_reasoning`."""
        if self.on_reasoning is not None and isinstance(text, str) and text:
            self.on_reasoning(text)

    def unreadable_error(self, why: str) -> ProtocolError:
        """Return the error for an answer that was served but cannot be read."""
        return self._protocol_error(f"the answer cannot be read: {why}")

    def truncated_error(self) -> ProtocolError:
        """Return the error for a stream that broke off."""
        return self._protocol_error("the stream ended before its answer was complete")

    def error_in_answer(self, error: Any) -> ModelError:
        """Return the typed error for an error object in an answer with status 200."""
        return classify_in_answer(error, self.head.headers, secrets=self.secrets)

    def parse(self, decode: Callable[[bytes], T], data: bytes, what: str = "JSON object") -> T:
        """Decode one JSON text, after repair if it is not valid UTF-8.

        Args:
            what: the expected kind of text, for the error.

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
            raise self.unreadable_error(f"no {what}: {shown!r}") from None

    def completion(
        self,
        envelope: Envelope,
        message: AssistantMessage,
        finish_reason: Any,
        read_usage: Callable[[Any], Usage | None],
        tokens: TokenCapture | None = None,
    ) -> Completion:
        """Build the answer in the internal form. A request ID in the headers takes precedence over
        the body's, and the body's policy version over the headers'. Tokens of several versions have
        no common one."""
        raw = bytes(envelope.usage)
        version = self._policy_version(envelope, tokens)
        return Completion(
            message=message,
            finish_reason=finish_reason if isinstance(finish_reason, str) else None,
            usage=read_usage(_decode_or_none(raw)),
            usage_raw=None if raw == b"null" else raw.decode("utf-8", "replace"),
            request_id=request_id(self.head.headers) or text_or_none(envelope.id),
            served_model=text_or_none(envelope.model),
            first_byte_s=self.head.first_byte_s,
            tokens=tokens,
            policy_version=version,
            rate_limit=rate_headers(self.head.headers),
        )

    def _policy_version(self, envelope: Envelope, tokens: TokenCapture | None) -> str | None:
        if tokens is not None and tokens.versions:
            found = {span.version for span in tokens.versions}
            return found.pop() if len(found) == 1 else None
        named = (self.head.headers.get(name) for name in VERSION_HEADERS)
        listed = (one for one in (envelope.policy_version, *named) if one is not None)
        version = next(listed, None)
        return None if version is None else str(version)

    def _protocol_error(self, text: str) -> ProtocolError:
        shown = scrub(text, self.secrets)
        return ProtocolError(shown, request_id=request_id(self.head.headers), served=True)


class BodyDecoder:
    """An answer in one JSON body.

    Args:
        read: the dialect's reader of complete bodies. Raises: ModelError.
    """

    in_call = False
    """A body that breaks off is discarded."""

    def __init__(
        self, context: AnswerContext, read: Callable[[bytes, AnswerContext], Completion]
    ) -> None:
        self.done = False
        self._context, self._read = context, read
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> None:
        """See `Decoder.feed`."""
        self._pieces.append(piece)

    def finish(self) -> Completion:
        """See `Decoder.finish`."""
        answer = self._read(b"".join(self._pieces), self._context)
        self._context.emit(answer.message.content)
        return answer

    def cut_off(self) -> Completion | None:
        """See `Decoder.cut_off`."""
        return None


class EventReader:
    """Splits a byte stream into the data of its server-sent events.

    Lines end in LF, CR LF or CR. Comments (lines that begin with a colon, such as keep-alives) and
    other fields are ignored. The data lines of an event are joined by LF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that are now complete."""
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
        """Return the last event of a stream without a final blank line."""
        events = self.feed(b"\n\n")
        self._rest, self._data = b"", []
        return events


class EventDecoder(ABC):
    """Decodes an answer in server-sent events. The stream itself says when it is complete."""

    def __init__(self, context: AnswerContext) -> None:
        self.done = False
        self._context = context
        self._events = EventReader()

    @property
    @abstractmethod
    def in_call(self) -> bool:
        """Whether a tool call has begun."""

    def feed(self, piece: bytes) -> None:
        """See `Decoder.feed`."""
        for data in self._events.feed(piece):
            self._take(data)

    def cut_off(self) -> Completion | None:
        """See `Decoder.cut_off`."""
        return None

    def finish(self) -> Completion:
        """See `Decoder.finish`."""
        for data in self._events.close():
            self._take(data)
        return self._answer()

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Handle the data of one event. Raises: ModelError for an error event."""

    @abstractmethod
    def _answer(self) -> Completion:
        """Build the answer from the events. Raises: ModelError if it is not complete."""


def read_tool_call(
    name: Any,
    arguments: Any,
    ids: Iterable[Any],
    earlier: Sequence[ToolCall],
    salt: str,
    prefix: str = "call_",
) -> ToolCall:
    """Build a tool call of an answer.

    Args:
        ids: candidates for its ID. The first text is taken; if there is none, or an earlier call
            has it, an ID is derived.
        earlier: the calls before it in the answer.
        salt: makes derived IDs differ between turns.
    """
    text = name if isinstance(name, str) else ""
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else encode_json(arguments).decode()
    call_id = next(filter(text_or_none, ids), None)
    if call_id is None or any(call.id == call_id for call in earlier):
        call_id = derive_call_id(f"{salt}\0{len(earlier)}\0{text}\0{arguments}", prefix)
    return ToolCall(id=call_id, name=text, arguments=arguments)


def derive_call_id(text: str, prefix: str = "call_") -> str:
    """Derive a call ID from a text, deterministically."""
    return prefix + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]


def shorten_call_id(call_id: str, max_chars: int) -> str:
    """Return the ID, or one derived from it if it has more than `max_chars` characters."""
    return call_id if len(call_id) <= max_chars else derive_call_id(call_id)


def text_or_none(value: Any) -> str | None:
    """Return the value if it is a non-empty string."""
    return value if isinstance(value, str) and value else None


def object_field(form: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object in a field, or an empty one."""
    value = form.get(name)
    return value if isinstance(value, Mapping) else {}


def _decode_or_none(raw: bytes) -> Any:
    try:
        return decode_json(raw)
    except ValueError:
        return None


class SplitText(NamedTuple):
    """A text split into answer and reasoning."""

    content: str
    reasoning: str | None
    raw: str | None
    """The original text, if splitting changed it."""


def reasoning_of(form: Mapping[str, Any]) -> str | None:
    """Return the reasoning text of a message or delta, if it has any."""
    for name in REASONING_FIELDS:
        value = form.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def split_reasoning(text: str) -> SplitText:
    """Split `<think>…</think>` from the beginning of a text.

    The opening tag may be missing (some templates put it into the prompt). So may the closing one
    (the answer reached its length limit): then the complete text is reasoning.
    """
    if _OPEN not in text and _CLOSE not in text:
        return SplitText(text, None, None)
    head = text.lstrip()
    if head.startswith(_OPEN):
        inner, closed, rest = head[len(_OPEN) :].partition(_CLOSE)
        return SplitText(rest.lstrip() if closed else "", inner.strip(), text)
    inner, closed, rest = text.partition(_CLOSE)
    if closed and _OPEN not in inner:
        return SplitText(rest.lstrip(), inner.strip(), text)
    return SplitText(text, None, None)


def split_content_parts(content: Any) -> tuple[str, str | None]:
    """Return text and reasoning of a content field, which is text, null, or a list of parts."""
    if isinstance(content, str):
        return content, None
    if not isinstance(content, list):
        return "", None
    texts: list[str] = []
    reasoning: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "thinking":
            inner = part.get("thinking")
            reasoning.append(inner if isinstance(inner, str) else split_content_parts(inner)[0])
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "".join(texts), "".join(reasoning) or None


def merge_details(details: list[Any], more: Any) -> None:
    """Add the reasoning blocks of a stream's delta; fragments of one block are joined in place."""
    for block in more if isinstance(more, list) else ():
        last = details[-1] if details else None
        if last is not None and _same_block(last, block):
            for key, value in block.items():
                joined = key in ("text", "summary", "data") and isinstance(last.get(key), str)
                last[key] = last[key] + value if joined and isinstance(value, str) else value
        else:
            details.append(dict(block) if isinstance(block, dict) else block)


def _same_block(a: Any, b: Any) -> bool:
    if not isinstance(a, dict) or not isinstance(b, dict) or b.get("index") is None:
        return False
    return (a.get("type"), a.get("index")) == (b.get("type"), b.get("index"))


class AnswerInterrupted(ConnectionLost):
    """A streamed answer to a `continuable` request broke off after some text.

    The caller can request the rest, so the request is not retried.

    Args:
        text: the text so far, without reasoning.
        in_call: whether a tool call had begun after it.
    """

    transient = False

    def __init__(
        self, error: ConnectionLost | ModelTimeout | ProtocolError, text: str, in_call: bool
    ):
        super().__init__(str(error), request_id=error.request_id, served=True, reason=error.reason)
        self.text = text
        self.in_call = in_call


class StreamedText:
    """Collects the streamed text of one request.

    Args:
        request: only the text of `continuable` requests is collected.
    """

    def __init__(self, request: ModelRequest) -> None:
        self._pieces: list[str] = []
        self._on_delta = request.on_delta
        self._collects = request.continuable
        self.request = replace(request, on_delta=self._on_piece) if self._collects else request

    @contextmanager
    def errors_with_text(self, decoder: Decoder) -> Iterator[None]:
        """Raise AnswerInterrupted in place of an error that follows some text."""
        try:
            yield
        except (ConnectionLost, ModelTimeout, ProtocolError) as error:
            text = split_reasoning("".join(self._pieces)).content
            if not text.strip():
                raise
            raise AnswerInterrupted(error, text, decoder.in_call) from error

    def _on_piece(self, piece: str) -> None:
        self._pieces.append(piece)
        if self._on_delta is not None:
            self._on_delta(piece)


_MAX_PLAUSIBLE = 1 << 40
"""A larger count of tokens is a server's error, and sums must fit into 64 bits."""


def read_chat_usage(form: Any) -> Usage | None:
    """Read the usage of Chat Completions, in the spellings of several providers.

    Cached tokens are `prompt_tokens_details.cached_tokens` (OpenAI, vLLM, SGLang),
    `prompt_cache_hit_tokens` (DeepSeek) or `cached_tokens` (Moonshot). If `completion_tokens` does
    not include reasoning (the total is then the sum of all three), reasoning is added. Rejected
    predictions are part of `completion_tokens`. `cost` is OpenRouter's.
    """
    if not isinstance(form, Mapping):
        return None
    prompt, output = count_of(form.get("prompt_tokens")), count_of(form.get("completion_tokens"))
    if prompt is None or output is None:
        return None
    prompt_details = object_field(form, "prompt_tokens_details")
    output_details = object_field(form, "completion_tokens_details")
    reasoning = _first_count(output_details.get("reasoning_tokens"), form.get("reasoning_tokens"))
    if reasoning and form.get("total_tokens") == prompt + output + reasoning:
        output += reasoning
    cached = _first_count(
        prompt_details.get("cached_tokens"),
        form.get("prompt_cache_hit_tokens"),
        form.get("cached_tokens"),
    )
    written = _first_count(prompt_details.get("cache_write_tokens"), form.get("cache_write_tokens"))
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=_plausible_part(cached, prompt),
        cache_write_tokens=_plausible_part(written, prompt),
        output_tokens=output,
        reasoning_tokens=_plausible_part(reasoning, output),
        reported_cost=_read_amount(form.get("cost")),
    )


def read_responses_usage(form: Any) -> Usage | None:
    """Read the usage of the Responses API. Input includes cached tokens, output reasoning."""
    if not isinstance(form, Mapping):
        return None
    prompt, output = count_of(form.get("input_tokens")), count_of(form.get("output_tokens"))
    if prompt is None or output is None:
        return None
    prompt_details = object_field(form, "input_tokens_details")
    output_details = object_field(form, "output_tokens_details")
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=_plausible_part(count_of(prompt_details.get("cached_tokens")), prompt),
        cache_write_tokens=_plausible_part(
            count_of(prompt_details.get("cache_write_tokens")), prompt
        ),
        output_tokens=output,
        reasoning_tokens=_plausible_part(count_of(output_details.get("reasoning_tokens")), output),
    )


def read_anthropic_usage(form: Any) -> Usage | None:
    """Read the usage of the Messages API.

    Its `input_tokens` excludes tokens read from and written to the cache; ours include them.
    `output_tokens` includes thinking.
    """
    if not isinstance(form, Mapping):
        return None
    fresh, output = count_of(form.get("input_tokens")), count_of(form.get("output_tokens"))
    if fresh is None or output is None:
        return None
    read = count_of(form.get("cache_read_input_tokens"))
    written = count_of(form.get("cache_creation_input_tokens"))
    hour = count_of(object_field(form, "cache_creation").get("ephemeral_1h_input_tokens"))
    thought = count_of(object_field(form, "output_tokens_details").get("thinking_tokens"))
    return Usage(
        input_tokens=fresh + (read or 0) + (written or 0),
        cache_read_tokens=read,
        cache_write_tokens=written,
        cache_write_1h_tokens=_plausible_part(hour, written),
        output_tokens=output,
        reasoning_tokens=_plausible_part(thought, output),
    )


def read_versions(listed: Any, count: int) -> tuple[VersionSpan, ...]:
    """Read the versions of the weights that sampled an answer's tokens.

    Sources: `weight_versions` of vLLM's choices and of SGLang's `meta_info`.

    Args:
        listed: objects or triples of version, start and end, in order; or one version per token.
        count: tokens of the answer.

    Returns: spans that cover the answer, with None for tokens without a version; empty if nothing
        usable is listed.
    """
    if not isinstance(listed, list) or not listed or not count:
        return ()
    if len(listed) == count and not any(isinstance(one, dict | list) for one in listed):
        listed = [(version, n, n + 1) for n, version in enumerate(listed)]
    spans: list[VersionSpan] = []
    at = 0
    for one in listed:
        fields = [one.get(n) for n in ("version", "start", "end")] if isinstance(one, dict) else one
        if not isinstance(fields, list | tuple) or len(fields) != 3:
            return ()
        version, start, end = fields
        if type(start) is not int or type(end) is not int or not at <= start <= end <= count:
            return ()
        if start > at:
            spans.append(VersionSpan(None, start))
        known, at = None if version is None else str(version), end
        if end > start:
            if spans and spans[-1].version == known:
                spans.pop()
            spans.append(VersionSpan(known, end))
    return (*spans, VersionSpan(None, count)) if at < count else tuple(spans)


def count_of(value: Any) -> int | None:
    """Return a token count as a provider sends it; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MAX_PLAUSIBLE else None


def _read_amount(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _MAX_PLAUSIBLE else None


def _first_count(*values: Any) -> int | None:
    return next((n for n in map(count_of, values) if n is not None), None)


def _plausible_part(part: int | None, whole: int | None) -> int | None:
    """Return the part; None if it exceeds its whole, which is a provider's error."""
    return part if part is not None and whole is not None and part <= whole else None
