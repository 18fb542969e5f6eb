"""A session as one file of JSON lines.

The first line names the session; each turn adds one line that says how many of the earlier messages
it kept and which it added. A line that a kill cut off is removed when the file is opened again.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.locks import try_lock
from hermes_rl.messages import Message
from hermes_rl.text import SECRETS


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line."""

    session_id: str
    created_at: float
    """Unix time, seconds."""
    version: int = 1
    title: str = ""
    model: str = ""
    system_prompt: str | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The line of a turn."""

    kept: int
    added: list[Message]
    end_reason: str
    at: float


_HEAD = b'{"session_id":"'
"""The beginning of every session, also of one whose first line was cut off."""

_decode_head = msgspec.json.Decoder(Head).decode
_decode_run = msgspec.json.Decoder(Run).decode


class FileSession:
    """A session in a file, which is made when it is absent. One agent holds it at a time.

    Raises: UserError for a file that cannot be written, is not a session, or is in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"session {self.path}: {error.strerror}. Choose another file") from None
        try:
            if not try_lock(self._fd):
                raise UserError(f"session {self.path} is in use by another agent; close it")
            self._messages = self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def load(self) -> list[Message]:
        """See `Session`."""
        return list(self._messages)

    def append(self, kept: int, added: Sequence[Message], end_reason: str) -> None:
        """See `Session`. Raises: UserError when the disk is full."""
        run = Run(kept=kept, added=list(added), end_reason=end_reason, at=time.time())
        self._write(msgspec.json.encode(SECRETS.scrub_record(run)))
        self._messages = [*self._messages[:kept], *added]

    def close(self) -> None:
        """See `Session`. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> list[Message]:
        """The messages of all whole lines. What a kill left behind them is removed, once the file
        is known to be a session."""
        data = b"".join(iter(lambda: os.read(self._fd, 1 << 20), b""))
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            if not _HEAD.startswith(data[: len(_HEAD)]):
                raise UserError(f"{self.path} is not a session file. Choose another")
            os.ftruncate(self._fd, 0)
            self.session_id = uuid.uuid4().hex
            head = Head(session_id=self.session_id, created_at=time.time())
            self._write(msgspec.json.encode(head))
            return []
        head, turns = parse_session(whole, self.path)
        self.session_id, messages = head.session_id, list[Message]()
        for run in turns:
            messages = [*messages[: run.kept], *run.added]
        os.ftruncate(self._fd, len(whole))
        return messages

    def _write(self, line: bytes) -> None:
        end = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            data = line + b"\n"
            if os.write(self._fd, data) != len(data):
                raise OSError(28, "No space left on device")
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, end)
            raise UserError(f"session {self.path}: {error.strerror}. Free some space") from None


def parse_session(whole: bytes, path: Path) -> tuple[Head, list[Run]]:
    """The lines of a session file. Raises: UserError with the number of the first wrong one."""
    turns = list[Run]()
    try:
        first, *rest = whole.splitlines() or [b""]
        head = _decode_head(first)
        for line in rest:
            turns.append(_decode_run(line))
    except (msgspec.DecodeError, ValueError) as error:
        where = f"{path}:{len(turns) + 2}" if turns else str(path)
        raise UserError(f"{where} is not a session file: {error}. Choose another") from None
    return head, turns
