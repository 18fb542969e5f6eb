"""Kill -9 in the middle of calls: no request that the server saw is missing from the record."""

import asyncio
import signal
import sys

import msgspec
import pytest

from hermes_rl.events import Event
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan

AGENTS = """
import asyncio, os, sys
import msgspec
from hermes_rl.messages import ToolMessage, UserMessage
from hermes_rl.models import Conversation, ModelRequest
from hermes_rl.models import Endpoint, connect
from hermes_rl.models.rate import Limiter
from hermes_rl.models.calls import ModelCaller, RetryPolicy
from hermes_rl.models.calls import Route

class Journal:
    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def record(self, event):
        os.write(self.file, msgspec.json.encode(event) + b"\\n")

async def rollout(caller):
    request = ModelRequest(model="echo", conversation=Conversation([UserMessage(content="hi")]),
                           call_id="")
    for turn in range(1, 7):
        answer = await caller.call(request, turn=turn)
        request.conversation.append(answer.message)
        for call in answer.message.tool_calls:
            request.conversation.append(
                ToolMessage(tool_call_id=call.id, name=call.name, content="x"))

async def main():
    client = connect(Endpoint(sys.argv[1]))
    route = Route.single("", client, Limiter(8))
    caller = ModelCaller([route], Journal(sys.argv[2]), RetryPolicy(base_s=0.01))
    await asyncio.gather(*(rollout(caller) for _ in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("at", [1, 17, 30])
async def test_no_request_is_unknown(kit, tmp_path, at):
    journal = tmp_path / "journal"
    reached = asyncio.Event()
    faults = FaultPlan(seed=at, mixed=0.2, retry_after_s=0.01)
    config = FakeConfig(faults=faults, latency_s=0.005)
    async with FakeServer(config, lambda n: reached.set() if n == at else None) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENTS, server.base_url, str(journal)
        )
        async with asyncio.timeout(30):
            await reached.wait()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await kit.until(lambda: not server.connections)
        entries = server.entries
    lines = journal.read_bytes().splitlines()
    events = kit.Events()
    events.all = [msgspec.json.decode(line, type=Event) for line in lines]
    started = {start.call_id for start in events.starts}
    ended = {end.call_id: end for end in events.ends}
    seen = {entry.call_id: entry for entry in entries}
    assert len(seen) >= at
    assert set(seen) <= started
    for call_id, end in ended.items():
        outcome = {"ok": "served", "refused": "refused", "cut": "cut"}[end.outcome]
        assert seen[call_id].outcome == outcome
    assert len(started - set(ended)) <= 8  # the unknown ones: at most one per agent
