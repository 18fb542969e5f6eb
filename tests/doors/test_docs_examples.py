"""The examples of the docs, run as they stand there."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doors_kit import PLAYED, clean_environment, hermes

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
    """What a program prints, in a process of its own."""
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
    """A folder with the runs that the pages speak of."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(finished / "runs", folder / "runs")
    for model in ("oracle", "noop"):
        words = ("run", "smoke", "--model", model, "--repeats", "2", "--workers", "0")
        assert hermes(*words, cwd=folder).code == 0
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_python_runs_as_it_stands(page: str, clone: Path) -> None:
    printed = python("\n".join(blocks(page, "python")), clone)
    text = (DOCS / page).read_text(encoding="utf-8")
    promised = re.findall(r"prints\n\n```\n(.*?)```", text, re.DOTALL)
    assert printed == "".join(promised) or not promised


def test_the_commands_print_what_the_docs_say(clone: Path) -> None:
    said = hermes("status", "runs/smoke-oracle", cwd=clone).out
    ten = hermes("run", "smoke", *PLAYED, "--out", "ten", cwd=clone)
    assert ten.code == 0
    line = hermes("status", "ten", cwd=clone).out
    assert line in (DOCS / "running.md").read_text(encoding="utf-8")
    assert said.startswith("20/20 units  20 solved")
    checked = hermes("check", "smoke", "--run", cwd=clone).out
    assert checked in (DOCS / "tasks.md").read_text(encoding="utf-8")
    refused = hermes("run", "smoke", *PLAYED, "--temperature", "1", cwd=clone).error
    assert refused in (DOCS / "running.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment that the first command writes."""
    folder = tmp_path_factory.mktemp("desk")
    assert hermes("env", "new", "word_hunt", cwd=folder).code == 0
    return folder


def test_the_commands_about_environments_would_run(desk: Path) -> None:
    lines = [
        shlex.split(line, comments=True) for line in blocks("environments.md", "")[0].splitlines()
    ]
    assert lines[0] == ["hermes-rl", "env", "new", "word_hunt"]
    planned = [hermes(*words[1:], "--dry-run", cwd=desk) for words in lines[1:]]
    assert [said.code for said in planned] == [0, 0, 0], planned
    assert "256 rows (0 bad), 2,048 units" in planned[1].out


def test_the_configuration_about_environments_is_one(desk: Path) -> None:
    (desk / "run.yaml").write_text(blocks("environments.md", "yaml")[0])
    said = hermes("env", "process", "--config", "run.yaml", "--dry-run", cwd=desk)
    assert (said.code, said.err) == (0, "")
    assert "256 rows (0 bad), 2,048 units" in said.out
    said = hermes("env", "evaluate", "--config", "run.yaml", "--dry-run", cwd=desk)
    assert "256 rows (0 bad), 256 units" in said.out


def test_the_test_of_an_environment_passes(desk: Path) -> None:
    (code,) = [code for code in blocks("environments.md", "python") if "def test_it" in code]
    python(f"{code}\ntest_it()\n", desk)


def test_what_is_done_with_groups(desk: Path) -> None:
    out = "runs/my_env-my-model"
    some = ("--limit", "2", "--repeats", "2", "--out", out)
    assert hermes("env", "process", "word_hunt", *PLAYED, *some, cwd=desk).code == 0
    shown = python(
        "import hermes_rl\n" + "".join(blocks("groups.md", "python")) + "print(len(run.groups))",
        desk,
    )
    assert shown == "2\n"


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model's files and a run with the ids of an engine that has it."""
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
        words = ("--model", "my-model", "--workers", "0", "--preset", "rl", "--repeats", "2")
        said = hermes("run", "tasks.jsonl", *words, *place, cwd=folder)
        assert said.code == 0, said.err
        yield folder
        engine.stdin.close()
        engine.wait(30)


def test_the_programs_about_exact_tokens_run(exact: Path) -> None:
    code = "import hermes_rl\n" + "\n".join(blocks("exact-tokens.md", "python"))
    shown = python(code + "\nprint(mine.trainable.sum())", exact)
    assert "What is in this folder?" in shown
    assert shown.endswith("\n2\n")


def test_the_checks_of_exact_tokens_say_what_the_page_shows(exact: Path) -> None:
    """But for the numbers."""
    pages = [code.splitlines() for code in blocks("exact-tokens.md", "")]
    shown = [lines for lines in pages if lines[0].startswith("$ hermes-rl check")]
    assert len(shown) == 2
    for lines in shown:
        said = hermes(*shlex.split(lines[0])[2:], cwd=exact)
        assert said.code == 0, said.err
        for line in (lines[-1].split(": ")[0], lines[-1].split("; ")[-1]):
            assert line in said.out
    assert "turns 1-2" in hermes("check", "runs/rl", "--tokens", cwd=exact).out
