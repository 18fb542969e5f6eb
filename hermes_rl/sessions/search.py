"""Full-text search over the messages of a store, the newest first.

A query is a list of terms that a message must all contain; quotes keep a phrase together, and a `*`
at the end of a term finds words that begin with it. Nothing else has a meaning, so no input is a
syntax error. Languages that are written without spaces are found by substrings, of any length.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass

_TERM = re.compile(r'"([^"]*)"|(\S+)')
_CJK = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003134f]"
)
"""Scripts that are written without spaces between words."""
_TRIGRAM = 3
_AROUND = 60
"""Characters of a snippet on each side of the term."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A message that was found."""

    session_id: str
    name: str | None
    title: str
    position: int
    """0-based place of the message in its conversation."""
    role: str
    replaced: bool
    """The conversation continued with another message in its place."""
    added_at: float
    """Unix time, seconds."""
    snippet: str


def is_cjk(text: str) -> bool:
    """Whether a text has characters of a script that is written without spaces."""
    return _CJK.search(text) is not None


@dataclass(frozen=True)
class _Term:
    text: str
    prefix: bool = False

    @property
    def quoted(self) -> str:
        """As a string of FTS5, in which no character has a meaning."""
        text = self.text.replace('"', '""')
        return f'"{text}"' + ("*" if self.prefix else "")


def _terms(query: str) -> list[_Term]:
    found = []
    for phrase, single in _TERM.findall(query.replace("\0", " ")):
        text = phrase or single.strip('"')
        prefix = not phrase and len(text) > 1 and text.endswith("*")
        text = text.rstrip("*") if prefix else text
        if text:
            found.append(_Term(text, prefix))
    return found


_COLUMNS = """s.session_id, s.name, s.title, m.position, m.role, m.replaced, m.added_at, m.content,
    m.tool_calls"""


def search(connection: sqlite3.Connection, query: str, limit: int) -> list[Hit]:
    """The newest messages that contain all terms of a query."""
    terms = _terms(query)
    if not terms or limit < 1:
        return []
    cjk = any(is_cjk(term.text) for term in terms)
    indexed = [t for t in terms if _is_indexed(t, cjk=cjk)]
    literal = [t for t in terms if t not in indexed]
    conditions, values, source, by = list[str](), list[str | int](), "messages m", "m.id"
    if indexed:
        table = "message_trigrams" if cjk else "message_text"
        # Read in the order of the index, newest first, the search ends at the limit.
        source, by = f"{table} JOIN messages m ON m.id = {table}.rowid", f"{table}.rowid"
        conditions.append(f"{table} MATCH ?")
        values.append(" AND ".join(t.quoted for t in indexed))
    elif cjk:
        conditions.append("m.cjk")
    for term in literal:
        conditions.append("(instr(lower(m.content), ?) OR instr(lower(m.tool_calls), ?))")
        values += [_lower(term.text)] * 2
    sql = (
        f"SELECT {_COLUMNS} FROM {source} JOIN sessions s ON s.id = m.session "
        f"WHERE {' AND '.join(conditions)} ORDER BY {by} DESC LIMIT ?"
    )
    rows = connection.execute(sql, [*values, limit]).fetchall()
    return [_hit(row, terms) for row in rows]


def _is_indexed(term: _Term, *, cjk: bool) -> bool:
    """Whether the index knows the term: short substrings and signs it does not."""
    return len(term.text) >= _TRIGRAM if cjk else any(c.isalnum() for c in term.text)


def _lower(text: str) -> str:
    """As SQLite's `lower` does it."""
    return "".join(c.lower() if c.isascii() else c for c in text)


def _hit(
    row: tuple[str, str | None, str, int, str, int, float, str, str], terms: list[_Term]
) -> Hit:
    session_id, name, title, position, role, replaced, added_at, content, calls = row
    text = content if content.strip() else calls or ""
    for candidate in (content, calls or ""):
        if terms[0].text.casefold() in candidate.casefold():
            text = candidate
            break
    return Hit(
        session_id=session_id,
        name=name,
        title=title,
        position=position,
        role=role,
        replaced=bool(replaced),
        added_at=added_at,
        snippet=_snippet(text, terms),
    )


def _snippet(text: str, terms: list[_Term]) -> str:
    """The text around the first term that is found in it."""
    folded = text.casefold()
    places = [at for t in terms if (at := folded.find(t.text.casefold())) >= 0]
    at, length = (min(places), len(terms[0].text)) if places else (0, 0)
    start, end = max(0, at - _AROUND), min(len(text), at + length + _AROUND)
    cut = " ".join(text[start:end].split())
    return ("…" if start else "") + cut + ("…" if end < len(text) else "")
