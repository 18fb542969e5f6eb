"""A run on a Ray cluster of three machines (network namespaces), two of which are lost."""

import json
import subprocess
import sys
from pathlib import Path

import kit
import pytest

HERE = Path(__file__).parent
NAMESPACES = ("unshare", "-Urmnpu", "--fork", "--kill-child", "--mount-proc")
TASKS = 120


@pytest.mark.slow
def test_a_node_is_cut_off_and_another_loses_its_raylet(tmp_path: Path) -> None:
    kit.write_rows(tmp_path / "tasks.jsonl", [kit.make_task(n, turns=3) for n in range(TASKS)])
    program = (sys.executable, str(HERE / "cluster_nodes.py"), str(tmp_path))
    ended = subprocess.run((*NAMESPACES, *program), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-6000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    output = found["output"]
    assert found["exit_code"] == 0, output
    assert found["hosts"] == ["node1", "node2"], "the head has no CPUs, and other nodes are there"
    assert found["workers"] >= 4, "each lost worker was replaced"
    report = json.loads(output.splitlines()[-1])
    assert (report["done"], report["given_up"], report["solved"]) == (TASKS, 0, TASKS * 4 // 5)
    run = tmp_path / "run"
    rows = kit.read_table(run, "trajectories")
    assert sorted(row["task_id"] for row in rows) == sorted(f"task-{n}" for n in range(TASKS))
    failures = kit.read_table(run, "failures")
    assert {row["cause"] for row in failures} == {"worker_lost"}
    recorded = [call for row in (*rows, *failures) for call in row["calls"]]
    assert len(recorded) == found["requests"], "each paid request is in one row"
