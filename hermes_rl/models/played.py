"""Played models: they run through the complete real pipeline and cost nothing.

They are stateless: an answer depends only on the conversation, so a played rollout is repeatable.
"""

from __future__ import annotations

import json
from typing import Any

from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion, ModelRequest
from hermes_rl.text import encode_json
from hermes_rl.usage import Usage

_CALL_ID = "call_oracle"
_DONE = "I ran the task's oracle."
_NOTHING = Usage(
    input_tokens=0,
    cache_read_tokens=0,
    cache_write_tokens=0,
    output_tokens=0,
    reasoning_tokens=0,
)


class NoopClient:
    """Answers at once and does nothing, so that the verifier grades the untouched state."""

    api_mode = "played"
    endpoint = "noop"

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`."""
        message = self._answer(request)
        if request.on_delta and message.content:
            request.on_delta(message.content)
        return Completion(
            message=message,
            finish_reason="tool_calls" if message.tool_calls else "stop",
            usage=_NOTHING,
            served_model=request.model,
        )

    def _answer(self, request: ModelRequest) -> AssistantMessage:
        return AssistantMessage(content="I did nothing.")

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`."""
        return 0

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""


class OracleClient(NoopClient):
    """Runs a task's oracle as one terminal call, then reports that it is done. One per rollout.

    An oracle may also be a JSON list with one step per turn: text is an answer, an object is
    `{"text": ..., "reasoning": ..., "calls": [{"name": ..., "arguments": {...}}]}`. This covers
    tasks that are solved by an answer, by other tools or in a dialogue.

    Args:
        oracle: the task's solution; without one, the answer says so.
        prompt_answers: number of assistant messages in the task's prompt.
        answers: the oracle is the expected answer instead of a script.
    """

    endpoint = "oracle"

    def __init__(
        self, oracle: str | None, prompt_answers: int = 0, *, answers: bool = False
    ) -> None:
        self._oracle, self._prompt_answers = oracle, prompt_answers
        command = {"text": "", "calls": [{"name": "terminal", "arguments": {"command": oracle}}]}
        self._steps = _steps(oracle)
        if self._steps is None and answers and oracle is not None:
            self._steps = (AssistantMessage(content=oracle),)
        self._script = _message(command, _CALL_ID)

    def _answer(self, request: ModelRequest) -> AssistantMessage:
        """Return the step of this turn, or the final answer after the last step."""
        if not self._oracle:
            return AssistantMessage(content="This task has no oracle.")
        answers = [m for m in request.conversation if isinstance(m, AssistantMessage)]
        if self._steps is None:  # a prompt may contain answers and calls of other models
            ran = any(call.id == _CALL_ID for m in answers for call in m.tool_calls)
            return AssistantMessage(content=_DONE) if ran else self._script
        turn = len(answers) - self._prompt_answers
        return self._steps[turn] if turn < len(self._steps) else AssistantMessage(content=_DONE)


def _steps(oracle: str | None) -> tuple[AssistantMessage, ...] | None:
    """Parse an oracle that is a JSON list of steps; None for a script."""
    if oracle is None or not oracle.lstrip().startswith("["):
        return None
    try:
        listed = json.loads(oracle)
        return tuple(_message(form, f"{_CALL_ID}_{turn}_{{}}") for turn, form in enumerate(listed))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # a script may begin with a bracket too


def _message(form: Any, call_id: str) -> AssistantMessage:
    """Build the answer of one step.

    Args:
        call_id: ID of its calls; `{}` becomes the call's number.
    """
    if isinstance(form, str):
        return AssistantMessage(content=form)
    calls = tuple(
        ToolCall(
            id=call_id.format(number),
            name=call["name"],
            arguments=_arguments(call.get("arguments", {})),
        )
        for number, call in enumerate(form.get("calls", ()))
    )
    return AssistantMessage(
        content=form.get("text", ""), reasoning_content=form.get("reasoning"), tool_calls=calls
    )


def _arguments(value: Any) -> str:
    """The arguments of a call; text is taken as it is, even if it is not JSON."""
    return value if isinstance(value, str) else encode_json(dict(value)).decode()


def no_cost(model: str, usage: Usage) -> float:
    """The price of a played model."""
    return 0.0
