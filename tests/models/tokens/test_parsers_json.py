"""Calls that are JSON without tags: Llama 3's and Mistral's forms."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_kit import texts

from hermes_rl.messages import AssistantMessage, ToolCall, UserMessage
from hermes_rl.models.tokens.parsers import Parsed, parser_named
from hermes_rl.testing.tiny_tokenizer import tiny_renderer

LLAMA, MISTRAL = parser_named("llama3_json"), parser_named("mistral")
PROPERTIES = {"command": {"type": "string"}, "timeout": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("terminal", "now")
]
LS = '{"name": "terminal", "parameters": {"command":  "ls"}}'
NOW = '{"name": "now", "parameters": {}}'
BAD = '{"name": "terminal", "parameters": {"command": }}'
ID = "a1B2c3D4e"


def told(parsed: Parsed) -> list[tuple[str, str, bool]]:
    """Names, arguments, and whether nothing is wrong."""
    return [(call.name, call.arguments_text, call.error is None) for call in parsed.calls]


LISTED = ("terminal", '{"command":  "ls"}', True)
TIMED = ("now", "{}", True)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (LS, [LISTED], ""),
        (f"\n {LS}\n", [LISTED], ""),
        (f"<|python_tag|>{LS}", [LISTED], ""),
        (f"{LS}; {NOW}", [LISTED, TIMED], ""),
        (f"{LS}\n{NOW}", [LISTED, TIMED], ""),
        (f"<|python_tag|>{LS};<|python_tag|>{NOW}", [LISTED, TIMED], ""),
        (f"{LS}\n\nThat lists them.", [LISTED], "That lists them."),
        (LS.replace("parameters", "arguments"), [LISTED], ""),
        ('{"type": "function", ' + NOW[1:], [TIMED], ""),
        ('{"name": "now"}', [TIMED], ""),
        ('{"name": "now", "parameters": null}', [TIMED], ""),
        ('{"name": "unknown", "parameters": {}}', [("unknown", "{}", True)], ""),
        ('{"name": "", "parameters": {}}', [("", "{}", False)], ""),
        (f"{BAD}; {NOW}", [("terminal", '{"command": }}', False), TIMED], ""),
        ('{"name": "terminal", "parameters": {"com', [("terminal", '{"com', False)], ""),
    ],
)
def test_llama_calls_are_read(text: str, calls: list[Any], content: str) -> None:
    parsed = LLAMA.parse(text, TOOLS)
    assert told(parsed) == calls
    assert parsed.content == content
    assert not parsed.suspected_unparsed
    for call in parsed.calls:
        spelled = text[call.start : call.end]
        assert call.arguments_text.rstrip("}") in spelled or call.arguments_text == "{}"


@pytest.mark.parametrize(
    ("text", "suspected"),
    [
        ('{"name": "Ada", "age": 36}', False),
        ('{"name": "unknown", "parameters": {}} is no tool', False),
        ('[{"command": "ls"}]', False),
        (f"I would say {LS}", True),
        (f"```json\n{LS}\n```", True),
        ('{"name": "unknown", "parameters": {"a', False),
        ("<|python_tag|>print(1)", True),
    ],
)
def test_other_json_is_text_to_llama(text: str, suspected: bool) -> None:
    assert LLAMA.parse(text, TOOLS) == Parsed(content=text, suspected_unparsed=suspected)


def test_without_tools_json_is_an_answer() -> None:
    assert LLAMA.parse(LS) == Parsed(content=LS)


def test_why_a_call_cannot_be_read_is_told() -> None:
    (bad, _) = LLAMA.parse(f"{BAD}; {NOW}", TOOLS).calls
    assert "cannot be read: Expecting value" in (bad.error or "")
    (cut,) = LLAMA.parse(LS[:40], TOOLS).calls
    assert "ends in the middle" in (cut.error or "")
    (cut,) = MISTRAL.parse("[TOOL_CALLS]terminal{", TOOLS).calls
    assert "ends in the middle" in (cut.error or "")


M_LS = '{"name": "terminal", "arguments": {"command":  "ls"}}'
M_NOW = '{"name": "now", "arguments": {}}'
M_BAD = '{"name": "terminal", "arguments": {"command": }}'


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"[TOOL_CALLS] [{M_LS}]", [LISTED], ""),
        (f"Well.\n[TOOL_CALLS] [{M_LS}, {M_NOW}] Then.", [LISTED, TIMED], "Well.\nThen."),
        (f"[TOOL_CALLS][{M_LS}][TOOL_CALLS] [{M_NOW}]", [LISTED, TIMED], ""),
        (f"[TOOL_CALLS]{M_NOW}", [TIMED], ""),
        ('[TOOL_CALLS]terminal{"command":  "ls"}[TOOL_CALLS]now{}', [LISTED, TIMED], ""),
        (f'[TOOL_CALLS]terminal[CALL_ID]{ID}[ARGS]{{"command":  "ls"}}', [LISTED], ""),
        ("[TOOL_CALLS]now[ARGS]{}", [TIMED], ""),
        (f"[TOOL_CALLS] [{M_LS}", [LISTED], ""),
        (f"[TOOL_CALLS] [{M_BAD}, {M_NOW}]", [("terminal", '{"command": }}', False), TIMED], ""),
        ('[TOOL_CALLS] [{"arguments": {}}]', [("", "{}", False)], ""),
        ("[TOOL_CALLS]now{[TOOL_CALLS]now{}", [("now", "{", False), TIMED], ""),
    ],
)
def test_mistral_calls_are_read(text: str, calls: list[Any], content: str) -> None:
    parsed = MISTRAL.parse(text, TOOLS)
    assert told(parsed) == calls
    assert parsed.content == content
    assert not parsed.suspected_unparsed


@pytest.mark.parametrize("text", ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS] now", LS])
def test_what_mistral_may_have_meant_is_flagged(text: str) -> None:
    assert MISTRAL.parse(text, TOOLS) == Parsed(content=text, suspected_unparsed=True)


def test_a_mistral_call_keeps_the_id_that_its_result_must_name() -> None:
    own = M_NOW[:-1] + f', "id": "{ID}"}}'
    first, again = MISTRAL.parse(f"[TOOL_CALLS] [{own}, {own}]", TOOLS).calls
    assert first.id == ID
    assert again.id.startswith("call_")
    (named,) = MISTRAL.parse(f"[TOOL_CALLS]now[CALL_ID]{ID}[ARGS]{{}}", TOOLS).calls
    assert named.id == ID
    (odd,) = MISTRAL.parse(f"[TOOL_CALLS] [{own.replace(ID, 'x')}]", TOOLS).calls
    assert odd.id.startswith("call_")


ARGUMENTS = st.fixed_dictionaries({}, optional={"command": texts(), "timeout": st.integers()})


@pytest.mark.parametrize("family", ["llama3", "mistral"])
@given(drawn=st.lists(ARGUMENTS, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_what_a_template_writes_its_parser_reads(family: str, drawn: list[dict[str, Any]]) -> None:
    renderer = tiny_renderer(family)
    plain = [
        json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
        for arguments in (drawn[:1] if family == "llama3" else drawn)
    ]
    calls = tuple(
        ToolCall(id=f"callid00{n}", name="terminal", arguments=json.dumps(arguments))
        for n, arguments in enumerate(plain)
    )
    ask = UserMessage(content="Go.")
    whole = renderer.text([ask, AssistantMessage(tool_calls=calls)], TOOLS, generation_prompt=False)
    opened = renderer.text([ask], TOOLS)
    assert whole.startswith(opened)
    said = whole.removeprefix(opened)
    for end in ("<|eom_id|>", "</s>"):
        said = said.removesuffix(end)
    parsed = parser_named(renderer.parser_name).parse(said, TOOLS)
    assert [call.error for call in parsed.calls] == [None] * len(calls)
    assert [json.loads(call.arguments_text) for call in parsed.calls] == plain
    assert parsed.content == ""
    if family == "mistral":
        assert [call.id for call in parsed.calls] == [call.id for call in calls]
