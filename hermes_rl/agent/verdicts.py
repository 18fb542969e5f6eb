"""What to do with an answer of the model, and what was tried so far to get a better one."""

from __future__ import annotations

from dataclasses import dataclass, field

from hermes_rl.messages import AssistantMessage


@dataclass(frozen=True)
class Take:
    """The answer is one: it joins the conversation and is acted on."""

    message: AssistantMessage


@dataclass(frozen=True)
class AskAgain:
    """Throw the answer away and send the same messages again, within the same turn."""

    why: str
    """A few words for the record."""


@dataclass(frozen=True)
class GoOn:
    """Both messages join the conversation, and the next turn goes on from there."""

    said: AssistantMessage
    prompt: str
    """What the harness says; synthetic."""
    instead_of: str | None = None
    """Set when `said` is the harness's too: why the model's own answer is thrown away."""


@dataclass(frozen=True)
class End:
    """The answer joins the conversation, and the run ends."""

    end_reason: str
    message: AssistantMessage
    final_response: str | None = None
    """The run's answer, where it is not this message's text."""


Verdict = Take | AskAgain | GoOn | End


@dataclass
class Tries:
    """What was tried for one answer. A new one begins once an answer could be acted on."""

    continued: int = 0
    """Cut answers that were gone on from."""
    cut_calls: int = 0
    """Cut tool calls that were asked for again."""
    bad_arguments: int = 0
    """Calls without JSON that were asked for again."""
    nudged: bool = False
    prefilled: int = 0
    retried: int = 0
    """Empty answers that were asked for again, on the present route."""
    again: int = 0
    """Answers of this turn that were thrown away."""
    max_tokens: int | None = None
    """Output limit of the next call, once it was raised."""
    parts: list[str] = field(default_factory=list)
    """Text of the cut answers so far."""
