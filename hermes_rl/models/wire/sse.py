"""Server-sent events, incrementally."""

from __future__ import annotations


class EventReader:
    """Cuts a byte stream into the data of its events.

    Lines end in LF, CR LF or CR; comments (lines that begin with a colon, as keep-alives do) and
    other fields are left out; an event's data lines are joined by LF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that are complete now."""
        buffer = self._rest + piece
        if b"\r" in buffer:
            held = buffer.endswith(b"\r")  # perhaps the first half of CR LF
            body = buffer[:-1] if held else buffer
            buffer = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if held else b"")
        *lines, self._rest = buffer.split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """The last event of a stream whose final blank line is missing."""
        events = self.feed(b"\n\n")
        self._rest, self._data = b"", []
        return events


def event(data: bytes, name: str | None = None) -> bytes:
    """One event on the wire, named where the wire names its events."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return head + b"data: " + data + b"\n\n"


DONE = b"[DONE]"
"""The data of the last event of Chat Completions."""
