"""Endpoints behind a private certificate, a proxy, or a gateway with custom headers: no secret is
in any file of the run."""

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kit
import pytest
import yaml

from hermes_rl import AIAgent, ModelConfig
from hermes_rl.errors import UserError
from hermes_rl.testing import Connection, FakeConfig, FakeServer, Incoming

CERTIFICATE = Path(__file__).parents[1] / "models" / "tls" / "cert.pem"
"""Self-signed, valid for 127.0.0.1."""
SECRET = "s3cr3t-gateway-value"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Gateway(FakeServer):
    """Keeps the headers of all requests."""

    def __init__(self) -> None:
        super().__init__(FakeConfig())
        self.seen: list[dict[str, str]] = []

    def handle(self, connection: Connection, request: Incoming) -> None:
        self.seen.append(dict(request.headers))
        super().handle(connection, request)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until one side ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def join(one: Streams, other: Streams) -> None:
    await asyncio.gather(pump(one[0], other[1]), pump(other[0], one[1]))


@contextlib.asynccontextmanager
async def listen(handle: Any, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def with_tls(server: FakeServer) -> AsyncIterator[str]:
    """The address of a server that terminates TLS in front of another one."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE, CERTIFICATE.with_name("key.pem"))
    behind = int(server.base_url.rpartition(":")[2].partition("/")[0])

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join((reader, writer), await asyncio.open_connection("127.0.0.1", behind))

    async with listen(handle, tls) as port:
        yield f"https://127.0.0.1:{port}/v1"


@contextlib.asynccontextmanager
async def proxy(passed: list[str]) -> AsyncIterator[int]:
    """A proxy for tunnels and plain requests that requires a password."""
    wanted = base64.b64encode(f"me:{SECRET}".encode())

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, _, head = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        if wanted not in head:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            writer.close()
            return
        method, target, _ = first.split(b" ")
        passed.append(method.decode())
        address = target.removeprefix(b"http://").partition(b"/")[0].decode()
        there = await asyncio.open_connection(*address.split(":"))
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            path = b"/" + target.removeprefix(b"http://").partition(b"/")[2]
            there[1].write(b"%b %b HTTP/1.1\r\nconnection: close\r\n%b" % (method, path, head))
        await join((reader, writer), there)

    async with listen(handle) as port:
        yield port


async def run(tmp_path: Path, **endpoint: Any) -> tuple[int, Path]:
    """The exit code and the folder of a run of two tasks."""
    endpoint = {"api_key_env": "", **endpoint}
    report = await kit.run_config(
        kit.make_config(tmp_path, [kit.make_task(1), kit.make_task(2)], endpoint=endpoint)
    )
    return report.exit_code, tmp_path / "run"


def check_no_secret(out: Path) -> None:
    """No file and no row contains the secret."""
    for path in out.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in json.dumps(kit.read_table(out, "trajectories"), default=str)


@pytest.mark.parametrize("transport", ["http", "sdk"])
async def test_custom_certificates_headers_and_proxy(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    async with Gateway() as server, with_tls(server) as url, proxy(passed) as port:
        monkeypatch.setenv("GATEWAY_TOKEN", SECRET)
        monkeypatch.setenv("MY_PROXY", f"http://me:{SECRET}@127.0.0.1:{port}")
        code, out = await run(
            tmp_path,
            base_url=url,
            transport=transport,
            ca_file=str(CERTIFICATE),
            proxy="$MY_PROXY",
            headers={"x-gateway-token": "$GATEWAY_TOKEN", "x-team": "red"},
            idle_seconds=30,
        )
        assert code == 0
    assert set(passed) == {"CONNECT"}
    assert {(h["x-gateway-token"], h["x-team"]) for h in server.seen} == {(SECRET, "red")}
    written = yaml.safe_load((out / "run.yaml").read_text())["endpoint"]
    assert written["headers"] == {"x-gateway-token": "$GATEWAY_TOKEN", "x-team": "red"}
    assert written["proxy"] == "$MY_PROXY"
    check_no_secret(out)


async def test_proxy_for_plain_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    async with Gateway() as server, proxy(passed) as port:
        monkeypatch.setenv("MY_PROXY", f"http://me:{SECRET}@127.0.0.1:{port}")
        code, out = await run(tmp_path, base_url=server.base_url, proxy="$MY_PROXY")
        assert code == 0
    assert set(passed) == {"GET", "POST"}
    assert server.seen
    check_no_secret(out)


@pytest.mark.parametrize("transport", ["http", "sdk"])
async def test_a_refused_proxy_password_is_not_shown(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Gateway() as server, with_tls(server) as url, proxy([]) as port:
        monkeypatch.setenv("MY_PROXY", f"http://me:{SECRET}-not@127.0.0.1:{port}")
        model = ModelConfig(name="m", base_url=url, proxy="$MY_PROXY", transport=transport)
        async with AIAgent(model, toolsets=()) as agent:
            result = await agent.run("Hi.")
        where = {"base_url": url, "transport": transport, "proxy": "$MY_PROXY"}
        code, out = await run(tmp_path, **where)
    assert "refuses its user and password (407)" in result["error"]["message"]
    assert SECRET not in json.dumps(result)
    assert code == 3
    check_no_secret(out)
    assert server.seen == []


async def test_an_untrusted_certificate_suggests_ca_file(tmp_path: Path) -> None:
    async with Gateway() as server, with_tls(server) as url:
        code, out = await run(tmp_path, base_url=url)
    assert code == 3
    (row, *_) = kit.read_table(out, "failures")
    assert "Set endpoint.ca_file if its certificate is your own" in row["error"]


async def test_a_stalled_answer_is_cancelled_after_idle_seconds() -> None:
    async with FakeServer() as server:
        model = ModelConfig(name="m", base_url=server.base_url, idle_seconds=1, fallbacks=["m2"])
        stalled = {"text": "x", "fault": "stall_mid"}
        prompt = f"Hi.\nSCRIPT: {json.dumps([[stalled, stalled, 'ok']])}"
        async with AIAgent(model, toolsets=()) as agent:
            result = await agent.run(prompt)
    assert result["final_response"] == "ok"
    assert "stalled for 1 s" in result["calls"][0]["error"]


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ({"headers": {"Authorization": "Bearer abc"}}, "'headers.Authorization' may be a secret"),
        ({"headers": {"x-org": "sk-abcdefgh"}}, "'headers.x-org' may be a secret"),
        ({"headers": {"x y": "a"}}, "'headers' holds 'x y'"),
        ({"headers": {"x-org": "a\nb"}}, "'headers.x-org' holds a line break"),
        ({"proxy": "http://me:pw@127.0.0.1:1"}, "'proxy' holds a user or a password"),
        ({"proxy": "127.0.0.1:3128"}, "'proxy' is not a proxy address"),
        ({"proxy": "$NOT_SET_HERE"}, "'endpoint.proxy': the variable NOT_SET_HERE is not set"),
        ({"headers": {"x-token": "$NOT_SET_HERE"}}, "'endpoint.headers.x-token': the variable"),
        ({"ca_file": "/nowhere.pem"}, "/nowhere.pem: No such file or directory. Check endpoint"),
        ({"ca_file": __file__}, "not a file of certificates. Check endpoint.ca_file"),
    ],
)
async def test_invalid_or_secret_endpoint_settings_are_refused(
    tmp_path: Path, endpoint: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as raised:
        await run(tmp_path, base_url="https://127.0.0.1:9/v1", **endpoint)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "pw" not in str(raised.value)


async def test_headers_are_not_sent_to_other_hosts() -> None:
    async with Gateway() as first, Gateway() as second, Gateway() as third:
        model = ModelConfig(
            name="fault-billing",
            base_url=first.base_url,
            headers={"x-team": "red"},
            fallbacks=[
                "fault-not_found",
                {"model": "fault-billing", "base_url": second.base_url},
                {"model": "echo-0", "base_url": third.base_url, "headers": {"x-team": "blue"}},
            ],
        )
        async with AIAgent(model, toolsets=()) as agent:
            result = await agent.run("Hi.")
    assert result["completed"]
    assert [c["model"] for c in result["calls"]][:3] == [
        "fault-billing", "fault-not_found", "fault-billing"
    ]  # fmt: skip
    teams = [{h.get("x-team") for h in server.seen} for server in (first, second, third)]
    assert teams == [{"red"}, {None}, {"blue"}]


def test_fallbacks_are_refused_with_preset_rl() -> None:
    model = ModelConfig(name="m", base_url="http://127.0.0.1:9/v1", fallbacks=["other"])
    with pytest.raises(UserError, match="another preset than rl"):
        AIAgent(model, toolsets=(), preset="rl")


async def test_an_api_key_is_also_used_for_fallbacks_at_the_same_endpoint() -> None:
    async with FakeServer(FakeConfig(key="right")) as server:
        model = ModelConfig(
            name="fault-billing", base_url=server.base_url, api_key="right", fallbacks=["echo-0"]
        )
        async with AIAgent(model, toolsets=()) as agent:
            assert (await agent.run("Hi."))["completed"]
