"""A run towards a server that is not there, or an address that is none."""

import asyncio
from pathlib import Path

import pytest
from doors_kit import hermes

from hermes_rl.testing import FakeConfig, FakeServer

ASKED = ("run", "smoke", "--model", "noop-m", "--workers", "0", "--limit", "1")


async def test_a_run_that_is_started_in_an_outage_is_resumable(tmp_path: Path) -> None:
    """Exit 3 and nothing written; when the server is back the same command does its work."""
    async with FakeServer() as server:
        url, port = server.base_url, server.port
    out = tmp_path / "run"
    command = (*ASKED, "--base-url", url, "--out", out)
    more = ("--sandbox", "none", "--allow-unsandboxed")
    said = await asyncio.to_thread(hermes, *command, *more, cwd=tmp_path)
    assert said.code == 3
    (line,) = said.err.splitlines()
    assert line == (
        f"stopped: 127.0.0.1:{port}: connection refused. Start the server, or set another "
        "base_url, then run the same command. (exit 3)"
    )
    assert not out.exists()
    async with FakeServer(FakeConfig(port=port)):
        said = await asyncio.to_thread(hermes, *command, *more, cwd=tmp_path)
    assert said.code == 0
    assert "1/1 units done" in said.out


async def test_https_towards_a_plain_server_is_named(tmp_path: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        more = ("--base-url", f"https://{host}:{port}/v1", "--out", tmp_path / "run")
        said = await asyncio.to_thread(hermes, *ASKED, *more, cwd=tmp_path)
    assert said.code == 3
    assert f"{host}:{port}: the server does not speak TLS (use http:// there)" in said.err


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--api-key-env", "SOME_KEY")])
@pytest.mark.parametrize("address", ["notaurl", "http://", "ftp://host/v1", "http://host:port/v1"])
def test_what_is_no_address_is_said(tmp_path: Path, address: str, more: tuple[str, ...]) -> None:
    said = hermes(*ASKED, "--base-url", address, *more, cwd=tmp_path)
    assert said.code == 2
    assert said.error == (
        f"error: base_url {address!r} is not an address. Use for example http://127.0.0.1:8000/v1"
    )


def test_a_dry_run_knows_its_provider(tmp_path: Path) -> None:
    said = hermes(*ASKED, "--provider", "nobody", "--dry-run", cwd=tmp_path)
    assert said.code == 2
    assert "unknown provider 'nobody' (known: anthropic, " in said.error
