"""A conversation that outlives its agent: one file of JSON lines per session.

The first line names the session; each run adds one line that says how many of the earlier messages
it kept and which it added. A line that a kill tore is cut off when the file is opened again.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.events import Event, MessageAdded
from hermes_rl.locks import try_lock
from hermes_rl.messages import AssistantMessage, Message, SystemMessage, UserMessage, text_of
from hermes_rl.text import SECRETS, clean


class Session(Protocol):
    """Where an agent's conversation is kept."""

    session_id: str

    def load(self) -> list[Message]:
        """The conversation so far, without a system message; empty for a new session."""
        ...

    def append(self, kept: int, added: Sequence[Message], end_reason: str) -> None:
        """Note a run: so many messages stay as they were, then come these."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    session_id: str
    created_at: float
    """Unix time, seconds."""
    version: int = 1


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run's line."""

    kept: int
    added: list[Message]
    end_reason: str
    at: float


_HEAD = b'{"session_id":"'
"""As every session begins, also one whose first line a kill tore."""

_decode_head = msgspec.json.Decoder(_Head).decode
_decode_run = msgspec.json.Decoder(_Run).decode


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
        """See `Session`. Raises: UserError when the disk does not take it."""
        run = _Run(kept=kept, added=list(added), end_reason=end_reason, at=time.time())
        self._write(msgspec.json.encode(SECRETS.scrub_record(run)))
        self._messages = [*self._messages[:kept], *added]

    def close(self) -> None:
        """See `Session`. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> list[Message]:
        """The messages of all whole lines. What a kill left behind them is cut off, once the file
        is seen to be a session."""
        data = b"".join(iter(lambda: os.read(self._fd, 1 << 20), b""))
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            if not _HEAD.startswith(data[: len(_HEAD)]):
                raise UserError(f"{self.path} is not a session file. Choose another")
            os.ftruncate(self._fd, 0)
            self.session_id = uuid.uuid4().hex
            head = _Head(session_id=self.session_id, created_at=time.time())
            self._write(msgspec.json.encode(head))
            return []
        messages = self._messages_of(whole)
        os.ftruncate(self._fd, len(whole))
        return messages

    def _messages_of(self, whole: bytes) -> list[Message]:
        first, *runs = whole.splitlines()
        messages: list[Message] = []
        try:
            self.session_id = _decode_head(first).session_id
            for line in runs:
                run = _decode_run(line)
                messages = [*messages[: run.kept], *run.added]
        except msgspec.DecodeError as error:
            raise UserError(f"{self.path} is not a session file: {error}. Choose another") from None
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


def open_session(session: str | Path | Session) -> Session:
    """A session by name, by file, or as it is.

    A name stands for a file below `$XDG_DATA_HOME`, else `~/.local/share`.

    Raises: UserError, as `FileSession`, and for a name that is none.
    """
    if isinstance(session, Path):
        return FileSession(session)
    if not isinstance(session, str):
        return session
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", session):
        raise UserError(
            f"session {session!r}: a name holds letters, digits, - _ and .; for a file give a Path"
        )
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return FileSession(Path(base) / "hermes-rl" / "sessions" / f"{session}.jsonl")


def common_length(before: Sequence[Message], after: Sequence[Message]) -> int:
    """How many messages at the head of two conversations are the same."""
    pairs = zip(before, after, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))


def continuable(messages: Iterable[Message]) -> list[Message]:
    """The conversation without its system message, so that a user message may come next.

    Calls at the end that never got a result are dropped, and so is an empty answer.
    """
    kept: list[Message] = [m for m in messages if not isinstance(m, SystemMessage)]
    if kept and isinstance(last := kept[-1], AssistantMessage):
        kept.pop()
        if last.content.strip():
            shown = AssistantMessage(content=last.content, reasoning_content=last.reasoning_content)
            kept.append(shown if last.tool_calls else last)
    return kept


def with_user(history: Sequence[Message], text: str) -> list[Message]:
    """The conversation with a user message at its end; two in a row become one."""
    text = clean(text)
    if history and isinstance(last := history[-1], UserMessage):
        return [*history[:-1], UserMessage(content=f"{text_of(last)}\n\n{text}")]
    return [*history, UserMessage(content=text)]


def last_answer(events: Iterable[Event]) -> str | None:
    """The model's last text in the events of one run."""
    added = [
        e.message for e in events if isinstance(e, MessageAdded) and e.turn and not e.synthetic
    ]
    contents = [m.content for m in added if isinstance(m, AssistantMessage)]
    return contents[-1] if contents else None


def split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """The system messages that a conversation begins with, as one text, and the rest."""
    texts: list[str] = []
    for message in messages:
        if not isinstance(message, SystemMessage):
            break
        texts.append(message.content)
    return "\n\n".join(texts) or None, list(messages[len(texts) :])
