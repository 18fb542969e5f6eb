"""Fixtures: a finished run, and a fake model server in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path[:0] = [HERE, str(Path(__file__).parents[1] / "batch")]  # the latter for forks

from cli_runner import ORACLE, run_cli  # noqa: E402


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of `hermes-rl run smoke --model oracle`. Read-only."""
    folder = tmp_path_factory.mktemp("finished")
    result = run_cli("run", "smoke", *ORACLE, cwd=folder)
    assert result.code == 0, result.err
    return folder


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """The address of a fake model server; prompts carry its answers."""
    command = [sys.executable, "-m", "hermes_rl.testing.fake_server", "--until-eof"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    assert server.stdin
    yield json.loads(server.stdout.readline())["base_url"]
    server.stdin.close()
    server.wait(timeout=60)
    server.stdout.close()
