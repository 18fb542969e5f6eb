"""Versions of three numbers with an optional pre-release: `1.4.0`, `2.0.0-rc.1`."""

from __future__ import annotations


def parse(text: str) -> tuple[int, int, int, str]:
    """(major, minor, patch, pre-release); missing numbers are 0, a leading `v` is dropped.

    Raises ValueError for anything else.
    """
    plain = text.strip()
    if plain.startswith("v"):
        plain = plain[1:]
    core, _, pre = plain.partition("-")
    numbers = core.split(".")
    if len(numbers) > 3 or not all(n.isdigit() for n in numbers):
        raise ValueError(f"not a version: {text!r}")
    major, minor, patch = [int(n) for n in numbers] + [0] * (3 - len(numbers))
    return major, minor, patch, pre


def compare(one: str, other: str) -> int:
    """-1, 0 or 1. A pre-release is older than its release; its parts between dots are compared as
    numbers where both are numbers, else as text, and a longer one is newer."""
    first, second = parse(one), parse(other)
    if first[:3] != second[:3]:
        return -1 if first[:3] < second[:3] else 1
    if first[3] == second[3]:
        return 0
    if not first[3] or not second[3]:
        return 1 if not first[3] else -1
    left, right = first[3].split("."), second[3].split(".")
    for a, b in zip(left, right):
        if a == b:
            continue
        if a.isdigit() and b.isdigit():
            return -1 if int(a) < int(b) else 1
        return -1 if a < b else 1
    return -1 if len(left) < len(right) else 1


def bump(version: str, part: str = "patch") -> str:
    """The next version: the part is raised, smaller ones become 0, a pre-release is dropped (a bump
    of the patch of a pre-release is its release). Raises ValueError for an unknown part."""
    major, minor, patch, pre = parse(version)
    if part == "major":
        return f"{major + 1}.0.0"
    if part == "minor":
        return f"{major}.{minor + 1}.0"
    if part != "patch":
        raise ValueError(f"unknown part: {part!r}")
    if pre:
        return f"{major}.{minor}.{patch}"
    return f"{major}.{minor}.{patch + 1}"


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version meets all demands, separated by commas: `>=1.2,<2`, `==1.4.0`, `!=1.5`,
    `^1.2` (at least that, same major). Raises ValueError for a demand without an operator."""
    for demand in wanted.split(","):
        plain = demand.strip()
        if plain.startswith("^"):
            same = parse(version)[0] == parse(plain[1:])[0]
            if not same or compare(version, plain[1:]) < 0:
                return False
            continue
        sign = plain[:2] if plain[1:2] == "=" else plain[:1]
        order = compare(version, plain[len(sign) :])
        if sign not in (">=", "<=", "==", "!=", ">", "<"):
            raise ValueError(f"no operator in {demand!r}")
        fits = (order > 0 and sign in (">", ">=", "!=")) or (
            order < 0 and sign in ("<", "<=", "!=")
        )
        if not fits and not (order == 0 and sign in (">=", "<=", "==")):
            return False
    return True


def newest(versions: list[str], pre: bool = False) -> str | None:
    """The newest of some versions; pre-releases count only with `pre`. None of none."""
    best = None
    for version in versions:
        if parse(version)[3] and not pre:
            continue
        if best is None or compare(version, best) > 0:
            best = version
    return best
