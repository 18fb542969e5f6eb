"""What a sandbox whose network is a list of hosts can reach, with real clients in it.

Run by test_egress in processes of their own, as root and as an ordinary user, and in containers.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import threading
from collections.abc import Iterator

from hermes_rl.sandboxes import Connection, GradingSpec, Sandbox, SandboxBackend, SandboxSpec

CLIENT = """
import os, sys, urllib.request
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=30).read().decode())
    except OSError as error:
        print(type(error).__name__, getattr(error, "code", ""))
"""


@contextlib.contextmanager
def web_server(text: str = "hello") -> Iterator[int]:
    """A real server on the machine's loopback. Yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *values: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


async def lease(
    backend: SandboxBackend, *hosts: str, noted: list[Connection] | None = None
) -> Sandbox:
    note = ([] if noted is None else noted).append
    return await backend.lease(SandboxSpec(lease="egress", network=hosts, on_connection=note))


async def sh(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.run(command, timeout_s=60)
    return f"{result.output.strip()} [{result.exit_code}]"


async def python(sandbox: Sandbox, program: str, *arguments: object) -> str:
    await sandbox.write_file("/tmp/program.py", program.encode())
    # The Python of the tested image complains of its installation.
    return await sh(sandbox, f"python3 /tmp/program.py {' '.join(map(str, arguments))} 2>/dev/null")


async def clients_find_the_proxy_by_themselves(backend: SandboxBackend) -> None:
    noted: list[Connection] = []
    with web_server() as good, web_server("trap") as trap:
        async with await lease(backend, f"127.0.0.1:{good}", noted=noted) as sandbox:
            urls = [f"http://127.0.0.1:{port}/" for port in (good, trap)]
            seen = await python(sandbox, CLIENT, *urls)
            assert seen.split() == ["hello", "HTTPError", "403", "[0]"], seen
            allowed = await sh(sandbox, "echo $no_proxy; cd /; bash -c 'echo $HTTPS_PROXY'")
            assert allowed == "localhost,::1\nhttp://127.0.0.1:3128 [0]"
    by_port = {one.port: one for one in noted}  # they are noted as they end, in either order
    outcomes = {port: one.outcome for port, one in by_port.items()}
    assert len(noted) == 2, noted
    assert outcomes == {good: "allowed", trap: "refused"}
    assert by_port[good].received_bytes > 0 < by_port[good].sent_bytes


async def there_is_no_other_way_out(backend: SandboxBackend) -> None:
    with web_server() as good:
        async with await lease(backend, f"127.0.0.1:{good}") as sandbox:
            assert await sh(sandbox, "grep -vc -e lo: -e '|' /proc/net/dev") == "0 [1]"
            assert await sh(sandbox, f"exec 5<>/dev/tcp/127.0.0.1/{good}") != " [0]"
            route = "tail -n +2 /proc/net/route | wc -l"
            assert await sh(sandbox, route) == "0 [0]"
            seen = await python(sandbox, LOOK_UP)
            assert seen == "unknown [0]", seen


async def a_sandbox_reaches_no_proxy_of_another(backend: SandboxBackend) -> None:
    with web_server("one") as one, web_server("two") as two:
        first = await lease(backend, f"127.0.0.1:{one}")
        second = await lease(backend, f"127.0.0.1:{two}")
        none = await backend.lease(SandboxSpec(lease="off"))
        async with first, second, none:
            urls = [f"http://127.0.0.1:{port}/" for port in (one, two)]
            seen = [await python(each, CLIENT, *urls) for each in (first, second)]
            assert seen == ["one\nHTTPError 403 [0]", "HTTPError 403\ntwo [0]"]
            attempt = "(exec 5<>/dev/tcp/127.0.0.1/3128) 2>&1 | grep -q refused && echo closed"
            assert await sh(none, attempt) == "closed [0]"
            assert await sh(none, "env | grep -ci _proxy=") == "0 [1]"


LOOK_UP = """
import socket
try:
    print(socket.getaddrinfo("example.org", 80))
except socket.gaierror:
    print("unknown")
"""


BIND = """
import socket
for address in ("127.0.0.1", "0.0.0.0"):
    for options in ((), ("SO_REUSEADDR",), ("SO_REUSEPORT",), ("SO_REUSEADDR", "SO_REUSEPORT")):
        with socket.socket() as s:
            for name in options:
                s.setsockopt(socket.SOL_SOCKET, getattr(socket, name), 1)
            try:
                s.bind((address, 3128))
                s.listen()
                print("bound", address, options)
            except OSError as error:
                print(error.errno)
"""


async def nobody_takes_the_place_of_the_proxy(backend: SandboxBackend) -> None:
    with web_server() as good:
        async with await lease(backend, f"127.0.0.1:{good}") as sandbox:
            assert (await python(sandbox, BIND)).split() == [*["98"] * 8, "[0]"]
            assert await python(sandbox, CLIENT, f"http://127.0.0.1:{good}/") == "hello [0]"


async def a_hostile_client_leaves_the_worker_alone(backend: SandboxBackend) -> None:
    """Half requests and many connections that nobody ends; another sandbox is served."""
    program = """
import os, signal, socket
held = []
for n in range(40):
    s = socket.socket()
    s.settimeout(0.1)
    try:
        s.connect(("127.0.0.1", 3128))
        s.send(b"GET http://127.0.0.1" + b"x" * n)
    except OSError:
        pass
    held.append(s)
print(len(held), flush=True)
if os.fork() == 0:
    signal.pause()
"""
    with web_server() as good:
        async with (
            await lease(backend, f"127.0.0.1:{good}") as hostile,
            await lease(backend, f"127.0.0.1:{good}") as other,
        ):
            seen = await python(hostile, program)
            assert seen == "40 [0]", seen
            assert await python(other, CLIENT, f"http://127.0.0.1:{good}/") == "hello [0]"


async def verifiers_have_no_network(backend: SandboxBackend) -> None:
    script = "(exec 5<>/dev/tcp/127.0.0.1/3128) 2>&1; env | grep -i _proxy; grep -c : /proc/net/dev"
    with web_server() as good:
        async with await lease(backend, f"127.0.0.1:{good}") as sandbox:
            await sh(sandbox, "echo 'export http_proxy=http://127.0.0.1:3128' >~/.bashrc")
            seen = (await sandbox.grade(GradingSpec(script))).output
            assert "refused" in seen
            assert "_proxy" not in seen.lower().replace("/dev/tcp", "")
            assert seen.split()[-1] == "1"


async def nothing_of_it_is_left(backend: SandboxBackend) -> None:
    """Neither descriptors nor tasks, also of connections that are open when the sandbox ends."""
    hold = "exec 5<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT 127.0.0.1:{} HTTP/1.1\\r\\n\\r\\n' >&5"
    counts: list[int] = []
    with web_server() as good:
        for _ in range(3):
            noted: list[Connection] = []
            async with await lease(backend, f"127.0.0.1:{good}", noted=noted) as sandbox:
                await sh(sandbox, f"{hold.format(good)}; head -n 1 <&5")
            assert [one.outcome for one in noted] == ["allowed"]
            counts.append(await descriptors_at_rest())
        for _ in range(600):  # the loop closes a transport some time after its thread
            if (left := await descriptors_at_rest()) <= counts[0]:
                break
            await asyncio.sleep(0.1)
    assert left <= counts[0], (left, counts)


async def descriptors_at_rest() -> int:
    """How many this process has after the threads of the web server have ended."""
    for thread in threading.enumerate():
        if "process_request" in thread.name:
            await asyncio.to_thread(thread.join, 240)
    return len(os.listdir("/proc/self/fd"))


NAMES = [
    check.__name__
    for check in (
        clients_find_the_proxy_by_themselves,
        there_is_no_other_way_out,
        a_sandbox_reaches_no_proxy_of_another,
        nobody_takes_the_place_of_the_proxy,
        a_hostile_client_leaves_the_worker_alone,
        verifiers_have_no_network,
        nothing_of_it_is_left,
    )
]
