"""Importing costs little and does nothing: no heavy package, no thread, no changed process."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from source_tree import PRODUCT, ROOT, imported_names, module_name, nodes_of, python_files, relative

HEAVY = ["ray", "pyarrow", "pandas", "pydantic", "aiohttp", "openai", "anthropic", "datasets"]


def python(code: str, *arguments: str) -> str:
    # With bytecode: without it, each child compiles the package again.
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[str]:
    return [module_name(path) for path in python_files() if path.name != "__main__.py"]


def test_importing_the_package_is_light() -> None:
    code = "import hermes_rl, sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(python(code)))
    assert loaded & set(HEAVY) == set()


# test_cycles.py shows that no module needs another one to be imported before it.
EACH = """
import importlib, json, os, sys, threading, traceback
import aiohttp, msgspec, openai, pandas, pyarrow.dataset, pydantic, typer, yaml
failed = {}
state = lambda: (dict(os.environ), os.getcwd(), threading.active_count())
for name in sys.argv[1:]:
    before = state()
    try:
        importlib.import_module(name)
    except BaseException:
        failed[name] = traceback.format_exc()
    for label, old, new in zip(("environment", "folder", "threads"), before, state()):
        if old != new:
            failed[name] = failed.get(name, "") + f"importing it changed the {label}; "
print(json.dumps(failed))
"""


def test_importing_any_module_has_no_side_effects() -> None:
    failed = json.loads(python(EACH, *modules()))
    assert failed == {}, "\n".join(f"{name}:\n{why}" for name, why in failed.items())


def test_the_data_folder_does_not_hide_hugging_face() -> None:
    assert not list((ROOT / "datasets").rglob("*.py"))
    where = python("import sys; sys.path.insert(0, ''); import datasets; print(datasets.__file__)")
    assert Path(where.strip()).parent.parent != ROOT
    python("import sys; sys.path.insert(0, ''); from datasets import load_dataset")


def test_environments_is_a_namespace_package() -> None:
    assert not (ROOT / "environments" / "__init__.py").exists()


OTHER_PYTHONS = {"verifiers"}
"""What `rl/verifiers_worker.py` imports in the Python of its user, which has no hermes_rl."""


def third_party_imports() -> dict[str, str]:
    """Top-level name -> one file that imports it, over the three import roots."""
    found: dict[str, str] = {}
    for path in python_files():
        package = module_name(path).split(".")
        for node in nodes_of(path):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, _ in imported_names(node, package):
                    found.setdefault(name.split(".")[0], relative(path))
    ours = {*PRODUCT, *sys.stdlib_module_names, *OTHER_PYTHONS}
    return {name: place for name, place in found.items() if name not in ours}


def test_imported_packages_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(d for k, v in extras.items() if k != "dev" for d in v)]
    declared = {plain(line) for line in lines}
    providers = packages_distributions()
    undeclared = {
        name: place
        for name, place in third_party_imports().items()
        if not {plain(dist) for dist in providers.get(name, [name])} & declared
    }
    assert undeclared == {}


def plain(requirement: str) -> str:
    """'PyYAML>=6.0; marker' -> 'pyyaml', as package indexes compare names."""
    name = requirement.split(";")[0].strip()
    for stop in "<>=![ ~":
        name = name.split(stop)[0]
    return name.lower().replace("_", "-").replace(".", "-")
