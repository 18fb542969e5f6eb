"""A file imports from lower layers and from its own package, nowhere else.

Imports are read from the source, so those inside functions and under TYPE_CHECKING count too.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest
from source_tree import (
    EXTENSIONS,
    PRODUCT,
    ROOT,
    Import,
    imported_names,
    imports_of,
    module_name,
    python_files,
    relative,
)

# Lowest first. A layer is a row of groups; the modules and packages of a group may import each
# other. Names are those in hermes_rl, or the other import roots.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors input_errors messages usage identity config config_agent config_endpoint"
        " tasks scorers task_folders trajectory ports events record images sources aio lazy locks"
        " text leaks network telemetry",
    ),
    ("sandboxes",),
    ("models", "tools", "sessions"),
    ("segments",),
    ("agent", "store"),
    ("wiring definitions checkpoints setups judging", "testing"),
    ("rollout verify workspaces", "aiagent places", "evals"),
    ("rl",),
    ("servers", "export", "environments", "batch_runner"),
    ("viewer",),
    ("cli",),
)
HANDS_OVER_TO_CLI = "__main__"  # python -m batch_runner, python -m environments.NAME
RAY_FILES = {"batch_runner/pool.py"}


class Place(NamedTuple):
    """The number of a layer, and a group of that layer."""

    layer: int
    group: str


PLACES = {
    name: Place(layer, group)
    for layer, groups in enumerate(LAYERS)
    for group in groups
    for name in group.split()
}


def top_name(dotted: str) -> str | None:
    """'hermes_rl.models.base' -> 'models'; hermes_rl itself is None."""
    parts = dotted.split(".")
    if parts[0] in EXTENSIONS:
        return parts[0]
    return parts[1] if len(parts) > 1 else None


def environment_of(dotted: str) -> str:
    return ".".join(dotted.split(".")[:2]) if dotted.startswith("environments.") else ""


def violation(path: Path, imp: Import) -> str | None:
    """Why this import is not allowed, or None."""
    if imp.module.split(".")[0] not in PRODUCT:
        return None
    importer = module_name(path)
    source, target = top_name(importer), top_name(imp.module)
    if imp.module == "hermes_rl.__version__":
        return None
    if target not in PLACES:
        return f"{imp.module} is the root package, or has no layer"
    if source is not None and source not in PLACES:
        return f"{source} has no layer"
    if source is None:  # hermes_rl/__init__.py: its lazy names are strings, and typing may see them
        light = imp.typing_only or PLACES[target].layer == 0
        return None if light else "makes the root package heavy"
    if path.stem == HANDS_OVER_TO_CLI and source in EXTENSIONS and target == "cli":
        return None
    here, there = PLACES[source], PLACES[target]
    if here == there:
        same = environment_of(importer) == environment_of(imp.module)
        return None if same else "one environment imports another"
    return None if there.layer < here.layer else f"{target} is not below {source}"


def test_every_module_has_a_layer() -> None:
    names = {top_name(module_name(path)) for path in python_files()} - {None, "__main__"}
    assert not names - set(PLACES), "add them to LAYERS, or move them into a package"


def test_imports_go_to_lower_layers_only() -> None:
    crossed = [
        f"{relative(path)}:{imp.line}: imports {imp.module}: {why}"
        for path in python_files()
        for imp in imports_of(path)
        if (why := violation(path, imp))
    ]
    assert not crossed, "\n".join(crossed)


def test_few_files_import_ray() -> None:
    users = {
        relative(path)
        for path in python_files()
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
        ("hermes_rl/errors.py", "from hermes_rl import load_run", "root package"),
        ("hermes_rl/errors.py", "import hermes_rl", "root package"),
        ("hermes_rl/store/x.py", "from hermes_rl import __version__", None),
        ("hermes_rl/__init__.py", "from hermes_rl import cli", "root package heavy"),
        ("hermes_rl/rl/x.py", "import batch_runner", "batch_runner is not below rl"),
        ("hermes_rl/rollout.py", "from hermes_rl.rollout import grade", None),
        ("hermes_rl/models/a/b.py", "from hermes_rl.models.base import x", None),
        ("batch_runner/__main__.py", "from hermes_rl.cli import main", None),
        ("batch_runner/plan.py", "from hermes_rl.cli import main", "cli is not below"),
        ("environments/a/x.py", "import environments.b.y", "one environment imports another"),
    ],
)
def test_violations_are_found(file: str, code: str, why: str | None) -> None:
    path = ROOT / file
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    tree = ast.parse(code)
    found = [
        violation(path, Import(1, name, typing_only=False))
        for node in ast.walk(tree)
        for name, _ in imported_names(node, package)
    ]
    assert len(found) == 1
    assert found[0] is None if why is None else why in (found[0] or "")


# The layers inside hermes_rl/models, lowest first; the longest name that fits a module counts.
# Modules of one name may import each other. Every other import goes to a lower row.
MODEL_LAYERS = (
    "base unparsed",
    "errors",
    "key_command prepare",
    "wire",
    "endpoint",
    "transports providers.table",
    "client played",
    "limits rate tokens.logprobs",
    "providers.prices tokens.capture",
    "calls",
    "tokens",
    "local",
    "providers",
)
MODEL_LEVELS = {name: level for level, row in enumerate(MODEL_LAYERS) for name in row.split()}


def model_layer(dotted: str) -> str | None:
    """The name in MODEL_LAYERS of a module of hermes_rl.models: 'providers.table', 'wire'."""
    parts = dotted.removeprefix("hermes_rl.models.").split(".")
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((name for name in names if name in MODEL_LEVELS), None)


def model_violation(module: str, target: str) -> str | None:
    """Why an import inside hermes_rl.models is not from a lower layer, or None."""
    here, there = model_layer(module), model_layer(target)
    if here is None or there is None:
        return f"{module if here is None else target} has no layer"
    below = here == there or MODEL_LEVELS[there] < MODEL_LEVELS[here]
    return None if below else f"{there} is not below {here}"


def test_models_import_from_lower_layers_only() -> None:
    crossed = [
        f"{relative(path)}:{imp.line}: {why}"
        for path in python_files()
        if (module := module_name(path)).startswith("hermes_rl.models.")
        for imp in imports_of(path)
        if imp.module.startswith("hermes_rl.models.")
        if (why := model_violation(module, imp.module))
    ]
    assert not crossed, "\n".join(crossed)


@pytest.mark.parametrize(
    ("module", "target", "why"),
    [
        ("errors.body", "wire.base", "wire is not below errors"),
        ("client", "providers.table", None),
        ("client", "providers.routing", "providers is not below client"),
        ("calls.retry", "tokens.capture", None),
        ("calls.retry", "tokens.client", "tokens is not below calls"),
        ("wire.chat", "wire.base", None),
        ("nowhere", "base", "has no layer"),
    ],
)
def test_the_check_of_model_layers_finds_crossings(
    module: str, target: str, why: str | None
) -> None:
    found = model_violation(f"hermes_rl.models.{module}", f"hermes_rl.models.{target}")
    assert found is None if why is None else why in (found or "")
