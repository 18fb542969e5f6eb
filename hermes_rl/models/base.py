"""The contract of model clients: conversations, requests, completions (DESIGN 5.8).

`ModelClient.complete` makes one attempt and raises typed errors. Retries (`calls`) and limits
(`rate`) are the same for all clients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from hermes_rl.events import ForkReason as ForkReason
from hermes_rl.events import LogprobsKind as LogprobsKind
from hermes_rl.events import TokenSource as TokenSource
from hermes_rl.messages import AssistantMessage, Message
from hermes_rl.usage import Usage

Adaptation = Literal[
    "small_images",
    "no_images",
    "text_only",
    "no_signatures",
    "no_encrypted_reasoning",
    "no_grammar",
    "completion_cap",
]
"""How a request is changed after a server refused it: large images are shrunk; images are left out;
content parts become text; signed thinking blocks, encrypted reasoning items, or `pattern` and
`format` in tool schemas are left out; `max_tokens` is sent as `max_completion_tokens`
(`completion_cap`)."""

_RATE_HEADERS = ("x-ratelimit-", "anthropic-ratelimit-", "ratelimit-", "retry-after")

CacheTime = Literal["5m", "1h"]
"""How long a provider caches a prefix that a request marks."""


class Preparation(Protocol):
    """How messages are prepared for sending."""

    def run(self, messages: list[Message]) -> list[Message]:
        """Return the messages to send. Pure; a message that needs no change is the same object."""
        ...

    def cut(self, messages: list[Message], start: int) -> int:
        """Return the last index (at least `start`) up to which the prepared messages stay the same,
        whatever messages follow."""
        ...


class PreparedView:
    """One preparation of one conversation.

    When messages are added, only those after the last cut are prepared again. A turn costs what it
    adds, and messages that were sent stay the same objects.

    Args:
        source: the conversation's list, append-only.
    """

    def __init__(self, source: list[Message], preparation: Preparation) -> None:
        self._source, self._preparation = source, preparation
        self._sent: list[Message] = []
        self._done = 0
        """Source messages before the last cut."""
        self._closed = 0
        """Prepared messages that represent these."""
        self._seen = 0
        """Source messages at the last update."""
        self._encoded: dict[str, _Encoded] = {}

    def messages(self) -> list[Message]:
        """Return all messages to send now. Do not change the list."""
        source = self._source
        if len(source) == self._seen:
            return self._sent
        run = self._preparation.run
        cut = self._preparation.cut(source, self._done)
        if cut > self._done:
            if cut != self._seen:  # else these messages are prepared already, as the tail
                self._sent[self._closed :] = run(source[self._done : cut])
            self._done, self._closed = cut, len(self._sent)
        self._sent[self._closed :] = run(source[cut:])
        self._seen = len(source)
        return self._sent

    def encoded(self, key: str, encode: Callable[[Message], bytes]) -> list[bytes]:
        """Return each of `messages` encoded, once per object. Do not change the list.

        Args:
            key: identifies `encode`: a conversation may be sent on several wires.
        """
        sent = self.messages()
        known = self._encoded.setdefault(key, _Encoded())
        same = min(known.closed, len(sent))
        while same < len(known.of) and same < len(sent) and known.of[same] is sent[same]:
            same += 1
        fresh = sent[same:]
        known.of[same:] = fresh
        known.data[same:] = [encode(message) for message in fresh]
        known.closed = self._closed
        return known.data


class _Encoded:
    """Encoded messages and the objects that they were made of."""

    __slots__ = ("closed", "data", "of")

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.of: list[Message] = []
        self.closed = 0


class Conversation(list[Message]):
    """The messages of one context: an append-only list.

    What is sent may differ from what is stored: `prepare.prepare_request` repairs messages through
    a `PreparedView`, from which every dialect builds its bodies. Each message is prepared and
    encoded once, so a turn's request extends the last one byte for byte and costs only its new
    messages.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        super().__init__(messages)
        self._views: dict[Hashable, PreparedView] = {}
        self.attachments: dict[Hashable, Any] = {}
        """State that a client keeps for this conversation between calls, by the client's key."""

    def view(self, key: Hashable, preparation: Preparation) -> PreparedView:
        """Return the conversation prepared in one way; the same key returns the same view."""
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = PreparedView(self, preparation)
        return found


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. None is not sent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 (all) is sent as such; engines outside the vLLM family may refuse it."""
    min_p: float | None = None
    max_tokens: int | None = None
    """Output tokens per call."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    reasoning: str | None = None
    """Reasoning effort as the provider spells it (`low`, `medium`, `high`)."""

    def without(self, names: Iterable[str]) -> Sampling:
        """Return a copy with these parameters unset."""
        unset: dict[str, Any] = {name: () if name == "stop" else None for name in names}
        return replace(self, **unset)

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters that are set."""
        pairs = {k: v for k, v in self.__dict__.items() if v not in (None, ())}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in pairs.items()}


OUTPUT_LIMITS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
)
"""Body fields for the output limit, in the dialects and token wires."""


@dataclass(frozen=True)
class PartialAnswer:
    """The sampled beginning of an answer that the engine cut off."""

    call_id: str
    """Of the request that sampled its last tokens."""
    prompt_ids: tuple[int, ...]
    """Of the answer, without its own tokens."""
    ids: tuple[int, ...]
    """All tokens so far, of all of its requests."""


@dataclass(frozen=True)
class ModelRequest:
    """One request in the internal form."""

    model: str
    conversation: Conversation
    call_id: str
    """Sent as the header `x-hermes-call-id`, so that a server's log can be joined."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI function schemas. Pass the same tuple at every turn: it is encoded once."""
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """Request prompt and completion token ids from engines that return them."""
    on_delta: Callable[[str], None] | None = None
    """Called with each piece of streamed text."""
    on_reasoning: Callable[[str], None] | None = None
    """Called with each piece of streamed reasoning."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further body fields from the user's configuration."""
    ephemeral: str | None = None
    """Text appended to the system prompt of this call; never stored."""
    prefill: tuple[Message, ...] = ()
    """Messages after the system prompt of this call; never stored."""
    cache: CacheTime | None = None
    """Mark the system prompt and the last three messages for the provider's cache."""
    adaptations: frozenset[Adaptation] = frozenset()
    """Changes that servers have required so far."""
    exact: bool = False
    """Send the history unrepaired, with tool arguments exactly as the model wrote them. For
    token-exact training."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt as token ids, for wires that accept them in place of the conversation."""
    partial: PartialAnswer | None = None
    """Continue this answer. Only clients that return partial answers can."""
    continuable: bool = False
    """The caller can continue a partial answer: a stream that breaks off after some text raises
    `AnswerInterrupted` with that text and is not retried."""


class VersionSpan(NamedTuple):
    """Completion tokens of one version of the weights."""

    version: str | None
    """None if it is unknown."""
    end: int
    """Index after its last token; it begins where the last span ends."""


@dataclass(frozen=True)
class TokenCapture:
    """Token ids of one call, as the engine returned them."""

    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    """As sampled, including the end token."""
    logprobs: tuple[float, ...] | None = None
    """One per completion id, natural logarithm."""
    logprobs_kind: LogprobsKind = "unknown"
    source: TokenSource = "engine"
    fork_reason: ForkReason | None = None
    """Why the prompt does not extend the conversation's last path, if the client knows."""
    tokenizer_hash: str | None = None
    template_hash: str | None = None
    shaped_by: tuple[str, ...] = ()
    """What the client added that changes the distribution, beyond temperature, top_p, top_k and
    min_p: a grammar for tool calls, penalties."""
    sampling: Sampling | None = None
    """The sampling that was sent, if it differs from the request's."""
    versions: tuple[VersionSpan, ...] = ()
    """Of the policy, where the response tells them by token."""
    repeated: bool | None = None
    """Each event of its stream repeated the answer so far; None if unknown."""


@dataclass(frozen=True)
class Completion:
    """A complete answer."""

    message: AssistantMessage
    finish_reason: str | None
    """As the server reports it: stop, length, tool_calls, content_filter, ..."""
    usage: Usage | None
    """None if the response has no complete usage object."""
    usage_raw: str | None = None
    request_id: str | None = None
    served_model: str | None = None
    first_byte_s: float | None = None
    tokens: TokenCapture | None = None
    policy_version: str | None = None
    rate_limit: dict[str, str] = field(default_factory=dict)
    """The rate-limit headers of the response, lower case."""
    partial: PartialAnswer | None = None
    """The answer so far, if the engine cut it off and a further request can continue it."""


def request_id(headers: Mapping[str, str]) -> str | None:
    """Return the provider's ID of a request.

    Args:
        headers: names in lower case.
    """
    return headers.get("x-request-id") or headers.get("request-id")


def rate_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the rate-limit headers of an answer."""
    return {k: v for k, v in headers.items() if k.startswith(_RATE_HEADERS)}


class ModelClient(Protocol):
    """Answers requests. One per process, endpoint and account; shared by all rollouts."""

    api_mode: str
    """The dialect's name, or `played`."""
    endpoint: str
    """Host (and port), for records."""

    async def complete(self, request: ModelRequest) -> Completion:
        """Make one attempt, without hidden retries. Raises: ModelError."""
        ...

    def bound(self, request: ModelRequest) -> int:
        """Return an upper bound on the prompt's tokens, before the request is sent."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


Tools = Sequence[Mapping[str, Any]]

_MARKUP = re.compile(
    r"</?tool_calls?\b"  # Hermes, Qwen, GLM
    r"|<\|?(?:tool_call|python_tag)"  # Llama, Kimi, Gemma
    r"|<｜tool▁call"  # DeepSeek
    r"|\[TOOL_CALLS\]"  # Mistral
    r"|<function=|</function>|<parameter="  # Qwen coder
)
_NAMED = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:')


def has_unparsed_call(message: AssistantMessage, tools: Tools) -> bool:
    """Return whether an answer may contain a tool call that was not parsed.

    A server without a parser for its model's tool calls, or with that of another model family,
    returns them as text, which the agent would take for its final answer. The check is the same for
    every model and engine.

    Checks the text of the answer. If it has neither text nor calls, checks its reasoning, which
    then was never closed or contains the call. Reasoning that is followed by text or calls is not
    checked: a call in it is only a thought.

    Args:
        tools: OpenAI function schemas of the tools that were offered.
    """
    text = message.content
    if not text.strip() and not message.tool_calls:
        text += message.reasoning_content or ""
    if _MARKUP.search(text):
        return True
    offered = tool_names(tools)
    return any(found.group(1) in offered for found in _NAMED.finditer(text))


def tool_names(tools: Tools) -> set[str]:
    """Return the names of the offered tools."""
    functions = (tool.get("function") for tool in tools)
    return {str(f["name"]) for f in functions if isinstance(f, Mapping) and "name" in f}
