"""Tool calls that are not quite calls: names, arguments."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.agent import PRESETS, tool_meant
from hermes_rl.tools import Tool, ToolContext, ToolResult

DATAGEN, RL = PRESETS["datagen"], PRESETS["rl"]


async def nothing(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    return ToolResult("")


NAMES = ("terminal", "read_file", "write_file", "search_files", "mcp_git_log")
TOOLS = {name: Tool(name, "", {"type": "object"}, nothing, "x") for name in NAMES}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Terminal", "terminal"),
        (" terminal\n", "terminal"),
        ("functions.terminal", "terminal"),
        ("functions.read_file:0", "read_file"),
        ("default_api:read_file", "read_file"),
        ("Read-File", "read_file"),
        ("ReadFile", "read_file"),
        ("read file", "read_file"),
        ("readFile()", "read_file"),
        ("read_file_tool", "read_file"),
        ("WriteFileTool", "write_file"),
        ("write_file_1", "write_file"),
        ("terminal<|channel|>commentary", "terminal"),
        ("tools/search-files", "search_files"),
        ("search_file", "search_files"),
        ("termnal", "terminal"),
        ("terminaxxxxx", "terminal"),  # a likeness of just 0.7
        ("terminaxxxxxx", None),
        ("mcp.git.log", "mcp_git_log"),
        ("python", None),
        ("browser", None),
        ("", None),
        (" ", None),
        ("<|channel|>", None),
        ("...", None),
    ],
)
def test_the_tool_that_a_name_means(name: str, meant: str | None) -> None:
    found = tool_meant(name, TOOLS)
    assert (found.name if found else None) == meant


@given(st.text(max_size=20))
def test_any_text_may_be_a_name(name: str) -> None:
    assert tool_meant(name, {}) is None
    tool_meant(name, TOOLS)


@given(st.sampled_from(NAMES), st.sampled_from(["{}", "functions.{}", "{}()", "{}_tool", " {}"]))
def test_every_tool_is_found_by_its_own_name(name: str, form: str) -> None:
    found = tool_meant(form.format(name), TOOLS)
    assert found is TOOLS[name]


async def test_a_near_name_runs_by_policy_only(rig: Any) -> None:
    step = {"calls": [{"name": "termnal", "arguments": {"command": "echo hi"}}]}
    ran = await rig.play(step, "done")
    assert json.loads(ran.results()[0].message.content)["output"] == "hi\n"
    assert ran.results()[0].message.name == "termnal"  # as the model wrote it
    for policy in (RL, DATAGEN.switched({"repair_tool_names": False})):
        ran = await rig.play(step, "done", policy=policy)
        assert "Unknown tool 'termnal'" in ran.results()[0].message.content


@pytest.mark.parametrize("policy", [DATAGEN, RL])
async def test_a_blank_name_gets_a_short_error(rig: Any, policy: Any) -> None:
    mixed = {"calls": [{"name": " "}, {"name": "nope"}, {"arguments": {"command": "echo 1"}}]}
    ran = await rig.play(mixed, "done", policy=policy)
    blank, unknown, good = (e.message.content for e in ran.results())
    assert blank == '{"error":"The tool call has no name."}'
    assert "Available tools: terminal, process" in unknown
    assert json.loads(good)["output"] == "1\n"
    assert [e.tool_ok for e in ran.results()] == [False, False, True]


async def test_no_text_at_all_stands_for_no_arguments(rig: Any) -> None:
    async def handler(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult(json.dumps(args))

    tools = {"look": Tool("look", "", {"type": "object"}, handler, "x", needs_sandbox=False)}
    ran = await rig.play({"calls": [{"name": "look", "arguments": ""}]}, "done", tools=tools)
    assert ran.results()[0].message.content == "{}"
    assert len(ran.calls()) == 2


async def test_json_that_is_no_object_goes_to_the_model(rig: Any) -> None:
    ran = await rig.play({"calls": [{"arguments": '["ls"]'}]}, "done")
    assert "must be a JSON object" in ran.results()[0].message.content
    assert len(ran.calls()) == 2
