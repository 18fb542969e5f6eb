"""Importing costs little and does nothing: no heavy package, no thread, no changed process."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from source_tree import PRODUCT, ROOT, imported_names, module_name, nodes_of, python_files, relative

HEAVY = ["ray", "pyarrow", "pandas", "pydantic", "aiohttp", "openai", "anthropic", "datasets"]


def python(code: str, *arguments: str, timeout: float = 60) -> str:
    # With bytecode: without it, each child compiles the package again.
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
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


# One child per module, so that each is imported into an interpreter without any other of them.
ALONE = """
import gc, importlib, json, os, sys, threading, traceback
# Third-party packages, once for all children.
import aiohttp, msgspec, openai, pandas, pyarrow.dataset, pydantic, typer, yaml
gc.collect()
gc.freeze()  # children need not copy what is here
gc.disable()
failed = {}
for name in sys.argv[1:]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        why = ""
        before = (dict(os.environ), os.getcwd(), threading.active_count())
        try:
            importlib.import_module(name)
        except BaseException:
            why = traceback.format_exc()
        else:
            after = (dict(os.environ), os.getcwd(), threading.active_count())
            for label, old, new in zip(("environment", "folder", "threads"), before, after):
                if old != new:
                    why += f"importing it changed the {label}; "
        os.write(write, why.encode()[-4000:])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        why = pipe.read().decode()
    if os.waitpid(pid, 0)[1]:
        why += "the interpreter died"
    if why:
        failed[name] = why
print(json.dumps(failed))
"""


@pytest.mark.slow
def test_every_module_imports_alone_and_does_nothing() -> None:
    names = modules()
    halves = (names[::2], names[1::2])  # on two cores
    with ThreadPoolExecutor() as threads:
        outputs = threads.map(lambda half: python(ALONE, *half, timeout=300), halves)
        failed = {name: why for output in outputs for name, why in json.loads(output).items()}
    assert failed == {}, "\n".join(f"{name}:\n{why}" for name, why in failed.items())


def test_the_data_folder_does_not_hide_hugging_face() -> None:
    assert not list((ROOT / "datasets").rglob("*.py"))
    where = python("import sys; sys.path.insert(0, ''); import datasets; print(datasets.__file__)")
    assert Path(where.strip()).parent.parent != ROOT
    python("import sys; sys.path.insert(0, ''); from datasets import load_dataset")


def test_environments_stays_a_namespace() -> None:
    assert not (ROOT / "environments" / "__init__.py").exists()


def third_party_imports() -> dict[str, str]:
    """Top-level name -> one file that imports it, over the three import roots."""
    found: dict[str, str] = {}
    for path in python_files():
        package = module_name(path).split(".")
        for node in nodes_of(path):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, _ in imported_names(node, package):
                    found.setdefault(name.split(".")[0], relative(path))
    ours = {*PRODUCT, *sys.stdlib_module_names}
    return {name: place for name, place in found.items() if name not in ours}


def test_what_is_imported_is_declared() -> None:
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
