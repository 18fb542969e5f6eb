"""What the tests of the dialect anthropic_messages share: requests, a history, and answers as the
Messages API gives them, whole and in events."""

import json

from wire_kit import SSE as SSE
from wire_kit import decode

from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models import Conversation, ModelRequest
from hermes_rl.models.wire import AnthropicMessages
from hermes_rl.testing import AnthropicServer

JSON = {"content-type": "application/json", "request-id": "req_1"}
TOOL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "pattern": "^ls"}},
        },
    },
}


def request(*messages, model="claude-sonnet-4-5", **fields):
    return ModelRequest(model=model, conversation=Conversation(messages), call_id="c", **fields)


def body_of(*messages, **fields):
    return json.loads(AnthropicMessages().encode(request(*messages, **fields)))


def read(*messages, **fields):
    """What our server understands of a request: it refuses what the API refuses."""
    return AnthropicServer().decode_request(
        AnthropicMessages().encode(request(*messages, **fields))
    )


def call(number, arguments="{}", name="terminal"):
    return ToolCall(id=f"toolu_{number}", name=name, arguments=arguments)


def result(number, content="out"):
    return ToolMessage(tool_call_id=f"toolu_{number}", name="terminal", content=content)


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
HIDDEN = {"type": "redacted_thinking", "data": "b3BhcXVl"}
HISTORY = (
    SystemMessage(content="Be brief."),
    UserMessage(content="Look."),
    AssistantMessage(
        content="I look.",
        reasoning_content="hm",
        tool_calls=(call(1, '{"command":"ls"}'), call(2)),
        reasoning_details=[THOUGHT, HIDDEN],
    ),
    result(1),
    result(2, ""),
)


def through(body, headers=None, on_delta=None):
    """An answer, read by the client's decoder."""
    return decode(body, headers or JSON, mode="anthropic_messages", on_delta=on_delta)


def event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def stream(*events, stop="end_turn", usage=None):
    start = {"id": "msg_1", "model": "m", "usage": {"input_tokens": 5, "output_tokens": 1}}
    return b"".join(
        (
            event("message_start", message=start),
            *events,
            event(
                "message_delta",
                delta={"stop_reason": stop},
                usage={"output_tokens": 9} if usage is None else usage,
            ),
            event("message_stop"),
        )
    )


def block(index, start, *deltas):
    return b"".join(
        (
            event("content_block_start", index=index, content_block=start),
            *(event("content_block_delta", index=index, delta=d) for d in deltas),
            event("content_block_stop", index=index),
        )
    )
