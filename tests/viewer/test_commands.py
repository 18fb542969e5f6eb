"""`hermes-rl diff` and `hermes-rl replay`, as typed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import forks
import pytest

UNSANDBOXED = "--allow-unsandboxed"


def run_cli(*arguments: str | Path, cwd: Path) -> tuple[int, str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    code, out, errors = forks.call([*map(str, arguments)], cwd, environment)
    assert "Traceback" not in errors, errors
    return code, out, errors


def test_diff_names_settings_and_tasks_with_other_results(runs: Path) -> None:
    code, out, _ = run_cli("diff", "small-model", "large-model", cwd=runs)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["agent.limits.max_turns", "4", "2"] in lines
    assert ["model.name", "small-model", "large-model"] in lines
    assert ["units", "done", "36", "36"] in lines
    assert "prompt of the first common task" not in out
    assert "\nlarge-model less small-model: " in out
    assert " over 9 common tasks: " in out
    code, out, _ = run_cli("diff", "small-model", "rl/exact", "--json", cwd=runs)
    found = json.loads(out)
    assert (code, found["tasks"]["common"], len(found["tasks"]["only_a"])) == (0, 0, 10)
    (why,) = found["comparisons"]
    assert why.startswith("not compared: small-model and exact have no graded task in common")


def test_diff_of_a_run_with_itself_finds_only_what_is_not_finished(
    runs: Path, tmp_path: Path
) -> None:
    killed = shutil.copytree(runs / "hostile", tmp_path / "hostile")
    (killed / "stats.json").unlink()  # as of a run whose first start was killed
    _, out, _ = run_cli("diff", "hostile", killed, cwd=runs)
    assert "settings and versions are equal" in out
    assert out.count("how many units are still open is unknown") == 1
    assert "0 of 2 common tasks have another reward" in out


def test_diff_of_no_run_is_one_line(runs: Path) -> None:
    code, _, err = run_cli("diff", "small-model", "notes", cwd=runs)
    assert (code, err.count("\n")) == (2, 1)
    assert "notes is not a run directory" in err


@pytest.mark.parametrize("run", ["small-model", "rl/exact"])
def test_replay_runs_the_recorded_calls_and_the_verifier_again(runs: Path, run: str) -> None:
    unit = "sort-1#2" if run == "small-model" else "exact-0#1"
    code, out, _ = run_cli("replay", run, unit, UNSANDBOXED, "--json", cwd=runs)
    found: dict[str, Any] = json.loads(out)
    assert (code, found["same"]) == (0, True)
    assert [step["op"] for step in found["steps"]] == ["equal"]
    recorded, replayed = found["heads"]
    assert (replayed["model"], recorded["reward"]) == ("oracle", replayed["reward"])
    assert replayed["rewards"][0]["detail"] == recorded["rewards"][0]["detail"]
    code, out, _ = run_cli("replay", run, unit, UNSANDBOXED, cwd=runs)
    assert "messages are equal" in out


def test_replay_says_where_it_departs(tmp_path: Path) -> None:
    steps = ["cat /proc/sys/kernel/random/uuid", "echo the same"]
    oracle = [{"calls": [{"name": "terminal", "arguments": {"command": one}}]} for one in steps]
    rows = [{"id": "uuid", "prompt": "x", "oracle": json.dumps(oracle), "verify": "true"}]
    dataset = tmp_path / "t.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_cli("run", "t.jsonl", "--model", "oracle", "--workers", "0", cwd=tmp_path)[0] == 0
    code, out, _ = run_cli("replay", "runs/t-oracle", "uuid", cwd=tmp_path)
    assert code == 1
    assert "(tool, turn 1); different messages: 1" in out
    assert out.count("\n  - ") == out.count("\n  + ") == 1
    dataset.write_text(json.dumps({**rows[0], "prompt": "y"}) + "\n")
    code, _, err = run_cli("replay", "runs/t-oracle", "uuid", cwd=tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "no longer has task 'uuid' with the same content" in err


def test_what_cannot_be_replayed_is_refused_in_one_line(runs: Path) -> None:
    code, _, err = run_cli("replay", "small-model", "sort-1#2", cwd=runs)
    assert (code, "Add --allow-unsandboxed" in err) == (2, True)
    code, _, err = run_cli("replay", "small-model", "refused#0", UNSANDBOXED, cwd=runs)
    assert (code, "answered nothing" in err) == (2, True)
    code, _, err = run_cli("replay", "small-model", "nothing#0", cwd=runs)
    assert (code, "nothing begins with" in err) == (2, True)
