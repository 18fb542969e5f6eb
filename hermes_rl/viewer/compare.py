"""What differs between two runs (configuration, prompts, tools, versions, results), and between two
attempts, message by message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from batch_runner import read_manifest
from hermes_rl.store import Run, load_run
from hermes_rl.text import many, tool_output
from hermes_rl.viewer.index import RunIndex

Plain = dict[str, Any]
Row = Mapping[str, Any]

TASKS = 200
"""Tasks with different results that are listed, at most."""
_LINES = 2_000
"""Lines of a message that are compared."""
_LINE_CHARS = 2_000
"""Characters of a line that are shown."""
_NEAR = 3
"""Equal lines that are shown before and after a change."""
_HEAD = (
    *("task_id", "repeat", "attempt", "reward", "end_reason", "cause", "turns", "model"),
    *("cost_usd", "error", "rewards"),
)


def diff_runs(a: str | Path, b: str | Path) -> Plain:
    """Compare two runs. Only light columns of their rows are read, and one whole row of each.

    Returns: `settings` (name, value of a, value of b) of the configuration, dataset, versions and
    machine that differ; `tasks` that only one has, or whose content differs, at most TASKS of each,
    with their `counts`; `prompt` and `tools` as changed lines, from the first task that both have;
    `results` of each; and `changed`: tasks with another mean reward, the largest difference first.

    Raises: UserError when one is not a run.
    """
    runs = [load_run(path) for path in (a, b)]
    settings = [_settings(run) for run in runs]
    indices = [RunIndex(run.path) for run in runs]
    scores = [_scores(index.table) for index in indices]
    hashes = [_task_hashes(index) for index in indices]
    common = scores[0].keys() & scores[1].keys()
    changed: list[Plain] = [
        {"task_id": task, "a": scores[0][task], "b": scores[1][task]}
        for task in sorted(common)
        if scores[0][task]["reward"] != scores[1][task]["reward"]
    ]
    changed.sort(key=lambda one: -abs((one["b"]["reward"] or 0) - (one["a"]["reward"] or 0)))
    both = hashes[0].keys() & hashes[1].keys()
    alone = {
        "only_a": hashes[0].keys() - both,
        "only_b": hashes[1].keys() - both,
        "edited": {t for t in both if hashes[0][t] != hashes[1][t]},
    }
    samples = [_sample(index, min(both, default=None)) for index in indices]
    return {
        "a": str(a),
        "b": str(b),
        "settings": [
            {"name": name, "a": settings[0].get(name), "b": settings[1].get(name)}
            for name in sorted({*settings[0], *settings[1]})
            if settings[0].get(name) != settings[1].get(name)
        ],
        "tasks": {
            "common": len(both),
            **{name: sorted(found)[:TASKS] for name, found in alone.items()},
            "counts": {name: len(found) for name, found in alone.items()},
        },
        "prompt": diff_lines(*(one["prompt"] for one in samples)),
        "tools": diff_lines(*(one["tools"] for one in samples)),
        "results": [
            {**totals(index.table), "unfinished": run.unfinished}
            for index, run in zip(indices, runs, strict=True)
        ],
        "changed": changed[:TASKS],
        "changed_count": len(changed),
    }


def _settings(run: Run) -> dict[str, Any]:
    """Everything that a run was made with, by dotted name."""
    manifest = read_manifest(run.run_dir)
    try:
        config = yaml.safe_load((run.path / "run.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        config = manifest.get("identity")
    more = {name: manifest.get(name) for name in ("versions", "platform", "git_commit")}
    dataset = {k: v for k, v in (manifest.get("dataset") or {}).items() if k != "changed_ns"}
    return dict(_flat({**(config or {}), **more, "dataset_file": dataset}))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else str(key))
    elif value not in (None, {}, []):
        yield name, value


def _task_hashes(index: RunIndex) -> dict[str, str]:
    found: dict[str, str] = {}
    for table in ("failures", "trajectories"):
        for part in index.run_dir.parts(table):
            with index.run_dir.read_part(part, pq.ParquetFile) as file:
                rows = file.read(columns=["task_id", "task_hash"])
            found |= dict(zip(*(rows[c].to_pylist() for c in rows.column_names), strict=True))
    return found


def _scores(table: pa.Table) -> dict[str, Plain]:
    """Task -> mean reward and number of its graded units."""
    done = table.filter(pc.equal(table["status"], "ok"))
    grouped = done.group_by("task_id").aggregate([("reward", "mean"), ("reward", "count")])
    return {
        row["task_id"]: {"reward": row["reward_mean"], "units": row["reward_count"]}
        for row in grouped.to_pylist()
    }


def totals(table: pa.Table) -> Plain:
    """The results of all attempts in the table of an index."""
    done = table.filter(pc.equal(table["status"], "ok"))
    rewards = done["reward"]
    return {
        "done": len(done),
        "failed_attempts": len(table) - len(done),
        "graded": len(rewards) - rewards.null_count,
        "solved": pc.sum(pc.greater_equal(rewards, 1.0)).as_py() or 0,
        "mean_reward": pc.mean(rewards).as_py(),
        "mean_turns": pc.mean(done["turns"]).as_py(),
        "tokens": pc.sum(table["total_tokens"]).as_py(),
        "cost_usd": pc.sum(table["cost_usd"]).as_py(),
        "unpriced_calls": pc.sum(table["unpriced_calls"]).as_py() or 0,
        "mean_seconds": pc.mean(done["total_s"]).as_py(),
        "ends": {v["values"]: v["counts"] for v in pc.value_counts(done["end_reason"]).to_pylist()},
    }


def _sample(index: RunIndex, task: str | None) -> dict[str, str]:
    """The prompt and the tools of the first row of a task; of any, if it is None."""
    table = index.table
    rows = table if task is None else table.filter(pc.equal(table["task_id"], task))
    if not len(rows):
        return {"prompt": "", "tools": ""}
    row = index.row(rows["trajectory_id"][0].as_py())
    messages = [_decoded(text) for text in row["messages"]]
    prompt = []
    for message in messages:
        if message["role"] not in ("system", "user", "developer"):
            break
        prompt.append(f"[{message['role']}]\n{message_text(message)}")
    tools = _decoded(row["tools"]) if row["tools"] else []
    return {"prompt": "\n".join(prompt), "tools": json.dumps(tools, indent=1, ensure_ascii=False)}


def diff_attempts(a: Row, b: Row) -> Plain:
    """Compare two attempts message by message.

    Args:
        a, b: rows of `trajectories` or `failures`, JSON columns as text.

    Returns: `heads`, and `steps`: `equal` messages (positions in both), `change` (one message
    became another: its lines), and messages that `only` one has.
    """
    messages = [[_decoded(text) for text in row["messages"]] for row in (a, b)]
    keys = [[_key(message) for message in side] for side in messages]
    matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    steps: list[Plain] = []
    for tag, a_start, a_stop, b_start, b_stop in matcher.get_opcodes():
        if tag == "equal":
            steps.append({"op": "equal", "a": a_start, "b": b_start, "count": a_stop - a_start})
            continue
        pairs = min(a_stop - a_start, b_stop - b_start)
        for n in range(pairs):
            steps += _change(messages, a_start + n, b_start + n)
        steps += [_only("a", messages[0], at) for at in range(a_start + pairs, a_stop)]
        steps += [_only("b", messages[1], at) for at in range(b_start + pairs, b_stop)]
    return {"heads": [_head(a), _head(b)], "steps": steps}


def _head(row: Row) -> Plain:
    return {
        **{name: row[name] for name in _HEAD},
        "total_tokens": (row["usage"] or {}).get("total_tokens"),
        "total_s": (row["timing"] or {}).get("total_s"),
    }


def _change(messages: list[list[Plain]], a: int, b: int) -> list[Plain]:
    one, other = messages[0][a], messages[1][b]
    if one["role"] != other["role"]:
        return [_only("a", messages[0], a), _only("b", messages[1], b)]
    lines = diff_lines(message_text(one), message_text(other))
    if not lines:  # they differ in what is not text
        texts = (json.dumps(m, indent=1, sort_keys=True, ensure_ascii=False) for m in (one, other))
        lines = diff_lines(*texts)
    return [{"op": "change", "a": a, "b": b, "role": one["role"], "lines": lines}]


def _only(side: str, messages: list[Plain], at: int) -> Plain:
    lines = message_text(messages[at]).split("\n")
    shown = [_cut_line(line) for line in lines[:_LINES]]
    shown += [f"… {many(len(lines) - _LINES, 'more line')}"] if len(lines) > _LINES else []
    text = "\n".join(shown)
    return {"op": "only", "side": side, "at": at, "role": messages[at]["role"], "text": text}


def _key(message: Plain) -> str:
    kept = {k: v for k, v in message.items() if k != "tool_call_id"}  # a server chooses ids
    calls = message.get("tool_calls")
    if calls:
        kept["tool_calls"] = [one.get("function") for one in calls]
    return json.dumps(kept, sort_keys=True)


def message_text(message: Row) -> str:
    """A message as text: reasoning, content, and tool calls."""
    parts = []
    if message.get("reasoning_content"):
        parts.append(f"[reasoning] {message['reasoning_content']}")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(
            str(p.get("text", "")) if p.get("type") == "text" else f"[{p.get('type')}]"
            for p in content
        )
    if content and message["role"] == "tool":
        content = tool_output(content)
    if content:
        parts.append(str(content))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            shown = "\n".join(
                f"  {k}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}"
                for k, v in arguments.items()
            )
        else:
            shown = f"  {arguments}"
        parts.append(f"[call] {function.get('name')}\n{shown}")
    return "\n".join(parts)


def diff_lines(a: str, b: str) -> list[list[str]]:
    """Pairs of a mark (" ", "-", "+") and a line; "…" marks a note on lines that are left out:
    equal ones far from a change, and what was not compared. Empty when the texts are equal."""
    if a == b:
        return []
    sides = [text.split("\n") for text in (a, b)]
    start = _equal_start(*sides)
    stop = _equal_start(*(side[start:][::-1] for side in sides))
    middle = [side[start : len(side) - stop] for side in sides]
    compared = [side[:_LINES] for side in middle]
    parts: list[tuple[str, list[str], list[str]]] = [("equal", sides[0][:start], [])]
    matcher = SequenceMatcher(None, compared[0], compared[1])
    for tag, a_start, a_stop, b_start, b_stop in matcher.get_opcodes():
        parts.append((tag, compared[0][a_start:a_stop], compared[1][b_start:b_stop]))
    parts.append(("equal", sides[0][len(sides[0]) - stop :], []))
    found: list[list[str]] = []
    for number, (kind, a_lines, b_lines) in enumerate(parts):
        if kind == "equal":
            found += _equal_lines(a_lines, number > 0, number < len(parts) - 1)
            continue
        found += [["-", _cut_line(line)] for line in a_lines]
        found += [["+", _cut_line(line)] for line in b_lines]
    if left := [len(side) - _LINES for side in middle if len(side) > _LINES]:
        found.append(["…", f"{many(sum(left), 'line')} not compared"])
    return found


def _equal_start(a: list[str], b: list[str]) -> int:
    """How many lines are equal from the first one on."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(a), len(b)))


def _equal_lines(lines: list[str], after: bool, before: bool) -> list[list[str]]:
    """Equal lines; only those near a change.

    Args:
        after: a change is before them.
        before: a change is after them.
    """
    shown = [[" ", _cut_line(line)] for line in lines]
    first, last = _NEAR * after, _NEAR * before
    left = len(lines) - first - last
    if left <= _NEAR:
        return shown
    note = ["…", many(left, "equal line")]
    return [*shown[:first], note, *shown[len(shown) - last :]]


def _cut_line(line: str) -> str:
    left = len(line) - _LINE_CHARS
    return line if left <= 0 else f"{line[:_LINE_CHARS]}… {many(left, 'more character')}"


def _decoded(text: Any) -> Any:
    return msgspec.json.decode(text) if isinstance(text, str) else text
