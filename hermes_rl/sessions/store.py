"""The store of sessions: one SQLite file that several processes may use at a time.

A session is a row of `sessions` with messages and model calls. Messages are only added, never
changed or removed: a message in whose place another one came is marked as replaced. A conversation
whose earlier messages change (it was compressed, or begun again) continues in a new session, whose
`parent` is the old one and which shares the old one's first messages.

One agent writes to a session at a time. It holds a lock on one byte of the file `PATH.lock`, which
the kernel frees however the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sqlite3
import struct
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.events import CallEnded, CallStarted, ContextStarted, Event
from hermes_rl.input_errors import did_you_mean
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    ToolMessage,
    UserMessage,
    role_of,
    text_of,
)
from hermes_rl.sessions.base import TurnRecord, common_length
from hermes_rl.sessions.schema import connect, database_error
from hermes_rl.sessions.search import Hit, is_cjk, search
from hermes_rl.text import SECRETS, clean

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TITLE_CHARS = 80
_CALL = (
    "call_id", "session", "turn", "purpose", "agent", "model", "started_at", "outcome",
    "input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens",
    "reasoning_tokens", "cost_usd", "latency_s", "finish_reason", "error",
)  # fmt: skip
_USAGE = _CALL[8:13]

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.decode


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """A session, without its messages."""

    id: int
    session_id: str
    name: str | None
    title: str
    """The first line of the first message, unless it was renamed."""
    parent_id: str | None
    """The `session_id` of the session that it continues."""
    branched_by: str
    """Why it continues another one: `compression` or `branch`; empty for none."""
    shared: int
    """Messages that it has in common with its parent."""
    messages: int
    """Of the whole conversation."""
    model: str
    system_prompt: str | None
    end_reason: str
    created_at: float
    """Unix time, seconds; so is `updated_at`."""
    updated_at: float
    calls: int
    input_tokens: int | None
    """Sum over the calls whose usage is known; None when no usage is. So is `output_tokens`."""
    output_tokens: int | None
    cost_usd: float | None
    """None when a call has no known price."""


_INFO = """
SELECT s.id, s.session_id, s.name, s.title, p.session_id, s.branched_by, s.shared,
    s.shared + (SELECT count(*) FROM messages m WHERE m.session = s.id AND NOT m.replaced),
    s.model, s.system_prompt, s.end_reason, s.created_at, s.updated_at,
    count(c.call_id), sum(c.input_tokens), sum(c.output_tokens),
    CASE WHEN count(c.call_id) = count(c.cost_usd) THEN coalesce(sum(c.cost_usd), 0.0) END
FROM sessions s LEFT JOIN sessions p ON p.id = s.parent LEFT JOIN calls c ON c.session = s.id
"""


def default_store_path() -> Path:
    """`$XDG_DATA_HOME/hermes-rl/sessions.db`, else below `~/.local/share`."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "hermes-rl" / "sessions.db"


def is_name(text: str) -> bool:
    """Whether a session can have that name."""
    return _NAME.fullmatch(text) is not None


class SessionStore:
    """Conversations in one file, which is made when it is absent.

    Its methods may be called from any thread; they block.

    Args:
        path: None is the default store of this user.
        busy_s: seconds that a write waits for those of other processes.

    Raises: UserError for a file that cannot be used. So do all methods, also for a full disk and
        for a file that other processes keep busy.
    """

    def __init__(self, path: Path | str | None = None, *, busy_s: float = 15.0) -> None:
        self.path = default_store_path() if path is None else Path(path).expanduser()
        self._connection = connect(self.path, busy_s)
        self._lock = threading.RLock()  # one transaction at a time on the connection
        self._held_sessions: list[StoredSession] = []

    def close(self) -> None:
        """Close the file and the sessions that are still open. Idempotent."""
        with self._lock:
            for session in self._held_sessions:
                session.close()
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def open(self, name: str | None = None) -> StoredSession:
        """The session of that name for writing, made when it is absent; None makes one without a
        name. Raises: UserError while another agent has it."""
        with self.writing() as connection:
            found = "SELECT id FROM sessions WHERE name = ?"
            row = name and connection.execute(found, [clean(name)]).fetchone()
            return self._held(row[0], str(name)) if row else self.create(name)

    def resume(self, wanted: str) -> StoredSession:
        """A session by name, or by the beginning of its id, for writing. Raises: UserError."""
        info = self.find(wanted)
        return self._held(info.id, wanted)

    def create(
        self, name: str | None = None, *, session_id: str | None = None, title: str = ""
    ) -> StoredSession:
        """A new session. Raises: UserError for a name or an id that is taken."""
        return self._create(name, session_id, title=title)

    def branch(self, wanted: str, at: int | None = None, name: str | None = None) -> StoredSession:
        """A new session that continues another one from one of its messages.

        Args:
            at: how many messages it shares with the other; None is all of them.

        Raises: UserError.
        """
        info = self.find(wanted)
        at = info.messages if at is None else at
        if not 0 <= at <= info.messages:
            raise UserError(f"session {wanted!r} has {info.messages} messages, not {at}")
        return self._create(
            name,
            title=info.title,
            parent=info.id,
            shared=at,
            branched_by="branch",
            model=info.model,
            system_prompt=info.system_prompt,
        )

    def _create(
        self, name: str | None, session_id: str | None = None, **columns: Any
    ) -> StoredSession:
        if name is not None and not is_name(name):
            raise UserError(
                f"session {name!r}: a name has letters, digits, - _ and .; "
                "for a file pass a Path, or a name that ends with .jsonl"
            )
        with self.writing() as connection:
            for column, value in (("name", name), ("session_id", session_id)):
                found = f"SELECT 1 FROM sessions WHERE {column} = ?"
                if value is not None and connection.execute(found, [value]).fetchone():
                    raise UserError(f"session {value!r} is in {self.path} already")
            number = insert(connection, session_id=session_id, name=name, **columns)
            return self._held(number, name or str(number))

    def sessions(self, limit: int = 0) -> list[SessionInfo]:
        """The sessions, the last used first. Args: limit: 0 is all."""
        sql = f"{_INFO} GROUP BY s.id ORDER BY s.updated_at DESC, s.id DESC LIMIT ?"
        return [SessionInfo(**_named(row)) for row in self.read(sql, [limit or -1])]

    def find(self, wanted: str) -> SessionInfo:
        """A session by name, or by the beginning of its id.

        Raises: UserError for none or several.
        """
        sql = f"{_INFO} WHERE s.name = ? GROUP BY s.id"
        rows = self.read(sql, [clean(wanted)])
        if not rows and re.fullmatch(r"[0-9A-Za-z_-]+", wanted):
            sql = f"{_INFO} WHERE substr(s.session_id, 1, ?) = ? GROUP BY s.id LIMIT 3"
            rows = self.read(sql, [len(wanted), wanted])
        if len(rows) > 1:
            raise UserError(f"session {wanted!r} is the beginning of several ids. Write more of it")
        if not rows:
            names = [
                row[0] for row in self.read("SELECT name FROM sessions WHERE name IS NOT NULL")
            ]
            raise UserError(f"no session {wanted!r} in {self.path}{did_you_mean(wanted, names)}")
        return SessionInfo(**_named(rows[0]))

    def messages(self, wanted: str) -> list[Message]:
        """The conversation of a session, without a system message. Raises: UserError."""
        return self.load(self.find(wanted).id)

    def load(self, number: int) -> list[Message]:
        """The conversation of a session by its number in the file."""
        parts: list[list[Message]] = []
        upto: int | None = None
        current: int | None = number
        while current is not None:
            rows = self.read(
                "SELECT role, content, tool_name, tool_call_id, tool_calls, details FROM messages "
                "WHERE session = ? AND NOT replaced AND position < ? ORDER BY position",
                [current, 1 << 62 if upto is None else upto],
            )
            parts.append([_message(*row) for row in rows])
            parent, shared = self.read(
                "SELECT parent, shared FROM sessions WHERE id = ?", [current]
            )[0]
            upto = shared if upto is None else min(upto, shared)
            current = parent if upto else None
        return [message for part in reversed(parts) for message in part]

    def calls(self, wanted: str) -> list[dict[str, Any]]:
        """The model calls of a session, the first first. Raises: UserError."""
        number = self.find(wanted).id
        rows = self.read(
            f"SELECT {', '.join(_CALL)} FROM calls WHERE session = ? ORDER BY started_at", [number]
        )
        named = [dict(zip(_CALL, row, strict=True)) for row in rows]
        return [{k: v for k, v in row.items() if k != "session"} for row in named]

    def search(self, query: str, limit: int = 20) -> list[Hit]:
        """The newest messages with all terms of a query; see `hermes_rl.sessions.search`."""
        with self._failures(), self._lock:
            return search(self._connection, clean(query), limit)

    def rename(self, wanted: str, title: str) -> None:
        """Give a session another title. Raises: UserError."""
        number = self.find(wanted).id
        with self.writing() as connection:
            connection.execute("UPDATE sessions SET title = ? WHERE id = ?", [clean(title), number])

    def prune(
        self, *, before: float | None = None, wanted: Sequence[str] = (), dry_run: bool = False
    ) -> list[SessionInfo]:
        """Remove sessions for good, and return them. A session goes with all that it continues and
        all that continue it; one in use stays, with these.

        Args:
            before: Unix time in seconds; sessions last used before it.
            wanted: sessions by name or id, in place of `before`.

        Raises: UserError for a session that does not exist or is in use.
        """
        named = [self.find(one).id for one in wanted]
        infos = {info.id: info for info in self.sessions()}
        removed: list[int] = []
        lock_file = _LockFile(self.path)
        try:
            for family in self._families():
                chosen = bool(set(named) & set(family)) or (
                    before is not None and all(infos[n].updated_at < before for n in family)
                )
                if not chosen:
                    continue
                if all(lock_file.take(number) for number in family):
                    removed += family
                elif set(named) & set(family):
                    raise UserError("the session is in use by an agent; close that first")
            if removed and not dry_run:
                self._remove(removed)
        finally:
            lock_file.close()
        return [infos[number] for number in removed]

    def _families(self) -> list[list[int]]:
        """The sessions that continue each other, in groups."""
        roots: dict[int, list[int]] = {}
        of: dict[int, int] = {}
        for number, parent in self.read("SELECT id, parent FROM sessions ORDER BY id"):
            of[number] = number if parent is None else of[parent]
            roots.setdefault(of[number], []).append(number)
        return list(roots.values())

    def _remove(self, numbers: Iterable[int]) -> None:
        with self.writing() as connection:
            for number in sorted(numbers, reverse=True):  # a parent after those that continue it
                for table in ("messages", "calls"):
                    connection.execute(f"DELETE FROM {table} WHERE session = ?", [number])
                connection.execute("DELETE FROM sessions WHERE id = ?", [number])
        with self._failures(), self._lock:  # so that the file no longer has the removed texts
            for table in ("message_text", "message_trigrams"):
                self._connection.execute(f"INSERT INTO {table} ({table}) VALUES ('optimize')")
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _held(self, number: int, label: str) -> StoredSession:
        lock_file = _LockFile(self.path)
        if not lock_file.take(number):
            lock_file.close()
            raise UserError(f"session {label!r} is in use by another agent; close it")
        session = StoredSession(self, number, lock_file)
        self._held_sessions.append(session)
        return session

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is durable at its end, or had no effect; within another one, a part of
        that. Raises: UserError."""
        with self._failures(), self._lock:
            connection = self._connection
            if connection.in_transaction:
                yield connection
                return
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query. Raises: UserError."""
        with self._failures(), self._lock:
            return self._connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise database_error(error, self.path) from None


class StoredSession:
    """A session of a store that one agent holds; see `Session` and `RecordsTurns`."""

    def __init__(self, store: SessionStore, number: int, lock_file: _LockFile) -> None:
        self.store, self.id = store, number
        self._lock_file = lock_file
        self.close_store = False
        """The store is this session's alone, and is closed with it."""
        self.reload()

    def reload(self) -> None:
        """Read the session from the store."""
        info = self._row()
        self.session_id, self.system_prompt, self._shared = info
        self._messages = self.store.load(self.id)

    def load(self) -> list[Message]:
        """See `Session`."""
        return list(self._messages)

    def append(self, kept: int, added: Sequence[Message], end_reason: str) -> None:
        """See `Session`. Raises: UserError."""
        self.record(TurnRecord(messages=[*self._messages[:kept], *added], end_reason=end_reason))

    def record(self, turn: TurnRecord) -> None:
        """See `RecordsTurns`. Raises: UserError."""
        messages = list(turn.messages)
        kept, before = common_length(self._messages, messages), len(self._messages)
        continues = kept == before or kept >= max(before - 1, self._shared)
        with self.store.writing() as connection:
            number = self.id if continues else self._branch(connection, kept, turn)
            if continues and kept < before:
                connection.execute(
                    "UPDATE messages SET replaced = 1 WHERE session = ? AND position >= ?",
                    [number, kept],
                )
            self._write(connection, number, messages, kept, turn)
        if number != self.id:
            self._shared = kept
        self.id, self._messages = number, messages
        self.session_id = self._row()[0]
        if turn.system_prompt is not None:
            self.system_prompt = turn.system_prompt

    def close(self) -> None:
        """See `Session`. Idempotent."""
        self._lock_file.close()
        if self.close_store:
            self.close_store = False
            self.store.close()

    def _row(self) -> tuple[str, str | None, int]:
        rows = self.store.read(
            "SELECT session_id, system_prompt, shared FROM sessions WHERE id = ?", [self.id]
        )
        row: tuple[str, str | None, int] = rows[0]
        return row

    def _branch(self, connection: sqlite3.Connection, kept: int, turn: TurnRecord) -> int:
        """A new session that shares the first messages of this one, and takes over its name."""
        compressed = any(isinstance(e, ContextStarted) and e.start > 0 for e in turn.events)
        name, title, prompt = connection.execute(
            "SELECT name, title, system_prompt FROM sessions WHERE id = ?", [self.id]
        ).fetchone()
        connection.execute("UPDATE sessions SET name = NULL WHERE id = ?", [self.id])
        number = insert(
            connection,
            name=name,
            title=title if compressed or kept else "",
            parent=self.id,
            shared=kept,
            branched_by="compression" if compressed else "branch",
            system_prompt=prompt,
        )
        self._lock_file.take(number)  # before another process can read the number
        return number

    def _write(
        self,
        connection: sqlite3.Connection,
        number: int,
        messages: list[Message],
        kept: int,
        turn: TurnRecord,
    ) -> None:
        now = time.time()
        added = SECRETS.scrub_record(messages[kept:])
        connection.executemany(
            "INSERT INTO messages (session, position, added_at, role, content, tool_name, "
            "tool_call_id, tool_calls, details, cjk) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(number, kept + n, now, *_columns(message)) for n, message in enumerate(added)],
        )
        connection.executemany(
            f"INSERT OR REPLACE INTO calls ({', '.join(_CALL)}) "
            f"VALUES ({', '.join('?' * len(_CALL))})",
            list(_calls(turn.events, number)),
        )
        connection.execute(
            "UPDATE sessions SET updated_at = ?, end_reason = ?, "
            "model = CASE WHEN ? = '' THEN model ELSE ? END, "
            "system_prompt = coalesce(?, system_prompt), "
            "title = CASE WHEN title = '' THEN ? ELSE title END WHERE id = ?",
            [
                *(now, turn.end_reason, turn.model, turn.model),
                SECRETS.scrub(turn.system_prompt) if turn.system_prompt is not None else None,
                *(_title(added), number),
            ],
        )


class _LockFile:
    """Locks on bytes of `PATH.lock`, one for each session. They belong to this open file, so two
    agents of one process exclude each other too, and the kernel frees them at any end."""

    def __init__(self, path: Path) -> None:
        name = path.with_name(f"{path.name}.lock")
        try:
            self._fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{name}: {error.strerror}. Check the permissions") from None

    def take(self, number: int) -> bool:
        """Lock a session; False while another agent has it."""
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        """Free all of them. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def insert(connection: sqlite3.Connection, session_id: str | None = None, **columns: Any) -> int:
    """Insert a row of `sessions`; its number."""
    now = time.time()
    row = {"session_id": session_id or uuid.uuid4().hex, "created_at": now, "updated_at": now}
    row |= columns
    done = connection.execute(
        f"INSERT INTO sessions ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})",
        list(row.values()),
    )
    return int(done.lastrowid or 0)


def _named(row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(SessionInfo.__dataclass_fields__, row, strict=True))


def _title(messages: Iterable[Message]) -> str:
    """The first line of what the user wrote first."""
    for message in messages:
        if isinstance(message, UserMessage) and (text := text_of(message).strip()):
            line = " ".join(text.splitlines()[0].split())
            return line if len(line) <= _TITLE_CHARS else f"{line[: _TITLE_CHARS - 1]}…"
    return ""


def _columns(message: Message) -> tuple[Any, ...]:
    """role, content, tool_name, tool_call_id, tool_calls, details, cjk."""
    content, tool_name, tool_call_id, calls = text_of(message), None, None, None
    details: dict[str, Any] = {}
    if isinstance(message, UserMessage) and not isinstance(message.content, str):
        details["content"] = message.content
    elif isinstance(message, ToolMessage):
        tool_name, tool_call_id = message.name, message.tool_call_id
    elif isinstance(message, AssistantMessage):
        if message.tool_calls:
            calls = _to_json(message.tool_calls).decode()
        names = ("reasoning_content", "raw_content", "reasoning_details")
        details = {n: value for n in names if (value := getattr(message, n)) is not None}
    return (
        role_of(message),
        content,
        tool_name,
        tool_call_id,
        calls,
        _to_json(details).decode() if details else None,
        is_cjk(content) or (calls is not None and is_cjk(calls)),
    )


def _message(
    role: str,
    content: str,
    tool_name: str | None,
    tool_call_id: str | None,
    calls: str | None,
    details: str | None,
) -> Message:
    """The inverse of `_columns`."""
    form: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        form |= {"name": tool_name, "tool_call_id": tool_call_id}
    if calls is not None:
        form["tool_calls"] = _from_json(calls)
    if details is not None:
        form |= _from_json(details)
    return msgspec.convert(form, Message)  # type: ignore[no-any-return]


def _calls(events: Iterable[Event], number: int) -> Iterator[tuple[Any, ...]]:
    """Rows of the calls that began among the events."""
    listed = list(events)
    ends = {event.call_id: event for event in listed if isinstance(event, CallEnded)}
    for start in listed:
        if not isinstance(start, CallStarted):
            continue
        end = ends.get(start.call_id)
        usage = end.usage if end else None
        yield (
            *(start.call_id, number, start.turn, start.purpose, start.agent, start.model),
            *(start.started_at, end.outcome if end else "unknown"),
            *(getattr(usage, name, None) for name in _USAGE),
            *((end.cost_usd, end.latency_s, end.finish_reason) if end else (None, None, None)),
            SECRETS.scrub(end.error) if end and end.error else None,
        )
