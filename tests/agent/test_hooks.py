"""Hooks: when they are called and with what, what they change, and what their failures do."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import Hooks, load_run
from hermes_rl.agent import HOOKS
from hermes_rl.errors import AuthError, UserError

from .conftest import Make, say

Seen = list[tuple[str, dict[str, Any]]]


def observers(seen: Seen) -> dict[str, Callable[..., Any]]:
    """A function for each hook that notes how it was called."""

    def note(name: str) -> Callable[..., None]:
        return lambda **payload: seen.append((name, payload))

    return {name: note(name) for name in HOOKS}


def test_every_hook_is_called_at_its_moment_with_its_keywords(make: Make) -> None:
    seen: Seen = []
    script = say({"run": "echo hi"}, "Done.", "More.", {"fault": "billing"})
    with make(hooks=Hooks(**observers(seen))) as agent:
        first = agent.run_conversation(script, task_id="t")
        agent.chat("And?")
        agent.run_conversation("Another: " + say("x"), conversation_history=[])
    request, tool = ["pre_api_request", "post_api_request"], ["pre_tool_call"]
    tool += ["transform_terminal_output", "transform_tool_result", "post_tool_call"]
    end = ["post_llm_call", "on_session_end", "transform_llm_output"]
    one_answer = ["pre_llm_call", *request, *end]
    assert [name for name, _ in seen] == [
        *("on_session_start", "pre_llm_call", *request, *tool, *request, *end),
        *one_answer,
        *("on_session_reset", *one_answer),
        "on_session_finalize",
    ]
    for name, payload in seen:
        assert set(payload) == {*HOOKS[name].keywords}, name
    of = dict(reversed(seen))
    assert {p["session_id"] for _, p in seen} == {first["session_id"]}
    assert (of["on_session_start"]["resumed"], of["on_session_start"]["platform"]) == (
        False,
        "agent",
    )
    before = of["pre_llm_call"]
    assert (before["user_message"], before["is_first_turn"]) == (script, True)
    assert of["post_llm_call"]["assistant_response"] == "Done."
    assert [m["role"] for m in of["pre_api_request"]["request_messages"]] == ["system", "user"]
    assert of["post_api_request"]["usage"]["output_tokens"] > 0
    called = of["post_tool_call"]
    assert (called["tool_name"], called["args"]) == ("terminal", {"command": "echo hi"})
    assert (called["status"], called["task_id"], called["turn"]) == ("ok", "t", 1)
    calls = next(m for m in first["messages"] if m["role"] == "assistant")["tool_calls"]
    assert called["tool_call_id"] == calls[0]["id"]
    output = of["transform_terminal_output"]
    assert (output["command"], output["output"], output["returncode"], output["env_type"]) == (
        *("echo hi", "hi\n", 0, "none"),
    )
    assert (of["on_session_end"]["completed"], of["on_session_end"]["end_reason"]) == (
        True,
        "answered",
    )


def test_a_call_that_fails_and_a_message_that_fails_are_reported(make: Make) -> None:
    seen: Seen = []
    with make(key="wrong", hooks=Hooks(**observers(seen))) as agent, pytest.raises(AuthError):
        agent.chat("hello")
    of = dict(seen)
    assert (of["api_request_error"]["error_type"], of["api_request_error"]["reason"]) == (
        "AuthError",
        "auth",
    )
    assert (of["on_session_end"]["end_reason"], of["on_session_end"]["completed"]) == (
        "error",
        False,
    )


def test_what_hooks_change_reaches_the_model_and_is_flagged(make: Make, tmp_path: Path) -> None:
    def remember(user_message: str) -> dict[str, str]:
        return {"context": f"Remember: {len(user_message)} characters."}

    async def shorten(output: str, **more: Any) -> str:
        await asyncio.sleep(0)
        return output.replace("secret", "[hidden]")

    def sign(result: str, tool_name: str) -> str:
        return f"{result} ({tool_name})"

    hooks = Hooks(
        pre_llm_call=remember,
        transform_terminal_output=shorten,
        transform_tool_result=sign,
        transform_llm_output=lambda response_text: response_text.upper(),
    )
    prompt = say({"run": "echo a secret"}, "Done.")
    with make(hooks=hooks) as agent:
        result = agent.run_conversation(prompt)
        agent.save_trajectory(tmp_path / "run")
    assert result["final_response"] == "DONE."  # for whoever called; the record has the model's
    user, _, tool, answer = result["messages"][1:]
    context = f"Remember: {len(prompt)} characters."
    assert user["content"] == f"{prompt}\n\n{context}"
    assert tool["content"].endswith("(terminal)")
    assert json.loads(tool["content"].removesuffix(" (terminal)"))["output"] == "a [hidden]\n"
    assert answer["content"] == "Done."
    (row,) = load_run(tmp_path / "run").trajectories.to_dict("records")
    raw = [info["raw_content"] for info in row["message_info"]]
    assert (raw[1], raw[2], raw[4]) == (prompt, None, None)
    assert "a secret" in raw[3]
    assert dict(row["metrics"]) == {"hook_contexts": 1.0, "hook_transforms": 2.0}
    assert row["final_response"] == "Done."


def test_a_hook_may_forbid_a_tool(make: Make, tmp_path: Path) -> None:
    mark, after = tmp_path / "mark", list[tuple[str, str | None]]()

    def forbid(args: dict[str, Any]) -> Any:
        forbidden = "touch" in args["command"]
        args["command"] = "rm -rf /"  # of a copy
        return {"action": "block", "message": "no writing here"} if forbidden else None

    def note(status: str, error_message: str | None) -> None:
        after.append((status, error_message))

    hooks = Hooks(pre_tool_call=forbid, post_tool_call=note)
    with make(hooks=hooks) as agent:
        result = agent.run_conversation(say({"run": f"touch {mark}"}, {"run": "true"}, "ok"))
    tools = [json.loads(m["content"]) for m in result["messages"] if m["role"] == "tool"]
    assert tools[0] == {"error": "terminal was not run: no writing here"}
    assert tools[1]["exit_code"] == 0
    assert not mark.exists()
    assert after == [("blocked", "terminal was not run: no writing here"), ("ok", None)]


def fail(**payload: Any) -> None:
    raise RuntimeError("a hook of yours")


async def fail_later(**payload: Any) -> None:
    raise SystemError("a hook of yours")


def exit_all(**payload: Any) -> None:
    raise SystemExit(3)


def garbage(**payload: Any) -> Any:
    return 7


def bad_dict(**payload: Any) -> Any:
    return {"action": "allow", "context": [1]}


def mutate(**payload: Any) -> None:
    for value in payload.values():
        if isinstance(value, dict | list):
            value.clear()


HARMFUL = {
    "raises": fail,
    "raises later": fail_later,
    "exits": exit_all,
    "returns a number": garbage,
    "returns a strange dict": bad_dict,
    "changes its arguments": mutate,
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_hooks_that_fail_change_nothing_and_are_counted(
    make: Make, tmp_path: Path, kind: str
) -> None:
    names = [name for name in HOOKS if name != "pre_tool_call"]
    rows = []
    for hooks in (None, Hooks(**dict.fromkeys(names, HARMFUL[kind]))):
        with make(hooks=hooks, system="s") as agent:
            result = agent.run_conversation(say({"run": "echo hi"}, "ok"))
            agent.save_trajectory(tmp_path / "run")
        rows.append([result["messages"], result["final_response"], result["end_reason"]])
    assert rows[0] == rows[1]
    counted = [dict(m) for m in load_run(tmp_path / "run").trajectories["metrics"]]
    (harmed,) = [m for m in counted if m] or [{}]
    if kind == "changes its arguments":
        assert harmed == {}
    else:
        number = sum(harmed.values())
        assert number >= (3 if "returns" in kind else 9), harmed
        assert set(harmed) == {"hook_bad_returns" if "returns" in kind else "hook_errors"}


def test_hooks_see_approvals_and_sub_agents(make: Make) -> None:
    seen: Seen = []
    delegate = {"name": "delegate_task", "arguments": {"goal": say("child's answer")}}
    script = say({"run": "mkdir -p d; rm -r d"}, {"calls": [delegate]}, "Done.")
    names = ("pre_approval_request", "post_approval_response", "subagent_start", "subagent_stop")
    hooks = Hooks(**{name: observers(seen)[name] for name in names})
    toolsets = ["terminal", "delegation"]
    with make(hooks=hooks, toolsets=toolsets, approval_callback=lambda request: True) as agent:
        assert agent.chat(script) == "Done."
    assert [name for name, _ in seen] == list(names)
    for name, payload in seen:
        assert set(payload) == {*HOOKS[name].keywords}, name
    of = dict(seen)
    assert of["post_approval_response"]["choice"] == "allowed"
    assert of["pre_approval_request"]["command"] == "mkdir -p d; rm -r d"
    assert of["subagent_start"]["child_id"] == "main.1"
    stop = of["subagent_stop"]
    assert (stop["status"], stop["summary"]) == ("completed", "child's answer")


@pytest.mark.parametrize("guard", [fail, garbage])
def test_a_tool_whose_guard_fails_is_not_run(make: Make, guard: Any) -> None:
    with make(hooks=Hooks(pre_tool_call=guard)) as agent:
        result = agent.run_conversation(say({"run": "true"}, "ok"))
    (tool,) = [json.loads(m["content"]) for m in result["messages"] if m["role"] == "tool"]
    assert tool == {"error": "terminal was not run: its guard failed"}


def test_hooks_that_hang_miss_their_deadline_once(make: Make, tmp_path: Path) -> None:
    ended = threading.Event()

    def hang(**payload: Any) -> None:
        ended.wait(60)

    async def block(**payload: Any) -> None:
        ended.wait(60)

    async def sleep(**payload: Any) -> None:
        await asyncio.sleep(60)

    hooks = Hooks(
        pre_api_request=hang, transform_tool_result=block, post_tool_call=sleep, deadline_s=0.1
    )
    start = time.monotonic()
    with make(hooks=hooks) as agent:
        result = agent.run_conversation(say({"run": "echo 1"}, {"run": "echo 2"}, "ok"))
        agent.save_trajectory(tmp_path / "run")
    assert time.monotonic() - start < 30
    assert result["final_response"] == "ok"
    (metrics,) = load_run(tmp_path / "run").trajectories["metrics"]
    assert dict(metrics) == {"hook_timeouts": 3.0, "hook_skips": 4.0}
    ended.set()


def test_an_interrupt_ends_a_hook_that_hangs(make: Make) -> None:
    reached, ended = threading.Event(), threading.Event()

    def hang(**payload: Any) -> None:
        reached.set()
        ended.wait(60)

    for name in ("pre_llm_call", "pre_tool_call", "post_api_request"):
        reached.clear()
        with make(hooks=Hooks(**{name: hang}, deadline_s=30)) as agent:

            def interrupt(agent: Any = agent) -> None:
                assert reached.wait(60)
                agent.interrupt()

            thread = threading.Thread(target=interrupt)
            thread.start()
            start = time.monotonic()
            result = agent.run_conversation(say({"run": "true"}, "ok"))
            thread.join()
            assert (result["end_reason"], time.monotonic() - start < 30) == ("interrupted", True)
            assert result["messages"][1]["role"] == "user", name
    ended.set()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda payload: None, "is called with the keywords tool_name, args, .* 'payload' is not"),
        (lambda tool_name, /: None, "'tool_name' is not one of them"),
        ("print", "is not a function"),
    ],
)
def test_a_function_that_does_not_fit_is_one_line(make: Make, function: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make(hooks=Hooks(pre_tool_call=function))
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"deadline_s .* must be a number of seconds above 0"):
            make(hooks=Hooks(pre_tool_call=print, deadline_s=seconds))


def test_the_page_of_hooks_is_complete() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{name}` | {point.when} | {', '.join(f'`{k}`' for k in point.keywords)} | "
        f"{'' if point.returns == 'nothing' else point.returns} |"
        for name, point in HOOKS.items()
    ]
