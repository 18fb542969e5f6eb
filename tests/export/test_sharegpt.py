"""hermes-agent's from/value turns, byte for byte (docs/export.md lists the two differences)."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.export import conversation, messages_of, tools_of

TOOLS = [
    {"type": "function", "function": {"name": "terminal", "description": "Grüße", "parameters": {}}}
]
PROMPT = {"role": "user", "content": "List <b>grüße</b>.\n"}


def called(*arguments: Any, **more: Any) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "terminal", "arguments": one},
        }
        for n, one in enumerate(arguments, 1)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def result(content: str, number: int = 1, name: str = "terminal") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": content}


def turns(*messages: dict[str, Any]) -> list[tuple[str, str]]:
    """The turns after the fixed system turn."""
    return [(t["from"], t["value"]) for t in conversation([PROMPT, *messages], TOOLS)[1:]]


def test_a_call_and_its_result() -> None:
    listing = '{"output": "a.txt", "exit_code": 0, "error": null}'
    answer = called({"command": "ls"}, reasoning_content="Need the listing.")
    assert turns(answer, result(listing)) == [
        ("human", "List <b>grüße</b>.\n"),
        (
            "gpt",
            "<think>\nNeed the listing.\n</think>\n<tool_call>\n"
            '{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>',
        ),
        (
            "tool",
            '<tool_response>\n{"tool_call_id": "call_1", "name": "terminal", "content": '
            '{"output": "a.txt", "exit_code": 0, "error": null}}\n</tool_response>',
        ),
    ]


def test_several_calls_and_their_results_share_turns() -> None:
    answer = called({"b": 1, "a": "ä"}, {}, content="Looking.")
    assert turns(answer, result("[1, 2]"), result("{bad", 2))[1:] == [
        (
            "gpt",
            "<think>\n</think>\nLooking.\n"
            '<tool_call>\n{"name": "terminal", "arguments": {"b": 1, "a": "ä"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "terminal", "arguments": {}}\n</tool_call>',
        ),
        (
            "tool",
            '<tool_response>\n{"tool_call_id": "call_1", "name": "terminal", "content": [1, 2]}\n'
            "</tool_response>\n"
            '<tool_response>\n{"tool_call_id": "call_2", "name": "terminal", "content": "{bad"}\n'
            "</tool_response>",
        ),
    ]


ANSWERS = [
    ("Two.\n", None, "<think>\n</think>\nTwo."),
    ("Two.", "Count.", "<think>\nCount.\n</think>\nTwo."),
    ("Two.", " \n", "<think>\n</think>\nTwo."),
    ("", None, "<think>\n</think>"),
    (
        "<REASONING_SCRATCHPAD>\nCount.\n</REASONING_SCRATCHPAD>\nTwo.",
        None,
        "<think>\nCount.\n</think>\nTwo.",
    ),
    ("So <think> it is.", None, "<think>\n</think>\nSo <think> it is."),
]


@pytest.mark.parametrize(("content", "reasoning", "value"), ANSWERS)
def test_an_answer_begins_with_its_reasoning(
    content: str, reasoning: str | None, value: str
) -> None:
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    assert turns(message)[1:] == [("gpt", value)]


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (" \n", "<think>\n</think>\n"),
        (
            "<REASONING_SCRATCHPAD>a</REASONING_SCRATCHPAD>b",
            "<think>a</think>b\n",
        ),
    ],
)
def test_text_before_a_call_is_kept(content: str, value: str) -> None:
    call = '<tool_call>\n{"name": "terminal", "arguments": {}}\n</tool_call>'
    assert turns(called({}, content=content))[1:] == [("gpt", value + call)]


def test_the_system_turn_is_fixed_and_lists_the_tools() -> None:
    first = conversation([{"role": "system", "content": "Secret."}, PROMPT], TOOLS)[0]
    assert first["from"] == "system"
    assert "Secret." not in first["value"]
    listed = json.dumps([TOOLS[0]["function"]], ensure_ascii=False)
    assert f"\n<tools>\n{listed}\n</tools>\n" in first["value"]
    assert "{'title': 'FunctionCall', 'type': 'object'" in first["value"]
    assert "<tool_call>\n{'name': <function-name>, 'arguments': " in first["value"]
    assert first == conversation([PROMPT], TOOLS)[0]
    assert tools_of([first]) == TOOLS


TAGS = ("tool_call>", "tool_response>", "think>")
OTHERS = ("word", "\n", " ", "é", "{", "}", '"', "\\", "\\u003c", "<", "<b>")
TEXTS = st.lists(
    st.sampled_from([*(f"<{tag}" for tag in TAGS), *(f"</{tag}" for tag in TAGS), *OTHERS]),
    max_size=8,
).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS)
def test_tags_inside_values_are_escaped_and_read_back(texts: list[str], output: str) -> None:
    """The `<` of a tag inside a value is escaped, so that readers do not take it for the end."""
    results = (result(output, n) for n in range(1, len(texts) + 1))
    answer = called(*({"text": text} for text in texts))
    written = conversation([PROMPT, answer, *results], TOOLS)
    _, _, gpt, tool = written
    assert gpt["value"].count("<tool_call>") == gpt["value"].count("</tool_call>") == len(texts)
    assert tool["value"].count("<tool_response>") == len(texts)
    assert tool["value"].count("</tool_response>") == len(texts)
    plain = json.dumps({"name": "terminal", "arguments": {"text": texts[0]}}, ensure_ascii=False)
    tagged = any(tag in texts[0] for tag in TAGS)
    assert tagged or plain in gpt["value"]
    _, parsed, *parsed_results = messages_of(written)
    assert [json.loads(c.arguments) for c in parsed.tool_calls] == [{"text": t} for t in texts]
    for one in parsed_results:
        assert one.content == output or json.loads(one.content) == json.loads(output)
