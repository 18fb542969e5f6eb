"""Load the environment of the section `env`, its settings and its task stream.

A name leads to a class: an entry point, a module, a folder or a file (`load_environment`). The
class and the configuration make the environment (`open_environment`), which fills in what the run
leaves open (`settle_env`) and yields tasks (`env_rows`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
from pydantic import ValidationError

from hermes_rl.config import RunConfig, parse_config
from hermes_rl.config_endpoint import EnvSection
from hermes_rl.errors import HermesError, UserError
from hermes_rl.identity import digest
from hermes_rl.input_errors import describe, unknown
from hermes_rl.messages import to_openai
from hermes_rl.rl import faults
from hermes_rl.rl.environment import EnvConfig, Environment, Uses
from hermes_rl.tasks import LazyRow, Task, TaskRow
from hermes_rl.text import why_not_json
from hermes_rl.tools import Tool

GROUP = "hermes_rl.environments"
"""Group of entry points NAME = "package.module:Class"."""
BUNDLED = "environments"
"""The namespace package of the bundled environments, which others may extend."""

_UNHASHED = ("README.md", "config.yaml")
_UNHASHED_FOLDERS = ("__pycache__", "tests", "runs")

AnyEnvironment = Environment[EnvConfig]


@dataclass(frozen=True)
class Loaded:
    """An environment's class and its origin."""

    cls: type[AnyEnvironment]
    name: str
    """The name that loads it again, in any process and from any folder."""
    sources: tuple[Path, ...]
    """The files that make its identity."""
    modules: tuple[tuple[str, str], ...] = ()
    """(module, file) that were loaded from a path; other processes must load them first."""

    @property
    def digest(self) -> str:
        """sha256 over the sources: names relative to their folder, and contents. Blocking."""
        root = Path(os.path.commonpath(self.sources))
        root = root if root.is_dir() else root.parent
        whole = hashlib.sha256()
        for path in self.sources:
            name = path.relative_to(root).as_posix().encode()
            data = path.read_bytes()
            whole.update(b"%d %s %d\0" % (len(name), name, len(data)) + data)
        return whole.hexdigest()


def load_environment(name: str) -> Loaded:
    """Load an environment by name.

    Args:
        name: an entry point or a bundled one (`dialogue_booking`), `package.module:Class`,
            `folder:Class` of a package, or `file.py:Class`. The class may be left out if there
            is only one.

    Raises: UserError when there is none, or its code cannot be imported (with file and line).
    """
    if name in _PROGRAM_CLASSES:
        return _PROGRAM_CLASSES[name]
    where, _, wanted = name.partition(":")
    path = Path(where).expanduser()
    if where.endswith(".py") or (path / "__init__.py").is_file():
        return _from_path(path, wanted)
    if os.sep in where:
        raise UserError(f"{where}: neither a Python file nor a package. Check the path")
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


_PROGRAM_CLASSES: dict[str, Loaded] = {}
"""Classes of the program that runs (`__main__`), which must not run a second time to load them."""


def name_environment(cls: type[Environment[Any]]) -> str:
    """Return the name by which this process and its workers load a class.

    Raises: UserError for a class without a source file, or within a function.
    """
    file = inspect.getsourcefile(cls)
    if file is None or "." in cls.__qualname__:
        raise UserError(
            f"{cls.__qualname__}: other processes cannot load it. Define it in a module, not in a "
            "function or a notebook"
        )
    if cls.__module__ != "__main__":
        return f"{cls.__module__}:{cls.__name__}"
    source = Path(file).resolve()
    name = f"{source}:{cls.__name__}"
    _PROGRAM_CLASSES[name] = Loaded(cls, name, _sources(source))
    return name


def known_environments() -> dict[str, str]:
    """List entry points and bundled packages by name, without importing them.

    Returns: name -> the class of an entry point, or the first line of a package's docstring.
    """
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
    """Load a file, or a package by its `__init__.py`, under a name, once per process.

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
        with faults.user_import(file):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_path(path: Path, wanted: str) -> Loaded:
    file = (path if path.suffix == ".py" else path / "__init__.py").resolve()
    if not file.is_file():
        raise UserError(f"{path}: no such file. Check the path")
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    name = _free_name(stem, file)
    module = load_module(name, str(file))
    cls = _class_in(module, wanted)
    source = file.parent if file.name == "__init__.py" else file
    return Loaded(cls, f"{source}:{cls.__name__}", _sources(file), ((name, str(file)),))


def _free_name(stem: str, file: Path) -> str:
    """Return the file's module name, or a unique one if another module has that name."""
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
    except (ImportError, ValueError):  # a parent is missing or not a package
        return False


def _import(dotted: str) -> ModuleType:
    with faults.user_import(dotted):
        return importlib.import_module(dotted)


def _class_in(module: ModuleType, wanted: str) -> type[AnyEnvironment]:
    """Return the class that is wanted, or the only one, of a module or its `environment`."""
    found, inner = _environments(module), f"{module.__name__}.environment"
    if wanted:
        there = hasattr(module, wanted) or not _exists(inner)
        cls = getattr(module if there else _import(inner), wanted, None)
        if not (isinstance(cls, type) and issubclass(cls, Environment)):
            names = ", ".join(c.__name__ for c in found if not inspect.isabstract(c)) or "none"
            raise UserError(f"{module.__name__}: no Environment {wanted!r} (found: {names})")
        found = [cls]
    elif all(map(inspect.isabstract, found)) and _exists(inner):
        found += _environments(_import(inner))
    concrete = [cls for cls in found if not inspect.isabstract(cls)]
    if len(concrete) == 1:
        return concrete[0]
    if concrete:
        names = ", ".join(cls.__name__ for cls in concrete)
        why = f"which Environment? (found: {names}). Add :Class to the name"
    elif found:
        missing = " and ".join(sorted(found[0].__abstractmethods__))
        why = f"{found[0].__name__} lacks {missing}. Write it"
    else:
        why = "no Environment in it. Derive a class from hermes_rl.rl.Environment"
    raise UserError(f"{module.__name__}: {why}")


def _environments(module: ModuleType) -> list[type[AnyEnvironment]]:
    """Return the environments defined in a module or its submodules, abstract ones too."""
    name = module.__name__
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Environment)
        and (value.__module__ == name or value.__module__.startswith(f"{name}."))
    ]


def _sources(file: Path) -> tuple[Path, ...]:
    """Return the file, or the code and data of its package.

    Left out is what affects no task and no reward: README, tests, run configuration, caches.
    """
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
            if (path := Path(folder) / name).is_file():  # no dangling link, no pipe
                found.append(path)
    return tuple(found)


@dataclass(frozen=True)
class Opened:
    """An environment that a run names."""

    env: AnyEnvironment
    loaded: Loaded
    section: EnvSection

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides its tasks and rewards. Blocking.

        Code and data by content, configuration, stream, and the models that it calls.
        """
        section, env = self.section, self.env
        return {
            "name": env.name,
            "source": self.loaded.digest,
            "config": env.config.model_dump(mode="json"),
            "split": section.split,
            "seed": section.seed,
            **{
                use: place.identity
                for use in get_args(Uses)
                if (place := getattr(section, use)) is not None
            },
        }


def open_environment(section: EnvSection, *, to_run: bool = True) -> Opened:
    """Load the class and make the environment, without `setup`.

    Args:
        to_run: for rollouts, not only to look at tasks: the models that it calls must be named.

    Raises: UserError: no such environment, an unknown configuration key or split, or a mismatch
        of the models that it calls and those that the run names.
    """
    loaded = load_environment(section.name)
    cls = loaded.cls
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise UserError(f"{cls.__name__}: give it a name, such as `name = 'my_env'`")
    with faults.user_code(name, cls.Config, UserError):
        try:
            config = cls.Config.model_validate(section.config)
        except ValidationError as error:
            raise UserError(
                f"environment {name}: env.config: {describe(error.errors(), cls.Config)[1]}"
            ) from None
    with faults.user_code(name, cls.__init__, UserError):
        env = cls(config)
    if section.split not in env.splits:
        raise UserError(f"environment {name}: {unknown('split', section.split, env.splits)}")
    if to_run:
        _refuse_models(env, section)
    return Opened(env, loaded, section)


def _refuse_models(env: AnyEnvironment, section: EnvSection) -> None:
    """Raises: UserError for a judge or user that only one of environment and run names."""
    for use in get_args(Uses):
        named, wanted = getattr(section, use) is not None, use in env.uses
        why = None
        if wanted and not named:
            why = f"calls a model as {use}: set env.{use}.name, such as --set env.{use}.name=MODEL"
        elif named and not wanted and use not in env.can_use:
            why = (
                f"calls no model as {use} with this configuration. Leave out env.{use} (--{use}), "
                f"or list {use!r} in its `uses` or `can_use`"
            )
        if why is not None:
            raise UserError(f"environment {env.name} {why}")


def settle_env(config: RunConfig) -> tuple[RunConfig, Opened | None]:
    """Fill in a configuration with the defaults of its environment.

    Returns: the configuration and the environment; both unchanged and None without one.

    Raises: UserError as `open_environment` does, and for an endless stream without a limit.
    """
    if config.env is None:
        return config, None
    opened = open_environment(config.env)
    data = config.model_dump(mode="json", exclude_unset=True)
    for dotted, value in _defaults(opened, config.env.mode).items():
        if value is not None:
            *sections, key = dotted.split(".")
            place = data
            for name in sections:
                place = place.setdefault(name, {})
            place.setdefault(key, value)
    data["env"]["name"] = opened.loaded.name
    endless = opened.env.endless and config.env.mode != "live"
    if endless and data["dataset"].get("limit") is None:
        raise UserError(
            f"environment {opened.env.name} has endless tasks. Set their number with --limit"
        )
    return parse_config(data, f"environment {opened.env.name}"), opened


def _defaults(opened: Opened, mode: str) -> dict[str, Any]:
    """Key of the run's configuration -> the environment's value."""
    env = opened.env.config
    limits = env.limits.model_dump(exclude_unset=True) if env.limits is not None else {}
    toolsets = env.toolsets if env.sandboxed or env.toolsets is not None else ()
    return {
        "dataset.repeats": 1 if mode == "evaluate" else env.group_size,
        "agent.preset": "rl",
        "agent.toolsets": list(toolsets) if toolsets is not None else None,
        "agent.system_prompt": env.system_prompt,
        **{f"agent.limits.{name}": value for name, value in limits.items()},
        "sandbox.image": env.image,
        "sandbox.network": env.network or None,
    }


class _EnvRow(LazyRow, frozen=True, kw_only=True, gc=False):
    """A task of a stream, as a row."""

    task: Task | None
    error: str | None = None

    def parse(self) -> TaskRow:
        """Return the task, which is parsed already."""
        return TaskRow(
            index=self.index,
            place=self.place,
            task_hash=self.task_hash,
            task=self.task,
            error=self.error,
            raw_id=self.task.id if self.task else self.task_hash[:12],
            repeats=self.repeats,
        )


def env_rows(opened: Opened, limit: int | None = None) -> Iterator[LazyRow]:
    """Yield the task stream of an environment as rows, lazily.

    Raises: UserError (with method, file and line) when `tasks` raises or yields anything but tasks,
        and for invalid tools of the first task, if no `setup` is needed before.
    """
    bare = type(opened.env).setup is Environment.setup
    for index, task in enumerate(_stream(opened, limit)):
        if index == 0 and bare:
            tools_of(opened.env, task)
        yield _row(opened, task, index)


def _stream(opened: Opened, limit: int | None) -> Iterator[Task]:
    env, section = opened.env, opened.section
    guard = functools.partial(
        faults.user_code, env.name, env.tasks, UserError, described=(HermesError,)
    )
    with guard():
        returned: Any = env.tasks(section.split, section.seed)
    if not isinstance(returned, Iterable):
        what = f"returned {type(returned).__name__}; yield tasks, or return a list of them"
        raise UserError(faults.describe_misuse(env.name, env.tasks, what))
    stream = iter(returned)
    for count in itertools.count() if limit is None else range(limit):
        with guard():
            task: Any = next(stream, _END)
        if task is _END:
            return
        if why := _unfit(task, {"split": section.split, "position": count}):
            frame = getattr(stream, "gi_frame", None)
            line = frame.f_lineno if frame is not None else None
            raise UserError(faults.describe_misuse(env.name, env.tasks, why, line))
        yield task


_END = object()


def _unfit(task: object, placed: Mapping[str, Any]) -> str | None:
    """Explain why something that a stream yields is not a valid task; None when it is.

    Args:
        placed: columns that the run sets.
    """
    if not isinstance(task, Task):
        return f"yields {type(task).__name__} instead of Task. Use make_task(...)"
    fields = [name for name, value in placed.items() if task.metadata.get(name, value) != value]
    return (
        f"yields a task with a column {fields[0]!r}, which the run sets. Rename it"
        if fields
        else None
    )


def _row(opened: Opened, task: Task, index: int) -> LazyRow:
    split = opened.section.split
    place = f"{opened.env.name}/{split} task {index}"
    placed = {**task.metadata, "split": split, "position": index}
    found = msgspec.structs.replace(task, metadata=placed)
    error = None
    try:
        task_hash = digest(hashed(found))
        msgspec.msgpack.encode(found)  # fails for what can be neither sent nor stored
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError) as fault:
        task_hash, error = digest({"bad task": place, "why": str(fault)}), f"bad task: {fault}"
    return _EnvRow(
        index=index,
        place=place,
        task_hash=task_hash,
        repeats=task.repeats,
        quick=True,
        raw={},
        columns={},
        task=None if error else found,
        error=error,
    )


def hashed(task: Task) -> dict[str, Any]:
    """Return the content that identifies a task: all but its oracle and its repeats."""
    form = msgspec.to_builtins(msgspec.structs.replace(task, oracle=None, repeats=None, prompt=()))
    return {**form, "prompt": [to_openai(message) for message in task.prompt]}


def tools_of(env: AnyEnvironment, task: Task) -> Mapping[str, Tool]:
    """Return the environment's own tools for a task, by name. Raises: UserError."""
    with faults.user_code(env.name, env.tools, UserError):
        returned = list(env.tools(task))
    tools: dict[str, Tool] = {}
    for one in returned:
        what = None
        if not isinstance(one, Tool):
            what = f"returned {type(one).__name__} instead of Tool. Make it with @tool(...)"
        elif one.name in tools:
            what = f"returned {one.name!r} twice"
        elif why := why_not_json(one.schema):
            what = f"returned {one.name!r}, whose schema {why}"
        if what is not None:
            raise UserError(faults.describe_misuse(env.name, env.tools, what))
        tools[one.name] = one
    return tools
