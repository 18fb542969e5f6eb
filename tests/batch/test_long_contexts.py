"""Batch runs whose rollouts do not fit in the model's window: rows, checks, exports, budgets and
checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.cli import main
from hermes_rl.export import export_run
from hermes_rl.messages import ToolMessage
from hermes_rl.record import replacements
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest

TURNS = 70
WINDOW = 5_000
STEP = "export N=$((N+1)); printf 'step %d ' $N; head -c 500 /dev/zero | tr '\\0' x"
SWITCHES = ("--max-turns", "100", "--set", f"agent.context.window={WINDOW}", "--workers", "0")


def policy(request: ServedRequest) -> Any:
    """Run one step after another, by the result of the last one alone."""
    if not request.tools:
        return {"text": "## Done\nThe steps so far."}
    seen = [m.content for m in request.messages if isinstance(m, ToolMessage)]
    number = number_in(seen[-1]) if seen else 0
    return f"{number} steps." if number >= TURNS else {"run": f": {number}; {STEP}"}


def number_in(result: str) -> int:
    found = re.search(r"step (\d+)", result)
    assert found, result
    return int(found[1])


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    plays = {"fake": policy, "small": policy}
    async with FakeServer(FakeConfig(plays=plays, window=WINDOW, latency_s=0.01)) as running:
        yield running


def task() -> dict[str, Any]:
    return {"id": "long", "prompt": "Do all steps.", "verify": "true"}


def check_row(folder: Path, served: FakeServer) -> dict[str, Any]:
    """The one row: it is whole, its usage is exact, and each answer is trained once."""
    (row,) = kit.final_rows(folder / "run").values()
    assert (row["end_reason"], row["turns"], row["reward"]) == ("answered", TURNS + 1, 1.0)
    assert len(row["contexts"]) > 2
    replaced = replacements(row)
    originals = [json.loads(m) for n, m in enumerate(row["messages"]) if n not in replaced]
    results = [m["content"] for m in originals if m["role"] == "tool"]
    assert [number_in(text) for text in results] == list(range(1, TURNS + 1))
    assert row["tool_call_count"] == TURNS
    kit.check_usage(folder / "run", served.entries)
    assert main(["check", str(folder / "run")]) == 0
    trained = export_run(folder / "run", "trl", folder / "trl.jsonl").trained
    assert trained == TURNS + 1
    return row


async def test_a_long_rollout_is_whole_in_its_row_and_trained_once(
    tmp_path: Path, server: FakeServer, capsys: Any
) -> None:
    model = json.dumps({"name": "small", "base_url": server.base_url})
    more = ("--set", f"agent.context.summary={model}", "--set", "run.budget_tokens=100000000")
    await kit.finish_run(*kit.run_arguments(tmp_path, [task()], server, *SWITCHES, *more))
    row = check_row(tmp_path, server)
    summaries = [c for c in row["calls"] if c["purpose"] == "summary"]
    assert {c["model"] for c in summaries} == {"small"}
    assert len(summaries) == sum("summary" in c["reason"] for c in row["contexts"]) > 1
    assert max(e.prompt_tokens for e in server.entries) < WINDOW
    capsys.readouterr()
    assert main(["show", str(tmp_path / "run"), "--json"]) == 0
    assert main(["show", str(tmp_path / "run"), row["unit_id"][:8]]) == 0
    assert "context   compressed to" in capsys.readouterr().out


async def test_a_killed_rollout_resumes_in_its_compressed_context(
    tmp_path: Path, server: FakeServer
) -> None:
    command = kit.run_arguments(
        tmp_path, [task()], server, *SWITCHES, "--sandbox", "bubblewrap", "--checkpoint-turns", "5"
    )
    run = await kit.start_run(*command)
    await kit.wait_for_requests(server, 55, run)
    kit.kill(run.pid)
    await run.wait()
    before = server.requests
    await kit.finish_run(*command)
    assert server.requests - before < TURNS - 40
    row = check_row(tmp_path, server)
    metrics = {m["name"]: m["value"] for m in row["metrics"]}
    assert metrics["resumed_turns"] >= 45
    assert metrics["compressions"] == len(row["contexts"]) - 1
