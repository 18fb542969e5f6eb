"""The same task through every dialect and transport makes the same row, ids and times apart."""

import msgspec
import pytest

from hermes_rl.models import DIALECTS

from .conftest import script

TASK = {
    "prompt": script(
        {
            "text": "Let me look.",
            "reasoning": "First a file.",
            "run": "echo one > a.txt; cat a.txt",
        },
        {"text": "", "calls": [{"name": "terminal", "arguments": {"command": "cat b.txt"}}]},
        {"text": "", "reasoning": "It is not there.", "run": "cp a.txt b.txt"},
        "There are two files.",
    ),
    "verify": "cmp /workspace/a.txt /workspace/b.txt",
}

OF_ONE_RUN = {
    "api_mode", "attempt", "config_hash", "endpoint", "finished_at", "group_id", "prompt_sha256",
    "root_trajectory_id", "run_id", "sandbox", "started_at", "task_hash", "timing",
    "trajectory_id", "unit_id",
}  # fmt: skip
"""Columns of ids, times and the endpoint."""

OF_ONE_CALL = {
    "call_id", "cache_read_tokens", "cache_write_tokens", "latency_s", "request_id", "started_at",
    "usage_raw",
}  # fmt: skip
"""Ids, times, and what each provider caches in a way of its own."""


def comparable(trajectory):
    row = msgspec.to_builtins(trajectory)
    kept = {name: value for name, value in row.items() if name not in OF_ONE_RUN}
    for holder in [kept["usage"], *kept["calls"]]:
        for name in OF_ONE_CALL:
            holder.pop(name, None)
    for info in kept["message_info"]:
        info.pop("reasoning_details")  # opaque, of one provider
    for tool in kept["tool_stats"]:
        tool.pop("seconds")
    return kept


async def row_of(stage, mode, transport):
    opened = await stage(endpoint={"api_mode": mode, "transport": transport})
    trajectory = await opened.attempt(TASK)
    assert trajectory.api_mode == mode
    assert [c.request_id for c in trajectory.calls] == [e.request_id for e in opened.server.entries]
    assert {entry.api_mode for entry in opened.server.entries} == {mode}
    return comparable(trajectory)


@pytest.mark.parametrize("transport", ["http", "sdk"])
@pytest.mark.parametrize("mode", DIALECTS)
async def test_a_row_does_not_tell_its_wire(stage, mode, transport):
    row = await row_of(stage, mode, transport)
    assert (row["status"], row["end_reason"], row["reward"]) == ("ok", "answered", 1.0)
    assert row["turns"] == 4
    assert row == await row_of(stage, "chat_completions", "http")
