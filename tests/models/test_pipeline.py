"""How a request's messages are made from what is stored."""

import json
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import cases

from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    has_content,
    parse_arguments,
)
from hermes_rl.models import Conversation, ModelRequest
from hermes_rl.models.prepare import (
    NO_IMAGE,
    REPAIRS,
    cache_marks,
    canonical_json,
    prepare,
    prepare_request,
    repaired_arguments,
    repaired_roles,
    without_grammar,
)

few = settings(deadline=None, max_examples=60)
ids = st.sampled_from(["a", "b", "c"])
expected_text = st.sampled_from(["", " ", "x", "é", "cut \ud83d"])
arguments = st.sampled_from(["{}", '{"b":1, "a":2}', "", '{"a": [1,', "{'a': None}", "no", "[1]"])
calls = st.lists(st.builds(ToolCall, id=ids, name=ids, arguments=arguments), max_size=2)
parts = st.lists(
    st.sampled_from(
        [
            {"type": "text", "text": "t", "_ours": 1},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        ]
    ),
    max_size=2,
)
blocks = st.none() | st.lists(
    st.sampled_from(
        [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "reasoning", "id": "rs", "encrypted_content": "e"},
            {"type": "reasoning.text", "text": "t"},
        ]
    ),
    max_size=2,
)
anything = (
    st.builds(UserMessage, content=expected_text | parts)
    | st.builds(
        AssistantMessage,
        content=expected_text,
        reasoning_content=st.none() | expected_text,
        tool_calls=calls.map(tuple),
        reasoning_details=blocks,
    )
    | st.builds(ToolMessage, tool_call_id=ids, name=ids, content=expected_text)
)
histories = st.lists(anything, max_size=12)
adaptations = st.frozensets(
    st.sampled_from(["no_images", "text_only", "no_signatures", "no_encrypted_reasoning"])
)


def request(*messages, **fields):
    return ModelRequest(model="m", conversation=Conversation(messages), call_id="c", **fields)


def user(text="hi"):
    return UserMessage(content=text)


def answer(content="", *call_ids, arguments="{}", **fields):
    made = tuple(ToolCall(id=i, name="t", arguments=arguments) for i in call_ids)
    return AssistantMessage(content=content, tool_calls=made, **fields)


def result(call_id, content="out"):
    return ToolMessage(tool_call_id=call_id, name="t", content=content)


def check_order(messages):
    """User and assistant take turns; results follow their calls, one for each."""
    before, waiting = None, []
    for message in messages:
        if isinstance(message, ToolMessage):
            assert message.tool_call_id in waiting
            waiting.remove(message.tool_call_id)
            before = message
            continue
        assert waiting == []
        if isinstance(message, AssistantMessage):
            waiting = [c.id for c in message.tool_calls]
            assert message.tool_calls or message.content.strip()
        elif isinstance(message, UserMessage):
            assert has_content(message)
        assert type(before) is not type(message)
        before = message
    assert waiting == []


# Whole histories


@few
@given(histories, adaptations)
def test_any_history_becomes_valid(history, model_request):
    sent = prepare([SystemMessage(content="s"), *history], adaptations=model_request)
    assert sent[0] == SystemMessage(content="s")
    check_order(sent[1:])
    for message in sent:
        str(message.content).encode()  # no half characters
        if isinstance(message, AssistantMessage):
            for call in message.tool_calls:
                assert parse_arguments(call.arguments) is not None
                assert canonical_json(call.arguments) == call.arguments


@few
@given(histories, adaptations, st.booleans())
def test_preparation_is_idempotent(history, model_request, exact):
    once = prepare(history, exact=exact, adaptations=model_request)
    twice = prepare(once, exact=exact, adaptations=model_request)
    assert twice == once
    if not exact:
        assert all(a is b for a, b in zip(once, twice, strict=True) if not _many_parts(a))


def _many_parts(message):
    return not isinstance(message.content, str)


@few
@given(histories)
def test_valid_messages_stay_the_same_objects(history):
    clean = prepare(history)
    for step in REPAIRS:
        assert all(a is b for a, b in zip(step(clean), clean, strict=True))


@few
@given(st.lists(histories, min_size=1, max_size=5), adaptations, st.booleans())
def test_incremental_preparation_equals_complete_preparation(pieces, model_request, exact):
    asking = request(SystemMessage(content="s"), exact=exact, adaptations=model_request)
    for piece in pieces:
        for message in piece:
            asking.conversation.append(message)
        whole = prepare(list(asking.conversation), exact=exact, adaptations=model_request)
        ready = prepare_request(asking)
        assert list(ready.messages) == whole
        encoded = ready.encoded("repr", lambda m: repr(m).encode())
        assert list(encoded) == [repr(m).encode() for m in whole]


def test_turn_prepares_and_encodes_only_new_messages():
    asking = request(SystemMessage(content="s"), user())
    made = []

    def encode(message):
        made.append(message)
        return repr(message).encode()

    prepare_request(asking).encoded("x", encode)
    turns = 30
    for turn in range(turns):
        call = ToolCall(id=str(turn), name="t", arguments='{"b":1, "a":2}')  # is rewritten
        asking.conversation.append(AssistantMessage(tool_calls=(call,)))
        asking.conversation.append(result(str(turn)))
        before = list(prepare_request(asking).messages)
        prepare_request(asking).encoded("x", encode)
        assert all(a is b for a, b in zip(before, prepare_request(asking).messages, strict=True))
    assert len(made) == 2 + 2 * turns  # each message once


# Roles and results


@pytest.mark.parametrize("row", cases("prepared", "histories"))
def test_roles_alternate_and_results_are_paired(row):
    history, sent = (msgspec.convert(row[name], list[Message]) for name in ("history", "sent"))
    assert prepare(history) == sent
    assert prepare(history, exact=True) == history


# Arguments


@pytest.mark.parametrize("row", cases("prepared", "arguments"))
def test_malformed_arguments_are_repaired(row):
    assert json.loads(repaired_arguments(row["text"])) == row["meant"]


@few
@given(st.text(alphabet='{}[]",:\\ \n\ud83daé01-tfn.e') | st.text())
def test_any_arguments_become_an_object(text):
    repaired = repaired_arguments(text)
    repaired.encode()
    assert parse_arguments(repaired) is not None
    assert repaired_arguments(repaired) == repaired


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' + " " * 300_000 + '"b',  # as constrained decoding does that found no way out
        '{"a": "' + "\n" * 300_000,
        '{"a":' + "[" * 300_000,
        "{" * 90_000,
        "```json\n" + " \n" * 150_000 + "{",
        '{"a": 1' + "," * 300_000,
    ],
    ids=range(6),
)
def test_long_arguments_are_repaired_quickly(text):
    started = time.process_time()
    assert parse_arguments(repaired_arguments(text)) is not None
    assert time.process_time() - started < 5


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@few
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=3), st.data())
def test_truncated_arguments_become_an_object(value, data):
    text = json.dumps(value, ensure_ascii=False)
    cut = text[: data.draw(st.integers(1, len(text)))]
    repaired = json.loads(repaired_arguments(cut))
    assert "_unparsed" in repaired or set(repaired) <= set(value)


@few
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=3))
def test_canonical_json_keeps_the_value(value):
    text = json.dumps(value)
    canonical = canonical_json(text)
    assert parse_arguments(canonical) == parse_arguments(text)
    assert canonical_json(json.dumps(value, indent=2)) == canonical


def test_arguments_are_sorted_and_compact():
    (sent,) = prepare([answer("", "1", arguments='{"b": {"d": 1, "c": 2}, "a": "é"}')])[:1]
    assert sent.tool_calls[0].arguments == '{"a":"é","b":{"c":2,"d":1}}'


# Head, adaptations, marks


def test_ephemeral_layer_and_prefill_are_sent_but_not_stored():
    shown = (user("example"), answer("so"))
    asking = request(SystemMessage(content="s"), user(), ephemeral="today", prefill=shown)
    ready = prepare_request(asking)
    assert list(ready.messages) == [SystemMessage(content="s\n\ntoday"), *shown, user()]
    assert (ready.lead, ready.system) == (1, "s\n\ntoday")
    assert list(ready.encoded("x", lambda m: repr(m).encode())) == [
        repr(m).encode() for m in ready.messages
    ]
    assert list(asking.conversation) == [SystemMessage(content="s"), user()]


def test_an_ephemeral_layer_needs_no_system_prompt():
    ready = prepare_request(request(user(), ephemeral="today", prefill=(answer("so"),)))
    assert list(ready.messages) == [SystemMessage(content="today"), answer("so"), user()]
    assert [m for m in ready.encoded("x", lambda m: m.content.encode())] == [b"today", b"so", b"hi"]
    assert prepare_request(request(user())).system is None


@pytest.mark.parametrize("exact", [False, True])
def test_a_broken_prefill_is_repaired(exact):
    shown = (result("9", "lost"), answer("a", "1"), user("b"), user("c"))
    asking = request(SystemMessage(content="s"), user(), answer("so"), prefill=shown,
                     ephemeral="now", exact=exact)  # fmt: skip
    ready = prepare_request(asking)
    lost = user("[Result of a tool call that is not part of this conversation]\nlost")
    first = answer("a", "1")
    stub = result("1", "No result: the call was interrupted.")
    system = SystemMessage(content="s\n\nnow")
    assert list(ready.messages) == [
        system, lost, first, stub, user("b\n\nc\n\nhi"), answer("so"),
    ]  # fmt: skip
    assert list(ready.encoded("x", lambda m: repr(m).encode())) == [
        repr(m).encode() for m in ready.messages
    ]


@few
@given(histories)
def test_repaired_roles_changes_only_roles(history):
    sent = repaired_roles(history)
    check_order(sent)
    assert repaired_roles(sent) == sent
    whole = [a for m in history if isinstance(m, AssistantMessage) for a in m.tool_calls]
    assert [a for m in sent if isinstance(m, AssistantMessage) for a in m.tool_calls] == whole


def test_adaptations():
    image = {"type": "image_url", "image_url": {"url": "x"}}
    text = {"type": "text", "text": "see"}
    seen = UserMessage(content=[text, image])
    assert prepare([seen], adaptations=frozenset({"no_images"})) == [
        UserMessage(content=[text, {"type": "text", "text": NO_IMAGE}])
    ]
    assert prepare([seen], adaptations=frozenset({"text_only"})) == [user(f"see\n{NO_IMAGE}")]
    details = [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "reasoning", "encrypted_content": "e"},
        {"type": "reasoning.text", "text": "t"},
    ]
    thought = answer("x", reasoning_details=details)
    (kept,) = prepare([thought], adaptations=frozenset({"no_signatures"}))
    assert kept.reasoning_details == details[1:2]
    (kept,) = prepare([thought], adaptations=frozenset({"no_encrypted_reasoning"}), exact=True)
    assert kept.reasoning_details == [details[0], details[2]]


def test_schemas_without_grammar_keep_properties_of_that_name():
    schema = {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "pattern": "^a"},
            "format": {"type": "string", "format": "date", "enum": ["format"]},
        },
        "required": ["pattern"],
    }
    (tool,) = without_grammar([{"type": "function", "function": {"parameters": schema}}])
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "pattern": {"type": "string"},
            "format": {"type": "string", "enum": ["format"]},
        },
        "required": ["pattern"],
    }


def test_cache_marks_are_system_prompt_and_last_three_messages():
    history = [
        SystemMessage(content="s"), user("1"), answer("", "a"), result("a", ""),
        answer("2", "b"), result("b"), user("3"),
    ]  # fmt: skip
    assert cache_marks(history) == [0, 4, 5, 6]
    assert cache_marks(history, tools=False) == [0, 1, 4, 6]
    assert cache_marks([user()]) == [0]
    assert cache_marks([]) == []
