"""Runs against a server that does not answer, or that speaks another protocol."""

import asyncio
from pathlib import Path

from cli_runner import run_cli

from hermes_rl.testing import FakeConfig, FakeServer

RUN = ("run", "smoke", "--model", "noop-m", "--workers", "0", "--limit", "1")


async def test_a_run_started_during_an_outage_writes_nothing_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    """Exit code 3. Once the server answers, the same command runs all units."""
    async with FakeServer() as server:
        url, port = server.base_url, server.port
    out = tmp_path / "run"
    command = (*RUN, "--base-url", url, "--out", out)
    more = ("--sandbox", "none", "--allow-unsandboxed")
    result = await asyncio.to_thread(run_cli, *command, *more, cwd=tmp_path)
    assert result.code == 3
    (line,) = result.err.splitlines()
    assert line == (
        f"stopped: 127.0.0.1:{port}: connection refused. Start the server, or set another "
        "base_url, then run the same command. (exit 3)"
    )
    assert not out.exists()
    async with FakeServer(FakeConfig(port=port)):
        result = await asyncio.to_thread(run_cli, *command, *more, cwd=tmp_path)
    assert result.code == 0
    assert "1/1 units done" in result.out


async def test_https_to_a_plain_http_server_suggests_http(tmp_path: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        more = ("--base-url", f"https://{host}:{port}/v1", "--out", tmp_path / "run")
        result = await asyncio.to_thread(run_cli, *RUN, *more, cwd=tmp_path)
    assert result.code == 3
    assert f"{host}:{port}: the server does not speak TLS (use http:// there)" in result.err
