"""Lengths of time as people write them: `1h30m`, `45s`, `2d`."""

from __future__ import annotations

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse(text: str) -> int:
    """Seconds of a duration such as `1h30m`; blanks are ignored, a bare number is seconds.

    Raises ValueError for an unknown unit, a unit without a number, and an empty text.
    """
    total, digits = 0, ""
    compact = text.replace(" ", "").lower()
    if not compact:
        raise ValueError("empty duration")
    for char in compact:
        if char.isdigit():
            digits += char
            continue
        if not digits or char not in UNITS:
            raise ValueError(f"cannot read {text!r}")
        total += int(digits) * UNITS[char]
        digits = ""
    if digits:
        total += int(digits)
    return total


def render(seconds: int, parts: int = 4) -> str:
    """The shortest writing of a length of time: `1h30m`. Zero is `0s`; a minus stands first.

    `parts` is the most units to write; what is smaller than the last of them is dropped.
    """
    if seconds == 0:
        return "0s"
    rest, found = abs(seconds), []
    for unit, size in UNITS.items():
        count, rest = divmod(rest, size)
        if count > 0:
            found.append(f"{count}{unit}")
    text = "".join(found[:parts])
    return "-" + text if seconds < 0 else text


def clock(seconds: int) -> str:
    """`H:MM:SS`, or `M:SS` below an hour."""
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    if hour > 0:
        return f"{hour}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def round_to(seconds: int, step: int, up: bool = False) -> int:
    """The nearest multiple of `step` seconds, halves away from zero being rounded up; with `up` the
    next multiple that is not smaller. Raises ValueError for a step below 1."""
    if step < 1:
        raise ValueError("step must be 1 or more")
    below = seconds // step * step
    if below == seconds:
        return seconds
    if up or (seconds - below) * 2 >= step:
        return below + step
    return below
