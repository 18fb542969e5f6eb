"""Runs of one dataset over every dialect and transport have equal Parquet rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import kit

from hermes_rl.models import DIALECTS
from hermes_rl.testing import FakeServer

WIRES = [
    (mode, transport, (transport == "sdk") is (place % 2 == 0))
    for place, mode in enumerate(DIALECTS)
    for transport in ("http", "sdk")
]
"""Each dialect with both transports, one of them streamed. `models/test_conformance` tests all
twelve combinations."""
EPISODES: dict[str, list[Any]] = {
    "thinks": [
        {"text": "Let me see.", "reasoning": "First look…", "calls": [
            {"arguments": {"command": "echo ünïcode 🚀 > a.txt"}},
            {"arguments": {"command": "cat absent.txt"}}]},
        {"text": "", "reasoning": "It is not there.", "run": "echo 2 > out.txt"},
        "Done.\n\nBye.",
    ],
    "empty": [[{"text": ""}, {"run": "echo 2 > out.txt"}], [{"text": ""}, "There."]],
    "thoughts": [[{"text": "", "reasoning": "It must be 4."}, "4"]],
    "cut text": [{"text": "1, ", "finish": "length"}, {"text": "2, ", "finish": "length"}, "3."],
    "cut call": [[{"run": "touch never", "finish": "length"}, {"run": "echo 2 > out.txt"}], "Ok."],
    "wrong name": [
        {"calls": [{"name": "Terminal", "arguments": {"command": "echo 2 > out.txt"}}]},
        "Well.",
    ],
    "no tool": [{"calls": [{"name": "wand", "arguments": {}}]}] * 3,
    "twice": [{"calls": [{"arguments": {"command": "echo 2 >> out.txt"}}] * 2}, "Once."],
    "endless": [{"run": f"echo {n}"} for n in range(6)] + ["A summary."],
    "refused": [{"run": "true"}, {"text": "never", "fault": "context_overflow"}],
}  # fmt: skip
"""Behaviours of models that all dialects can express: Anthropic's has only JSON objects as
arguments, and reports every filtered answer as a refusal."""

OF_ONE_RUN = {
    "api_mode", "endpoint", "finished_at", "root_trajectory_id", "run_id", "sandbox", "started_at",
    "timing", "trajectory_id",
}  # fmt: skip
"""Columns of ids, times and the endpoint."""
OF_ONE_CALL = {
    "call_id", "cache_read_tokens", "cache_write_tokens", "latency_s", "request_id", "started_at",
    "usage_raw",
}  # fmt: skip
"""Ids, times, and cache figures, which differ between providers."""


def rows() -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "prompt": f"Do it: {name}.\nSCRIPT: {json.dumps(steps)}",
            "verify": 'test "$(cat "$WORKSPACE/out.txt" 2>/dev/null)" = 2',
        }
        for name, steps in EPISODES.items()
    ]


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the columns in which two equal runs may differ."""
    kept = {name: value for name, value in row.items() if name not in OF_ONE_RUN}
    for holder in [kept["usage"], *kept["calls"]]:
        for name in OF_ONE_CALL:
            holder.pop(name, None)
    for call in kept["calls"]:
        if call["outcome"] == "refused":
            call["error"] = call["error"].partition(":")[0]  # the rest is the provider's text
    for info in kept["message_info"]:
        info.pop("reasoning_details")  # opaque, of one provider
    for tool in kept["tool_stats"]:
        tool.pop("seconds")
    return kept


async def run(folder: Path, wire: tuple[str, str, bool]) -> dict[str, dict[str, Any]]:
    """Task -> its row, of a run over one wire."""
    mode, transport, stream = wire
    out = folder / "-".join(map(str, wire))
    async with FakeServer() as server:
        config = kit.make_config(
            folder,
            rows(),
            model={"max_tokens": 2000},
            agent={"limits": {"max_turns": 5}},
            endpoint={
                "base_url": server.base_url, "api_mode": mode, "transport": transport,
                "stream": stream, "prices": {"fake": {"input": 3, "output": 15}},
            },
            run={"out": str(out)},
        )  # fmt: skip
        report = await kit.run_config(config)
        served = {entry.api_mode for entry in server.entries}
        kit.check_usage(out, server.entries)
    assert (report.exit_code, served) == (0, {mode})
    found = kit.read_table(out, "trajectories")
    assert kit.read_table(out, "failures") == []
    assert {(row["api_mode"], row["endpoint"]) for row in found} == {
        (mode, server_host(config.endpoint.base_url))
    }
    return {row["task_id"]: comparable(row) for row in found}


def server_host(url: str | None) -> str:
    return str(url).removeprefix("http://").removesuffix("/v1")


async def test_rows_are_equal_over_all_dialects_and_transports(tmp_path: Path) -> None:
    first, *others = WIRES
    wanted = await run(tmp_path, first)
    assert set(wanted) == set(EPISODES)
    endings = Counter(row["end_reason"] for row in wanted.values())
    assert endings["answered"] == 7
    assert set(endings) == {"answered", "max_turns", "invalid_tool_calls", "context_overflow"}
    assert wanted["thinks"]["reward"] == 1.0
    assert wanted["endless"]["calls"][-1]["purpose"] == "summary"
    for wire in others:
        got = await run(tmp_path, wire)
        assert set(got) == set(wanted)
        for name, row in wanted.items():
            assert got[name] == row, (wire, name)
