"""The todo list in conversations: through compression, sessions, other tasks and sub-agents."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import AIAgent, ContextConfig, ModelConfig, load_run
from hermes_rl.agent import ContextView, SummaryEngine
from hermes_rl.aio import LoopThread
from hermes_rl.cli import main
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    ToolCall,
    ToolMessage,
    UserMessage,
    text_of,
)
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest

from .conftest import Make, say

WINDOW = 6_000
ITEMS = [
    {"id": "1", "content": "Look at the parser", "status": "completed"},
    {
        "id": "2",
        "content": "Correct the parser: " + "every rule, " * 20 + "and all",
        "status": "in_progress",
    },
    {"id": "3", "content": "Run all tests", "status": "pending"},
]


def todo(*items: dict[str, str], **more: Any) -> dict[str, Any]:
    """A step of a script: a call that writes the list, or reads it."""
    arguments = {"todos": items, **more} if items else {}
    return {"calls": [{"name": "todo", "arguments": arguments}]}


def lists(result: dict[str, Any]) -> list[list[dict[str, str]]]:
    """The lists that the model read."""
    texts = [m["content"] for m in result["messages"] if m["role"] == "tool"]
    found = [json.JSONDecoder().raw_decode(text)[0] for text in texts if text.startswith("{")]
    return [one["todos"] for one in found if "todos" in one]


def names(items: Sequence[dict[str, str]]) -> str:
    return "".join(item["id"] for item in items)


def test_each_task_of_an_agent_has_a_separate_list(make: Make) -> None:
    other = {"id": "y", "content": "Another"}
    steps = todo(*ITEMS), "ok", todo(), todo(other), "ok", todo(), "ok", todo(), "ok"
    with make(toolsets=["todo"]) as agent:
        agent.run_conversation(say(*steps), task_id="a")
        second = agent.run_conversation("next", task_id="b")
        assert [names(one) for one in lists(second)] == ["123", "", "y"]
        assert lists(agent.run_conversation("next", task_id="a"))[-1] == ITEMS
        agent.end_task("b")
        assert lists(agent.run_conversation("next", task_id="b"))[-1] == []


def test_a_history_or_session_brings_its_list(make: Make, tmp_path: Path) -> None:
    steps = todo(*ITEMS), todo({"id": "1"}, {"id": "5"}, merge=True), "ok", todo(), "ok"
    with make(toolsets=["todo"], session=tmp_path / "s.jsonl") as agent:
        first = agent.run_conversation(say(*steps))
        assert "'5') is new" in first["messages"][-2]["content"]  # the refused call has no list
    with make(toolsets=["todo"], session=tmp_path / "s.jsonl") as agent:
        assert lists(agent.run_conversation("next"))[-1] == ITEMS
    with make(toolsets=["todo"]) as agent:
        history = first["messages"]
        there = agent.run_conversation("next", conversation_history=history, task_id="t")
        assert lists(there)[-1] == ITEMS
        empty = agent.run_conversation(say(todo(), "ok"), conversation_history=[], task_id="t")
        assert lists(empty) == [[]]


def test_a_sub_agent_has_a_separate_list(make: Make, tmp_path: Path) -> None:
    mine = {"id": "c", "content": "Of the child"}
    goal = {"goal": say(todo(), todo(mine), "done")}
    steps = todo(*ITEMS), {"calls": [{"name": "delegate_task", "arguments": goal}]}, todo(), "ok"
    with make(toolsets=["todo", "delegation"]) as agent:
        result = agent.run_conversation(say(*steps))
        agent.save_trajectory(tmp_path / "saved")
    assert lists(result)[-1] == ITEMS
    (child,) = load_run(tmp_path / "saved").subagents.to_dict("records")
    messages = {"messages": list(child["messages"])}
    assert [names(one) for one in lists(messages)] == ["", "c"]


def test_progress_on_the_list_does_not_hide_failures(make: Make) -> None:
    ticks = [todo({"id": str(n), "content": "Try again"}, merge=True) for n in range(9)]
    steps = [step for tick in ticks for step in ({"run": "exit 3"}, tick)]
    with make(toolsets=["todo", "terminal"], preset="datagen") as agent:
        assert agent.run_conversation(say(*steps, "ok"))["end_reason"] == "tool_loop"


def work(number: int) -> str:
    """Do a step of the work."""
    return f"step {number} done\n" + "x" * 600


def play(request: ServedRequest) -> Any:
    """Write the list, work, read the list, and after another message read it again."""
    if not request.tools:
        return "## Done\nSome steps."
    last = request.messages[-1]
    if isinstance(last, UserMessage) and "first" in last.content:
        return todo(*ITEMS)
    if isinstance(last, UserMessage) and "Read" in last.content:
        return todo()
    if isinstance(last, ToolMessage) and "step 40" in last.content:
        return "Worked."
    if isinstance(last, ToolMessage) and last.name == "work":
        number = int(last.content.split()[1]) + 1
        return {"calls": [{"name": "work", "arguments": {"number": number}, "id": f"w{number}"}]}
    seen = sum(m.name == "work" for m in request.messages if isinstance(m, ToolMessage))
    if isinstance(last, ToolMessage) and not seen:
        return {"calls": [{"name": "work", "arguments": {"number": 1}, "id": "w1"}]}
    return "Read it."


@pytest.mark.parametrize("restart", [False, True])
def test_the_list_survives_compression_and_a_restart_after_it(
    tmp_path: Path, restart: bool
) -> None:
    sent: list[ServedRequest] = []

    def noted(request: ServedRequest) -> Any:
        sent.append(request)
        return play(request)

    with LoopThread() as home:
        server = FakeServer(FakeConfig(plays={"m": noted}, window=WINDOW))
        home.run(server.__aenter__())

        def make() -> AIAgent:
            model, context = ModelConfig(name="m", base_url=server.base_url), ContextConfig()
            more: dict[str, Any] = {"session": tmp_path / "s.jsonl", "context": context}
            more |= {"save_trajectories": tmp_path / "saved"}
            return AIAgent(model, toolsets=["todo"], tools=[work], **more)

        with make() as agent:
            worked = agent.run_conversation("Do the work, the list first.")
            assert worked["end_reason"] == "answered"
            if not restart:
                read = agent.run_conversation("Read the list.")
        if restart:
            with make() as agent:
                read = agent.run_conversation("Read the list.")
        home.run(server.aclose())
    open_ones = ITEMS[1:]  # what a summary shows
    assert lists(read)[-1] == (open_ones if restart else ITEMS)
    texts = [text_of(m) for request in sent for m in request.messages]
    blocks = [text.split("[Todo list]\n")[1] for text in texts if "[Todo list]" in text]
    lines = "".join(f"- [{one['status']}] {one['id']}: {one['content']}\n" for one in open_ones)
    assert blocks
    assert all(block.startswith(f"{lines}[End of the summary") for block in blocks)
    rows = load_run(tmp_path / "saved").trajectories.to_dict("records")
    both = [pair for row in rows for pair in zip(row["message_info"], row["messages"], strict=True)]
    flags = [
        info["synthetic"] for info, text in both if info["turn"] and "[Todo list]" in str(text)
    ]
    assert flags
    assert all(flags)
    assert main(["check", str(tmp_path / "saved")]) == 0


async def test_a_digest_leaves_the_last_list_whole() -> None:
    def result(number: int, name: str, content: str) -> list[Message]:
        call = ToolCall(id=f"c{number}", name=name, arguments="{}")
        shown = ToolMessage(tool_call_id=call.id, name=name, content=content)
        return [AssistantMessage(content="", tool_calls=(call,)), shown]

    shown = [json.dumps({"todos": ITEMS[:n]}) + "\n\n[A hint.]" for n in (2, 3)]
    messages: list[Message] = [UserMessage(content="Go.")]
    for number, text in enumerate(shown):
        messages += result(number, "todo", text)
    for number in range(10, 20):
        messages += result(number, "work", "x" * 2_000)
    view = ContextView(
        messages=messages, trigger="threshold", threshold=5_000, window=8_000, scale=1.0,
        harness_texts=frozenset(), tool_state={"todo": ITEMS},
    )  # fmt: skip
    found = await SummaryEngine().compress(view)
    assert found is not None
    assert found.method == "digest"
    assert found.entries[4] == 4
    assert found.entries[2] != 2


async def test_the_list_in_a_summary_is_bounded() -> None:
    items = [{"id": str(n), "content": "y" * 3_000, "status": "pending"} for n in range(256)]
    filler = [AssistantMessage(content="z" * 8_000), UserMessage(content="More.")] * 6
    view = ContextView(
        messages=[UserMessage(content="Go."), *filler], trigger="threshold", threshold=6_000,
        window=8_000, scale=1.0, harness_texts=frozenset(), tool_state={"todo": items},
    )  # fmt: skip
    found = await SummaryEngine().compress(view)
    assert found is not None
    text = str(found.entries[0])
    assert text.count("- [pending]") == 30
    assert "(226 more open items: call todo to read them)" in text
