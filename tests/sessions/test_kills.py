"""Processes that are killed, and processes that share a file."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hermes_rl.errors import UserError
from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.sessions import SessionStore
from hermes_rl.testing import FakeServer

WRITER = """
import sys
from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.sessions import SessionStore, TurnRecord

path, name, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
session = SessionStore(path).open(name)
messages = session.load()
print("open", flush=True)
for _ in range(turns):
    number = len(messages)
    messages.append(UserMessage(content=f"{number} " + "u" * (number % 7) * 500))
    messages.append(AssistantMessage(content=f"{number + 1}"))
    session.record(TurnRecord(messages=messages, system_prompt="s"))
    print(len(messages), flush=True)
"""


def writer(path: Path, name: str, turns: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(turns)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_kill_at_any_moment_loses_no_stored_turn(tmp_path: Path) -> None:
    path, rng = tmp_path / "s.db", random.Random(12)
    for _ in range(20):
        with writer(path, "work", 100_000) as process:
            assert process.stdout
            assert process.stdout.readline() == "open\n"
            time.sleep(rng.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
            reported = [int(line) for line in process.stdout.read().splitlines()]
        with SessionStore(path) as store:
            messages = store.messages("work")
            assert len(messages) % 2 == 0
            assert len(messages) - (reported[-1] if reported else 0) in (0, 2) or not reported
            assert [str(m.content).split()[0] for m in messages] == [
                str(n) for n in range(len(messages))
            ]
            store.open("work").close()  # the kernel has freed the lock
    with sqlite3.connect(path) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for table in ("message_text", "message_trigrams"):
            file.execute(f"INSERT INTO {table} ({table}) VALUES ('integrity-check')")
    file.close()


def test_two_processes_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "s.db"  # both of them may make it
    running = [writer(path, name, 60) for name in ("left", "right")]
    for process in running:
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        assert out.splitlines()[-1] == "120"
    with SessionStore(path) as store:
        assert {info.name: info.messages for info in store.sessions()} == {
            "left": 120,
            "right": 120,
        }
        held = store.open("left")
        with writer(path, "left", 1) as second:
            assert second.stderr
            error = second.stderr.read()
        assert error.splitlines()[-1].endswith(
            "session 'left' is in use by another agent; close it"
        )
        held.close()
        with writer(path, "left", 1) as second:
            assert second.stdout
            assert second.stdout.read().splitlines()[-1] == "122"


def test_a_file_that_stays_busy_is_one_line(tmp_path: Path) -> None:
    with SessionStore(tmp_path / "s.db", busy_s=0.05) as store:
        store.open("work").close()
        other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert len(store.sessions()) == 1  # reading does not wait
        with pytest.raises(UserError, match="try again when it is done"):
            store.rename("work", "title")
        other.close()
        store.rename("work", "title")


AGENT = """
import sys
from hermes_rl import AIAgent, ModelConfig
from hermes_rl.sessions import SessionStore

model = ModelConfig(name="m", base_url=sys.argv[1], api_key="right")
store = SessionStore(sys.argv[2])
agent = AIAgent(
    model, session=store.open("work"), sandbox="none", allow_unsandboxed=True,
    on_event=lambda e: print(e.turn, flush=True) if type(e).__name__ == "CallStarted" else None,
)
agent.chat(sys.argv[3])
"""


def test_a_killed_agent_keeps_its_completed_turns(tmp_path: Path, server: FakeServer) -> None:
    steps = [{"run": f"echo turn {n}"} for n in range(40)]
    held = {"text": "Done.", "latency_s": 600}  # the agent is at work whenever the kill comes
    script = "Do it.\nSCRIPT: " + json.dumps([*steps, held])
    arguments = [server.base_url, str(tmp_path / "s.db"), script]
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        while int(process.stdout.readline()) < 12:
            pass
        process.send_signal(signal.SIGKILL)
        last = int((process.stdout.read().splitlines() or ["12"])[-1])
    with SessionStore(tmp_path / "s.db") as store:
        messages = store.messages("work")
        assert messages[0] == UserMessage(content=script)
        completed = len([m for m in messages if isinstance(m, AssistantMessage)])
        assert completed in (last - 1, last)  # the last one may be stored and not yet reported
        info = store.find("work")
        assert (info.end_reason, info.model) == ("running", "m")
        assert info.calls >= completed
        assert (info.system_prompt or "").startswith("You are an agent")
