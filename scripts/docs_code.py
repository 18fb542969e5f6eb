"""Check the Python programs in README.md and docs/ against the API: names, arguments, attributes.

    python scripts/docs_code.py FOLDER

writes a module per page to FOLDER, where each line has the number that it has in the page, and runs
mypy on them (`pages.*` in pyproject.toml). Names that a page leaves to the reader may be undefined.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[1]


def module_of(page: str) -> str:
    """Return the programs of a page as one coroutine, so that they may await. Each is conditional:
    what follows an endless loop is checked too."""
    lines, inside = ["async def page():"], False
    for line in page.splitlines()[1:]:
        fence = re.match(r"```(\w*)", line)
        if fence:
            inside = fence[1] == "python"
            lines.append("    if input():" if inside else "")
        else:
            lines.append(f"        {line}" if inside else "")
    return "\n".join((*lines, "    pass", ""))


def main(folder: Path) -> int:
    """Check all pages. Returns: mypy's exit code."""
    os.environ["MYPYPATH"] = str(folder)
    (folder / "pages").mkdir(parents=True, exist_ok=True)
    files = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        files.append(folder / "pages" / f"{page.stem.replace('-', '_')}.py")
        if files[-1].stem == "README" and page.parent != ROOT:
            files[-1] = files[-1].with_stem("docs")
        files[-1].write_text(module_of(page.read_text(encoding="utf-8")), encoding="utf-8")
    shown, errors, status = api.run(["--no-error-summary", *map(str, files)])
    print(shown + errors, end="")
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
