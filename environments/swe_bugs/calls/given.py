"""Arguments of a call, as people write them."""

from __future__ import annotations

from typing import Any

Given = tuple[list[Any], dict[str, Any]]


def given(*positional: Any, **named: Any) -> Given:
    """Positional arguments and those by name. Plain data, as JSON holds it."""
    return list(positional), named
