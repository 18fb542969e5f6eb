"""Parsers on whatever a model writes: they never raise, and what they read is what was written."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_kit import texts

from hermes_rl.messages import AssistantMessage, ToolCall, UserMessage
from hermes_rl.models.tokens.parsers import PARSERS, ToolCallParser, parser_named
from hermes_rl.models.unparsed import looks_unparsed
from hermes_rl.testing.tiny_tokenizer import tiny_renderer

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "list": {"type": "array"},
        "flag": {"type": "boolean"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "note", "parameters": SCHEMA}}]

PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        '{"name": "note"',
        ', "arguments": ',
        "{}",
        "}",
        "{",
        '"',
        "\\",
        "<function=note>",
        "</function>",
        "<parameter=text>",
        "</parameter>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "<|python_tag|>",
        '{"name": "note", "parameters": ',
        '{"name": "", "arguments": ',
        '"id": "abcdefgh1"',
        "note",
        "[",
        "]",
        ",",
        ";",
        "word",
        "\ud800",
        "[" * 500,
    ]
)
NOISE = st.lists(PIECES, max_size=12).map("".join)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": texts(),
        "number": st.integers(),
        "list": st.lists(st.integers() | st.booleans() | st.none(), max_size=3),
        "flag": st.booleans(),
    },
)


@pytest.mark.parametrize("parser", PARSERS.values(), ids=list(PARSERS))
@given(text=NOISE, opened=st.booleans())
@settings(max_examples=300)
def test_any_text_is_taken_apart(parser: ToolCallParser, text: str, opened: bool) -> None:
    parsed = parser.parse(text, TOOLS, opened=opened)
    assert parsed == parser.parse(text, TOOLS, opened=opened)
    places = [(call.start, call.end) for call in parsed.calls]
    assert all(start < end for start, end in places)
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    assert len({call.id for call in parsed.calls}) == len(parsed.calls)
    for call in parsed.calls:
        assert call.error is not None or call.name
    message = parsed.message(text)
    assert message.raw_content == text or (message.raw_content is None and parsed.content == text)
    assert parsed.suspected_unparsed == looks_unparsed(message, TOOLS)  # whoever looks at it


@given(st.lists(ARGUMENTS, min_size=1, max_size=3), texts())
@settings(max_examples=100)
def test_hermes_reads_what_json_writes(told: list[dict[str, Any]], before: str) -> None:
    parser = parser_named("hermes")
    written = [json.dumps(arguments, ensure_ascii=False) for arguments in told]
    calls = [f'<tool_call>\n{{"name": "note", "arguments": {w}}}\n</tool_call>' for w in written]
    before = before.replace("<", "(")
    text = f"{before}\n" + "\n".join(calls)
    parsed = parser.parse(text, TOOLS)
    assert [call.arguments_text for call in parsed.calls] == written
    assert [text[call.start : call.end] for call in parsed.calls] == calls
    assert parsed.content == before.strip()


@pytest.mark.parametrize("family", ["chatml", "coder"])
@given(told=st.lists(ARGUMENTS, min_size=1, max_size=3))
@settings(max_examples=60)
def test_what_a_template_writes_the_parser_reads(family: str, told: list[dict[str, Any]]) -> None:
    """The form of calls in a template and its parser are two sides of one thing. (A value that is
    itself markup in the very place of the template's is ambiguous in the form without escapes.)"""
    renderer = tiny_renderer(family)
    parser = parser_named(renderer.parser_name)
    told = [{k: _plain(v, family) for k, v in arguments.items()} for arguments in told]
    calls = tuple(
        ToolCall(id=f"c{n}", name="note", arguments=json.dumps(arguments))
        for n, arguments in enumerate(told)
    )
    ask = UserMessage(content="Go.")
    turn = renderer.text([ask, AssistantMessage(tool_calls=calls)], TOOLS, generation_prompt=False)
    said = turn.rpartition("<|im_start|>assistant\n")[2].rpartition("<|im_end|>")[0]
    parsed = parser.parse(said, TOOLS)
    assert [call.error for call in parsed.calls] == [None] * len(told)
    assert [json.loads(call.arguments_text) for call in parsed.calls] == [
        json.loads(json.dumps(arguments)) for arguments in told
    ]


def _plain(value: Any, family: str) -> Any:
    """Text without half characters, which no JSON of ours holds; and for the form without escapes,
    without what closes a parameter."""
    if not isinstance(value, str):
        return value
    text = value.encode("utf-8", "replace").decode()
    return text.replace("<", "(") if family == "coder" else text


@pytest.mark.parametrize(
    "text",
    [
        r'<tool_call>{"name": "a\qb", "arguments": {}}</tool_call>',
        r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
        r'<tool_call>{"name": "f", "arguments": "\ud800"}</tool_call>',
        '<tool_call><function=f><parameter=a>["\\ud800"]</parameter></function></tool_call>',
        "<tool_call><function=f><parameter=a>[1e999]</parameter></function></tool_call>",
    ],
)
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_escapes_that_stand_for_nothing_give_a_message_that_can_be_stored(text, name):
    tools = [{"type": "function", "function": {"name": "f", "parameters": _LISTED}}]
    message = parser_named(name).parse(text, tools).message(text)
    assert msgspec.json.encode(message)
    for call in message.tool_calls:
        assert "Infinity" not in call.arguments


_LISTED = {"type": "object", "properties": {"a": {"type": "array"}}}
