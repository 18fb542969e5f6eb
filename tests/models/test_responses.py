"""The dialect codex_responses: what goes out, and what comes back through the other side."""

import json
from dataclasses import replace

import pytest
from wire_kit import decode

from hermes_rl.messages import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.models import Completion, Conversation, ModelRequest, Sampling
from hermes_rl.models.providers import quirks_at
from hermes_rl.models.wire import Responses
from hermes_rl.testing import ResponsesServer

MODE = "codex_responses"


def request(*messages, **fields):
    return ModelRequest(model="m", conversation=Conversation(messages), call_id="c", **fields)


def body_of(asked):
    return json.loads(Responses().encode(asked))


# Requests


def test_parameters_and_tools():
    tool = {"name": "t", "parameters": {"type": "object", "properties": {"a": {"pattern": "^a"}}}}
    asked = request(
        SystemMessage(content="be brief"),
        UserMessage(content="hi"),
        tools=({"type": "function", "function": tool},),
        sampling=Sampling(temperature=0.0, max_tokens=9, reasoning="high"),
        stream=True,
        extra={"service_tier": "flex"},
        ephemeral="today",
    )
    body = body_of(asked)
    assert body.pop("input") == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    ]
    assert body.pop("tools") == [{"type": "function", "strict": False, **tool}]
    assert body == {
        "model": "m",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "stream": True,
        "temperature": 0.0,
        "max_output_tokens": 9,
        "reasoning": {"effort": "high", "summary": "auto"},
        "service_tier": "flex",
        "instructions": "be brief\n\ntoday",
    }
    (plain,) = body_of(replace(asked, adaptations=frozenset({"no_grammar"})))["tools"]
    assert plain["parameters"]["properties"] == {"a": {}}
    read = ResponsesServer().decode_request(Responses().encode(asked))
    assert read.tools == asked.tools
    assert read.sampling == asked.sampling
    assert read.stream is True


def test_sampling_that_means_nothing_is_not_sent_where_it_is_refused():
    asked = request(UserMessage(content="hi"), sampling=Sampling(top_k=-1))
    assert "top_k" not in json.loads(Responses(quirks_at("api.openai.com")).encode(asked))
    assert json.loads(Responses(quirks_at("127.0.0.1:8000")).encode(asked))["top_k"] == -1


def test_all_kinds_of_items():
    block = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "opaque",
             "status": None}  # fmt: skip
    foreign = {"type": "thinking", "thinking": "t", "signature": "s"}
    loose = {"type": "reasoning", "id": "rs_2", "summary": []}
    answer = AssistantMessage(
        content="look",
        tool_calls=(ToolCall(id="call_1", name="t", arguments='{"b":1, "a":2}'),),
        reasoning_details=[foreign, block, loose],
    )
    result = ToolMessage(tool_call_id="call_1", name="t", content="out")
    asked = request(UserMessage(content="hi"), answer, result)
    reasoning, message, call, output = body_of(asked)["input"][1:]
    assert reasoning == {
        "type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "opaque"
    }  # fmt: skip
    assert message == {"type": "message", "role": "assistant", "content": "look"}
    assert call == {
        "type": "function_call", "call_id": "call_1", "name": "t", "arguments": '{"a":2,"b":1}'
    }  # fmt: skip
    assert output == {"type": "function_call_output", "call_id": "call_1", "output": "out"}
    exact = body_of(replace(asked, exact=True))["input"][3]
    assert exact["arguments"] == '{"b":1, "a":2}'
    without = body_of(replace(asked, adaptations=frozenset({"no_encrypted_reasoning"})))
    assert "include" not in without
    assert [item["type"] for item in without["input"]] == [
        "message", "message", "function_call", "function_call_output"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "sent"),
    [
        (
            {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
            {"type": "input_image", "image_url": "u", "detail": "low"},
        ),
        (
            {"type": "image_url", "image_url": "u"},
            {"type": "input_image", "image_url": "u", "detail": "auto"},
        ),
        (
            {"type": "file", "file": {"filename": "a", "file_data": "d"}},
            {"type": "input_file", "filename": "a", "file_data": "d"},
        ),
        ({"type": "input_text", "text": "t"}, {"type": "input_text", "text": "t"}),
    ],
)
def test_parts_of_a_user_message(part, sent):
    (item,) = body_of(request(UserMessage(content=[part])))["input"]
    assert item["content"] == [sent]


# Items in another order than ours


COMMENTED = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "a"},
    {"type": "message", "role": "assistant", "phase": "commentary",
     "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "1", "name": "t", "arguments": "{}"},
    {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "b"},
    {"type": "function_call", "call_id": "2", "name": "t", "arguments": "{}"},
    {"type": "message", "role": "assistant", "phase": "final_answer",
     "content": [{"type": "output_text", "text": "Done."}]},
]  # fmt: skip


def test_items_go_back_in_the_order_in_which_they_came():
    form = {"id": "r", "status": "completed", "model": "m", "output": COMMENTED}
    answer = decode(json.dumps(form).encode(), mode=MODE)
    message = answer.message
    assert message.content == "I look.\n\nDone."
    assert [c.id for c in message.tool_calls] == ["1", "2"]
    results = [ToolMessage(tool_call_id=i, name="t", content="") for i in "12"]
    sent = body_of(request(UserMessage(content="hi"), message, *results))["input"]
    plain = [
        {**item, "content": item["content"][0]["text"]} if "content" in item else item
        for item in COMMENTED
    ]
    assert sent[1:-2] == plain
    again = decode(ResponsesServer().encode_answer(answer, answer_id="resp_x"), mode=MODE)
    assert again.message.reasoning_details == message.reasoning_details
    assert again.message.content == message.content


def test_notes_that_no_longer_fit_are_left_out():
    form = {"id": "r", "status": "completed", "model": "m", "output": COMMENTED}
    message = decode(json.dumps(form).encode(), mode=MODE).message
    for changed in (
        AssistantMessage(content="Other.", tool_calls=message.tool_calls,
                         reasoning_details=message.reasoning_details),
        AssistantMessage(content=message.content, tool_calls=message.tool_calls[:1],
                         reasoning_details=message.reasoning_details),
    ):  # fmt: skip
        items = body_of(request(UserMessage(content="hi"), changed, exact=True))["input"][1:]
        kinds = [item["type"] for item in items]
        assert kinds[:3] == ["reasoning", "reasoning", "message"]
        assert kinds[3:] == ["function_call"] * len(changed.tool_calls)


def test_a_refusal_is_a_part_of_its_own():
    sent = Completion(message=AssistantMessage(content="No."), finish_reason="refusal", usage=None)
    body = ResponsesServer().encode_answer(sent, answer_id="resp_1")
    (item,) = json.loads(body)["output"]
    assert item["content"] == [{"type": "refusal", "refusal": "No."}]
    events = b"".join(ResponsesServer().encode_stream(sent, answer_id="resp_1"))
    for data, stream in ((body, False), (events, True)):
        got = decode(data, mode=MODE, stream=stream)
        assert (got.message, got.finish_reason) == (sent.message, "refusal")
