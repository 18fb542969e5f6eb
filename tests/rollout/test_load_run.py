"""A run by one command, read back by `load_run`."""

import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data" / "3.jsonl"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("life") / "run"
    hermes = [sys.executable, "-c", "import sys; from hermes_rl.cli import main; sys.exit(main())"]
    texts = ["run", str(DATA), "--model", "oracle", "--workers", "0", "--sandbox", "none"]
    done = subprocess.run(
        [*hermes, *texts, "--allow-unsandboxed", "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "3/3 units done, 2 solved" in done.stdout
    return out


def test_load_run_reads_a_finished_run(run: Path) -> None:
    import hermes_rl

    frame = hermes_rl.load_run(run).trajectories
    assert sorted(m["level"] for m in frame.metadata) == [1, 2, 3]
    assert frame.seed.nunique() == 3
