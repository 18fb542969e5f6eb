"""The contract of model clients: conversations, requests, completions (DESIGN 5.8).

`ModelClient.complete` makes one attempt and raises typed errors. Waiting and retrying are in
`calls`, limits in the limiter, for all clients alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

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
"""What a request is sent without, after a server refused it: large images (they are made smaller);
images; content in parts (text instead); signed thinking blocks; encrypted reasoning items;
`pattern` and `format` in tool schemas; and which name it has for something (`completion_cap`:
`max_tokens` is called `max_completion_tokens`)."""

_RATE_HEADERS = ("x-ratelimit-", "anthropic-ratelimit-", "ratelimit-", "retry-after")

CacheTime = Literal["5m", "1h"]
"""How long a provider keeps a prefix that a request marks for its cache."""


class Preparation(Protocol):
    """How messages are prepared for sending."""

    def run(self, messages: list[Message]) -> list[Message]:
        """The messages as they are sent; what needs no change is the same object. Pure."""
        ...

    def cut(self, messages: list[Message], start: int) -> int:
        """The last place (at least `start`) at which the list can be cut so that the prepared
        pieces, from `start` on, are what the whole would be, whatever comes later."""
        ...


class View:
    """One preparation of one conversation.

    Only what follows the last cut is prepared again when messages are added, so a turn costs what
    it adds, and what was sent stays the same objects.

    Args:
        source: the conversation's own list, append-only.
    """

    def __init__(self, source: list[Message], preparation: Preparation) -> None:
        self._source, self._preparation = source, preparation
        self._sent: list[Message] = []
        self._done = 0
        """Source messages before the last cut."""
        self._closed = 0
        """Sent messages that stand for them."""
        self._seen = 0
        """Source messages when the view was last brought up to date."""
        self._encoded: dict[str, _Encoded] = {}

    def messages(self) -> list[Message]:
        """All messages as they are sent now. Not to be changed."""
        source = self._source
        if len(source) == self._seen:
            return self._sent
        run = self._preparation.run
        cut = self._preparation.cut(source, self._done)
        if cut > self._done:
            if cut != self._seen:  # else the piece stands there already, prepared as the tail
                self._sent[self._closed :] = run(source[self._done : cut])
            self._done, self._closed = cut, len(self._sent)
        self._sent[self._closed :] = run(source[cut:])
        self._seen = len(source)
        return self._sent

    def encoded(self, key: str, encode: Callable[[Message], bytes]) -> list[bytes]:
        """`encode` of each of `messages`, made once per object. Not to be changed.

        Args:
            key: names `encode`, so that a conversation may be sent in several ways.
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
    """Bytes, and the objects that they were made of."""

    __slots__ = ("closed", "data", "of")

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.of: list[Message] = []
        self.closed = 0


class Conversation(list[Message]):
    """The messages of one context: a list to which messages are only added.

    What is sent may differ from what is stored: `models.prepare.outgoing` repairs it through a
    `View`, and every dialect builds its bodies from that. Each message is prepared and encoded
    once, so a turn's request extends the last one byte for byte and costs only its new messages.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        super().__init__(messages)
        self._views: dict[Hashable, View] = {}
        self.attachments: dict[Hashable, Any] = {}
        """What a client keeps of this conversation from call to call, by a key of the client's."""

    def view(self, key: Hashable, preparation: Preparation) -> View:
        """The conversation prepared in one way; the same view for the same key, always."""
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = View(self, preparation)
        return found


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; None is not sent."""

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
        """The same with these parameters unset."""
        unset: dict[str, Any] = {name: () if name == "stop" else None for name in names}
        return replace(self, **unset)

    def as_dict(self) -> dict[str, Any]:
        """The parameters that are set."""
        pairs = {k: v for k, v in self.__dict__.items() if v not in (None, ())}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in pairs.items()}


@dataclass(frozen=True)
class ModelRequest:
    """One request in the internal form."""

    model: str
    conversation: Conversation
    call_id: str
    """Sent as `x-request-id`-like header `x-hermes-call-id`, so that a server's log can be joined.
    """
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI function schemas: {"type": "function", "function": {...}}. Same object at every turn.
    """
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """Ask for prompt and completion token ids where the engine returns them."""
    on_delta: Callable[[str], None] | None = None
    """Called with each piece of streamed text."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further body fields, as given by the user."""
    ephemeral: str | None = None
    """Appended to the system prompt at the call; sent, never stored."""
    prefill: tuple[Message, ...] = ()
    """Put after the system message at the call; sent, never stored."""
    cache: CacheTime | None = None
    """Mark the system prompt and the last three messages for the provider's cache."""
    adaptations: frozenset[Adaptation] = frozenset()
    """What the request is sent without; grows when a server refuses, and then stays."""
    exact: bool = False
    """Send the history as it is stored: no repair, the arguments of tool calls as the model's very
    text. For token-exact training."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt as token ids, for wires that take such; the conversation is then not sent."""
    continuable: bool = False
    """Whoever asks can go on from the beginning of an answer: a stream that breaks off behind some
    text is not asked for again, but raised with that text (`wire.decoding.BrokenOff`)."""


@dataclass(frozen=True)
class TokenCapture:
    """Token ids of one call, as the engine returned them."""

    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    """As sampled, the end token included."""
    logprobs: tuple[float, ...] | None = None
    """One per completion id, natural logarithm."""
    logprobs_kind: LogprobsKind = "unknown"
    source: TokenSource = "engine"
    fork_reason: ForkReason | None = None
    """Why the prompt does not extend the conversation's last path, where whoever built it knows."""
    tokenizer_hash: str | None = None
    template_hash: str | None = None
    shaped_by: tuple[str, ...] = ()
    """What changed the distribution beside temperature, top_p, top_k and min_p, where the client
    added it: a grammar for tool calls, penalties."""
    sampling: Sampling | None = None
    """What was sent, where the client said more than the request; None is the request's own."""


@dataclass(frozen=True)
class Completion:
    """A complete answer."""

    message: AssistantMessage
    finish_reason: str | None
    """As the server says: stop, length, tool_calls, content_filter, ..."""
    usage: Usage | None
    """None when the response held no complete usage object."""
    usage_raw: str | None = None
    request_id: str | None = None
    served_model: str | None = None
    first_byte_s: float | None = None
    tokens: TokenCapture | None = None
    policy_version: str | None = None
    rate_limit: dict[str, str] = field(default_factory=dict)
    """The rate-limit headers of the response, lower case."""


def request_id(headers: Mapping[str, str]) -> str | None:
    """The provider's id of a request: `Completion.request_id`.

    Args:
        headers: names in lower case.
    """
    return headers.get("x-request-id") or headers.get("request-id")


def rate_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The rate-limit headers of an answer: `Completion.rate_limit`."""
    return {k: v for k, v in headers.items() if k.startswith(_RATE_HEADERS)}


class ModelClient(Protocol):
    """Answers requests. One per process, endpoint and account; shared by all rollouts."""

    api_mode: str
    """The dialect's name, or `played`."""
    endpoint: str
    """Host (and port), for records."""

    async def complete(self, request: ModelRequest) -> Completion:
        """Make one attempt, never a hidden retry. Raises: subclasses of ModelError."""
        ...

    def bound(self, request: ModelRequest) -> int:
        """An upper bound on the prompt's tokens, known before the request is sent."""
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


def looks_unparsed(message: AssistantMessage, tools: Tools) -> bool:
    """Whether an answer may hold a call that nobody runs.

    A server without a parser for its model's calls, or with the parser of another family, gives
    them as text: the agent then takes for an answer what was meant as a call, and the run looks
    done. This decides for every model and engine.

    The text is looked at; of an answer with neither text nor calls, its reasoning, which then was
    never closed or holds the call itself. A call in a thought that text or a call follows is a
    thought.

    Args:
        tools: OpenAI function schemas of the tools that were offered.
    """
    said = message.content
    if not said.strip() and not message.tool_calls:
        said += message.reasoning_content or ""
    if _MARKUP.search(said):
        return True
    offered = names(tools)
    return any(found.group(1) in offered for found in _NAMED.finditer(said))


def names(tools: Tools) -> set[str]:
    """The names of the offered tools."""
    functions = (tool.get("function") for tool in tools)
    return {str(f["name"]) for f in functions if isinstance(f, Mapping) and "name" in f}
