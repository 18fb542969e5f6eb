"""Conversations that outlive their agents: an SQLite store with full-text search, and files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.sessions.base import RecordsTurns, Session, TurnRecord, common_length
    from hermes_rl.sessions.files import FileSession
    from hermes_rl.sessions.opening import export_session, import_file, open_session
    from hermes_rl.sessions.search import Hit
    from hermes_rl.sessions.store import (
        SessionInfo,
        SessionStore,
        StoredSession,
        default_store_path,
    )
else:
    __getattr__, __dir__ = attach(__name__)
