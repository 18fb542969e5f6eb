"""The tool `session_search`: earlier conversations, by words, in parts, or the newest."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from hermes_rl.errors import ToolError, UserError
from hermes_rl.messages import to_openai
from hermes_rl.text import cut_middle, to_json
from hermes_rl.tools.base import Conversations, ToolContext, ToolResult, schema, tool

SESSION_SEARCH = "session_search"
MAX_HITS = 10
WINDOW = 5
"""Messages on each side of the one that is shown."""
_MESSAGE_CHARS = 2_000


@tool(name=SESSION_SEARCH, **schema(SESSION_SEARCH), toolset=SESSION_SEARCH, parallel=True)
async def _session_search(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {hits}, {session, messages}, or {sessions}."""
    store = ctx.services.sessions
    if store is None:
        raise ToolError("no earlier conversations are kept here")
    try:
        fields = await asyncio.to_thread(_looked_up, store, args)
    except UserError as error:
        raise ToolError(str(error)) from None
    return ToolResult(text=to_json(fields), data=fields)


session_search = replace(_session_search, needs_sandbox=False, untrusted=True)


def _looked_up(store: Conversations, args: dict[str, Any]) -> dict[str, Any]:
    limit = min(args.get("limit") or 3, MAX_HITS)
    if (wanted := args.get("session")) is not None:
        return _shown(store, wanted, args.get("position") or 0)
    if query := (args.get("query") or "").strip():
        hits = store.search(query, limit)
        found = [
            {
                "session": hit.session_id,
                "title": hit.title,
                "position": hit.position,
                "role": hit.role,
                "date": _date(hit.added_at),
                "text": hit.snippet,
            }
            for hit in hits
        ]
        return {"hits": found}
    newest = [
        {
            "session": info.session_id,
            "title": info.title,
            "date": _date(info.updated_at),
            "messages": info.messages,
        }
        for info in store.sessions(limit)
    ]
    return {"sessions": newest}


def _shown(store: Conversations, wanted: str, position: int) -> dict[str, Any]:
    info = store.find(wanted)
    messages = store.load(info.id)
    first = max(0, position - WINDOW)
    shown = [
        {"position": n, "role": form["role"], "text": _text(form)}
        for n, message in enumerate(messages[first : position + WINDOW + 1], first)
        for form in [to_openai(message)]
    ]
    return {"session": info.session_id, "total_messages": len(messages), "messages": shown}


def _text(form: dict[str, Any]) -> str:
    content = form.get("content")
    text = content if isinstance(content, str) else to_json(content) if content else ""
    for call in form.get("tool_calls") or ():
        text += f"\n[{call['function']['name']} {call['function']['arguments']}]"
    return cut_middle(text.strip(), _MESSAGE_CHARS)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
