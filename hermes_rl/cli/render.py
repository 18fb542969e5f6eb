"""Formats rows as text: the table of a run, and one trajectory. Pure functions without I/O."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hermes_rl.record import replacements
from hermes_rl.text import many
from hermes_rl.text import visible as visible

Row = Mapping[str, Any]

WIDTH = 100
_OUTPUT_LINES = 12


def number(value: float | int | None) -> str:
    """A count with thousands separators; a dash for None."""
    return "-" if value is None else f"{value:,}"


def reward(value: float | None) -> str:
    """A reward, such as 1.0 or 0.25; a dash for None."""
    return "-" if value is None else f"{round(value, 3)}"


def seconds(value: float | None) -> str:
    """A duration: 2.6 s, 4:05, 1:02:30."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> str:
    """Aligned columns.

    Args:
        right: names of the columns that are aligned to the right, separated by spaces.
    """
    table = [tuple(header), *(tuple(r) for r in rows)]
    widths = [max(len(r[i]) for r in table) for i in range(len(header))]
    rights = set(right.split())

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.rjust(w) if h in rights else c.ljust(w)
            for c, w, h in zip(cells, widths, header, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join(line(r) for r in table)


def run_table(rows: Iterable[Row]) -> str:
    """One line per trajectory or failed attempt."""
    header, *lines = table_cells(rows)
    return columns(header, lines, right="# reward turns in out time")


def table_cells(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """The cells of `run_table`, its header first."""
    header = ("unit", "task", "#", "reward", "ended", "turns", "in", "out", "time")
    return [header, *map(_table_line, rows)]


def _table_line(row: Row) -> tuple[str, ...]:
    usage = row.get("usage") or {}
    timing = row.get("timing") or {}
    cause = row.get("cause")
    ended = row["end_reason"] if not cause or cause == row["end_reason"] else f"error: {cause}"
    return (
        row["unit_id"][:8],
        clip(visible(row["task_id"]), 32),
        str(row["repeat"]),
        reward(row["reward"]),
        ended,
        str(row["turns"]),
        number(usage.get("input_tokens")),
        number(usage.get("output_tokens")),
        seconds(timing.get("total_s")),
    )


def clip(text: str, width: int) -> str:
    """The first line of a text, at most `width` characters."""
    first, _, rest = text.strip().partition("\n")
    if rest or len(first) > width:
        return first[: width - 1] + "…"
    return first


def trajectory(row: Row) -> str:
    """One trajectory with its messages and the result of the verifier."""
    lines = [headline(row), *_models_of_calls(row)]
    replaced = replacements(row)
    starts = {context["start"]: context for context in row["contexts"] or () if context["start"]}
    pairs = zip(row["messages"], row["message_info"], strict=True)
    for index, (text, info) in enumerate(pairs):
        if index in starts:
            kept, why = starts[index]["kept"], starts[index]["reason"]
            lines.append(f" context   compressed to {len(kept):,} messages ({why})")
        message = json.loads(text) if isinstance(text, str) else text
        if index not in replaced or message["role"] == "user":
            lines += _message(message, info, row)
    parts = row.get("rewards") or []
    for part in parts:
        score = f"{reward(part['score'])}  " if len(parts) > 1 and part["detail"] else ""
        first, _, printed = (part["detail"] or reward(part["score"])).partition("\n")
        lines += [f" {part['name']:<8}  {score}{first}", *indented(printed)]
    if row.get("error"):
        lines.append(f" error     {row['error']}")
    return visible("\n".join(lines))


def child_line(row: Row) -> str:
    """A sub-agent below the trajectory that started it; `show` takes its id."""
    end = f"{row['end_reason']} after {row['turns']} turns"
    text = visible(clip(row["final_response"] or row["error"] or "", 100))
    return f"sub-agent {row['trajectory_id'][:12]}  {end}: {text}"


def headline(row: Row) -> str:
    """The first line: task, reward, ending, usage and time."""
    usage, timing = row["usage"], row["timing"]
    ended = row["end_reason"] if not row["cause"] else f"{row['end_reason']} ({row['cause']})"
    parts = (
        f"{row['task_id']} #{row['repeat']}",
        f"reward {reward(row['reward'])}",
        ended,
        many(row["turns"], "turn"),
        f"{number(usage['input_tokens'])} in, {number(usage['output_tokens'])} out",
        seconds(timing["total_s"]),
    )
    return " " + "   ".join(parts)


def _models_of_calls(row: Row) -> list[str]:
    """Requested and served models, when there are several."""
    requested = Counter(call["model"] for call in row["calls"])
    if len(requested) < 2:
        return []
    answered = ", ".join(row["served_models"]) or "none"
    return [f" models    calls: {_counted(requested)}; answered by {answered}"]


def _counted(numbers: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in numbers.most_common())


def _message(message: Row, info: Row, row: Row) -> list[str]:
    role, mark = message["role"], " (synthetic)" if info["synthetic"] else ""
    content = message.get("content") or ""
    if role == "system":
        return [f" system    {clip(content, WIDTH - 12)}"]
    if role == "user":
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        first, *rest = text.strip().split("\n") or [""]
        return [f" user{mark}      {first}"[: WIDTH * 4], *(f"           {x}" for x in rest)]
    if role == "tool":
        return indented(tool_output(content))
    lines = []
    if content.strip():
        first, *rest = content.strip().split("\n")
        lines = [f" {info['turn']:<2} {first}", *(f"    {x}" for x in rest)]
    calls = message.get("tool_calls") or []
    taken = _call_seconds(row, info["turn"])
    for call in calls:
        first, *rest = call_text(call).split("\n")
        lines.append(f" {info['turn']:<2} {first:<56} {seconds(taken)}")
        lines += [f"      {x}" for x in rest]
    return lines


def _call_seconds(row: Row, turn: int) -> float | None:
    spent = [c["latency_s"] for c in row["calls"] if c["turn"] == turn and c["latency_s"]]
    return sum(spent) if spent else None


def call_text(call: Row) -> str:
    """A tool call: a command as in a terminal, others by name and arguments."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name == "terminal" and isinstance(arguments, Mapping) and "command" in arguments:
        return "$ " + str(arguments["command"])
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{name} {shown}"


def tool_output(content: str) -> str:
    """The output of a tool, without its JSON envelope."""
    try:
        value = json.loads(content)
    except ValueError:
        return content
    if not isinstance(value, dict):
        return content
    output = str(value.get("output", "")) if "output" in value else content
    code = value.get("exit_code")
    notes = [f"[exit {code}]"] if code not in (0, None) else []
    notes += [str(value["error"])] if value.get("error") else []
    return "\n".join([output.rstrip("\n"), *notes]).strip("\n")


def indented(text: str) -> list[str]:
    """What a tool printed, at most so many lines of it."""
    if not text.strip():
        return []
    lines = text.rstrip("\n").split("\n")
    if len(lines) > _OUTPUT_LINES:
        hidden = len(lines) - _OUTPUT_LINES
        head = lines[: _OUTPUT_LINES // 2]
        lines = [*head, f"… {hidden} lines …", *lines[-_OUTPUT_LINES // 2 :]]
    return [f"      {line}" for line in lines]


def causes(rows: Iterable[Row]) -> str:
    """One line per kind of failure: the number of attempts, the first error, and the rows of the
    dataset."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row in rows:
        if row["status"] == "ok":
            continue
        placed = _PLACE.match(row["error"] or "") if row["cause"] == "task" else None
        text = (row["error"] or "").removeprefix(placed[0] if placed else "")
        where = f"line {placed[1]}" if placed else f"row {row['row_index'] + 1}"
        key = row["cause"] or "?", _VARIES.sub("#", text)
        found.setdefault(key, []).append((text, where))
    return "\n".join(
        f"failed {len(all_)}x {cause}: {clip(all_[0][0], WIDTH)} ({_places(w for _, w in all_)})"
        for (cause, _), all_ in sorted(found.items(), key=lambda item: -len(item[1]))
    )


_PLACE = re.compile(r"(?:\w+: )?\S+?:(\d+): ")
"""The place of a bad row at the start of its error."""
_VARIES = re.compile(r"\w*\d\w*")
_PLACES = 12


def _places(places: Iterable[str]) -> str:
    """`lines 3, 7, 9`: each once, in order."""
    numbers: dict[str, set[int]] = {}
    for place in places:
        kind, _, number = place.partition(" ")
        numbers.setdefault(kind, set()).add(int(number))
    parts = []
    for kind, every in numbers.items():
        listed = ", ".join(map(str, sorted(every)[:_PLACES]))
        more = ", ..." if len(every) > _PLACES else ""
        parts.append(f"{kind}{'s' * (len(every) > 1)} {listed}{more}")
    return "; ".join(parts)


def totals(rows: Sequence[Row]) -> str:
    """The last lines of a table: solved, tokens, cost, and where the time went."""
    final = [r for r in rows if r["status"] == "ok"]
    failed = len(rows) - len(final)
    solved = sum((r["reward"] or 0.0) >= 1.0 for r in final)
    tokens = {
        name: sum(r["usage"][name] or 0 for r in rows) for name in ("input_tokens", "output_tokens")
    }
    unknown = sum(r["usage"]["unknown_calls"] for r in rows)
    usd = sum(r["cost_usd"] or r.get("known_cost_usd") or 0.0 for r in rows)
    unpriced = sum(r["unpriced_calls"] or 0 for r in rows)
    spent = f"{tokens['input_tokens']:,} in, {tokens['output_tokens']:,} out"
    graded = sum(r["reward"] is not None for r in final)
    of_what = f"{solved} of {graded} solved, " if graded else "not graded, " if final else ""
    lines = [
        f"{of_what}{many(sum(r['turns'] for r in rows), 'turn')}, {spent}"
        + (f", {many(unknown, 'call')} of unknown usage" if unknown else "")
        + f", cost {cost(usd, unpriced)}"
        + (f"; {many(failed, 'attempt')} without a verdict" if failed else "")
    ]
    parts = ("sandbox_s", "model_s", "tool_s", "waiting_s", "verify_s")
    by_part = {p: sum((r["timing"] or {}).get(p) or 0.0 for r in rows) for p in parts}
    shown = ", ".join(f"{p[:-2]} {seconds(s)}" for p, s in by_part.items() if s >= 0.05)
    lines += [f"time by part, summed over rollouts: {shown}"] if shown else []
    return "\n".join(lines)


def models(rows: Sequence[Row]) -> str:
    """Requested and served models by attempts; empty for a single model."""
    requested = Counter(row["model"] for row in rows if row["model"])  # lost attempts have none
    served = Counter(name for row in rows for name in row["served_models"])
    if len({*requested, *served}) < 2:
        return ""
    return f"attempts by model: {_counted(requested)}; answered by: {_counted(served) or 'none'}"


def cost(usd: float, unpriced: int) -> str:
    """The known cost, and the number of calls without a price."""
    if unpriced:
        return (
            f"unpriced ({many(unpriced, 'call')})"
            if not usd
            else f"${usd:.4f} + {unpriced} unpriced"
        )
    return f"${usd:.4f}"
