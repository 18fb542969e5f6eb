"""`hermes-rl run` as people type it: what is said, where, and with which exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.cli import main

GOOD = '{"id": "a", "prompt": "Do it", "oracle": "echo 1 > x", "verify": "cd /workspace"}\n'
FREE = ("--workers", "0", "--sandbox", "none", "--allow-unsandboxed")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD)
    return str(path)


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command says."""
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no dataset"),
        (["smoke"], "no model"),
        (["none.jsonl", "--model", "oracle"], "none.jsonl: no such file"),
        (["smoke", "--model", "oracle", "--wat"], "--wat"),
        (
            ["smoke", "--model", "oracle", "--workers", "auot"],
            "--workers auot: must be a whole number from 0 on, or auto, not 'auot'",
        ),
        (["smoke", "--model", "oracle", "--workers", "-1"], "--workers -1: must be a whole number"),
        (["smoke", "--model", "oracle", "--repeats", "0"], "--repeats 0: must be 1 or more"),
        (["smoke", "--model", "oracle", "--sandbox", "none"], "--allow-unsandboxed"),
        (
            ["smoke", "--model", "oracle", "--sandbox", "jail"],
            "--sandbox jail: must be 'bubblewrap' or",
        ),
        (["smoke", "--model", "oracle", "--toolsets", "wand"], "wand"),
        (["smoke", "--model", "oracle", "--set", "run.wat=1"], "run.wat"),
        (["smoke", "--model", "oracle", "--set", "run"], "--set section.key=value"),
        (["smoke", "--model", "oracle", "--map", "prompt"], "--map prompt=COLUMN"),
        (["smoke", "--model", "oracle", "--config", "none.yaml"], "none.yaml"),
        (["smoke", "--model", "oracle", "--system-prompt", "@none"], "--system-prompt"),
        (["smoke", "--model", "m", "--base-url", "http://example.com/v1"], "--api-key-env"),
        (["smoke", "--model", "m", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["smoke", "--model", "oracle", "--out", "/proc/here"], "--out"),
        (["smoke", "--model", "oracle", "--out", "s3://bucket/run"], "s3://bucket/run"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in error(capsys, *arguments)


def test_wrong_columns_name_the_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"question": "x", "answer": "y"}\n')
    said = error(capsys, str(path), "--model", "oracle", "--out", str(tmp_path / "run"))
    assert "my.jsonl:1: no column 'prompt' (found: question, answer)" in said
    assert "--map prompt=" in said
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing"


def test_flags_before_set_before_file(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"dataset: {{path: {tasks}, repeats: 2}}\nmodel: {{name: noop}}\n"
        f"run: {{out: {tmp_path / 'file'}, concurrency: 3, workers: 5}}\n"
    )
    more = ("--set", "run.concurrency=7", "--set", "run.workers=4", "--workers", "0")
    assert main(["run", "--config", str(file), *more, "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["concurrency"], said["workers"], said["units"]) == (7, 0, 2)
    assert said["path"] == str(tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_summary_and_progress(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", tasks, "--model", "noop", "--out", str(out), *FREE]) == 0
    said = capsys.readouterr()
    assert "1/1 units  " in said.err
    assert "0 running | " in said.err
    assert f"{out}: 1/1 units done" in said.out
    assert f"trajectories: {out}/trajectories/*.parquet" in said.out


def test_default_run_directory(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", tasks, "--model", "noop", *FREE, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("runs/tasks-noop: new run, this process")


@pytest.mark.parametrize(
    ("units", "more", "cluster", "in_process"),
    [
        (199, (), None, True),
        (200, (), None, False),
        (199, ("--concurrency", "65"), None, False),
        (199, (), "10.0.0.1:6379", False),
        (199, ("--workers", "auto"), None, True),
        (199, ("--workers", "3"), None, False),
        (200, ("--workers", "0"), None, True),
    ],
)
def test_small_work_is_done_in_this_process(
    units: int,
    more: tuple[str, ...],
    cluster: str | None,
    in_process: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if cluster is not None:
        monkeypatch.setenv("RAY_ADDRESS", cluster)
    dataset = tmp_path / "t.jsonl"
    dataset.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(units)))
    assert main(["run", str(dataset), "--model", "noop", *more, "--dry-run", "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["workers"] == 0) is in_process


@pytest.mark.parametrize("asked", [FREE[:2], ()])
def test_a_run_without_workers_loads_only_what_it_uses(
    asked: tuple[str, ...], tasks: str, tmp_path: Path
) -> None:
    assert FREE[:2] == ("--workers", "0")
    code = (
        "import sys\nfrom hermes_rl.cli import main\n"
        f"code = main(['run', {tasks!r}, '--model', 'noop', '--out', {str(tmp_path / 'r')!r}, "
        f"*{(*asked, *FREE[2:])!r}])\n"
        "late = {'ray', 'pandas', 'hermes_rl.segments', 'hermes_rl.models.tokens.renderer'}\n"
        "late.add('hermes_rl.rl.groups')\n"
        "late &= set(sys.modules)\nassert not late, late\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = "running in this process: fewer than 200 units (--workers N starts Ray)"
    assert (said in done.stderr) is (not asked)


def test_help_is_light_and_has_an_example() -> None:
    code = (
        "import sys, time\nfrom hermes_rl.cli import main\nmain(sys.argv[1:])\n"
        "heavy = {'ray', 'pyarrow', 'pandas', 'pydantic', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy\nassert time.process_time() < 0.6, time.process_time()"
    )
    for arguments in (["--help"], ["run", "--help"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "Example: hermes-rl run" in " ".join(done.stdout.split())


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    assert "did you mean 'run'?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hermes-rl ")
