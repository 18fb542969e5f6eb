"""The dialect codex_responses: what goes out, and what comes back through the other side."""

import json
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from hermes_rl.messages import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.models.base import Completion, Conversation, ModelRequest, Sampling
from hermes_rl.models.prepare import prepare
from hermes_rl.models.providers.table import quirks_at
from hermes_rl.models.wire.base import ReplyHead
from hermes_rl.models.wire.responses import Responses
from hermes_rl.testing.dialects.responses import ResponsesServer
from hermes_rl.usage import Usage

few = settings(deadline=None, max_examples=40)
unshrunk = settings(few, phases=[Phase.explicit, Phase.generate])
"""Shrinking takes minutes where each example goes through the official package's types."""
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)
said = text.filter(lambda t: "think>" not in t)
words = text.filter(lambda t: t.strip() and "think>" not in t)
arguments = st.dictionaries(text, st.integers(-9, 9) | text, max_size=2).map(json.dumps)
reasoning_items = st.builds(
    lambda number, summary, encrypted: {
        "type": "reasoning",
        "id": f"rs_{number}",
        "summary": [{"type": "summary_text", "text": t} for t in summary],
        "encrypted_content": encrypted,
    },
    st.integers(0, 9),
    st.lists(words, max_size=2),
    words,
)
users = st.builds(UserMessage, content=text)


@st.composite
def assistants(draw):
    """What a response can hold: reasoning items whose summaries are the reasoning text."""
    details = draw(st.lists(reasoning_items, max_size=2))
    summaries = [part["text"] for item in details for part in item["summary"]]
    loose = draw(st.none() | words)
    ids = draw(st.lists(st.integers(0, 99), max_size=3, unique=True))
    calls = tuple(
        ToolCall(id=f"call_{i}", name=draw(words), arguments=draw(arguments)) for i in ids
    )
    return AssistantMessage(
        content=draw(said if calls else words),
        reasoning_content="\n\n".join(summaries) or loose,
        tool_calls=calls,
        reasoning_details=details or None,
    )


@st.composite
def histories(draw):
    out = [SystemMessage(content=draw(text))] if draw(st.booleans()) else []
    out.append(draw(users))
    for _ in range(draw(st.integers(0, 3))):
        answer = draw(assistants())
        out.append(answer)
        for call in answer.tool_calls:
            out.append(ToolMessage(tool_call_id=call.id, name=call.name, content=draw(text)))
        if not answer.tool_calls or draw(st.booleans()):
            out.append(draw(users))
    return out


counts = st.integers(0, 10**9)


@st.composite
def usages(draw):
    prompt, output = draw(counts), draw(counts)
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=draw(st.integers(0, prompt)),
        cache_write_tokens=draw(st.integers(0, prompt)),
        output_tokens=output,
        reasoning_tokens=draw(st.integers(0, output)),
    )


@st.composite
def completions(draw):
    message = draw(assistants())
    natural = "tool_calls" if message.tool_calls else "stop"
    return Completion(
        message=message,
        finish_reason=draw(st.sampled_from([natural, "length", "content_filter", "abort"])),
        usage=draw(usages()),
        served_model=draw(words),
        policy_version=draw(st.none() | words),
    )


@lru_cache
def official_body():
    return TypeAdapter(ResponseCreateParamsNonStreaming)


def request(*messages, **fields):
    return ModelRequest(model="m", conversation=Conversation(messages), call_id="c", **fields)


def body_of(asked):
    return json.loads(Responses().encode(asked))


def decode(pieces, stream):
    kind = "text/event-stream" if stream else "application/json"
    asked = request(UserMessage(content="x"), stream=stream)
    decoder = Responses().decoder(asked, ReplyHead({"content-type": kind}))
    for piece in pieces:
        decoder.feed(piece)
    return decoder.finish()


def same(got, sent):
    """Equal but for what only the receiver knows, and the reasoning that is text alone: the wire
    holds it as an item of its own, which nobody could replay."""
    known = {"usage_raw": None, "request_id": None, "first_byte_s": None, "rate_limit": {}}
    assert replace(got, **known) == replace(sent, **known)


# Requests


@few
@given(histories(), st.booleans())
def test_a_server_reads_the_messages_that_were_sent(sent, exact):
    read = ResponsesServer().decode_request(Responses().encode(request(*sent, exact=exact)))
    expected = []
    for message in sent if exact else prepare(sent):
        if isinstance(message, AssistantMessage):
            details = message.reasoning_details or []
            summaries = [part["text"] for item in details for part in item["summary"]]
            message = AssistantMessage(  # reasoning that is text alone is not replayed
                content=message.content,
                reasoning_content="\n\n".join(summaries) or None,
                tool_calls=message.tool_calls,
                reasoning_details=message.reasoning_details,
            )
        expected.append(message)
    assert list(read.messages) == expected


@unshrunk
@given(histories())
def test_the_official_package_knows_the_form_of_every_body(sent):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    seen = UserMessage(content=[{"type": "text", "text": "see"}, image])
    tool = {"name": "t", "description": "d", "parameters": {"type": "object"}}
    asked = request(
        *sent,
        seen,
        tools=({"type": "function", "function": tool},),
        sampling=Sampling(temperature=0.5, top_p=0.5, max_tokens=9, reasoning="low"),
        logprobs=True,
    )
    official_body().validate_json(Responses().encode(asked))


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
    answer = decode([json.dumps(form).encode()], False)
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
    again = decode([ResponsesServer().encode_answer(answer, answer_id="resp_x")], False)
    assert again.message.reasoning_details == message.reasoning_details
    assert again.message.content == message.content


def test_notes_that_no_longer_fit_are_left_out():
    form = {"id": "r", "status": "completed", "model": "m", "output": COMMENTED}
    message = decode([json.dumps(form).encode()], False).message
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


# Answers: the other side's encoder through our decoder


@few
@given(completions())
def test_a_body_comes_back_as_it_was(sent):
    body = ResponsesServer().encode_answer(sent, answer_id="resp_1")
    same(decode([body], False), sent)


@few
@given(completions(), st.integers(1, 60), st.integers(1, 30))
def test_a_stream_comes_back_as_it_was(sent, cut, piece_chars):
    server = ResponsesServer(piece_chars=piece_chars)
    data = b"".join(server.encode_stream(sent, answer_id="resp_1"))
    same(decode([data[i : i + cut] for i in range(0, len(data), cut)], True), sent)


@unshrunk
@given(completions())
def test_the_official_package_knows_the_form_of_every_answer(sent):
    known = replace(sent, finish_reason="length") if sent.finish_reason == "abort" else sent
    body = ResponsesServer().encode_answer(known, answer_id="resp_1")
    read = Response.model_validate_json(body, strict=True)
    assert read.usage.input_tokens == sent.usage.input_tokens
    calls = [item for item in read.output if item.type == "function_call"]
    assert [c.call_id for c in calls] == [c.id for c in sent.message.tool_calls]


def test_a_refusal_is_a_part_of_its_own():
    sent = Completion(message=AssistantMessage(content="No."), finish_reason="refusal", usage=None)
    body = ResponsesServer().encode_answer(sent, answer_id="resp_1")
    (item,) = json.loads(body)["output"]
    assert item["content"] == [{"type": "refusal", "refusal": "No."}]
    same(decode([body], False), sent)
    same(decode(ResponsesServer().encode_stream(sent, answer_id="resp_1"), True), sent)


unfit = st.lists(
    assistants()
    | users
    | st.builds(ToolMessage, tool_call_id=st.sampled_from(["call_1", "x"]), name=text, content=text)
    | st.builds(AssistantMessage, reasoning_content=text, reasoning_details=st.just(COMMENTED[:1])),
    max_size=6,
)


@few
@given(unfit)
def test_histories_of_any_shape_are_sent_in_a_form_that_it_takes(sent):
    ResponsesServer().decode_request(Responses().encode(request(*sent)))
