"""The results of a module's calls, as short digests.

This file is also a program for the grading sandbox: it reads the calls, imports the module from the
workspace and writes the digests to descriptor 3. The sandbox has no right results, so code of the
agent can learn only the calls there. It needs Python 3.9 without packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import sys
from typing import Any

DIGITS = 8
"""Hexadecimal digits of a result's digest."""


def canonical_text(value: Any) -> str:
    """Return a value as text: tuples as lists, sorted keys, decimals to nine places.

    Only exact builtin classes have a value: an object of the agent could claim to equal anything.
    """
    kind = type(value)
    if kind in (list, tuple):
        return "[" + ", ".join([canonical_text(v) for v in value]) + "]"
    if kind is dict:
        pairs = sorted((canonical_text(k), canonical_text(v)) for k, v in value.items())
        return "{" + ", ".join([f"{k}: {v}" for k, v in pairs]) + "}"
    if kind is float:
        return repr(round(value, 9))
    if kind in (int, str, bool, type(None)):
        return repr(value)
    return f"<{kind.__name__}>"


def answer(module: Any, call: str, arguments: Any) -> str:
    """Return the result of a call as text: its value, or the class of its exception.

    Args:
        call: a function's name.
        arguments: [positional, by name].
    """
    positional, named = json.loads(json.dumps(arguments))  # a copy, which the call may change
    try:
        return canonical_text(getattr(module, call)(*positional, **named))
    except Exception as error:  # the exception is the result
        return f"raises {type(error).__name__}"


def digest(text: str) -> str:
    """Hash a result."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:DIGITS]


def main() -> None:
    """Write the line `MODULE digest digest ...` to descriptor 3."""
    name, out = sys.argv[1], os.dup(3)
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "calls.json"), encoding="utf-8") as file:
        calls = json.load(file)[name]
    sys.path.append(os.environ["WORKSPACE"])
    with contextlib.redirect_stdout(io.StringIO()):
        module = importlib.import_module(f"toolbox.{name}")
        found = [digest(answer(module, call, arguments)) for call, arguments in calls]
    os.write(out, (" ".join([name, *found]) + "\n").encode())


if __name__ == "__main__":
    main()
