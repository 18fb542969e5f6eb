"""The books over many attempts whose answers are faulty, cut, empty or thrown away."""

import asyncio
import random
from collections import Counter
from typing import Any

import msgspec

from hermes_rl.cli import row_faults
from hermes_rl.record import Trajectory
from hermes_rl.testing import FakeConfig, FaultPlan

from .conftest import Open, script

UNITS = 150
ODD: list[dict[str, Any]] = [
    {"text": ""},
    {"text": "", "reasoning": "I must look."},
    {"text": "One part, ", "finish": "length"},
    {"run": "touch never", "finish": "length"},
    {"calls": [{"name": "Terminal", "arguments": "{,}"}]},
    {"calls": [{"arguments": '{"command": "touch ne'}]},
    {"calls": [{"name": "nope", "arguments": {}}]},
    {"text": "A text that is streamed in many pieces. " * 9, "fault": "cut"},
]
GOOD: list[dict[str, Any]] = [{"run": "true"}, {"text": "Done."}]


def prompt(unit: int) -> str:
    """Some steps, each with some odd answers before a good one."""
    draw = random.Random(unit)
    steps = [[*draw.choices(ODD, k=draw.randrange(3)), draw.choice(GOOD)] for _ in range(4)]
    return f"Unit {unit}. " + script(*steps)


async def test_every_answer_is_in_the_books_once(stage: Open) -> None:
    faults = FaultPlan(seed=1, mixed=0.2, retry_after_s=0.02)
    opened = await stage(
        backend="none",
        server=FakeConfig(faults=faults),
        endpoint={"stream": True},
        agent={"toolsets": ["terminal"], "limits": {"max_turns": 8}},
    )
    rows = await asyncio.gather(
        *(opened.attempt({"prompt": prompt(unit)}, unit) for unit in range(UNITS))
    )
    check_bill(rows, opened.server.entries)
    assert [fault for row in rows for fault in faults_of(row)] == []
    endings = Counter(row.end_reason for row in rows)
    assert endings["answered"] > UNITS / 2
    said = Counter(c.error for row in rows for c in row.calls if c.error)
    for why in ("empty answer", "cut tool call", "tool call without JSON arguments"):
        assert said[f"discarded: {why}"] > 5
    assert sum(row.metrics.get("continued_answers", 0) for row in rows) > 5
    discarded = sum(n for error, n in said.items() if error.startswith("discarded: "))
    assert sum(row.metrics.get("discarded_answers", 0) for row in rows) >= discarded * 0.9


def faults_of(row: Trajectory) -> list[str]:
    return list(row_faults(row.table, msgspec.to_builtins(row), {}))


def check_bill(rows: list[Trajectory], served: list[Any]) -> None:
    """Call by call: known tokens are the server's, and what is unknown is exactly what it says."""
    calls = {c.call_id: c for row in rows for c in row.calls}
    assert sorted(calls) == sorted(e.call_id for e in served)
    for entry in served:
        call = calls[entry.call_id]
        known = entry.outcome == "served" and entry.reported
        tokens = (entry.prompt_tokens, entry.completion_tokens) if known else (None, None)
        assert (call.input_tokens, call.output_tokens) == tokens, entry
        assert (call.outcome == "refused") == (entry.outcome == "refused"), entry
    known_entries = [e for e in served if e.outcome == "served" and e.reported]
    for name, field in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        total = sum(getattr(row.usage, f"{name}_tokens") or 0 for row in rows)
        assert total == sum(getattr(e, field) for e in known_entries)
    unknown = sum(e.outcome != "refused" for e in served) - len(known_entries)
    assert sum(row.usage.unknown_calls for row in rows) == unknown
