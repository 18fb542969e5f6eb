"""The examples in docs/ run unchanged."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import ORACLE, clean_environment, run_cli

from hermes_rl.testing import write_tiny_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
MODEL = "path/to/model"
PAGES = ("agent.md", "errors.md", "evaluating.md", "reading.md", "requests.md", "running.md")
pytestmark = pytest.mark.slow


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        code
        for kind, code in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
        if kind == language
    ]


def python(code: str, cwd: Path) -> str:
    """The output of a program, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        env={**clean_environment(), "HF_HOME": str(cwd / "hf")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the pages use."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(finished / "runs", folder / "runs")
    for model in ("oracle", "noop"):
        arguments = ("run", "smoke", "--model", model, "--repeats", "2", "--workers", "0")
        assert run_cli(*arguments, cwd=folder).code == 0
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run_and_print_the_documented_output(page: str, clone: Path) -> None:
    printed = python("\n".join(blocks(page, "python")), clone)
    text = (DOCS / page).read_text(encoding="utf-8")
    promised = re.findall(r"prints\n\n```\n(.*?)```", text, re.DOTALL)
    assert printed == "".join(promised) or not promised


def test_commands_print_the_documented_output(clone: Path) -> None:
    result = run_cli("status", "runs/smoke-oracle", cwd=clone).out
    ten = run_cli("run", "smoke", *ORACLE, "--out", "ten", cwd=clone)
    assert ten.code == 0
    line = run_cli("status", "ten", cwd=clone).out
    assert line in (DOCS / "running.md").read_text(encoding="utf-8")
    assert result.startswith("20/20 units  20 solved")
    checked = run_cli("check", "smoke", "--run", cwd=clone).out
    assert checked in (DOCS / "tasks.md").read_text(encoding="utf-8")
    refused = run_cli("run", "smoke", *ORACLE, "--temperature", "1", cwd=clone).error
    assert refused in (DOCS / "running.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment that `env new` writes."""
    folder = tmp_path_factory.mktemp("desk")
    assert run_cli("env", "new", "word_hunt", cwd=folder).code == 0
    return folder


def test_documented_environment_commands_pass_a_dry_run(desk: Path) -> None:
    lines = [
        shlex.split(line, comments=True) for line in blocks("environments.md", "")[0].splitlines()
    ]
    assert lines[0] == ["hermes-rl", "env", "new", "word_hunt"]
    planned = [run_cli(*arguments[1:], "--dry-run", cwd=desk) for arguments in lines[1:]]
    assert [result.code for result in planned] == [0, 0, 0], planned
    assert "256 rows (0 bad), 2,048 units" in planned[1].out


def test_documented_environment_configuration_is_valid(desk: Path) -> None:
    (desk / "run.yaml").write_text(blocks("environments.md", "yaml")[0])
    result = run_cli("env", "process", "--config", "run.yaml", "--dry-run", cwd=desk)
    assert (result.code, result.err) == (0, "")
    assert "256 rows (0 bad), 2,048 units" in result.out
    result = run_cli("env", "evaluate", "--config", "run.yaml", "--dry-run", cwd=desk)
    assert "256 rows (0 bad), 256 units" in result.out


def test_documented_environment_test_passes(desk: Path) -> None:
    (code,) = [code for code in blocks("environments.md", "python") if "def test_it" in code]
    python(f"{code}\ntest_it()\n", desk)


def test_documented_group_examples_run(desk: Path) -> None:
    out = "runs/my_env-my-model"
    some = ("--limit", "2", "--repeats", "2", "--out", out)
    assert run_cli("env", "process", "word_hunt", *ORACLE, *some, cwd=desk).code == 0
    shown = python(
        "import hermes_rl\n" + "".join(blocks("groups.md", "python")) + "print(len(run.groups))",
        desk,
    )
    assert shown == "2\n"


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a tokenizer and a run whose engine returned token ids."""
    folder = tmp_path_factory.mktemp("exact")
    (folder / MODEL).parent.mkdir(parents=True)
    write_tiny_tokenizer(folder / MODEL)
    steps = json.dumps([{"run": "echo 3", "split": "random"}, "There are 3."])
    task = {"id": "t", "prompt": f"Count.\nSCRIPT: {steps}", "verify": "true"}
    (folder / "tasks.jsonl").write_text(json.dumps(task))
    program = [sys.executable, "-m", "hermes_rl.testing.exact_engine", "--until-eof"]
    with subprocess.Popen(
        [*program, "--tokenizer", str(folder / MODEL)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        url = json.loads(engine.stdout.readline())["base_url"]
        place = ("--base-url", url, "--set", f"endpoint.tokenizer={MODEL}", "--out", "runs/rl")
        arguments = ("--model", "my-model", "--workers", "0", "--preset", "rl", "--repeats", "2")
        result = run_cli("run", "tasks.jsonl", *arguments, *place, cwd=folder)
        assert result.code == 0, result.err
        yield folder
        engine.stdin.close()
        engine.wait(60)


def test_documented_exact_token_programs_run(exact: Path) -> None:
    code = "import hermes_rl\n" + "\n".join(blocks("exact-tokens.md", "python"))
    shown = python(code + "\nprint(mine.trainable.sum())", exact)
    assert "What is in this folder?" in shown
    assert shown.endswith("\n2\n")


def test_documented_exact_token_checks_print_the_same_phrases(exact: Path) -> None:
    pages = [code.splitlines() for code in blocks("exact-tokens.md", "")]
    shown = [lines for lines in pages if lines[0].startswith("$ hermes-rl check")]
    assert len(shown) == 2
    for lines in shown:
        result = run_cli(*shlex.split(lines[0])[2:], cwd=exact)
        assert result.code == 0, result.err
        for line in (lines[-1].split(": ")[0], lines[-1].split("; ")[-1]):
            assert line in result.out
    assert "turns 1-2" in run_cli("check", "runs/rl", "--tokens", cwd=exact).out
