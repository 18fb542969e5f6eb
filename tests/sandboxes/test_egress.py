"""The egress proxy by itself, on this machine's loopback: what it forwards and refuses, and what a
client can make it do. Then in sandboxes: `egress_checks`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import egress_checks

from hermes_rl.cli import main
from hermes_rl.errors import SandboxStartError
from hermes_rl.network import PROXY_CONNECTIONS, AllowedHosts
from hermes_rl.sandboxes import (
    Bounds,
    Bubblewrap,
    Connection,
    EgressProxy,
    SandboxSpec,
    open_egress,
)
from hermes_rl.store import load_run

ROOT = Path(__file__).parents[2]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok"
FAST = Bounds(pause_s=0.0)


@dataclass
class Target:
    """A server that answers the first request of a connection, and keeps all that it is sent."""

    port: int
    arrived: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    """One for each connection."""
    received: list[bytes] = field(default_factory=list)

    @property
    def connections(self) -> int:
        return len(self.received)


@contextlib.asynccontextmanager
async def target(
    answer: bytes = ANSWER, *, body: int = 0, release: asyncio.Event | None = None
) -> AsyncIterator[Target]:
    """Serve.

    Args:
        body: bytes of the request after its head.
        release: nothing is answered before it.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = len(made.received)
        made.received.append(b"")
        made.arrived.put_nowait(None)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            made.received[place] = await reader.readuntil(b"\r\n\r\n")
            made.received[place] += await reader.readexactly(body)
            if release is not None:
                await release.wait()
            writer.write(answer)
            writer.write_eof()
            made.received[place] += await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made = Target(server.sockets[0].getsockname()[1])
    async with server:
        yield made


@dataclass
class Served:
    """A proxy, and what it noted."""

    port: int
    noted: list[Connection]

    async def ask(self, request: bytes) -> bytes:
        """All that it answers to some bytes, up to the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(OSError):
            writer.write(request)
            await writer.drain()
        answer = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                while data := await reader.read(1 << 16):
                    answer += data
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def proxy(*hosts: str, bounds: Bounds = FAST) -> AsyncIterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    noted: list[Connection] = []
    made = EgressProxy(listener, AllowedHosts(hosts), noted.append, bounds)
    try:
        yield Served(listener.getsockname()[1], noted)
    finally:
        await made.aclose()


def status(answer: bytes) -> int:
    return int(answer.split()[1]) if answer else 0


async def test_a_request_reaches_an_allowed_host_and_is_noted() -> None:
    async with target(body=3) as there, proxy(f"127.0.0.1:{there.port}") as served:
        url = f"http://127.0.0.1:{there.port}/a?b=c"
        answer = await served.ask(
            f"POST {url} HTTP/1.1\r\nX-A: 1\r\nContent-Length: 3\r\n\r\nabc".encode()
        )
        assert answer == (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    (sent,) = there.received
    assert (
        sent
        == (
            f"POST /a?b=c HTTP/1.1\r\nHost: 127.0.0.1:{there.port}\r\nX-A: 1\r\n"
            "Content-Length: 3\r\nConnection: close\r\n\r\nabc"
        ).encode()
    )
    (noted,) = served.noted
    assert (noted.host, noted.port, noted.outcome) == ("127.0.0.1", there.port, "allowed")
    assert (noted.sent_bytes, noted.received_bytes) == (len(sent), len(ANSWER))


async def test_a_tunnel_carries_bytes_both_ways_and_is_noted() -> None:
    async with target() as there, proxy(f"127.0.0.1:{there.port}") as served:
        where = f"127.0.0.1:{there.port}"
        answer = await served.ask(
            f"CONNECT {where} HTTP/1.1\r\n\r\n\x00\xff\r\n\r\n".encode("latin-1")
        )
        assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n" + ANSWER
    assert there.received == [b"\x00\xff\r\n\r\n"]
    (noted,) = served.noted
    assert (noted.outcome, noted.sent_bytes, noted.received_bytes) == ("allowed", 6, len(ANSWER))


# Every host and port here but GOOD must stay unreached. TRAP listens on the same address.
ATTACKS = {
    "another port": (b"GET http://127.0.0.1:TRAP/ HTTP/1.1\r\n\r\n", 403),
    "a tunnel to another port": (b"CONNECT 127.0.0.1:TRAP HTTP/1.1\r\n\r\n", 403),
    "a tunnel to a port that is not named": (b"CONNECT 127.0.0.1:443 HTTP/1.1\r\n\r\n", 403),
    "a tunnel without a port": (b"CONNECT 127.0.0.1 HTTP/1.1\r\n\r\n", 400),
    "a path and a host header": (b"GET / HTTP/1.1\r\nHost: 127.0.0.1:GOOD\r\n\r\n", 400),
    "another scheme": (b"GET ftp://127.0.0.1:GOOD/ HTTP/1.1\r\n\r\n", 400),
    "userinfo": (b"GET http://127.0.0.1:GOOD@127.0.0.1:TRAP/ HTTP/1.1\r\n\r\n", 400),
    "userinfo of an allowed host": (b"GET http://a:b@127.0.0.1:GOOD/ HTTP/1.1\r\n\r\n", 400),
    "userinfo in a tunnel": (b"CONNECT 127.0.0.1:GOOD@127.0.0.1:TRAP HTTP/1.1\r\n\r\n", 400),
    "a backslash": (b"GET http://127.0.0.1:GOOD\\@127.0.0.1:TRAP/ HTTP/1.1\r\n\r\n", 400),
    "a fragment": (b"GET http://127.0.0.1:GOOD#@127.0.0.1:TRAP/ HTTP/1.1\r\n\r\n", 400),
    "percent codes": (b"GET http://127.0.0.1%3aTRAP/ HTTP/1.1\r\n\r\n", 400),
    "a final dot": (b"GET http://127.0.0.1.:TRAP/ HTTP/1.1\r\n\r\n", 403),
    "two final dots": (b"GET http://127.0.0.1..:GOOD/ HTTP/1.1\r\n\r\n", 400),
    "a mapped address": (b"GET http://[::ffff:127.0.0.1]:TRAP/ HTTP/1.1\r\n\r\n", 403),
    "another loopback": (b"CONNECT [::1]:GOOD HTTP/1.1\r\n\r\n", 403),
    "a zone": (b"CONNECT [fe80::1%25lo]:GOOD HTTP/1.1\r\n\r\n", 400),
    "one decimal": (b"GET http://2130706433:GOOD/ HTTP/1.1\r\n\r\n", 400),
    "octal": (b"GET http://0177.0.0.1:GOOD/ HTTP/1.1\r\n\r\n", 400),
    "hexadecimal": (b"GET http://0x7f.0.0.0x1:GOOD/ HTTP/1.1\r\n\r\n", 400),
    "a short address": (b"GET http://127.1:GOOD/ HTTP/1.1\r\n\r\n", 400),
    "an address of everything": (b"GET http://0.0.0.0:GOOD/ HTTP/1.1\r\n\r\n", 403),
    "a metadata service": (b"GET http://169.254.169.254/latest HTTP/1.1\r\n\r\n", 403),
    "a name that is not listed": (b"GET http://localhost:GOOD/ HTTP/1.1\r\n\r\n", 403),
    "two ports": (b"CONNECT 127.0.0.1:GOOD:TRAP HTTP/1.1\r\n\r\n", 400),
    "a port beyond": (b"CONNECT 127.0.0.1:99999 HTTP/1.1\r\n\r\n", 400),
    "two lengths": (
        b"POST http://127.0.0.1:GOOD/ HTTP/1.1\r\nContent-Length: 0\r\n"
        b"Content-Length: 40\r\n\r\nGET http://127.0.0.1:TRAP/ HTTP/1.1\r\n\r\n",
        400,
    ),
    "a length and chunks": (
        b"POST http://127.0.0.1:GOOD/ HTTP/1.1\r\nContent-Length: 40\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: other\r\n\r\n",
        400,
    ),
    "a strange coding": (
        b"POST http://127.0.0.1:GOOD/ HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunks in HTTP/1.0": (
        b"POST http://127.0.0.1:GOOD/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "a space before a colon": (
        b"POST http://127.0.0.1:GOOD/ HTTP/1.1\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "a signed length": (
        b"POST http://127.0.0.1:GOOD/ HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc",
        400,
    ),
    "a folded line": (b"GET http://127.0.0.1:GOOD/ HTTP/1.1\r\nA: b\r\n c: d\r\n\r\n", 400),
    "a bare line feed": (b"GET http://127.0.0.1:GOOD/ HTTP/1.1\r\nA: b\nHost: c\r\n\r\n", 400),
    "a bare carriage return": (b"GET http://127.0.0.1:GOOD/ HTTP/1.1\r\nA: b\rC: d\r\n\r\n", 400),
    "a zero byte": (b"GET http://127.0.0.1:GOOD/\x00 HTTP/1.1\r\n\r\n", 400),
    "a space in the address": (b"GET http://127.0.0.1:GOOD/ x HTTP/1.1\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "an address without a host": (b"GET http:///x HTTP/1.1\r\n\r\n", 400),
    "headers without end": (b"GET http://127.0.0.1:GOOD/ HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, 431),
    "one long header": (b"GET http://127.0.0.1:GOOD/ HTTP/1.1\r\nA: " + b"b" * 100_000, 431),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_nothing_else_is_reached(name: str) -> None:
    request, wanted = ATTACKS[name]
    async with target() as good, target() as trap, proxy(f"127.0.0.1:{good.port}") as served:
        for text, port in ((b"GOOD", good.port), (b"TRAP", trap.port)):
            request = request.replace(text, str(port).encode())
        answer = await served.ask(request)
        assert status(answer) == wanted, answer
        assert (good.connections, trap.connections) == (0, 0)
        assert [noted.outcome for noted in served.noted] == ["refused"]


async def test_the_host_header_follows_the_address() -> None:
    async with target() as there, proxy(f"127.0.0.1:{there.port}") as served:
        request = (
            f"GET http://127.0.0.1:{there.port} HTTP/1.1\r\nHost: other\r\nhost: another\r\n"
            "Connection: x-dropped, close\r\nX-Dropped: 1\r\nProxy-Authorization: secret\r\n\r\n"
        )
        assert status(await served.ask(request.encode())) == 200
    assert there.received == [
        f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{there.port}\r\nConnection: close\r\n\r\n".encode()
    ]


SECOND = b"GET http://127.0.0.1:TRAP/ HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "body", "passed"),
    [
        (b"", b"", b""),
        (b"Content-Length: 3\r\n", b"abc", b"abc"),
        (b"Transfer-Encoding: chunked\r\n", b"3;x=y\r\nabc\r\n0\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
    ],
)
async def test_a_connection_carries_one_request(head: bytes, body: bytes, passed: bytes) -> None:
    """A second one on it, which a server on the way could find there, is never sent."""
    good_target = target(body=len(passed))
    async with good_target as good, target() as trap, proxy(f"127.0.0.1:{good.port}") as served:
        first = f"POST http://127.0.0.1:{good.port}/ HTTP/1.1\r\n".encode() + head + b"\r\n" + body
        answer = await served.ask(first + SECOND.replace(b"TRAP", str(trap.port).encode()))
        assert answer.count(b"HTTP/1.1 ") == 1
    assert trap.connections == 0
    (sent,) = good.received
    assert sent.partition(b"\r\n\r\n")[2] == passed
    assert b"TRAP" not in sent
    assert sent.count(b" HTTP/1.1\r\n") == 1


@pytest.mark.parametrize("chunk", [b"-1\r\n", b"0x3\r\nabc\r\n", b"3\r\nabcGET", b"9" * 40_000])
async def test_bad_chunks_are_refused(chunk: bytes) -> None:
    never = asyncio.Event()
    async with target(release=never) as there, proxy(f"127.0.0.1:{there.port}") as served:
        head = f"POST http://127.0.0.1:{there.port}/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert status(await served.ask(head.encode() + chunk)) == 400
        never.set()
        (noted,) = served.noted
        assert noted.reason == "not a valid chunk"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b"hello\r\n\r\n", b"x" * 100_000]
)
async def test_an_answer_that_is_not_http_is_not_passed_on(answer: bytes) -> None:
    async with target(answer=answer) as there, proxy(f"127.0.0.1:{there.port}") as served:
        request = f"GET http://127.0.0.1:{there.port}/ HTTP/1.1\r\n\r\n".encode()
        assert status(await served.ask(request)) == 502


async def test_a_name_at_a_private_address_is_refused_unless_that_is_named() -> None:
    """`localhost` is like every name whose owner points it at a private address."""
    async with target() as there:
        request = f"GET http://LocalHost.:{there.port}/ HTTP/1.1\r\n\r\n".encode()
        async with proxy(f"localhost:{there.port}") as served:
            assert status(await served.ask(request)) == 403
            assert served.noted[0].reason.startswith("localhost is at a private address: ")
            assert there.connections == 0
        other_port = f"127.0.0.1:{there.port + 1}"
        async with proxy(f"localhost:{there.port}", other_port) as served:
            assert status(await served.ask(request)) == 403
        async with proxy(f"localhost:{there.port}", f"127.0.0.1:{there.port}") as served:
            assert status(await served.ask(request)) == 200


async def test_a_host_that_does_not_answer_is_a_failure() -> None:
    async with proxy("127.0.0.1:1", "no-such-name.invalid") as served:
        for where in ("127.0.0.1:1", "no-such-name.invalid:80"):
            answer = await served.ask(f"CONNECT {where} HTTP/1.1\r\n\r\n".encode())
            assert status(answer) == 502
        assert [noted.outcome for noted in served.noted] == ["failed", "failed"]


@pytest.mark.parametrize("begun", [b"", b"GET http://127.0.0.1", b"GET http://a/ HTTP/1.1\r\nA: b"])
async def test_a_slow_request_is_given_up(begun: bytes) -> None:
    async with proxy("127.0.0.1", bounds=replace(FAST, head_s=0.2)) as served:
        assert status(await served.ask(begun)) == 408
        assert [noted.outcome for noted in served.noted] == ["refused"]


async def test_a_silent_tunnel_ends() -> None:
    never = asyncio.Event()
    bounds = replace(FAST, idle_s=0.2)
    async with (
        target(release=never) as there,
        proxy(f"127.0.0.1:{there.port}", bounds=bounds) as served,
    ):
        answer = await served.ask(f"CONNECT 127.0.0.1:{there.port} HTTP/1.1\r\n\r\n".encode())
        assert status(answer) == 200
        never.set()


async def test_many_connections_wait_for_each_other() -> None:
    release = asyncio.Event()
    async with target(release=release) as there, proxy(f"127.0.0.1:{there.port}") as served:
        request = f"GET http://127.0.0.1:{there.port}/ HTTP/1.1\r\n\r\n".encode()
        asking = [asyncio.create_task(served.ask(request)) for _ in range(3 * PROXY_CONNECTIONS)]
        for _ in range(PROXY_CONNECTIONS):
            await there.arrived.get()
        await asyncio.sleep(0.1)
        assert there.connections == PROXY_CONNECTIONS
        release.set()
        assert {status(answer) for answer in await asyncio.gather(*asking)} == {200}


async def test_nothing_is_kept_for_a_client_that_does_not_read() -> None:
    sent, most = 0, 64 << 20

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            while sent < most:
                writer.write(bytes(1 << 20))
                async with asyncio.timeout(2.0):
                    await writer.drain()
                sent += 1 << 20
        stalled.set()
        writer.close()

    stalled = asyncio.Event()
    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, proxy(f"127.0.0.1:{port}") as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1 << 10)
        writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
        await stalled.wait()
        assert sent < most
        writer.close()


async def test_open_connections_are_noted_when_it_closes() -> None:
    never = asyncio.Event()
    async with target(release=never) as there:
        async with proxy(f"127.0.0.1:{there.port}") as served:
            request = f"GET http://127.0.0.1:{there.port}/ HTTP/1.1\r\n\r\n".encode()
            asking = asyncio.create_task(served.ask(request))
            await there.arrived.get()
        assert await asking == b""
        assert [noted.outcome for noted in served.noted] == ["allowed"]
        never.set()


FILE = Path(egress_checks.__file__)
each = pytest.mark.parametrize("name", egress_checks.NAMES)
Run = Callable[[Path, str], None]


@each
def test_in_sandboxes_as_we_are(as_we_are: Run, name: str) -> None:
    as_we_are(FILE, name)


@each
def test_in_sandboxes_as_an_ordinary_user(as_ordinary_user: Run, name: str) -> None:
    as_ordinary_user(FILE, name)


TLS = ROOT / "tests/models/tls"  # a key that protects nothing; valid for 127.0.0.1


async def test_curl_in_a_sandbox_reaches_a_tls_server(bubblewrap: Bubblewrap) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await writer.drain()
        writer.close()

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    noted: list[Connection] = []
    spec = SandboxSpec(lease="tls", network=(f"127.0.0.1:{port}",), on_connection=noted.append)
    async with server, await bubblewrap.lease(spec) as sandbox:
        await sandbox.write_file("cert.pem", (TLS / "cert.pem").read_bytes())
        curl = "curl -sS --cacert cert.pem -o out -w '%{http_code} %{http_connect}\n' https://127.0.0.1:"
        seen = await sandbox.run(f"{curl}{port}/; cat out; {curl}{port + 1}/", timeout_s=60)
        assert seen.output.split()[:2] == ["200", "200"], seen
        assert "403" in seen.output
    outcomes = [(one.port, one.outcome) for one in noted]  # as they end, in either order
    assert sorted(outcomes) == [(port, "allowed"), (port + 1, "refused")]


async def test_no_listener_is_opened_in_the_network_of_the_machine() -> None:
    """The listener would be the machine's then."""
    with pytest.raises(SandboxStartError, match="the machine's network"):
        await open_egress(os.getpid(), None, ("example.org",), print)


REBINDING = Path(__file__).with_name("rebinding.py")


def test_the_address_that_was_checked_is_the_one_connected_to() -> None:
    """A name server gives another address at each look."""
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "--net", sys.executable, str(REBINDING)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["200", "403", "good", "1", "trap", "0", "looks", "2"]


def test_a_run_records_what_its_sandboxes_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts are in each row, also of a failure; a line for each connection in the run directory,
    without secrets."""
    monkeypatch.setenv("SOME_API_KEY", "sk-decoy-5b21c0ffee")
    with egress_checks.web_server() as port:
        url = f"http://127.0.0.1:{port}/"
        rows = [
            {
                "id": name,
                "prompt": "Fetch it.",
                "setup": f"curl -sf {url} >out; curl -s http://sk-decoy-5b21c0ffee.example/; {end}",
                "verify": "grep -q hello $WORKSPACE/out",
            }
            for name, end in (("solved", "true"), ("failed", "exit 3"))
        ]
        dataset, out = tmp_path / "rows.jsonl", tmp_path / "run"
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["run", str(dataset), "--model", "noop", "--workers", "0", "--out", str(out)]
        assert main([*command, "--network", f"127.0.0.1:{port}"]) == 1
    run = load_run(out)
    for table in (run.trajectories, run.failures):
        (metrics,) = table["metrics"]
        assert metrics["network_received_bytes"] > 5 < metrics["network_sent_bytes"]
        counts = [metrics[f"network_{name}"] for name in ("allowed", "refused", "failed")]
        assert counts == [1.0, 1.0, 0.0]
    (log,) = (out / "network").iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ids = {*run.trajectories["trajectory_id"], *run.failures["trajectory_id"]}
    assert {line["trajectory_id"] for line in lines} == ids
    assert sorted(line["outcome"] for line in lines) == ["allowed"] * 2 + ["refused"] * 2
    assert "decoy" not in log.read_text()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (["--network", "http://a.example"], "error: --network http://a.example: entry "),
        (["--network", "a.example", "--sandbox", "none", "--allow-unsandboxed"], "--sandbox none "),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    network: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "smoke", "--model", "noop", *network]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
