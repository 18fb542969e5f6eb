"""Runs on a Ray cluster of machines (network and mount namespaces) that are cut off or lost."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import kit
import pytest
from cluster_nodes import APART

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NAMESPACES = ("unshare", "-Urmnpu", "--fork", "--kill-child", "--mount-proc")
TASKS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def played(folder: Path) -> dict[str, Any]:
    """What `cluster_nodes.py` found: both runs on one cluster."""
    kit.write_rows(folder / "tasks.jsonl", [kit.make_task(n, turns=3) for n in range(TASKS)])
    program = (sys.executable, str(HERE / "cluster_nodes.py"), str(folder))
    ended = subprocess.run((*NAMESPACES, *program), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-6000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def check_all_units_are_done(out: Path, report: dict[str, Any], units: int = TASKS) -> None:
    assert (report["done"], report["given_up"], report["solved"]) == (units, 0, units * 4 // 5)
    rows = kit.read_table(out, "trajectories")
    assert sorted(row["task_id"] for row in rows) == sorted(f"task-{n}" for n in range(units))


def test_a_node_is_cut_off_and_comes_back(folder: Path, played: dict[str, Any]) -> None:
    found = played["shared"]
    output = found["output"]
    assert found["exit_code"] == 0, output
    assert found["hosts"] == ["node1", "node2"], "the head has no CPUs, and other nodes are there"
    assert found["workers"] >= 3, "the lost worker was replaced"
    assert "travel through" not in output, "all nodes see the run directory"
    run = folder / "run"
    check_all_units_are_done(run, json.loads(output.splitlines()[-1]))
    rows, failures = kit.read_table(run, "trajectories"), kit.read_table(run, "failures")
    assert {row["cause"] for row in failures} == {"worker_lost"}
    every = Counter(call["call_id"] for row in (*rows, *failures) for call in row["calls"])
    assert max(every.values()) == 1, "a call is in one row"
    assert every.keys() >= {*found["requests"]}, "each paid request is in a row"


def test_a_run_at_a_url_on_nodes_that_share_no_files_loses_its_driver_and_a_node(
    folder: Path, played: dict[str, Any]
) -> None:
    found = played["apart"]
    output = found["output"]
    assert (found["exit_code"], found["check"]) == (0, 0), output
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    notes = [event["text"] for event in events if event["event"] == "note"]
    travel = [text.split()[3] for text in notes if "travel through" in text]
    assert {*travel} == {"node1", "node2"}
    assert len(travel) == 4, "one line for each node, in each of two starts"
    (copy,) = (folder / "cache").glob("**/work/run/trajectories")
    check_all_units_are_done(copy.parent, next(e for e in events if e["event"] == "report"), APART)
    done = [e for e in events if e["event"] == "attempt" and e["status"] == "ok"]
    kit.check_no_unit_ran_again(copy.parent, {e["unit_id"]: e["attempt"] for e in done})
    failures = kit.read_table(copy.parent, "failures")
    assert {row["cause"] for row in failures} == {"driver_lost", "worker_lost"}
    every = [*kit.read_table(copy.parent, "trajectories"), *failures]
    calls = Counter(call["call_id"] for row in every for call in row["calls"])
    assert max(calls.values()) == 1, "a call is in one row"
    uploaded = {name for name in found["objects"] if name.startswith("trajectories/")}
    assert uploaded == {f"trajectories/{part.name}" for part in copy.iterdir()}
