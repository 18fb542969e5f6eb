"""A Ray cluster of three nodes with addresses of their own, and two runs that lose a node each.

    unshare -Urmnpu --fork --kill-child --mount-proc python cluster_nodes.py FOLDER

Each node is a network, mount and UTS namespace behind one bridge: the head with zero CPUs, `node1`
and `node2`. During the run of `FOLDER/tasks.jsonl`, `node1` is cut off for longer than a lease
and comes back. Then `FOLDER` becomes invisible on both, and a run at a URL loses its driver, which
is started again, and later `node2`, whose raylet is killed. Prints what happened as JSON; all
processes end with this one, which is process 1 of a namespace.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from s3 import KEYS, s3_proxy, s3_server

from hermes_rl.sandboxes import processes
from hermes_rl.testing import FakeConfig, FakeServer

HEAD = "10.77.0.1"
PORT = 6379
CHECK = "import sys; from hermes_rl.cli import main; sys.exit(main(['check', sys.argv[1]]))"
LEASE_S = 6
APART = 40
"""Units of the second run."""
INSIDE = ("-n", "-u", "-m")
"""The namespaces of a node."""
WAIT_S = 240.0
"""For one step of the scenario, on a machine that is far slower than this one."""
STARTS, START_S = 4, 90.0
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start")
SMALL = (
    *("--object-store-memory", str(80 * 2**20), "--disable-usage-stats", "--block"),
    *("--include-log-monitor", "false"),
)


def call(line: str) -> None:
    subprocess.run(line.split(), check=True)


class Node:
    """A machine: its namespaces are held by a process that sleeps."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"node{number}"
        self.log = folder / f"{self.name}.log"
        hold = f"hostname {self.name}; ip link set lo up; echo ready; exec sleep 3600"
        self._holder = subprocess.Popen(
            ["unshare", "-num", "sh", "-c", hold], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        self._folder = folder
        self._link = f"veth{number}"
        self.address = f"10.77.0.{10 + number}"
        pid = self._holder.pid
        call(f"ip link add {self._link} type veth peer name eth0 netns {pid}")
        call(f"ip link set {self._link} master bridge0 up")
        call(f"nsenter -t {pid} -n ip address add {self.address}/24 dev eth0")
        call(f"nsenter -t {pid} -n ip link set eth0 up")
        call(f"nsenter -t {pid} -n ip route add default via {HEAD}")
        start = (*RAY, "--address", f"{HEAD}:{PORT}", "--node-ip-address", self.address)
        inside = ("nsenter", "-t", str(pid), *INSIDE, *start, "--num-cpus", "1", *SMALL)
        start_ray(inside, self.log)

    def connect(self, on: bool) -> None:
        """Plug its cable in, or pull it."""
        call(f"ip link set {self._link} {'up' if on else 'down'}")

    def hide(self) -> None:
        """Let its processes see an empty file system in place of the folder."""
        call(f"nsenter -t {self._holder.pid} -m mount -t tmpfs tmpfs {self._folder}")

    def raylet(self) -> int:
        """The process id of its raylet."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            wanted = f"--node_ip_address={self.address}".encode()
            if arguments[0].endswith(b"/raylet") and wanted in arguments:
                return int(entry.name)
        raise AssertionError(f"{self.name} has no raylet: {self.log.read_text()[-2000:]}")


def start_ray(line: tuple[str, ...], log: Path) -> None:
    """Raises: AssertionError when Ray does not start.

    Its raylet ends when an agent needs more than 15 s to start, which cannot be set, and
    `ray start` may wait on: https://github.com/ray-project/ray/issues/65983. So it has several
    attempts."""
    for _ in range(STARTS):
        end = time.monotonic() + START_S
        process = subprocess.Popen(line, stdout=log.open("w"), stderr=subprocess.STDOUT)
        while process.poll() is None and time.monotonic() < end:
            if "Ray runtime started" in log.read_text():
                return
            time.sleep(0.2)
        for found in (*processes.descendants(process.pid), process):
            with suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)
        process.wait()
    raise AssertionError(log.read_text())


async def forward(port: int) -> asyncio.Server:
    """Make a server of this machine's loopback reachable for the nodes."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    return await asyncio.start_server(connected, HEAD, port)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Raises: AssertionError after `WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.2)


def workers(out: Path) -> dict[str, str]:
    """Journals of workers -> the machine that made them, also of those that have ended."""
    found = {}
    for alive in out.glob("journal/*/alive"):
        if text := alive.read_text():
            found[alive.parent.name] = json.loads(text)["host"]
    return found


async def start_run(
    folder: Path, server: FakeServer, out: str, log: TextIO, *options: str, **more: str
) -> asyncio.subprocess.Process:
    """Start the run of `FOLDER/tasks.jsonl` at a place, with further options and variables."""
    tasks, url = str(folder / "tasks.jsonl"), f"http://{HEAD}:{server.port}/v1"
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batch_runner", tasks, "--out", out, "--json"),
        *("--model", "fake", "--base-url", url, "--sandbox", "none", "--allow-unsandboxed"),
        *("--workers", "2", "--concurrency", "4", "--set", f"run.lease_s={LEASE_S}"),
        *("--api-key-env", "FAKE_KEY", *options),
        env=os.environ | {"RAY_ADDRESS": f"{HEAD}:{PORT}", "FAKE_KEY": "not-a-secret"} | more,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


async def play(folder: Path, nodes: list[Node]) -> dict[str, Any]:
    """A run on a file system that all nodes see."""
    out, log = folder / "run", (folder / "run.log").open("w")
    seen: dict[str, str] = {}
    async with FakeServer(FakeConfig(latency_s=0.3)) as server:
        forwarding = await forward(server.port)
        run = await start_run(folder, server, str(out), log)

        def hosts() -> set[str]:
            seen.update(workers(out))
            return set(seen.values())

        def ended() -> bool:
            hosts()
            return run.returncode is not None

        def lines(text: str) -> int:
            return Path(log.name).read_text().count(text)

        await until(lambda: ended() or len(hosts()) == 2, "workers on both nodes")
        await until(lambda: ended() or lines('"attempt"') >= 8, "finished attempts")
        nodes[0].connect(False)
        await until(lambda: ended() or lines("was lost") >= 1, "the worker of node1 is lost")
        nodes[0].connect(True)
        await until(ended, "the end of the run")
        log.close()
        forwarding.close()
        return {
            "exit_code": run.returncode,
            "hosts": sorted(set(seen.values())),
            "workers": len(seen),
            "requests": [entry.call_id for entry in server.entries],
            "output": Path(log.name).read_text()[-6000:],
        }


async def play_apart(folder: Path, nodes: list[Node]) -> dict[str, Any]:
    """A run at a URL on nodes that share no file system."""
    for node in nodes:
        node.hide()
    path, limit = folder / "apart.log", ("--limit", str(APART))

    def lines(text: str) -> int:
        return path.read_text().count(text)

    with s3_server() as address, s3_proxy(address) as proxy, path.open("w") as log:
        async with FakeServer(FakeConfig(latency_s=0.3)) as server:
            forwarding = await forward(server.port)
            url = f"s3://{await proxy.make_bucket()}/run"
            more = {**KEYS, "AWS_ENDPOINT_URL": address, "XDG_CACHE_HOME": str(folder / "cache")}
            run = await start_run(folder, server, url, log, *limit, **more)
            await until(lambda: lines('"attempt"') >= 8, "finished attempts")
            run.kill()
            await run.wait()
            before, notes = lines('"attempt"'), lines("travel through")
            run = await start_run(folder, server, url, log, *limit, **more)

            def ended() -> bool:
                return run.returncode is not None

            await until(lambda: ended() or lines("travel through") >= notes + 2, "both nodes")
            await until(lambda: ended() or lines('"attempt"') >= before + 8, "more attempts")
            os.kill(nodes[1].raylet(), signal.SIGKILL)
            await until(ended, "the end of the run")
            check = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", CHECK, url),
                env=os.environ | more,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            await check.wait()
            forwarding.close()
            return {
                "exit_code": run.returncode,
                "check": check.returncode,
                "objects": await proxy.objects(url),
                "output": path.read_text(),
            }


async def play_both(folder: Path) -> dict[str, Any]:
    """Both runs, on one cluster."""
    nodes = [Node(number, folder) for number in (1, 2)]
    return {"shared": await play(folder, nodes), "apart": await play_apart(folder, nodes)}


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1]).resolve()
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    call("mount -t tmpfs tmpfs /run")  # for Ray: paths of sockets are short
    call("ip link set lo up")
    call("ip link add bridge0 type bridge")
    call(f"ip address add {HEAD}/24 dev bridge0")
    call("ip link set bridge0 up")
    head = (*RAY, "--head", "--node-ip-address", HEAD, "--port", str(PORT), "--num-cpus", "0")
    call("hostname head")
    alone = ("--include-dashboard", "false", "--no-monitor", "--temp-dir", "/run/ray")
    line = (*head, *alone, *SMALL)
    start_ray(line, folder / "head.log")
    print(json.dumps(asyncio.run(play_both(folder))))


if __name__ == "__main__":
    main()
