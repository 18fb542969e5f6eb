"""The Python files of the project, parsed once, with their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ("batch_runner", "environments")
PRODUCT = ("hermes_rl", *EXTENSIONS)
"""The import roots."""


class Import(NamedTuple):
    """One imported name: absolute and dotted."""

    line: int
    module: str
    """That has the name: where a package's `__init__` only lists it, the module that it names."""
    typing_only: bool
    as_program: bool = False
    """Under `if __name__ == "__main__":`, so not when another module imports the file."""
    through: str = ""
    """The module as the statement names it."""


@cache
def python_files(*roots: str) -> tuple[Path, ...]:
    """The Python files below the folders, or below the import roots."""
    return tuple(
        sorted(
            path
            for root in roots or PRODUCT
            for path in (ROOT / root).rglob("*.py")
            if "__pycache__" not in path.parts
        )
    )


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return dotted.startswith(PRODUCT) and (path.with_suffix(".py").is_file() or path.is_dir())


def lines_under_if(condition: str, nodes: tuple[ast.AST, ...]) -> set[int]:
    """Lines under an `if` whose test contains a name or a constant."""
    return {
        line
        for node in nodes
        if isinstance(node, ast.If) and f"'{condition}'" in ast.dump(node.test)
        for statement in node.body
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }


@cache
def public_names(package: str) -> dict[str, str]:
    """What a package's `__init__` imports from the inside: name -> module that has it."""
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    if not path.is_file():
        return {}
    return {
        alias.name: module if module != package else f"{package}.{alias.name}"
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith(PRODUCT)
        for alias in node.names
    }


def home_of(package: str, name: str) -> str:
    """The module that has a public name, also where one package passes on another's."""
    module = public_names(package).get(name, package)
    return module if module == package else home_of(module, name)


def imported_names(node: ast.AST, package: list[str]) -> Iterator[tuple[str, str]]:
    """What one statement or call imports, literal import_module() calls too.

    Absolute: the module that has the name, and the module that the statement names.
    """
    if isinstance(node, ast.Import):
        yield from ((alias.name, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            deeper, public = f"{source}.{alias.name}", public_names(source)
            if alias.name in public and source not in ("hermes_rl", ".".join(package)):
                yield home_of(source, alias.name), source
            elif source == "hermes_rl" or is_module(deeper):
                yield deeper, deeper
            else:
                yield source, source
    elif isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        first = node.args[0]
        if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
            yield str(first.value), str(first.value)


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file, also inside functions and under TYPE_CHECKING."""
    nodes = nodes_of(path)
    typing_only = lines_under_if("TYPE_CHECKING", nodes)
    as_program = lines_under_if("__main__", nodes)
    module = module_name(path).split(".")
    package = module if path.name == "__init__.py" else module[:-1]
    return tuple(
        Import(node.lineno, name, node.lineno in typing_only, node.lineno in as_program, through)
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))
        for name, through in imported_names(node, package)
    )
