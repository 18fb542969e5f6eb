"""Lists of records (dicts with the same keys): choose, sort, group, page."""

from __future__ import annotations

from typing import Any


def where(records: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The records that fit. `name=value` is equality; `name__min` and `name__max` are bounds (both
    allowed), `name__in` takes a list, `name__has` looks for text in any case. A record without the
    key does not fit."""
    found = []
    for record in records:
        fits = True
        for key, value in wanted.items():
            name, _, how = key.partition("__")
            if name not in record or not _fits(record[name], how, value):
                fits = False
        if fits:
            found.append(record)
    return found


def _fits(have: Any, how: str, value: Any) -> bool:
    if how == "min":
        return bool(have >= value)
    if how == "max":
        return bool(have <= value)
    if how == "in":
        return have in value
    if how == "has":
        return str(value).lower() in str(have).lower()
    return bool(have == value)


def ordered(records: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Sorted by the keys, the first one first; `-key` is downwards. Equal ones keep their order;
    records without a key come last."""
    result = list(records)
    for key in reversed(keys):
        down = key.startswith("-")
        name = key[1:] if down else key
        have = [r for r in result if name in r]
        lack = [r for r in result if name not in r]
        result = sorted(have, key=lambda r: r[name], reverse=down) + lack
    return result


def page(records: list[Any], number: int, size: int = 10) -> dict[str, Any]:
    """Page `number`, from 1: its items, the number of pages (at least 1), and whether there are
    more. Raises ValueError for numbers below 1; a page after the last is empty."""
    if number < 1 or size < 1:
        raise ValueError("number and size begin at 1")
    start = (number - 1) * size
    pages = max(1, -(-len(records) // size))
    return {"items": records[start : start + size], "pages": pages, "more": number < pages}


def grouped(records: list[dict[str, Any]], key: str, of: str | None = None) -> dict[Any, Any]:
    """For each value of a key how many records have it, or the sum of `of` over them (what lacks
    `of` adds 0). Records without the key are left out."""
    groups: dict[Any, Any] = {}
    for record in records:
        if key not in record:
            continue
        add = 1 if of is None else record.get(of, 0)
        groups[record[key]] = groups.get(record[key], 0) + add
    return groups


def joined(
    left: list[dict[str, Any]], right: list[dict[str, Any]], key: str, keep: bool = False
) -> list[dict[str, Any]]:
    """Each left record with each right one that has the same value of the key; on both sides' keys
    the left one wins. With `keep`, left records without a partner stay as they are."""
    result = []
    for one in left:
        partners = [other for other in right if key in one and other.get(key) == one[key]]
        for other in partners:
            result.append({**other, **one})
        if keep and not partners:
            result.append(one)
    return result
