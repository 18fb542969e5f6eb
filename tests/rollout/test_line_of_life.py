"""From a dataset to Parquet with one command, read by everyone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data" / "3.jsonl"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("life") / "run"
    hermes = [sys.executable, "-c", "import sys; from hermes_rl.cli import main; sys.exit(main())"]
    words = ["run", str(DATA), "--model", "oracle", "--workers", "0", "--sandbox", "none"]
    done = subprocess.run(
        [*hermes, *words, "--allow-unsandboxed", "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "3/3 units done, 2 solved" in done.stdout
    return out


def expected(rows: list[tuple[str, float | None, list[str]]]) -> None:
    rows = sorted(rows)
    assert [(task, reward) for task, reward, _ in rows] == [
        ("count", 1.0),
        ("ungraded", None),
        ("write", 1.0),
    ]
    for _, _, messages in rows:
        forms = [m if isinstance(m, dict) else json.loads(m) for m in messages]
        assert [f["role"] for f in forms] == ["system", "user", "assistant", "tool", "assistant"]
        arguments = forms[2]["tool_calls"][0]["function"]["arguments"]
        assert set(arguments) == {"command"}
        assert all(v is not None for f in forms for v in f.values())


def test_pyarrow(run: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(run / "trajectories")
    expected([(r["task_id"], r["reward"], r["messages"]) for r in table.to_pylist()])


def test_pandas(run: Path) -> None:
    import pandas as pd

    frame = pd.read_parquet(run / "trajectories")
    rows = zip(frame.task_id, frame.reward, frame.messages, strict=True)
    expected([(t, None if pd.isna(r) else r, list(m)) for t, r, m in rows])


def test_polars(run: Path) -> None:
    import polars as pl

    frame = pl.read_parquet(str(run / "trajectories" / "*.parquet"))
    expected([(r["task_id"], r["reward"], r["messages"]) for r in frame.to_dicts()])


def test_duckdb(run: Path) -> None:
    import duckdb

    found = duckdb.sql(f"select task_id, reward, messages from '{run}/trajectories/*.parquet'")
    expected([(t, r, list(m)) for t, r, m in found.fetchall()])


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(run: Path, streaming: bool, tmp_path: Path) -> None:
    import datasets

    data = datasets.load_dataset(
        "parquet",
        data_files=f"{run}/trajectories/*.parquet",
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path),
    )
    expected([(r["task_id"], r["reward"], r["messages"]) for r in data])


def test_load_run(run: Path) -> None:
    import hermes_rl

    frame = hermes_rl.load_run(run).trajectories
    assert sorted(m["level"] for m in frame.metadata) == [1, 2, 3]
    assert frame.seed.nunique() == 3
