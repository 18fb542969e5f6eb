"""Models that are played: they go through the whole real pipeline and cost nothing.

Stateless: what they answer depends on the conversation alone, so a played rollout can be repeated.
"""

from __future__ import annotations

from hermes_rl.messages import AssistantMessage, Message, ToolCall
from hermes_rl.models.base import Completion, ModelRequest
from hermes_rl.models.dialects.lenient import encode_json
from hermes_rl.usage import Usage

API_MODE = "played"
_CALL_ID = "call_oracle"
_NOTHING = Usage(
    input_tokens=0,
    cache_read_tokens=0,
    cache_write_tokens=0,
    output_tokens=0,
    reasoning_tokens=0,
)


class NoopClient:
    """Answers at once and does nothing: what a task's verifier says about the untouched state."""

    api_mode = API_MODE
    endpoint = "noop"

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`."""
        return _answer(AssistantMessage(content="I did nothing."), request)

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`."""
        return 0

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""


class OracleClient:
    """Plays a task's oracle as one terminal call, then says that it is done. One per rollout.

    Args:
        oracle: the task's solution script; None when it has none, which the answer then says.
        tool: name of the tool that runs commands.
    """

    api_mode = API_MODE
    endpoint = "oracle"

    def __init__(self, oracle: str | None, tool: str = "terminal") -> None:
        self._oracle, self._tool = oracle, tool

    async def complete(self, request: ModelRequest) -> Completion:
        """See `ModelClient.complete`."""
        if not self._oracle:
            return _answer(AssistantMessage(content="This task has no oracle."), request)
        if any(_is_ours(m) for m in request.conversation):
            return _answer(AssistantMessage(content="I ran the task's oracle."), request)
        arguments = encode_json({"command": self._oracle}).decode()
        call = ToolCall(id=_CALL_ID, name=self._tool, arguments=arguments)
        return _answer(AssistantMessage(tool_calls=(call,)), request)

    def bound(self, request: ModelRequest) -> int:
        """See `ModelClient.bound`."""
        return 0

    async def aclose(self) -> None:
        """See `ModelClient.aclose`."""


def free(model: str, usage: Usage) -> float:
    """The price of a played model."""
    return 0.0


def _is_ours(message: Message) -> bool:
    """Whether it is the oracle's call; a prompt may hold answers and calls of others."""
    calls = message.tool_calls if isinstance(message, AssistantMessage) else ()
    return any(call.id == _CALL_ID for call in calls)


def _answer(message: AssistantMessage, request: ModelRequest) -> Completion:
    if request.on_delta and message.content:
        request.on_delta(message.content)
    return Completion(
        message=message,
        finish_reason="tool_calls" if message.tool_calls else "stop",
        usage=_NOTHING,
        served_model=request.model,
    )
