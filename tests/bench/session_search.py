"""How long searches and writes of a session store take.

python session_search.py MESSAGES
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from hermes_rl.messages import AssistantMessage, Message, ToolMessage, UserMessage
from hermes_rl.sessions import SessionStore, TurnRecord

EACH = 200
"""Messages of a session."""
QUERIES = (
    *("error", "error line", "file77", "file77 error", "fil*", "absent", "%", "数据库"),
    *("会议", "时", "连接超时"),
)


def messages(number: int) -> list[Message]:
    """A session of commands and what they print, each tenth in Chinese."""
    listed: list[Message] = []
    for n in range(number, number + EACH, 4):
        text = f"Fix the error in src/file{n % 1009}.py, line {n}"
        listed.append(UserMessage(content="修复数据库连接超时的问题" if n % 10 == 0 else text))
        listed.append(AssistantMessage(content=f"I look at file{n % 1009}."))
        printed = f"src/file{n % 1009}.py:{n}: an error at line {n} of some output\n" * 8
        listed.append(ToolMessage(tool_call_id=f"call_{n}", name="terminal", content=printed))
        listed.append(AssistantMessage(content="Done. All tests pass."))
    return listed


def main() -> None:
    wanted = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, SessionStore(Path(folder) / "s.db") as store:
        start = time.perf_counter()
        for number in range(0, wanted, EACH):
            session = store.create()
            session.record(TurnRecord(messages=messages(number)))
            session.close()
        write_s = time.perf_counter() - start
        found: dict[str, float] = {}
        for query in QUERIES:
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                store.search(query)
                seconds.append(time.perf_counter() - start)
            found[query] = sorted(seconds)[1] * 1000
        session, listed = store.create(), messages(0)
        turns = []
        for end in range(2, EACH, 2):
            start = time.perf_counter()
            session.record(TurnRecord(messages=listed[:end]))
            turns.append((time.perf_counter() - start) * 1000)
        size = store.path.stat().st_size
        print(
            json.dumps(
                {
                    "queries_ms": found,
                    "worst_ms": max(found.values()),
                    "write_s": write_s,
                    "turn_ms": sorted(turns)[len(turns) // 2],
                    "bytes_per_message": size / wanted,
                }
            )
        )


if __name__ == "__main__":
    main()
