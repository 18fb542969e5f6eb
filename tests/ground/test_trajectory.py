"""The fold: one function makes rows, live and in recovery."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl import events as ev
from hermes_rl.errors import CAUSES, ENDINGS
from hermes_rl.messages import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.trajectory import fold
from hermes_rl.usage import Usage, UsageTotal, add_totals, total_usage

KEY = ev.AttemptKey(unit_id="u" * 32, epoch=1, attempt=0)


def begun() -> ev.Begun:
    return ev.Begun(
        key=KEY,
        started_at=100.0,
        run_id="r",
        group_id="g",
        member=0,
        repeat=0,
        row_index=3,
        task_id="t",
        task_hash="h",
        config_hash="c",
        seed=5,
        prompt="do it",
        model="m",
        api_mode="chat_completions",
        endpoint="localhost:1",
    )


def call(call_id: str, turn: int, **end: Any) -> list[ev.Event]:
    start = ev.CallStarted(
        call_id=call_id,
        turn=turn,
        purpose="agent",
        model="m",
        started_at=101.0,
        max_input_tokens=500,
        max_output_tokens=64,
    )
    if not end:
        return [start]
    return [start, ev.CallEnded(call_id=call_id, latency_s=0.5, **end)]


def episode() -> list[ev.Event]:
    wanted = ToolCall(id="c1", name="terminal", arguments='{"command": "ls"}')
    broken = ToolCall(id="c2", name="terminal", arguments="{oops")
    usage = Usage(input_tokens=10, output_tokens=4)
    return [
        begun(),
        ev.SandboxLeased(backend="none", seconds=0.2),
        ev.MessageAdded(message=SystemMessage(content="sys"), turn=0),
        ev.MessageAdded(message=UserMessage(content="do it"), turn=0),
        *call("a", 1, outcome="refused", error="429"),
        ev.Waited(seconds=1.5),
        *call("b", 1, outcome="ok", usage=usage, cost_usd=0.5),
        ev.MessageAdded(message=AssistantMessage(tool_calls=(wanted, broken)), turn=1),
        ev.MessageAdded(
            message=ToolMessage(tool_call_id="c1", name="terminal", content="x"),
            turn=1,
            tool_ok=True,
            seconds=0.1,
        ),
        ev.MessageAdded(
            message=ToolMessage(tool_call_id="c2", name="terminal", content="bad"),
            turn=1,
            tool_ok=False,
            seconds=0.0,
        ),
        *call("c", 2, outcome="ok", usage=usage, cost_usd=0.25),
        ev.MessageAdded(message=AssistantMessage(content="done", raw_content="<x>done"), turn=2),
        ev.Graded(reward=1.0, seconds=0.3),
        ev.Ended(finished_at=110.0, end_reason="answered"),
    ]


def test_fold_of_a_whole_episode() -> None:
    row = fold(episode())
    assert (row.status, row.end_reason, row.owner, row.reward) == ("ok", "answered", "policy", 1.0)
    assert (row.turns, row.tool_call_count, row.final_response) == (2, 2, "done")
    assert row.usage == UsageTotal(input_tokens=20, output_tokens=8, total_tokens=28)
    assert row.cost_usd == 0.75
    assert [c.outcome for c in row.calls] == ["refused", "ok", "ok"]
    assert row.timing.waiting_s == 1.5
    assert row.timing.total_s == 10.0
    assert [(s.calls, s.ok, s.errors) for s in row.tool_stats] == [(2, 1, 1)]
    assert [i.raw_arguments for i in row.message_info][2] == ['{"command": "ls"}', "{oops"]
    assert row.message_info[-1].raw_content == "<x>done"
    assistant = json.loads(row.messages[2])
    assert assistant["content"] == ""
    arguments = [c["function"]["arguments"] for c in assistant["tool_calls"]]
    assert arguments == [{"command": "ls"}, {"_unparsed": "{oops"}]


@given(st.integers(0, 20))
def test_a_killed_attempt_keeps_its_turns_and_lists_the_open_call(cut: int) -> None:
    whole = episode()
    events = whole[: 1 + cut % (len(whole) - 1)]
    row = fold(events, lost="driver_lost", at=120.0)
    assert (row.status, row.cause, row.owner) == ("failed", "driver_lost", "infrastructure")
    assert row.reward is None
    assert row.end_reason == "error"
    started = [e for e in events if isinstance(e, ev.CallStarted)]
    ended = {e.call_id for e in events if isinstance(e, ev.CallEnded)}
    unknown = [e for e in started if e.call_id not in ended]
    assert row.usage.unknown_calls == len(unknown)
    assert [c.outcome for c in row.calls].count("unknown") == len(unknown)
    if unknown:
        assert row.cost_usd is None
        assert row.metrics["unknown_input_tokens_max"] == 500.0
        assert row.metrics["unknown_output_tokens_max"] == 64.0


def test_fold_is_equal_after_a_journal_round_trip() -> None:
    lines = [msgspec.json.encode(e) for e in episode()]
    again = [msgspec.json.decode(line, type=ev.Event) for line in lines]
    assert fold(again) == fold(episode())


@pytest.mark.parametrize("reason", ENDINGS)
def test_policy_endings_are_graded_rows_of_trajectories(reason: str) -> None:
    end = ev.Ended(finished_at=2.0, end_reason=reason)
    row = fold([begun(), ev.Graded(reward=0.0), end])
    assert (row.table, row.reward, row.owner) == ("trajectories", 0.0, "policy")
    assert row.truncated == ENDINGS[reason].truncated


@pytest.mark.parametrize("cause", CAUSES)
def test_failures_never_have_a_reward(cause: str) -> None:
    end = ev.Ended(finished_at=2.0, end_reason="error", cause=cause)
    row = fold([begun(), ev.Graded(reward=1.0), end])
    assert (row.table, row.reward, row.rewards) == ("failures", None, [])
    assert row.owner == CAUSES[cause].owner
    assert row.end_reason == (cause if cause in ("interrupted", "cost_limit") else "error")


def test_unknown_usage_is_null_not_zero() -> None:
    total = total_usage([Usage(input_tokens=1, output_tokens=2)], unknown_calls=1)
    assert (total.reasoning_tokens, total.unknown_calls) == (None, 1)
    assert total_usage([], unknown_calls=1).total_tokens is None
    assert total_usage([]).total_tokens == 0
    both = add_totals([total, total_usage([])])
    assert (both.total_tokens, both.cache_read_tokens, both.unknown_calls) == (3, None, 1)


def test_messages_quoted_in_a_prompt_do_not_count() -> None:
    quoted = ToolCall(id="q", name="search", arguments="{}")
    row = fold(
        [
            begun(),
            ev.MessageAdded(message=UserMessage(content="before"), turn=0),
            ev.MessageAdded(message=AssistantMessage(content="old", tool_calls=(quoted,)), turn=0),
            ev.MessageAdded(
                message=ToolMessage(tool_call_id="q", name="search", content="x"), turn=0
            ),
            ev.MessageAdded(message=UserMessage(content="now"), turn=0),
        ],
        lost="worker_lost",
    )
    assert (row.final_response, row.tool_call_count, row.tool_stats) == (None, 0, [])
    assert len(row.messages) == 4
