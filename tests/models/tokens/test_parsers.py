"""Tool calls in text: exact, typed by the schema, and one bad call loses no other."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from render_kit import texts

from hermes_rl.errors import UserError
from hermes_rl.messages import AssistantMessage, ToolCall, UserMessage
from hermes_rl.models import has_unparsed_call
from hermes_rl.models.tokens import PARSERS, Parsed, ToolCallParser, find_parser, typed
from hermes_rl.testing import tiny_renderer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Level": {"enum": ["low", "high"]}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "command": {"type": "string"},
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
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("terminal", "now")
]
HERMES, CODER, LLAMA, MISTRAL = (
    find_parser(name) for name in ("hermes", "qwen3_coder", "llama3_json", "mistral")
)
ID = "a1B2c3D4e"
every_parser = pytest.mark.parametrize("parser", PARSERS.values(), ids=list(PARSERS))


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


H_LS, H_NOW = hermes("terminal", '{"command":  "ls"}'), hermes("now", "{}")
C_A, C_NOW = coder("terminal", command="a"), coder("now")
L_LS = '{"name": "terminal", "parameters": {"command":  "ls"}}'
M_NOW = '{"name": "now", "arguments": {}}'
TEXTS = yaml.safe_load(Path(__file__).with_name("parsed_texts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("parser", "case"), [(name, case) for name, cases in TEXTS["calls"].items() for case in cases]
)
def test_calls_are_parsed_with_arguments_as_written(parser: str, case: dict[str, Any]) -> None:
    text, calls = case["text"], [(*call, None)[:3] for call in case["calls"]]
    parsed = find_parser(parser).parse(text, TOOLS)
    assert [(c.name, c.arguments_text) for c in parsed.calls] == [call[:2] for call in calls]
    for found, (_, _, error) in zip(parsed.calls, calls, strict=True):
        assert (found.error is None) if error is None else (error in (found.error or ""))
    assert parsed.content == case.get("content", "")
    assert not parsed.suspected_unparsed
    assert len({call.id for call in parsed.calls}) == len(calls)
    message = parsed.message(text)
    assert message.raw_content == text
    assert [c.arguments for c in message.tool_calls] == [c.arguments_text for c in parsed.calls]


def test_spans_of_calls_include_their_tags() -> None:
    for parser, calls in ((HERMES, (H_LS, H_NOW)), (CODER, (C_A, C_NOW))):
        text = "First.\n" + "\n".join(calls) + "\nLast."
        found = parser.parse(text, TOOLS).calls
        assert tuple(text[call.start : call.end] for call in found) == calls


@pytest.mark.parametrize("case", TEXTS["other"])
def test_other_text_stays_and_suspected_calls_are_flagged(case: dict[str, Any]) -> None:
    for name in case["parsers"]:
        parsed = find_parser(name).parse(case["text"], TOOLS)
        suspected = case.get("suspected", False)
        assert parsed == Parsed(content=case["text"], suspected_unparsed=suspected)
        assert parsed.message(case["text"]).raw_content is None


def test_json_is_an_answer_without_tools() -> None:
    assert LLAMA.parse(L_LS) == Parsed(content=L_LS)


@every_parser
def test_many_tags_are_parsed_quickly(parser: ToolCallParser) -> None:
    """A model that repeats itself for its whole budget."""
    repeated = {
        "hermes": "<tool_call>\n{",
        "qwen3_coder": "<tool_call>\n<function=now>\n<parameter=a>\n",
        "llama3_json": '{"name": "now", "parameters": {\n',
        "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {',
    }
    started = time.perf_counter()
    parsed = parser.parse(repeated[parser.name] * 5_000, TOOLS)
    assert time.perf_counter() - started < 20  # quadratic reading would take minutes
    assert parsed.calls
    assert all(call.error for call in parsed.calls)


def test_deeply_nested_json_is_an_error() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    parsed = HERMES.parse(hermes("terminal", f'{{"command": {deep}}}') + H_NOW, TOOLS)
    assert [call.error is None for call in parsed.calls] == [False, True]
    assert "nested too deeply" in (parsed.calls[0].error or "")


@every_parser
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
def test_reasoning_is_split_from_the_answer(
    parser: ToolCallParser, text: str, opened: bool, reasoning: str | None, content: str
) -> None:
    parsed = parser.parse(text, TOOLS, opened=opened)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    message = parsed.message(text)
    assert message.reasoning_content == (reasoning or None)
    assert message.raw_content == (None if content == text else text)


@pytest.mark.parametrize(("parser", "call"), [(HERMES, H_NOW), (CODER, C_NOW)])
def test_call_in_reasoning_is_reasoning(parser: ToolCallParser, call: str) -> None:
    parsed = parser.parse(f"<think>\nI could {call}\n</think>\n\n{call}", TOOLS)
    assert len(parsed.calls) == 1
    assert not parsed.suspected_unparsed
    assert call in (parsed.reasoning or "")
    cut = parser.parse(f"<think>\nI do {call}", TOOLS)
    assert cut.calls == ()
    assert cut.suspected_unparsed


def test_ids_are_hashes_of_position_text_and_salt() -> None:
    ids, moved, salted = (
        [call.id for call in HERMES.parse(text, TOOLS, salt=salt).calls]
        for text, salt in ((H_NOW * 2, ""), (f"Well. {H_NOW * 2}", ""), (H_NOW * 2, "turn 2"))
    )
    assert ids == moved
    assert len({*ids, *salted}) == 4
    assert all(len(i) == 29 and i.startswith("call_") for i in ids)


def test_mistral_call_keeps_its_id() -> None:
    custom = M_NOW[:-1] + f', "id": "{ID}"}}'
    first, again = MISTRAL.parse(f"[TOOL_CALLS] [{custom}, {custom}]", TOOLS).calls
    (named,) = MISTRAL.parse(f"[TOOL_CALLS]now[CALL_ID]{ID}[ARGS]{{}}", TOOLS).calls
    (odd,) = MISTRAL.parse(f"[TOOL_CALLS] [{custom.replace(ID, 'x')}]", TOOLS).calls
    assert first.id == named.id == ID
    assert again.id.startswith("call_")
    assert odd.id.startswith("call_")


def test_an_unknown_parser_is_refused_with_the_known_names() -> None:
    with pytest.raises(UserError, match="use one of hermes, qwen3_coder, llama3_json, mistral"):
        find_parser("hermess")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("command", text, text) for text in ("5", "true", "null", '{"a": 1}', "  two\n lines\n")),
        ("command", '"quoted"', '"quoted"'),
        ("count", " 5 ", 5),
        ("count", "5.0", 5),
        *(("count", text, text) for text in ("5.5", "five", "true")),
        ("ratio", "5", 5),
        ("ratio", "0.5", 0.5),
        ("ratio", "NaN", "NaN"),
        ("force", "true", True),
        ("force", "False", False),
        ("force", "1", "1"),
        ("names", '["a", "b"]', ["a", "b"]),
        ("names", "a, b", "a, b"),
        ("names", "[1e999]", "[1e999]"),
        ("options", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("options", "{'a': 1}", "{'a': 1}"),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("limit", "7", 7),
        ("limit", "None", None),
        *((key, "7", "7") for key in ("level", "loop", "open", "unknown")),
        ("level", "low", "low"),
        ("mode", "2", 2),
    ],
)
def test_bare_text_gets_the_type_of_its_schema(name: str, text: str, value: Any) -> None:
    (found,) = CODER.parse(coder("now", **{name: text}), TOOLS).calls
    assert found.error is None
    assert json.loads(found.arguments_text) == {name: value}
    (found,) = CODER.parse(coder("now", **{name: text})).calls  # a tool that is not offered
    assert json.loads(found.arguments_text) == {name: text}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/$defs/Missing"}, "5"),
        ({"$ref": "https://example.com/schema"}, "5"),
        ({"$ref": "#/properties/count"}, 5),
        ("nonsense", "5"),
    ],
)
def test_dangling_references_leave_text(schema: Any, value: Any) -> None:
    assert typed("5", schema, SCHEMA) == value


@pytest.mark.parametrize(
    "value",
    [
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
def test_values_may_contain_tags(value: str) -> None:
    for values in ({"content": value, "path": "a"}, {"path": "a", "content": value}):
        text = coder("now", **values)
        (found,) = CODER.parse(text, TOOLS).calls
        assert json.loads(found.arguments_text) == values
        assert (found.error, found.end) == (None, len(text))


# Whatever a model writes.

PIECES = st.sampled_from(
    (
        *("<tool_call>", "</tool_call>", "\n", " ", '{"name": "now"', ', "arguments": ', "{}", "}"),
        *("{", '"', "\\", "<function=now>", "</function>", "<parameter=command>", "</parameter>"),
        *("<think>", "</think>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"),
        *('{"name": "now", "parameters": ', '{"name": "", "arguments": ', '"id": "abcdefgh1"'),
        *("now", "[", "]", ",", ";", "word", "\ud800", "[" * 500),
    )
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "command": texts(),
        "count": st.integers(),
        "names": st.lists(st.integers() | st.booleans() | st.none(), max_size=3),
        "force": st.booleans(),
    },
)


@every_parser
@given(text=st.lists(PIECES, max_size=12).map("".join), opened=st.booleans())
@settings(max_examples=300)
def test_any_text_is_parsed_into_parts(parser: ToolCallParser, text: str, opened: bool) -> None:
    parsed = parser.parse(text, TOOLS, opened=opened)
    assert parsed == parser.parse(text, TOOLS, opened=opened)
    places = [(call.start, call.end) for call in parsed.calls]
    assert all(start < end for start, end in places)
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    assert len({call.id for call in parsed.calls}) == len(parsed.calls)
    assert all(call.error is not None or call.name for call in parsed.calls)
    message = parsed.message(text)
    assert message.raw_content == text or (message.raw_content is None and parsed.content == text)
    assert parsed.suspected_unparsed == has_unparsed_call(message, TOOLS)


@pytest.mark.parametrize("family", ["chatml", "coder", "llama3", "mistral"])
@given(drawn=st.lists(ARGUMENTS, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_parser_reads_what_its_template_writes(family: str, drawn: list[dict[str, Any]]) -> None:
    renderer = tiny_renderer(family)
    arguments = [
        {key: _storable(value, family) for key, value in one.items()}
        for one in (drawn[:1] if family == "llama3" else drawn)
    ]
    calls = tuple(
        ToolCall(id=f"callid00{n}", name="terminal", arguments=json.dumps(one))
        for n, one in enumerate(arguments)
    )
    ask = UserMessage(content="Go.")
    whole = renderer.text([ask, AssistantMessage(tool_calls=calls)], TOOLS, generation_prompt=False)
    answer = whole.removeprefix(renderer.text([ask], TOOLS))
    assert answer != whole
    for end in ("\n", "<|im_end|>", "<|eom_id|>", "</s>"):
        answer = answer.removesuffix(end)
    parsed = find_parser(renderer.parser_name).parse(answer, TOOLS)
    assert [call.error for call in parsed.calls] == [None] * len(calls)
    assert [json.loads(call.arguments_text) for call in parsed.calls] == arguments
    assert parsed.content == ""
    if family == "mistral":
        assert [call.id for call in parsed.calls] == [call.id for call in calls]


def _storable(value: Any, family: str) -> Any:
    """Text without lone surrogates; for the form without escapes, without what closes a value."""
    if not isinstance(value, str):
        return value
    text = value.encode("utf-8", "replace").decode()
    return text.replace("<", "(") if family == "coder" else text


@pytest.mark.parametrize(
    "text",
    [
        r'<tool_call>{"name": "a\qb", "arguments": {}}</tool_call>',
        r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
        r'<tool_call>{"name": "now", "arguments": "\ud800"}</tool_call>',
        coder("now", names='["\\ud800"]'),
    ],
)
@every_parser
def test_lone_surrogates_give_a_storable_message(parser: ToolCallParser, text: str) -> None:
    assert msgspec.json.encode(parser.parse(text, TOOLS).message(text))
