"""Rectangular grids: lists of rows of the same length."""

from __future__ import annotations


def turned(grid: list[list[int]], times: int = 1) -> list[list[int]]:
    """The grid turned clockwise by a quarter, `times` times; negative ones turn back."""
    result = [list(row) for row in grid]
    for _ in range(times % 4):
        result = [list(column) for column in zip(*result[::-1])]
    return result


def neighbours(grid: list[list[int]], row: int, column: int, corners: bool = True) -> list[int]:
    """The values around a cell, row by row; those across corners only with `corners`."""
    found = []
    for r in range(row - 1, row + 2):
        for c in range(column - 1, column + 2):
            if r == row and c == column:
                continue
            if not corners and r != row and c != column:
                continue
            if 0 <= r < len(grid) and 0 <= c < len(grid[r]):
                found.append(grid[r][c])
    return found


def life(grid: list[list[int]]) -> list[list[int]]:
    """The next generation of Conway's game: a living cell (1) with two or three living neighbours
    lives on, a dead one with three comes alive."""
    result = []
    for r, row in enumerate(grid):
        line = []
        for c, alive in enumerate(row):
            count = sum(neighbours(grid, r, c))
            line.append(1 if count == 3 or (alive == 1 and count == 2) else 0)
        result.append(line)
    return result


def areas(grid: list[list[int]], value: int = 1) -> list[int]:
    """The sizes of the areas of a value that hang together by edges, the greatest first."""
    seen: set[tuple[int, int]] = set()
    sizes = []
    for r, row in enumerate(grid):
        for c, cell in enumerate(row):
            if cell != value or (r, c) in seen:
                continue
            seen.add((r, c))
            waiting, size = [(r, c)], 0
            while waiting:
                y, x = waiting.pop()
                size += 1
                for ny, nx in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                    inside = 0 <= ny < len(grid) and 0 <= nx < len(grid[ny])
                    if inside and grid[ny][nx] == value and (ny, nx) not in seen:
                        seen.add((ny, nx))
                        waiting.append((ny, nx))
            sizes.append(size)
    return sorted(sizes, reverse=True)


def window(grid: list[list[int]], height: int, width: int) -> list[list[int]]:
    """The sums of all windows of a size, by their upper left cell; none where the window is greater
    than the grid. Raises ValueError for a size below 1."""
    if height < 1 or width < 1:
        raise ValueError("a window has at least one cell")
    result = []
    for r in range(len(grid) - height + 1):
        line = []
        for c in range(len(grid[r]) - width + 1):
            line.append(sum(sum(row[c : c + width]) for row in grid[r : r + height]))
        if line:
            result.append(line)
    return result


def spiral(grid: list[list[int]]) -> list[int]:
    """All values from the upper left cell clockwise inwards."""
    rest, found = [list(row) for row in grid], []
    while rest:
        found.extend(rest.pop(0))
        rest = turned(rest, -1)
    return found
