"""Reads a journal file while it is written."""

import io
from typing import Any

import pytest

from hermes_rl.store import encode_line, read_payloads


class Growing(io.RawIOBase):
    """A file that is written while it is read; an empty piece is the current end."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    def open(self, mode: str) -> io.BufferedReader:
        """As a path's."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._pieces.pop(0) if self._pieces else b""
        buffer[: len(piece)] = piece
        return len(piece)


@pytest.mark.parametrize("at", [1, 5, 15, -1])
def test_a_line_being_written_is_not_damage(at: int) -> None:
    """A reader meets the first part of a line at the file's end, and the rest a moment later."""
    first, second = encode_line(b'{"line":1}'), encode_line(b'{"line":2}')
    file: Any = Growing(first + second[:at], b"", second[at:], b"")
    assert list(read_payloads(file)) == [b'{"line":1}']
