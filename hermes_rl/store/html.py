"""Runs and trajectories as HTML for the cells of notebooks. All text is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from hermes_rl.text import tool_output, visible

_TEXT_CHARS = 20_000
"""Longer texts are cut in a cell."""
_PRE = 'style="white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.2em 0; text-align: left"'


def facts_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """A title and a table of names and values."""
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts
    )
    return f"<b>{_text(title)}</b><table>{rows}</table>"


class TrajectoryRow(dict[str, Any]):
    """The columns of one attempt by name, JSON decoded. A notebook shows it turn by turn."""

    def __repr__(self) -> str:
        return f"<Trajectory {self['task_id']} #{self['repeat']}: reward {self['reward']}>"

    def _repr_html_(self) -> str:
        usage, timing, reward = self["usage"], self["timing"], self["reward"]
        facts = [
            ("reward", "not graded" if reward is None else f"{reward:.3g}"),
            ("ended", f"{self['end_reason']} {self['error'] or ''}"),
            ("turns", str(self["turns"])),
            ("tokens", f"{usage['input_tokens']} in, {usage['output_tokens']} out"),
            ("cost", "unknown" if self["cost_usd"] is None else f"${self['cost_usd']:.4f}"),
            ("time", f"{timing['total_s']:.1f} s"),
        ]
        shown = [facts_html(f"{self['task_id']} #{self['repeat']}", facts)]
        parts: dict[int, list[str]] = {}
        for message, info in zip(self["messages"], self["message_info"], strict=True):
            parts.setdefault(info["turn"], []).append(_message(message))
        for turn, texts in parts.items():
            calls = [call for call in self["calls"] if call["turn"] == turn]
            spent = sum(call["latency_s"] or 0 for call in calls)
            name = f"turn {turn} ({spent:.1f} s)" if turn else "task"
            shown.append(_folded(name, "".join(texts), is_open=turn > 0))
        shown += [
            _folded(f"{part['name']}: {part['score']:g}", _pre(part["detail"] or ""))
            for part in self["rewards"] or ()
        ]
        return "".join(shown)


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if message["role"] == "tool":
        content = tool_output(content)
    texts = [message.get("reasoning_content") or "", content]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        texts.append(f"{function['name']} {json.dumps(function['arguments'], ensure_ascii=False)}")
    shown = "".join(
        _pre(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
        for text in texts
        if text
    )
    return f"<div><i>{_text(message['role'])}</i>{shown}</div>"


def _folded(title: str, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' * is_open}><summary>{_text(title)}</summary>{body}</details>"


def _pre(text: str) -> str:
    more = f"\n… {len(text) - _TEXT_CHARS:,} more characters" if len(text) > _TEXT_CHARS else ""
    return f"<pre {_PRE}>{_text(text[:_TEXT_CHARS] + more)}</pre>"


def _text(text: str) -> str:
    return escape(visible(text)).encode("utf-8", "replace").decode()
