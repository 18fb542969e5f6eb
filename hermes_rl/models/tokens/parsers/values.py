"""Arguments that a model writes as bare text, typed by the tool's JSON schema and nothing else.

Text stays text wherever the schema allows a string, or says nothing; otherwise it must be JSON of
the type that the schema asks for. What does not fit stays text, and the tool's own check tells the
model so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_DEPTH = 8
"""References and alternatives that are followed."""


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that a text stands for.

    Args:
        schema: of this argument.
        root: of all arguments: where `$ref` points into.
    """
    kinds = _kinds(schema, root, _DEPTH)
    bare = text.strip()
    if not kinds or "string" in kinds:
        return None if bare == "null" and "null" in kinds else text
    spelled = bare.lower() if bare.lower() in ("true", "false", "null", "none") else bare
    try:
        told = "null" if spelled == "none" else spelled
        value = json.loads(told, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        value = int(value) if "number" not in kinds else value
    return value if _fits(value, kinds) else text


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(digits: str) -> float:
    """Of 1e999 a reader makes infinity, which no JSON can say again."""
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _fits(value: Any, kinds: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES.get(kind, ())) for kind in kinds)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """The types that a schema allows; empty where it says nothing of types."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _kinds(_resolved(reference, root), root, depth - 1)
    told = schema.get("type")
    if isinstance(told, str):
        return {told}
    if isinstance(told, list):
        return {kind for kind in told if isinstance(kind, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        if isinstance(choices, list) and choices:
            return set().union(*(_kinds(choice, root, depth - 1) for choice in choices))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [schema["const"]] if "const" in schema else values
    return {_kind(value) for value in values}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = ((int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
    if value is None:
        return "null"
    return next((name for kind, name in names if isinstance(value, kind)), "string")


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What `#/$defs/NAME` and the like point to; None for anything else."""
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
