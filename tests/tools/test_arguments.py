"""From a model's text to arguments: exact where it is right, clear where it is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import ToolError
from hermes_rl.tools import TOOLS, read_arguments

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer", "minimum": 1, "maximum": 10},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "mode": {"type": "string", "enum": ["a", "b"]},
        "names": {"type": "array", "items": {"type": "string"}},
        "inner": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
        },
        "either": {"type": ["string", "null"]},
    },
    "required": ["text"],
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
RIGHT = st.fixed_dictionaries(
    {"text": st.text(st.characters(exclude_categories=["Cs"]))},
    optional={
        "count": st.integers(1, 10),
        "ratio": st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "mode": st.sampled_from(["a", "b"]),
        "names": st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
        "inner": st.fixed_dictionaries({"n": st.integers(-(2**60), 2**60)}),
        "either": st.none() | st.just("x"),
    },
)


@given(RIGHT, st.booleans())
def test_right_arguments_come_through_unchanged(value: dict[str, Any], ascii_only: bool) -> None:
    assert read_arguments(json.dumps(value, ensure_ascii=ascii_only), SCHEMA) == value


@given(RIGHT)
def test_scalars_that_came_as_text_are_read(value: dict[str, Any]) -> None:
    loose = {
        k: json.dumps(v) if k in ("count", "ratio", "flag", "names", "inner") else v
        for k, v in value.items()
    }
    assert read_arguments(json.dumps(loose), SCHEMA) == value


@given(st.text())
def test_any_text_is_read_or_explained(text: str) -> None:
    try:
        assert isinstance(read_arguments(text, SCHEMA)["text"], str)
    except ToolError as error:
        reason = str(error)
    else:
        return
    assert "argument" in reason
    assert "\n" not in reason


@given(JSON)
def test_any_json_fits_the_schema_or_is_explained(value: Any) -> None:
    for tool in TOOLS.values():
        try:
            read = read_arguments(json.dumps(value), tool.parameters)
        except ToolError:
            continue
        assert set(tool.parameters["required"]) <= set(read) <= set(tool.parameters["properties"])


@given(RIGHT, st.data())
def test_cut_json_never_runs(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    with pytest.raises(ToolError, match="not valid JSON"):
        read_arguments(cut, SCHEMA)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": "a"', "unexpected end at line 1, column 13"),
        ('{"text": "a",\n "flag": tru}', "at line 2, column 10, near"),
        ("{'text': 'a'}", "Expecting property name enclosed in double quotes at line 1, column 2"),
        ('{"text": "a"} and more', "Extra data at line 1, column 15"),
        ('{"text": "a\nb"}', "Invalid control character at line 1, column 12"),
        ('{"text": NaN}', "not valid JSON"),
        ('{"text": "\\ud800"}', "not valid JSON"),
        ('"ls"', "must be a JSON object, not a string"),
        ("null", "must be a JSON object, not null"),
        ("", "no arguments given; required: text"),
        (" \n", "no arguments given; required: text"),
        ("{}", "missing argument 'text' (arguments: text, count"),
        ('{"text": null}', "'text' must be of type string, not null"),
        ('{"text": ["a"]}', "'text' must be of type string, not an array"),
        ('{"text": true}', "'text' must be of type string, not a boolean"),
        ('{"text": "a", "txt": 1}', "unknown argument 'txt' (arguments: text"),
        ('{"text": "a", "count": 1.5}', "'count' must be of type integer, not a number"),
        ('{"text": "a", "count": true}', "'count' must be of type integer, not a boolean"),
        ('{"text": "a", "count": "many"}', "'count' must be of type integer, not a string"),
        ('{"text": "a", "count": 0}', "'count' must be at least 1, not 0"),
        ('{"text": "a", "count": "11"}', "'count' must be at most 10, not 11"),
        ('{"text": "a", "flag": 1}', "'flag' must be of type boolean, not a number"),
        ('{"text": "a", "mode": "c"}', "'mode' must be one of \"a\", \"b\", not 'c'"),
        ('{"text": "a", "names": ["x", {}]}', "'names[1]' must be of type string, not an object"),
        ('{"text": "a", "inner": {}}', "missing argument 'inner.n'"),
        ('{"text": "a", "inner": {"n": 1, "m": 2}}', "unknown argument 'inner.m'"),
        ("[" * 200_000 + "]" * 200_000, "not valid JSON"),
    ],
)
def test_what_is_wrong_and_where(text: str, said: str) -> None:
    with pytest.raises(ToolError) as caught:
        read_arguments(text, SCHEMA)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given_value", "read"),
    [
        ({"text": 5}, {"text": "5"}),
        ({"text": 0.5}, {"text": "0.5"}),
        ({"text": "5"}, {"text": "5"}),
        ({"text": "a", "count": 3.0}, {"text": "a", "count": 3}),
        ({"text": "a", "count": " 3 "}, {"text": "a", "count": 3}),
        ({"text": "a", "flag": "False"}, {"text": "a", "flag": False}),
        ({"text": "a", "count": None}, {"text": "a"}),
        ({"text": "a", "either": None}, {"text": "a", "either": None}),
    ],
)
def test_gentle_coercion(given_value: dict[str, Any], read: dict[str, Any]) -> None:
    got = read_arguments(json.dumps(given_value), SCHEMA)
    assert got == read
    assert [type(v) for v in got.values()] == [type(v) for v in read.values()]


def test_empty_text_is_an_empty_object_where_nothing_is_required() -> None:
    assert read_arguments("", {"type": "object", "properties": {}}) == {}
    with pytest.raises(ToolError, match="unknown argument 'x' \\(this tool takes no arguments\\)"):
        read_arguments('{"x": 1}', {"type": "object", "properties": {}})
    assert read_arguments('{"x": 1}', {"additionalProperties": True}) == {"x": 1}
