"""The keywords of hermes-agent's `AIAgent`, functions as tools, and what contradicts each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import AIAgent, Limits, ModelConfig, load_run
from hermes_rl.agent import IterationBudget
from hermes_rl.errors import UserError
from hermes_rl.testing import FakeServer
from hermes_rl.tools import ToolContext

from .conftest import Make, say


def test_a_call_as_hermes_agent_writes_it(server: FakeServer, tmp_path: Path) -> None:
    saved = tmp_path / "kept"
    with AIAgent(
        model="m",
        base_url=server.base_url,
        api_key="right",
        api_mode="anthropic_messages",
        max_iterations=3,
        enabled_toolsets=["terminal", "coding"],
        disabled_toolsets=["file"],
        quiet_mode=True,
        save_trajectories=saved,
        ephemeral_system_prompt="Only now.",
        prefill_messages=[{"role": "user", "content": say("Sent.", "A.", "B.")}],
        session_id="s-1",
        sandbox="none",
        allow_unsandboxed=True,
    ) as agent:
        assert agent.chat("Continue.", task_id="t-1") == "Sent."  # the script is in the prefill
        result = agent.run_conversation("And?")
    assert result["session_id"] == "s-1"
    assert "Only now." not in json.dumps(result["messages"])
    run = load_run(saved)
    rows = run.trajectories.sort_values("row_index")
    assert list(rows["task_id"]) == ["t-1", result["task_id"]]
    assert list(rows["api_mode"]) == ["anthropic_messages"] * 2
    assert list(rows["toolsets"].iloc[0]) == ["terminal", "coding"]
    assert "write_file" not in rows["tools"].iloc[0]
    assert rows["prompt_sha256"].notna().all()
    with AIAgent(
        "noop", toolsets=[], session_id="s-1", save_trajectories=str(saved), system="Be brief."
    ) as agent:
        agent.chat("Another agent of that name.", task_id="t-1")
    assert len(load_run(saved).trajectories) == 3


def test_max_iterations_and_a_shared_budget_end_as_max_turns(make: Make) -> None:
    script = say(*[{"run": f"echo {n}"} for n in range(9)])
    with make(max_iterations=2, preset="rl") as agent:
        assert agent.run_conversation(script)["end_reason"] == "max_turns"
    budget = IterationBudget(5)
    with make(iteration_budget=budget, max_iterations=3, preset="rl") as agent:
        assert len(agent.run_conversation(script)["calls"]) == 3
    with make(iteration_budget=budget, preset="rl") as agent:
        result = agent.run_conversation(script)
    assert (len(result["calls"]), result["end_reason"]) == (2, "max_turns")
    assert (budget.used, budget.remaining) == (5, 0)
    with make(iteration_budget=1, preset="rl") as agent:
        assert agent.run_conversation(script)["end_reason"] == "max_turns"


def test_functions_are_tools_beside_the_toolsets(make: Make) -> None:
    def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    calls = {"calls": [{"name": "add", "arguments": {"a": 2, "b": "3"}}]}
    broken = {"calls": [{"name": "add", "arguments": {"a": "x"}}]}
    with make(tools=[add]) as agent:
        result = agent.run_conversation(say(calls, broken, {"run": "echo hi"}, "5."))
    five, error, hi = [m["content"] for m in result["messages"] if m["role"] == "tool"]
    assert five == "5"
    assert "'a' must be of type integer" in error
    assert json.loads(hi)["output"] == "hi\n"

    def terminal() -> None: ...

    with pytest.raises(UserError, match="two tools named 'terminal'"):
        make(tools=[terminal])


def test_another_task_id_has_another_sandbox_and_tool_state(make: Make) -> None:
    def todo(item: str, context: ToolContext) -> list[str]:
        """Add to the list."""
        items: list[str] = context.state.setdefault("todo", [])
        items.append(item)
        return items

    def step(item: str) -> dict[str, Any]:
        command = {"command": f"echo {item} >> f; cat f"}
        calls = [{"name": "todo", "arguments": {"item": item}}, {"arguments": command}]
        return {"calls": calls}

    def seen(result: dict[str, Any]) -> tuple[list[str], str]:
        items, file = [m["content"] for m in result["messages"] if m["role"] == "tool"][-2:]
        return json.loads(items), json.loads(file)["output"]

    with make(tools=[todo]) as agent:
        script = say(*[one for item in "abcde" for one in (step(item), "ok")])
        assert seen(agent.run_conversation(script, task_id="x")) == (["a"], "a\n")
        assert seen(agent.run_conversation("next", task_id="y")) == (["b"], "b\n")
        assert seen(agent.run_conversation("next", task_id="x")) == (["a", "c"], "a\nc\n")
        agent.end_task("x")
        agent.end_task("never used")
        assert seen(agent.run_conversation("next", task_id="x")) == (["d"], "d\n")
        default = agent.run_conversation("next")
        assert seen(default) == (["e"], "e\n")
        assert default["task_id"] not in ("x", "y")


def test_the_callbacks_follow_a_run(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[Any, ...]] = []
    names = ["tool_progress", "tool_start", "tool_complete", "reasoning", "step", "stream_delta"]
    names += ["interim_assistant", "thinking", "status"]

    def callback(name: str) -> Any:
        return lambda *values: seen.append((name, *values))

    steps = {"run": "echo hi", "text": "I look.", "reasoning": "hm"}, {"text": ""}, "Done."
    callbacks: dict[str, Any] = {f"{name}_callback": callback(name) for name in names}
    with make(**callbacks, quiet_mode=False) as agent:
        assert agent.chat(say(*steps)) == "Done."
    order = [one for one in seen if one[0] not in ("stream_delta", "thinking")]
    arguments = {"command": "echo hi"}
    preview = '{"command":"echo hi"}'
    (call_id,) = [one[1] for one in order if one[0] == "tool_start"]
    result = '{"output":"hi\\n","exit_code":0}'
    assert [tuple(_plain(v) for v in one) for one in order] == [
        ("step", 1, []),
        ("reasoning", "hm"),
        ("interim_assistant", "I look."),
        ("tool_start", call_id, "terminal", arguments),
        ("tool_progress", "tool.started", "terminal", preview, arguments),
        ("tool_complete", call_id, "terminal", arguments, result),
        ("tool_progress", "tool.completed", "terminal", preview, arguments),
        ("step", 2, [{"name": "terminal", "arguments": arguments, "result": result}]),
        ("status", "retry", "empty answer"),
        ("step", 3, []),
    ]
    pieces = [one[1] for one in seen if one[0] == "stream_delta"]
    assert pieces[-1] is None
    assert "".join(p or "" for p in pieces) == "I look.Done."
    assert [one[1] for one in seen if one[0] == "thinking"] == ["thinking", ""] * 3
    assert capsys.readouterr().err == f"terminal {preview}\n"


def _plain(value: Any) -> Any:
    return value.replace('": "', '":"') if isinstance(value, str) else value


def test_a_callback_that_fails_ends_no_run(make: Make) -> None:
    def fail(*values: Any) -> None:
        raise RuntimeError("a callback of yours")

    with make(step_callback=fail, stream_delta_callback=fail, tool_complete_callback=fail) as agent:
        assert agent.chat(say({"run": "true"}, "ok")) == "ok"


def test_fallbacks_answer_and_the_next_turn_begins_with_the_first_model(
    make: Make, server: FakeServer
) -> None:
    model = {"model": "other", "base_url": server.base_url, "api_key": "right"}
    for keyword in ("fallbacks", "fallback_model"):
        with make(toolsets=(), **{keyword: [model]}) as agent:
            script = say([{"fault": "content_filter"}, f"{keyword} answers."], "First again.")
            result = agent.run_conversation(script)
            assert result["final_response"] == f"{keyword} answers."
            again = agent.run_conversation("And?")
        assert [c["model"] for c in result["calls"]] == ["m", "other"]
        assert [c["model"] for c in again["calls"]] == ["m"]
        assert "right" not in json.dumps([result, again])


MODEL = ModelConfig(name="m", base_url="http://127.0.0.1:9/v1", api_key="k", fallbacks=("f",))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"base_url": "http://127.0.0.1:8/v1"}, "base_url and that of the ModelConfig contradict"),
        ({"api_key": "hidden-key"}, "api_key and that of the ModelConfig contradict"),
        ({"api_mode": "gopher"}, "api_mode"),
        ({"fallbacks": ["g"]}, "fallbacks and those of the ModelConfig contradict"),
        ({"fallbacks": ["g"], "fallback_model": "h"}, "fallbacks and fallback_model contradict"),
        ({"max_iterations": 3, "limits": Limits()}, "max_iterations and limits contradict"),
        ({"max_iterations": 0}, "must be a whole number from 1, not 0"),
        ({"iteration_budget": "5"}, "iteration_budget must be an IterationBudget or a whole"),
        ({"toolsets": ["file"], "enabled_toolsets": ["terminal"]}, "toolsets and enabled_toolsets"),
        (
            {"enabled_toolsets": ["file"], "disabled_toolsets": ["file"]},
            "toolset 'file' is both enabled and disabled",
        ),
        ({"enabled_toolsets": "file"}, r"enabled_toolsets='file' must be a list of names"),
        ({"disabled_toolsets": ["files"]}, "unknown toolset 'files'"),
        ({"session": "work", "session_id": "s"}, "session_id and session contradict"),
        ({"prefill_messages": [{"role": "system", "content": "s"}]}, "prefill_messages message 1"),
        ({"prefill_messages": ["x"]}, "prefill_messages message 1 is 'x'"),
        ({"max_iteration": 3}, "unknown argument 'max_iteration' .*did you mean 'max_iterations'"),
    ],
)
def test_what_contradicts_itself_is_one_line(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        AIAgent(MODEL, **arguments)
    assert "\n" not in str(caught.value)
    assert "hidden-key" not in str(caught.value)


def test_the_same_value_twice_contradicts_nothing() -> None:
    agent = AIAgent(
        MODEL,
        base_url=MODEL.base_url,
        api_key="k",
        toolsets=["file"],
        enabled_toolsets=["file"],
        limits=Limits(max_turns=4),
        max_iterations=4,
    )
    assert agent.toolsets == ("file",)
    agent.close()


@pytest.mark.parametrize("api_mode", ["chat_completions", "anthropic_messages", "codex_responses"])
def test_reasoning_is_streamed(make: Make, api_mode: str) -> None:
    pieces, order = list[str](), list[str]()
    thought = "First I look at the file, then I count its lines, and then I answer."

    def reasoning(text: str) -> None:
        pieces.append(text)
        order.append("reasoning")

    def delta(text: str | None) -> None:
        order.append("text" if text else "end")

    with make(
        api_mode=api_mode, reasoning_callback=reasoning, stream_delta_callback=delta
    ) as agent:
        result = agent.run_conversation(say({"text": "Three.", "reasoning": thought}))
    assert result["final_response"] == "Three."
    assert "".join(pieces) == thought
    assert len(pieces) > 1
    assert order.index("reasoning") < order.index("text")
