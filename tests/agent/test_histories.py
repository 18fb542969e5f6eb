"""Histories that people bring along: what others keep is understood, or refused by its place."""

from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    conversation_from_openai,
    from_openai,
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
        ([{"role": "user", "content": [{"type": "text", "text": object()}]}], "no JSON"),
        ([call(id="a", function={"name": "n", "arguments": object()})], "no JSON"),
    ],
)
def test_what_is_no_message_is_refused_in_one_line(history: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        conversation_from_openai(history)
    assert "\n" not in str(refused.value)
