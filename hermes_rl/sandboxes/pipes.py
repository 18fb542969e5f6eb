"""Named pipes in a control directory: made and opened by the host before a command runs."""

from __future__ import annotations

import os
from pathlib import Path

from hermes_rl.sandboxes.output import Sink

CHUNK = 1 << 16
"""Bytes read at once: what a pipe holds."""
DRAIN_PAUSE_S = 0.05
"""Between two looks at a pipe whose writer is silent, or whose output nobody wants."""


LINE_MAX = 4096
"""Bytes of one line of a control channel."""


def make_fifo(path: Path, how: int, mode: int) -> int:
    """Make a named pipe and open it without waiting for its other end."""
    os.mkfifo(path)
    os.chmod(path, mode)
    return os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC)


class Pipe:
    """A named pipe that takes a command's output, open for reading on the host."""

    def __init__(self, control: Path, name: str) -> None:
        self.name = name
        self.path = control / name
        self.fd = make_fifo(self.path, os.O_RDONLY, 0o620)

    def read_into(self, sink: Sink, most: int) -> bool | None:
        """Move up to `most` bytes to the sink.

        Returns None at the end (no writer) and after `close`, False when a writer is silent, True
        when more may come.
        """
        if self.fd < 0:
            return None
        while most > 0:
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return False
            if not data:
                return None
            sink.feed(data)
            most -= len(data)
        return True

    def close(self) -> None:
        """Remove the pipe. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.path.unlink(missing_ok=True)
