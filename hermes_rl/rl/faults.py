"""One-line messages for bugs in environments: environment, method, file and line."""

from __future__ import annotations

import asyncio
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hermes_rl.errors import HermesError, UserError

_CHARS = 300
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


@contextmanager
def user_code(
    name: str,
    method: Callable[..., Any],
    fault: type[HermesError],
    *,
    described: tuple[type[HermesError], ...] = (),
) -> Iterator[None]:
    """Turn what a method of an environment raises into a fault with its place.

    Args:
        described: HermesErrors that become a fault too; the others pass unchanged.
    """
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as raised:  # a boundary: user code
        task = asyncio.current_task() if isinstance(raised, asyncio.CancelledError) else None
        if task is not None and task.cancelling():
            raise  # of this rollout, not of a task that the code waited for
        error = raised
        while isinstance(error, ExceptionGroup):  # of a TaskGroup: the first one ended the others
            error = error.exceptions[0]
        if isinstance(error, HermesError) and not isinstance(error, described):
            raise error from error.__cause__
        raise fault(describe_error(name, method, error)) from raised


@contextmanager
def user_import(what: str) -> Iterator[None]:
    """Turn what the user's code raises during import into a UserError with its place.

    Args:
        what: a file or a module's name.
    """
    try:
        yield
    except HermesError:
        raise
    except Exception as error:  # a boundary: user code
        frames, place = _user_frames(error), ""
        if isinstance(error, SyntaxError) and error.filename:
            place = f" ({_short(error.filename)}:{error.lineno})"
        elif frames:
            place = f" ({_short(frames[-1].filename)}:{frames[-1].lineno})"
        raise UserError(f"{what}: cannot be imported: {_text(error)}{place}") from error


def describe_error(name: str, method: Callable[..., Any], error: BaseException) -> str:
    """Describe an exception that a method raised.

    Args:
        name: of the environment.
        method: bound or not; its definition is the place when no frame of the traceback is in the
            user's code.
    """
    frames = _user_frames(error)
    home = _file_of(method)
    here = [f for f in frames if home and Path(f.filename).parent == Path(home).parent]
    found = here or frames
    place = f"{_short(found[-1].filename)}:{found[-1].lineno}" if found else _defined_at(method)
    text = _text(error).removesuffix(":")
    return f"environment {name}: {_name(method)}() raised {text} ({place})"


def describe_misuse(
    name: str, method: Callable[..., Any], what: str, line: int | None = None
) -> str:
    """Describe a method that returned something invalid.

    Args:
        line: in its file; None is the first line of the method.
    """
    place = _defined_at(method)
    if line is not None:
        place = f"{place.rpartition(':')[0]}:{line}"
    return f"environment {name}: {_name(method)}() {what} ({place})"


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_CHARS]


def _name(method: Callable[..., Any]) -> str:
    return getattr(method, "__name__", repr(method))


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if f.filename and not f.filename.startswith((_PACKAGE, "<"))]


def _defined_at(method: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:
        return _short(_file_of(method) or "?")
    return f"{_short(code.co_filename)}:{code.co_firstlineno}"


def _file_of(method: Callable[..., Any]) -> str | None:
    try:
        return inspect.getsourcefile(method)
    except TypeError:
        return None


def _short(path: str) -> str:
    near = os.path.relpath(path)
    return path if near.startswith("..") else near
