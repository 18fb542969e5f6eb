"""`hermes-rl demo`: a rehearsal with oracles, then a model."""

import asyncio
import os
import re
from pathlib import Path

import pytest
from cli_runner import CommandResult, run_process

from hermes_rl.store import load_run
from hermes_rl.testing import FakeServer


def demo(folder: Path, *arguments: str, **env: str) -> CommandResult:
    return run_process("demo", "--workers", "0", *arguments, cwd=folder, env=env, seconds=400)


def test_demo_without_weights_finishes_the_rehearsal_and_suggests_model_path(
    tmp_path: Path,
) -> None:
    nowhere = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }
    done = demo(tmp_path, **nowhere)
    assert done.code == 2, done.err
    assert "10/10 units done, 10 solved" in done.out
    assert done.err.strip().splitlines()[-1].startswith("error: no weights for the model")
    assert "--model-path" in done.err
    rehearsal = load_run(tmp_path / "runs" / "demo-rehearsal").trajectories
    assert len(rehearsal) == 10
    assert set(rehearsal.reward) == {1.0}


def test_demo_requires_the_api_key_variable_to_be_named(tmp_path: Path) -> None:
    done = demo(tmp_path, "--model", "gpt-5-mini", OPENAI_API_KEY="sk-not-named")
    assert done.code == 2
    assert "--api-key-env" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
async def test_demo_with_an_endpoint(tmp_path: Path) -> None:
    """`make demo MODEL=... BASE_URL=...` prints the rehearsal, a table and the next commands."""
    async with FakeServer() as server:
        arguments = ("--model", "echo-1", "--base-url", server.base_url)
        done = await asyncio.to_thread(demo, tmp_path, *arguments)
    assert done.code == 0, done.err
    result = done.out
    assert "1  rehearsal: each task's own solution, in a real sandbox, without a model" in result
    assert "runs/demo-rehearsal: 10/10 units done, 10 solved" in result
    assert "2  the same tasks twice with echo-1" in result
    rows = load_run(tmp_path / "runs" / "demo-echo-1").trajectories
    assert len(rows) == 20
    table = result.partition("unit      task")[2].splitlines()
    assert sum(line[:8] in {unit[:8] for unit in rows.unit_id} for line in table) == 20
    assert re.search(
        r"0 of 20 solved, 40 turns, [\d,]+ in, [\d,]+ out, cost unpriced \(40 c", result
    )
    assert "time by part, summed over rollouts: " in result
    assert "Parquet: runs/demo-echo-1/trajectories/*.parquet" in result
    commands = result.partition("next:\n")[2].splitlines()
    assert len(commands) == 3
    shown = re.match(r"  hermes-rl show runs/demo-echo-1 (\w{8})  ", commands[0])
    assert shown is not None
    assert shown[1] in {unit[:8] for unit in rows.unit_id}
    assert commands[2].endswith("run it again: nothing is paid twice")
    again = f"hermes-rl demo {' '.join(arguments)} --workers 0"
    assert commands[2].startswith(f"  rm -r runs/demo-echo-1; {again}  ")


@pytest.mark.slow
def test_embedded_model_runs_in_real_sandboxes(tmp_path: Path) -> None:
    """The smallest model solves nothing, but its usage is complete and a resume makes no call."""
    arguments = ["run", "smoke", "--limit", "2", "--model", "local-tiny", "--workers", "0"]
    arguments += [
        "--toolsets",
        "terminal",
        "--max-turns",
        "2",
        "--max-tokens",
        "24",
        "--out",
        "run",
    ]
    for _ in range(2):
        done = run_process(*arguments, cwd=tmp_path, seconds=400)
        assert done.code == 0, done.err
        run = load_run(tmp_path / "run")
        assert len(run.trajectories) == 2
        assert run.stats["calls"]["total"] <= 2 * 3
        for row in run.trajectories.to_dict("records"):
            assert row["usage"]["output_tokens"] > 0
            assert row["usage"]["unknown_calls"] == 0
            assert row["endpoint"] == "embedded:local-tiny"
            assert row["calls"][0]["finish_reason"] in ("tool_calls", "length", "stop")
    first = run.stats["calls"]["total"]
    assert first == sum(len(calls) for calls in run.trajectories.calls)
