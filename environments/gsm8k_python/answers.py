"""Reading the number that an answer states, as a number."""

from __future__ import annotations

import re
from fractions import Fraction

MARK = "####"
"""Before the final number, as in the GSM8K data set."""
TOLERANCE = Fraction(1, 10**6)
"""What binary fractions may leave behind: 0.1 + 0.2 is 0.3."""

_NUMBER = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-+]?\$?\.\d+", re.ASCII)
_MINUS = "\N{MINUS SIGN}"
_DIGITS = 40
"""A number with more than these is no answer; it would only cost time."""


def stated(text: str | None) -> Fraction | None:
    """The number on the last line that begins with `####`; None without such a line, or when it
    does not hold exactly one number."""
    lines = [line.strip() for line in (text or "").splitlines()]
    marked = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not marked:
        return None
    found = _NUMBER.findall(marked[-1].replace(_MINUS, "-"))
    return number(found[0]) if len(found) == 1 else None


def number(text: str) -> Fraction | None:
    """The value of `1,234.50` or `$12`; None for what is none."""
    plain = text.strip().replace(",", "").replace("$", "")
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", plain, re.ASCII) or len(plain) > _DIGITS:
        return None
    return Fraction(plain)


def same(given: Fraction | None, wanted: Fraction) -> bool:
    """Whether a stated number is the wanted one."""
    return given is not None and abs(given - wanted) <= TOLERANCE
