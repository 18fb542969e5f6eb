"""The shipped environments from the command line, with their own configurations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from cli_runner import clean_environment, run_cli

SHIPPED = Path(__file__).parents[2] / "environments"
NAMES = sorted(path.parent.name for path in SHIPPED.glob("*/config.yaml"))
ORACLE = ("--model", "oracle", "--workers", "0", "--limit", "1")


def config_of(name: str) -> str:
    return str(SHIPPED / name / "config.yaml")


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for part in out.glob("trajectories/*") for row in pq.read_table(part).to_pylist()]


def test_every_shipped_environment_has_a_configuration() -> None:
    assert NAMES == ["dialogue_booking", "gsm8k_python", "swe_bugs", "terminal_tasks"]


@pytest.mark.parametrize(("mode", "rollouts"), [("process", 8), ("evaluate", 1)])
@pytest.mark.parametrize("name", NAMES)
def test_shipped_configurations_pass_a_dry_run(
    name: str, mode: str, rollouts: int, tmp_path: Path
) -> None:
    """`process` plans groups of eight, `evaluate` one rollout of each task."""
    result = run_cli(
        *("env", mode, name, "--config", config_of(name), "--model", "m"),
        *("--base-url", "http://127.0.0.1:9/v1", "--dry-run", "--json"),
        cwd=tmp_path,
    )
    assert (result.code, result.err) == (0, "")
    plan = result.json()
    assert plan["units"] == rollouts * plan["rows"] > 0
    assert plan["bad_rows"] == 0
    assert not list(tmp_path.iterdir())


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "dialogue_booking",
        pytest.param("swe_bugs", marks=SLOW),
        pytest.param("terminal_tasks", marks=SLOW),
    ],
)
def test_environments_run_as_modules(name: str, tmp_path: Path) -> None:
    """`process` makes a group that its oracle solves, `evaluate` one rollout and its metrics."""
    arguments = ["--config", config_of(name), *ORACLE, "--json"]
    module = [sys.executable, "-m", f"environments.{name}", "process", "--repeats", "2"]
    done = subprocess.run(
        [*module, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    events = {e["event"]: e for e in map(json.loads, done.stdout.splitlines())}
    assert (events["report"]["done"], events["report"]["solved"]) == (2, 2)
    assert (events["groups"]["groups"], events["groups"]["sendable"]) == (1, 1)
    made = rows(tmp_path / "runs" / f"{name}-oracle")
    assert [(row["env_name"], row["split"], row["reward"]) for row in made] == [
        (name, "train", 1.0),
        (name, "train", 1.0),
    ]
    evaluated = run_cli("env", "evaluate", name, *arguments, cwd=tmp_path)
    assert evaluated.code == 0, evaluated.err
    out = tmp_path / "runs" / f"{name}-oracle-eval"
    (row,) = rows(out)
    assert (row["split"], row["reward"]) == ("eval", 1.0)
    metrics = json.loads((out / "metrics.json").read_bytes())["results"]
    assert metrics[f"atropos|{name}_eval|0"]["solved"] == 1.0
    (sample,) = map(json.loads, (out / "samples.jsonl").read_text().splitlines())
    assert (sample["task_id"], sample["correct"]) == (row["task_id"], True)
    assert row["task_hash"] not in {one["task_hash"] for one in made}
