"""Background processes: `terminal` with `background`, and `process`."""

import json
import os
from typing import Any

import pytest

from hermes_rl.errors import ToolError
from hermes_rl.tools import MAX_PROCESSES, take_ended


async def begin(bench: Any, command: str, **options: Any) -> str:
    """Start a process; its session id."""
    started = await bench("terminal", command=command, background=True, **options)
    assert started["status"] == "running"
    return str(started["session_id"])


async def act(bench: Any, action: str, session_id: str | None = None, **more: Any) -> Any:
    named = {} if session_id is None else {"session_id": session_id}
    return await bench("process", action=action, **named, **more)


async def until(bench: Any, name: str, text: str, seen: str = "") -> str:
    """New output of a process, after what was seen of it, until it contains a text."""
    while text not in seen:
        shown = await act(bench, "poll", name, timeout=30)
        seen += shown["output"]
        assert shown["status"] == "running" or text in seen, seen
    return seen


async def test_a_web_server_in_the_background_answers_and_is_killed(each_bench: Any) -> None:
    bench = each_bench
    await bench.sh("mkdir site; echo page >site/index.html")
    serve = "exec python3 -u -m http.server --bind 127.0.0.1 0"
    server = await begin(bench, serve, workdir="site")
    port = (await until(bench, server, "port ")).split("port ")[1].split()[0]
    get = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}').read())"
    assert "page" in (await bench("terminal", command=f'python3 -c "{get}"'))["output"]
    assert "GET / HTTP" in await until(bench, server, "GET / HTTP")
    killed = await act(bench, "kill", server)
    assert killed["status"] == "exited"
    assert killed["exit_code"] != 0
    refused = await bench("terminal", command=f'python3 -c "{get}"')
    assert "refused" in refused["output"]


async def test_a_process_is_written_to_and_its_input_ends(each_bench: Any) -> None:
    bench = each_bench
    name = await begin(bench, 'while read -r l; do echo "<$l>"; done; echo end; exit 4')
    seen = (await act(bench, "write", name, data="one\ntw"))["output"]
    seen += (await act(bench, "submit", name, data="o"))["output"]
    seen = await until(bench, name, "<two>", seen)
    assert seen == "<one>\n<two>\n"
    await act(bench, "close", name)
    ended = await act(bench, "wait", name)
    assert (ended["status"], ended["exit_code"]) == ("exited", 4)
    assert (await act(bench, "poll", name))["output"] in ("", "end\n")
    assert (await act(bench, "log", name))["output"] == "<one>\n<two>\nend"
    with pytest.raises(ToolError, match="nothing was written: the process has ended"):
        await act(bench, "submit", name, data="late")


async def answered(bench: Any, name: str, line: str, text: str) -> str:
    """Submit a line; new output until it contains a text."""
    return await until(bench, name, text, (await act(bench, "submit", name, data=line))["output"])


async def test_python_and_bash_are_used_in_a_terminal(each_bench: Any) -> None:
    bench = each_bench
    python = await begin(bench, "python3 -q", pty=True)
    await until(bench, python, ">>>")
    await answered(bench, python, "import sys; print(6 * 7, sys.stdout.isatty())", "42 True")
    await act(bench, "submit", python, data="exit(3)")
    assert (await act(bench, "wait", python))["exit_code"] == 3
    shell = await begin(bench, "bash --norc -i", pty=True)
    assert "24 80" in await answered(bench, shell, "stty size; echo in-$((40 + 2))", "in-42")
    await act(bench, "close", shell)
    assert (await act(bench, "wait", shell))["status"] == "exited"


async def test_ssh_keygen_asks_in_its_terminal(bench: Any) -> None:
    name = await begin(bench, "ssh-keygen -t ed25519 -f key", pty=True)
    await until(bench, name, "passphrase")
    await answered(bench, name, "a long secret", "again")
    await act(bench, "submit", name, data="a long secret")
    assert (await act(bench, "wait", name))["exit_code"] == 0
    assert "PRIVATE KEY" in await bench.sh("cat key")


async def test_a_flood_is_bounded_and_the_log_has_the_latest(each_bench: Any) -> None:
    bench = each_bench
    name = await begin(bench, "seq 1 300000; echo last")
    assert (await act(bench, "wait", name))["exit_code"] == 0
    log = await act(bench, "log", name, limit=2)
    assert log["output"] == "300000\nlast"
    assert log["dropped_lines"] > 0
    early = await act(bench, "log", name, offset=log["dropped_lines"] + 1, limit=1)
    assert early["first_line"] == log["dropped_lines"] + 1
    endless = await begin(bench, "yes flood")
    result = await act(bench, "poll", endless, timeout=30)
    assert len(json.dumps(result)) < 30_000
    await act(bench, "kill", endless)


async def test_waiting_ends_in_time_and_says_that_it_runs(bench: Any) -> None:
    name = await begin(bench, "sleep 900")
    assert (await act(bench, "wait", name, timeout=0.05))["status"] == "running"
    assert [p["status"] for p in (await act(bench, "list"))["processes"]] == ["running"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"action": "poll"}, "'poll' needs session_id"),
        ({"action": "poll", "session_id": "proc_9"}, r"unknown process 'proc_9' \(known: none"),
        ({"action": "stop", "session_id": "proc_1"}, "must be one of"),
    ],
)
async def test_mistakes_are_one_line_each(
    bench: Any, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ToolError, match=reason):
        await bench("process", **arguments)


async def test_pty_and_notices_are_for_the_background(bench: Any) -> None:
    with pytest.raises(ToolError, match="need background: true"):
        await bench("terminal", command="true", pty=True)


@pytest.mark.slow
async def test_only_so_many_processes_run(bench: Any) -> None:
    names = [await begin(bench, "sleep 900") for _ in range(MAX_PROCESSES)]
    with pytest.raises(ToolError, match="64 background processes are running"):
        await begin(bench, "true")
    await act(bench, "kill", names[5])
    await begin(bench, "true")
    with pytest.raises(ToolError, match="unknown process"):
        await act(bench, "poll", names[5])


async def test_a_process_of_another_sandbox_is_lost(bench: Any) -> None:
    running, ended = await begin(bench, "sleep 900"), await begin(bench, "echo done")
    await act(bench, "wait", ended)
    bench.context.state.update(json.loads(json.dumps(bench.context.state)))  # as in a checkpoint
    bench.sandbox.attached.clear()  # as in the sandbox that continues from it
    assert (await act(bench, "poll", running))["status"] == "lost"
    assert (await act(bench, "log", ended))["output"] == "done\n"
    assert (await act(bench, "poll", ended))["exit_code"] == 0


async def test_requested_notices_come_once(bench: Any) -> None:
    name = await begin(bench, "echo all good; exit 2", notify_on_complete=True)
    other = await begin(bench, "true")
    running = await begin(bench, "sleep 900", notify_on_complete=True)
    for ended in (name, other):
        await bench.sandbox.attached["processes"][ended].process.wait(60)
    notices = await take_ended(bench.context)
    assert notices == [
        f"[Background process {name} ended with exit code 2. The end of its output:\nall good]"
    ]
    assert await take_ended(bench.context) == []
    await act(bench, "kill", running)
    assert await take_ended(bench.context) == []


async def test_processes_that_ended_keep_no_descriptor(each_bench: Any) -> None:
    bench = each_bench
    names = [await begin(bench, "echo done") for _ in range(3)]
    for name in names:
        await act(bench, "wait", name)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2 * MAX_PROCESSES):
        name = await begin(bench, "echo done")
        assert (await act(bench, "wait", name))["exit_code"] == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 4


async def test_a_character_that_comes_in_two_parts_is_whole(bench: Any) -> None:
    name = await begin(bench, r"printf 'cost \342'; read -r _; printf '\202\254 each\n'")
    seen = await until(bench, name, "cost ")
    seen += (await act(bench, "submit", name, data="")).get("output", "")
    assert await until(bench, name, "each", seen) == "cost € each\n"
