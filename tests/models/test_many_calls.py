"""2,000 calls in flight at once: no call waits for a pool, and descriptors stay flat."""

import asyncio
import json
import resource
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("two_thousand.py")
PIPE = asyncio.subprocess.PIPE


@pytest.mark.slow
async def test_two_thousand_calls_in_flight():
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 4096, "too few descriptors to try this"
    server = await asyncio.create_subprocess_exec(sys.executable, PROGRAM, stdin=PIPE, stdout=PIPE)
    try:
        async with asyncio.timeout(120):
            address = (await server.stdout.readline()).decode().strip()
            client = await asyncio.create_subprocess_exec(
                sys.executable, PROGRAM, address, stdout=PIPE
            )
            seen, _ = await client.communicate()
            told, _ = await server.communicate(b"\n")
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()
    calls, served = json.loads(seen), json.loads(told)
    assert served == {"peak": 2000, "requests": 20_001}
    assert calls["longest_wait_s"] == 0
    assert max(calls["open_files"]) - min(calls["open_files"]) <= 5
    assert max(calls["open_files"]) <= 2000 + 50
