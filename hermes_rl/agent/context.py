"""The contract of context engines: what they see of a full context, and what they return.

An engine decides from how many tokens on a context is compressed, and which messages the next
context begins with. `agent.compression` calls it, checks its result and records it. The default
engine is `agent.summaries.SummaryEngine`; others are chosen by name (entry point group
`hermes_rl.context_engines`) or passed as an object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hermes_rl.errors import UserError
from hermes_rl.events import ContextStarted, Event, MessageAdded
from hermes_rl.input_errors import unknown
from hermes_rl.messages import AssistantMessage, Message, UserMessage

ENGINES_GROUP = "hermes_rl.context_engines"
"""Entry point group: name -> a callable without arguments that returns a `ContextEngine`."""

CONTEXT_SECONDS = 120.0
"""How long one compression may take, its model calls included."""

BYTES_PER_TOKEN = 4
MESSAGE_TOKENS = 4
"""What a message costs beside its text."""
SHOWN = {"type": "text", "text": "[The images that you read]"}
"""First part of the message with images of a turn's results."""
IMAGE_TOKENS = 1_500

Trigger = Literal["threshold", "overflow"]
"""Why a context is compressed: its tokens reached the threshold; the server refused it."""


@dataclass(frozen=True)
class Replacement:
    """A message of the next context that is not in the present one."""

    message: Message
    instead_of: int | None = None
    """Position of the message whose place it takes; None for one that is added."""


@dataclass(frozen=True)
class NextContext:
    """What the next context begins with."""

    entries: Sequence[int | Replacement]
    """Positions in the present context, or replacements, in the order of the next one."""
    method: str
    """How it was made, for the record: `digest`, `summary`, `static`."""
    summary: int | None = None
    """Index in `entries` of the message with the summary."""


@dataclass
class ContextState:
    """The present context of a run."""

    number: int = 0
    kept: tuple[int, ...] = ()
    """Indices, in the whole conversation, of the earlier messages that it begins with."""
    past: list[Message] = field(default_factory=list)
    """All messages before its first new one."""
    replaced: frozenset[int] = frozenset()
    """Indices of digests and summaries so far."""
    window: int | None = None
    """Tokens of the model's context window, once it is known."""
    threshold: int = 0
    """Tokens of a prompt from which on it is compressed, once the window is known."""
    tokens: int = 0
    """Of a prompt of its first `measured` messages."""
    measured: int = 0
    failed_summaries: int = 0
    """Requests for a summary in a row that gave none."""
    failed_tokens: int | None = None
    """Of the prompt at the last compression that brought nothing."""

    def index(self, place: int) -> int:
        """Index in the whole conversation of a message of this context."""
        new = len(self.kept)
        return self.kept[place] if place < new else len(self.past) + place - new


Summarise = Callable[[str, int], Awaitable[str | None]]
"""(prompt, most tokens of the answer) -> the model's answer; None when it fails, is late, empty, or
much longer than requested."""


@dataclass(frozen=True, kw_only=True)
class ContextView:
    """A full context, as an engine sees it."""

    messages: Sequence[Message]
    """The present context, the system messages first. Not to be changed."""
    trigger: Trigger
    threshold: int
    """Tokens that the messages of the next context must stay below."""
    window: int | None
    """Tokens of the model's context window; None when it is unknown."""
    scale: float
    """Tokens of this conversation for each that `message_tokens` estimates."""
    harness_texts: frozenset[str]
    """What the harness says during a run: the user wrote none of it."""
    tool_state: Mapping[str, Any] = field(default_factory=dict)
    """State of the tools, such as a todo list."""
    summarise: Summarise | None = None
    """Asks the model for summaries; None when no summary is to be paid for."""

    def tokens(self, messages: Sequence[Message]) -> int:
        """About how many tokens some messages take."""
        return int(self.scale * sum(map(message_tokens, messages)))


class ContextEngine(Protocol):
    """Compresses full contexts. One object may serve several runs at once."""

    def threshold(self, window: int, max_tokens: int | None) -> int:
        """Tokens of a prompt from which on the context is compressed.

        Args:
            window: of the model.
            max_tokens: output limit of a call; None when none is sent.
        """
        ...

    async def compress(self, view: ContextView) -> NextContext | None:
        """The next context; None when nothing can be left out.

        It must keep system messages, end as the present context does, alternate between user and
        assistant, and have a result for each call. A result that breaks a rule, an exception and
        a deadline that is exceeded do no harm: the default engine's digest is used instead.
        """
        ...


def message_tokens(message: Message) -> int:
    """About how many tokens a message takes: one for four bytes of its texts."""
    content, images = message.content, 0
    if not isinstance(content, str):
        images = sum(part.get("type") != "text" for part in content)
        content = "".join(str(part.get("text", "")) for part in content)
    size = byte_length(content)
    if isinstance(message, AssistantMessage):
        size += sum(len(call.name) + byte_length(call.arguments) for call in message.tool_calls)
    return MESSAGE_TOKENS + size // BYTES_PER_TOKEN + IMAGE_TOKENS * images


def byte_length(text: str) -> int:
    """Length in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def text_tokens(text: str) -> int:
    """About how many tokens a text takes."""
    return byte_length(text) // BYTES_PER_TOKEN


def is_request(message: Message, harness_texts: frozenset[str]) -> bool:
    """Whether the user wrote a message."""
    if not isinstance(message, UserMessage):
        return False
    if isinstance(message.content, str):
        return message.content not in harness_texts
    return message.content[:1] != [SHOWN]


def present_context(events: Iterable[Event]) -> list[MessageAdded]:
    """The messages of the last context in the events of one run."""
    added: list[MessageAdded] = []
    last: ContextStarted | None = None
    for event in events:
        if isinstance(event, MessageAdded):
            added.append(event)
        elif isinstance(event, ContextStarted):
            last = event
    if last is None:
        return [event for event in added if not event.compressed]
    kept = [added[index] for index in last.kept]
    return [*kept, *(e for e in added[last.start :] if not e.compressed)]


def load_engine(name: str) -> ContextEngine:
    """The engine of that name. Raises: UserError when no plugin offers it, or it does not load."""
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=ENGINES_GROUP)}
    if name not in found:
        raise UserError(unknown("context engine", name, found))
    try:
        engine: ContextEngine = found[name].load()()
    except Exception as error:  # a boundary: a plugin
        raise UserError(f"context engine {name!r}: {type(error).__name__}: {error}") from error
    return engine
