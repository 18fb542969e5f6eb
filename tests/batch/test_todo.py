"""The todo list of a batch rollout survives a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.messages import ToolMessage
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest

ITEMS = [{"id": "1", "content": "Count", "status": "in_progress"}]
TURNS = 20


def policy(request: ServedRequest) -> Any:
    """Write a list, then count in the shell, then read the list."""
    done = sum(isinstance(message, ToolMessage) for message in request.messages)
    if done in (0, TURNS):
        arguments = {} if done else {"todos": ITEMS}
        return {"calls": [{"name": "todo", "arguments": arguments}]}
    return {"run": f": {done}"} if done < TURNS else "Counted."


@pytest.mark.slow
async def test_the_list_of_a_killed_rollout_is_there_after_its_checkpoint(tmp_path: Path) -> None:
    async with FakeServer(FakeConfig(plays={"fake": policy}, latency_s=0.02)) as server:
        more = ("--workers", "0", "--sandbox", "bubblewrap", "--toolsets", "terminal,todo")
        rows = [{"id": "one", "prompt": "Count.", "verify": "true"}]
        command = kit.run_arguments(tmp_path, rows, server, *more, "--checkpoint-turns", "4")
        run = await kit.start_run(*command)
        await kit.wait_for_requests(server, 12, run)
        kit.kill(run.pid)
        await run.wait()
        await kit.finish_run(*command)
        kit.check_usage(tmp_path / "run", server.entries)
    (row,) = kit.final_rows(tmp_path / "run").values()
    assert (row["end_reason"], row["turns"]) == ("answered", TURNS + 2)
    assert {m["name"]: m["value"] for m in row["metrics"]}["resumed_turns"] >= 4
    results = [json.loads(text) for text in row["messages"] if '"role":"tool"' in text]
    assert results[-1]["content"].startswith(
        f'{{"todos":{json.dumps(ITEMS, separators=(",", ":"))}'
    )
