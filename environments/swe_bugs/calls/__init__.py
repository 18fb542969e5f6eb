"""Calls of each module's functions: the first two of a function stand in the visible tests, all of
them in the grading box."""

from __future__ import annotations

from typing import NamedTuple

from environments.swe_bugs.calls import numbers, texts
from environments.swe_bugs.calls.given import Given

VISIBLE = 2


class Call(NamedTuple):
    """A call of a function."""

    function: str
    arguments: Given
    visible: bool


CALLS: dict[str, tuple[Call, ...]] = {
    module: tuple(
        Call(function, arguments, number < VISIBLE)
        for function, listed in functions.items()
        for number, arguments in enumerate(listed)
    )
    for module, functions in sorted({**numbers.CALLS, **texts.CALLS}.items())
}
"""Module -> its calls."""
