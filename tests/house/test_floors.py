"""The house has floors: a file imports from lower floors and from its own room, nowhere else.

Imports are read from the source, so those inside functions and under TYPE_CHECKING count too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# Lowest first. A floor is a row of rooms; a room is a set of names that may import each other.
# Names stand below hermes_rl unless they begin with a wing.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "errors reasons input_errors messages usage identity config config_agent config_endpoint"
        " config_reach config_env config_rows config_yaml tasks trajectory ports events record"
        " images rows sources doors threads locks text",
    ),
    ("sandboxes",),
    ("models", "tools", "sessions"),
    ("segments",),
    ("agent", "store"),
    ("wiring definitions", "testing"),
    ("rollout verify episode workspaces", "assembly", "evals"),
    ("rl",),
    ("servers", "export", "environments", "batch_runner"),
    ("cli",),
)
WINGS = ("batch_runner", "environments")
HOUSE = ("hermes_rl", *WINGS)
HANDS_OVER_TO_CLI = "__main__"  # python -m batch_runner, python -m environments.NAME
RAY_FILES = {"batch_runner/pool.py", "batch_runner/actor.py", "batch_runner/governor_ray.py"}


class Place(NamedTuple):
    """Where a name lives: the number of its floor and its room there."""

    floor: int
    room: str


PLACES = {
    name: Place(floor, room)
    for floor, rooms in enumerate(FLOORS)
    for room in rooms
    for name in room.split()
}


class Import(NamedTuple):
    line: int
    module: str  # absolute and dotted
    typing_only: bool


def sources() -> list[Path]:
    return sorted(
        path
        for root in ("hermes_rl", *WINGS)
        for path in (ROOT / root).rglob("*.py")
        if "__pycache__" not in path.parts
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return dotted.startswith(HOUSE) and (path.with_suffix(".py").is_file() or path.is_dir())


def typing_only_lines(tree: ast.AST) -> set[int]:
    """Lines under `if TYPE_CHECKING:`."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }


def imported(node: ast.AST, package: list[str]) -> Iterator[str]:
    """Absolute names that one statement or call imports; literal import_module() calls too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            deeper = f"{source}.{alias.name}"
            yield deeper if source == "hermes_rl" or is_module(deeper) else source
    elif isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        first = node.args[0]
        if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
            yield str(first.value)


def imports_of(path: Path) -> list[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    quiet = typing_only_lines(tree)
    module = module_name(path).split(".")
    package = module if path.name == "__init__.py" else module[:-1]
    return [
        Import(node.lineno, name, node.lineno in quiet)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))
        for name in imported(node, package)
    ]


def room_name(dotted: str) -> str | None:
    """'hermes_rl.models.base' -> 'models'; the front door is None."""
    parts = dotted.split(".")
    if parts[0] in WINGS:
        return parts[0]
    return parts[1] if len(parts) > 1 else None


def environment_of(dotted: str) -> str:
    return ".".join(dotted.split(".")[:2]) if dotted.startswith("environments.") else ""


def violation(path: Path, imp: Import) -> str | None:
    """Why this import crosses a floor, or None."""
    if imp.module.split(".")[0] not in HOUSE:
        return None
    me = module_name(path)
    mine, theirs = room_name(me), room_name(imp.module)
    if imp.module == "hermes_rl.__version__":
        return None
    if theirs not in PLACES:
        return f"{imp.module} is the front door, or a room without a floor"
    if mine is not None and mine not in PLACES:
        return f"{mine} has no floor"
    if mine is None:  # hermes_rl/__init__.py: its lazy names are strings, and typing may see them
        return (
            None if imp.typing_only or PLACES[theirs].floor == 0 else "makes the front door heavy"
        )
    if path.stem == HANDS_OVER_TO_CLI and mine in WINGS and theirs == "cli":
        return None
    here, there = PLACES[mine], PLACES[theirs]
    if here == there:
        alone = environment_of(me) == environment_of(imp.module)
        return None if alone else "one environment imports another"
    return None if there.floor < here.floor else f"{theirs} is not below {mine}"


def test_every_room_has_a_floor() -> None:
    names = {room_name(module_name(path)) for path in sources()} - {None, "__main__"}
    assert not names - set(PLACES), "add them to FLOORS, or move them into a room"


def test_no_import_crosses_a_floor() -> None:
    crossed = [
        f"{path.relative_to(ROOT)}:{imp.line}: imports {imp.module}: {why}"
        for path in sources()
        for imp in imports_of(path)
        if (why := violation(path, imp))
    ]
    assert not crossed, "\n".join(crossed)


def test_ray_stays_at_the_rim() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in sources()
        for imp in imports_of(path)
        if imp.module.split(".")[0] == "ray"
    }
    assert users <= RAY_FILES


@pytest.mark.parametrize(
    ("file", "code", "why"),
    [
        ("hermes_rl/models/base.py", "from hermes_rl.tools import x", "tools is not below models"),
        (
            "hermes_rl/models/base.py",
            "def f():\n import hermes_rl.agent.run",
            "agent is not below",
        ),
        ("hermes_rl/models/base.py", "from ..agent import loop", "agent is not below models"),
        ("hermes_rl/models/base.py", "from .. import agent", "agent is not below models"),
        ("hermes_rl/models/base.py", "import_module('hermes_rl.cli')", "cli is not below models"),
        ("hermes_rl/errors.py", "if TYPE_CHECKING:\n import hermes_rl.store", "store is not below"),
        ("hermes_rl/errors.py", "from hermes_rl import load_run", "front door"),
        ("hermes_rl/errors.py", "import hermes_rl", "front door"),
        ("hermes_rl/store/x.py", "from hermes_rl import __version__", None),
        ("hermes_rl/__init__.py", "from hermes_rl import cli", "front door heavy"),
        ("hermes_rl/rl/x.py", "import batch_runner", "batch_runner is not below rl"),
        ("hermes_rl/rollout.py", "from hermes_rl.verify import grade", None),
        ("hermes_rl/models/a/b.py", "from hermes_rl.models.base import x", None),
        ("batch_runner/__main__.py", "from hermes_rl.cli import main", None),
        ("batch_runner/plan.py", "from hermes_rl.cli import main", "cli is not below"),
        ("environments/a/x.py", "import environments.b.y", "one environment imports another"),
    ],
)
def test_the_check_sees_what_it_should(file: str, code: str, why: str | None) -> None:
    path = ROOT / file
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    tree = ast.parse(code)
    found = [
        violation(path, Import(1, name, typing_only=False))
        for node in ast.walk(tree)
        for name in imported(node, package)
    ]
    assert len(found) == 1
    assert found[0] is None if why is None else why in (found[0] or "")
