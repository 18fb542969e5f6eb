"""Runs for the viewer: real ones with groups and exact tokens, and one with hostile texts."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from batch_runner import arun_batch
from hermes_rl import events as ev
from hermes_rl.config import parse_config
from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.store import Finished
from hermes_rl.testing import ExactConfig, ExactEngine, FakeServer, chat_of, write_tiny_tokenizer
from hermes_rl.trajectory import fold

HOSTILE = (
    "</pre></script><script>document.title='owned';alert(1)</script>"
    "<img src=x onerror=\"document.title='owned'\"><svg onload=alert(2)>"
    "<a href='javascript:alert(3)'>press</a><base href='http://192.0.2.1/'>"
    "<style>body{display:none}</style>&lt;b&gt; \x1b[31mred\x1b[0m \x1b]0;title\x07 "
    "\u202egpj.exe\u202c \u200b\u2066x\u2069 \x00end"
)
"""What a hostile model or program writes."""

LOOKS = [
    {"run": "ls; echo one"},
    {"reasoning": "I have to write it.", "run": "echo 1 > out.txt"},
]
CHANCE = "test $(($(date +%s%N) / 1000 % 2)) = 0 && echo 1 > out.txt; true"
FAILS = [{"run": "echo 0 > out.txt"}, {"run": "cat missing; exit 3"}]
STEPS: dict[str, list[Any]] = {
    **{f"sort-{n}": [*LOOKS, f"done {n}"] for n in range(4)},
    **{f"mixed-{n}": [{"run": CHANCE}, "ready"] for n in range(3)},
    **{f"never-{n}": [*FAILS, "I could not do it."] for n in range(2)},
    "refused": [{"text": "", "fault": "content_filter"}],
}

VERIFY = """\
if [ "$(cat "$WORKSPACE/out.txt" 2>/dev/null)" = 1 ]
then echo right
else printf 'out.txt is %s 1\\n' not; exit 1
fi
"""


def picture(width: int = 120, height: int = 60) -> bytes:
    """A PNG with a gradient."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    lines = b"".join(
        b"\0" + bytes(v for x in range(width) for v in (2 * x, 4 * y, 128)) for y in range(height)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def finished_attempt(number: int, text: str) -> Finished:
    """The rows of an attempt that answered with a text."""
    unit = f"{number:032x}"
    key = ev.AttemptKey(unit_id=unit, epoch=1, attempt=0)
    begun = ev.Begun(
        key=key, started_at=1e9 + number, run_id="run", group_id=unit, member=0, repeat=0,
        row_index=number, task_id=f"task-{number}", task_hash="h", config_hash="c", seed=2**62,
        prompt="Do it", model="toy", api_mode="chat_completions", endpoint="127.0.0.1:1",
    )  # fmt: skip
    row = fold([
        begun,
        ev.MessageAdded(message=UserMessage(content="Do it"), turn=0),
        ev.MessageAdded(message=AssistantMessage(content=text), turn=1),
        ev.Graded(reward=1.0),
        ev.Ended(finished_at=1e9 + number + 1, end_reason="answered"),
    ])  # fmt: skip
    return Finished(key=key, row=row)


def make_runs(folder: Path) -> Path:
    """Make all runs in a new folder."""
    asyncio.run(_make(folder))
    return folder / "runs"


async def _make(folder: Path) -> None:
    async with FakeServer() as server:
        await _run(folder, "small-model", server.base_url, STEPS, 4, max_turns=4)
        await _run(folder, "large-model", server.base_url, STEPS, 4, max_turns=2)
        await _run(folder, "hostile", server.base_url, {}, 1, rows=_hostile_rows())
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    config = ExactConfig(tokenizer=tokenizer, split="random", version="7")
    steps = {
        "exact-0": [{"reasoning": "let me look", "run": "echo some words"}, "so it is"],
        "exact-1": [{"run": "echo one", "lookalike": True}, "well"],
    }
    async with ExactEngine(config, chat=chat_of(tokenizer)) as engine:
        endpoint = {"base_url": engine.base_url, "tokens": "vllm", "tokenizer": str(tokenizer)}
        await _run(folder, "rl/exact", endpoint, steps, 3)
    (folder / "runs" / "notes").mkdir()
    broken = folder / "runs" / "broken"
    for name in ("epochs", "commits", "journal"):
        (broken / name).mkdir(parents=True)
    (broken / "epochs" / "1.json").write_text("{<script>alert(4)</script>")


def _hostile_rows() -> list[dict[str, Any]]:
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    content = [
        {"type": "text", "text": f"Look.\n{HOSTILE}"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": "http://192.0.2.1/far.png"}},
        {"type": "text", "text": "SCRIPT: " + json.dumps(_hostile_steps())},
    ]
    return [
        {
            "id": f"{HOSTILE[:60]} {n}",
            "prompt": [{"role": "user", "content": content}],
            "verify": f"printf '%s\\n' {json.dumps(HOSTILE.replace(chr(0), ''))}; test {n} = 0",
            "metadata": {HOSTILE: HOSTILE},
        }
        for n in range(2)
    ]


def _hostile_steps() -> list[Any]:
    quoted = HOSTILE.replace("\x00", "").replace("'", "'\\''")
    huge = "x" * 60_000 + "THE END"
    return [
        {"reasoning": HOSTILE, "text": HOSTILE, "run": f"printf '%s\\n' '{quoted}'"},
        {"run": "seq 1 400; exit 7"},
        {"calls": [{"name": HOSTILE[:40], "arguments": {HOSTILE[:50]: HOSTILE}}]},
        {"text": f"{HOSTILE}\n{huge}\n\ud800 lone"},
    ]


async def _run(
    folder: Path, name: str, endpoint: Any, steps: dict[str, list[Any]], repeats: int,
    rows: list[dict[str, Any]] | None = None, max_turns: int = 6,
) -> None:  # fmt: skip
    dataset = folder / f"{name.replace('/', '-')}.jsonl"
    made = rows or [
        {
            "id": task,
            "prompt": f"Write 1 to out.txt ({task}).\nSCRIPT: {json.dumps(script)}",
            "verify": VERIFY,
        }
        for task, script in steps.items()
    ]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in made))
    config = {
        "dataset": {"path": str(dataset), "repeats": repeats},
        "model": {"name": name.split("/")[0]},
        "agent": {
            "toolsets": ["terminal"],
            "preset": "rl",
            "switches": {"wording": 2},  # with it a whole conversation is on one page of tokens
            "limits": {"max_turns": max_turns},
        },
        "endpoint": endpoint if isinstance(endpoint, dict) else {"base_url": endpoint},
        "sandbox": {"backend": "none"},
        "run": {
            "out": str(folder / "runs" / name), "workers": 0, "allow_unsandboxed": True,
            "max_attempts": 1,
        },
    }  # fmt: skip
    await arun_batch(parse_config(config))
