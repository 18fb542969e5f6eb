"""The scorer `code`: Python code from the answer, tested in the grading sandbox.

The tests run in one process, the answer's code in another, and only plain data passes between
them: code that exits, patches the tests or the builtins, or returns objects that equal everything
reaches only its own process. The verifier's own shell writes the reward.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.scorers.answers import MAX_CHARS

DEFAULT_TIMEOUT_S = 30.0

_FENCE = re.compile(r"[ \t]*(`{3,})[ \t]*(\w*)")
_PYTHON = ("", "python", "py", "python3")
_PROGRAM = Path(__file__).with_name("code_box.py")

_SCRIPT = """\
if ! command -v python3 >/dev/null; then echo "cannot-judge=no python3 in the sandbox" >&3
elif python3 -I "$VERIFY/code_box.py" tests 3>&-; then echo reward=1 >&3
else echo reward=0 >&3
fi
"""


def extract_code(answer: str, functions: tuple[str, ...] = ()) -> str | None:
    """The last fenced Python block, of those that define `functions`; without a fence the answer.

    None when none of it is Python that defines them.
    """
    blocks = [text for tag, text in fenced(answer) if tag in _PYTHON]
    for text in reversed(blocks or [answer]):
        defined = _defined(text)
        if defined is not None and defined.issuperset(functions) and (blocks or defined):
            return text
    return None


def fenced(answer: str) -> Iterator[tuple[str, str]]:
    """Tag and text of each fenced block, in linear time."""
    fence, tag, lines = None, "", list[str]()
    for line in answer.split("\n"):
        if fence is None:
            if opened := _FENCE.match(line):
                fence, tag, lines = opened[1], opened[2].lower(), []
        elif line.strip() == fence:
            yield tag, "".join(f"{one}\n" for one in lines)
            fence = None
        else:
            lines.append(line)


def _defined(text: str) -> set[str] | None:
    """Names that Python source defines at its top level; None for what is not Python."""
    if len(text) > MAX_CHARS:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of the answer, thousands at times
            body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    named = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assigned = (t for n in body if isinstance(n, ast.Assign) for t in n.targets)
    return named | {t.id for t in assigned if isinstance(t, ast.Name)}


class CodeTests(NamedTuple):
    """A verifier that tests an answer's code."""

    script: str
    files: dict[str, bytes]
    timeout_s: float


def code_tests(options: Mapping[str, Any], answer: str) -> CodeTests | None:
    """The verifier that tests an answer's code; None for an answer without code."""
    functions = tuple(options.get("functions", ()))
    code = extract_code(answer, functions)
    if code is None:
        return None
    setup, tests = options.get("setup", ""), options["tests"]
    files = {_PROGRAM.name: _PROGRAM.read_bytes()}
    plan = {"setup": setup, "tests": tests, "functions": functions or _called(setup, tests)}
    files["tests.json"] = json.dumps(plan).encode()
    files["candidate.json"] = json.dumps({"setup": setup, "code": code}).encode()
    return CodeTests(_SCRIPT, files, float(options.get("timeout_s", DEFAULT_TIMEOUT_S)))


def uses_answer(options: Mapping[str, Any]) -> bool:
    """Whether the tests, or their setup, name anything that an answer defines."""
    setup, tests = options.get("setup", ""), options["tests"]
    names = options.get("functions") or _called(setup, tests)
    return any(name in f"{setup}\n{tests}" for name in names)


def _called(setup: str, tests: str) -> list[str]:
    """Names that tests use and neither they, the setup nor Python define."""
    used = {n.id for n in ast.walk(ast.parse(tests)) if isinstance(n, ast.Name)}
    stored = {
        n.id
        for n in ast.walk(ast.parse(f"{setup}\n{tests}"))
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    known: set[str] = set(dir(builtins)) | stored
    for node in ast.walk(ast.parse(f"{setup}\n{tests}")):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif isinstance(node, ast.arg):
            known.add(node.arg)
    return sorted(used - known)
