"""MCP servers in runs, in environments and in `AIAgent`: the same tools everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kit
import pytest

from batch_runner import Silent, arun_batch
from hermes_rl import AIAgent, ModelConfig
from hermes_rl.config import parse_config
from hermes_rl.errors import StoreError, UserError
from hermes_rl.testing import FakeServer, mcp_server_source

CANARY = "canary-7f3a9c1e5b2d8046"
STEPS: list[Any] = [
    {"calls": [{"name": "mcp_bad_count", "arguments": {}}]},
    {"calls": [{"name": "mcp_bad_die", "arguments": {}}]},
    {"calls": [{"name": "mcp_bad_count", "arguments": {}}]},
    {"calls": [{"name": "mcp_bad_environment", "arguments": {}}]},
    "done",
]
PROMPT = f"Do it.\nSCRIPT: {json.dumps(STEPS)}"


def bad(mode: str = "", **more: Any) -> dict[str, Any]:
    args = ["-c", mcp_server_source(), mode]
    return {"bad": {"command": "python3", "args": args, **more}}


def config(folder: Path, server: FakeServer, mcp: dict[str, Any], **sections: Any) -> Any:
    rows = [{"id": str(n), "prompt": PROMPT + " " * n, "verify": "true"} for n in range(2)]
    return parse_config(
        {
            "dataset": {"path": str(kit.write_rows(folder / "rows.jsonl", rows))},
            "model": {"name": "m"},
            "agent": {"toolsets": ["none"]},
            "endpoint": {"base_url": server.base_url},
            "run": {"out": str(folder / "run"), "workers": 0},
            "mcp": mcp,
            **sections,
        }
    )


def results(row: dict[str, Any]) -> list[Any]:
    messages = [json.loads(text) for text in row["messages"]]
    return [m["content"] for m in messages if m["role"] == "tool"]


async def test_each_unit_has_a_server_in_its_sandbox(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    report = await arun_batch(config(tmp_path, server, bad()), progress=Silent())
    assert report.done == 2
    for row in kit.final_rows(tmp_path / "run").values():
        first, died, again, environment = results(row)
        assert (first, again) == ("1", "1")
        assert "MCP server bad: it ended" in died
        assert "/workspace" in environment
        assert row["sandbox"]["backend"] == "bubblewrap"
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path


async def test_a_changed_server_is_reported_at_resume(tmp_path: Path, server: FakeServer) -> None:
    out = tmp_path / "run"
    report = await arun_batch(config(tmp_path, server, bad()), progress=Silent())
    assert report.done == 2
    with pytest.raises(StoreError, match=r"made with mcp_bad_count \w+\.\.\., now none"):
        await arun_batch(config(tmp_path, server, bad("other")), progress=Silent())
    again = await arun_batch(config(tmp_path, server, bad(timeout=50)), progress=Silent())
    assert (again.done, len(kit.final_rows(out))) == (2, 2)
    assert len(server.entries) == 2 * len(STEPS)


async def test_a_named_variable_reaches_the_host_and_no_record(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mcp = bad(where="host", shared=True, env={"TOKEN": "${MCP_TEST_TOKEN}"})
    with pytest.raises(UserError, match="variable MCP_TEST_TOKEN is not set"):
        await arun_batch(config(tmp_path, server, mcp), progress=Silent())
    monkeypatch.setenv("MCP_TEST_TOKEN", CANARY)
    report = await arun_batch(config(tmp_path, server, mcp), progress=Silent())
    assert report.done == 2
    for row in kit.final_rows(tmp_path / "run").values():
        assert '"TOKEN": ' in results(row)[3]
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path


@pytest.mark.slow
async def test_units_on_workers_of_ray(
    tmp_path: Path,
    server: FakeServer,
    cluster: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    run = {"out": str(tmp_path / "run"), "workers": 1}
    report = await arun_batch(config(tmp_path, server, bad(), run=run), progress=Silent())
    assert report.done == 2


ENVIRONMENT = """
from hermes_rl.rl import EnvConfig, Environment, Rewards, make_task, part

class Counting(Environment[EnvConfig]):
    name = "counting"

    def tasks(self, split, seed):
        yield make_task(PROMPT, id="0")

    async def compute_reward(self, task, trajectory, ctx):
        used = [call.name for call in trajectory.tool_calls if call.ok]
        return Rewards([part("used", float("mcp_bad_count" in used))])
"""


async def test_an_environment_has_them_too(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "counting.py").write_text(f"PROMPT = {PROMPT!r}\n{ENVIRONMENT}")
    env = {"name": f"{tmp_path / 'counting.py'}:Counting"}
    wanted = config(tmp_path, server, bad(), env=env, dataset={"limit": 1})
    report = await arun_batch(wanted, progress=Silent())
    assert report.done == 4
    for row in kit.final_rows(tmp_path / "run").values():
        assert (row["reward"], results(row)[0]) == (1.0, "1")


async def test_an_agent_has_them_over_all_its_messages(server: FakeServer) -> None:
    call = {"calls": [{"name": "mcp_bad_count", "arguments": {}}]}
    steps = json.dumps([call, "one", call, "two"])
    model = ModelConfig(name="m", base_url=server.base_url)
    async with AIAgent(model, toolsets=["none"], mcp=bad()) as agent:
        await agent.run(f"Do it.\nSCRIPT: {steps}")
        result = await agent.run("Again.")
    tools = [m["content"] for m in result["messages"] if m["role"] == "tool"]
    assert [text.splitlines()[0] for text in tools] == ["1", "2"]
    async with AIAgent(model, mcp={"bad": {"command": "/no/program"}}) as agent:
        with pytest.raises(UserError, match=r"'mcp\.bad'.*No such file"):
            await agent.run("Hello")


def test_checkpoints_and_programs_in_the_sandbox_exclude_each_other(
    tmp_path: Path, server: FakeServer
) -> None:
    run = {"checkpoint_turns": 2}
    with pytest.raises(UserError, match=r"'mcp\.bad' runs in the sandbox"):
        config(tmp_path, server, bad(), run=run)
    assert config(tmp_path, server, bad(where="host"), run=run).run.checkpoint_turns == 2
