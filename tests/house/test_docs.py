"""What a newcomer reads first is short and true: links lead somewhere, examples are good rows."""

import importlib
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hermes_rl.store import TRAJECTORIES
from hermes_rl.tasks import parse_row

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "datasets/*.md",
        "environments/*.md",
        "notebooks/*.md",
        "examples/**/*.md",
    )
    for path in ROOT.glob(pattern)
)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_sections_have_targets(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text)
    wrong = []
    for name, section in links:
        target = page.parent / name if name else page
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings]
        wrong += [] if section in slugs else [f"{name}#{section}"]
    assert wrong == []


def test_every_page_of_the_docs_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


@cache
def command_of(name: str) -> Any:
    """A command as click sees it, with its options."""
    module = importlib.import_module(f"hermes_rl.cli.{name}_command")
    app = getattr(module, "app", None) or typer.Typer()
    if not hasattr(module, "app"):
        app.command()(module.command)
    return typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_use_commands_and_options_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^\s*(?:\$ )?hermes-rl (.*)", code.replace("\\\n", " "), re.MULTILINE)
    wrong = []
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        command = command_of(name)
        if hasattr(command, "commands"):
            command = command.commands[arguments[0]]
        known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        used = {part.partition("=")[0] for part in arguments if re.match("--?[a-z]", part)}
        wrong += [f"{option} in {line}" for option in used - known]
    assert wrong == []


def test_the_tasks_in_the_readme_are_valid() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith('{"')]
    assert len(lines) == 3
    for number, line in enumerate(lines):
        assert parse_row(json.loads(line), number, f"README.md:{number}").error is None


def test_every_column_is_documented_and_every_documented_column_exists() -> None:
    text = (ROOT / "docs/run-directory.md").read_text(encoding="utf-8").split("## Columns")[1]
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(TRAJECTORIES.names)


def test_the_readme_names_real_columns() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("| column |")[1].split("\n\n")[0]
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) == 12
    assert set(named) <= set(TRAJECTORIES.names)


def test_targets_of_the_makefile_are_documented() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert {"demo", "test", "lint", "bench", "chaos", "clean", "test-consumers"} <= named
    for page in PAGES:
        used = set(re.findall(r"`make ([a-z][a-z-]+)", page.read_text(encoding="utf-8")))
        assert used <= named, page
