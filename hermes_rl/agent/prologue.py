"""Before the first call: check the prompt, put the conversation together, record what is given."""

from __future__ import annotations

from collections.abc import Sequence

from hermes_rl.agent.parts import AgentParts, RunState
from hermes_rl.errors import UserError
from hermes_rl.events import ToolsOffered
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)


def begin(parts: AgentParts, prompt: Sequence[Message]) -> RunState:
    """The state of a run whose next step is a model call.

    Raises: UserError when the prompt's roles are out of order, or a tool lacks its sandbox.
    """
    check_roles(prompt)
    homeless = [tool.name for tool in parts.tools.values() if tool.needs_sandbox]
    if homeless and parts.sandbox is None:
        raise UserError(f"the tools {', '.join(homeless)} need a sandbox; give one, or no tools")
    run = RunState.of(parts)
    parts.recorder.record(ToolsOffered(tools=list(run.request.tools)))
    if parts.system and not isinstance(prompt[0], SystemMessage):
        run.add(SystemMessage(content=parts.system))
    for message in prompt:
        run.add(message)
    run.given = len(run.conversation)
    return run


def check_roles(messages: Sequence[Message]) -> None:
    """Raises: UserError unless the roles are [system] user (assistant tool*)... user."""
    if not messages:
        raise UserError("the prompt is empty; give at least a user message")
    last: Message | None = None
    for place, message in enumerate(messages, 1):
        if not _may_follow(last, message):
            before = f"after {_role(last)}" if last else "first"
            raise UserError(
                f"prompt message {place}: a {_role(message)} message cannot stand {before}; "
                "user and assistant alternate, tool results follow their calls"
            )
        last = message
    if not isinstance(last, UserMessage):
        raise UserError(f"the prompt ends with a {_role(last)} message; end it with the user's")


def _may_follow(last: Message | None, message: Message) -> bool:
    if isinstance(message, SystemMessage):
        return last is None
    if isinstance(message, UserMessage):
        return not isinstance(last, UserMessage)
    if isinstance(message, ToolMessage):
        called = isinstance(last, AssistantMessage) and bool(last.tool_calls)
        return called or isinstance(last, ToolMessage)
    return isinstance(last, UserMessage | ToolMessage)


def _role(message: Message | None) -> str:
    return "no" if message is None else str(message.__struct_config__.tag)
