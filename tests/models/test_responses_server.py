"""codex_responses, the server's side: what it reads from other clients, and what it refuses."""

import json

import pytest

from hermes_rl.messages import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.testing import ResponsesServer


def test_what_a_server_reads_from_other_clients():
    body = {
        "model": "m",
        "input": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "a"},
            {"type": "function_call", "call_id": "1", "name": "t", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1",
             "output": [{"type": "input_text", "text": "out"}]},
        ],
    }  # fmt: skip
    read = ResponsesServer().decode_request(json.dumps(body).encode())
    assert list(read.messages) == [
        SystemMessage(content="d"),
        UserMessage(content="hi"),
        AssistantMessage(content="a", tool_calls=(ToolCall(id="1", name="t", arguments="{}"),)),
        ToolMessage(tool_call_id="1", name="t", content="out"),
    ]
    for wrong in ([{"type": "item_reference", "id": "x"}], [{"role": "tool"}], None, 3):
        with pytest.raises(ValueError):
            ResponsesServer().decode_request(json.dumps({"model": "m", "input": wrong}).encode())


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([{"type": "function_call", "call_id": "1", "name": "t", "arguments": "{}"}],
         "No tool output found for function call 1."),
        ([{"type": "function_call_output", "call_id": "1", "output": ""}],
         "No tool call found for function call output with call_id 1."),
        ([{"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": "x"}],
         "Item 'rs_1' of type 'reasoning' was provided without its required following item."),
        ([{"type": "reasoning", "id": "rs_2", "summary": []}],
         "Item 'rs_2' of type 'reasoning' was provided without its required following item."),
    ],
)  # fmt: skip
def test_what_the_api_refuses_is_refused_here_too(items, complaint):
    body = json.dumps({"model": "m", "input": items}).encode()
    with pytest.raises(ValueError, match=complaint.replace(".", r"\.")):
        ResponsesServer().decode_request(body)
