"""Lines of values with separators and quotes, as spreadsheets write them."""

from __future__ import annotations


def split(line: str, separator: str = ",", quote: str = '"') -> list[str]:
    """The fields of a line. Quoted fields may hold separators, and the quote when it is doubled;
    blanks around fields that are not quoted are dropped.

    Raises ValueError for a quote that is not closed.
    """
    fields: list[str] = []
    field, quoted, inside = "", False, False
    at = 0
    while at < len(line):
        char = line[at]
        if inside:
            if char == quote and line[at + 1 : at + 2] == quote:
                field += quote
                at += 1
            elif char == quote:
                inside = False
            else:
                field += char
        elif char == quote and not field.strip():
            field, quoted, inside = "", True, True
        elif char == separator:
            fields.append(field if quoted else field.strip())
            field, quoted = "", False
        elif not quoted:
            field += char
        at += 1
    if inside:
        raise ValueError("a quote is not closed")
    fields.append(field if quoted else field.strip())
    return fields


def join(fields: list[str], separator: str = ",", quote: str = '"') -> str:
    """The line that `split` reads back: fields with separators, quotes, blanks at an end or nothing
    in them are quoted."""
    written = []
    for field in fields:
        needs = separator in field or quote in field or field != field.strip() or field == ""
        doubled = field.replace(quote, quote * 2)
        written.append(quote + doubled + quote if needs else field)
    return separator.join(written)


def typed(field: str) -> int | float | bool | str | None:
    """A field's value: whole numbers, decimals, `true` and `false` in any case, nothing; else the
    text. Numbers with a leading zero stay text, but for `0` and `0.5`."""
    low = field.lower()
    if low in ("true", "false"):
        return low == "true"
    if field == "":
        return None
    digits = field[1:] if field[:1] in ("-", "+") else field
    whole, dot, rest = digits.partition(".")
    if not whole.isdigit() or (len(whole) > 1 and whole[0] == "0"):
        return field
    if not dot:
        return int(field)
    return float(field) if rest.isdigit() else field


def columns(rows: list[list[str]], names: bool = True) -> dict[str, list[str]]:
    """The columns of a table; their names are the first row, or `c1`, `c2` ... Short rows get
    empty fields, and what stands beyond the names is left out."""
    if not rows:
        return {}
    head = rows[0] if names else [f"c{n + 1}" for n in range(max(len(row) for row in rows))]
    body = rows[1:] if names else rows
    return {name: [row[n] if n < len(row) else "" for row in body] for n, name in enumerate(head)}


def summary(values: list[str]) -> dict[str, float | int]:
    """How many fields are numbers, and their least, greatest and mean value (0 of none)."""
    numbers = []
    for value in values:
        known = typed(value)
        if isinstance(known, (int, float)) and not isinstance(known, bool):
            numbers.append(known)
    if not numbers:
        return {"count": 0, "least": 0, "greatest": 0, "mean": 0}
    mean = sum(numbers) / len(numbers)
    return {"count": len(numbers), "least": min(numbers), "greatest": max(numbers), "mean": mean}
