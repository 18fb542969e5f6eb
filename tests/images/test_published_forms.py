"""The task folders below tests/data: built by the real buildah and played by oracles and no-ops."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sandboxes"))
from engines import root_file_system

from hermes_rl.cli import main
from hermes_rl.sandboxes import ImageStore
from hermes_rl.store import load_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("buildah") is None, reason="needs the program buildah"),
]

TASKS = Path(__file__).parents[1] / "data" / "harbor_tasks"
UNSUPPORTED = {
    "wrong-build": "could not be built",
    "wrong-gpu": "GPUs",
    "wrong-mcp-server": "MCP servers",
    "wrong-no-dockerfile": "environment/Dockerfile is missing",
    "wrong-no-test": "tests/test.sh is missing",
    "wrong-not-toml": "cannot be read",
    "wrong-secret-of-the-machine": "SECRET_TOKEN",
    "wrong-steps": "steps",
    "wrong-two-services": "2 services (main, db)",
}


@pytest.fixture(scope="module")
def machine(shared: Path) -> Path:
    """A base image with this machine's programs, git, dpkg and pip."""
    return root_file_system(shared / "machine", packaging=True)


def play(base: Path, model: str, out: Path) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Finished and failed attempts at all tasks."""
    aliases = f'sandbox.build.aliases={{"ubuntu:24.04": {base}}}'
    where = ["--workers", "0", "--out", str(out), "--set", aliases, "--max-attempts", "1"]
    main(["run", str(TASKS), "--model", model, *where])
    run = load_run(out)
    return run.trajectories, run.failures


def test_oracles_solve_every_published_form_and_noops_none(
    store: ImageStore, machine: Path, tmp_path: Path
) -> None:
    names = {folder.name for folder in TASKS.iterdir()}
    supported = names - UNSUPPORTED.keys()
    assert len(supported) >= 40
    solved, failed = play(machine, "oracle", tmp_path / "oracle")
    reasons = {  # a bad row has no id but its folder
        name if name in names else Path(error.split(": ")[1]).name: error
        for name, error in zip(failed["task_id"], failed["error"], strict=True)
    }
    rewards = dict(zip(solved["task_id"], solved["reward"], strict=True))
    assert {name: reward for name, reward in rewards.items() if reward != 1.0} == {}
    assert rewards.keys() == supported
    assert set(failed["cause"]) == {"task"}
    assert reasons.keys() == UNSUPPORTED.keys()
    for name, reason in UNSUPPORTED.items():
        assert reason in reasons[name]
    idle, _ = play(machine, "noop", tmp_path / "noop")
    assert dict(zip(idle["task_id"], idle["reward"], strict=True)) == dict.fromkeys(supported, 0.0)
