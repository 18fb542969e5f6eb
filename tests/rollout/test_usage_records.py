"""`hermes-rl check RUN` finds wrong usage records, and accepts right ones."""

from typing import Any

import msgspec
import pytest

from hermes_rl.cli import row_faults

from .conftest import Open, script

FAULTS = ("auth", "no_usage", "cut")


def faults_of(row: dict[str, Any], table: str) -> list[str]:
    return list(row_faults(table, row, {}))


@pytest.mark.parametrize("kind", [None, *FAULTS])
async def test_usage_records_of_real_rows_are_consistent(stage: Open, kind: str | None) -> None:
    steps = [{"run": "true"}, *([{"text": "x", "fault": kind}] if kind else []), "done"]
    name = "fake" if kind != "auth" else "fault-auth"
    s = await stage(backend="none", model={"name": name}, endpoint={"outage_seconds": 0.01})
    got = await s.attempt({"prompt": script(*steps)})
    row = msgspec.to_builtins(got)
    assert faults_of(row, got.table) == []
    row["usage"]["input_tokens"] = (row["usage"]["input_tokens"] or 0) + 1
    row["usage"]["unknown_calls"] += 1
    text = faults_of(row, got.table)
    assert any("usage.input_tokens is" in fault for fault in text)
    assert any("usage.unknown_calls is" in fault for fault in text)
