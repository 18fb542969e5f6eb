"""The dialect anthropic_messages: what comes back."""

import json

import pytest
from messages_kit import HIDDEN, SSE, THOUGHT, block, body_of, event, result, stream, through

from hermes_rl.messages import (
    AssistantMessage,
    UserMessage,
)
from hermes_rl.usage import Usage

# Answers


def test_thinking_between_texts_goes_back_to_its_place():
    whole = [
        {"type": "text", "text": "First. "},
        THOUGHT,
        {"type": "text", "text": "Then."},
        {"type": "tool_use", "id": "toolu_1", "name": "terminal", "input": {"a": 1}},
        HIDDEN,
        {"type": "tool_use", "id": "toolu_2", "name": "terminal", "input": {}},
    ]
    body = json.dumps({"content": whole, "stop_reason": "tool_use"}).encode()
    answer = through(body)
    assert answer.message.content == "First. Then."
    history = UserMessage(content="u"), answer.message, result(1), result(2)
    assert body_of(*history)["messages"][1]["content"] == whole


def test_arguments_keep_their_spelling():
    raw = b'{"content":[{"type":"tool_use","id":"t","name":"n","input":{"b" : 1,"a":[ ]}}]}'
    assert through(raw).message.tool_calls[0].arguments == '{"b" : 1,"a":[ ]}'
    parts = ['{"b" :', " 1}"]
    deltas = [{"type": "input_json_delta", "partial_json": p} for p in parts]
    data = stream(block(0, {"type": "tool_use", "id": "t", "name": "n", "input": {}}, *deltas))
    assert through(data, SSE).message.tool_calls[0].arguments == '{"b" : 1}'


@pytest.mark.parametrize(("given_", "text_"), [({}, "{}"), ({"a": 1}, '{"a":1}')])
def test_a_call_that_does_not_grow(given_, text_):
    data = stream(block(0, {"type": "tool_use", "id": "t", "name": "n", "input": given_}))
    assert through(data, SSE).message.tool_calls[0].arguments == text_


STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "refusal",
    "pause_turn": "pause_turn",
    "new_one": "new_one",
}


@pytest.mark.parametrize(("told", "reason"), STOPS.items())
def test_stop_reasons(told, reason):
    assert (
        through(json.dumps({"content": [], "stop_reason": told}).encode()).finish_reason == reason
    )
    assert through(stream(stop=told), SSE).finish_reason == reason


def test_a_refusal_without_words_says_why():
    details = {"type": "refusal", "category": "cyber", "explanation": "Not that."}
    form = {"content": [], "stop_reason": "refusal", "stop_details": details}
    assert through(json.dumps(form).encode()).message.content == "Not that."
    end = {"stop_reason": "refusal", "stop_details": details}
    data = event("message_delta", delta=end, usage={}) + event("message_stop")
    assert through(data, SSE).message.content == "Not that."


def test_usage_counts_the_cache_once():
    usage = {
        "input_tokens": 3,
        "cache_read_input_tokens": 100,
        "cache_creation_input_tokens": 20,
        "cache_creation": {"ephemeral_5m_input_tokens": 15, "ephemeral_1h_input_tokens": 5},
        "output_tokens": 50,
        "output_tokens_details": {"thinking_tokens": 40},
        "service_tier": "standard",
    }
    answer = through(json.dumps({"content": [], "usage": usage}).encode())
    assert answer.usage == Usage(
        input_tokens=123,
        cache_read_tokens=100,
        cache_write_tokens=20,
        cache_write_1h_tokens=5,
        output_tokens=50,
        reasoning_tokens=40,
    )
    assert json.loads(answer.usage_raw) == usage


def test_usage_of_a_stream_is_a_running_total():
    start = {"input_tokens": 3, "cache_read_input_tokens": 7, "output_tokens": 1}
    data = b"".join(
        (
            event("message_start", message={"usage": start}),
            event("message_delta", delta={}, usage={"output_tokens": 4, "input_tokens": None}),
            event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 9}),
            event("message_stop"),
        )
    )
    usage = through(data, SSE).usage
    assert (usage.input_tokens, usage.cache_read_tokens, usage.output_tokens) == (10, 7, 9)


@pytest.mark.parametrize("usage", [{}, {"input_tokens": 4}])
def test_half_a_usage_is_none(usage):
    answer = through(stream(usage=usage), SSE)
    assert answer.usage is None
    assert through(json.dumps({"content": [], "usage": usage}).encode()).usage is None


def test_what_is_of_no_interest():
    odd = b"".join(
        (
            event("ping"),
            b": keep-alive\n\n",
            event("new_event", anything=1),
            block(0, {"type": "server_tool_use", "id": "s", "name": "web", "input": {}}),
            event("content_block_delta", index=1, delta={"type": "text_delta", "text": "hi"}),
            b"data: [DONE]\n\n",
        )
    )
    assert through(stream(odd), SSE).message == AssistantMessage(content="hi")


BAD_CALL = (
    b'{"content":[{"type":"tool_use","id":"c","name":"n","input":{"k":"a\xffb"}}],'
    b'"stop_reason":"tool_use"}'
)


def test_a_bad_byte_does_not_lose_a_call():
    assert through(BAD_CALL).message.tool_calls[0].arguments == '{"k":"a\ufffdb"}'


def test_a_call_whose_input_is_null_has_no_arguments():
    body = {"content": [{"type": "tool_use", "id": "c", "name": "n", "input": None}]}
    assert through(json.dumps(body).encode()).message.tool_calls[0].arguments == "{}"


def test_content_that_is_a_text_is_one():
    body = {"content": "hello", "stop_reason": "end_turn"}
    assert through(json.dumps(body).encode()).message.content == "hello"


def test_a_stream_without_a_last_count_is_not_billed_by_its_first():
    assert through(stream(usage={"output_tokens": None}), SSE).usage is None


def test_running_totals_never_fall():
    usage = through(stream(usage={"input_tokens": 0, "output_tokens": 9}), SSE).usage
    assert (usage.input_tokens, usage.output_tokens) == (5, 9)
