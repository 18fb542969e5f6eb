"""Every format that is listed is read by a program of other people, in a test that CI runs.

Those tests run in environments of their own (`make test-consumers`) and say by a mark which formats
they read; their conftest holds them to it, and makes a failure of a test that is left out.
"""

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hermes_rl.export import FORMATS

ROOT = Path(__file__).parents[2]
CONSUMERS = ROOT / "tests" / "consumers"


def marked(path: Path) -> Iterator[str]:
    """The formats that the tests of a file say they read."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.reads":
                    yield from (ast.literal_eval(word) for word in mark.args)


def commands() -> Iterator[list[str]]:
    """What `make test-consumers` runs pytest with, whoever asks."""
    command, plain = ["make", "-n", "test-consumers"], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        if "pytest" in words:
            yield words[words.index("pytest") + 1 :]


def run_by(words: list[str], path: Path) -> bool:
    """Whether a call of pytest collects a file."""
    left_out = [w.removeprefix("--ignore=") for w in words if w.startswith("--ignore=")]
    within = [ROOT / word for word in words if word.startswith("tests/") and word[-4:] != ".ini"]
    if any(path.is_relative_to(ROOT / name) for name in left_out):
        return False
    return any(path.is_relative_to(place) for place in within)


def test_each_listed_format_has_a_reader_that_a_test_runs() -> None:
    read = {name for path in CONSUMERS.rglob("test_*.py") for name in marked(path)}
    assert read == set(FORMATS)


def test_ci_runs_each_of_these_tests_in_one_environment() -> None:
    calls = list(commands())
    for path in CONSUMERS.rglob("test_*.py"):
        assert sum(run_by(words, path) for words in calls) == 1, path
    assert not [word for words in calls for word in words if word in ("-k", "-m", "--deselect")]
    assert "step make test-consumers\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_docs_name_the_versions_that_are_tested() -> None:
    locks = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "locks").glob("consumers*.txt"))
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `[a-z].*", page, re.M)
    named = [
        (name.lower(), version)
        for line in table
        for name, version in re.findall(r"(\w+)`?(?: package)? (\d+(?:\.\d+)+)", line.split("|")[2])
    ]
    assert len(table) == len(FORMATS)
    assert {name for name, _ in named} >= {
        "trl",
        "axolotl",
        "verl",
        "verifiers",
        "harbor",
        "openai",
    }
    wrong = [
        (name, version)
        for name, version in named
        if not re.search(rf"^{name}=={re.escape(version)}[. ]", locks, re.M)
    ]
    assert wrong == []
