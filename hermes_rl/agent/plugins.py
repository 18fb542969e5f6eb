"""Plugins: modules whose `register(context)` registers hooks.

A plugin is named by an entry point of the group `hermes_rl.plugins`, or by the path of a Python
file. Only those that are named are loaded, once for each process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from hermes_rl.agent.hooks import Plugin, PluginContext
from hermes_rl.errors import HermesError, UserError
from hermes_rl.input_errors import unknown

PLUGINS_GROUP = "hermes_rl.plugins"
"""Of entry points."""


_loaded: dict[tuple[str, str], Plugin] = {}
_loading = threading.Lock()  # a plugin is loaded once, whatever thread wants it first


def load_plugins(names: Sequence[str | Path]) -> list[Plugin]:
    """The plugins of these names, in order.

    Raises: UserError for one that does not exist, cannot be loaded or registers what it may not.
    """
    if isinstance(names, str):
        raise UserError(f"plugins={names!r} must be a list of names: [{names!r}]")
    with _loading:
        return [_load(str(name)) for name in names]


def _load(name: str) -> Plugin:
    if name.endswith(".py"):
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise UserError(f"plugin {name}: no such file. Check agent.plugins")
        digest = _digest(path)
        return _loaded.get((str(path), digest)) or _register(name, str(path), digest, path)
    points = {point.name: point for point in entry_points(group=PLUGINS_GROUP)}
    if name not in points:
        hint = "" if points else ". For a file, write its path, which ends with .py"
        raise UserError(f"{unknown('plugin', name, points)}{hint}")
    point = points[name]
    spec = _found(name, point)
    digest = _digest(spec)
    return _loaded.get((point.value, digest)) or _register(name, point.value, digest, point)


def _found(name: str, point: EntryPoint) -> Path:
    try:
        spec = importlib.util.find_spec(point.module)
    except Exception as error:  # of a package around it, which is imported
        raise UserError(f"plugin {name}: {type(error).__name__}: {error}. Fix it") from None
    if spec is None or spec.origin is None:
        raise UserError(f"plugin {name}: there is no module {point.module}. Install it again")
    return Path(spec.origin)


def _digest(path: Path) -> str:
    """Of the source of a module; of a package, of all its Python files."""
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    found = hashlib.sha256()
    for file in files:
        found.update(file.relative_to(path.parent).as_posix().encode() + b"\0")
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _register(name: str, place: str, digest: str, source: Path | EntryPoint) -> Plugin:
    context = PluginContext(f"plugin {name}")
    try:
        loaded = _module(source, digest) if isinstance(source, Path) else source.load()
        register: Any = loaded if callable(loaded) else getattr(loaded, "register", None)
        if register is None:
            raise UserError(f"plugin {name} has no function register(context). Add one")
        if inspect.isawaitable(result := register(context)):
            if inspect.iscoroutine(result):
                result.close()
            raise UserError(
                f"plugin {name}: register is an async function. Write def register(context)"
            )
    except HermesError:
        raise
    except (Exception, SystemExit) as error:  # a boundary: the code is the user's
        raise UserError(
            f"plugin {name}: {type(error).__name__}: {error}{_line(error)}. Fix it, or take it out "
            "of the plugins"
        ) from error
    plugin = Plugin(name, digest, tuple(context.hooks))
    _loaded[place, digest] = plugin
    return plugin


def _module(path: Path, digest: str) -> ModuleType:
    name = f"hermes_rl_plugin_{path.stem}_{digest[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends with .py has a loader"
    assert spec.loader is not None, "a file that ends with .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _line(error: BaseException) -> str:
    """Where in the plugin it failed."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return ""
    return f" ({Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno})"
