"""Tasks of datasets are exported as task folders, built by the real buildah, and run."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

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

TERMINAL = Path(__file__).parents[2] / "datasets" / "terminal_tasks.jsonl"
SUBJECTS = ("csv", "logs", "text", "perm", "json", "find", "sed", "awk", "archive")
"""Bundled tasks that need neither a compiler, nor git, nor a process of their setup."""
METADATA = {
    "level": 3,
    "share": 0.5,
    "good": True,
    "tags": ["a", 'b"c'],
    "odd key": "line\nnext\ttab \x7f \\ ü 🙂",
    "deep": {"a": [1, None]},
}
CHECK = "grep -qx hello /workspace/sub/out && cmp /verify/data.bin /workspace/data.bin"


def export(rows: list[dict[str, Any]], folder: Path, *more: str) -> Path:
    dataset = folder / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "tasks"
    assert main(["export", str(dataset), "--to", "harbor-tasks", "--out", str(out), *more]) == 0
    return out


def test_the_files_of_exported_task_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"wall_seconds": 60, "cpus": 0.5, "memory_bytes": 256 << 20}
    good = {"id": "a b/c", "prompt": "Do it.", "verify": "true", **METADATA, "limits": limits}
    rows = [
        good,
        {**good, "prompt": "Again."},
        {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 2},
        {"id": "no-verify", "prompt": "x"},
        {"id": "image", "prompt": "x", "verify": {"script": "true", "image": "other"}},
        {"id": "bad", "prompt": ""},
    ]
    out = export(rows, tmp_path)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}: 2 tasks, 4 left out\n")
    assert sorted(path.name for path in out.iterdir()) == ["a-b-c", "a-b-c-1"]
    for number, why in ((3, "user"), (4, "no 'verify'"), (5, "verify.image"), (6, "prompt")):
        line = next(line for line in printed.splitlines() if f"rows.jsonl:{number}: " in line)
        assert why in line
    settings = tomllib.loads((out / "a-b-c" / "task.toml").read_text())
    assert settings["agent"] == {"timeout_sec": 60.0}
    assert settings["environment"] == {"workdir": "/workspace", "cpus": 0.5, "memory_mb": 256}
    kept = {k: v for k, v in METADATA.items() if k != "deep"}
    assert settings["metadata"] == {**kept, "deep": '{"a": [1, null]}', "id": "a b/c"}
    again = ["export", str(tmp_path / "rows.jsonl"), "--to", "harbor-tasks", "--out", str(out)]
    assert main(again) == 2
    assert "not an empty folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def machine(shared: Path) -> Path:
    """A base image with this machine's programs."""
    return root_file_system(shared / "machine")


def run_tasks(tasks: Path, base: Path, model: str, out: Path) -> dict[str, float]:
    """Rewards by task."""
    aliases = f'sandbox.build.aliases={{"ubuntu:24.04": {base}}}'
    main(
        ["run", str(tasks), "--model", model, "--workers", "0", "--out", str(out), "--set", aliases]
    )
    rows = load_run(out).trajectories
    return dict(zip(rows["task_id"], rows["reward"], strict=True))


def test_exported_tasks_are_built_and_played(
    store: ImageStore, machine: Path, tmp_path: Path
) -> None:
    """Rewards by exit code and by report, with files, setup and cwd, equal those of the dataset."""
    files = {"data.bin": {"base64": "AAEC/w=="}, "ü/x": "y"}
    verify = {"script": CHECK, "files": {"data.bin": {"base64": "AAEC/w=="}}}
    made = "[ -f $WORKSPACE/made ]"
    score = f"{made} && n=0.75 || n=0.25\necho reward=$n >&3"
    parts = f"{made} && n=1 || n=0\necho 'rewards={{\"a\": '$n', \"b\": 0}}' >&3"
    killed = "echo reward=1 >&3; kill -9 $$"
    rows: list[dict[str, Any]] = [
        {"id": "code", "verify": verify, "setup": "mkdir sub", "files": files},
        {"id": "cwd", "cwd": "deep/er", "verify": '[ -f "$WORKSPACE/deep/er/made" ]'},
        {"id": "score", "verify": {"script": score, "score": True}},
        {"id": "parts", "verify": {"script": parts, "score": True}},
        {"id": "killed", "verify": {"script": killed, "score": True}},
    ]
    oracles = {"code": "echo hello >sub/out"}
    for row in rows:
        row |= {"prompt": "Do it.", "oracle": oracles.get(str(row["id"]), "touch made")}
    tasks = export(rows, tmp_path)
    solved = {"code": 1.0, "cwd": 1.0, "score": 0.75, "parts": 0.5, "killed": 0.0}
    assert run_tasks(tasks, machine, "oracle", tmp_path / "oracle") == solved
    idle = {"code": 0.0, "cwd": 0.0, "score": 0.25, "parts": 0.0, "killed": 0.0}
    assert run_tasks(tasks, machine, "noop", tmp_path / "noop") == idle


def test_exported_bundled_tasks_have_the_same_rewards(
    store: ImageStore, machine: Path, tmp_path: Path
) -> None:
    """Oracles get 1 and no-ops 0. The images share their base."""
    rows = [json.loads(line) for line in TERMINAL.read_text().splitlines()]
    by_subject = {next((s for s in SUBJECTS if row["id"].startswith(s)), ""): row for row in rows}
    chosen = [by_subject[subject] for subject in SUBJECTS]
    tasks = export(chosen, tmp_path)
    solved = run_tasks(tasks, machine, "oracle", tmp_path / "oracle")
    assert {name: reward for name, reward in solved.items() if reward != 1.0} == {}
    assert len(solved) == len(chosen)
    idle = run_tasks(tasks, machine, "noop", tmp_path / "noop")
    assert set(idle.values()) == {0.0}
    layers = {layer for one in store.named() for layer in one.image.layers}
    assert len(layers) < 3 * len(chosen), "the base is stored once"
