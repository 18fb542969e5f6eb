"""From a name to an environment's class: an entry point, a module, a folder or a file."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from hermes_rl.errors import HermesError, UserError
from hermes_rl.input_errors import unknown
from hermes_rl.rl.environment import EnvConfig, Environment
from hermes_rl.rl.faults import raised_in

GROUP = "hermes_rl.environments"
"""Of entry points: NAME = "package.module:Class"."""
BUNDLED = "environments"
"""The namespace that holds our own, and maybe others'."""

_UNHASHED = ("README.md", "config.yaml")
_UNHASHED_FOLDERS = ("__pycache__", "tests", "runs")

AnyEnvironment = Environment[EnvConfig]


@dataclass(frozen=True)
class Loaded:
    """An environment's class, and where it is from."""

    cls: type[AnyEnvironment]
    name: str
    """What loads it again, also in another process and from another folder."""
    sources: tuple[Path, ...]
    """The files that are its identity."""
    modules: tuple[tuple[str, str], ...] = ()
    """(module, file) of what was loaded from a path: other processes must load it first."""

    @property
    def digest(self) -> str:
        """sha256 over the sources: names within their folder, and contents. Blocking."""
        root = Path(os.path.commonpath(self.sources))
        root = root if root.is_dir() else root.parent
        whole = hashlib.sha256()
        for path in self.sources:
            name = path.relative_to(root).as_posix().encode()
            data = path.read_bytes()
            whole.update(b"%d %s %d\0" % (len(name), name, len(data)) + data)
        return whole.hexdigest()


def load_environment(name: str) -> Loaded:
    """An environment by name.

    Args:
        name: an entry point or a bundled one (`dialogue_booking`), `package.module:Class`,
            `folder:Class` of a package, or `file.py:Class`. The class may be left out where there
            is but one.

    Raises: UserError when there is none, or its code cannot be imported: with file and line.
    """
    where, _, wanted = name.partition(":")
    path = Path(where).expanduser()
    if where.endswith(".py") or (path / "__init__.py").is_file():
        return _from_path(path, wanted)
    if os.sep in where:
        raise UserError(f"{where}: no Python file and no package. Check the path")
    for entry in entry_points(group=GROUP, name=where):
        if not wanted:
            module, _, wanted = entry.value.partition(":")
            return _from_module(_import(module), wanted)
    for dotted in (f"{BUNDLED}.{where}", where):
        if _exists(dotted):
            return _from_module(_import(dotted), wanted)
    raise UserError(
        f"{unknown('environment', where, known_environments())}. "
        "Give package.module:Class, a folder or file.py:Class"
    )


def known_environments() -> dict[str, str]:
    """Entry points and bundled packages by name, and what each is: the first line of a package's
    docstring, or the class that an entry point names. Nothing is imported."""
    known = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    spec = importlib.util.find_spec(BUNDLED) if _exists(BUNDLED) else None
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in Path(folder).glob("*/__init__.py"):
            known[path.parent.name] = _first_line(path)
    return dict(sorted(known.items()))


def _first_line(path: Path) -> str:
    try:
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    except (OSError, ValueError, SyntaxError):
        return f"cannot be read: {path}"
    return about.partition("\n")[0]


def load_module(name: str, file: str) -> ModuleType:
    """Load a file, or a package by its `__init__.py`, under a name; once per process.

    Raises: UserError when its code fails.
    """
    there = sys.modules.get(name)
    if there is not None and getattr(there, "__file__", None) == file:
        return there
    path = Path(file)
    places = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise UserError(f"{file}: not a Python file. Check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except HermesError:
        del sys.modules[name]
        raise
    except Exception as error:  # a boundary: code of the user's
        del sys.modules[name]
        raise UserError(f"{file}: cannot be imported: {raised_in(error, file)}") from error
    return module


def _from_path(path: Path, wanted: str) -> Loaded:
    file = (path if path.suffix == ".py" else path / "__init__.py").resolve()
    if not file.is_file():
        raise UserError(f"{path}: no such file. Check the path")
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    name = _free_name(stem, file)
    module = load_module(name, str(file))
    cls = _class_in(module, wanted)
    given = file.parent if file.name == "__init__.py" else file
    return Loaded(cls, f"{given}:{cls.__name__}", _sources(file), ((name, str(file)),))


def _free_name(stem: str, file: Path) -> str:
    """The module's name: the file's own, unless another module has it."""
    stem = stem if stem.isidentifier() else "environment"
    there = sys.modules.get(stem)
    taken = there is not None and getattr(there, "__file__", None) != str(file)
    if taken or (there is None and _exists(stem) and not _same(stem, file)):
        return f"{stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    return stem


def _same(name: str, file: Path) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _from_module(module: ModuleType, wanted: str) -> Loaded:
    cls = _class_in(module, wanted)
    home = inspect.getsourcefile(sys.modules[cls.__module__])
    if home is None:
        raise UserError(f"{cls.__module__}: its source cannot be found")
    return Loaded(cls, f"{module.__name__}:{cls.__name__}", _sources(Path(home).resolve()))


def _exists(dotted: str) -> bool:
    try:
        return importlib.util.find_spec(dotted) is not None
    except (ImportError, ValueError):  # a parent is absent, or no package
        return False


def _import(dotted: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except HermesError:
        raise
    except Exception as error:  # a boundary: code of the user's
        raise UserError(f"{dotted}: cannot be imported: {raised_in(error)}") from error


def _class_in(module: ModuleType, wanted: str) -> type[AnyEnvironment]:
    """The class that is asked for, or the only one."""
    inner = f"{module.__name__}.environment"
    found = list(_classes(module))
    if not found and not wanted and _exists(inner):
        found = list(_classes(_import(inner)))
    if wanted:
        given = getattr(module, wanted, None)
        if given is None and _exists(inner):
            given = getattr(_import(inner), wanted, None)
        if not (isinstance(given, type) and issubclass(given, Environment)):
            names = ", ".join(c.__name__ for c in found) or "none"
            raise UserError(f"{module.__name__}: no Environment {wanted!r} (found: {names})")
        if inspect.isabstract(given):
            raise UserError(f"{module.__name__}: {_unfinished(given)}")
        return given
    if not found:
        raise UserError(f"{module.__name__}: {_lacking(module)}")
    if len(found) > 1:
        names = ", ".join(c.__name__ for c in found)
        raise UserError(
            f"{module.__name__}: which Environment? (found: {names}). Add :Class to the name"
        )
    return found[0]


def _lacking(module: ModuleType) -> str:
    """Why a module has no environment."""
    inner = sys.modules.get(f"{module.__name__}.environment")
    for cls in [c for m in (module, inner) if m for c in _subclasses(m) if inspect.isabstract(c)]:
        return _unfinished(cls)
    return "no Environment in it. Derive a class from hermes_rl.rl.Environment"


def _unfinished(cls: type[AnyEnvironment]) -> str:
    return f"{cls.__name__} lacks {' and '.join(sorted(cls.__abstractmethods__))}. Write it"


def _classes(module: ModuleType) -> Iterator[type[AnyEnvironment]]:
    """The environments of a module that can be used."""
    return (cls for cls in _subclasses(module) if not inspect.isabstract(cls))


def _subclasses(module: ModuleType) -> Iterator[type[AnyEnvironment]]:
    """The environments that are made in a module or below, unfinished ones too."""
    own = module.__name__
    for value in vars(module).values():
        if not (isinstance(value, type) and issubclass(value, Environment)):
            continue
        if value.__module__ == own or value.__module__.startswith(f"{own}."):
            yield value


def _sources(file: Path) -> tuple[Path, ...]:
    """The file, or all of its package: code and data, but not what says nothing of tasks and
    rewards (README, tests, a run's configuration, caches)."""
    if not (file.parent / "__init__.py").is_file():
        return (file,)
    found = []
    for folder, folders, names in os.walk(file.parent):
        folders[:] = sorted(
            f for f in folders if f not in _UNHASHED_FOLDERS and not f.startswith(".")
        )
        for name in sorted(names):
            test = name.startswith("test_") and name.endswith(".py")
            if name in _UNHASHED or name.startswith(".") or name.endswith(".pyc") or test:
                continue
            if (path := Path(folder) / name).is_file():  # and no link to nothing, no pipe
                found.append(path)
    return tuple(found)
