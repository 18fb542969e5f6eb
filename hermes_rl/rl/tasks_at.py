"""The tasks of some rows of a dataset or stream, which can only be read from its beginning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from hermes_rl.rows import LazyRow


class TasksAt:
    """Finds rows by their places. Blocking, and for one thread at a time.

    Ask for places in about rising order: for one that went by, the stream is read anew. Memory:
    what is asked for.

    Args:
        rows: begins the stream.
    """

    def __init__(self, rows: Callable[[], Iterator[LazyRow]]) -> None:
        self._begin = rows
        self._rows: Iterator[LazyRow] = rows()
        self._next = 0
        """Place of the row that comes next."""

    def of(self, places: Collection[int]) -> dict[int, LazyRow]:
        """The rows at these places; those beyond the stream's end are absent.

        Raises: UserError when the stream cannot be read.
        """
        found: dict[int, LazyRow] = {}
        if not places:
            return found
        if min(places) < self._next:
            self._rows, self._next = self._begin(), 0
        last = max(places)
        while self._next <= last:
            row = next(self._rows, None)
            if row is None:
                break
            self._next = row.index + 1
            if row.index in places:
                found[row.index] = row
        return found
