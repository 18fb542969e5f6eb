"""Refuses to resume a run with another configuration, and says in one line what changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_rl.errors import StoreError
from hermes_rl.identity import canonical_json

_SHOWN = 40
"""Characters of a value."""


def refuse_changes(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises: StoreError when the identities differ."""
    if canonical_json(before) == canonical_json(now):
        return
    old, new = dict(_flat(before)), dict(_flat(now))
    names = [n for n in {**old, **new} if _code(old, n) != _code(new, n)]
    changes = [f"{_short(n, names)} {_text(old.get(n))}, now {_text(new.get(n))}" for n in names]
    keep = f"Keep {_text(old.get(names[0]))}" if len(names) == 1 else "Keep these"
    raise StoreError(
        f"{path} was made with {'; '.join(changes)}. {keep}, or choose --out {_free(path)}"
    )


def _code(values: Mapping[str, Any], name: str) -> str:
    return canonical_json(values[name]) if name in values else ""


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _short(name: str, names: list[str]) -> str:
    """The last part of a dotted name, when no other changed name ends alike; the whole name within
    an environment, whose parts are called like others of the run."""
    if name.startswith("env."):
        return name
    leaf = name.rpartition(".")[2]
    alike = [n for n in names if n.rpartition(".")[2] == leaf]
    return leaf if len(alike) == 1 else name


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value)
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _free(path: Path) -> Path:
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")
