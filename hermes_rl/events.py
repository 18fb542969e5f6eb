"""What happens in a rollout, as it is journalled. `trajectory.fold` turns events into a row.

Events are appended to the journal while they happen, so that a killed attempt still leaves its
turns and
the calls that were paid. They are frozen, small and tagged by `event`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from hermes_rl.messages import Message
from hermes_rl.usage import Usage

Purpose = Literal["agent", "summary", "judge", "user", "vision", "probe"]
"""What a model call was for; a probe asks whether the model answers anything."""

Outcome = Literal["ok", "refused", "cut", "cancelled", "unknown"]
"""How a model call ended: a complete answer; refused before any work; an answer that broke off;
given up
by us; no end recorded (killed)."""


LogprobsKind = Literal["sampling", "raw", "constrained", "unknown"]
"""What an engine's logprobs are of: the distribution that was sampled from; the model's own, before
temperature and filters; one that a grammar cut; unknown."""

TokenSource = Literal["engine", "bridged", "retokenized"]
"""Whose ids a call's prompt and answer are: the engine's; ours, built from ids that the engine
sampled and sent to it as ids; those of a text that was tokenised again (never trained on)."""

ForkReason = Literal[
    "retokenized_history",
    "dropped_reasoning",
    "template",
    "edited_history",
    "compaction",
    "subagent",
    "retry",
    "parallel_call",
]
"""Why a prompt does not extend an earlier call: the history was tokenized differently; its
reasoning was removed; the template renders it differently; the harness replaced an answer; a new
context; another agent; the answer was discarded and requested again; several calls with one
prompt."""


class AttemptKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names one attempt (COMMIT)."""

    unit_id: str
    epoch: int
    attempt: int
    """0-based."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    pass


class Begun(_Event, frozen=True, kw_only=True, tag="begun"):
    """The attempt starts; contains everything known before the first call."""

    key: AttemptKey
    started_at: float
    """Unix time, seconds."""
    run_id: str
    group_id: str
    member: int
    """Index within the group: the repeat."""
    repeat: int
    row_index: int
    """0-based position of the row in the dataset as read."""
    task_id: str
    task_hash: str
    config_hash: str
    seed: int
    prompt: str
    model: str
    api_mode: str
    endpoint: str
    """Host (and port) of the endpoint; the model's name for played models."""
    toolsets: tuple[str, ...] = ()
    sampling: dict[str, Any] = {}
    """Sampling parameters as sent."""
    split: str | None = None
    env_name: str | None = None
    metadata: dict[str, Any] = {}
    """The task's other columns."""
    queued_s: float = 0.0
    prompt_sha256: str | None = None
    """Of an ephemeral system prompt that is sent but not stored."""


class ToolsOffered(_Event, frozen=True, kw_only=True, tag="tools"):
    """The schemas that the model saw, as OpenAI functions."""

    tools: list[dict[str, Any]]


class SandboxLeased(_Event, frozen=True, kw_only=True, tag="sandbox"):
    """A sandbox is ready and the setup of the task has run."""

    backend: str
    image: str | None = None
    digest: str | None = None
    limits: dict[str, Any] = {}
    """Limits in force."""
    seconds: float = 0.0


class MessageAdded(_Event, frozen=True, kw_only=True, tag="message"):
    """A message joined the conversation."""

    message: Message
    turn: int
    """1-based number of the model call that made or caused it; 0 before the first."""
    context: int = 0
    synthetic: bool = False
    """Written by the harness, not by user, policy or tool."""
    tool_ok: bool | None = None
    """For tool results: whether the tool succeeded."""
    seconds: float | None = None
    """For tool results: how long the tool took."""
    raw_text: str | None = None
    """Of a tool result or a user message that a hook or the harness changed: its text before."""
    suspected_unparsed: bool = False
    """For answers of the model: they may contain a tool call that was not parsed."""
    compressed: bool = False
    """Replaces earlier messages in a compressed context: a digest, or the summary."""


class CommandDecided(_Event, frozen=True, kw_only=True, tag="command_decided"):
    """A dangerous command of the model was allowed or not (`tools.approval`)."""

    turn: int
    tool_call_id: str
    pattern: str
    """Name of the pattern that it matches."""
    decision: Literal["allowed", "denied", "never"]


class CallStarted(_Event, frozen=True, kw_only=True, tag="call_start"):
    """A request is about to be sent: written before its first byte."""

    call_id: str
    turn: int
    purpose: Purpose
    model: str
    started_at: float
    agent: str = "main"
    max_input_tokens: int | None = None
    """Upper bound of the prompt's tokens: the request's bytes."""
    max_output_tokens: int | None = None
    """The output cap that was sent; None when none was."""
    unsent: tuple[str, ...] = ()
    """Sampling parameters that it went without, since the endpoint refused them by name."""
    continues: str | None = None
    """The call whose answer the engine cut off: this prompt ends with its tokens."""


class CallEnded(_Event, frozen=True, kw_only=True, tag="call_end"):
    """A request ended. Usage only from a complete usage object."""

    call_id: str
    outcome: Outcome
    latency_s: float
    finish_reason: str | None = None
    usage: Usage | None = None
    usage_raw: str | None = None
    """The provider's usage object as JSON text."""
    cost_usd: float | None = None
    retries: int = 0
    """How many earlier requests the same step had already made."""
    request_id: str | None = None
    error: str | None = None
    served_model: str | None = None
    """The model that the response names."""
    policy_version: str | None = None


class TokensAdded(_Event, frozen=True, kw_only=True, tag="tokens"):
    """The tokens that a call added to what earlier calls of the rollout hold: a path of tokens is
    its parent's first `kept` ones, then `glue`, then `sampled`. Recorded right before the call's
    end, with ids and logprobs as little-endian 32-bit numbers, so that a journal grows with the
    tokens and not with the prompts."""

    call_id: str
    parent: str | None = None
    """The call whose path the prompt begins with; None when it shares nothing."""
    kept: int = 0
    """How many tokens of that path, from its beginning."""
    glue: bytes = b""
    """The rest of the prompt: int32."""
    sampled: bytes = b""
    """The answer as it was sampled, an end token included: int32."""
    logprobs: bytes | None = None
    """One float32 per sampled token; None when the engine gave none, or another number of them."""
    logprobs_kind: LogprobsKind = "unknown"
    source: TokenSource = "engine"
    fork_reason: ForkReason | None = None
    """As far as whoever built the prompt knows."""
    tokenizer_hash: str | None = None
    template_hash: str | None = None
    temperature: float | None = None
    """This and the next three as sent; None where the server chose."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    shaped_by: tuple[str, ...] = ()
    """Names of what else changed the distribution: penalties, biases, grammars."""
    versions: tuple[tuple[str | None, int], ...] = ()
    """Policy versions of the sampled tokens, each with the index after its last token; empty if one
    version (`CallEnded.policy_version`) is that of all."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises: struct.error for an id outside 32 bits."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ids`."""
    return struct.unpack(f"<{len(data) // 4}i", data)


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Logprobs as little-endian float32. Raises: OverflowError beyond its range."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """The inverse of `pack_logprobs`, to the precision of a float32."""
    return struct.unpack(f"<{len(data) // 4}f", data)


class AnswerDiscarded(_Event, frozen=True, kw_only=True, tag="discarded"):
    """The answer of a turn's last call so far was thrown away and asked for again: paid, but no
    message of the conversation."""

    turn: int
    why: str
    """A few words: `empty answer`."""
    agent: str = "main"


class Waited(_Event, frozen=True, kw_only=True, tag="waited"):
    """Time spent waiting for the limiter or between retries: never the agent's active time."""

    seconds: float


class ContextStarted(_Event, frozen=True, kw_only=True, tag="context"):
    """The model sees another context from here on (after compaction)."""

    start: int
    """Index of the first message that is new in this context."""
    kept: list[int] = []
    """Indices of earlier messages that it still holds."""
    summary_index: int | None = None
    reason: str = ""


class RewardPart(msgspec.Struct, frozen=True, kw_only=True):
    """One component of a reward."""

    name: str
    score: float
    weight: float = 1.0
    turn: int | None = None
    """The turn it belongs to; None for the whole rollout."""
    detail: str | None = None


class Graded(_Event, frozen=True, kw_only=True, tag="graded"):
    """The verifier judged."""

    reward: float | None
    rewards: tuple[RewardPart, ...] = ()
    metrics: dict[str, float] = {}
    seconds: float = 0.0


class Ended(_Event, frozen=True, kw_only=True, tag="ended"):
    """The attempt is over."""

    finished_at: float
    end_reason: str
    cause: str | None = None
    """Key of `errors.CAUSES` for failures; None for the policy's endings."""
    error: str | None = None
    """Class and message, scrubbed."""
    metrics: dict[str, float] = {}
    final_response: str | None = None
    """The answer, where it is more than the last assistant text: parts of a cut one, joined."""
    fatal_command: str | None = None
    """Names the tool call under which the sandbox died (`SandboxDied.command`)."""


class SubagentStarted(_Event, frozen=True, kw_only=True, tag="subagent_started"):
    """A sub-agent begins a task. Its model calls are events of the attempt, under its name."""

    agent: str
    """Its name, unique in the rollout: `main.1` is the first one of the main agent."""
    parent: str
    """The name of the agent that started it."""
    tool_call_id: str
    """The call of its parent."""
    started_at: float
    prompt: str


class SubagentEvent(_Event, frozen=True, kw_only=True, tag="subagent"):
    """What happens in a sub-agent, its model calls apart; its last one is an `Ended`."""

    agent: str
    inner: Event


class Redacted(_Event, frozen=True, kw_only=True, tag="redacted"):
    """A secret was replaced in the journalled event before this one, for the first time in the
    attempt. Token ids would still contain it: none are journalled from here on."""


class Resumed(_Event, frozen=True, kw_only=True, tag="resumed"):
    """The attempt resumes from a checkpoint of an earlier one of its unit."""

    trajectory_id: str
    """Of the attempt that wrote it."""
    turn: int
    """The last turn that it holds."""
    events: list[Event]
    """What happened until then. Its calls are in the rows of the attempts that paid for them."""


Event = (
    Begun
    | ToolsOffered
    | SandboxLeased
    | MessageAdded
    | CommandDecided
    | CallStarted
    | TokensAdded
    | CallEnded
    | AnswerDiscarded
    | Waited
    | ContextStarted
    | Graded
    | Ended
    | SubagentStarted
    | SubagentEvent
    | Redacted
    | Resumed
)


def whole_rollout(events: Iterable[Event]) -> list[Event]:
    """All that happened in a rollout: what an attempt took over from earlier ones, then its own."""
    found: list[Event] = []
    for event in events:
        found += event.events if isinstance(event, Resumed) else [event]
    return found


class EventLog:
    """The events of one attempt, kept for `trajectory.fold`.

    Args:
        journal: takes each event first: what it refuses is not kept here either, so that a row
            never says more than the journal.
        events: what was recorded before.
        listener: called with each event that is kept, before the rollout continues. It must be
            quick.
    """

    def __init__(
        self,
        journal: Callable[[Event], None] | None = None,
        events: Iterable[Event] = (),
        *,
        listener: Callable[[Event], None] | None = None,
    ) -> None:
        self.events = list(events)
        self._journal = journal
        self._listener = listener

    def record(self, event: Event) -> None:
        """Append one event. Raises: what the journal or the listener raises."""
        if self._journal is not None:
            self._journal(event)
        self.events.append(event)
        if self._listener is not None:
            self._listener(event)
