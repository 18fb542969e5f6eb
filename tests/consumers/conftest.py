"""A run made by the project's own environment, for the programs of other people to read.

They run in `.venv-consumers` (make test-consumers), where hermes_rl is not installed: nothing
of ours helps the readers.
"""

import os
import subprocess
from pathlib import Path

import pytest

# Read by huggingface_hub at import: no test here may ask a hub, and none may use a GPU.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

TASKS = Path(__file__).with_name("tasks.jsonl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--producer", help="the Python that has hermes_rl")
    parser.addoption("--run-dir", help="read this run directory instead of making one")


@pytest.fixture(scope="session")
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--run-dir")
    if given:
        return Path(given)
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("say --producer=.venv/bin/python (make test-consumers does) or --run-dir=RUN")
    out = tmp_path_factory.mktemp("produced") / "run"
    command = [str(Path(producer).parent / "hermes-rl"), "run", str(TASKS), "--model", "oracle"]
    command += ["--workers", "0", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def parquet(run_dir: Path) -> str:
    """The files as a user would name them."""
    return str(run_dir / "trajectories" / "*.parquet")


@pytest.fixture
def cache(tmp_path: Path) -> str:
    """A cache of its own for `datasets`, so that no earlier run answers for this one."""
    return str(tmp_path / "cache")
