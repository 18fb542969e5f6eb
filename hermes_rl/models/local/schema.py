"""JSON schemas that the engine's grammar surely understands.

The engine does not refuse a schema with a keyword that it cannot compile: it drops the grammar and
the model writes freely. So a schema is cut down to the keywords that the grammar knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_TIGHT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""One spelling of the white space, the one that the chat templates replay."""


def step_schema(offered: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of one step: a call of one of the offered functions.

    Args:
        offered: the parameters' schema of each function, by name.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": arguments_schema(parameters)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in offered.items()
    ]
    return {"anyOf": calls, "x-guidance": _TIGHT}


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: an object of the required ones, if any is required.

    Models this small fill in every optional argument that they may, with defaults copied from its
    description: that doubles the tokens of a call and adds mistakes. So they are not let to.
    """
    simple = simplify(parameters)
    if simple.get("type") != "object":
        return {"type": "object"}
    if not simple.get("required"):
        return simple
    needed = {name: simple["properties"][name] for name in simple["required"]}
    return {**simple, "properties": needed, "additionalProperties": False}


def answer_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a structured answer."""
    return {**simplify(schema), "x-guidance": _TIGHT}


def simplify(schema: object) -> dict[str, Any]:
    """The schema with only the keywords that the grammar knows."""
    if not isinstance(schema, Mapping):
        return {}
    for choice in ("anyOf", "oneOf"):
        if options := _options(schema.get(choice)):
            return {"anyOf": options}
    if isinstance(values := schema.get("enum"), list) and values:
        return {"enum": values}
    if "const" in schema:
        return {"const": schema["const"]}
    kind = _kind(schema)
    if kind == "object":
        return _object(schema)
    if kind == "array":
        return {"type": "array", "items": simplify(schema.get("items"))}
    return {} if kind is None else {"type": kind}


def _options(options: object) -> list[dict[str, Any]]:
    if not isinstance(options, Sequence) or isinstance(options, str):
        return []
    return [simplify(option) for option in options]


def _kind(schema: Mapping[str, Any]) -> str | list[str] | None:
    """The type: one known name, a list of known scalar names, or None for any."""
    kind = schema.get("type")
    if kind is None and "properties" in schema:
        return "object"
    if isinstance(kind, list) and all(isinstance(one, str) for one in kind):
        known = [one for one in kind if one in _TYPES]
        return known if known == kind and known else None
    return kind if isinstance(kind, str) and kind in _TYPES else None


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An object; what its schema does not name may not be written unless it says so."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return {"type": "object"}
    required = schema.get("required")
    named = required if isinstance(required, list) else []
    return {
        "type": "object",
        "properties": {name: simplify(inner) for name, inner in properties.items()},
        "required": [name for name in named if name in properties],
        "additionalProperties": bool(schema.get("additionalProperties", False)),
    }
