"""CPU of one model call by dialect and transport, streaming and not, in one process.

    python calls.py BASE_URL CONVERSATIONS REPEATS

Each conversation plays the script of the fake server: five tool turns and a text, 16 at a time. The
bare call posts and decodes the same bodies with aiohttp and msgspec. Prints milliseconds per call
as JSON, the least of all repetitions, in which all kinds take turns.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from hermes_rl.messages import SystemMessage, ToolMessage, UserMessage
from hermes_rl.models import (
    DIALECTS,
    Conversation,
    Endpoint,
    ModelClient,
    ModelRequest,
    Sampling,
    connect,
)

AT_ONCE = 16
CALLS = 6
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "terminal",
            "description": "Run a bash command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    },
)
Play = Callable[[int], Awaitable[None]]
KINDS = [(d, t, s) for d in DIALECTS for t in ("http", "sdk") for s in (False, True)]


async def conversation(client: ModelClient, number: int, *, stream: bool) -> None:
    """One conversation to its end."""
    messages = Conversation(
        [SystemMessage(content="You are an agent. " * 20), UserMessage(content=f"Task {number}.")]
    )
    request = ModelRequest(
        model="echo",
        conversation=messages,
        call_id=f"c-{number}",
        tools=TOOLS,
        stream=stream,
        sampling=Sampling(max_tokens=4_000),
    )
    for _ in range(CALLS):
        answer = await client.complete(request)
        messages.append(answer.message)
        for call in answer.message.tool_calls:
            messages.append(
                ToolMessage(tool_call_id=call.id, name=call.name, content="step\n" * 10)
            )


async def bare(session: aiohttp.ClientSession, url: str, number: int) -> None:
    """The same with nothing around it."""
    encode, decode = msgspec.json.encode, msgspec.json.decode
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent. " * 20},
        {"role": "user", "content": f"Task {number}."},
    ]
    for _ in range(CALLS):
        body = {"model": "echo", "messages": messages, "tools": TOOLS}
        async with session.post(f"{url}/chat/completions", data=encode(body)) as reply:
            message = decode(await reply.read())["choices"][0]["message"]
        messages.append(message)
        messages.extend(
            {"role": "tool", "tool_call_id": call["id"], "content": "step\n" * 10}
            for call in message.get("tool_calls") or ()
        )


async def cost(play: Play, conversations: int) -> float:
    """Milliseconds of this process's CPU per call."""
    numbers = iter(range(conversations))

    async def worker() -> None:
        for number in numbers:
            await play(number)

    began = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    return (time.process_time() - began) * 1000 / (conversations * CALLS)


async def measure(url: str, conversations: int) -> dict[str, float]:
    """All kinds once, after a few conversations that fill caches and pools."""
    found = {}
    async with aiohttp.ClientSession() as session:

        async def simply(number: int) -> None:
            await bare(session, url, number)

        await cost(simply, AT_ONCE)
        found["bare"] = await cost(simply, conversations)
    for mode, transport, stream in KINDS:
        client = connect(Endpoint(url, api_mode=mode, transport=transport))

        async def converse(
            number: int, client: ModelClient = client, stream: bool = stream
        ) -> None:
            await conversation(client, number, stream=stream)

        try:
            await cost(converse, AT_ONCE)
            name = f"{mode} {transport}{' stream' if stream else ''}"
            found[name] = await cost(converse, conversations)
        finally:
            await client.aclose()
    return found


def main() -> None:
    """Measure and print."""
    url, conversations, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rounds = [asyncio.run(measure(url, conversations)) for _ in range(repeats)]
    print(json.dumps({name: min(r[name] for r in rounds) for name in rounds[0]}))


if __name__ == "__main__":
    main()
