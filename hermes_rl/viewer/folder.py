"""The runs below a folder, and what the pages of the viewer show of them, as plain values."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from batch_runner import read_manifest
from hermes_rl.errors import StoreError, UserError
from hermes_rl.record import replacements
from hermes_rl.store import (
    Run,
    decode_row,
    find_driver,
    in_flight,
    is_run,
    load_run,
    local_run,
    size_fault,
)
from hermes_rl.viewer.compare import totals
from hermes_rl.viewer.index import RunIndex

Plain = dict[str, Any]

DEPTH = 3
"""Levels of folders that are searched for runs."""
PAGE = 100
"""Rows of a page, at most."""
MESSAGES = 60
"""Messages of a page of a trajectory."""
TEXT_CHARS = 20_000
"""A longer text is cut, until the whole message is requested."""
TOKENS = 2_000
"""Tokens of a page of a segment."""
SEARCH_S = 0.1
"""How long a request waits for the search of texts, which continues meanwhile."""
_LIVE_S = 3.0
"""Attempts in flight are counted at most this often."""

SORTS = (
    *("row_index", "task_id", "reward", "end_reason", "turns", "total_tokens", "cost_usd"),
    *("total_s", "started_at", "tool_errors", "attempt"),
)
_SHOWN = (
    *("unit_id", "trajectory_id", "task_id", "repeat", "attempt", "status", "reward", "end_reason"),
    *("cause", "turns", "input_tokens", "output_tokens", "total_tokens", "cost_usd", "total_s"),
    *("tool_errors", "error", "started_at", "model"),
)
_HEAD = (
    *("unit_id", "trajectory_id", "task_id", "repeat", "attempt", "status", "reward", "end_reason"),
    *("cause", "owner", "error", "truncated", "turns", "usage", "cost_usd", "unpriced_calls"),
    *("timing", "tool_stats", "rewards", "metrics", "model", "served_models", "api_mode"),
    *("endpoint", "sampling", "sandbox", "toolsets", "tools", "contexts", "started_at"),
    *("finished_at", "env_name", "split", "metadata", "group_id", "run_id", "final_response"),
)
_GROUP = (
    *("group_id", "task_id", "size", "n_valid", "members", "trajectory_ids", "rewards", "valid"),
    *("why_invalid", "mean", "std", "equal_scores", "grpo", "rloo", "dr_grpo", "scored_by"),
    "error",
)
_IMAGE_KINDS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


class RunFolder:
    """The runs below a folder. Thread-safe.

    Args:
        path: a folder of runs, or one run, which may be a URL.

    Raises: UserError when the folder is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = local_run(path)
        if not self.path.is_dir():
            raise UserError(f"{path} is not a folder. Give the folder of your runs")
        self._indices: dict[str, RunIndex] = {}
        self._live: dict[str, tuple[float, int]] = {}
        self._checked: set[Path] = set()
        self._parts: dict[str, dict[str, list[Any]]] = {}
        """Run -> stem -> what was committed, while its files are as committed."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """End what still runs."""
        for index in self._indices.values():
            index.close()

    def _paths(self) -> dict[str, Path]:
        """Name -> run directory."""
        if is_run(self.path):
            return {self.path.absolute().name: self.path}
        return dict(sorted(_find(self.path, "", DEPTH)))

    def index(self, run: str) -> RunIndex:
        """The index of a run. Raises: UserError for an unknown name."""
        with self._lock:
            if run not in self._indices:
                paths = self._paths()
                if run not in paths:
                    raise UserError(f"{self.path}: no run {run!r}")
                self._check(paths[run])
                load_run(paths[run])  # refuses a newer version
                self._indices[run] = RunIndex(paths[run])
            return self._indices[run]

    def _check(self, path: Path) -> None:
        """Raises: StoreError for a run with a pipe or a device, which could be read forever."""
        if path in self._checked:
            return
        for folder, _, names in os.walk(path):
            for file in (Path(folder, name) for name in names):
                # A run that is running has a socket, which cannot be opened as a file.
                if file.is_fifo() or file.is_char_device() or file.is_block_device():
                    raise StoreError(f"{file} is not a regular file")
        self._checked.add(path)

    def runs(self) -> list[Plain]:
        """One row per run, the newest first."""
        rows = [self._overview(name, path) for name, path in self._paths().items()]
        return sorted(rows, key=lambda row: -(row["started_at"] or 0))

    def _overview(self, name: str, path: Path) -> Plain:
        row: Plain = {"run": name, "state": "damaged", "started_at": None, "error": None}
        try:
            self._check(path)
            run = load_run(path)
            manifest = read_manifest(run.run_dir)
            driver = find_driver(run.run_dir)
            starts = manifest.get("starts") or [{}]
            identity = manifest.get("identity") or {}
            started = starts[-1].get("started_at")
            row["started_at"] = None if started is None else float(started)
            row["model"] = (identity.get("model") or {}).get("name")
            stats = self._stored_stats(name, path) if driver is None else None
            row |= self._counts_of(name) if stats is None else _counts(stats)
            row["in_flight"] = self._in_flight(name, run) if driver is not None else 0
            row["trouble"] = list(manifest.get("trouble", ())) if driver is not None else []
            row["state"] = _state(row, live=driver is not None, ended=stats is not None)
            known = self._parts.setdefault(name, {})
            if driver is None and (fault := size_fault(run.run_dir, known)):
                row |= {"state": "damaged", "error": fault}
                del self._parts[name]  # a repair changes commits
        except Exception as error:  # one damaged run, of any kind, must not hide the others
            row |= {"state": "damaged", "started_at": None, "error": str(error)}
        return row

    def _stored_stats(self, name: str, path: Path) -> Plain | None:
        """stats.json, if it covers all rows: it is as new as the newest commit, or has as many, as
        in a copy, whose files have the times of copying."""
        try:
            file = path / "stats.json"
            stats: Plain = msgspec.json.decode(file.read_bytes())
            if file.stat().st_mtime >= (path / "commits").stat().st_mtime:
                return stats
        except (OSError, msgspec.DecodeError):
            return None
        stored, found = _counts(stats), self._counts_of(name)
        same = all(stored[key] == found[key] for key in ("done", "failed_attempts"))
        return stats if same else None

    def _counts_of(self, name: str) -> Plain:
        """Counts of a run without current statistics: it is in progress, or was killed."""
        return {"units": None, "given_up": None, **totals(self.index(name).table)}

    def _in_flight(self, name: str, run: Run) -> int:
        at, count = self._live.get(name, (0.0, 0))
        if time.monotonic() - at > _LIVE_S:
            count = len(in_flight(run.run_dir))
            self._live[name] = time.monotonic(), count
        return count

    def run(self, name: str) -> Plain:
        """One run: its overview, the choices of the filters, and what it was made with."""
        index = self.index(name)
        table = index.table
        manifest = read_manifest(index.run_dir)
        return {
            **self._overview(name, index.run_dir.path),
            "rows": len(table),
            "ends": _values(table["end_reason"]),
            "causes": _values(table["cause"]),
            "has_groups": bool(index.run_dir.parts("groups")),
            "manifest": {k: v for k, v in manifest.items() if k != "capabilities"},
        }

    def units(self, name: str, wanted: Mapping[str, str]) -> Plain:
        """A page of the table of attempts.

        Args:
            wanted: `task` (a part of its name, or of an id), `end`, `cause`, `status`, `reward`
                (solved, failed, partial, none, or MIN..MAX), `errors` (any text: with tool
                errors), `q` (text in the conversation), `sort` (one of SORTS, `-` before it for
                descending) and `offset`.

        Raises: UserError for a wrong value.
        """
        index = self.index(name)
        table = index.table
        rows = table.filter(mask) if (mask := _mask(table, wanted)) is not None else table
        left = 0
        if text := wanted.get("q", "").strip():
            matches, left = index.search(text, rows, SEARCH_S)
            rows = rows.filter(pa.array(matches))
        key = wanted.get("sort") or "row_index"
        if key.lstrip("-") not in SORTS:
            raise UserError(f"sort={key}: choose one of {', '.join(SORTS)}")
        order = "descending" if key.startswith("-") else "ascending"
        ties = [("row_index", "ascending"), ("task_id", "ascending"), ("repeat", "ascending")]
        keys = [(key.lstrip("-"), order), *(t for t in ties if t[0] != key.lstrip("-"))]
        offset = whole_number(wanted, "offset")
        places = pc.sort_indices(rows, sort_keys=keys)
        page = rows.take(places[offset : offset + PAGE]).select(list(_SHOWN))
        return {
            "total": len(table),
            "found": len(rows),
            "unsearched": left,
            "offset": offset,
            "rows": page.to_pylist(),
        }

    def unit(self, name: str, trajectory: str, sub: str = "") -> Plain:
        """One attempt without its messages: usage, time, grading, attempts of its unit, branches.

        Args:
            sub: the id of a sub-agent's transcript within it.
        """
        index = self.index(name)
        row = decode_row(self._row(index, trajectory, sub))
        head = {column: row[column] for column in _HEAD}
        head["calls"] = row["calls"]
        table = index.table
        others = table.filter(pc.equal(table["group_id"], row["group_id"]))
        shown = ["trajectory_id", "unit_id", "repeat", "attempt", "status", "reward", "end_reason"]
        head["others"] = others.select(shown).to_pylist()[:PAGE]
        subagents = index.related("subagents", trajectory, "root_trajectory_id")
        kept = ("trajectory_id", "task_prompt", "end_reason", "turns", "parent_call_id")
        head["subagents"] = [{k: one[k] for k in kept} for one in subagents]
        head["segments"] = [_branch(one) for one in self._segments(index, trajectory)]
        head["count"] = len(row["messages"])
        head["seed"] = str(row["seed"])  # beyond the integers of JavaScript
        return head

    def messages(self, name: str, trajectory: str, sub: str, start: int, whole: bool) -> Plain:
        """Some messages of an attempt, with facts about each.

        Args:
            start: position of the first one.
            whole: only this one, uncut.
        """
        row = self._row(self.index(name), trajectory, sub)
        stop = start + (1 if whole else MESSAGES)
        # An image is the n-th of all: earlier messages count, where there are any images.
        first = 0 if row["image_data"] else start
        forms = [msgspec.json.decode(text) for text in row["messages"][first:stop]]
        _place_images(forms, row["image_data"] or [])
        replaced, found = replacements(row), []
        for at, message in enumerate(forms[start - first :], start):
            info = {k: v for k, v in row["message_info"][at].items() if k != "raw_content"}
            shown = message if whole else _cut(message)
            found.append({"at": at, "message": shown, "info": info, "replaced": at in replaced})
        return {"messages": found, "count": len(row["messages"])}

    def image(self, name: str, trajectory: str, sub: str, number: int) -> tuple[bytes, str]:
        """An image and its type. Raises: UserError when it is not one that browsers show."""
        images = self._row(self.index(name), trajectory, sub)["image_data"] or []
        data = images[number]["bytes"] if 0 <= number < len(images) else None
        if isinstance(data, str):  # in a line of a `done` file
            data = base64.b64decode(data)
        for head, kind in _IMAGE_KINDS.items():
            if data and data.startswith(head):
                return data, kind
        raise UserError(f"no image {number} in the record")

    def tokens(self, name: str, trajectory: str, branch: int, start: int) -> Plain:
        """Some tokens of a segment with their masks, and their texts where the tokenizer is on this
        machine."""
        from hermes_rl.viewer.token_texts import token_texts  # most runs have no tokens

        index = self.index(name)
        segments = self._segments(index, trajectory)
        if not 0 <= branch < len(segments):
            raise UserError(f"no segment {branch} in this trajectory")
        one, stop = segments[branch], start + TOKENS
        names = ("input_ids", "loss_mask", "sampled_mask", "logprobs", "turn_ids", "version_ids")
        columns = {name: one[name][start:stop] for name in names}
        texts = token_texts(index.run_dir.path, one["tokenizer_hash"], columns["input_ids"])
        return {**_branch(one), "start": start, "page": TOKENS, "texts": texts, **columns}

    def groups(self, name: str, wanted: Mapping[str, str]) -> Plain:
        """A page of the groups: rewards and advantages of the repeats of each task."""
        run = load_run(self.index(name).run_dir.path)
        table = run.arrow("groups", list(_GROUP))
        newest: dict[str, int] = {g: n for n, g in enumerate(table["group_id"].to_pylist())}
        table = table.take(pa.array(sorted(newest.values()), pa.int64()))
        if task := wanted.get("task"):
            table = table.filter(pc.match_substring(table["task_id"], task, ignore_case=True))
        if wanted.get("equal"):
            table = table.filter(table["equal_scores"])
        offset = whole_number(wanted, "offset")
        rows = table.slice(offset, PAGE).to_pylist()
        return {"found": len(table), "offset": offset, "rows": rows}

    def _row(self, index: RunIndex, trajectory: str, sub: str = "") -> Plain:
        if not sub:
            return index.row(trajectory)
        for row in index.related("subagents", trajectory, "root_trajectory_id"):
            if row["trajectory_id"] == sub:
                return row
        raise UserError(f"no sub-agent {sub!r} in this trajectory")

    def _segments(self, index: RunIndex, trajectory: str) -> list[Plain]:
        found = index.related("segments", trajectory, "trajectory_id")
        return sorted(found, key=lambda one: one["branch_index"])


def _find(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, Path]]:
    try:
        names = [entry for entry in os.listdir(folder) if not entry.startswith(".")]
    except OSError:
        return
    for entry in names:
        path, name = folder / entry, prefix + entry
        if not path.is_dir():  # also a link to itself
            continue
        if is_run(path):
            yield name, path
        elif depth > 1:
            yield from _find(path, f"{name}/", depth - 1)


def _counts(stats: Plain) -> Plain:
    return {
        "units": stats["plan"].get("units"),
        "done": stats["units"]["done"],
        "given_up": stats["units"]["given_up"],
        "failed_attempts": stats["attempts"]["failed"],
        "graded": stats["reward"]["graded"],
        "solved": stats["reward"]["solved"],
        "mean_reward": stats["reward"]["mean"],
        "tokens": stats["tokens"]["total_tokens"],
        "cost_usd": stats["known_cost_usd"],
        "unpriced_calls": stats["calls"]["unpriced"],
    }


def _state(row: Plain, *, live: bool, ended: bool) -> str:
    if live:
        return "running"
    if not ended:
        return "killed"
    units = row["units"]
    left = None if units is None else units - row["done"] - (row["given_up"] or 0)
    return "finished" if left is not None and left <= 0 else "stopped"


def _values(column: pa.ChunkedArray) -> list[Plain]:
    """The values of a column with their counts, the most frequent first."""
    counts = [v for v in pc.value_counts(column).to_pylist() if v["values"] is not None]
    return sorted(counts, key=lambda one: -one["counts"])


def _mask(table: pa.Table, wanted: Mapping[str, str]) -> Any:
    """The rows that pass the filters; None without a filter."""
    masks = [
        pc.fill_null(pc.equal(table[column], wanted[name]), False)
        for name, column in (("end", "end_reason"), ("cause", "cause"), ("status", "status"))
        if wanted.get(name)
    ]
    if text := wanted.get("task", "").strip():
        named = pc.match_substring(table["task_id"], text, ignore_case=True)
        for column in ("unit_id", "trajectory_id", "group_id"):
            named = pc.or_(named, pc.starts_with(table[column], text))
        masks.append(named)
    if wanted.get("errors"):
        masks.append(pc.greater(table["tool_errors"], 0))
    if chosen := wanted.get("reward"):
        masks.append(_reward_mask(table["reward"], chosen))
    return reduce(pc.and_, masks) if masks else None


def _reward_mask(rewards: pa.ChunkedArray, chosen: str) -> Any:
    if chosen == "none":
        return pc.is_null(rewards)
    if chosen == "partial":
        mask = pc.and_(pc.greater(rewards, 0.0), pc.less(rewards, 1.0))
        return pc.fill_null(mask, False)
    low, _, high = {"solved": "1..", "failed": "..0"}.get(chosen, chosen).partition("..")
    try:
        least, most = float(low or "-inf"), float(high or "inf")
    except ValueError:
        raise UserError(f"reward={chosen}: give MIN..MAX") from None
    mask = pc.and_(pc.greater_equal(rewards, least), pc.less_equal(rewards, most))
    return pc.fill_null(mask, False)


def whole_number(wanted: Mapping[str, str], name: str) -> int:
    """A number of 0 or more. Raises: UserError for another value."""
    text = wanted.get(name) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(f"{name}={text}: must be a whole number")
    return int(text)


def _branch(segment: Plain) -> Plain:
    kept = (
        *("branch_index", "branch_kind", "parent_branch", "fork_reason", "agent_name", "trainable"),
        *("exclude_reason", "token_source", "n_sampled", "prompt_len", "truncated", "reward"),
        *("logprobs_kind", "policy_version_min", "policy_version_max", "model"),
    )
    counts = {"trained": sum(segment["loss_mask"]), "tokens": len(segment["input_ids"])}
    return {k: segment[k] for k in kept} | counts


def _place_images(forms: list[Any], images: list[Plain]) -> None:
    """Give each image of the messages its place in `image_data`, or its address."""
    number = 0
    for form in forms:
        parts = form.get("content")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") == "image":
                stored = images[number] if number < len(images) else {"bytes": None, "path": None}
                known = stored["bytes"] is not None
                part |= {"image": number} if known else {"address": stored["path"]}
                number += 1


def _cut(value: Any) -> Any:
    """A value with long texts cut; `{"cut": length, "text": start}` replaces each."""
    if isinstance(value, str):
        if len(value) > TEXT_CHARS:
            return {"cut": len(value), "text": value[:TEXT_CHARS]}
        return value
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    return [_cut(one) for one in value] if isinstance(value, list) else value
