"""Runs of task folders build missing images with the real buildah."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from image_kit import harbor_task

from batch_runner import regrade_run
from hermes_rl.cli import main
from hermes_rl.locks import file_lock
from hermes_rl.sandboxes import (
    BuildFailed,
    ImageBuilds,
    ImageStore,
    SifImages,
    image_taker,
    missing_images,
)
from hermes_rl.store import load_run
from hermes_rl.task_folders import build_contexts
from hermes_rl.testing import FakeServer, fake_apptainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("buildah") is None, reason="needs the program buildah"),
]

SOLVE = {"solution/solve.sh": "echo hello >hello.txt\n"}
SLEEP = f"sleep 613.{os.getpid()}"
MAIN = "import sys; from hermes_rl.cli import main; sys.exit(main(sys.argv[1:]))"
HERE = ("--workers", "0", "--sandbox", "bubblewrap")


def task(folder: Path, dockerfile: str, **more: str) -> Path:
    return harbor_task(folder, {"environment/Dockerfile": dockerfile, **SOLVE, **more})


def run(dataset: Path, out: Path, *more: str, model: str = "oracle") -> tuple[int, Any]:
    code = main(["run", str(dataset), "--model", model, "--out", str(out), *HERE, *more])
    return code, load_run(out)


def alias_option(base: Path) -> list[str]:
    return ["--set", f"sandbox.build.aliases={{base: {base}}}"]


def is_running(command: str) -> bool:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return command in listed


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_builds_each_missing_image_once(
    store: ImageStore, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "tasks"
    for number in range(2):
        task(dataset / f"shared-{number}", "FROM base\nRUN echo $RANDOM >/n\nWORKDIR /app\n")
    task(dataset / "other", "FROM base\nRUN echo other\nWORKDIR /app\n")
    more = ["--json", "--repeats", "2", *alias_option(base)]
    code, first = run(dataset, tmp_path / "first", *more)
    assert code == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = [event["images"] for event in events if event["event"] == "progress"]
    assert counts[-1] == {"wanted": 2, "built": 2, "failed": 0}
    assert set(first.trajectories["reward"]) == {1.0}
    assert len(first.trajectories) == 6
    images = {path.name: path.stat().st_mtime_ns for path in store.root.glob("names/*")}
    assert len(images) == 2
    task(dataset / "late", "FROM base\nRUN echo late\nWORKDIR /app\n")
    code, second = run(dataset, tmp_path / "first", *more)
    assert (code, len(second.trajectories)) == (0, 8)
    again = {path.name: path.stat().st_mtime_ns for path in store.root.glob("names/*")}
    assert len(again) == 3
    assert images.items() < again.items(), "existing images are not built again"


async def test_task_folders_are_evaluated_and_their_workspaces_graded_again(
    store: ImageStore, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents work in the image, not in the workspace: both are kept and graded again."""
    for number in range(3):
        steps = [{"run": f"echo {'bye' if number == 2 else 'hello'} >hello.txt"}, "Done."]
        text = f"Write hello ({number}).\nSCRIPT: {json.dumps(steps)}\n"
        task(tmp_path / f"tasks/t{number}", "FROM base\nWORKDIR /app\n", **{"instruction.md": text})
    monkeypatch.chdir(tmp_path)
    async with FakeServer() as server:
        command = [
            *("eval", "tasks", "--model", "a", "--model", "b", "--base-url", server.base_url),
            *(*HERE, "--set", "run.keep_workspaces=true", *alias_option(base)),
        ]
        assert await asyncio.to_thread(main, command) == 0
        found = json.loads(Path("runs/eval-tasks/evaluation.json").read_text())["models"]
        assert {m: (one["tasks"], one["solved"][0]) for m, one in found.items()} == {
            "a": (3, pytest.approx(2 / 3)),
            "b": (3, pytest.approx(2 / 3)),
        }
        calls = len(server.entries)

        async def graded_again() -> dict[str, Any]:
            done = await regrade_run(Path("runs/eval-tasks/a"))
            return {"graded": done.graded, "known": done.known, "changed": done.changed}

        assert await graded_again() == {"graded": 3, "known": 0, "changed": 0}
        (tmp_path / "tasks/t0/tests/test.sh").write_text("#!/bin/bash\nexit 1\n")
        assert await graded_again() == {"graded": 1, "known": 2, "changed": 1}
        assert await asyncio.to_thread(main, command) == 2, "old results would count in the score"
        assert len(server.entries) == calls
    for kept in Path("runs/eval-tasks/a/workspaces").glob("*.image"):
        shutil.rmtree(kept)  # as of an earlier version, or a backend that cannot write it
    (tmp_path / "tasks/t0/tests/test.sh").write_text("#!/bin/bash\nexit 2\n")
    done = await regrade_run(Path("runs/eval-tasks/a"))
    assert (done.graded, done.not_kept) == (0, 3)


async def test_units_with_their_image_do_not_wait_for_other_builds(
    store: ImageStore, base: Path, tmp_path: Path
) -> None:
    """The first build does not end: its unit stays open, and the other unit is finished."""
    dataset = tmp_path / "tasks"
    task(dataset / "a-slow", f"FROM base\nRUN {SLEEP}\n")
    task(dataset / "b-quick", "FROM base\nWORKDIR /app\n")
    process = await launch(dataset, tmp_path / "out", *alias_option(base))
    lines = await read_until(process, lambda e: e.get("event") == "attempt")
    assert lines[-1]["task_id"] == "b-quick"
    events = await read_until(process, lambda e: e.get("images", {}).get("built") == 1)
    assert events[-1]["images"] == {"wanted": 2, "built": 1, "failed": 0}
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 240) == 130
    await until(lambda: not is_running(SLEEP))
    rows = load_run(tmp_path / "out").trajectories
    assert list(rows["task_id"]) == ["b-quick"]
    assert store.find(next(iter(rows["sandbox"]))["image"]) is not None


async def test_a_killed_run_leaves_no_build_and_the_next_continues(
    store: ImageStore, base: Path, tmp_path: Path
) -> None:
    dataset, gate = tmp_path / "tasks", f"FROM base\nRUN {SLEEP}\nWORKDIR /app\n"
    slow = task(dataset / "a-slow", gate)
    task(dataset / "b-quick", "FROM base\nWORKDIR /app\n")
    process = await launch(dataset, tmp_path / "out", *alias_option(base))
    await read_until(process, lambda e: e.get("event") == "attempt")
    await until(lambda: is_running(SLEEP))
    process.kill()
    await process.wait()
    await until(lambda: not is_running(SLEEP))
    assert str(store.root) not in Path("/proc/mounts").read_text()
    assert [*store.root.glob("scratch/*")], "the next start removes these"
    (built,) = store.root.glob("names/*")
    before = built.stat().st_mtime_ns
    (slow / "environment/Dockerfile").write_text("FROM base\nRUN true\nWORKDIR /app\n")
    code, data = await asyncio.to_thread(run, dataset, tmp_path / "out", *alias_option(base))
    assert code == 0
    assert dict(zip(data.trajectories["task_id"], data.trajectories["reward"], strict=True)) == {
        "a-slow": 1.0,
        "b-quick": 1.0,
    }
    assert built.stat().st_mtime_ns == before
    assert [*store.root.glob("scratch/*")] == []


async def test_a_run_waits_for_an_image_that_another_process_builds(
    store: ImageStore, base: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        task(tmp_path / "tasks" / name, f"FROM base\nRUN echo {name}\nWORKDIR /app\n")
    store.alias("base", base)
    (image, context), _ = build_contexts(tmp_path / "tasks").items()
    with file_lock(store.lock_file(image)) as held:
        assert held
        process = await launch(tmp_path / "tasks", tmp_path / "out")
        await read_until(process, lambda e: e.get("images", {}).get("built") == 1)
        store.build(context.folder, image)
        built = (store.root / "names" / quote(image, safe="")).stat().st_mtime_ns
    await read_until(process, lambda e: e.get("event") == "report")
    assert await process.wait() == 0
    assert (store.root / "names" / quote(image, safe="")).stat().st_mtime_ns == built


def test_a_task_whose_image_cannot_be_built_fails_alone(
    store: ImageStore, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "tasks"
    task(dataset / "bad", "FROM base\nRUN echo the reason; false\n")
    task(dataset / "good", "FROM base\nWORKDIR /app\n")
    code, data = run(dataset, tmp_path / "out", *alias_option(base))
    assert code == 1
    assert list(data.trajectories["task_id"]) == ["good"]
    (failure,) = data.failures.itertuples()
    assert (failure.task_id, failure.cause) == ("bad", "task")
    assert "\n" not in failure.error
    log = Path(failure.error.rpartition("Log: ")[2])
    assert "the reason" in log.read_text()
    assert str(log) in capsys.readouterr().err
    assert main(["check", str(dataset), "--run"]) == 2
    assert f"Log: {log}" in capsys.readouterr().out
    (dataset / "bad/environment/Dockerfile").write_text("FROM base\nRUN true\nWORKDIR /app\n")
    assert main(["check", str(dataset), "--run"]) == 0


def test_without_buildah_a_run_names_the_package_and_makes_no_call(
    store: ImageStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.environ["PATH"].split(":"):
        for path in Path(folder).glob("*"):
            if path.name != "buildah" and not (programs / path.name).exists():
                (programs / path.name).symlink_to(path)
    monkeypatch.setenv("PATH", str(programs))
    task(tmp_path / "tasks/one", "FROM base\n")

    async def play() -> int:
        async with FakeServer() as server:
            where = ["--base-url", server.base_url, "--out", str(tmp_path / "out"), *HERE]
            command = ["run", str(tmp_path / "tasks"), "--model", "echo-0", *where]
            code = await asyncio.to_thread(main, command)
            assert all(entry.model is None for entry in server.entries), (
                "no completion was requested"
            )
            return code

    assert asyncio.run(play()) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
    assert lines == ["error: buildah is not installed, which this needs. "
                     "Install it: apt install buildah"]  # fmt: skip


@pytest.mark.parametrize("sandbox", ["ssh --hosts one.example", "modal"])
def test_dockerfiles_are_refused_in_one_line_where_their_images_cannot_go(
    store: ImageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], sandbox: str
) -> None:
    task(tmp_path / "tasks/one", "FROM base\n")
    where = ["--base-url", "http://127.0.0.1:1", "--out", str(tmp_path / "out"), *HERE]
    command = ["run", str(tmp_path / "tasks"), "--model", "echo-0", *where]
    assert main([*command, "--dry-run", "--sandbox", *sandbox.split()]) == 2
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
    kind = sandbox.partition(" ")[0]
    assert line.startswith(f"error: --sandbox {kind} cannot play task folders with a Dockerfile: ")


def test_apptainer_takes_what_buildah_built(
    store: ImageStore, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs in it is tested with the sandboxes of apptainer, which root may not start."""
    program = fake_apptainer.install(tmp_path, "bwrap")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    task(tmp_path / "tasks/bad", "FROM base\nRUN false\n")
    task(tmp_path / "tasks/good", "FROM base\nWORKDIR /app\n")
    contexts, taker = build_contexts(tmp_path / "tasks"), image_taker("apptainer")
    assert isinstance(taker, SifImages)
    assert missing_images(contexts, taker) == contexts
    builds = ImageBuilds(contexts, aliases={"base": base}, taker=taker)
    builds.open()
    bad, good = contexts
    with pytest.raises(BuildFailed, match=r"cannot build .* Log: "):
        builds.build(bad).result(240)
    builds.build(good).result(240)
    builds.close()
    assert store.prune() > 0
    assert missing_images(contexts, taker) == contexts
    archive = tmp_path / "archive"
    store.alias("base", base)
    store.build(contexts[good].folder, good, archive=archive)
    taker.load(archive)
    assert [*missing_images(contexts, taker)] == [bad]
    found = taker.find(good)
    assert found is not None
    assert found.workdir == "/app"
    line, _ = fake_apptainer.commands(program)
    assert line[:3] == ["build", "--force", found.path.removesuffix(".sif") + ".new"]
    program.write_text("#!/bin/sh\necho FATAL: no space; exit 255\n")
    Path(found.path).with_suffix(".json").unlink()
    with pytest.raises(BuildFailed, match=r"cannot make .*no space"):
        taker.load(archive)
    assert taker.find(good) is None


SECRET = "https://user:fi5hy@index.example/it's"


@pytest.mark.parametrize("way", ["command", "run"])
def test_images_do_not_contain_build_variables(
    store: ImageStore,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    way: str,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", SECRET)
    request.addfinalizer(partial(os.umask, os.umask(0o077)))  # a strict default of some machines
    dockerfile = (
        "# FROM nothing\nFROM base AS first\nRUN chmod 777 /tmp\nUSER 1000\n"
        "RUN : \\\n# FROM a comment\nFROM not a stage ; printf '%s' \"${#PIP_INDEX_URL}\" >/tmp/n\n"
        "RUN x=`echo 1`\nFROM base\nCOPY --from=first /tmp/n /n\n"
        'SHELL ["/bin/bash", "-c"]\nRUN [[ a == a ]] && ls /etc/ssl/certs >/dev/null\n'
        "WORKDIR /app\n"
    )
    folder = task(tmp_path / "tasks/one", dockerfile)
    bad = task(tmp_path / "tasks/two", 'FROM base\nRUN echo "$PIP_INDEX_URL"; false\n')
    if way == "command":
        more = ["--image-alias", f"base={base}", "--build-ca", "--build-env", "PIP_INDEX_URL"]
        assert main(["images", "build", str(tmp_path / "tasks"), *more]) == 1
    else:
        where = ["--set", "sandbox.build.env=[PIP_INDEX_URL]", "--set", "sandbox.build.ca=true"]
        run(tmp_path / "tasks", tmp_path / "out", *alias_option(base), *where)
        assert SECRET not in (tmp_path / "out/run.yaml").read_text()
    (named,) = store.named()
    (length,) = [f / "n" for f in store.folders(named.image) if (f / "n").exists()]
    assert length.read_text() == str(len(SECRET))
    for certificates in store.root.glob("l/*/etc/ssl/certs"):
        assert not any(certificates.iterdir())
    found = subprocess.run(
        ["grep", "-rlE", "fi5hy", str(store.root)], capture_output=True, text=True
    ).stdout
    assert found == "", "the value is in no layer, configuration or log"
    assert (folder.exists(), bad.exists()) == (True, True)


def test_a_build_variable_that_is_not_set_is_refused(
    store: ImageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task(tmp_path / "tasks/one", "FROM base\n")
    command = ["images", "build", str(tmp_path / "tasks"), "--build-env"]
    assert main([*command, "NOT_SET_ANYWHERE"]) == 2
    assert "build variable NOT_SET_ANYWHERE: not set" in capsys.readouterr().err
    assert main([*command, "A=1"]) == 2
    assert "Leave the value out" in capsys.readouterr().err


def test_dry_runs_count_the_images_to_build(
    store: ImageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        task(tmp_path / "tasks" / name, "FROM base\n")
    command = ["run", str(tmp_path / "tasks"), "--model", "oracle", "--dry-run"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert "1 images of task folders would be built" in capsys.readouterr().out


async def launch(dataset: Path, out: Path, *more: str) -> asyncio.subprocess.Process:
    """Start a run as a process with JSON events."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, "run", str(dataset), "--model", "oracle"),
        *("--out", str(out), *HERE, "--json", *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def read_until(
    process: asyncio.subprocess.Process, wanted: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(240):
        while not events or not wanted(events[-1]):
            line = await process.stdout.readline()
            assert line, events
            events.append(json.loads(line))
    return events
