"""The modules of the library, calls of their functions, and which changes are bugs.

A change is a bug if enough calls detect it. catalogue.json stores the bugs; `write()` finds them
again after a change of modules, calls or kinds of changes.
"""

from __future__ import annotations

import gc
import hashlib
import json
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from environments.swe_bugs.answers import answer, digest
from environments.swe_bugs.mutate import Mutant, mutants

HERE = Path(__file__).parent
FILE = HERE / "catalogue.json"
VISIBLE = 2
"""Calls of each function in the visible tests: the first ones. Grading makes all calls."""


class Call(NamedTuple):
    """A call of a function."""

    function: str
    arguments: tuple[list[Any], dict[str, Any]]
    """Positional, and by name."""
    visible: bool


def _calls() -> dict[str, tuple[Call, ...]]:
    listed = json.loads((HERE / "calls.json").read_text(encoding="utf-8"))
    return {
        module: tuple(
            Call(function, (positional, named), number < VISIBLE)
            for function, arguments in functions.items()
            for number, (positional, named) in enumerate(arguments)
        )
        for module, functions in listed.items()
    }


CALLS = _calls()
"""Module -> its calls."""
MODULES = tuple(CALLS)
ENOUGH = 3
"""Calls that must detect a bug: the task reports one, others are hidden."""
UNSEEN = 2
"""Of these, calls that must be in no visible test."""
_CALL_S = 0.1
"""CPU seconds after which a call counts as endless."""


class Hangs(BaseException):
    """A call took too long. Not an Exception, which the code under test may catch."""


@cache
def source(module: str) -> str:
    """Return the source of a correct module. It is data: formatting it would change the tasks."""
    return (HERE / "toolbox" / f"{module}.py.txt").read_text(encoding="utf-8")


@cache
def load(module: str, text: str) -> ModuleType:
    """Load a module from its source, outside of `sys.modules`. It must have no state."""
    loaded = ModuleType(module)
    exec(compile(text, f"{module}.py", "exec"), loaded.__dict__)
    return loaded


@cache
def right_answers(module: str) -> tuple[str, ...]:
    """Return the results of all calls of a correct module."""
    correct = load(module, source(module))
    return tuple(answer(correct, call.function, call.arguments) for call in CALLS[module])


@cache
def right_digests(module: str) -> tuple[str, ...]:
    """Return the digests of `right_answers`."""
    return tuple(digest(text) for text in right_answers(module))


@cache
def bugs(module: str) -> tuple[tuple[Mutant, tuple[int, ...]], ...]:
    """Return the bugs of a module by position, each with the indices of calls that detect it."""
    kept = _stored()[module]
    return tuple((m, tuple(kept[m.key])) for m in mutants(source(module)) if m.key in kept)


@cache
def _stored() -> dict[str, dict[str, list[int]]]:
    read: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {module: entry["bugs"] for module, entry in read.items()}


def build_catalogue() -> dict[str, dict[str, Any]]:
    """Build the catalogue by trying every change with every call, in the main thread.

    Changes that never end, or that too few calls detect, are left out.
    """
    before = signal.signal(signal.SIGVTALRM, _hang)
    try:
        return {module: _find_bugs(module) for module in MODULES}
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _find_bugs(module: str) -> dict[str, Any]:
    text = source(module)
    kept = {}
    for mutant in mutants(text):
        shown = _detecting_calls(module, mutant.applied(text))
        unseen = [n for n in shown if not CALLS[module][n].visible]
        if len(shown) >= ENOUGH and len(unseen) >= UNSEEN:
            kept[mutant.key] = shown
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "bugs": kept}


def _detecting_calls(module: str, text: str) -> list[int]:
    """Return the indices of calls with another result in a changed module; none if one hangs."""
    collects = gc.isenabled()
    # Raised in a callback of the garbage collector, Hangs would be lost, and reported as a fault.
    gc.disable()
    try:
        return list(_differing_calls(module, text))
    except Hangs:
        return []
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if collects:
            gc.enable()


def _differing_calls(module: str, text: str) -> Iterator[int]:
    _start_timer()
    changed = load.__wrapped__(module, text)
    for number, (call, wanted) in enumerate(zip(CALLS[module], right_answers(module), strict=True)):
        _start_timer()
        if answer(changed, call.function, call.arguments) != wanted:
            yield number


def _start_timer() -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, _CALL_S)


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hangs


def format_call(call: Call, module: str) -> str:
    """Return the source of a call."""
    positional, named = call.arguments
    arguments = [repr(a) for a in positional] + [f"{k}={v!r}" for k, v in named.items()]
    return f"{module}.{call.function}({', '.join(arguments)})"


def write() -> None:
    """Write the catalogue."""
    lines = json.dumps(build_catalogue(), separators=(",", ":")).replace("},", "},\n")
    FILE.write_text(lines + "\n", encoding="utf-8")
