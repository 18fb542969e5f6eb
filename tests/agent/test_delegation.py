"""Sub-agents: results, budgets, shell sessions, deadlines, interrupts, and their record."""

import asyncio
import fcntl
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import load_run
from hermes_rl.agent import PRESETS, Control, Delegation, IterationBudget, Limits
from hermes_rl.errors import DiskFull, Interrupted, SandboxDied
from hermes_rl.events import CallStarted, Ended, MessageAdded, SubagentEvent, SubagentStarted
from hermes_rl.messages import AssistantMessage
from hermes_rl.models.calls import ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Limiter
from hermes_rl.sandboxes import SandboxSpec, Subprocess
from hermes_rl.tools import Tool, ToolContext, ToolResult, resolve
from hermes_rl.trajectory import fold_subagents

from .conftest import Make, Ran, begun, say, served_ids

ALL = resolve(["terminal", "delegation"])


def give(*tasks: Any) -> dict[str, Any]:
    """A turn that gives these scripts to sub-agents."""
    listed = [{"goal": say(*task)} for task in tasks]
    return {"calls": [{"name": "delegate_task", "arguments": {"tasks": listed}}]}


async def play(
    rig: Any, *steps: Any, switches: Any = None, lease: Any = None, **changes: Any
) -> Ran:
    """A run that may start sub-agents."""

    def caller(recorder: Any) -> ModelCaller:
        patience = RetryPolicy(max_attempts=2, base_s=0.01, outage_s=0.2)
        return ModelCaller([Route.single("", rig.client, Limiter(8))], recorder, patience)

    class Late:
        """The recorder of the run that begins now."""

        def record(self, event: Any) -> None:
            rig.log.record(event)

    changes = {
        "tools": ALL,
        "delegation": Delegation(Late(), caller, lease),
        "policy": PRESETS["datagen"].switched({"budget_hints": False, **(switches or {})}),
        **changes,
    }
    ran: Ran = await rig.play(*steps, **changes)
    return ran


def results(ran: Any, at: int = 0) -> list[dict[str, Any]]:
    """What the parent's model reads of its sub-agents."""
    text = ran.results()[at].message.content.partition("\n\n[")[0]
    return list(json.loads(text)["results"])


def rows(ran: Any) -> list[Any]:
    return list(fold_subagents([begun(), *ran.log.events], ran.row()))


async def test_sub_agents_work_at_once_and_report_in_the_order_of_the_tasks(rig: Any) -> None:
    slow, quick = {"text": "slow", "latency_s": 1.5}, {"text": "quick", "latency_s": 1.0}
    ran = await play(rig, give([slow], [quick], [quick], [quick]), "done")
    kinds = [getattr(e, "inner", e) for e in ran.log.events if hasattr(e, "agent")]
    order = [type(e).__name__ for e in kinds if isinstance(e, SubagentStarted | Ended)]
    assert order[:4] == ["SubagentStarted"] * 3 + ["Ended"]  # three at once, then the fourth
    assert [(r["task"], r["status"], r["summary"]) for r in results(ran)] == [
        (1, "completed", "slow"),
        (2, "completed", "quick"),
        (3, "completed", "quick"),
        (4, "completed", "quick"),
    ]
    model_seconds = ran.result.seconds - ran.result.active_seconds
    assert model_seconds >= 2.0, "they are not active time"
    assert ran.results()[0].tool_ok


async def test_a_sub_agent_is_a_row_and_its_usage_counts_once_in_its_root(rig: Any) -> None:
    child = [{"run": "echo hello > made; cat made"}, "It says hello."]
    ran = await play(rig, {"run": "echo mine"}, give(child, ["no"]), {"run": "cat made"}, "done")
    assert json.loads(ran.results()[2].message.content)["output"] == "hello\n"
    row, (first, second) = ran.row(), rows(ran)
    served = rig.server.entries
    assert row.usage.total_tokens == sum(e.prompt_tokens + e.completion_tokens for e in served)
    assert ran.call_ids() == served_ids(rig.server)
    assert len(row.calls) == 7
    assert {c.agent for c in row.calls} == {"main", "main.1", "main.2"}
    assert (row.turns, row.tool_call_count, len(row.messages)) == (4, 3, 9)
    assert [c.call_id for c in first.calls] == [c.call_id for c in row.calls if c.agent == "main.1"]
    assert (first.turns, first.final_response) == (2, "It says hello.")
    roles = [i.role for i in first.message_info]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert [s.tool for s in first.tool_stats] == ["terminal"]
    assert "delegate_task" not in first.tools
    call = json.loads(row.messages[4])["tool_calls"][0]["id"]
    for child_row in (first, second):
        assert child_row.root_trajectory_id == child_row.parent_trajectory_id == row.trajectory_id
        assert (child_row.parent_call_id, child_row.unit_id) == (call, row.unit_id)
    assert len({row.trajectory_id, first.trajectory_id, second.trajectory_id}) == 3


async def test_each_sub_agent_has_a_shell_session_in_the_same_sandbox(rig: Any) -> None:
    """It begins where its parent is, and changes nothing there."""

    def child(name: str) -> list[Any]:
        return [
            {"run": f"pwd; echo $X; cd /; export X={name}; f() {{ echo {name}; }}"},
            {"run": "pwd; echo $X; f", "latency_s": 0.1},
            "done",
        ]

    look = {"run": "pwd; echo $X; type f 2>&1 | tail -1"}
    ran = await play(
        rig,
        {"run": "mkdir deep; cd deep; export X=parent"},
        give(child("a"), child("b")),
        look,
        ".",
    )
    deep = f"{rig.sandbox.workspace}/deep"
    for row, name in zip(rows(ran), "ab", strict=True):
        outputs = [
            json.loads(json.loads(m)["content"])["output"] for m in row.messages if '"tool"' in m
        ]
        assert outputs == [f"{deep}\nparent\n", f"/\n{name}\n{name}\n"]
    output = json.loads(ran.results()[2].message.content)["output"]
    assert output.startswith(f"{deep}\nparent\n")
    assert "not found" in output


async def test_a_sub_agent_may_work_in_a_copy_of_the_sandbox(
    rig: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins where its parent is, with its files; what it changes is seen by nobody else. The
    copy is removed, and with it those that a kill left, but not those that are in use."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("left", "used"):
        (tmp_path / f"hermes-rl-copy-{name}").mkdir()
        (tmp_path / f"hermes-rl-copy-{name}" / "lock").touch()
    used = (tmp_path / "hermes-rl-copy-used" / "lock").open("rb")
    fcntl.flock(used, fcntl.LOCK_EX)
    backend, leased = Subprocess(state_dir=tmp_path / "others"), []

    async def lease(agent: str, copy: Any) -> Any:
        leased.append(await backend.lease(SandboxSpec(lease=agent, snapshot=copy)))
        return leased[-1]

    child = [{"run": "cat mine; echo $X; pwd | tail -c 5; rm mine; touch other"}, "done"]
    ran = await play(
        rig,
        {"run": "mkdir deep; cd deep; echo first > mine; export X=parent"},
        {"run": "sh -c 'echo $$ > ../pid; exec sleep 60' & until [ -s ../pid ]; do :; done"},
        give(child, child),
        {"run": "N=$(cat ../pid); kill $N; while kill -0 $N 2>/dev/null; do :; done"},
        give(child, child),
        {"run": "ls"},
        ".",
        switches={"child_sandbox": True},
        lease=lease,
    )
    refused, outputs = ran.results()[2], [c.messages[3] for c in rows(ran)]
    assert "while processes run in the background" in refused.message.content
    output = "first\nparent\ndeep\n"
    assert [json.loads(json.loads(m)["content"])["output"] for m in outputs] == [output] * 2
    assert json.loads(ran.results()[-1].message.content)["output"] == "mine\n"
    assert len({sandbox.workspace for sandbox in leased}) == 2
    assert [path.name for path in tmp_path.glob("hermes-rl-copy-*")] == ["hermes-rl-copy-used"]
    used.close()
    with pytest.raises(SandboxDied):
        await leased[0].run("true", timeout_s=5)
    await backend.aclose()


async def test_a_sub_agent_that_fails_hangs_or_runs_out_is_a_typed_result(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit comes once the command that hangs has begun."""
    loop = asyncio.get_running_loop()
    runs_out = [{"run": f"echo {n}"} for n in range(9)]
    hang = [{"run": "touch hangs; sleep 60"}, "never"]
    fault = [{"fault": "auth"}]

    async def pass_time() -> None:
        while not (Path(rig.sandbox.workspace) / "hangs").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 100)

    passing = asyncio.create_task(pass_time())
    switches = {"child_turns": 2, "child_timeout_s": 100, "summary_on_limit": False}
    steps = give(runs_out, fault, ["fine"]), give(hang), "done"
    ran = await play(rig, *steps, switches=switches)
    await passing
    found = results(ran) + results(ran, 1)
    assert [r["status"] for r in found] == ["exhausted", "failed", "completed", "timeout"]
    assert [r["end_reason"] for r in found] == ["max_turns", "error", "answered", "error"]
    assert "no end within 100 s" in found[-1]["error"]
    assert [e.tool_ok for e in ran.results()] == [False, False]
    assert ran.result.end_reason == "answered"
    row, children = ran.row(), rows(ran)
    assert [c.cause for c in children] == [None, children[1].cause, None, "stalled"]
    assert [c.status for c in children] == ["ok", "failed", "ok", "failed"]
    hung = [json.loads(m) for m in children[-1].messages]
    assert hung[-1]["role"] == "tool"  # its conversation is complete
    assert "Not executed: the time limit of the sub-agent" in hung[-1]["content"]
    assert ran.call_ids() == served_ids(rig.server)
    assert len(row.calls) == 8
    assert (await rig.sandbox.run("echo alive", timeout_s=10)).output == "alive\n"


@pytest.mark.parametrize("hangs", ["in a command", "in a model call", "in a tool"])
async def test_an_interrupt_reaches_sub_agents_within_a_second(rig: Any, hangs: str) -> None:
    async def wait(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(3600)
        return ToolResult("")

    tools = {**ALL, "wait": Tool("wait", "", {"type": "object"}, wait, "x", needs_sandbox=False)}
    step: dict[str, Any] = {
        "in a command": {"run": "sleep 60"},
        "in a model call": {"text": "late", "latency_s": 60},
        "in a tool": {"calls": [{"name": "wait", "arguments": {}}]},
    }[hangs]
    control, ended, at_work = Control(), list[float](), list[Any]()
    loop = asyncio.get_running_loop()

    def listen(event: Any) -> None:
        if hangs == "in a model call":
            begins = isinstance(event, CallStarted) and event.agent != "main"
        else:
            message = getattr(getattr(event, "inner", None), "message", None)
            begins = isinstance(message, AssistantMessage)
        if begins:
            at_work.append(event)
            if len(at_work) == 2:
                loop.call_later(0.3, interrupt)

    def interrupt() -> None:
        ended.append(time.monotonic())
        control.interrupt()

    rig.listener = listen
    with pytest.raises(Interrupted):
        await play(rig, give([step], [step]), "done", control=control, tools=tools)
    assert time.monotonic() - ended[0] < 20
    events = rig.log.events
    ends = [e.inner for e in events if isinstance(e, SubagentEvent)]
    assert [e.end_reason for e in ends if hasattr(e, "end_reason")] == ["interrupted"] * 2
    last = [e for e in events if isinstance(e, MessageAdded)][-1]
    assert "Not executed: the user interrupted the run" in last.message.content
    begun = {e.call_id for e in events if isinstance(e, CallStarted)}
    assert {entry.call_id for entry in rig.server.entries} <= begun


async def test_tokens_of_sub_agents_count_against_the_limit_of_the_run(rig: Any) -> None:
    long = [{"run": "echo 1"}, {"text": "x" * 4000}]
    ran = await play(
        rig, give(long, long), {"run": "echo on"}, "done", limits=Limits(max_tokens=1500)
    )
    assert ran.result.end_reason == "token_limit"
    assert ran.result.turns == 1


async def test_sub_agents_have_separate_turns_or_share_those_of_their_parent(rig: Any) -> None:
    two = [{"run": "echo 1"}, "done"]
    separate = await play(
        rig, give(two, two), {"run": "echo 2"}, "done", limits=Limits(max_turns=4)
    )
    assert separate.result.end_reason == "answered"
    shares = {"children_share_turns": True, "summary_on_limit": False}
    steps = (give(two), {"run": "echo 2"}, "done")
    shared = await play(rig, *steps, switches=shares, limits=Limits(max_turns=4))
    assert (shared.result.end_reason, shared.result.turns) == ("max_turns", 2)
    budget = IterationBudget(2)
    shared = await play(rig, *steps, switches=shares, budget=budget, limits=Limits(None))
    assert [r["status"] for r in results(shared)] == ["exhausted"]
    assert budget.remaining == 0


async def test_sub_agents_start_others_only_as_deep_as_allowed(rig: Any) -> None:
    inner = give(["innermost"])
    ran = await play(rig, give([inner, "middle"]), "done")
    assert any("Unknown tool 'delegate_task'" in text for text in rows(ran)[0].messages)
    ran = await play(rig, give([inner, "middle"]), "done", switches={"child_depth": 2})
    middle, innermost = rows(ran)
    assert (middle.final_response, innermost.final_response) == ("middle", "innermost")
    assert innermost.parent_trajectory_id == middle.trajectory_id
    assert innermost.root_trajectory_id == ran.row().trajectory_id
    names = [e.agent for e in ran.log.events if isinstance(e, SubagentStarted)]
    assert names == ["main.1", "main.1.1"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "give either goal"),
        ({"goal": "a", "tasks": [{"goal": "b"}]}, "give either goal"),
        ({"tasks": [{"goal": " "}]}, "the goal of a task is empty"),
        ({"tasks": [{"goal": "a"}] * 11}, "at most 10 tasks"),
        ({"tasks": [{"context": "a"}]}, "missing argument"),
    ],
)
async def test_a_call_that_makes_no_sense_starts_nothing(
    rig: Any, arguments: dict[str, Any], error: str
) -> None:
    ran = await play(rig, {"calls": [{"name": "delegate_task", "arguments": arguments}]}, "done")
    assert error in ran.results()[0].message.content
    assert not rows(ran)


async def test_a_full_disk_in_a_sub_agent_ends_the_run(rig: Any) -> None:
    def full(event: Any) -> None:
        if isinstance(event, SubagentEvent) and isinstance(event.inner, MessageAdded):
            raise DiskFull("no space")

    rig.listener = full
    with pytest.raises(DiskFull):
        await play(rig, give(["a"], ["b"]), "done")


def test_an_agent_of_a_script_delegates_and_saves_the_rows(make: Make, tmp_path: Any) -> None:
    steps = say(give([{"run": "echo hi"}, "It says hi."]), "done")
    with make(toolsets=["terminal", "delegation"]) as agent:
        result = agent.run_conversation(steps)
        agent.save_trajectory(tmp_path / "saved")
    assert result["completed"]
    assert {c["agent"] for c in result["calls"]} == {"main", "main.1"}
    run = load_run(tmp_path / "saved")
    (root,), (child,) = run.trajectories.to_dict("records"), run.subagents.to_dict("records")
    assert child["parent_trajectory_id"] == root["trajectory_id"]
    assert child["final_response"] == "It says hi."
    assert root["usage"]["total_tokens"] == result["usage"]["total_tokens"]
