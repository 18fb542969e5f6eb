"""What it costs to write rows of one size: as a journal line, and as Parquet.

python parquet_cost.py ROWS BYTES
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from hermes_rl import events as ev
from hermes_rl.messages import AssistantMessage, ToolMessage, UserMessage
from hermes_rl.record import Trajectory
from hermes_rl.trajectory import fold

MESSAGES = 100


def row(number: int, size: int) -> Trajectory:
    """A trajectory of about so many bytes, in many messages."""
    key = ev.AttemptKey(unit_id=f"{number:032x}", epoch=1, attempt=0)
    stream: list[ev.Event] = [begun(key, number)]
    text = f"line {number} of some output that a command printed\n"
    each = (text * (size // MESSAGES // len(text) + 1))[: size // MESSAGES]
    stream.append(ev.MessageAdded(message=UserMessage(content=each), turn=0))
    for turn in range(MESSAGES // 2):
        stream.append(ev.MessageAdded(message=AssistantMessage(content=each), turn=turn))
        answer = ToolMessage(tool_call_id=f"call_{turn}", name="terminal", content=each)
        stream.append(ev.MessageAdded(message=answer, turn=turn, tool_ok=True, seconds=0.1))
    stream.append(ev.Ended(finished_at=2.0, end_reason="answered"))
    return fold(stream)


def begun(key: ev.AttemptKey, number: int) -> ev.Begun:
    """The first event of an attempt."""
    return ev.Begun(
        key=key,
        started_at=1.0,
        run_id="r",
        group_id="g",
        member=0,
        repeat=0,
        row_index=number,
        task_id=f"task-{number}",
        task_hash="h",
        config_hash="c",
        seed=number,
        prompt="p",
        model="m",
        api_mode="chat_completions",
        endpoint="e",
    )


def main() -> None:
    """See the module."""
    count, size = int(sys.argv[1]), int(sys.argv[2])
    rows = [row(number, size) for number in range(count)]
    began = time.process_time()
    lines = [msgspec.json.encode(each) for each in rows]
    journal = time.process_time() - began
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        write(Path(folder) / "warm-up.parquet", lines[:2])
        began = time.process_time()
        write(Path(folder) / "part.parquet", lines)
        parquet = time.process_time() - began
    print(
        json.dumps(
            {
                "bytes": len(lines[0]),
                "journal_ms": journal / count * 1e3,
                "parquet_ms": parquet / count * 1e3,
            }
        )
    )


def write(path: Path, lines: list[bytes]) -> None:
    """One part, as the publisher writes it."""
    from hermes_rl.store import TRAJECTORIES, PartWriter

    writer = PartWriter(path, TRAJECTORIES)
    for line in lines:
        writer.add(msgspec.json.decode(line), len(line))
    writer.close()


if __name__ == "__main__":
    main()
