"""The tables of a session store, and how a file gets them.

`SCRIPTS` has one script for each version of the schema. A file is brought to the latest version in
one transaction when it is opened; a file of a later version than this one knows is refused.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

from hermes_rl.errors import UserError

_TABLES = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL UNIQUE,
    name TEXT UNIQUE,
    title TEXT NOT NULL DEFAULT '',
    parent INTEGER REFERENCES sessions (id),
    shared INTEGER NOT NULL DEFAULT 0,
    branched_by TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    system_prompt TEXT,
    end_reason TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
);
CREATE INDEX sessions_by_parent ON sessions (parent);
CREATE INDEX sessions_by_time ON sessions (updated_at);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session INTEGER NOT NULL REFERENCES sessions (id),
    position INTEGER NOT NULL,
    replaced INTEGER NOT NULL DEFAULT 0,
    cjk INTEGER NOT NULL DEFAULT 0,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    tool_name TEXT,
    tool_call_id TEXT,
    tool_calls TEXT,
    details TEXT,
    added_at REAL NOT NULL
);
CREATE INDEX messages_by_session ON messages (session, position);
CREATE TABLE calls (
    call_id TEXT PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES sessions (id),
    turn INTEGER NOT NULL,
    purpose TEXT NOT NULL,
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    started_at REAL NOT NULL,
    outcome TEXT NOT NULL,
    input_tokens INTEGER,
    cache_read_tokens INTEGER,
    cache_write_tokens INTEGER,
    output_tokens INTEGER,
    reasoning_tokens INTEGER,
    cost_usd REAL,
    latency_s REAL,
    finish_reason TEXT,
    error TEXT
);
CREATE INDEX calls_by_session ON calls (session);
"""

_SEARCH = """
CREATE VIRTUAL TABLE message_text USING fts5 (
    content, tool_calls, content='messages', content_rowid='id',
    tokenize='unicode61 remove_diacritics 2'
);
CREATE VIRTUAL TABLE message_trigrams USING fts5 (
    content, tool_calls, content='messages', content_rowid='id', tokenize='trigram'
);
CREATE INDEX messages_cjk ON messages (id) WHERE cjk;
CREATE TRIGGER messages_added AFTER INSERT ON messages BEGIN
    INSERT INTO message_text (rowid, content, tool_calls)
    VALUES (new.id, new.content, new.tool_calls);
END;
CREATE TRIGGER messages_added_cjk AFTER INSERT ON messages WHEN new.cjk BEGIN
    INSERT INTO message_trigrams (rowid, content, tool_calls)
    VALUES (new.id, new.content, new.tool_calls);
END;
CREATE TRIGGER messages_removed AFTER DELETE ON messages BEGIN
    INSERT INTO message_text (message_text, rowid, content, tool_calls)
    VALUES ('delete', old.id, old.content, old.tool_calls);
END;
CREATE TRIGGER messages_removed_cjk AFTER DELETE ON messages WHEN old.cjk BEGIN
    INSERT INTO message_trigrams (message_trigrams, rowid, content, tool_calls)
    VALUES ('delete', old.id, old.content, old.tool_calls);
END;
INSERT INTO message_text (rowid, content, tool_calls)
    SELECT id, content, tool_calls FROM messages;
INSERT INTO message_trigrams (rowid, content, tool_calls)
    SELECT id, content, tool_calls FROM messages WHERE cjk;
"""

SCRIPTS = (_TABLES, _SEARCH)
"""Version of the schema - 1 -> what brings a file there from the version before."""

_opening = threading.Lock()
"""A file descriptor that is closed drops the locks which SQLite has on the same file in this
process, so no store is opened while another makes its file."""


def connect(path: Path, busy_s: float) -> sqlite3.Connection:
    """Open a store, made with mode 600 when it is absent, at the latest version of the schema.

    Args:
        busy_s: seconds that a write waits for those of other processes.

    Raises: UserError for a file that cannot be opened, is not a store, or is of a later version.
    """
    try:
        with _opening:
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(path)
            connection = sqlite3.connect(
                path, timeout=busy_s, isolation_level=None, check_same_thread=False
            )
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"sessions {path}: {reason}. Choose another file") from None
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        _upgrade(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise database_error(error, path) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        pass


def _upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Raises: UserError, sqlite3.Error."""
    if _version(connection) == len(SCRIPTS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection)  # another process may have done it meanwhile
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version > len(SCRIPTS):
            raise UserError(
                f"sessions {path} were written by a later version of hermes_rl. Upgrade it, or "
                "choose another file"
            )
        if version == 0 and tables:
            raise UserError(f"{path} is not a session store. Choose another file")
        for script in SCRIPTS[version:]:
            for statement in _statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(SCRIPTS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _statements(script: str) -> list[str]:
    """The statements of a script. `executescript` would commit the transaction first."""
    found, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            found.append(begun)
            begun = ""
    return found


def database_error(error: sqlite3.Error, path: Path) -> UserError:
    """An error of SQLite as one line with the fix."""
    reason = str(error)
    if "locked" in reason or "busy" in reason:
        fix = "Another process is writing to it; try again when it is done"
    elif "full" in reason or "disk I/O" in reason:
        fix = "Free some space"
    elif "readonly" in reason or "unable to open" in reason:
        fix = "Check the permissions of the file and its folder"
    elif "not a database" in reason or "malformed" in reason:
        fix = "Choose another file"
    elif "fts5" in reason or "trigram" in reason or "tokenizer" in reason:
        fix = f"SQLite {sqlite3.sqlite_version} lacks FTS5 with trigrams; install 3.34 or later"
    else:
        fix = "Choose another file, or report this"
    return UserError(f"sessions {path}: {reason}. {fix}")
