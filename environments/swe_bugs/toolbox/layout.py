"""Text in columns of a fixed width."""

from __future__ import annotations


def wrap(text: str, width: int = 72, indent: int = 0) -> list[str]:
    """Lines of at most `width` characters, broken between words. A longer word has a line of its
    own. All lines but the first begin with `indent` blanks, which count."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        start = " " * indent if lines else ""
        if not line:
            line = start + word
        elif len(line) + 1 + len(word) <= width:
            line += " " + word
        else:
            lines.append(line)
            line = " " * indent + word
    if line:
        lines.append(line)
    return lines


def align(text: str, width: int, how: str = "left", fill: str = " ") -> str:
    """Text filled up to a width: `left`, `right` or `centre` (the odd one goes to the right).
    Longer text is not cut. Raises ValueError for another word."""
    missing = max(0, width - len(text))
    if how == "left":
        return text + fill * missing
    if how == "right":
        return fill * missing + text
    if how != "centre":
        raise ValueError(f"cannot align to {how!r}")
    before = missing // 2
    return fill * before + text + fill * (missing - before)


def shorten(text: str, width: int, mark: str = "...") -> str:
    """Text of at most `width` characters; what is cut is replaced by the mark at the end, and no
    blank stands before it. Where not even the mark fits, it is cut too."""
    if len(text) <= width:
        return text
    if width <= len(mark):
        return mark[:width]
    return text[: width - len(mark)].rstrip() + mark


def table(rows: list[list[str]], gap: int = 2) -> list[str]:
    """Lines with the cells in columns, each as wide as its longest cell, `gap` blanks between, none
    at the end of a line. Missing cells are empty."""
    columns = max((len(row) for row in rows), default=0)
    widths = [0] * columns
    for row in rows:
        for number, cell in enumerate(row):
            widths[number] = max(widths[number], len(cell))
    lines = []
    for row in rows:
        cells = row + [""] * (columns - len(row))
        padded = [align(cell, width) for cell, width in zip(cells, widths)]
        lines.append((" " * gap).join(padded).rstrip())
    return lines


def dedent(lines: list[str]) -> list[str]:
    """The lines without the blanks that all lines that are not blank begin with."""
    depths = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
    depth = min(depths, default=0)
    return [line[depth:] if line.strip() else "" for line in lines]
