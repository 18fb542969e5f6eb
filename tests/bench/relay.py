"""What the driver spends on workers that do not see the run directory, beside those that do.

`python tests/bench/relay.py [UNITS]` prints one line of JSON for each kind of rows. Measured is the
CPU of the driver from a worker's encoded replies to committed rows, without Ray's part: for shared
storage it decodes receipts and commits what the worker prepared; otherwise it also writes the
journal and Parquet.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from batch_runner import Reply
from hermes_rl import events as ev
from hermes_rl.messages import AssistantMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.store import (
    Driver,
    Finished,
    JournalWriter,
    Prepared,
    Publisher,
    RelayedWriter,
    RelayJournal,
    encode,
    open_run,
    receipt_of,
)
from hermes_rl.trajectory import fold
from hermes_rl.usage import Usage

TURNS = 8
LATER_S = 3600.0
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Reply).decode


def attempt(number: int, chars: int, chance: random.Random) -> list[ev.Event]:
    """The events of one, with results of tools of about this length."""
    unit = hashlib.sha256(b"%d" % number).hexdigest()[:32]
    key = ev.AttemptKey(unit_id=unit, epoch=1, attempt=0)
    about: dict[str, Any] = {
        **dict.fromkeys(("task_id", "group_id", "prompt", "run_id"), unit),
        **dict.fromkeys(("model", "api_mode", "endpoint"), "model"),
        **dict.fromkeys(("task_hash", "config_hash"), "0" * 64),
        **dict.fromkeys(("member", "repeat", "row_index", "seed"), 0),
    }
    made: list[ev.Event] = [
        ev.Begun(key=key, started_at=time.time(), **about),
        ev.MessageAdded(message=UserMessage(content="Do it."), turn=0),
    ]
    for turn in range(1, TURNS + 1):
        call = f"{unit}-{turn}"
        texts = (f"{chance.getrandbits(20):x}" for _ in range(chars // 6))
        ask = ToolCall(id=call, name="terminal", arguments='{"command":"ls -l"}')
        made += [
            ev.CallStarted(
                call_id=call, turn=turn, purpose="agent", model="model", started_at=time.time()
            ),
            ev.CallEnded(
                call_id=call,
                outcome="ok",
                latency_s=1.0,
                finish_reason="tool_calls",
                usage=Usage(input_tokens=1000, output_tokens=20),
            ),
            ev.MessageAdded(message=AssistantMessage(content="", tool_calls=(ask,)), turn=turn),
            ev.MessageAdded(
                message=ToolMessage(tool_call_id=call, name="terminal", content=" ".join(texts)),
                turn=turn,
            ),
        ]
    return [*made, ev.Ended(finished_at=time.time(), end_reason="answered", cause=None)]


async def relayed(driver: Driver, attempts: list[list[ev.Event]], rows: list[Finished]) -> float:
    """CPU seconds for workers whose lines travel."""
    journal, replies = RelayJournal("1-1"), list[bytes]()
    for events, finished in zip(attempts, rows, strict=True):
        recorder = journal.recorder(finished.key)
        for event in events:
            recorder.record(event)
        await journal.finish(finished)
    while not journal.empty:
        replies.append(_pack(Reply(lines=journal.take())))

    def publisher(writer: JournalWriter) -> Publisher:
        return Publisher(writer, every_s=LATER_S, commit=driver.commit)

    writer = RelayedWriter(JournalWriter(driver.run_dir, driver.epoch, 1), publisher)
    await writer.open()
    start, ended = time.process_time(), 0
    for reply in replies:
        ended += len(await writer.take(_unpack(reply).lines))
    await writer.drain()
    spent = time.process_time() - start
    await writer.aclose()
    assert ended == len(rows)
    return spent


async def shared(driver: Driver, rows: list[Finished]) -> float:
    """CPU seconds for workers that write files themselves, as here outside the measurement."""
    spent = 0.0

    async def commit(prepared: Prepared) -> None:
        nonlocal spent
        reply = _pack(Reply(prepared=prepared))
        start = time.process_time()
        batch = _unpack(reply).prepared
        assert batch is not None
        await driver.commit(batch)
        spent += time.process_time() - start

    async with JournalWriter(driver.run_dir, driver.epoch, 2) as journal:
        replies = []
        for finished in rows:
            place = await journal.finish(finished)
            replies.append(_pack(Reply(receipts=(receipt_of(finished, "1-2", place),))))
        await Publisher(journal, commit=commit).drain()
    start = time.process_time()
    for reply in replies:
        _unpack(reply)
    return spent + time.process_time() - start


async def measure(units: int, chars: int) -> dict[str, Any]:
    """Both ways, for rows with results of this length."""
    chance = random.Random(0)
    attempts = [attempt(number, chars, chance) for number in range(units)]
    rows = []
    for events in attempts:
        assert isinstance(events[0], ev.Begun)
        rows.append(Finished(key=events[0].key, row=fold(events)))
    size = sum(len(encode(finished)) for finished in rows) / 2**20
    found: dict[str, Any] = {"KB per row": round(1024 * size / units, 1)}
    for name in ("shared", "relayed"):
        with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
            async with await open_run(Path(folder) / "run", {}) as driver:
                if name == "shared":
                    spent = 1000 * await shared(driver, rows)
                else:
                    spent = 1000 * await relayed(driver, attempts, rows)
        found[f"{name}, ms per unit"] = round(spent / units, 3)
        found[f"{name}, ms per MB"] = round(spent / size, 1)
    return found


def main() -> None:
    """Print the figures."""
    units = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    for chars, share in ((200, 1), (2000, 1), (20_000, 5)):
        print(json.dumps(asyncio.run(measure(units // share, chars))), flush=True)


if __name__ == "__main__":
    main()
