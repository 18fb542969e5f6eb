"""Ten rounds of 2,000 calls at once, as a process of its own: prints what was seen as JSON."""

import asyncio
import json
import os
import resource
import sys

from hermes_rl.messages import UserMessage
from hermes_rl.models.base import Conversation, ModelRequest
from hermes_rl.models.client import Endpoint, connect
from hermes_rl.models.governor import Governor
from hermes_rl.models.governor_wire import Charter
from hermes_rl.models.rests import Rests
from hermes_rl.models.share import DirectLine, Share
from hermes_rl.testing.fake_server import FakeConfig, FakeServer

CALLS, ROUNDS = 2000, 10

SLOW = json.dumps([{"text": "ok", "latency_s": 5.0}])
"""In the first round no answer comes before all calls are there."""


async def main(base_url: str | None) -> None:
    """Serve, or call."""
    if base_url is None:
        async with FakeServer(FakeConfig(keep=False)) as server:
            print(server.base_url, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print(json.dumps({"peak": server.peak_in_flight, "requests": server.requests}))
        return
    client = connect(Endpoint(base_url=base_url))
    charter = Charter(maximum=CALLS, start=CALLS)
    governor = Governor(charter, asyncio.get_running_loop().time, Rests())
    held = Conversation([UserMessage(content=f"SCRIPT: {SLOW}")])
    quick = Conversation([UserMessage(content="hello")])
    waits: list[float] = []
    open_files: list[int] = []

    async with Share("1", DirectLine(governor)) as share:
        limiter = share.limiter("h", "K", "m")

        async def call(conversation: Conversation, number: int) -> None:
            async with limiter.slot() as slot:
                waits.append(slot.waited_s)
                request = ModelRequest(model="echo", conversation=conversation, call_id=str(number))
                answer = await client.complete(request)
                slot.report(None, answer.usage, answer.rate_limit)

        await call(quick, -1)
        waits.clear()
        for turn in range(ROUNDS):
            async with asyncio.TaskGroup() as group:
                for number in range(CALLS):
                    group.create_task(call(quick if turn else held, number))
            open_files.append(len(os.listdir("/proc/self/fd")))
    await client.aclose()
    print(json.dumps({"longest_wait_s": max(waits), "open_files": open_files}))


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
