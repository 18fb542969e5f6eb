"""Qwen3-Coder's calls: bare text, typed by the tool's schema and by nothing else."""

import json
from typing import Any

import pytest

from hermes_rl.models.tokens.parsers import parser_named, typed

CODER = parser_named("qwen3_coder")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Level": {"enum": ["low", "high"]}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "force": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "level": {"$ref": "#/$defs/Level"},
        "loop": {"$ref": "#/$defs/Loop"},
        "mode": {"enum": [1, 2]},
        "open": {},
    },
}
TOOLS = [{"type": "function", "function": {"name": "write_file", "parameters": SCHEMA}}]


def call(**values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=write_file>\n{inner}</function>\n</tool_call>"


def read(text: str) -> dict[str, Any]:
    (found,) = CODER.parse(text, TOOLS).calls
    assert found.error is None
    assert text[found.start : found.end] == text
    value = json.loads(found.arguments_text)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("path", "5", "5"),
        ("path", "true", "true"),
        ("path", "null", "null"),
        ("path", '{"a": 1}', '{"a": 1}'),
        ("path", "  two\n lines\n", "  two\n lines\n"),
        ("count", "5", 5),
        ("count", " 5 ", 5),
        ("count", "5.0", 5),
        ("count", "5.5", "5.5"),
        ("count", "five", "five"),
        ("count", "true", "true"),
        ("ratio", "5", 5),
        ("ratio", "0.5", 0.5),
        ("ratio", "NaN", "NaN"),
        ("force", "true", True),
        ("force", "False", False),
        ("force", "1", "1"),
        ("names", '["a", "b"]', ["a", "b"]),
        ("names", "a, b", "a, b"),
        ("options", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("options", "{'a': 1}", "{'a': 1}"),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("limit", "7", 7),
        ("limit", "None", None),
        ("level", "low", "low"),
        ("level", "7", "7"),
        ("loop", "7", "7"),
        ("mode", "2", 2),
        ("open", "7", "7"),
        ("unknown", "7", "7"),
    ],
)
def test_the_schema_tells_the_type(name: str, text: str, value: Any) -> None:
    assert read(call(**{name: text})) == {name: value}


def test_tools_without_a_schema_take_text() -> None:
    (found,) = CODER.parse(call(count="5")).calls
    assert json.loads(found.arguments_text) == {"count": "5"}


@pytest.mark.parametrize(
    "value",
    [
        "</parameter>",
        "a </parameter> b </function> c </tool_call> d",
        "<tool_call>\n<function=x>\n",
        "<parameter=path>",
        "line\n</tool_call>\nline",
        "",
        "\n",
        "\n\nkept\n\n",
        "<think>no</think>",
    ],
)
def test_tags_may_stand_in_values(value: str) -> None:
    assert read(call(content=value, path="a")) == {"content": value, "path": "a"}
    assert read(call(path="a", content=value)) == {"content": value, "path": "a"}


def test_a_call_without_parameters_is_one() -> None:
    assert read(call()) == {}
    assert read("<tool_call>\n<function=write_file></function>\n</tool_call>") == {}


def test_closing_tags_of_parameters_may_be_missing() -> None:
    text = (
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n<parameter=count>\n5\n"
        "</function>\n</tool_call>"
    )
    assert read(text) == {"path": "a.txt", "count": 5}


def test_the_opening_tag_may_be_missing_where_the_tool_is_offered() -> None:
    bare = call(path="a").removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    text = f"I write.\n{bare}\nDone."
    parsed = CODER.parse(text, TOOLS)
    assert [c.name for c in parsed.calls] == ["write_file"]
    assert parsed.content == "I write.\nDone."
    assert not parsed.suspected_unparsed
    other = CODER.parse(text.replace("write_file", "unknown"), TOOLS)
    assert other.calls == ()
    assert other.suspected_unparsed
    assert other.content == text.replace("write_file", "unknown")


@pytest.mark.parametrize(
    "cut",
    [
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.tx",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n",
        "<tool_call>\n<function=write_file>\n",
        "<tool_call>\n<function=write_file>\n<parameter=pa",
    ],
)
def test_a_cut_call_is_an_error_and_keeps_its_text(cut: str) -> None:
    parsed = CODER.parse(call(path="a") + "\n" + cut, TOOLS)
    first, last = parsed.calls
    assert first.error is None
    assert last.name == "write_file"
    assert last.error
    assert last.arguments_text == cut.removeprefix("<tool_call>\n<function=write_file>")
    assert parsed.content == ""


def test_text_where_a_parameter_belongs_is_an_error_and_loses_no_other_call() -> None:
    bad = "<tool_call>\n<function=write_file>\npath = a\n</function>\n</tool_call>"
    parsed = CODER.parse(f"{call(path='a')}\n{bad}\n{call(count='2')}", TOOLS)
    assert [c.error is None for c in parsed.calls] == [True, False, True]
    assert "where a parameter belongs" in (parsed.calls[1].error or "")
    assert json.loads(parsed.calls[2].arguments_text) == {"count": 2}
    assert parsed.content == ""


def test_a_call_of_no_function_is_an_error() -> None:
    (found,) = CODER.parse("<tool_call>\n<function=>\n</function>\n</tool_call>", TOOLS).calls
    assert found.error == "the tool call names no function"


def test_references_that_lead_nowhere_are_text() -> None:
    assert typed("5", {"$ref": "#/$defs/Missing"}, SCHEMA) == "5"
    assert typed("5", {"$ref": "https://example.com/schema"}, SCHEMA) == "5"
    assert typed("5", {"$ref": "#/properties/count"}, SCHEMA) == 5
    assert typed("5", "nonsense", SCHEMA) == "5"


def test_a_value_that_never_ends_takes_no_later_call_with_it() -> None:
    bad = "<tool_call>\n<function=write_file>\n<parameter=content>\nno end"
    parsed = CODER.parse(f"{bad}\n{call(path='a')}\n{bad}\n{call()}", TOOLS)
    assert [c.error is None for c in parsed.calls] == [False, True, False, True]
    assert json.loads(parsed.calls[1].arguments_text) == {"path": "a"}
    assert parsed.content == ""
