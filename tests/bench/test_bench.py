"""The bench works: small numbers, no judgement of speed."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
ROWS = (
    "turn-none",
    "layers",
    "sandbox",
    "first",
    "resume",
    "driver-memory",
    "reward-lag",
    "session-search",
    "commands",
)


@pytest.mark.slow
def test_bench_rows_are_measured() -> None:
    done = subprocess.run(
        [sys.executable, RUN, "--tiny", "--json", "--only", *ROWS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["rows"]
    assert tuple(rows) == ROWS
    # A few trajectories say little about speed, but Python and bash cannot be free.
    assert rows["commands"]["data"]["import"][0] > rows["commands"]["data"]["python"][0] * 0.5 > 0
    assert rows["layers"]["data"]["off"] > 0
    data = rows["turn-none"]["data"]
    # The figure of a turn is a difference of two runs: of such small ones it may be anything.
    assert all(math.isfinite(v) for v in data["ours_ms"] + data["bare_ms"])
    assert data["whole_s"]
    assert all(v > rows["commands"]["data"]["python"][0] for v in data["whole_s"])


@pytest.mark.slow
def test_the_bench_of_the_viewer_works() -> None:
    command = [sys.executable, RUN.with_name("viewer.py"), "--rows", "1000", "--gigabytes", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count('"rows": 1000') == 2


def test_an_unknown_bench_row_is_reported_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, RUN, "--only", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "nothing" in done.stderr
