"""What a worker and a helper elsewhere (`remote`, `remote_helper`) send each other.

A frame is a JSON object and up to `CHUNK` bytes; larger data goes as several frames of one call.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from hermes_rl.errors import (
    SandboxDied,
    SandboxError,
    SandboxKilled,
    SandboxStartError,
    SnapshotLost,
    TaskFault,
    UserError,
)

HEAD = struct.Struct(">II")
"""Bytes of the JSON object, and of what follows it."""
CHUNK = 1 << 18
MOST = 1 << 26
"""Bytes of a JSON object, at most."""
BINARIES = "binaries"
"""Folder of the code that is sent, with programs by kind of machine."""
PING_S = 10.0
SILENCE_S = 60.0
"""Without a frame for so long, either side gives the other up."""

Header = dict[str, Any]


class NoPlace(SandboxStartError):
    """All places of a host are taken."""


class Garbled(Exception):
    """What came is not a frame."""


def pack(header: Header, data: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return HEAD.pack(len(text), len(data)) + text + data


async def receive(read: Callable[[int], Awaitable[bytes]]) -> tuple[Header, bytes]:
    """The next frame.

    Args:
        read: reads exactly so many bytes.

    Raises: Garbled; whatever `read` raises at the end.
    """
    text, data = HEAD.unpack(await read(HEAD.size))
    if text > MOST or data > CHUNK:
        raise Garbled("not a frame")
    try:
        header = json.loads(await read(text))
    except ValueError as error:
        raise Garbled(str(error)) from error
    if not isinstance(header, dict):
        raise Garbled("not an object")
    return header, await read(data) if data else b""


def pieces(data: bytes | Path) -> Iterator[bytes]:
    """Data in pieces that fit into frames. Raises: OSError."""
    if isinstance(data, bytes):
        for at in range(0, len(data), CHUNK):
            yield data[at : at + CHUNK]
        return
    with data.open("rb") as file:
        while piece := file.read(CHUNK):
            yield piece


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(SandboxDied, SandboxKilled, SandboxStartError, SnapshotLost, NoPlace, TaskFault),
        *(UserError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError),
        *(FileExistsError, BrokenPipeError, OSError, ValueError),
    )
}
_CRASHED = "a fault of the helper"


def describe(error: BaseException) -> Header:
    """An error as part of a frame."""
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS), None)
    text = str(error) if kind is not None else f"{_CRASHED}: {error!r}"
    return {
        "kind": kind or "SandboxDied",
        "text": text,
        "number": getattr(error, "errno", None),
        "in_command": bool(getattr(error, "in_command", False)),
    }


def rebuild(found: Header) -> Exception:
    """The error that `describe` took apart."""
    kind, text, number = _KINDS[found["kind"]], str(found["text"]), found["number"]
    if issubclass(kind, OSError):
        error: Exception = kind(text)
        error.errno = number  # type: ignore[attr-defined]
        return error
    error = kind(text)
    if isinstance(error, SandboxError):
        error.in_command = found["in_command"]
    return error
