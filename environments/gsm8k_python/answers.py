"""Parse the number in an answer."""

from __future__ import annotations

import re
from fractions import Fraction

MARK = "####"
"""Text before the final number, as in the GSM8K dataset."""
TOLERANCE = Fraction(1, 10**6)
"""Allowed rounding error of binary fractions: 0.1 + 0.2 is 0.3."""

_NUMBER = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-+]?\$?\.\d+", re.ASCII)
_MINUS = "\N{MINUS SIGN}"
_DIGITS = 40
"""Longer numbers are not accepted, to save time."""


def parse_answer(text: str | None) -> Fraction | None:
    """Parse the number on the last line that begins with `####`.

    None without such a line, or if the line does not contain exactly one number.
    """
    lines = [line.strip() for line in (text or "").splitlines()]
    marked = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not marked:
        return None
    found = _NUMBER.findall(marked[-1].replace(_MINUS, "-"))
    return parse_number(found[0]) if len(found) == 1 else None


def parse_number(text: str) -> Fraction | None:
    """Parse `1,234.50` or `$12`; None for anything else."""
    plain = text.strip().replace(",", "").replace("$", "")
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", plain, re.ASCII) or len(plain) > _DIGITS:
        return None
    return Fraction(plain)


def is_correct(number: Fraction | None, wanted: Fraction) -> bool:
    """Whether a number is the wanted one."""
    return number is not None and abs(number - wanted) <= TOLERANCE
