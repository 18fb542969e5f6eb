"""`hermes-rl show --web`: the output of `show` as an HTML page.

Pages have no scripts and no external references, and all text is escaped.
"""

from __future__ import annotations

import json
import os
import tempfile
import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hermes_rl.cli import render
from hermes_rl.images import with_images
from hermes_rl.store import document
from hermes_rl.text import many

Row = Mapping[str, Any]

_STYLE = """\
table.units { margin-bottom: 1rem }
table.units th, table.units td { width: auto; border: 0; text-align: left;
  padding: .15rem .8rem .15rem 0; white-space: nowrap }
table.units tr > :nth-child(n+3) { text-align: right }
table.units tr > :nth-child(5) { text-align: left }
article { border-left: 3px solid var(--line); padding: 0 0 0 1rem; margin: 0 0 1.2rem }
article.assistant { border-color: var(--bar) }
h2 span { color: var(--soft); font-weight: normal }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0;
  font: 13px/1.45 ui-monospace, monospace }
pre.call::before { content: "call  "; color: var(--soft) }
pre.thought { color: var(--soft); font-style: italic }
img { max-width: 100% }
"""


def run_page(name: str, rows: Sequence[Row], notes: Iterable[str]) -> str:
    """The table of a run.

    Args:
        name: the run directory's.
        rows: as the table shows them.
        notes: lines below it.
    """
    head, *lines = render.table_cells(rows)
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    below = "<br>".join(escape(line) for note in notes for line in note.splitlines())
    table = f'<table class="units">\n<tr>{cells}</tr>\n{body}\n</table>\n<p>{below}</p>'
    return document(name, many(len(rows), "attempt"), table, _STYLE)


def trajectory_page(row: Row) -> str:
    """One trajectory, every message whole."""
    messages = with_images([json.loads(text) for text in row["messages"]], row["image_data"] or ())
    parts = [_message(m, i) for m, i in zip(messages, row["message_info"], strict=True)]
    parts += [
        f"<article><h2>{escape(part['name'])} <span>{render.reward(part['score'])}</span></h2>"
        f"{_text(part['detail'] or '')}</article>"
        for part in row["rewards"] or ()
    ]
    if row["error"]:
        parts.append(f"<article><h2>error</h2>{_text(row['error'])}</article>")
    title = f"{row['task_id']} #{row['repeat']}"
    lead = " · ".join(render.headline(row).strip().removeprefix(title).strip().split("   "))
    return document(render.visible(title), render.visible(lead), "\n".join(parts), _STYLE)


def _message(message: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    role = message["role"]
    marks = [f"turn {info['turn']}"] if info["turn"] else []
    marks += ["written by the harness"] if info["synthetic"] else []
    shown = [_content(message.get("content"), tool=role == "tool")]
    if message.get("reasoning_content"):
        shown.insert(0, _text(message["reasoning_content"], "thought"))
    shown += [_text(render.call_text(call), "call") for call in message.get("tool_calls") or ()]
    return (
        f'<article class="{escape(role)}"><h2>{escape(role)} '
        f"<span>{escape(', '.join(marks))}</span></h2>\n{''.join(shown)}</article>"
    )


def _content(content: Any, *, tool: bool) -> str:
    if not isinstance(content, list):
        text = content or ""
        return _text(render.tool_output(text) if tool else text)
    return "".join(map(_part, content))


def _part(part: Mapping[str, Any]) -> str:
    if part.get("type") == "image_url":
        url = str(part["image_url"]["url"])
        if url.startswith("data:image/"):
            return f'<img alt="image" src="{escape(url)}">'
        return _text(url)
    if part.get("type") == "text":
        return _text(str(part.get("text", "")))
    return _text(json.dumps(part, ensure_ascii=False))


def _text(text: str, kind: str = "") -> str:
    marked = f' class="{kind}"' if kind else ""
    return f"<pre{marked}>{escape(render.visible(text))}</pre>" if text.strip() else ""


def open_page(name: str, text: str) -> Path:
    """Write a page to a new temporary folder, and open it in a browser if there is a display.

    Args:
        name: of the file, without suffix.
    """
    path = Path(tempfile.mkdtemp(prefix="hermes-rl-show-")) / f"{name}.html"
    path.write_bytes(text.encode("utf-8", "replace"))
    # Without a display a text browser would use the terminal.
    if any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")):
        webbrowser.open(path.as_uri())
    return path
