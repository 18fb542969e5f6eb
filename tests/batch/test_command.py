"""`hermes-rl run` as people type it: what is said, where, and with which exit code."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import kit
import pytest

from batch_runner import settle
from hermes_rl.cli import main

GOOD = '{"id": "a", "prompt": "Do it", "oracle": "echo 1 > x", "verify": "cd /workspace"}\n'
FREE = ("--workers", "0", "--sandbox", "none", "--allow-unsandboxed")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD)
    return str(path)


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


@pytest.mark.parametrize("name", ["plain", "two words", "it's $HOME"])
def test_the_command_that_resumes_can_be_pasted(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    config = kit.config(tmp_path, [], model={"name": "noop"}, run={"out": str(out)})
    words = shlex.split(settle(config).resume)
    assert words == ["hermes-rl", "run", "--config", f"{out}/run.yaml"]
