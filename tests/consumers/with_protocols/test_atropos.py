"""The tests of atroposlib of its trajectory API and of packing, unmodified, against hermes_rl."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
API = ("test_api_legacy", "test_api_messages_handling", "test_api_compression")
PACKING = ("heterogeneous_batching", "heterogeneous_packing", "min_batch_allocation")


def run_their_tests(producer: str, folder: Path, *modules: str) -> int:
    """Run test modules of atroposlib; return how many passed, which must be all."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "atropos_swap", "--pyargs", *modules]
    packing = HERE.parents[1] / "hermes_rl" / "rl" / "atropos" / "packing.py"
    command_of = {"HERMES_RL": str(Path(producer).absolute().with_name("hermes-rl"))}
    env = {**os.environ, **command_of, "PACKING": str(packing), "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert not re.search(r"skipped|deselected", done.stdout)
    return int(found[1])


def test_their_tests_of_the_api_pass(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """They use port 8000, which must be free."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 8000))
    producer = request.config.getoption("--producer")
    modules = [f"atroposlib.tests.{name}" for name in API]
    assert run_their_tests(producer, tmp_path, *modules) == 36


def test_their_tests_of_packing_pass(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    producer = request.config.getoption("--producer")
    modules = [f"atroposlib.tests.test_utils.test_{name}" for name in PACKING]
    assert run_their_tests(producer, tmp_path, *modules) == 33
