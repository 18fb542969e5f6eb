"""Sets of whole-number intervals: pairs (start, end) that hold start and not end."""

from __future__ import annotations


def merge(intervals: list[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """The same numbers as sorted intervals that neither overlap nor touch; empty ones vanish.

    Intervals that are at most `gap` apart become one.
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def size(intervals: list[tuple[int, int]]) -> int:
    """How many numbers lie in at least one of the intervals."""
    return sum(end - start for start, end in merge(intervals))


def holds(intervals: list[tuple[int, int]], number: int) -> bool:
    """Whether a number lies in one of the intervals."""
    return any(start <= number < end for start, end in intervals)


def gaps(intervals: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """What of low..high (without high) lies in none of the intervals, in order."""
    free, at = [], low
    for start, end in merge(intervals):
        if start >= high:
            break
        if start > at:
            free.append((at, start))
        at = max(at, end)
    if at < high:
        free.append((at, high))
    return free


def common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The numbers that lie in both, as sorted intervals."""
    found = []
    first, second = merge(one), merge(other)
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def busiest(intervals: list[tuple[int, int]]) -> int:
    """The greatest number of intervals that hold one and the same number."""
    events = []
    for start, end in intervals:
        if start < end:
            events.append((start, 1))
            events.append((end, -1))
    most = now = 0
    for _, step in sorted(events):
        now += step
        most = max(most, now)
    return most
