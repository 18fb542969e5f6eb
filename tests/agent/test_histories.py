"""Histories that people bring along: what others keep is understood, or refused by its place."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import UserError
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    conversation_from_openai,
    from_openai,
    to_openai,
    with_unique_ids,
)

PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


def call(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", **fields}]}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"role": "assistant", "content": PARTS}, AssistantMessage(content="one two")),
        ({"role": "assistant", "refusal": "No."}, AssistantMessage(content="No.")),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            AssistantMessage(content="No."),
        ),
        ({"role": "system", "content": PARTS}, SystemMessage(content="one two")),
        (
            {"role": "tool", "tool_call_id": "a", "content": PARTS},
            ToolMessage(tool_call_id="a", name="", content="one two"),
        ),
        (
            {"role": "tool", "tool_call_id": None, "name": None, "content": None},
            ToolMessage(tool_call_id="", name="", content=""),
        ),
        (
            call(id=None, function={"name": "n", "arguments": None}),
            AssistantMessage(tool_calls=(ToolCall(id="", name="n", arguments="{}"),)),
        ),
    ],
)
def test_other_spellings_of_openai_s_form(form: dict[str, Any], message: Any) -> None:
    assert from_openai(form) == message


@pytest.mark.parametrize(
    ("history", "says"),
    [
        (["hello"], "message 1 is 'hello'"),
        ([{"role": "user", "content": "x"}, None], "message 2 is None"),
        (
            [{"role": "user", "content": [{"type": "text", "text": object()}]}],
            "not JSON-serializable",
        ),
        ([call(id="a", function={"name": "n", "arguments": object()})], "not JSON-serializable"),
    ],
)
def test_what_is_no_message_is_refused_in_one_line(history: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        conversation_from_openai(history)
    assert "\n" not in str(refused.value)


def called(*ids: str) -> AssistantMessage:
    return AssistantMessage(tool_calls=tuple(ToolCall(id=i, name="n", arguments="{}") for i in ids))


def result(call_id: str, content: str) -> ToolMessage:
    return ToolMessage(tool_call_id=call_id, name="n", content=content)


def test_an_id_that_comes_twice_is_told_apart_in_calls_and_results() -> None:
    turns = [
        *(called("a", "b"), result("b", "first b"), result("a", "first a")),
        *(called("a", "a", ""), result("a", "second a"), result("a", "third a"), result("", "4")),
    ]
    first, b, a, second, *rest = with_unique_ids(turns)
    assert [first, b, a] == turns[:3]
    assert isinstance(second, AssistantMessage)
    made = [call.id for call in second.tool_calls]
    assert len({"a", "b", *made}) == 5
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in made)
    assert rest == [result(i, m.content) for i, m in zip(made, turns[4:], strict=True)]
    assert with_unique_ids(turns) == [first, b, a, second, *rest]


def test_a_made_id_has_the_form_that_the_provider_takes() -> None:
    twice = [called("aB3dE6gH9"), result("aB3dE6gH9", "x")] * 2
    last = with_unique_ids(twice)[2]
    assert isinstance(last, AssistantMessage)
    assert re.fullmatch("[0-9a-f]{9}", last.tool_calls[0].id)


ids = st.sampled_from(["", "a", "b", "a:1", "a.1", "123456789"])
histories = st.lists(
    st.lists(ids, max_size=3).map(lambda some: called(*some))
    | st.builds(result, ids, st.just("r"))
    | st.builds(UserMessage, content=st.just("u")),
    max_size=8,
)


@given(histories)
def test_each_call_of_a_history_gets_an_id_of_its_own(history: list[Message]) -> None:
    now = with_unique_ids(history)
    calls = [c for m in now if isinstance(m, AssistantMessage) for c in m.tool_calls]
    assert len({re.sub("[^a-zA-Z0-9_-]", "_", call.id) for call in calls}) == len(calls)
    assert "" not in {call.id for call in calls}
    assert with_unique_ids(now) == now
    answered = [pairs(m) for m in (history, now)]
    assert answered[0] == answered[1]


def pairs(messages: list[Message]) -> list[int | None]:
    """For each result the place of its call among the last calls, each call answered once."""
    out: list[int | None] = []
    waiting: list[tuple[int, str]] = []
    for message in messages:
        if isinstance(message, AssistantMessage) and message.tool_calls:
            waiting = [(n, call.id) for n, call in enumerate(message.tool_calls)]
        elif isinstance(message, ToolMessage):
            found = next((w for w in waiting if w[1] == message.tool_call_id), None)
            waiting = [w for w in waiting if w is not found]
            out.append(None if found is None else found[0])
    return out


def test_what_a_provider_wants_back_goes_out_and_comes_in() -> None:
    message = AssistantMessage(
        content="I look.",
        reasoning_content="hm",
        tool_calls=called("a").tool_calls,
        reasoning_details=[{"type": "thinking", "thinking": "hm", "signature": "c2ln"}],
    )
    assert from_openai(to_openai(message, details=True)) == message
    assert "reasoning_details" not in to_openai(message)
