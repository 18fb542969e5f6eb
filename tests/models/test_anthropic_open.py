"""The dialect anthropic_messages with any history and any answer."""

import contextlib
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import decode, messages_event, messages_stream

from hermes_rl import errors as e
from hermes_rl.testing import AnthropicServer

few = settings(deadline=None, max_examples=40)
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
texts = text.filter(str.strip)


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
@given(st.lists(st.tuples(kinds, st.dictionaries(texts, junk, max_size=3), junk), max_size=6))
def test_arbitrary_events_do_not_break_the_decoder(events):
    data = b"".join(
        messages_event(kind, **{"content_block": more, "delta": more, **fields, "message": more})
        for kind, fields, more in events
    )
    with contextlib.suppress(e.ModelError):
        decode(messages_stream(data), mode="anthropic_messages", stream=True)


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
def test_server_decodes_or_refuses_any_request(body):
    with contextlib.suppress(ValueError):
        AnthropicServer().decode_request(json.dumps(body).encode())
