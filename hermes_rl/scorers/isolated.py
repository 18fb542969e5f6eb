"""Scorers that may take any time or crash: regex, json, math, python. Each runs in a child process.

The process answers one JSON line on standard output for each on standard input. The kernel ends it
when a request has used its CPU time (SIGPROF), which also stops a regular expression that holds the
interpreter. CPU time, so that a busy machine fails no answer.
"""

from __future__ import annotations

import asyncio
import cmath
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hermes_rl.scorers.answers import Score, commitments, scored, sole
from hermes_rl.scorers.code import fenced

GROUP = "hermes_rl.scorers"
"""Entry points of packages that bring functions for `python`."""
CPU_S = 10.0
"""CPU time of one request."""
MEMORY_BYTES = 4 << 30


def regex(options: Mapping[str, Any], answer: str) -> Score:
    """The pattern occurs; with `target`, all that it finds is this text."""
    flags = re.IGNORECASE if options.get("ignore_case") else 0
    pattern = re.compile(options["pattern"], flags)
    target = options.get("target")
    if target is None:
        return scored(pattern.search(answer) is not None, "")
    group = min(pattern.groups, 1)
    value, why = sole([(match[group] or "").strip() for match in pattern.finditer(answer)])
    if value is None:
        return Score(0.0, why)
    same = value.casefold() == target.casefold() if flags else value == target
    return scored(same, f"answer {value[:80]!r}")


class _Refused(ValueError):
    """Not one JSON document."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _Refused("a key occurs twice")
    return made


def _constant(name: str) -> Any:
    raise _Refused(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Refused(f"{text[:20]} is beyond all floats")
    return value


def document(answer: str) -> Any:
    """The JSON that an answer is, or that its one fenced block holds. Raises: ValueError."""
    blocks = [text for tag, text in fenced(answer) if tag in ("", "json")] or [answer]
    values = [
        json.loads(block, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)
        for block in blocks
    ]
    if not all(_same(value, values[0]) for value in values[1:]):
        raise _Refused("several different documents")
    return values[0]


def structured(options: Mapping[str, Any], answer: str) -> Score:
    """The answer is JSON that fits the schema; `fields` counts those that are as expected."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    try:
        value = document(answer)
    except (ValueError, RecursionError) as error:
        return Score(0.0, f"not JSON: {error}"[:200])
    if "schema" in options:  # an empty registry: a schema fetches nothing
        validator = Draft202012Validator(options["schema"], registry=Registry())
        if (fault := next(validator.iter_errors(value), None)) is not None:
            return Score(0.0, f"{fault.json_path}: {fault.message}"[:200])
    if "target" in options and not _same(value, options["target"]):
        return Score(0.0, "another value")
    wrong = [
        path
        for path, wanted in options.get("fields", {}).items()
        if not _same(_at(value, path), wanted)
    ]
    share = 1 - len(wrong) / len(options["fields"]) if wrong else 1.0
    return Score(share, f"wrong: {', '.join(wrong)}"[:200] if wrong else "")


def _same(value: Any, wanted: Any) -> bool:
    """Equality of JSON: true is not 1."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(_same(value[k], wanted[k]) for k in value)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    return bool(value == wanted)


_NOTHING = object()


def _at(value: Any, path: str) -> Any:
    """The value at a dotted path, such as `items.0.name`."""
    for name in path.split("."):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return _NOTHING
    return value


def mathematics(options: Mapping[str, Any], answer: str) -> Score:
    """The expression that the answer commits itself to equals the target (package math-verify)."""
    target = formula(options["target"])
    stated = commitments(answer) or [answer.strip().splitlines()[-1] if answer.strip() else ""]
    stated = [_formula(one) for one in stated]
    values = [_expression(one) for one in dict.fromkeys(stated)]
    if not values[0]:
        return Score(0.0, "no expression found")
    if not all(_equal(values[0], other) for other in values[1:]):
        return Score(0.0, "several different answers")
    if _is_false(values[0][0]):
        return Score(0.0, f"a false equation: {stated[0][:80]!r}")
    return scored(_equal(_expression(target), values[0]), f"answer {stated[0][:80]!r}")


def formula(target: str) -> str:
    """The expression of a target, which may be a whole solution."""
    return (commitments(target) or [target])[-1]


def _formula(text: str) -> str:
    """The formula of a sentence such as `$4$. I hope it is correct.`"""
    found = re.match(r"[^$\d]*\$([^$]+)\$[^$]*\Z", text)
    return found[1] if found else re.split(r"(?<=\S)\.\s", text)[0]


def _expression(text: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{text.strip().strip('$').strip()}}}", parsing_timeout=None)


def _is_false(value: Any) -> bool:
    """Whether it is an equation of two numbers that differ by more than rounding (1 %)."""
    if getattr(value, "rel_op", None) != "==" or value.free_symbols:
        return False
    left, right = (complex(side) for side in value.args)
    return not cmath.isclose(left, right, rel_tol=0.01)


def _equal(one: Any, other: Any) -> bool:
    from math_verify import verify

    return bool(one and other and verify(one, other, timeout_seconds=None))


def user_function(options: Mapping[str, Any], answer: str, row: Mapping[str, Any]) -> Score:
    """What a user's function returns: a number, a truth value, `(number, reason)` or
    `(number, reason, metrics)`, where metrics maps names to numbers."""
    value = _load(options["function"])(answer, {**row, **options.get("options", {})})
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    number, reason, metrics = ((*value, {})[:3]) if isinstance(value, tuple) else (value, "", {})
    number = float(number)
    metrics = {str(name): float(figure) for name, figure in metrics.items()}
    for figure in (number, *metrics.values()):
        if not math.isfinite(figure):
            raise ValueError(f"it returned {figure}, which is not finite")
    return Score(number, str(reason), metrics)


async def _awaited(value: Any) -> Any:
    return await value


@functools.cache
def _load(place: str) -> Callable[..., Any]:
    """The function at `package.module:name` or `path/file.py:name`."""
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found: Callable[..., Any] = getattr(module, name)
    return found


def function_place(name: str, functions: Mapping[str, str]) -> str | None:
    """Where a function of `python` is: named by the run, or by an installed package. A row cannot
    name code itself: datasets are data."""
    for entry in entry_points(group=GROUP):
        functions = {entry.name: entry.value, **functions}
    return functions.get(name)


_IMPORTS = {
    "math": "math_verify",
    "json": "jsonschema",
    "hermes_rl.scorers.ifeval:follows": "if_verifiable.ifeval.instructions_registry",
}
"""Scorer, or place of a function -> what takes seconds to import."""
_INSTALL = {
    **dict.fromkeys(("math_verify", "if_verifiable"), " Run: pip install 'hermes-rl[eval]'"),
    "bfcl_eval": " Run: pip install --no-deps bfcl-eval",
}
"""Package -> how to install it."""

CHILD = {"regex": regex, "json": structured, "math": mathematics}


def _prepare(kind: str, options: Mapping[str, Any]) -> None:
    """Import what a scorer needs, before its time runs."""
    if kind == "python":
        kind = options["function"]
        _load(kind)
    if kind in _IMPORTS:
        importlib.import_module(_IMPORTS[kind])


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    kind, options, answer = request["type"], request["options"], request["answer"]
    try:
        _prepare(kind, options)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        if kind == "python":
            result = user_function(options, answer, request["row"])
        else:
            result = CHILD[kind](options, answer)
    except (MemoryError, RecursionError) as error:
        result = Score(0.0, f"{type(error).__name__} while it was judged")
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        return {"fault": f"{error}.{_INSTALL.get(package, '')}"}
    except Exception as error:  # a boundary: math-verify and users' functions may raise anything
        if kind == "python":
            return {"fault": f"{options['function']}: {type(error).__name__}: {error}"}
        result = Score(0.0, f"{type(error).__name__}: {error}"[:200])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"value": result.value, "reason": result.reason[:500], "metrics": result.metrics}


def main() -> None:
    """Serve requests until standard input ends."""
    logging.disable(logging.WARNING)  # math-verify warns that it has no time limit of its own
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's function prints
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=replies, flush=True)
