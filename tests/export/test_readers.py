"""Every listed format is read by another project's program, in a test that CI runs.

Those tests run in separate environments (`make test-consumers`). A mark names the formats that a
test reads; their conftest checks it, and fails if a test was not run.
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
    """The formats that the tests of a file are marked with."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.reads":
                    yield from (ast.literal_eval(name) for name in mark.args)


def commands() -> Iterator[list[str]]:
    """The arguments of each pytest command of `make test-consumers`."""
    command, plain = ["make", "-n", "test-consumers"], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        arguments = shlex.split(line)
        if "pytest" in arguments:
            yield arguments[arguments.index("pytest") + 1 :]


def collects(arguments: list[str], path: Path) -> bool:
    """Whether a pytest command collects a file."""
    ignored = [a.removeprefix("--ignore=") for a in arguments if a.startswith("--ignore=")]
    paths = [a for a in arguments if a.startswith("tests/") and not a.endswith(".ini")]
    inside, outside = (
        any(path.is_relative_to(ROOT / name) for name in names) for names in (paths, ignored)
    )
    return inside and not outside


def test_each_format_is_read_by_another_program_in_a_test() -> None:
    read = {name for path in CONSUMERS.rglob("test_*.py") for name in marked(path)}
    assert read == set(FORMATS)


def test_ci_runs_each_reader_test_in_one_environment() -> None:
    found = list(commands())
    for path in CONSUMERS.rglob("test_*.py"):
        assert sum(collects(arguments, path) for arguments in found) == 1, path
    assert not {"-k", "-m", "--deselect"} & {a for arguments in found for a in arguments}
    assert "step make test-consumers\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_docs_name_the_tested_versions() -> None:
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
