"""Tools of MCP servers: real programs in real sandboxes, and servers over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.config_agent import McpSection
from hermes_rl.errors import SandboxError, ToolError, UserError
from hermes_rl.sandboxes import Bubblewrap, Sandbox, SandboxSpec, Subprocess
from hermes_rl.testing import mcp_server_source
from hermes_rl.tools import OpenParts, Tool, ToolContext, mcp_tools, read_offers

PROGRAM = {"command": "python3", "args": ["-c", mcp_server_source()]}


class Place:
    """A sandbox with the tools of servers."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.shared = sandbox, OpenParts()
        self.context = ToolContext(sandbox=sandbox)
        self.tools: dict[str, Tool] = {}

    async def connect(self, variables: dict[str, str] | None = None, **servers: Any) -> None:
        sections: Any = {"mcp": servers}
        found = await read_offers(McpSection(**sections).mcp, variables or {}, self._again)
        self.tools = mcp_tools(found, variables or {}, self.shared)

    async def _again(self) -> Sandbox:
        return await self.sandbox.new_session()

    async def __call__(self, name: str, **arguments: Any) -> str:
        result = await self.tools[name].handler(self.context, arguments)
        return result.text if result.ok else f"not ok: {result.text}"


@asynccontextmanager
async def opened(backend: Any) -> AsyncIterator[Place]:
    try:
        async with await backend.lease(SandboxSpec(lease="mcp-test")) as sandbox:
            place = Place(sandbox)
            try:
                yield place
            finally:
                await place.context.opened.aclose()
                await place.shared.aclose()
    finally:
        await backend.aclose()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with opened(Subprocess(state_dir=tmp_path)) as place:
        yield place


def program(mode: str = "", **more: Any) -> dict[str, Any]:
    return {**PROGRAM, "args": [*PROGRAM["args"], mode], **more}


@pytest.mark.parametrize("kind", ["none", "bubblewrap"])
async def test_a_program_in_the_sandbox(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-0123456789")
    backend = Subprocess(state_dir=tmp_path) if kind == "none" else Bubblewrap()
    async with opened(backend) as place:
        await place.connect(bad=program())
        assert place.tools["mcp_bad_echo"].untrusted
        assert await place("mcp_bad_echo", text="héllo") == "héllo"
        assert await place("mcp_bad_count") == "2"  # one program for the rollout
        saved = await place("mcp_bad_image")
        path = saved.split("saved as ")[1].rstrip("]")
        assert (await place.sandbox.read_file(path)).startswith(b"\x89PNG")
        assert "canary" not in await place("mcp_bad_environment")
        assert await place("mcp_bad_noise") == "noise"
        assert await place("mcp_bad_fail") == "not ok: fail"
        assert json.loads(await place("mcp_bad_ask"))["code"]  # it has no use of our model
        if kind == "bubblewrap":  # the other one sees all processes of the machine
            count = "pgrep -f 'The tool [{]n' | wc -l"
            assert (await place.sandbox.run(count, timeout_s=30)).output.strip() == "1"
            await place.context.opened.aclose()
            assert (await place.sandbox.run(count, timeout_s=30)).output.strip() == "0"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hang", "no answer within 5 s"),
        ("die", "it ended"),
        ("flood", "more than 8 MiB"),
        ("chatter", "more than 32 MiB|no answer within"),
        ("wrong", "does not follow the protocol"),
    ],
)
@pytest.mark.slow
async def test_a_server_that_misbehaves_costs_a_tool_error(
    place: Place, name: str, why: str
) -> None:
    await place.connect(bad=program(timeout=5 if name == "hang" else 60))
    with pytest.raises(ToolError, match=why):
        await place(f"mcp_bad_{name}")
    assert await place("mcp_bad_echo", text="again") == "again"


async def test_a_server_that_dies_each_time_is_given_up(place: Place) -> None:
    await place.connect(bad=program())
    for _ in range(3):
        with pytest.raises(ToolError, match="it ended"):
            await place("mcp_bad_die")
    with pytest.raises(ToolError, match="not started again"):
        await place("mcp_bad_echo", text="x")


async def test_results_are_not_checked_by_patterns_of_the_server(place: Place) -> None:
    await place.connect(bad=program())
    async with asyncio.timeout(60):
        assert json.loads(await place("mcp_bad_structured"))["x"].startswith("aaa")


async def test_long_results_arrive_whole(place: Place) -> None:
    await place.connect(bad=program())
    assert len(await place("mcp_bad_big", size=3_000_000)) == 3_000_000


async def test_a_lost_sandbox_is_not_the_fault_of_the_server(place: Place) -> None:
    await place.connect(bad=program())
    assert await place("mcp_bad_echo", text="x") == "x"
    await place.sandbox.aclose()
    with pytest.raises(SandboxError):
        await place("mcp_bad_echo", text="x")


async def test_changed_arguments_are_noticed(place: Place, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    await place.connect(bad=program(f"relist:{changed}"))
    changed.touch()
    with pytest.raises(ToolError, match="changed since the run began"):
        await place("mcp_bad_echo", text="x")


LATE = {"command": "sh", "args": ["-c", "(sleep 0.3; echo no database >&2) & exit 1"]}
"""Its message comes after its end."""


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({"command": "/no/such/program"}, "it ended; it printed: .*No such file"),
        (LATE, "it ended; it printed: no database"),
        ({"command": "python3", "args": ["-c", "raise SystemExit('no database')"]}, "no database"),
        (program("many"), "has 1000 tools"),
        (program("silent", timeout=3), "not ready within 3 s"),
        (program("odd"), "does not follow the protocol .*inputSchema"),
        (program(tools=["echoo"]), "no tool 'echoo'"),
        ({"url": "http://127.0.0.1:1/mcp"}, "cannot be used"),
    ],
)
async def test_a_server_that_cannot_be_used_is_one_line(
    place: Place, server: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why) as caught:
        await place.connect(bad=server)
    assert str(caught.value).startswith("'mcp.bad")
    assert "\n" not in str(caught.value)


async def test_programs_on_the_host(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the variables that are named, and nothing else of this process."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-0123456789")
    on_host = program(where="host", env={"TOKEN": "t-${MCP_TEST}"})
    await place.connect({"MCP_TEST": "named"}, one=on_host, all={**on_host, "shared": True})
    held = json.loads(await place("mcp_one_environment"))
    assert held["TOKEN"] == "t-named"
    assert "canary" not in json.dumps(held)
    assert not place.tools["mcp_one_echo"].needs_sandbox
    other = ToolContext(sandbox=None)
    for expected, context in ((1, place.context), (2, other)):
        result = await place.tools["mcp_all_count"].handler(context, {})
        assert int(result.text) == expected  # one for all rollouts
    result = await place.tools["mcp_one_count"].handler(other, {})
    assert result.text == "1"
    await other.opened.aclose()


HTTP = """
import asyncio, sys, uvicorn
from mcp.server.mcpserver import MCPServer
server = MCPServer("web")
@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
@server.tool()
async def hang() -> str:
    "Never ends."
    await asyncio.sleep(3600)
    return ""
app = server.streamable_http_app()
async def guarded(scope, receive, send):
    if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != b"Bearer named":
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})
        return
    await app(scope, receive, send)
config = uvicorn.Config(guarded, port=0, log_level="error")
class Announcing(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)
Announcing(config).run()
"""


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A server over streamable HTTP, made with the official SDK, that wants a key."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HTTP, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}/mcp"
    finally:
        process.kill()
        await process.wait()


async def test_streamable_http(place: Place, address: str) -> None:
    header = {"Authorization": "Bearer ${KEY}"}
    server = {"url": address, "headers": header, "timeout": 60}
    shared = {**server, "shared": True, "timeout": 5}
    await place.connect({"KEY": "named"}, web=server, all=shared)
    assert not place.tools["mcp_web_add"].needs_sandbox
    assert await place("mcp_web_add", a=1, b=2) == "3"
    with pytest.raises(ToolError, match="no answer within 5 s"):
        await place("mcp_all_hang")
    assert await place("mcp_all_add", a=1, b=2) == "3"
    assert "not ok" in await place("mcp_web_add", a="x", b=2)
    with pytest.raises(UserError, match="MCP server web"):
        await place.connect({"KEY": "wrong"}, web=server)


async def test_an_endless_answer_over_http_is_cut(place: Place) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        try:
            while True:
                writer.write(b" " * 65_536)
                await writer.drain()
        except OSError:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UserError, match=r"MCP server big: .*more than 8 MiB"):
            await place.connect(big={"url": f"http://127.0.0.1:{port}/"})


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({}, "set either 'command' or 'url'"),
        ({"command": "x", "url": "http://x.example"}, "set either 'command' or 'url'"),
        ({"command": "x", "type": "http"}, "'type: http' is not that of a command"),
        ({"command": "x", "headers": {"a": "b"}}, "'headers' has no effect"),
        ({"command": "x", "shared": True}, "needs 'where: host'"),
        ({"command": "x", "env": {"A": "${B}"}}, "where the agent can read it"),
        ({"command": "x", "env": {"API_KEY": "abc"}}, "may be a secret"),
        ({"url": "ftp://x.example"}, "is not an address"),
        ({"command": "x", "tool": ["y"]}, "did you mean 'mcp.s.tools'"),
    ],
)
def test_mistakes_in_the_section(server: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        McpSection(mcp={"s": server})  # type: ignore[dict-item]


def test_the_usual_form_is_accepted_and_names_are_short() -> None:
    wrapped: Any = {"mcpServers": {"a": {"command": "x", "args": ["y"]}}}
    assert McpSection(mcp=wrapped).mcp["a"].args == ("y",)
    long = {"name": "t" * 100, "parameters": {"type": "object"}}
    also = {"name": "t" * 99 + "u", "parameters": {"type": "object"}}
    server: Any = {"a-b": {"command": "x", "offered": [long, also]}}
    names = list(mcp_tools(McpSection(mcp=server).mcp, {}, OpenParts()))
    assert len(set(names)) == 2
    assert all(len(name) <= 64 for name in names)
