"""The dialect chat_completions: what goes out, and what comes back from servers of many habits."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.messages import (
    AssistantMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models import Conversation, ModelRequest, Sampling
from hermes_rl.models.providers import quirks_at
from hermes_rl.models.wire import ChatCompletions, EventReader, Responses

few = settings(deadline=None, max_examples=40)


def request(*messages, **fields):
    return ModelRequest(model="m", conversation=Conversation(messages), call_id="c", **fields)


# Requests


def test_exact_arguments_go_back():
    message = AssistantMessage(tool_calls=(ToolCall(id="1", name="t", arguments='{"a" :1}'),))
    (form,) = json.loads(ChatCompletions().encode(request(message, exact=True)))["messages"]
    assert form["tool_calls"][0]["function"]["arguments"] == '{"a" :1}'
    assert form["content"] == ""


@pytest.mark.parametrize(("host", "field"), [("", None), ("api.deepseek.com", "reasoning_content")])
def test_reasoning_goes_back_only_where_it_is_wanted(host, field):
    message = AssistantMessage(content="4", reasoning_content="2 and 2")
    (form,) = json.loads(ChatCompletions(quirks_at(host)).encode(request(message)))["messages"]
    assert form == {"role": "assistant", "content": "4", **({field: "2 and 2"} if field else {})}


@pytest.mark.parametrize(("host", "sent"), [("api.deepseek.com", " "), ("127.0.0.1:1", None)])
def test_calls_of_a_model_that_did_not_think_are_taken_where_thoughts_are_wanted(host, sent):
    call = ToolCall(id="call_1", name="t", arguments="{}")
    answers = [AssistantMessage(tool_calls=(call,)), AssistantMessage(content="so")]
    result = ToolMessage(tool_call_id="call_1", name="t", content="out")
    call = request(UserMessage(content="hi"), answers[0], result, answers[1])
    _, called, _, said = json.loads(ChatCompletions(quirks_at(host)).encode(call))["messages"]
    assert called.get("reasoning_content") == sent
    assert "reasoning_content" not in said
    # The same conversation goes to another provider as ever.
    assert b"reasoning_content" not in ChatCompletions(quirks_at("api.openai.com")).encode(call)


@pytest.mark.parametrize(
    ("speaks", "most"),
    [
        (ChatCompletions(quirks_at("api.openai.com")), 40),
        (ChatCompletions(quirks_at("mine.openai.azure.com")), 40),
        (ChatCompletions(quirks_at("127.0.0.1:1")), None),
        (Responses(quirks_at("api.openai.com")), 64),
    ],
)
def test_ids_of_other_servers_are_as_long_as_a_provider_takes_them(speaks, most):
    """vLLM gives `chatcmpl-tool-` and 32 digits."""
    for chars in (40, 46, 64, 65):
        given = "x" * chars
        call = ToolCall(id=given, name="t", arguments="{}")
        result = ToolMessage(tool_call_id=given, name="t", content="out")
        call = request(UserMessage(content="hi"), AssistantMessage(tool_calls=(call,)), result)
        body = json.loads(speaks.encode(call))
        if speaks.name == "codex_responses":
            ids = [item["call_id"] for item in body["input"][1:]]
        else:
            _, called, answer = body["messages"]
            ids = [called["tool_calls"][0]["id"], answer["tool_call_id"]]
        assert ids[0] == ids[1]
        if most is None or chars <= most:
            assert ids[0] == given
        else:
            assert len(ids[0]) <= 40


def test_the_output_cap_has_another_name_at_openai():
    call = request(sampling=Sampling(max_tokens=9))
    assert (
        json.loads(ChatCompletions(quirks_at("api.openai.com")).encode(call))[
            "max_completion_tokens"
        ]
        == 9
    )
    assert json.loads(ChatCompletions(quirks_at("127.0.0.1:1")).encode(call))["max_tokens"] == 9


def test_half_characters_do_not_stop_a_request():
    call = request(UserMessage(content="cut \ud83d here"))
    (form,) = json.loads(ChatCompletions().encode(call))["messages"]
    assert form["content"] == "cut \ufffd here"


def test_what_the_head_says(kit):
    headers = {**kit.JSON, "x-ratelimit-remaining-tokens": "17", "retry-after": "1", "server": "x"}
    answer = kit.decode(kit.answer_with({"content": "a"}, model="m-2026"), headers)
    assert answer.request_id == "r-1"
    assert answer.rate_limit == {"x-ratelimit-remaining-tokens": "17", "retry-after": "1"}
    assert answer.served_model == "m-2026"
    without = kit.decode(kit.answer_with({"content": "a"}), {"content-type": "application/json"})
    assert without.request_id == "x"


@pytest.mark.parametrize(
    ("kind", "call"), [("SSE", False), ("JSON", True), (None, True), (None, False)]
)
def test_the_content_type_decides_what_an_answer_is(kit, kind, call):
    streamed = kind == "SSE" or (call and kind is None)
    body = kit.stream_of({"content": "hi"}) if streamed else kit.answer_with({"content": "hi"})
    headers = {} if kind is None else getattr(kit, kind)
    assert kit.decode(body, headers, stream=call).message.content == "hi"


# Server-sent events


@few
@given(
    st.lists(st.text(alphabet="ab é:", min_size=1, max_size=9), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.integers(1, 7),
)
def test_events_survive_any_cut(data, newline, size):
    lines = [f": comment{newline}event: x{newline}data: {d}{newline}{newline}" for d in data]
    stream = "".join(lines).encode()
    reader, got = EventReader(), []
    for i in range(0, len(stream), size):
        got += reader.feed(stream[i : i + size])
    got += reader.close()
    assert [g.decode() for g in got] == data


def test_data_lines_of_one_event_are_joined():
    assert EventReader().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]
