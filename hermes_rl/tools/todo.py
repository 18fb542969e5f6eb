"""The tool `todo`: the agent's list of steps, one for each conversation.

Every result is the whole list, so a conversation that is continued elsewhere has it too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.text import clean, one_line, to_json
from hermes_rl.tools.base import ToolContext, ToolResult, read_arguments, schema, tool

TODO = "todo"
"""Name of the tool and of its toolset; where `ToolContext.state` has the list."""
STATUSES = ("pending", "in_progress", "completed", "cancelled")
MAX_ITEMS = 256
MAX_CONTENT_CHARS = 4_000
MAX_ID_CHARS = 64
MAX_LIST_CHARS = 60_000
"""Of the list as JSON: each result shows all of it."""

Items = list[dict[str, str]]
"""Items with the keys `id`, `content` and `status`."""


@tool(name=TODO, **schema(TODO), toolset=TODO)
async def _todo(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {todos: [{id, content, status}], summary: {total, pending, ...}}."""
    items: Items = ctx.state.get(TODO) or []
    if "todos" in args:
        items = changed(items, args["todos"], merge=args.get("merge", False))
    counts = Counter(item["status"] for item in items)
    summary = {"total": len(items), **{status: counts[status] for status in STATUSES}}
    fields = {"todos": items, "summary": summary}
    text = to_json(fields)
    if len(text) > MAX_LIST_CHARS:
        raise ToolError(
            f"the whole list would have {len(text):,} characters, and at most {MAX_LIST_CHARS:,} "
            "fit; nothing was changed. Shorten the contents or remove finished items"
        )
    ctx.state[TODO] = items
    return ToolResult(text=text, data=fields)


todo = replace(_todo, needs_sandbox=False)


def changed(items: Items, todos: list[dict[str, Any]], *, merge: bool = False) -> Items:
    """The list after a call; `items` stays as it is.

    Args:
        todos: items, each with an id. Of several with one id, the last counts.
        merge: change and add items instead of replacing the list. A missing field keeps its
            value.

    Raises: ToolError for an item without id or content, too many items, a text that is too long.
    """
    kept = {item["id"]: item for item in items} if merge else {}
    for number, one in enumerate(todos, 1):
        item = _item(number, one, kept.get(one_line(clean(one["id"])), {}))
        kept[item["id"]] = item
    if len(kept) > MAX_ITEMS:
        raise ToolError(
            f"the list would have {len(kept)} items, and at most {MAX_ITEMS} are allowed; nothing "
            "was changed. Combine small steps or remove finished items"
        )
    return list(kept.values())


def listed(text: str) -> Items | None:
    """The list that a result of the tool shows; None where it shows none, such as an error.

    Args:
        text: as in a conversation: notes of the harness may follow the JSON.
    """
    try:
        shown = json.JSONDecoder().raw_decode(text)[0]["todos"]
        return changed([], read_arguments(to_json({"todos": shown}), _todo.parameters)["todos"])
    except (ValueError, TypeError, KeyError, RecursionError, ToolError):
        return None


def _item(number: int, values: Mapping[str, Any], before: Mapping[str, str]) -> dict[str, str]:
    """One item. Raises: ToolError."""
    name = one_line(clean(values["id"]))
    if not 0 < len(name) <= MAX_ID_CHARS:
        raise ToolError(f"item {number}: the id must have 1 to {MAX_ID_CHARS} characters")
    content = clean(values.get("content", "")).strip() or before.get("content", "")
    if not content:
        raise ToolError(f"item {number} (id {name!r}) is new, so it needs a content")
    if len(content) > MAX_CONTENT_CHARS:
        raise ToolError(
            f"item {number} (id {name!r}): the content has {len(content):,} characters, and at "
            f"most {MAX_CONTENT_CHARS:,} are allowed"
        )
    status = values.get("status", before.get("status", STATUSES[0]))
    return {"id": name, "content": content, "status": status}
