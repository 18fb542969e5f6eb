"""`hermes-rl run` as users type it: options, plan, imports and help."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import kit
import pytest

from batch_runner import resolve_settings
from hermes_rl.cli import main

GOOD = '{"id": "a", "prompt": "Do it", "oracle": "echo 1 > x", "verify": "cd /workspace"}\n'
NO_SANDBOX = ("--workers", "0", "--sandbox", "none", "--allow-unsandboxed")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD)
    return str(path)


def test_flags_override_set_which_overrides_the_file(
    tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"dataset: {{path: {tasks}, repeats: 2}}\nmodel: {{name: noop}}\n"
        f"run: {{out: {tmp_path / 'file'}, concurrency: 3, workers: 5}}\n"
    )
    more = ("--set", "run.concurrency=7", "--set", "run.workers=4", "--workers", "0")
    assert main(["run", "--config", str(file), *more, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["concurrency"], plan["workers"], plan["units"]) == (7, 0, 2)
    assert plan["path"] == str(tmp_path / "file")
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
def test_small_runs_use_this_process(
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


@pytest.mark.parametrize("workers", [NO_SANDBOX[:2], ()])
def test_a_run_in_this_process_imports_no_unused_packages(
    workers: tuple[str, ...], tasks: str, tmp_path: Path
) -> None:
    assert NO_SANDBOX[:2] == ("--workers", "0")
    code = (
        "import sys\nfrom hermes_rl.cli import main\n"
        f"code = main(['run', {tasks!r}, '--model', 'noop', '--out', {str(tmp_path / 'r')!r}, "
        f"*{(*workers, *NO_SANDBOX[2:])!r}])\n"
        "late = {'ray', 'pandas', 'hermes_rl.segments', 'hermes_rl.models.tokens.renderer'}\n"
        "late |= {'aiohttp', 'hermes_rl.rl.groups'}\n"
        "late &= set(sys.modules)\nassert not late, late\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    note = "running in this process: fewer than 200 units (--workers N starts Ray)"
    assert (note in done.stderr) is (not workers)


def test_help_imports_no_heavy_packages() -> None:
    code = (
        "import sys, time\nfrom hermes_rl.cli import main\nmain(sys.argv[1:])\n"
        "heavy = {'ray', 'pyarrow', 'pandas', 'pydantic', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy\nassert time.process_time() < 1.5, time.process_time()"
    )
    for arguments in (["--help"], ["run", "--help"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "Example: hermes-rl run" in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", ["plain", "two arguments", "it's $HOME"])
def test_the_resume_command_is_quoted_for_the_shell(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    config = kit.make_config(tmp_path, [], model={"name": "noop"}, run={"out": str(out)})
    arguments = shlex.split(resolve_settings(config).resume)
    assert arguments == ["hermes-rl", "run", "--config", f"{out}/run.yaml"]
