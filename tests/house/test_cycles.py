"""No module imports itself through others, and packages are used through their public names.

Both rules are ratchets: what is listed here may only shrink.
"""

from __future__ import annotations

import warnings
from collections import Counter

from source_tree import ROOT, imports_of, is_module, module_name, python_files

CYCLES: tuple[frozenset[str], ...] = ()
"""Import cycles that are still there. A cycle may lose modules, and none may be added."""

DEEP_IMPORTS = {
    "batch_runner": (12, 57),
    "environments.dialogue_booking": (0, 3),
    "environments.gsm8k_python": (0, 2),
    "environments.swe_bugs": (0, 5),
    "environments.terminal_tasks": (0, 1),
    "hermes_rl.cli": (0, 13),
    "hermes_rl.evals": (1, 2),
    "hermes_rl.export": (2, 10),
    "hermes_rl.models": (112, 353),
    "hermes_rl.rl": (13, 34),
    "hermes_rl.sandboxes": (25, 94),
    "hermes_rl.segments": (0, 0),
    "hermes_rl.store": (77, 138),
    "hermes_rl.testing": (1, 164),
    "hermes_rl.tools": (25, 24),
}
"""Package -> pairs of a file outside it and an inner module that the file imports: most in other
packages, most in tests. New code imports from the package itself; what it needs gets a name in the
package's `__init__`."""


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


def package_of(dotted: str) -> str:
    """'hermes_rl.models.calls.loop' -> 'hermes_rl.models'; '' for a module without a package."""
    parts = dotted.split(".")
    depth = 1 if parts[0] == "batch_runner" else 2
    package = ".".join(parts[:depth])
    return package if ROOT.joinpath(*parts[:depth]).is_dir() else ""


def deep_imports(*roots: str) -> Counter[str]:
    """Package -> pairs of a file outside it and an inner module that the file imports."""
    found: Counter[str] = Counter()
    for path in python_files(*roots):
        package_itself = package_of(module_name(path))
        for module in {imp.module for imp in imports_of(path) if is_module(imp.module)}:
            package = package_of(module)
            if package not in ("", module, package_itself):
                found[package] += 1
    return found


def test_no_module_imports_itself_through_others() -> None:
    new = [cycle for cycle in cycles(import_graph()) if not any(cycle <= known for known in CYCLES)]
    assert not new, "\n".join(" <-> ".join(sorted(cycle)) for cycle in new)


def test_listed_cycles_still_exist() -> None:
    found = cycles(import_graph())
    gone = [cycle for cycle in CYCLES if not any(other <= cycle for other in found)]
    if gone:
        warnings.warn(f"remove from CYCLES: {[sorted(cycle) for cycle in gone]}", stacklevel=1)


def test_packages_are_used_through_their_public_names() -> None:
    product, tests = deep_imports(), deep_imports("tests")
    more = []
    for package in sorted({*product, *tests}):
        most = DEEP_IMPORTS.get(package, (0, 0))
        for who, count, limit in zip(
            ("other packages", "tests"), (product[package], tests[package]), most, strict=True
        ):
            if count > limit:
                more.append(f"{package}: {who} import inner modules {count} times, {limit} at most")
    advice = "import from the package; give what you need a name in its __init__"
    assert not more, "\n".join([*more, advice])


def test_cycles_are_found_in_a_graph() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert cycles(graph) == {frozenset("abc"), frozenset("de")}
