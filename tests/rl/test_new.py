"""`hermes-rl env new NAME` writes an environment that runs and passes its own test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.cli import main
from hermes_rl.errors import UserError
from hermes_rl.rl import first_tasks, load_environment, rewards_of, write_environment

BARE = ("--sandbox", "none", "--allow-unsandboxed", "--workers", "0", "--limit", "2", "--json")


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_the_files_of_a_new_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "new", "letter_hunt", "--in", str(tmp_path)]) == 0
    assert "env process" in capsys.readouterr().out
    package = tmp_path / "letter_hunt"
    assert sorted(path.name for path in package.iterdir()) == [
        "README.md", "__init__.py", "__main__.py", "config.yaml", "environment.py",
        "test_letter_hunt.py",
    ]  # fmt: skip
    assert load_environment(str(package)).cls.name == "letter_hunt"
    assert len({task.prompt_text for task in first_tasks(package, 20)}) > 1
    longest = max(len(line) for f in package.glob("*.py") for line in f.read_text().splitlines())
    assert longest <= 100
    bare = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}
    for model, reward in (("oracle", 1.0), ("noop", 0.0)):
        assert rewards_of(package, model, tasks=4, sections=bare) == [reward] * 4
    for again, says in (("letter_hunt", "exists already"), ("class", "not a Python name")):
        with pytest.raises(UserError, match=says):
            write_environment(again, tmp_path)
    for taken in ("random", "numpy", "pytest", "swe_bugs", "environments"):
        with pytest.raises(UserError, match="a module of that name exists"):
            write_environment(taken, tmp_path)


def test_the_command_shows_how_to_install_pytest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["env", "new", "letter_hunt", "--in", str(tmp_path)]) == 0
    assert "test it: python -m pytest " in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert main(["env", "new", "other_hunt", "--in", str(tmp_path)]) == 0
    assert "test it: pip install pytest && python -m pytest " in capsys.readouterr().out


REPEATS = """
import itertools
from hermes_rl.rl import EnvConfig, Environment, make_task

class Repeats(Environment[EnvConfig]):
    name, endless = "repeats", True
    def tasks(self, split, seed):
        for n in itertools.count():
            yield make_task(f"{split} {n % 4}", id=f"{split}-{n % 4}", oracle="touch done")
    async def compute_reward(self, task, trajectory, ctx):
        try:
            await ctx.grading.read_file("done")
        except OSError:
            return 0.0
        return 1.0
"""


@pytest.mark.slow
def test_the_generated_test_allows_repeated_tasks(tmp_path: Path) -> None:
    package = write_environment("repeats", tmp_path)
    (package / "environment.py").write_text(REPEATS)
    tested = python("-m", "pytest", "-q", str(package), cwd=tmp_path)
    assert "3 passed" in tested.stdout, tested.stdout[-2000:]


@pytest.mark.slow
def test_a_new_environment_passes_its_test_and_runs_as_a_module(tmp_path: Path) -> None:
    package = write_environment("letter_hunt", tmp_path)
    tested = python("-m", "pytest", "-q", str(package), cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout[-2000:]
    assert "3 passed" in tested.stdout
    done = python("-m", "letter_hunt", "process", "--model", "noop", *BARE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["mean_reward"] for event in events if event["event"] == "report"] == [0]
    config = str(package / "config.yaml")
    arguments = ("-m", "letter_hunt", "evaluate", "--model", "oracle", "--config", config, *BARE)
    done = python(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    out = tmp_path / "runs" / "letter_hunt-oracle-eval"
    metrics = json.loads((out / "metrics.json").read_bytes())
    assert metrics["results"]["atropos|letter_hunt_eval|0"] == metrics["results"]["all"]
    assert metrics["results"]["all"]["reward"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["process"], "no environment. Name one: hermes-rl env process my_env --model my-model"),
        (["process", "gone.py", "--model", "noop"], "no such file"),
        (["evaluate", "x"], "no model. Name one"),
        (["process", "x", "--model", "m", "--set", "env.judge.base_url=http://a"], "--judge MODEL"),
        (["proces"], "No such command"),
    ],
)
def test_invalid_commands_are_reported_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", *arguments]) == 2
    text = capsys.readouterr().err
    assert says in text
    assert text.count("\n") == 1
