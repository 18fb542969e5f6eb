"""Runs whose agents start sub-agents: killed and resumed, checked, shown and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.cli import main
from hermes_rl.testing import FakeServer

BUBBLEWRAP = ("--workers", "0", "--sandbox", "bubblewrap", "--toolsets", "terminal,delegation")


def task(number: int, latency_s: float = 0.3) -> dict[str, Any]:
    """Two sub-agents write files, and the parent adds them up."""

    def child(value: int) -> dict[str, str]:
        steps = [{"run": f"echo {value} > {value}.txt", "latency_s": latency_s}, f"wrote {value}"]
        return {"goal": f"Write.\nSCRIPT: {json.dumps(steps)}"}

    tasks = [child(number), child(number + 10)]
    call = {"name": "delegate_task", "arguments": {"tasks": tasks}}
    steps = [{"calls": [call]}, {"run": "cat *.txt | paste -sd+ | bc > sum || true"}, "done"]
    return {
        "id": f"t{number}",
        "prompt": f"Add.\nSCRIPT: {json.dumps(steps)}",
        "verify": f"test -f $WORKSPACE/{number}.txt && test -f $WORKSPACE/{number + 10}.txt",
    }


def check_rows(out: Path, units: int) -> None:
    """Each trajectory has its two sub-agents, whose calls are in its own row too."""
    rows = kit.final_rows(out)
    children = kit.read_table(out, "subagents")
    assert len(rows) == units
    for row in rows.values():
        assert (row["reward"], row["turns"], row["end_reason"]) == (1.0, 3, "answered")
        mine = [c for c in children if c["root_trajectory_id"] == row["trajectory_id"]]
        assert sorted(c["final_response"] for c in mine) == sorted(
            f"wrote {n}" for n in (int(row["task_id"][1:]), int(row["task_id"][1:]) + 10)
        )
        assert {c["parent_trajectory_id"] for c in mine} == {row["trajectory_id"]}
        ids = [call["call_id"] for child in mine for call in child["calls"]]
        by_agent = [c["call_id"] for c in row["calls"] if c["agent"] != "main"]
        assert sorted(ids) == sorted(by_agent)
        assert len(row["calls"]) == 3 + 4


@pytest.mark.slow
async def test_a_run_killed_while_sub_agents_work_is_finished_exactly_once(
    tmp_path: Path, server: FakeServer
) -> None:
    rows, out = [task(n) for n in range(3)], tmp_path / "run"
    command = kit.run_arguments(tmp_path, rows, server, *BUBBLEWRAP)
    run = await kit.start_run(*command)
    await kit.wait_for_requests(server, 3 + 4, run)  # each has started its sub-agents
    kit.kill(run.pid)
    await run.wait()
    await kit.finish_run(*command)
    kit.check_usage(out, server.entries)
    check_rows(out, 3)
    lost = kit.read_table(out, "failures")
    assert {row["cause"] for row in lost} == {"driver_lost"}
    assert sum(c["agent"] != "main" for row in lost for c in row["calls"]) >= 4
    partly = [c for c in kit.read_table(out, "subagents") if c["status"] == "failed"]
    assert {c["root_trajectory_id"] for c in partly} <= {row["trajectory_id"] for row in lost}
    assert {c["cause"] for c in partly} == {"driver_lost"}


@pytest.mark.slow
async def test_check_show_and_export_take_a_run_with_sub_agents(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = kit.run_arguments(tmp_path, [task(1, 0.0)], server, *BUBBLEWRAP)
    await kit.finish_run(*command)
    check_rows(out, 1)
    (row,) = kit.final_rows(out).values()
    assert main(["check", str(out)]) == 0
    assert main(["show", str(out), row["unit_id"][:8]]) == 0
    shown = capsys.readouterr().out
    assert "delegate_task" in shown
    lines = [line.split() for line in shown.splitlines() if line.startswith("sub-agent")]
    assert [line[2:] for line in lines] == [
        ["answered", "after", "2", "turns:", "wrote", str(n)] for n in (1, 11)
    ]
    assert main(["show", str(out), lines[0][1]]) == 0
    assert "1.txt" in capsys.readouterr().out
    for name in ("trl", "sharegpt", "atif"):
        target = tmp_path / f"{name}.out"
        assert main(["export", str(out), "--to", name, "--out", str(target)]) == 0, name


async def test_tokens_of_sub_agents_count_against_the_budget_of_a_unit(
    tmp_path: Path, server: FakeServer
) -> None:
    """The parent's two answers fit the budget, those of its sub-agents do not."""
    steps = [{"text": "x" * 40_000}]
    goal = {"goal": f"Talk.\nSCRIPT: {json.dumps(steps)}"}
    call = {"name": "delegate_task", "arguments": {"tasks": [goal] * 6}}
    script = json.dumps([{"calls": [call]}, "done"])
    done = []
    for limit in (45_000, 2_000_000):
        (tmp_path / str(limit)).mkdir()
        config = kit.make_config(
            tmp_path / str(limit),
            [{"id": "talk", "prompt": f"Go.\nSCRIPT: {script}"}],
            model={"name": "fake", "max_tokens": 10_500},
            endpoint={"base_url": server.base_url},
            agent={"toolsets": ["terminal", "delegation"]},
            run={"unit_budget_tokens": limit, "max_attempts": 1},
        )
        done.append((await kit.run_config(config)).done)
    assert done == [0, 1]
    (row,) = kit.read_table(tmp_path / "45000" / "run", "failures")
    assert row["cause"] == "unit_budget"


async def test_sub_agents_in_copies_see_the_files_of_the_task_and_change_none(
    tmp_path: Path, server: FakeServer
) -> None:
    steps = [{"run": "cat given; pwd; echo mine > given; ls /tmp"}, "done"]
    goal = {"goal": f"Read.\nSCRIPT: {json.dumps(steps)}"}
    call = {"name": "delegate_task", "arguments": {"tasks": [goal, goal]}}
    script = [{"run": "mkdir sub; cd sub; echo new > given; touch /tmp/also"}, {"calls": [call]}]
    prompt = f"Go.\nSCRIPT: {json.dumps(script)}"
    config = kit.make_config(
        tmp_path,
        [{"id": "t", "prompt": prompt, "verify": 'test "$(cat $WORKSPACE/sub/given)" = new'}],
        endpoint={"base_url": server.base_url},
        agent={"toolsets": ["terminal", "delegation"], "switches": {"child_sandbox": True}},
        sandbox={"backend": "bubblewrap"},
    )
    await kit.run_config(config)
    (row,) = kit.final_rows(tmp_path / "run").values()
    children = kit.read_table(tmp_path / "run", "subagents")
    read = [json.loads(json.loads(child["messages"][3])["content"]) for child in children]
    assert [r["output"].split() for r in read] == [["new", "/workspace/sub", "also"]] * 2
    assert row["reward"] == 1.0
    assert all(child["timing"]["sandbox_s"] > 0 for child in children)
    assert main(["check", str(tmp_path / "run")]) == 0
