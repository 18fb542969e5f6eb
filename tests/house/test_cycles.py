"""No module imports itself through others, and packages are used through their public names."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from source_tree import (
    PRODUCT,
    ROOT,
    imports_of,
    is_module,
    module_name,
    nodes_of,
    public_names,
    python_files,
    relative,
)

CYCLES: tuple[frozenset[str], ...] = ()
"""Import cycles that are still there. A cycle may lose modules, and none may be added."""


def import_graph() -> dict[str, set[str]]:
    """Module -> the modules that it imports, anywhere in the file."""
    files = {module_name(path): path for path in python_files()}
    return {
        module: {
            imp.module for imp in imports_of(path) if imp.module in files and not imp.as_program
        }
        - {module}
        for module, path in files.items()
    }


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """What a module imports, directly or through others; itself only where it is in a cycle."""
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead.extend(graph[module])
    return found


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of more than one module."""
    below = {module: reachable(module, graph) for module in graph}
    return {
        frozenset(other for other in below[module] if module in below[other])
        for module in graph
        if module in below[module]
    }


def packages_of(dotted: str) -> list[str]:
    """'hermes_rl.models.rate.limiter' -> ['hermes_rl.models', 'hermes_rl.models.rate']. Other
    folders within packages are not, nor are the environments, which are plug-ins."""
    parts = dotted.split(".")
    first = 1 if parts[0] == "batch_runner" else 2
    last = 3 if parts[:2] == ["hermes_rl", "models"] else first
    found = [".".join(parts[:depth]) for depth in range(first, last + 1)]
    return [name for name in found if parts[0] != "environments" and public_names(name)]


def deep_imports(path: Path) -> Iterator[str]:
    """What a file imports from the inside of packages that it is not in."""
    importer = module_name(path)
    for imp in imports_of(path):
        packages = packages_of(imp.through)
        if not packages or imp.through in packages:
            continue
        if not f"{importer}.".startswith(f"{packages[-1]}."):
            yield f"{relative(path)}:{imp.line}: {imp.through}: import from {packages[-1]}"


def test_no_module_imports_itself_through_others() -> None:
    new = [cycle for cycle in cycles(import_graph()) if not any(cycle <= known for known in CYCLES)]
    assert not new, "\n".join(" <-> ".join(sorted(cycle)) for cycle in new)


def test_listed_cycles_still_exist() -> None:
    found = cycles(import_graph())
    gone = [cycle for cycle in CYCLES if not any(other <= cycle for other in found)]
    if gone:
        warnings.warn(f"remove from CYCLES: {[sorted(cycle) for cycle in gone]}", stacklevel=1)


def lazy_packages() -> list[str]:
    inits = [path for path in python_files() if path.name == "__init__.py"]
    return [module_name(p) for p in inits if "attach(__name__)" in p.read_text(encoding="utf-8")]


def test_packages_are_used_through_their_public_names() -> None:
    """Where a package's `__init__` lists names, others import these (see hermes_rl/lazy.py)."""
    deep = [line for path in python_files(*PRODUCT, "tests") for line in deep_imports(path)]
    assert not deep, "\n".join(deep)


def test_no_public_name_is_also_the_name_of_a_module() -> None:
    """Python would bind the module in its place, once that is loaded."""
    shadowed = [
        f"{package}.{name}"
        for package in lazy_packages()
        for name, module in public_names(package).items()
        if is_module(f"{package}.{name}") and module != f"{package}.{name}"
    ]
    assert not shadowed


def test_names_that_are_imported_from_a_package_are_public() -> None:
    """Also inside functions, where a wrong name would fail only when they are called."""
    lazy = set(lazy_packages())
    unknown = [
        f"{relative(path)}:{node.lineno}: {node.module} has no {alias.name}"
        for path in python_files(*PRODUCT, "tests")
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.module in lazy
        for alias in node.names
        if alias.name not in {*public_names(node.module), "*", "main", "env_main", "__version__"}
        and not is_module(f"{node.module}.{alias.name}")
    ]
    assert not unknown, "\n".join(unknown)


def test_every_public_name_exists() -> None:
    """A name that moved and is still listed would fail at its first use only."""
    code = (
        "import importlib, sys\n"
        "for package in sys.argv[1:]:\n"
        "    module = importlib.import_module(package)\n"
        "    [getattr(module, name) for name in module.__all__]\n"
        "    assert set(module.__all__) <= set(dir(module))\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, *lazy_packages()], cwd=ROOT, check=True, timeout=100
    )


def test_cycles_are_found_in_a_graph() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert cycles(graph) == {frozenset("abc"), frozenset("de")}
