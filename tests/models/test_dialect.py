"""The dialect chat_completions: what goes out, and what comes back from servers of many habits."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl import errors as e
from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.models.base import Completion, Conversation, ModelRequest, Sampling, TokenCapture
from hermes_rl.models.dialects.base import ReplyHead
from hermes_rl.models.dialects.chat_completions import TAIL, ChatCompletions, encode_message
from hermes_rl.models.dialects.chat_server import (
    decode_message,
    decode_request,
    encode_answer,
    encode_stream,
)
from hermes_rl.models.dialects.sse import EventReader, event
from hermes_rl.usage import Usage

JSON = {"content-type": "application/json", "x-request-id": "r-1"}
SSE = {"content-type": "text/event-stream; charset=utf-8"}

few = settings(deadline=None, max_examples=40)
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
arguments = text | st.dictionaries(text, json_values, max_size=3).map(json.dumps)
calls = st.lists(
    st.builds(ToolCall, id=text.filter(bool), name=text, arguments=arguments),
    max_size=3,
    unique_by=lambda call: call.id,
).map(tuple)
plain = text.filter(lambda t: "think>" not in t)
assistants = st.builds(
    AssistantMessage,
    content=plain,
    reasoning_content=st.none() | text.filter(bool),
    tool_calls=calls,
    reasoning_details=st.none() | st.lists(json_values.filter(bool), min_size=1, max_size=2),
)
messages = st.lists(
    st.builds(UserMessage, content=text)
    | assistants
    | st.builds(ToolMessage, tool_call_id=text, name=text, content=text),
    max_size=8,
)
counts = st.integers(0, 10**9)


@st.composite
def usages(draw):
    prompt, output = draw(counts), draw(counts)
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=draw(st.none() | st.integers(0, prompt)),
        cache_write_tokens=draw(st.none() | st.integers(0, prompt)),
        output_tokens=output,
        reasoning_tokens=draw(st.none() | st.integers(0, output)),
    )


captures = st.none() | st.builds(
    TokenCapture,
    prompt_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=5).map(tuple),
    completion_ids=st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
    logprobs=st.lists(st.floats(-50, 0), max_size=5).map(tuple),
    logprobs_kind=st.sampled_from(["sampling", "raw", "constrained", "unknown"]),
)
completions = st.builds(
    Completion,
    message=assistants,
    finish_reason=st.sampled_from(["stop", "length", "tool_calls", "content_filter"]),
    usage=usages(),
    served_model=text,
    policy_version=st.none() | text.filter(bool),
    tokens=captures,
)


def decode(body, headers=JSON, turn=1, pieces=None, **fields):
    """An answer through the client's decoder."""
    asked = request(*[UserMessage(content="x")] * turn, **fields)
    decoder = ChatCompletions(secrets=("sk-secret-key",)).decoder(asked, ReplyHead(headers, 0.1))
    for piece in pieces or [body]:
        decoder.feed(piece)
    return decoder.finish()


def request(*messages, **fields):
    return ModelRequest(model="m", conversation=Conversation(messages), call_id="c", **fields)


def answer_with(message, **fields):
    return json.dumps({"id": "x", "choices": [{"message": message}], **fields}).encode()


def stream_of(*deltas, finish="stop", done=True):
    chunks = [{"choices": [{"index": 0, "delta": d}]} for d in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    events = [event(json.dumps(c).encode()) for c in chunks]
    return b"".join(events) + (event(b"[DONE]") if done else b"")


def same(got, sent):
    """Equal but for what only the receiver knows."""
    known = {"usage_raw": None, "request_id": None, "first_byte_s": None, "rate_limit": {}}
    assert replace(got, **known) == replace(sent, **known)


# Requests


@few
@given(messages, st.lists(messages, max_size=3), st.booleans())
def test_each_body_extends_the_last_one(first, later, with_tools):
    dialect = ChatCompletions()
    tools = ({"type": "function", "function": {"name": "t"}},) if with_tools else ()
    asked = request(SystemMessage(content="s"), *first, tools=tools, sampling=Sampling(seed=1))
    body = dialect.encode(asked)
    for added in later:
        for message in added:
            asked.conversation.append(message)
        longer = dialect.encode(asked)
        assert longer.startswith(body[: -len(TAIL)])
        json.loads(longer)
        assert dialect.bound(asked) <= len(longer)
        body = longer


@few
@given(messages)
def test_a_server_reads_the_messages_that_were_sent(sent):
    read = decode_request(ChatCompletions().encode(request(*sent)))
    got = [decode_message(form) for form in read.messages]
    expected = [
        AssistantMessage(
            content=m.content, tool_calls=m.tool_calls, reasoning_details=m.reasoning_details
        )
        if isinstance(m, AssistantMessage)
        else m
        for m in sent
    ]
    assert got == expected


def test_history_is_encoded_once():
    asked = request(*[UserMessage(content=str(i)) for i in range(3)])
    dialect = ChatCompletions()
    dialect.encode(asked)
    before = asked.conversation.wire("chat_completions", encode_message)[:]
    asked.conversation.append(UserMessage(content="new"))
    dialect.encode(asked)
    after = asked.conversation.wire("chat_completions", encode_message)
    assert all(a is b for a, b in zip(before, after, strict=False))


def test_exact_arguments_go_back():
    message = AssistantMessage(tool_calls=(ToolCall(id="1", name="t", arguments='{"a" :1}'),))
    (form,) = json.loads(ChatCompletions().encode(request(message)))["messages"]
    assert form["tool_calls"][0]["function"]["arguments"] == '{"a" :1}'
    assert form["content"] == ""


@pytest.mark.parametrize(("host", "field"), [("", None), ("api.deepseek.com", "reasoning_content")])
def test_reasoning_goes_back_only_where_it_is_wanted(host, field):
    message = AssistantMessage(content="4", reasoning_content="2 and 2")
    (form,) = json.loads(ChatCompletions(host).encode(request(message)))["messages"]
    assert form == {"role": "assistant", "content": "4", **({field: "2 and 2"} if field else {})}


def test_the_output_cap_has_another_name_at_openai():
    asked = request(sampling=Sampling(max_tokens=9))
    assert json.loads(ChatCompletions("api.openai.com").encode(asked))["max_completion_tokens"] == 9
    assert json.loads(ChatCompletions("127.0.0.1:1").encode(asked))["max_tokens"] == 9


def test_half_characters_do_not_stop_a_request():
    asked = request(UserMessage(content="cut \ud83d here"))
    (form,) = json.loads(ChatCompletions().encode(asked))["messages"]
    assert form["content"] == "cut \ufffd here"


# Answers: the other side's encoder through our decoder


@few
@given(completions)
def test_a_body_comes_back_as_it_was(sent):
    same(decode(encode_answer(sent, answer_id="a")), sent)


@few
@given(completions, st.integers(1, 40), st.integers(1, 30))
def test_a_stream_comes_back_as_it_was(sent, cut, piece_chars):
    data = b"".join(encode_stream(sent, answer_id="a", piece_chars=piece_chars))
    pieces = [data[i : i + cut] for i in range(0, len(data), cut)]
    same(decode(b"", SSE, pieces=pieces, stream=True), sent)


def test_what_the_head_says():
    headers = {**JSON, "x-ratelimit-remaining-tokens": "17", "retry-after": "1", "server": "x"}
    answer = decode(answer_with({"content": "a"}, model="m-2026"), headers)
    assert answer.request_id == "r-1"
    assert answer.rate_limit == {"x-ratelimit-remaining-tokens": "17", "retry-after": "1"}
    assert answer.served_model == "m-2026"
    without = decode(answer_with({"content": "a"}), {"content-type": "application/json"})
    assert without.request_id == "x"


@pytest.mark.parametrize(
    ("headers", "asked"), [(SSE, False), (JSON, True), ({}, True), ({}, False)]
)
def test_the_content_type_decides_what_an_answer_is(headers, asked):
    streamed = "event-stream" in headers.get("content-type", "") or (asked and not headers)
    body = stream_of({"content": "hi"}) if streamed else answer_with({"content": "hi"})
    assert decode(body, headers, stream=asked).message.content == "hi"


# Answers: habits of providers


@pytest.mark.parametrize(
    ("message", "content", "reasoning", "raw"),
    [
        ({"content": None}, "", None, None),
        ({"content": "a", "reasoning_content": "r", "reasoning": "r"}, "a", "r", None),
        ({"content": "a", "reasoning": {"odd": 1}, "thinking": "t"}, "a", "t", None),
        ({"content": "a", "reasoning_content": ""}, "a", None, None),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]},
                         {"type": "text", "text": "a"}]}, "a", "r", None,
        ),
        ({"content": None, "refusal": "I will not."}, "I will not.", None, None),
        ({"content": "<think>r</think>a"}, "a", "r", "<think>r</think>a"),
        ({"content": "\n<think>\nr\n</think>\n\na"}, "a", "r", "\n<think>\nr\n</think>\n\na"),
        ({"content": "r\n</think>\n\na"}, "a", "r", "r\n</think>\n\na"),
        ({"content": "<think>cut off"}, "", "cut off", "<think>cut off"),
        ({"content": "see <think>x</think>"}, "see <think>x</think>", None, None),
        ({"content": "<think></think>a"}, "a", "", "<think></think>a"),
        ({"content": "<think>r</think>a", "reasoning": "s"}, "<think>r</think>a", "s", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_text_and_reasoning(message, content, reasoning, raw, stream):
    body = stream_of(message) if stream else answer_with(message)
    got = decode(body, SSE if stream else JSON, stream=stream).message
    assert got == AssistantMessage(content=content, reasoning_content=reasoning, raw_content=raw)


def made(*deltas):
    """(id, name, arguments) of the calls that deltas of tool_calls make."""
    pieces = [{"tool_calls": d} for d in deltas]
    return [
        (c.id, c.name, c.arguments)
        for c in decode(stream_of(*pieces), SSE, stream=True).message.tool_calls
    ]


def piece(arguments=None, name=None, **fields):
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {k: v for k, v in function.items() if v is not None}}


def test_calls_by_index_interleaved():
    assert made(
        [piece(name="a", arguments="", index=0, id="1"), piece(name="b", index=1, id="2")],
        [piece('{"x"', index=1), piece("{", index=0)],
        [piece(":1}", index=1), piece("}", index=0)],
    ) == [("1", "a", "{}"), ("2", "b", '{"x":1}')]


def test_calls_without_index():
    assert made(
        [piece(name="a", id="1", arguments="{")], [piece("}")], [piece("{}", name="b", id="2")]
    ) == [("1", "a", "{}"), ("2", "b", "{}")]


def test_whole_calls_that_all_have_index_0():
    assert made(
        [piece("{}", name="a", index=0, id="1")], [piece("[]", name="a", index=0, id="2")]
    ) == [("1", "a", "{}"), ("2", "a", "[]")]


def test_names_and_ids_repeated_in_every_piece():
    assert made(
        [piece("{", name="a", index=0, id="1")], [piece("}", name="a", index=0, id="1")]
    ) == [("1", "a", "{}")]


def test_arguments_as_an_object():
    message = {"tool_calls": [piece({"x": 1}, name="a", id="1")]}
    assert decode(answer_with(message)).message.tool_calls[0].arguments == '{"x":1}'
    assert made([piece({"x": 1}, name="a", id="1", index=0)]) == [("1", "a", '{"x":1}')]


def test_the_form_before_tool_calls():
    message = {"content": None, "function_call": {"name": "a", "arguments": "{}"}}
    (call,) = decode(answer_with(message)).message.tool_calls
    assert (call.name, call.arguments) == ("a", "{}")
    first = {"function_call": {"name": "a", "arguments": "{"}}
    body = stream_of(first, {"function_call": {"arguments": "}"}})
    (call,) = decode(body, SSE, stream=True).message.tool_calls
    assert (call.name, call.arguments) == ("a", "{}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{}, {"id": None}, {"id": ""}, {"id": "call_0"}])
def test_missing_and_double_ids_are_made_stable(given, stream):
    listed = [piece("{}", name="a", index=i, **given) for i in range(2)]

    def ids(turn):
        body = stream_of({"tool_calls": listed}) if stream else answer_with({"tool_calls": listed})
        answer = decode(body, SSE if stream else JSON, turn, stream=stream)
        return [c.id for c in answer.message.tool_calls]

    assert ids(1) == ids(1)
    assert len(set(ids(1))) == 2
    if not given.get("id"):
        assert not set(ids(1)) & set(ids(3))  # nor do two turns share one


def test_a_bad_byte_or_half_character_does_not_lose_an_answer():
    body = answer_with({"content": "ab"}, usage={"prompt_tokens": 1, "completion_tokens": 2})
    assert decode(body.replace(b'"ab"', b'"a\xffb"')).message.content == "a\ufffdb"
    halved = decode(body.replace(b'"ab"', b'"a\\ud83d"'))
    assert halved.message.content == "a\ufffd"
    assert halved.usage == Usage(input_tokens=1, output_tokens=2)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2}, (9, None, None, 2, None)),
        (
            {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details":
             {"cached_tokens": 4, "cache_write_tokens": 3}}, (9, 4, 3, 2, None),
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 8,
             "prompt_cache_miss_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 1}},
            (9, 8, None, 2, 1),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 5}, (9, 5, None, 2, None)),
        # Reasoning beside the output, as one provider reports it
        (
            {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 18,
             "completion_tokens_details": {"reasoning_tokens": 7}}, (9, None, None, 9, 7),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None},
         (9, None, None, 2, None)),
        ({"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 10},
         (9, None, None, 2, None)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, (0, None, None, 0, None)),
        ({"prompt_tokens": 9}, None),
        ({"prompt_tokens": 9, "completion_tokens": None}, None),
        ({"prompt_tokens": -1, "completion_tokens": 2}, None),
        ({"prompt_tokens": "9", "completion_tokens": 2}, None),
        ({"prompt_tokens": True, "completion_tokens": 2}, None),
        (None, None),
        ([], None),
    ],
)  # fmt: skip
def test_usage_spellings(usage, expected):
    got = decode(answer_with({"content": "a"}, usage=usage)).usage
    if expected is None:
        assert got is None
    else:
        assert got == Usage(
            input_tokens=expected[0],
            cache_read_tokens=expected[1],
            cache_write_tokens=expected[2],
            output_tokens=expected[3],
            reasoning_tokens=expected[4],
        )


def test_the_last_of_running_totals_counts():
    chunk = {"choices": [{"delta": {"content": "a"}}]}
    parts = [{**chunk, "usage": {"prompt_tokens": 5, "completion_tokens": n}} for n in (1, 2, 3)]
    body = b"".join(event(json.dumps(p).encode()) for p in parts) + event(b"[DONE]")
    answer = decode(body, SSE, stream=True)
    assert answer.usage == Usage(input_tokens=5, output_tokens=3)
    assert json.loads(answer.usage_raw) == {"prompt_tokens": 5, "completion_tokens": 3}


def test_token_ids_of_vllm_and_sglang():
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]}
    vllm = {"prompt_token_ids": [1, 2], "choices": [
        {"message": {"content": "ab"}, "token_ids": [3, 4], "logprobs": logprobs}]}  # fmt: skip
    sglang = {"choices": [
        {"message": {"content": "ab"}, "prompt_token_ids": [1, 2], "response_token_ids": [3, 4],
         "logprobs": logprobs}]}  # fmt: skip
    expected = TokenCapture(
        prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-0.5, -1.0), logprobs_kind="unknown"
    )
    for form in (vllm, sglang):
        assert decode(json.dumps(form).encode()).tokens == expected


def test_signed_reasoning_blocks_of_a_stream_are_joined():
    blocks = [
        {"type": "reasoning.text", "index": 0, "text": "let "},
        {"type": "reasoning.text", "index": 0, "text": "me", "signature": "sig"},
        {"type": "reasoning.encrypted", "index": 1, "data": "x"},
    ]
    body = stream_of(*({"reasoning_details": [b]} for b in blocks))
    assert decode(body, SSE, stream=True).message.reasoning_details == [
        {"type": "reasoning.text", "index": 0, "text": "let me", "signature": "sig"},
        {"type": "reasoning.encrypted", "index": 1, "data": "x"},
    ]


# Answers that are none


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b'"x"', b'{"choices": []}', b'{"choices": null}',
     b'{"choices": [{"message": {"content": "a"', b"\xff\xfe", b"[" * 100_000],
)  # fmt: skip
def test_unreadable_bodies(body):
    with pytest.raises(e.ProtocolError) as caught:
        decode(body)
    assert caught.value.served is True
    assert caught.value.request_id == "r-1"


@pytest.mark.parametrize("done", [False, True])
def test_a_stream_must_say_that_it_is_complete(done):
    whole = stream_of({"content": "a"}, done=False)
    assert decode(whole, SSE, stream=True).message.content == "a"
    cut = event(json.dumps({"choices": [{"delta": {"content": "a"}}]}).encode())
    with pytest.raises(e.ProtocolError):
        decode(cut, SSE, stream=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "key sk-secret-key is over its limit", "code": 429}, e.RateLimited),
        ({"message": "Provider returned error", "code": 502}, e.ServerError),
        ({"message": "maximum context length is 5", "code": 400}, e.ContextOverflow),
        ("boom", e.ServerError),
    ],
)
def test_errors_inside_an_answer(error, kind, stream):
    data = json.dumps({"error": error}).encode()
    with pytest.raises(e.ModelError) as caught:
        decode(event(data) if stream else data, SSE if stream else JSON, stream=stream)
    assert type(caught.value) is kind
    assert caught.value.served is True
    assert "sk-secret" not in str(caught.value)


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
