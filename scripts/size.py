"""Print the lines, files and Python tokens of each package beside their budgets.

    python scripts/size.py

Lines are physical lines of `*.py`. Tokens are those of Python's own tokenizer without comments,
line breaks and indentation, so that reformatting changes nothing. The exit status is 1 when a
budget is exceeded.
"""

from __future__ import annotations

import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

LINE_BUDGETS = {
    "hermes_rl": 3_600,  # the modules directly in it and config/: what all others stand on
    "hermes_rl/agent": 1_900,
    "hermes_rl/models": 13_500,
    "hermes_rl/sandboxes": 4_200,
    "hermes_rl/store": 3_300,
    "hermes_rl/rl": 2_700,
    "hermes_rl/segments": 800,
    "hermes_rl/sessions": 1_300,
    "hermes_rl/export": 2_300,
    "hermes_rl/evals": 1_450,
    "hermes_rl/viewer": 1_500,
    "hermes_rl/tools": 1_200,
    "hermes_rl/cli": 2_700,
    "hermes_rl/testing": 2_600,
    "batch_runner": 3_400,
    "environments": 2_200,
}
"""Package -> most lines that it may have."""

PRODUCT = {"lines": 44_000, "files": 280, "tokens": 265_000}
TESTS = {"lines": 34_000, "tokens": 275_000}

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """What a set of Python files amounts to."""

    lines: int = 0
    files: int = 0
    tokens: int = 0

    def plus(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


def measure(path: Path) -> Size:
    """The size of one Python file."""
    with path.open("rb") as file:
        tokens = sum(token.type not in _LAYOUT for token in tokenize.tokenize(file.readline))
    return Size(path.read_bytes().count(b"\n"), 1, tokens)


def package_of(path: Path) -> str:
    """The budget that a file of the product counts for: its longest matching package."""
    relative = path.relative_to(ROOT).as_posix()
    inside = [name for name in LINE_BUDGETS if relative.startswith(f"{name}/")]
    return max(inside, key=len)


def sizes(*folders: str) -> dict[Path, Size]:
    """Each Python file below the folders with its size."""
    return {
        path: measure(path)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts
    }


def total(parts: list[Size]) -> Size:
    result = Size()
    for part in parts:
        result = result.plus(part)
    return result


def main() -> int:
    product = sizes("hermes_rl", "batch_runner", "environments")
    by_package: dict[str, list[Size]] = {name: [] for name in LINE_BUDGETS}
    for path, size in product.items():
        by_package[package_of(path)].append(size)
    rows = [
        (name, total(parts), {"lines": LINE_BUDGETS[name]}) for name, parts in by_package.items()
    ]
    rows.append(("product", total(list(product.values())), PRODUCT))
    rows.append(("tests", total(list(sizes("tests").values())), TESTS))
    print(f"{'package':22}{'lines':>9}{'at most':>9}{'files':>7}{'tokens':>10}")
    exceeded = []
    for name, size, budget in rows:
        over = [f"{what} {getattr(size, what):,} > {most:,}" for what, most in budget.items()
                if getattr(size, what) > most]  # fmt: skip
        print(
            f"{name:22}{size.lines:9,}{budget['lines']:9,}{size.files:7,}{size.tokens:10,}"
            f"  {'; '.join(over)}".rstrip()
        )
        exceeded += over
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
