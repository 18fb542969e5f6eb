"""What one side of a dialect writes the other reads: requests, and answers, whole and streamed."""

import contextlib
import json
from dataclasses import replace
from functools import lru_cache

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from wire_kit import SERVERS, decode, encode

from hermes_rl import errors as e
from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    with_unique_ids,
)
from hermes_rl.models import Completion, Sampling, TokenCapture
from hermes_rl.models.prepare import prepare
from hermes_rl.usage import Usage

CHAT, MESSAGES, RESPONSES = "chat_completions", "anthropic_messages", "codex_responses"
each_dialect = pytest.mark.parametrize("mode", [CHAT, MESSAGES, RESPONSES])
few = settings(deadline=None, max_examples=40)
unshrunk = settings(few, phases=[Phase.explicit, Phase.generate])
"""Shrinking takes minutes where each example goes through the official package's types."""

text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
plain = text.filter(lambda t: "think>" not in t)
nonblank = plain.filter(str.strip)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(text, json_values, max_size=3)
compact = objects.map(lambda value: msgspec.json.encode(value).decode())
thoughts = st.fixed_dictionaries(
    {"type": st.just("thinking"), "thinking": text, "signature": nonblank}
) | st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": nonblank})
reasoning_items = st.builds(
    lambda number, summary, encrypted: {
        "type": "reasoning",
        "id": f"rs_{number}",
        "summary": [{"type": "summary_text", "text": t} for t in summary],
        "encrypted_content": encrypted,
    },
    st.integers(0, 9),
    st.lists(nonblank, max_size=2),
    nonblank,
)
DETAILS = {CHAT: json_values.filter(bool), MESSAGES: thoughts, RESPONSES: reasoning_items}
ARGUMENTS = {CHAT: text | compact, MESSAGES: compact, RESPONSES: objects.map(json.dumps)}


def reasoning_of(details):
    """The text in thinking blocks and reasoning items; None if there is none."""
    blocks = [block for block in details or () if isinstance(block, dict)]
    parts = [p["text"] for block in blocks for p in block.get("summary", ())]
    return "\n\n".join([*parts, *(b["thinking"] for b in blocks if b.get("thinking"))]) or None


@st.composite
def assistants(draw, mode):
    """What an answer of the dialect can hold."""
    names = nonblank if mode == RESPONSES else text
    made = st.builds(ToolCall, id=nonblank, name=names, arguments=ARGUMENTS[mode])
    calls = draw(st.lists(made, max_size=3, unique_by=lambda call: call.id))
    details = draw(st.none() | st.lists(DETAILS[mode], min_size=1, max_size=2))
    loose = draw(st.none() | nonblank) if mode != MESSAGES else None
    return AssistantMessage(
        content=draw(plain if calls or mode == CHAT else nonblank),
        reasoning_content=(mode == RESPONSES and reasoning_of(details)) or loose,
        tool_calls=tuple(calls),
        reasoning_details=details,
    )


counts = st.integers(0, 10**9)
OPTIONAL = {
    CHAT: ("cache_read_tokens", "cache_write_tokens", "reasoning_tokens"),
    MESSAGES: ("reasoning_tokens",),
    RESPONSES: (),
}
REASONS = {
    CHAT: ("stop", "length", "tool_calls", "content_filter"),
    MESSAGES: ("stop", "length", "tool_calls", "refusal", "pause_turn"),
    RESPONSES: ("stop", "length", "content_filter", "abort"),
}
captures = st.builds(
    TokenCapture,
    prompt_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=5).map(tuple),
    completion_ids=st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
    logprobs=st.lists(st.floats(-50, 0), max_size=5).map(tuple),
    logprobs_kind=st.sampled_from(["sampling", "raw", "constrained", "unknown"]),
)


@st.composite
def usages(draw, mode):
    fresh, read, written, output = (draw(counts) for _ in range(4))
    parts = {
        "cache_read_tokens": read,
        "cache_write_tokens": written,
        "reasoning_tokens": draw(st.integers(0, output)),
    }
    for name in OPTIONAL[mode]:
        parts[name] = draw(st.sampled_from([None, parts[name]]))
    if mode == MESSAGES:
        parts["cache_write_1h_tokens"] = draw(st.integers(0, written))
    return Usage(input_tokens=fresh + read + written, output_tokens=output, **parts)


@st.composite
def completions(draw, mode):
    message, reason = draw(assistants(mode)), draw(st.sampled_from(REASONS[mode]))
    if mode == RESPONSES and reason == "stop" and message.tool_calls:
        reason = "tool_calls"
    return Completion(
        message=message,
        finish_reason=reason,
        usage=draw(usages(mode)),
        served_model=draw(nonblank if mode == RESPONSES else st.none() | nonblank),
        policy_version=draw(st.none() | nonblank) if mode != MESSAGES else None,
        tokens=draw(st.none() | captures) if mode == CHAT else None,
    )


@each_dialect
@few
@given(st.data(), st.booleans(), st.integers(1, 60), st.integers(1, 30))
def test_answers_round_trip(mode, data, stream, cut, piece_chars):
    """But for what only the receiver knows."""
    sent = data.draw(completions(mode))
    server = type(SERVERS[mode])(piece_chars=piece_chars)
    whole = server.encode_answer(sent, answer_id="a_1")
    body = b"".join(server.encode_stream(sent, answer_id="a_1")) if stream else whole
    got = decode(body, mode=mode, size=cut, stream=stream)
    received = dict.fromkeys(("usage_raw", "request_id", "first_byte_s"))
    if mode == MESSAGES:
        thought = reasoning_of(sent.message.reasoning_details)
        message = msgspec.structs.replace(sent.message, reasoning_content=thought)
        if not message.content.strip():  # Messages has no blank text blocks
            message = msgspec.structs.replace(message, content="")
        sent = replace(sent, message=message)
    assert replace(got, **received, rate_limit={}) == replace(sent, **received, rate_limit={})


@each_dialect
@few
@given(st.binary(max_size=60), st.booleans())
def test_arbitrary_bytes_do_not_break_decoders(mode, data, stream):
    for body in (data, b"data: " + data + b"\n\n", b'data: {"type":' + data + b"\n\n"):
        with contextlib.suppress(e.ModelError):
            decode(body, mode=mode, stream=stream)


# Requests


@st.composite
def histories(draw):
    """Histories as an agent makes them."""
    out = [SystemMessage(content=draw(text))] if draw(st.booleans()) else []
    out.append(UserMessage(content=draw(text)))
    for _ in range(draw(st.integers(0, 3))):
        answer = draw(assistants(RESPONSES))
        out.append(answer)
        for call in answer.tool_calls:
            out.append(ToolMessage(tool_call_id=call.id, name=call.name, content=draw(text)))
        if not answer.tool_calls or draw(st.booleans()):
            out.append(UserMessage(content=draw(text)))
    return out


ids = st.sampled_from(["", "a:1", "a.1", "toolu_1", "toolu_2"])


def any_messages(mode):
    """Messages in any order, including results without a call."""
    loose = st.builds(
        AssistantMessage,
        content=text,
        reasoning_content=st.none() | text,
        tool_calls=st.lists(
            st.builds(ToolCall, id=ids, name=nonblank, arguments=text | compact), max_size=3
        ).map(tuple),
        reasoning_details=st.none() | st.lists(DETAILS[mode], min_size=1, max_size=2),
    )
    return st.lists(
        st.builds(SystemMessage, content=text)
        | st.builds(UserMessage, content=text)
        | assistants(mode)
        | loose
        | st.builds(ToolMessage, tool_call_id=ids, name=text, content=text),
        max_size=8,
    )


def understood(message, mode):
    """A message as the server knows it: reasoning that is text alone is not sent back."""
    if not isinstance(message, AssistantMessage):
        return message
    kept = reasoning_of(message.reasoning_details) if mode == RESPONSES else None
    return msgspec.structs.replace(message, reasoning_content=kept)


@few
@given(histories(), st.booleans())
def test_responses_server_decodes_sent_messages(sent, exact):
    read = SERVERS[RESPONSES].decode_request(encode(sent, mode=RESPONSES, exact=exact))
    prepared = sent if exact else prepare(sent)
    assert list(read.messages) == [understood(message, RESPONSES) for message in prepared]


@few
@given(any_messages(CHAT))
def test_chat_completions_round_trip_any_messages(sent):
    read = SERVERS[CHAT].decode_request(encode(sent, mode=CHAT, exact=True))
    assert list(read.messages) == [understood(message, CHAT) for message in sent]


@each_dialect
@few
@given(st.data(), st.sampled_from([None, "5m", "1h"]))
def test_any_history_is_accepted(mode, data, cache):
    sent = with_unique_ids(data.draw(any_messages(mode)))
    read = SERVERS[mode].decode_request(encode(sent, mode=mode, cache=cache))
    assert (read.cache_marks or 0) <= 4
    if mode == MESSAGES:
        first = next(m for m in read.messages if not isinstance(m, SystemMessage))
        assert isinstance(first, UserMessage)


# The official package's types


@lru_cache
def official_body():
    # late: half a second, which few processes need
    from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

    return TypeAdapter(ResponseCreateParamsNonStreaming)


@unshrunk
@given(histories())
def test_official_package_validates_every_body(sent):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    seen = UserMessage(content=[{"type": "text", "text": "see"}, image])
    tool = {"name": "t", "description": "d", "parameters": {"type": "object"}}
    body = encode(
        [*sent, seen],
        mode=RESPONSES,
        tools=({"type": "function", "function": tool},),
        sampling=Sampling(temperature=0.5, top_p=0.5, max_tokens=9, reasoning="low"),
        logprobs=True,
    )
    official_body().validate_json(body)


@unshrunk
@given(completions(RESPONSES))
def test_official_package_validates_every_answer(sent):
    from openai.types.responses import Response

    known = replace(sent, finish_reason="length") if sent.finish_reason == "abort" else sent
    body = SERVERS[RESPONSES].encode_answer(known, answer_id="resp_1")
    read = Response.model_validate_json(body, strict=True)
    assert read.usage.input_tokens == sent.usage.input_tokens
    calls = [item for item in read.output if item.type == "function_call"]
    assert [c.call_id for c in calls] == [c.id for c in sent.message.tool_calls]
