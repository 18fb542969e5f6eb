"""Checks a JSON body against the `TypedDict` that an official package declares for it."""

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from typing_extensions import is_typeddict


def misfits(value: Any, kind: Any, path: str = "body") -> list[str]:
    """What does not fit, one line each: undeclared and missing keys, and values of other types."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return []
    if origin in (Required, NotRequired, Annotated, typing.Required, typing.NotRequired):
        return misfits(value, args[0], path)
    if origin in (Union, types.UnionType):
        tried = [misfits(value, one, path) for one in args]
        return [] if [] in tried else min(tried, key=len)
    if origin is Literal:
        return [] if value in args else [f"{path} is {value!r}, not one of {args}"]
    if is_typeddict(kind):
        return _of_mapping(value, kind, path)
    if origin in (dict, Mapping):
        return [] if isinstance(value, dict) else [f"{path} is not an object"]
    if origin in (list, Sequence, Iterable, tuple):
        if not isinstance(value, list):
            return [f"{path} is not a list"]
        return [m for n, one in enumerate(value) for m in misfits(one, args[0], f"{path}.{n}")]
    return _of_scalar(value, kind, path)


def _of_mapping(value: Any, kind: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path} is not an object"]
    hints = typing.get_type_hints(kind, include_extras=True)
    lines = [f"{path}.{name} is not declared" for name in value if name not in hints]
    lines += [f"{path}.{name} is missing" for name in kind.__required_keys__ if name not in value]
    for name in value:
        if name in hints:
            lines += misfits(value[name], hints[name], f"{path}.{name}")
    return lines


def _of_scalar(value: Any, kind: Any, path: str) -> list[str]:
    if kind is None or kind is type(None):
        fits = value is None
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif isinstance(kind, type):
        fits = isinstance(value, kind)
    else:
        return []
    return [] if fits else [f"{path} is {value!r}, not {kind}"]
