"""The dialect anthropic_messages with any history and any answer."""

import contextlib
import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from messages_kit import JSON, SSE, event, read, stream, through

from hermes_rl import errors as e
from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    with_unique_ids,
)
from hermes_rl.models.base import Completion
from hermes_rl.testing.dialects.anthropic import AnthropicServer
from hermes_rl.usage import Usage

few = settings(deadline=None, max_examples=40)
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
words = text.filter(str.strip)


# Histories of any shape


ids = st.sampled_from(["", "a:1", "a.1", "toolu_1", "toolu_2"])
calls = st.lists(
    st.builds(
        ToolCall,
        id=ids,
        name=st.sampled_from(["terminal", "read_file"]),
        arguments=text | st.dictionaries(text, text, max_size=2).map(json.dumps),
    ),
    max_size=3,
).map(tuple)
thoughts = st.fixed_dictionaries(
    {"type": st.just("thinking"), "thinking": text, "signature": words}
) | st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": words})
blocks = st.lists(thoughts, min_size=1, max_size=2)
assistants = st.builds(
    AssistantMessage, content=text, tool_calls=calls, reasoning_details=st.none() | blocks
)
messages = st.lists(
    st.builds(SystemMessage, content=text)
    | st.builds(UserMessage, content=text)
    | assistants
    | st.builds(ToolMessage, tool_call_id=ids, name=text, content=text),
    max_size=8,
)


@few
@given(messages, st.sampled_from([None, "5m", "1h"]))
def test_any_history_is_taken(history, cache):
    understood = read(*with_unique_ids(history), cache=cache)
    roles = [type(m) for m in understood.messages if not isinstance(m, SystemMessage)]
    assert roles[0] is UserMessage
    assert (understood.cache_marks or 0) <= 4


# Answers


counts = st.integers(0, 10**9)


@st.composite
def usages(draw):
    fresh, read_, written, output = (draw(counts) for _ in range(4))
    hour = draw(st.integers(0, written))
    return Usage(
        input_tokens=fresh + read_ + written,
        cache_read_tokens=read_,
        cache_write_tokens=written,
        cache_write_1h_tokens=hour,
        output_tokens=output,
        reasoning_tokens=draw(st.none() | st.integers(0, output)),
    )


objects = st.dictionaries(text, text, max_size=2).map(
    lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False)
)
answers = st.builds(
    Completion,
    message=st.builds(
        AssistantMessage,
        content=words,
        tool_calls=st.lists(
            st.builds(ToolCall, id=words, name=text, arguments=objects),
            max_size=3,
            unique_by=lambda made: made.id,
        ).map(tuple),
        reasoning_details=st.none() | blocks,
    ),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls", "refusal", "pause_turn"]),
    usage=usages(),
    served_model=st.none() | text.filter(bool),
)


def same(got, sent):
    thoughts = [b["thinking"] for b in sent.message.reasoning_details or () if b.get("thinking")]
    known = {"usage_raw": None, "request_id": None, "first_byte_s": None}
    assert got.message.reasoning_content == ("\n\n".join(thoughts) or None)
    message = AssistantMessage(
        content=got.message.content,
        tool_calls=got.message.tool_calls,
        reasoning_details=got.message.reasoning_details,
    )
    assert replace(got, **known, message=message) == sent


@few
@given(answers)
def test_a_body_comes_back_as_it_was(sent):
    same(through(AnthropicServer().encode_answer(sent, answer_id="msg_1")), sent)


@few
@given(answers, st.integers(1, 40), st.integers(1, 30))
def test_a_stream_comes_back_as_it_was(sent, cut, piece_chars):
    data = b"".join(AnthropicServer(piece_chars).encode_stream(sent, answer_id="msg_1"))
    pieces = [data[i : i + cut] for i in range(0, len(data), cut)]
    same(through(b"", SSE, pieces), sent)


@few
@given(st.binary(max_size=60), st.booleans())
def test_no_bytes_break_a_decoder(data, streamed):
    for given_ in (data, b"data: " + data + b"\n\n", b'data: {"type":' + data + b"\n\n"):
        with contextlib.suppress(e.ModelError):
            through(given_, SSE if streamed else JSON)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["text", "thinking", "tool_use"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "index", "delta", "content_block", "usage", "input"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
kinds = st.sampled_from(
    ["message_start", "content_block_start", "content_block_delta", "message_delta", "error"]
)


@few
@given(st.lists(st.tuples(kinds, st.dictionaries(words, junk, max_size=3), junk), max_size=6))
def test_events_of_any_shape_break_nothing(events):
    data = b"".join(
        event(kind, **{"content_block": more, "delta": more, **fields, "message": more})
        for kind, fields, more in events
    )
    with contextlib.suppress(e.ModelError):
        through(stream(data), SSE)


fields = st.dictionaries(
    st.sampled_from(
        ["type", "text", "id", "name", "input", "content", "tool_use_id", "source", "thinking",
         "signature", "data", "cache_control", "ttl", "budget_tokens", "effort", "input_schema"]
    ),
    junk,
    max_size=5,
)  # fmt: skip
requests = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "max_tokens": st.integers(0, 3),
        "messages": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(["user", "assistant"]),
                    "content": text | st.lists(fields, max_size=3),
                }
            ),
            max_size=3,
        ),
    },
    optional={
        "system": text | st.lists(fields, max_size=2),
        "tools": st.lists(fields, max_size=2),
        "thinking": fields,
        "output_config": fields,
    },
)


@few
@given(requests)
def test_a_server_reads_or_refuses_any_request(body):
    with contextlib.suppress(ValueError):
        AnthropicServer().decode_request(json.dumps(body).encode())
