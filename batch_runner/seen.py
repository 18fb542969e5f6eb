"""How often a row was seen before: the occurrence number of identical rows, in little memory."""

from __future__ import annotations

_SHARD_BYTES = 2
_SHARDS = 1 << (8 * _SHARD_BYTES)
_REST = 14
"""Bytes of a digest that a shard keeps: with the shard's number 16, so 128 bits decide."""


class OccurrenceCounter:
    """Counts equal digests. About 20 bytes for each distinct one, so that a million rows are 20 MB.

    A digest's first two bytes choose a shard, a plain byte string of the next 14 bytes of each
    digest that was seen. Only digests that come again get an entry in a dictionary.
    """

    def __init__(self) -> None:
        self._shards: list[bytearray | None] = [None] * _SHARDS
        self._again: dict[bytes, int] = {}

    def next(self, digest: str) -> int:
        """The occurrence of this digest (hex, at least 32 digits): 0 for the first."""
        key = bytes.fromhex(digest[:32])
        number, rest = int.from_bytes(key[:_SHARD_BYTES], "big"), key[_SHARD_BYTES:]
        shard = self._shards[number]
        if shard is None:
            self._shards[number] = bytearray(rest)
            return 0
        if not _holds(shard, rest):
            shard += rest
            return 0
        self._again[key] = self._again.get(key, 0) + 1
        return self._again[key]


def _holds(shard: bytearray, rest: bytes) -> bool:
    """Whether the shard holds this entry, at an entry's own place."""
    at = shard.find(rest)
    while at >= 0 and at % _REST:
        at = shard.find(rest, at + 1)
    return at >= 0
