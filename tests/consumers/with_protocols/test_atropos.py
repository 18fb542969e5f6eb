"""The tests of atroposlib of its trajectory API and of packing, unmodified, against hermes_rl; and
`env serve` against the server of atroposlib."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from conftest import live_engine

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


def test_groups_that_fork_reach_the_original_server(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Under Qwen 3's template half of the rollouts fork: all of their tokens arrive, rescaled."""
    producer = request.config.getoption("--producer")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port"]

    def send(path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        form = Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urlopen(form, timeout=60) as reply:
            return json.load(reply)

    with live_engine(producer, tmp_path) as url, subprocess.Popen([*server, str(port)]) as api:
        until, up = time.monotonic() + 120, None
        while up is None and time.monotonic() < until:
            with suppress(OSError):
                up = send("/")
        texts = dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), "x")
        numbers = {"max_token_len": -1, "save_checkpoint_interval": 0, "starting_step": 0}
        send("/register", {**texts, **numbers, "batch_size": 4, "num_steps": 1000})
        send("/batch")
        command = [
            str(Path(producer).absolute().with_name("hermes-rl")), "env", "serve",
            f"{HERE / 'talk.py'}:Talk", "--api", f"http://127.0.0.1:{port}", "--model", "toy",
            "--base-url", url, "--set", f"endpoint.tokenizer={tmp_path / 'model'}", "--repeats",
            "4", "--limit", "10", "--max-batches-ahead", "0", "--forks", "rescale", "--sandbox",
            "none", "--allow-unsandboxed", "--out", str(tmp_path / "run"), "--json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        groups: list[dict[str, Any]] = []
        while batch := send("/batch")["batch"]:
            groups += batch
        api.terminate()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["sent"], report["not_sent"]) == (10, 0)
    assert {len(group["tokens"]) for group in groups} == {4}
    trained = [[i for i in mask if i != -100] for group in groups for mask in group["masks"]]
    assert sum(map(bool, trained)) == 60, "two of four rollouts have a second sequence"
    assert sum(map(len, trained)) == report["tokens"]
