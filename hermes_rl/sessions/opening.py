"""How sessions are opened by what a user writes, and copied between files and a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.messages import Message
from hermes_rl.sessions.base import Session, TurnRecord
from hermes_rl.sessions.files import FileSession, Head, Run, parse_session
from hermes_rl.sessions.store import SessionInfo, SessionStore, is_name


def open_session(session: str | Path | SessionStore | Session) -> Session:
    """A session by name in the default store, as a file (a `Path`, or a name that ends with
    `.jsonl`), a new one in a store, or one as it is.

    A file that an earlier version kept for a name is imported.

    Raises: UserError for a session that cannot be used, or is in use.
    """
    if isinstance(session, Path) or (isinstance(session, str) and session.endswith(".jsonl")):
        return FileSession(Path(session))
    if isinstance(session, SessionStore):
        return session.open()
    if not isinstance(session, str):
        return session
    store = SessionStore()
    try:
        file = store.path.parent / "sessions" / f"{session}.jsonl"
        if is_name(session) and os.path.isfile(file):
            import_file(store, file, session)
            file.rename(file.with_suffix(".jsonl.imported"))
        opened = store.open(session)
    except BaseException:
        store.close()
        raise
    opened.close_store = True
    return opened


def import_file(store: SessionStore, path: Path, name: str | None = None) -> SessionInfo:
    """Copy a session file into a store, under the same session id.

    Args:
        name: of the session in the store; None gives it none.

    Raises: UserError for a file that cannot be read or is not a session, for one that the store has
        already, and for a name that is taken.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: {(error.strerror or str(error)).lower()}. Check the path"
        ) from None
    head, turns = parse_session(data[: data.rfind(b"\n") + 1] or data, path)
    with store.writing():  # all of it, or nothing
        session = store.create(name, session_id=head.session_id, title=head.title)
        try:
            messages: list[Message] = []
            for run in turns:
                messages = [*messages[: run.kept], *run.added]
                session.record(
                    TurnRecord(
                        messages=messages,
                        model=head.model,
                        system_prompt=head.system_prompt,
                        end_reason=run.end_reason,
                    )
                )
        finally:
            session.close()
    return store.find(session.session_id)


def export_session(store: SessionStore, wanted: str) -> Iterator[bytes]:
    """The lines of a session as a file that `import_file` and `AIAgent` take."""
    info = store.find(wanted)
    head = Head(
        session_id=info.session_id,
        created_at=info.created_at,
        title=info.title,
        model=info.model,
        system_prompt=info.system_prompt,
    )
    run = Run(kept=0, added=store.messages(wanted), end_reason=info.end_reason, at=info.updated_at)
    yield msgspec.json.encode(head) + b"\n"
    yield msgspec.json.encode(run) + b"\n"
