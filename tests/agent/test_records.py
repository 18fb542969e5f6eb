"""What a run records, and that it costs little."""

import time
from typing import Any

from hermes_rl.agent import Limits
from hermes_rl.events import CallStarted, MessageAdded, ToolsOffered
from hermes_rl.messages import AssistantMessage, ToolCall, UserMessage
from hermes_rl.models import Completion, ModelRequest
from hermes_rl.tools import Tool, ToolContext, ToolResult
from hermes_rl.usage import Usage


async def test_the_fold_of_a_run_is_its_row(rig: Any) -> None:
    ran = await rig.play({"run": "echo 1", "text": "Look.", "reasoning": "hm"}, "done")
    row = ran.row()
    assert (row.status, row.end_reason, row.turns) == ("ok", "answered", 2)
    assert row.final_response == ran.result.final_response == "done"
    assert [i.role for i in row.message_info] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row.tool_call_count == 1
    assert row.usage.unknown_calls == 0
    served = [(e.call_id, e.prompt_tokens) for e in rig.server.entries]
    assert [(c.call_id, c.input_tokens) for c in row.calls] == served


async def test_events_come_in_the_order_of_happening(rig: Any) -> None:
    ran = await rig.play({"run": "echo 1"}, "done")
    kinds = [type(e).__name__ for e in ran.log.events]
    assert kinds == [
        "ToolsOffered",
        "MessageAdded",
        "MessageAdded",
        "CallStarted",
        "CallEnded",
        "MessageAdded",
        "MessageAdded",
        "CallStarted",
        "CallEnded",
        "MessageAdded",
    ]
    offered = ran.log.events[0]
    assert isinstance(offered, ToolsOffered)
    assert offered.tools[0]["function"]["name"] == "terminal"


async def test_a_listener_sees_each_event_before_the_run_goes_on(rig: Any) -> None:
    seen: list[int] = []

    def listener(event: Any) -> None:
        if isinstance(event, CallStarted):
            seen.append(rig.server.requests)

    rig.listener = listener
    await rig.play({"run": "true"}, "done")
    assert seen == [0, 1]


async def test_streaming_gives_pieces_and_the_same_answer(rig: Any) -> None:
    pieces: list[str] = []
    ran = await rig.play("A whole answer in pieces.", stream=True, on_delta=pieces.append)
    assert "".join(pieces) == ran.result.final_response == "A whole answer in pieces."


class Scripted:
    """A caller without a wire: plays calls for some turns."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.requests: set[int] = set()

    async def call(self, request: ModelRequest, *, turn: int, **_: Any) -> Completion:
        self.requests.add(id(request.tools))
        calls = (ToolCall(id=f"c{turn}", name="x", arguments='{"command": "echo hi"}'),)
        message = AssistantMessage(content="done")
        if turn <= self.turns:
            message = AssistantMessage(tool_calls=calls)
        return Completion(message=message, finish_reason="stop", usage=Usage(input_tokens=1))


async def test_the_loop_itself_costs_little(rig: Any) -> None:
    async def handler(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult(args["command"])

    schema = {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
    }
    tools = {"x": Tool("x", "", schema, handler, "x", needs_sandbox=False)}

    async def cpu(turns: int) -> float:
        caller = Scripted(turns)
        limits = Limits(max_turns=None)
        policy = rig.parts().policy.__class__("plain")
        before = time.process_time()
        parts = {"caller": caller, "tools": tools, "limits": limits, "policy": policy}
        ran = await rig.run([UserMessage(content="x")], **parts)
        assert ran.result.turns == turns + 1
        assert len(caller.requests) == 1  # the schemas are one object throughout
        return time.process_time() - before

    await cpu(10)
    # Marginal cost per turn, best of three; the bar is 0.2 ms, far above what it takes.
    costs = [(await cpu(2100) - await cpu(100)) / 2000 for _ in range(3)]
    assert min(costs) < 0.0002


async def test_every_message_of_the_conversation_is_recorded(rig: Any) -> None:
    ran = await rig.play({"run": "echo 1"}, {"run": "echo 2"}, limits=Limits(max_turns=2))
    recorded = [e.message for e in ran.log.events if isinstance(e, MessageAdded)]
    assert recorded == ran.result.messages
