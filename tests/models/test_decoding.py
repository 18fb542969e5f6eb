"""Answers, read by the client of each dialect: what all have in common. The bytes are those of the
fake server, changed where a test needs them broken."""

import json
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import KEY, SERVERS, decode

from hermes_rl import errors as e
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models import Completion
from hermes_rl.models.wire import EventReader
from hermes_rl.testing import encode_event
from hermes_rl.usage import Usage

END = {
    "chat_completions": b'"finish_reason":"stop"',
    "anthropic_messages": b'"stop_reason":"end_turn"',
    "codex_responses": b'{"type":"response.completed"',
}
"""How the part of a stream begins that says that it is complete."""
STREAMED = pytest.mark.parametrize("stream", [False, True])


class Speaker(NamedTuple):
    """Both sides of one dialect."""

    name: str

    def answer(self, *, stream, **message):
        """The bytes of an answer."""
        sent = Completion(
            message=AssistantMessage(**message),
            finish_reason="stop",
            usage=Usage(input_tokens=1, output_tokens=2),
        )
        if stream:
            return b"".join(SERVERS[self.name].encode_stream(sent, answer_id="a_1"))
        return SERVERS[self.name].encode_answer(sent, answer_id="a_1")

    def read(self, data, **fields):
        return decode(data, mode=self.name, **fields)


@pytest.fixture(params=SERVERS)
def speaker(request):
    return Speaker(request.param)


@STREAMED
@pytest.mark.parametrize("call_id", ["", "call_0"])
def test_missing_and_duplicate_call_ids_are_derived(speaker, stream, call_id):
    calls = tuple(ToolCall(id=call_id, name="a", arguments="{}") for _ in range(2))
    data = speaker.answer(stream=stream, tool_calls=calls)

    def ids(turn):
        answer = speaker.read(data, stream=stream, turn=turn)
        return [call.id for call in answer.message.tool_calls]

    assert ids(1) == ids(1)
    assert len(set(ids(1))) == 2
    assert all(ids(1))
    if speaker.name == "codex_responses":  # its items have ids too
        call_id = call_id or ids(1)[0]
    assert (ids(1)[0] == ids(3)[0]) is bool(call_id)
    assert call_id or not set(ids(1)) & set(ids(3)), "nor do two turns share one"


@STREAMED
@pytest.mark.parametrize(
    ("bad", "read"), [(b'"a\xffb"', "a\ufffdb"), (b'"a\\ud83d"', "a\ufffd")], ids=["byte", "half"]
)
def test_invalid_utf8_does_not_lose_an_answer(speaker, stream, bad, read):
    call = ToolCall(id="1", name="t", arguments="{}")
    data = speaker.answer(stream=stream, content="ab", tool_calls=(call,)).replace(b'"ab"', bad)
    answer = speaker.read(data, stream=stream)
    assert (answer.message.content, answer.message.tool_calls) == (read, (call,))
    assert answer.usage == Usage(input_tokens=1, output_tokens=2)


@STREAMED
def test_streamed_text_reaches_on_delta(speaker, stream):
    signals = []
    data = speaker.answer(stream=stream, content="word " * 20)
    speaker.read(data, stream=stream, on_delta=signals.append)
    assert "".join(signals) == "word " * 20
    assert (len(signals) > 1) is stream


def test_truncated_stream_is_an_error(speaker):
    data = speaker.answer(stream=True, content="hi")
    assert speaker.read(data, stream=True).message.content == "hi"
    for end in (*range(0, data.index(END[speaker.name]), 7), data.index(END[speaker.name])):
        with pytest.raises(e.ProtocolError) as caught:
            speaker.read(data[:end], stream=True)
        assert caught.value.served is True


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b'"x"', b"{}", b"{", b"\xff\xfe", b"[" * 100_000,
     b'{"choices": []}', b'{"choices": null}', b'{"choices": [{"message": {"content": "a"',
     b'{"content": 3}', b'{"status": "completed"}', b'{"output": [',
     b'{"status": "in_progress", "output": []}', b'{"status": "queued", "output": []}'],
)  # fmt: skip
def test_invalid_answers_are_protocol_errors(speaker, body):
    with pytest.raises(e.ProtocolError) as caught:
        speaker.read(body, stream=False)
    assert caught.value.served is True
    assert caught.value.request_id == "r-1"


ERRORS = [
    ("chat_completions", {"message": f"key {KEY} is over its limit", "code": 429}, e.RateLimited),
    ("chat_completions", {"message": "Provider returned error", "code": 502}, e.ServerError),
    ("chat_completions", {"message": "maximum context length is 5", "code": 400},
     e.ContextOverflow),
    ("chat_completions", "boom", e.ServerError),
    ("anthropic_messages", {"type": "overloaded_error", "message": f"No, {KEY}."}, e.Overloaded),
    ("anthropic_messages", {"type": "rate_limit_error", "message": "No."}, e.RateLimited),
    ("anthropic_messages", {"type": "api_error", "message": "No."}, e.ServerError),
    ("anthropic_messages", {"type": "timeout_error", "message": "No."}, e.ServerError),
    ("anthropic_messages", {"type": "authentication_error", "message": "No."}, e.AuthError),
    ("anthropic_messages", {"type": "invalid_request_error", "message": "No."}, e.BadRequest),
    ("codex_responses", {"code": "rate_limit_exceeded", "message": "Limit."}, e.RateLimited),
    ("codex_responses", {"code": "server_error", "message": f"key {KEY} broke"}, e.ServerError),
    ("codex_responses", {"code": "context_length_exceeded", "message": "long"},
     e.ContextOverflow),
    ("codex_responses", None, e.ServerError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "kind"), ERRORS)
def test_errors_inside_an_answer_are_typed(name, error, kind):
    body, events = {"error": error}, [{"type": "error", "error": error}]
    if name == "codex_responses":
        body = {"id": "resp_1", "status": "failed", "output": [], "error": error}
        events = [{"type": "response.failed", "response": body}]
        if error:
            events += [{"type": "error", **error}, {"type": "error", "error": error}]
    bodies = [json.dumps(form).encode() for form in (body, *events)]
    for stream, data in [(False, bodies[0]), *((True, encode_event(b)) for b in bodies[1:])]:
        with pytest.raises(e.ModelError) as caught:
            Speaker(name).read(data, stream=stream)
        assert type(caught.value) is kind
        assert caught.value.served is True
        assert KEY not in str(caught.value)


# PromptHeads and events


def test_headers_reach_the_completion(kit):
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
def test_content_type_decides_between_body_and_stream(kit, kind, call):
    streamed = kind == "SSE" or (call and kind is None)
    body = kit.stream_of({"content": "hi"}) if streamed else kit.answer_with({"content": "hi"})
    headers = {} if kind is None else getattr(kit, kind)
    assert kit.decode(body, headers, stream=call).message.content == "hi"


# Server-sent events


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.text(alphabet="ab é:", min_size=1, max_size=9), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.integers(1, 7),
)
def test_events_are_parsed_for_any_chunking(data, newline, size):
    lines = [f": comment{newline}event: x{newline}data: {d}{newline}{newline}" for d in data]
    stream = "".join(lines).encode()
    reader, got = EventReader(), []
    for i in range(0, len(stream), size):
        got += reader.feed(stream[i : i + size])
    got += reader.close()
    assert [g.decode() for g in got] == data


def test_data_lines_of_one_event_are_joined():
    assert EventReader().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]


@pytest.mark.parametrize(
    ("named", "known"), [((3, 3), "3"), ((3, 4), None), ((None, 4), "4"), ((0, 0), "0")]
)
def test_a_stream_that_names_several_policy_versions_has_none(named, known):
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": "a"}}], "policy_version": version}
        for version in named
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks)
    answer = decode(body + b"data: [DONE]\n\n", stream=True)
    assert answer.policy_version == known
