"""The bare loops: what the same work costs without a harness. aiohttp, one bash per trajectory, no
journal, no limits, no retries, no records; the loop of the standard library.

    python bare.py BASE_URL N CONCURRENCY [none | bash | bwrap]

Each trajectory plays the script of the fake server: five tool turns and a text. `bwrap` starts that
bash in a bubblewrap with the options of our own sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from hermes_rl.sandboxes import SandboxLimits, filter_path, recipe

MARK = "__end__"
TOOL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a bash command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode


class Shell:
    """A bash that is fed commands and answers with a marker: the simplest there is."""

    def __init__(self, process: asyncio.subprocess.Process, info: int = -1) -> None:
        self.process = process
        self._info = info

    async def run(self, command: str) -> str:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{command}\nprintf '{MARK}%s\\n' $?\n".encode())
        printed = b""
        while MARK.encode() not in printed:
            printed += await stdout.readline()
        return printed.partition(MARK.encode())[0].decode()

    async def close(self) -> None:
        self.process.kill()
        await self.process.wait()
        if self._info >= 0:
            os.close(self._info)


class Sandboxes:
    """Starts the bash of a trajectory; with `bwrap` in a sandbox of its own."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self._made = 0
        if kind == "bwrap":
            from hermes_rl.sandboxes import find_binary

            self._binary = find_binary()
            self._etc = recipe.make_etc(folder / "etc", network=False)

    async def start(self) -> tuple[Shell, Path | None]:
        bash = ["bash", "--norc", "--noprofile"]
        if self.kind == "bash":
            return Shell(await _spawn(bash)), None
        self._made += 1
        folder = self.folder / str(self._made)
        for path in (folder, folder / "ws", folder / "ctl"):
            path.mkdir()
        spec = plain(self._etc, folder)
        seccomp = os.open(filter_path(), os.O_RDONLY)
        info, tell = os.pipe()
        options, give = os.pipe()
        listed = recipe.arguments(spec, {"seccomp": seccomp, "info": tell})
        os.write(give, "\0".join(listed).encode() + b"\0")
        os.close(give)
        argv = [self._binary, "--args", str(options), "--", *bash]
        try:
            return Shell(await _spawn(argv, (seccomp, tell, options)), info), folder
        finally:
            for fd in (seccomp, tell, options):
                os.close(fd)


def plain(etc: Path, folder: Path, command: Sequence[str] = ()) -> Any:
    """What bubblewrap is to start: a sandbox as those of the harness."""
    return recipe.Box(
        layers=recipe.Layers(etc),
        control=folder / "ctl",
        limits=SandboxLimits(),
        workspace=folder / "ws",
        command=command,
    )


async def _spawn(argv: list[str], pass_fds: tuple[int, ...] = ()) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": recipe.PATH},
        pass_fds=pass_fds,
    )


async def trajectory(
    session: aiohttp.ClientSession, url: str, number: int, sandboxes: Sandboxes
) -> list[dict[str, Any]]:
    """One agent: ask, run, append, until a text comes."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {number}: echo."}]
    shell, folder = await sandboxes.start() if sandboxes.kind != "none" else (None, None)
    try:
        while True:
            body = encode({"model": "echo", "messages": messages, "tools": [TOOL]})
            async with session.post(url, data=body, headers={"content-type": "json"}) as reply:
                answer = decode(await reply.read())
            message = answer["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return messages
            for call in message["tool_calls"]:
                command = json.loads(call["function"]["arguments"])["command"]
                text = await shell.run(command) if shell else command
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    finally:
        if shell is not None:
            await shell.close()
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, True)


async def run(base_url: str, number: int, concurrency: int, kind: str) -> None:
    """All trajectories, so many at a time."""
    url = f"{base_url}/chat/completions"
    todo = iter(range(number))
    done = 0
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bare-") as folder:
        sandboxes = Sandboxes(kind, Path(folder))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def agent() -> None:
                nonlocal done
                for n in todo:
                    messages = await trajectory(session, url, n, sandboxes)
                    assert len(messages) == 12
                    done += 1

            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(agent())
            seconds = time.monotonic() - started
    print(json.dumps({"done": done, "seconds": seconds}))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
