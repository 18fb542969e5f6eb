"""Runs on the token-exact fake engine, and comparisons with its log."""

import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_runner import Report, arun_batch
from hermes_rl.cli import main
from hermes_rl.config import parse_config
from hermes_rl.segments import answer_spans
from hermes_rl.store import load_run
from hermes_rl.testing import ExactConfig, ExactEngine, Truth, chat_of, write_tiny_tokenizer


def check(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run `hermes-rl check`; return its exit code, output and errors."""
    code = main(["check", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@asynccontextmanager
async def start_engine(folder: Path, **fields: Any) -> AsyncIterator[ExactEngine]:
    """Start an engine that splits answers into tokens differently from its tokenizer."""
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    config = ExactConfig(tokenizer=tokenizer, **{"split": "random", "version": "7", **fields})
    async with ExactEngine(config, chat=chat_of(tokenizer)) as engine:
        yield engine


async def run_scripts(
    engine: ExactEngine,
    folder: Path,
    scripts: Sequence[list[Any]],
    tokens: str,
    preset: str = "rl",
    agent: dict[str, Any] | None = None,
    **model: Any,
) -> Report:
    """Run one task per script; further fields go to the sections `agent` and `model`."""
    tasks = folder / "tasks.jsonl"
    rows = [
        {"id": f"t{n}", "prompt": f"Do it.\nSCRIPT: {json.dumps(steps)}\n", "verify": "true"}
        for n, steps in enumerate(scripts)
    ]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    endpoint = {"base_url": engine.base_url, "tokens": tokens, "outage_seconds": 60}
    config = {
        "dataset": {"path": str(tasks)},
        "model": {"name": "toy", **model},
        "agent": {"preset": preset, "toolsets": ["terminal"], **(agent or {})},
        "endpoint": {**endpoint, "tokenizer": str(engine.config.tokenizer)},
        "run": {"out": str(folder / "run"), "workers": 0, "concurrency": 8},
    }
    return await arun_batch(parse_config(config))


def served_entries(truth: Sequence[Truth], run: Path) -> dict[str, Truth]:
    """Return the log entries of delivered answers to the calls of a run, by call."""
    loaded = load_run(run)
    tables = [loaded.arrow(name).to_pylist() for name in ("trajectories", "failures")]
    calls = {call["call_id"] for rows in tables for row in rows for call in row["calls"]}
    entries = [e for e in truth if e.outcome == "served" and e.call_id in calls]
    return {str(e.call_id): e for e in entries if e.sampled_ids}


def rewrite_table(run: Path, into: Path, table: str, change: Callable[[list[Any]], None]) -> Path:
    """Copy a run and change the rows of one table, part by part."""
    shutil.copytree(run, into)
    for path in (into / table).iterdir():
        rows = pq.read_table(path)
        changed = rows.to_pylist()
        change(changed)
        for place, column in enumerate(rows.schema):
            values = [row[column.name] for row in changed]
            if values != rows.column(place).to_pylist():
                rows = rows.set_column(place, column, pa.array(values, column.type))
        pq.write_table(rows, path)
    return into


def differences(run: Path, entries: dict[str, Truth]) -> list[str]:
    """Return the differences between a run's segments and the engine's log."""
    found, trained = [], set()
    for row in load_run(run).arrow("segments").to_pylist():
        for call_id, part in zip(row["call_ids"], answer_spans(row), strict=True):
            if not part.trained:
                continue
            entry = entries[call_id]
            ids, logprobs = row["input_ids"], row["logprobs"]
            if call_id in trained:
                found.append(f"{call_id} is trained twice")
            trained.add(call_id)
            if tuple(ids[: part.start]) != entry.prompt_ids:
                found.append(f"{call_id} has another prompt")
            if tuple(ids[part.start : part.end]) != entry.sampled_ids:
                found.append(f"{call_id} has other ids")
            stored = logprobs[part.start : part.end]
            pairs = zip(stored, entry.raw_logprobs, strict=False)
            if len(stored) != len(entry.raw_logprobs) or any(
                abs(value - sampled) > 1e-5 for value, sampled in pairs
            ):
                found.append(f"{call_id} has other logprobs")
    return found + [f"{call_id} is nowhere" for call_id in entries if call_id not in trained]
