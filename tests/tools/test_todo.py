"""The tool `todo`: the list of steps that the agent keeps."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import ToolError
from hermes_rl.tools import (
    DEFAULT_TOOLSETS,
    DISTRIBUTIONS,
    MAX_ITEMS,
    MAX_LIST_CHARS,
    TOOLS,
    TOOLSETS,
    ToolContext,
    listed,
    read_arguments,
    resolve,
    tool_names,
)

STATUSES = ("pending", "in_progress", "completed", "cancelled")


async def call(context: ToolContext, **arguments: Any) -> Any:
    """A call as a model makes it: the JSON that it reads."""
    tool = TOOLS["todo"]
    result = await tool.handler(context, read_arguments(json.dumps(arguments), tool.parameters))
    assert len(result.text) <= tool.max_chars
    return json.loads(result.text)


def item(name: str, content: str, status: str = "pending") -> dict[str, str]:
    return {"id": name, "content": content, "status": status}


async def test_a_list_is_written_changed_and_read() -> None:
    context = ToolContext(sandbox=None)
    empty = await call(context)
    assert empty["todos"] == []
    assert empty["summary"] == dict.fromkeys(("total", *STATUSES), 0)
    one, two = item("1", "Look", "in_progress"), item("2", "Write")
    found = await call(context, todos=[one, {"id": 2, "content": " Write "}])
    assert found["todos"] == [one, two]  # an id may be a number, and new items are pending
    change = [{"id": "1", "status": "completed"}, item("3", "Test"), {"id": "2", "content": ""}]
    found = await call(context, todos=change, merge=True)
    assert found["todos"] == [item("1", "Look", "completed"), two, item("3", "Test")]
    assert found["summary"] == {
        "total": 3, "pending": 2, "in_progress": 0, "completed": 1, "cancelled": 0,
    }  # fmt: skip
    assert await call(context, todos=None, merge=True) == found
    assert (await call(context, todos=[two]))["todos"] == [two]
    assert (await call(context, todos=[]))["todos"] == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"todos": [{"id": "9"}], "merge": True}, r"item 1 \(id '9'\) is new, so it needs a cont"),
        (
            {"todos": [{"id": "1", "status": "done"}]},
            r"todos\[0\].status' must be one of \"pending",
        ),
        ({"todos": [{"content": "x"}]}, r"missing argument 'todos\[0\].id'"),
        ({"todos": [item(" \n", "x")]}, "item 1: the id must have 1 to 64 characters"),
        ({"todos": [item("1", "x" * 4_001)]}, "has 4,001 characters, and at most 4,000"),
        ({"todos": [item(str(n), "x") for n in range(257)]}, "257 items, and at most 256"),
        ({"todos": [item(str(n), "x" * 3_999) for n in range(16)]}, "at most 60,000 fit"),
    ],
)
async def test_a_call_that_is_refused_says_why_and_changes_nothing(
    arguments: dict[str, Any], why: str
) -> None:
    context = ToolContext(sandbox=None)
    before = await call(context, todos=[item("1", "Kept")])
    with pytest.raises(ToolError, match=why):
        await call(context, **arguments)
    assert await call(context) == before


def test_no_run_has_it_unless_its_toolset_is_named() -> None:
    defaults = {*DEFAULT_TOOLSETS, *(name for one in DISTRIBUTIONS.values() for name in one)}
    assert "todo" not in tool_names({*defaults, "coding"})
    assert [name for name, one in TOOLSETS.items() if "todo" in one.tools] == ["todo"]
    assert not resolve(["todo"])["todo"].needs_sandbox


fields = st.fixed_dictionaries(
    {"id": st.sampled_from(["1", "2", "3", "a b", "x: y", "\ud800"]) | st.text(max_size=3)},
    optional={"content": st.text(max_size=20), "status": st.sampled_from(STATUSES)},
)
calls = st.lists(
    st.tuples(st.lists(fields, max_size=6), st.booleans(), st.sampled_from(["", "\n\n[Hint.]"])),
    max_size=8,
)


@given(calls=calls)
async def test_any_calls_leave_a_valid_list_that_each_result_shows(calls: list[Any]) -> None:
    context, tool = ToolContext(sandbox=None), TOOLS["todo"]
    shown: list[Any] = []
    for todos, merge, note in calls:
        try:
            result = await tool.handler(context, {"todos": todos, "merge": merge})
        except ToolError:
            assert context.state.get("todo", []) == shown
            continue
        before, shown = shown, json.loads(result.text)["todos"]
        assert listed(result.text + note) == shown == context.state["todo"]
        assert len(shown) <= MAX_ITEMS
        assert len(result.text) <= MAX_LIST_CHARS
        names = [one["id"] for one in shown]
        assert len(set(names)) == len(names)
        assert all(one["id"] and one["content"] and one["status"] in STATUSES for one in shown)
        if merge:  # nothing is lost, and the order stays
            assert names[: len(before)] == [one["id"] for one in before]
        again = await tool.handler(ToolContext(sandbox=None), {"todos": shown})
        assert again.text == result.text
    assert listed('{"error":"x"}') is listed("no") is listed('{"todos":[{"id":1}]}') is None
