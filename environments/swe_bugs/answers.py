"""What a module answers to calls, as short digests. Also a program for the grading box, where it
reads the calls, imports the module from the workspace and writes its digests to descriptor 3.

The box holds no right answers: whoever runs there with the module under test can learn the calls
and nothing more. It needs Python 3.9 and nothing else.
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
"""Hexadecimal digits of an answer's digest."""


def told(value: Any) -> str:
    """A value as text: lists and tuples alike, keys of dicts in order, decimals to nine places.

    Only what is exactly of a builtin class counts: nothing that says that it is equal to all.
    """
    kind = type(value)
    if kind in (list, tuple):
        return "[" + ", ".join([told(v) for v in value]) + "]"
    if kind is dict:
        pairs = sorted((told(k), told(v)) for k, v in value.items())
        return "{" + ", ".join([f"{k}: {v}" for k, v in pairs]) + "}"
    if kind is float:
        return repr(round(value, 9))
    if kind in (int, str, bool, type(None)):
        return repr(value)
    return f"<{kind.__name__}>"


def answer(module: Any, call: str, arguments: Any) -> str:
    """What a call gives, as text: its value, or the exception's class.

    Args:
        call: a function's name.
        arguments: [positional, by name].
    """
    positional, named = json.loads(json.dumps(arguments))  # what a call changes is its own
    try:
        return told(getattr(module, call)(*positional, **named))
    except Exception as error:  # whatever the code under test raises is its answer
        return f"raises {type(error).__name__}"


def digest(text: str) -> str:
    """Of an answer."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:DIGITS]


def main() -> None:
    """`answers.py MODULE`: one line `MODULE digest digest ...` on descriptor 3."""
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
