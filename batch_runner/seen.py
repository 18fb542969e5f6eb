"""How often a row was seen before: the occurrence number of identical rows."""

from __future__ import annotations


class OccurrenceCounter:
    """Counts equal digests; 16 bytes of each are kept, so that a million rows take about 100 MB.

    Only digests that come again get an entry in a dictionary.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._again: dict[bytes, int] = {}

    def next(self, digest: str) -> int:
        """The occurrence of this digest (hex, at least 32 digits): 0 for the first."""
        key = bytes.fromhex(digest[:32])
        before = len(self._seen)
        self._seen.add(key)
        if len(self._seen) > before:
            return 0
        self._again[key] = self._again.get(key, 0) + 1
        return self._again[key]
