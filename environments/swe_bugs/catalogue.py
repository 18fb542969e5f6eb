"""The modules of the library, calls of their functions, and which changes are bugs.

A change is a bug when enough calls show it. That was proved once and is kept in catalogue.json;
`write()` proves it again after a change of modules, calls or kinds of changes.
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
"""So many calls of each function, the first ones, stand in the visible tests. All of them are made
in the grading box."""


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
"""A bug counts when so many calls show it: one is told in the task, others stay hidden."""
UNSEEN = 2
"""Of those, so many stand in no visible test."""
_CALL_S = 0.1
"""Seconds of computing after which a call counts as endless."""


class Hangs(BaseException):
    """A call took too long. Not an Exception, which the code under test may catch."""


@cache
def source(module: str) -> str:
    """A module's text, without a bug. It is data: a formatter would change tasks and bugs."""
    return (HERE / "toolbox" / f"{module}.py.txt").read_text(encoding="utf-8")


@cache
def loaded(module: str, text: str) -> ModuleType:
    """A module from its text, in no table of modules; it must keep no state."""
    made = ModuleType(module)
    exec(compile(text, f"{module}.py", "exec"), made.__dict__)
    return made


@cache
def right(module: str) -> tuple[str, ...]:
    """What the module without a bug answers to each of its calls."""
    made = loaded(module, source(module))
    return tuple(answer(made, call.function, call.arguments) for call in CALLS[module])


@cache
def right_digests(module: str) -> tuple[str, ...]:
    """The digests of `right`."""
    return tuple(digest(text) for text in right(module))


@cache
def bugs(module: str) -> tuple[tuple[Mutant, tuple[int, ...]], ...]:
    """The module's bugs, each with the places of the calls that show it, by the text's order."""
    kept = _stored()[module]
    return tuple((m, tuple(kept[m.key])) for m in mutants(source(module)) if m.key in kept)


@cache
def _stored() -> dict[str, dict[str, list[int]]]:
    read: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {module: entry["bugs"] for module, entry in read.items()}


def made() -> dict[str, dict[str, Any]]:
    """The catalogue, by trying every change against every call. Needs the main thread.

    A change that never ends, or that too few calls show, is left out.
    """
    before = signal.signal(signal.SIGVTALRM, _hang)
    try:
        return {module: _tried(module) for module in MODULES}
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _tried(module: str) -> dict[str, Any]:
    text = source(module)
    kept = {}
    for mutant in mutants(text):
        shown = _shown(module, mutant.applied(text))
        unseen = [n for n in shown if not CALLS[module][n].visible]
        if len(shown) >= ENOUGH and len(unseen) >= UNSEEN:
            kept[mutant.key] = shown
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "bugs": kept}


def _shown(module: str, text: str) -> list[int]:
    """Places of the calls that a changed module answers in another way; none when one hangs."""
    collects = gc.isenabled()
    # Raised in a callback of the garbage collector, Hangs would be lost, and reported as a fault.
    gc.disable()
    try:
        return list(_differing(module, text))
    except Hangs:
        return []
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if collects:
            gc.enable()


def _differing(module: str, text: str) -> Iterator[int]:
    _give_time()
    changed = loaded.__wrapped__(module, text)
    for number, (call, wanted) in enumerate(zip(CALLS[module], right(module), strict=True)):
        _give_time()
        if answer(changed, call.function, call.arguments) != wanted:
            yield number


def _give_time() -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, _CALL_S)


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hangs


def written(call: Call, module: str) -> str:
    """A call as a person writes it."""
    positional, named = call.arguments
    given = [repr(a) for a in positional] + [f"{k}={v!r}" for k, v in named.items()]
    return f"{module}.{call.function}({', '.join(given)})"


def write() -> None:
    """Write the catalogue anew."""
    lines = json.dumps(made(), separators=(",", ":")).replace("},", "},\n")
    FILE.write_text(lines + "\n", encoding="utf-8")
