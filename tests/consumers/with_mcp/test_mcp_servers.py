"""Runs whose agents use MCP servers that were not written here: of the time, of git repositories
and of web pages, as programs in the sandbox, as programs on this machine and over HTTP.
"""

import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import image_kit
import pyarrow.parquet as pq
import pytest
from conftest import fake_server, run_hermes_rl

BIN = Path(sys.executable).parent
START_S = 60.0
CANARY = "canary-2b97f0c4"
GIT = "git -c user.name=a -c user.email=a@example.com"
CONVERT = {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"}


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """A root file system with this Python, the servers and git, where sandboxes may read it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield make_image(Path(folder))


def make_image(root: Path) -> Path:
    image_kit.root_file_system(root)
    python = Path(sys.executable).resolve()
    git = shutil.which("git")
    assert git is not None, "install git"
    image_kit.copy_program(python, root / "usr/local/bin/python3", root)
    image_kit.copy_program(Path(git).resolve(), root / "usr/bin/git", root)
    skip = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib", "ensurepip")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = Path(json.loads(run(python, "-c", STDLIB)))
    shutil.copytree(stdlib, root / "usr/local/lib" / version, ignore=skip, symlinks=True)
    skip = shutil.ignore_patterns("pyarrow*", "pip*", "*pytest*", "__pycache__")
    shutil.copytree(sysconfig.get_path("purelib"), root / "opt/servers", ignore=skip)
    image_kit.copy_libraries([*root.glob("usr/local/lib/**/*.so"), *root.glob("opt/**/*.so")], root)
    return root


STDLIB = "import json, sysconfig; print(json.dumps(sysconfig.get_path('stdlib')))"


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def play(
    folder: Path, producer: str, steps: list[Any], mcp: dict[str, Any], **sandbox: Any
) -> list[str]:
    """The results of the calls of a unit, in the row of a run that has these servers."""
    tasks = folder / "tasks.jsonl"
    prompt = f"Do it.\nSCRIPT: {json.dumps([*steps, 'done'])}"
    tasks.write_text(json.dumps({"id": "task", "prompt": prompt, "verify": "true"}) + "\n")
    config = folder / "config.yaml"
    config.write_text(json.dumps({"mcp": mcp, "sandbox": sandbox}))
    options = ["--config", str(config), "--model", "scripted", "--toolsets", "terminal"]
    with fake_server(producer) as url:
        run_hermes_rl(producer, tasks, folder / "run", *options, "--base-url", url)
    (path,) = (folder / "run" / "trajectories").glob("*.parquet")
    (row,) = pq.read_table(path).to_pylist()
    assert (row["end_reason"], row["reward"]) == ("answered", 1.0)
    offered = {tool["function"]["name"] for tool in json.loads(row["tools"])}
    messages = [json.loads(text) for text in row["messages"]]
    called = {call["function"]["name"] for m in messages for call in m.get("tool_calls") or ()}
    assert called <= offered
    for path in (folder / "run").rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    return [m["content"] for m in messages if m["role"] == "tool"]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


def test_servers_in_the_sandbox(tmp_path: Path, producer: str, image: Path) -> None:
    def server(module: str, *args: str) -> dict[str, Any]:
        return {"command": "python3", "args": ["-m", module, *args], "env": environment}

    environment = {"PYTHONPATH": "/opt/servers", "PYTHONDONTWRITEBYTECODE": "1"}
    mcp = {
        "time": server("mcp_server_time", "--local-timezone=UTC"),
        "git": server("mcp_server_git"),
    }
    repository = "/workspace/repo"
    made = f"git init -q {repository} && cd {repository} && {GIT} commit -q --allow-empty -m First"
    steps = [
        call("mcp_time_convert_time", **CONVERT),
        call("terminal", command=made),
        call("mcp_git_git_log", repo_path=repository),
        call("mcp_git_git_log", repo_path="/nowhere"),
        call("mcp_time_get_current_time", timezone="Mars/Base"),
    ]
    converted, terminal, log, absent, invalid = play(
        tmp_path, producer, steps, mcp, backend="bubblewrap", image=str(image)
    )
    assert "T03:00:00+00:00" in converted
    assert json.loads(terminal)["exit_code"] == 0, terminal
    assert "First" in log
    assert "/nowhere" in absent
    assert "Mars/Base" in invalid


def test_servers_on_this_machine(
    tmp_path: Path, producer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    time_server = str(BIN / "mcp-server-time")
    mcp = {
        "time": {"command": time_server, "args": ["--local-timezone=UTC"], "where": "host"},
        "fetch": {"command": str(BIN / "mcp-server-fetch"), "args": FETCH, "where": "host"},
    }
    with page() as url:
        steps = [call("mcp_time_convert_time", **CONVERT), call("mcp_fetch_fetch", url=url)]
        converted, fetched = play(tmp_path, producer, steps, mcp)
    assert "T03:00:00+00:00" in converted
    assert fetched.startswith('<untrusted_tool_result tool="mcp_fetch_fetch">')
    assert "Prices of tin" in fetched


FETCH = ["--ignore-robots-txt", "--allow-private-ips"]


@contextmanager
def page() -> Iterator[str]:
    """Serve a page and return its address."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html><body><article><h1>Prices of tin</h1></article></body></html>")

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


SERVE = """
import sys
from mcp_server_git.server import create_server
create_server(None).run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
"""


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_over_http(tmp_path: Path, producer: str, shared: bool) -> None:
    repository = tmp_path / "repository"
    run("git", "init", "-q", repository)
    commit = [*GIT.split(), "commit", "-q", "--allow-empty", "-m", "Over HTTP"]
    subprocess.run(commit, cwd=repository, check=True, timeout=60)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", SERVE, str(port)]) as server:
        try:
            wait_for(port, server)
            mcp = {"git": {"url": f"http://127.0.0.1:{port}/mcp", "shared": shared}}
            steps = [call("mcp_git_git_log", repo_path=str(repository))] * 2
            for log in play(tmp_path, producer, steps, mcp):
                assert "Over HTTP" in log
        finally:
            server.kill()


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail("the server does not listen")
