"""One-line messages for bugs in environments: environment, method, file and line."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hermes_rl.errors import CannotJudge

_CHARS = 300
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class NoVerdict(CannotJudge):
    """No verdict after all allowed attempts: asking again would only cost more."""


def describe_error(name: str, method: Callable[..., Any], error: BaseException) -> str:
    """Describe an exception that a method raised.

    Args:
        name: of the environment.
        method: bound or not; its definition is the place when no frame of the traceback is in the
            user's code.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:_CHARS]
    return f"environment {name}: {_name(method)}() raised {text} ({_raised_at(method, error)})"


def describe_import_error(error: BaseException, file: str | None = None) -> str:
    """Describe an exception of the user's code during import, with its place.

    Args:
        file: the file that was imported; a SyntaxError names its own.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_CHARS]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({_short(error.filename)}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not f.filename.startswith((_PACKAGE, "<"))]
    return (
        f"{text} ({_short(user_frames[-1].filename)}:{user_frames[-1].lineno})"
        if user_frames
        else text
    )


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


def _name(method: Callable[..., Any]) -> str:
    return getattr(method, "__name__", repr(method))


def _raised_at(method: Callable[..., Any], error: BaseException) -> str:
    """The innermost frame of the user's own files; of any file when there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename]
    user_frames = [f for f in frames if not f.filename.startswith((_PACKAGE, "<"))]
    home = _file_of(method)
    here = [f for f in user_frames if home and Path(f.filename).parent == Path(home).parent]
    for found in (here, user_frames):
        if found:
            return f"{_short(found[-1].filename)}:{found[-1].lineno}"
    return _defined_at(method)


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
