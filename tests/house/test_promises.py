"""Every promise of tests/PROMISES.md has a test that exists and runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
LINE = re.compile(r"^\| (?P<promise>[^|]+) \| `(?P<file>[^`:]+)::(?P<test>[^`]+)` \|$", re.M)
NOT_RUN = ("skip", "skipif", "xfail")


def promises() -> list[tuple[str, str, str]]:
    """(promise, file, test) of each line."""
    return LINE.findall((TESTS / "PROMISES.md").read_text())


@cache
def functions(file: str) -> dict[str, list[str]]:
    """The test functions of a file with their decorators as text."""
    path = TESTS / file
    if not path.is_file():
        return {}
    return {
        node.name: [ast.unparse(decorator) for decorator in node.decorator_list]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_line_has_a_promise_and_a_test() -> None:
    rows = [
        line
        for line in (TESTS / "PROMISES.md").read_text().splitlines()
        if line.startswith("|") and line not in ("| promise | test |", "|---|---|")
    ]
    assert len(rows) == len(promises()) > 100


def test_named_tests_exist() -> None:
    missing = [
        f"{file}::{test} ({promise})"
        for promise, file, test in promises()
        if test not in functions(file)
    ]
    assert missing == []


def test_named_tests_are_run() -> None:
    left_out = [
        f"{file}::{test}"
        for _, file, test in promises()
        for decorator in functions(file).get(test, ())
        if any(word in decorator for word in NOT_RUN)
    ]
    assert left_out == []


def test_promises_are_unique() -> None:
    names = [promise for promise, _, _ in promises()]
    assert len(names) == len(set(names))
