"""Images of task folders are built from Dockerfiles by the real buildah, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from image_kit import HARBOR, archive, harbor_task

from hermes_rl.cli import main
from hermes_rl.sandboxes import ImageStore
from hermes_rl.store import load_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("buildah") is None, reason="needs the program buildah"),
]

SLEEP = f"sleep 61.{os.getpid()}"

TASKS = {
    "run": (
        "FROM base\nENV MODE=fast\nRUN mkdir /data && seq 10 >/data/n\nWORKDIR /data\n",
        {},
        '[ "$MODE" = fast ] && [ "$(wc -l <n)" = 11 ]',
        "[ $MODE = fast ] && echo 11 >>n",
    ),
    "copy": (
        "FROM base\nCOPY src /workspace\nRUN rm /workspace/old\nWORKDIR /workspace\n",
        {"environment/src/a/b": "1\n", "environment/src/old": "x"},
        "[ ! -e old ] && grep -qx 2 a/b",
        "echo 2 >>a/b",
    ),
    "git-folder": (
        "FROM base\nCOPY dot_git /repo/.git\nWORKDIR /repo\n",
        {"environment/dot_git/HEAD": "ref: refs/heads/main\n"},
        "grep -q dev .git/HEAD",
        "sed -i s/main/dev/ .git/HEAD",
    ),
    "user": (
        "FROM base\nRUN echo 'app:x:1000:1000::/home/app:/bin/bash' >>/etc/passwd && "
        "mkdir -p /home/app\nUSER app\nWORKDIR /home/app\n",
        {},
        "[ -s who ]",
        "[ $(id -u) = 1000 ] && id -u >who",
    ),
    "links": (
        "FROM base\nRUN mkdir /a && echo 1 >/a/x && ln /a/x /a/y && ln -s x /a/z\nWORKDIR /a\n",
        {},
        "[ $(cat x) = 2 ] && [ $(cat z) = 2 ]",
        "echo 2 >x",
    ),
}


def make_tasks(folder: Path) -> Path:
    for name, (dockerfile, files, test, solution) in TASKS.items():
        more = {
            "environment/Dockerfile": dockerfile,
            "tests/test.sh": f"#!/bin/bash\n{test}\n",
            "solution/solve.sh": solution,
        }
        harbor_task(folder / name, {**files, **more})
    return folder


def test_tasks_are_built_once_and_played(
    store: ImageStore, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = make_tasks(tmp_path / "tasks")
    shutil.copytree(dataset / "run", dataset / "run-again")
    build = ["images", "build", str(dataset)]
    assert main([*build, "--image-alias", f"base={base}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("5 images, 0 of them are stored already\n")
    assert printed.endswith("images: 5 of 5 built\n")
    assert main(build) == 0
    assert capsys.readouterr().out == "5 images, 5 of them are stored already\n"
    layers = {layer for one in store.named() for layer in one.image.layers}
    assert len(store.named()) == 5
    assert len(layers) < 10, "they share the base image"
    for model, reward in (("oracle", 1.0), ("noop", 0.0)):
        out = tmp_path / model
        assert (
            main(["run", str(dataset), "--model", model, "--workers", "0", "--out", str(out)]) == 0
        )
        rows = load_run(out).trajectories
        assert dict(zip(rows["task_id"], rows["reward"], strict=True)) == {
            name: reward for name in (*TASKS, "run-again")
        }


def test_a_failed_build_keeps_its_log_and_other_images_are_built(
    store: ImageStore, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harbor_task(tmp_path / "tasks/good", {"environment/Dockerfile": "FROM base\n"})
    bad = "FROM base\nRUN echo the reason; false\n"
    harbor_task(tmp_path / "tasks/bad", {"environment/Dockerfile": bad})
    slow = {"environment/Dockerfile": f"FROM base\nRUN {SLEEP}\n"}
    harbor_task(
        tmp_path / "tasks/slow", slow, toml=HARBOR + "[environment]\nbuild_timeout_sec = 2\n"
    )
    command = ["images", "build", str(tmp_path / "tasks"), "--image-alias", f"base={base}"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.out.endswith("images: 1 of 3 built, 2 failed\n"), printed.err
    assert "slow: cannot build task:" in printed.err
    assert "it took over 2 s" in printed.err
    lines = [line for line in printed.err.splitlines() if line.startswith("error: bad: ")]
    log = Path(lines[0].rpartition("Log: ")[2])
    assert "the reason" in log.read_text()
    assert [Path(one.image.source).name for one in store.named()] == ["oci"]
    deadline = time.monotonic() + 240
    while SLEEP in running_commands():
        assert time.monotonic() < deadline, "a build that takes too long is killed"
        time.sleep(0.05)


def running_commands() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_an_alias_may_be_a_layout(store: ImageStore, base: Path, tmp_path: Path) -> None:
    context = harbor_task(tmp_path / "one", {}) / "environment"
    store.alias("base", base)
    store.build(context, "task:one")
    folder = tmp_path / "base-again"
    folder.mkdir()
    shutil.copytree(_layout_of(store, tmp_path), folder, dirs_exist_ok=True)
    for name, source in (("again", folder), ("packed", archive(folder, tmp_path / "oci.tar"))):
        store.alias(name, source)
        (context / "Dockerfile").write_text(f"FROM {name}\n")
        store.build(context, f"task:{name}")
        built = store.find(f"task:{name}")
        assert built is not None
        assert built.layers[0] == store.add(source, "x").layers[0]


def _layout_of(store: ImageStore, tmp_path: Path) -> Path:
    """Export the aliased image as a layout with all layers."""
    target = tmp_path / "whole"
    tags = store._buildah(["images", "--quiet"], "x").split()
    store._buildah(["push", "--quiet", tags[0], f"oci:{target}:latest"], "x")
    return target
