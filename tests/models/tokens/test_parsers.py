"""Tool calls out of text: exact, typed by the schema, and one bad call loses no other."""

import json
import time
from typing import Any

import pytest

from hermes_rl.errors import UserError
from hermes_rl.models.tokens.parsers import PARSERS, Parsed, ToolCallParser, parser_named


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("terminal", command={"type": "string"}, timeout={"type": "integer"}),
    tool("write_file", path={"type": "string"}, content={"type": "string"}),
    tool("now"),
]
HERMES, CODER = parser_named("hermes"), parser_named("qwen3_coder")
TAGGED = [HERMES, CODER]
"""Parsers of forms that JSON alone is none of."""
RUNS = {
    "hermes": "<tool_call>\n{",
    "qwen3_coder": "<tool_call>\n<function=now>\n<parameter=a>\n",
    "llama3_json": '{"name": "now", "parameters": {\n',
    "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {',
}


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def spans(parsed: Parsed, text: str) -> list[str]:
    return [text[call.start : call.end] for call in parsed.calls]


def arguments(parsed: Parsed) -> list[Any]:
    return [json.loads(call.arguments_text) for call in parsed.calls]


def test_calls_are_read_and_their_places_kept() -> None:
    one, two = hermes("terminal", '{"command":  "ls",\n "timeout": 5}'), hermes("now", "{}")
    text = f"First.\n{one}\n{two}\nAnd last."
    parsed = HERMES.parse(text, TOOLS)
    assert [call.name for call in parsed.calls] == ["terminal", "now"]
    assert parsed.calls[0].arguments_text == '{"command":  "ls",\n "timeout": 5}'
    assert spans(parsed, text) == [one, two]
    assert parsed.content == "First.\nAnd last."
    assert [call.error for call in parsed.calls] == [None, None]
    assert not parsed.suspected_unparsed
    message = parsed.message(text)
    assert message.raw_content == text
    assert [call.arguments for call in message.tool_calls] == [
        call.arguments_text for call in parsed.calls
    ]


@pytest.mark.parametrize("parser", PARSERS.values(), ids=list(PARSERS))
def test_plain_text_is_left_as_it_is(parser: ToolCallParser) -> None:
    for text in ("", " \n hello \n", "```sh\nls\n```", "if a < b and {c: d}", '{"a": 1}'):
        parsed = parser.parse(text, TOOLS)
        assert parsed == Parsed(content=text)
        assert parsed.message(text).raw_content is None


# The four cases that an engine's parser was seen to lose: a closing tag inside of an argument,
# empty arguments, malformed JSON, a call that was cut.

HERMES_CASES = {
    "closing tag in an argument": (
        hermes("write_file", '{"path": "a", "content": "x </tool_call> <tool_call>{} y"}'),
        {"path": "a", "content": "x </tool_call> <tool_call>{} y"},
        None,
    ),
    "empty arguments": (hermes("now", "{}"), {}, None),
    "no arguments": ('<tool_call>\n{"name": "now"}\n</tool_call>', {}, None),
    "null arguments": (hermes("now", "null"), {}, None),
    "arguments as text": (
        hermes("terminal", json.dumps('{"command": "ls"}')),
        {"command": "ls"},
        None,
    ),
    "raw line breaks": (hermes("terminal", '{"command": "a\nb"}'), None, None),
    "malformed JSON": (
        hermes("terminal", '{"command": "ls",, }'),
        '{"command": "ls",, }}',
        "cannot be read: Expecting property name",
    ),
    "single quotes": (
        hermes("terminal", "{'command': 'ls'}"),
        "{'command': 'ls'}}",
        "cannot be read",
    ),
    "cut": (
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "l',
        '{"command": "l',
        "ends in the middle",
    ),
    "cut before its name": ('<tool_call>\n{"na', '{"na', "ends in the middle"),
    "closing tag left out": (
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}',
        {"command": "ls"},
        None,
    ),
}


@pytest.mark.parametrize("case", HERMES_CASES.values(), ids=list(HERMES_CASES))
def test_hermes_hard_cases(case: tuple[str, Any, str | None]) -> None:
    text, wanted, error = case
    good = hermes("terminal", '{"command": "pwd"}')
    for before in ("", good + "\n"):
        parsed = HERMES.parse(before + text, TOOLS)
        assert len(parsed.calls) == (2 if before else 1)
        call = parsed.calls[-1]
        if error is None:
            assert call.error is None
            assert call.name in ("terminal", "write_file", "now")
        else:
            assert error in (call.error or "")
        if isinstance(wanted, str):
            assert call.arguments_text == wanted
        elif wanted is not None:
            assert json.loads(call.arguments_text) == wanted
        assert (before + text)[call.start : call.end] == text
        assert parsed.content == ""
        if before:
            assert parsed.calls[0].error is None
            assert json.loads(parsed.calls[0].arguments_text) == {"command": "pwd"}


def test_a_bad_call_in_the_middle_loses_neither_of_its_neighbours() -> None:
    bad = '<tool_call>\n{"name": "terminal", "arguments": {"command": }}\n</tool_call>'
    text = "\n".join([hermes("now", "{}"), bad, hermes("terminal", '{"command": "ls"}')])
    parsed = HERMES.parse(text, TOOLS)
    assert [call.name for call in parsed.calls] == ["now", "terminal", "terminal"]
    assert [call.error is None for call in parsed.calls] == [True, False, True]
    assert parsed.calls[1].arguments_text == '{"command": }}'
    assert parsed.content == ""
    assert len({call.id for call in parsed.calls}) == 3


def test_a_call_that_the_next_one_interrupts_ends_there() -> None:
    text = '<tool_call>\n{"name": "terminal", "arg\n' + hermes("now", "{}")
    parsed = HERMES.parse(text, TOOLS)
    assert [(call.name, call.error is None) for call in parsed.calls] == [
        ("terminal", False),
        ("now", True),
    ]


def test_text_between_the_json_and_its_closing_tag_is_an_error() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}} and more\n</tool_call>'
    (call,) = HERMES.parse(text, TOOLS).calls
    assert "has text between" in (call.error or "")
    assert (call.name, call.start, call.end) == ("now", 0, len(text))


def test_a_call_without_a_name_is_an_error() -> None:
    for text in ('<tool_call>{"arguments": {}}</tool_call>', hermes("", "{}")):
        (call,) = HERMES.parse(text, TOOLS).calls
        assert 'no "name"' in (call.error or "")
    (call,) = HERMES.parse('<tool_call>{"name": 7, "arguments": {}}</tool_call>').calls
    assert call.name == ""
    assert call.error


@pytest.mark.parametrize("parser", PARSERS.values(), ids=list(PARSERS))
def test_a_long_run_of_tags_is_read_in_time(parser: ToolCallParser) -> None:
    """A model that repeats itself for its whole budget."""
    started = time.perf_counter()
    parsed = parser.parse(RUNS[parser.name] * 5_000, TOOLS)
    assert time.perf_counter() - started < 20  # quadratic reading would take minutes
    assert parsed.calls
    assert all(call.error for call in parsed.calls)


def test_deep_json_is_an_error_and_not_a_crash() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    text = hermes("terminal", f'{{"command": {deep}}}') + hermes("now", "{}")
    parsed = HERMES.parse(text, TOOLS)
    assert [call.error is None for call in parsed.calls] == [False, True]
    assert "nested too deeply" in (parsed.calls[0].error or "")


# Reasoning.


@pytest.mark.parametrize("parser", PARSERS.values(), ids=list(PARSERS))
@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\n<think>Hm.</think>Yes.", False, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("Hm.</think>Yes.", False, None, "Hm.</think>Yes."),
        ("Hm and no end", True, "Hm and no end", ""),
        ("<think>\nHm and no end", False, "Hm and no end", ""),
        ("I say <think>this</think>.", False, None, "I say <think>this</think>."),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_reasoning_is_split_off(
    parser: ToolCallParser, text: str, opened: bool, reasoning: str | None, content: str
) -> None:
    parsed = parser.parse(text, TOOLS, opened=opened)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    message = parsed.message(text)
    assert message.reasoning_content == (reasoning or None)
    assert message.raw_content == (None if content == text else text)


@pytest.mark.parametrize(
    ("parser", "call"),
    [(HERMES, hermes("now", "{}")), (CODER, coder("now"))],
    ids=["hermes", "qwen3_coder"],
)
def test_a_call_in_a_thought_is_a_thought(parser: ToolCallParser, call: str) -> None:
    parsed = parser.parse(f"<think>\nI could {call}\n</think>\n\n{call}", TOOLS)
    assert len(parsed.calls) == 1
    assert not parsed.suspected_unparsed
    assert call in (parsed.reasoning or "")
    cut = parser.parse(f"<think>\nI do {call}", TOOLS)
    assert cut.calls == ()
    assert cut.suspected_unparsed


# What looks like a call and is none.


@pytest.mark.parametrize("parser", TAGGED, ids=[parser.name for parser in TAGGED])
@pytest.mark.parametrize(
    ("text", "suspected"),
    [
        ('```json\n{"name": "terminal", "arguments": {"command": "ls"}}\n```', True),
        ('{"name": "terminal", "parameters": {"command": "ls"}}', True),
        ('{"name": "unknown", "arguments": {}}', False),
        ("Write <tool_call> around it.", True),
        ("</tool_call>", True),
        ("```sh\nls -la\n```", False),
        ('[TOOL_CALLS] [{"name": "x"}]', True),
        ("a function= b", False),
    ],
)
def test_what_may_have_been_a_call_is_flagged_and_left(
    parser: ToolCallParser, text: str, suspected: bool
) -> None:
    parsed = parser.parse(text, TOOLS)
    assert parsed == Parsed(content=text, suspected_unparsed=suspected)


def test_each_flags_the_form_of_the_other() -> None:
    assert HERMES.parse(coder("now"), TOOLS).suspected_unparsed
    assert CODER.parse(hermes("now", "{}"), TOOLS).suspected_unparsed


# Ids.


def test_ids_are_of_place_text_and_salt() -> None:
    text = hermes("now", "{}") + hermes("now", "{}")
    first, again = HERMES.parse(text, TOOLS), HERMES.parse(f"Well. {text}", TOOLS)
    ids = [call.id for call in first.calls]
    assert ids == [call.id for call in again.calls]
    assert len(set(ids)) == 2
    assert ids != [call.id for call in HERMES.parse(text, TOOLS, salt="turn 2").calls]
    assert all(len(i) == 29 and i.startswith("call_") for i in ids)


def test_an_unknown_parser_says_which_there_are() -> None:
    with pytest.raises(UserError, match="use one of hermes, qwen3_coder, llama3_json, mistral"):
        parser_named("hermess")
