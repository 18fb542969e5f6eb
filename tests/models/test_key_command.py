"""Keys printed by a command: valid output, sharing of one run, and refusals."""

import asyncio
import base64
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hermes_rl import AIAgent, ModelConfig
from hermes_rl.aio import LoopThread
from hermes_rl.config import parse_config
from hermes_rl.errors import AuthError, UserError
from hermes_rl.messages import UserMessage
from hermes_rl.models import (
    MIN_INTERVAL_S,
    Conversation,
    Endpoint,
    KeyCommand,
    KeyNotRenewed,
    KeyRenewed,
    ModelRequest,
    RenewableKey,
    connect,
    read_key_expiry,
)
from hermes_rl.models.providers import Keys, Place, collect_keys, find_keys
from hermes_rl.testing import FakeConfig, FakeServer
from hermes_rl.text import SECRETS

EXPIRED = AuthError("401: expired", status=401)


def command(text: str, limit_s: float = 30.0) -> KeyCommand:
    return KeyCommand("MY_KEY", text, limit_s)


def web_token(ends: float) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": ends}).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{claims}.c2ln"


def counting(folder: Path, prints: str) -> str:
    """A command that notes each of its runs."""
    return f"echo x >> {folder}/runs; {prints}"


def runs(folder: Path) -> int:
    path = folder / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


async def test_key_is_the_printed_text() -> None:
    assert command("echo warning >&2; printf '  token-1\\n'").run() == "token-1"
    assert await command('printf "$HOME"').arun() == os.environ["HOME"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("true", "printed nothing"),
        ("echo; echo ' '", "printed nothing"),
        ("echo token-1; echo token-2", "printed more than a key"),
        ("echo tökèn", "printed more than a key"),
        ("echo token-1; echo; echo 'no login of token-1' >&2; echo more >&2; exit 3",
         "ended with exit code 3: no login of ***"),
        ("exit 4", "ended with exit code 4"),
        ("echo two token-1 words; echo token-1 is old >&2; exit 3",
         "ended with exit code 3: *** is old"),
        ("echo 'token-2 ya29.a0AfB_byC-1234567 of eyJhbGciOi.eyJleHAiOjE3fQ.c2ln' | cut -c9- >&2;"
         " exit 1", "ended with exit code 1: *** of ***"),
        ("echo \0", "could not be started (embedded null byte)"),
        (f"echo {'x' * 3_000_000}", "could not be started (Argument list too long)"),
        ("kill -9 $$", "ended with exit code -9"),
        ("no-such-program-here", "ended with exit code 127: "),
    ],
)  # fmt: skip
async def test_failed_command_is_reported_without_the_key(text: str, message: str) -> None:
    for way in (lambda: asyncio.to_thread(command(text).run), command(text).arun):
        with pytest.raises(UserError) as caught:
            await way()
        line = str(caught.value)
        assert line.startswith(f"the key command of MY_KEY {message}")
        assert line.endswith(". Fix that command")
        assert "token-" not in line
        assert "\n" not in line
    assert text not in repr(command(text))


HANGS = "exec 9> {0}; echo up >&9; sleep 600 & wait"
"""Holds a pipe open for as long as any of its processes lives."""


async def test_hanging_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(UserError, match="did not end within 2 s"):
        await asyncio.to_thread(command(HANGS.format(pipe), 2.0).run)
    os.set_blocking(reader, True)
    async with asyncio.timeout(240):
        written = await asyncio.to_thread(lambda: [*iter(lambda: os.read(reader, 9), b"")])
    assert written in ([b"up\n"], []), "a busy machine may kill it before it has begun"
    os.close(reader)


def until_ended(stat: Path) -> None:
    """Wait until a process has ended that was not reaped."""
    until = time.monotonic() + 30
    while ") Z " not in stat.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("command_ends", [False, True])
async def test_cancelled_command_leaves_no_process(tmp_path: Path, command_ends: bool) -> None:
    """Also where it ended at once, and what it left behind keeps its pipes open."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    wait = "" if command_ends else "wait"
    text = f"exec 9> {pipe}; echo $$ >&9; sleep 600 & {wait}"
    running = asyncio.create_task(command(text).arun())
    opened = await asyncio.to_thread(pipe.open)
    with opened:
        shell = Path("/proc") / (await asyncio.to_thread(opened.readline)).strip() / "stat"
        if command_ends:
            await asyncio.to_thread(until_ended, shell)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(240):
            assert await asyncio.to_thread(opened.read) == ""


async def test_concurrent_refusals_share_one_run(tmp_path: Path) -> None:
    live = RenewableKey(command(counting(tmp_path, "echo new-key")), "old-key")
    reported = await asyncio.gather(*(live.refused("old-key", EXPIRED) for _ in range(64)))
    assert {type(error) for error in reported} == {KeyRenewed}
    assert runs(tmp_path) == 1
    assert await live.current() == "new-key"
    assert live.seen == ("old-key", "new-key")
    late = await live.refused("old-key", EXPIRED)
    assert isinstance(late, KeyRenewed)
    assert runs(tmp_path) == 1, "the key is new already"


async def test_concurrent_refusals_share_failed_and_unchanged_runs(tmp_path: Path) -> None:
    for prints, message in (
        ("exit 7", "exit code 7. Fix that command"),
        ("echo old-key", "its command prints the same key again"),
    ):
        folder = tmp_path / prints[:4]
        folder.mkdir()
        live = RenewableKey(command(counting(folder, prints)), "old-key")
        live.accepted()
        reported = await asyncio.gather(*(live.refused("old-key", EXPIRED) for _ in range(64)))
        assert runs(folder) == 1
        assert all(type(e) is KeyNotRenewed and e.transient and message in str(e) for e in reported)
        assert {e.status for e in reported} == {401}


async def test_key_that_never_worked_is_final() -> None:
    for prints in ("echo old-key", "exit 7"):
        reported = await RenewableKey(command(prints), "old-key").refused("old-key", EXPIRED)
        assert type(reported) is AuthError
        assert not reported.transient
    fresh = RenewableKey(command("echo new-key"), "old-key")
    assert not (await fresh.refused("old-key", EXPIRED)).transient
    fresh.accepted()
    assert (await fresh.refused("old-key", EXPIRED)).transient


async def test_command_interval_doubles_without_accepted_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, sleep = [0.0], asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", noted)
    live = RenewableKey(command(counting(tmp_path, f"wc -l < {tmp_path}/runs")), "old-key")
    began = time.monotonic()
    assert isinstance(await live.refused("old-key", EXPIRED), KeyRenewed)
    assert isinstance(await live.refused("1", EXPIRED), KeyRenewed)
    assert time.monotonic() - began >= 2 * MIN_INTERVAL_S
    live.accepted()
    assert isinstance(await live.refused("2", EXPIRED), KeyRenewed)
    assert waits[-1] <= MIN_INTERVAL_S, "it would be four times as long without the use"
    assert runs(tmp_path) == 3


async def test_old_keys_are_scrubbed_from_command_errors() -> None:
    live = RenewableKey(command("echo 'token old-key-123 is gone' >&2; exit 1"), "old-key-123")
    live.accepted()
    reported = await live.refused("old-key-123", EXPIRED)
    assert "token *** is gone" in str(reported)


@pytest.mark.parametrize(
    ("error", "asks"),
    [
        (AuthError("403: The security token included in the request is expired", status=403), 1),
        (AuthError("the answer contains an error: token expired"), 1),
        (AuthError("403: Permission denied on resource", status=403), 0),
        (AuthError("no trust", reason="ssl_cert_verification"), 0),
    ],
)
async def test_only_expiry_refusals_renew_the_key(
    tmp_path: Path, error: AuthError, asks: int
) -> None:
    live = RenewableKey(command(counting(tmp_path, "echo new-key")), "old-key")
    reported = await live.refused("old-key", error)
    assert runs(tmp_path) == asks
    assert isinstance(reported, KeyRenewed) if asks else reported is error


async def test_key_is_renewed_before_its_expiry(tmp_path: Path) -> None:
    soon, later = web_token(time.time() + 60), web_token(time.time() + 3600)
    live = RenewableKey(command(counting(tmp_path, f"echo {later}")), soon)
    assert await live.current() == later
    assert await live.current() == later
    assert runs(tmp_path) == 1


@given(st.text() | st.builds("{}.{}.{}".format, st.text(), st.text(), st.text()))
@example(web_token(10**400))
def test_other_keys_have_no_expiry(key: str) -> None:
    ends = read_key_expiry(key)
    assert ends is None or isinstance(ends, float)


@pytest.mark.parametrize("transport", ["http", "sdk"])
@pytest.mark.parametrize("mode", ["chat_completions", "codex_responses", "anthropic_messages"])
async def test_renewed_key_is_sent_on_every_wire_and_never_shown(
    tmp_path: Path, mode: str, transport: str
) -> None:
    file = tmp_path / "key"
    file.write_text("token-of-monday")
    keys = Keys.renewed_by(
        {"MY_KEY": f"cat {file}", "OTHER": "false"}, {"MY_KEY": file.read_text()}
    )
    assert "token" not in repr(keys)
    async with FakeServer(FakeConfig(key="token-of-monday", script="noop")) as server:
        endpoint = Endpoint(
            server.base_url,
            api_key="token-of-monday",
            live_key=keys.live["MY_KEY"],
            api_mode=mode,
            transport=transport,  # type: ignore[arg-type]
        )
        client = connect(endpoint)
        request = ModelRequest("m", Conversation([UserMessage(content="hi")]), "c")
        assert (await client.complete(request)).message.content == "done"
        file.write_text("token-of-tuesday")
        server.config = replace(server.config, key="token-of-tuesday")
        with pytest.raises(KeyRenewed) as caught:
            await client.complete(request)
        assert "token" not in str(caught.value)
        assert caught.value.status == 401
        assert (await client.complete(request)).message.content == "done"
        assert set(endpoint.secrets) == {"token-of-monday", "token-of-tuesday"}
        assert SECRETS.scrub("token-of-monday token-of-tuesday") == " ".join(
            ["[secret MY_KEY]"] * 2
        )
        await client.aclose()


def test_keys_at_the_start_of_a_run(tmp_path: Path) -> None:
    place = Place(None, "https://h.example/v1", "chat_completions", ("A", "B"), key_needed=True)
    (tmp_path / "key").write_text("key-of-a")
    commands = {"A": counting(tmp_path, f"cat {tmp_path}/key")}
    found = find_keys([place, place], {"B": "2"}, commands)
    assert found == {"A": "key-of-a", "B": "2"}
    assert runs(tmp_path) == 1
    with pytest.raises(UserError, match="the key command of A ended with exit code 1"):
        find_keys([place], {"A": "1", "B": "2"}, {"A": "false"})
    with pytest.raises(
        UserError, match=r"endpoint\.key_commands\.A contains the key itself"
    ) as error:
        find_keys([place], {"B": "2"}, {"A": "echo sk-very-secret"})
    assert "sk-very" not in str(error.value)


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        ({"MINE": "echo k"}, r"has MINE, which the run does not use \(VERTEX_ACCESS_TOKEN\)"),
        ({"no name": "echo k"}, "has a key that is not a variable name. Write NAME: command"),
        ({"VERTEX_ACCESS_TOKEN": ""}, "VERTEX_ACCESS_TOKEN' must not be empty"),
    ],
)
def test_useless_key_commands_are_refused(commands: dict[str, str], message: str) -> None:
    place = (
        "https://us-central1-aiplatform.googleapis.com/v1/projects/p/locations/l/endpoints/openapi"
    )
    endpoint = {"provider": "vertex", "base_url": place, "key_commands": commands}
    with pytest.raises(UserError, match=message):
        collect_keys(
            parse_config({"dataset": {"path": "x"}, "model": {"name": "m"}, "endpoint": endpoint})
        )


def test_aiagent_accepts_a_key_command(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("token-1")
    with LoopThread() as home:
        server = FakeServer(FakeConfig(key="token-1"))
        home.run(server.__aenter__())
        model = ModelConfig(name="echo", base_url=server.base_url, key_command=f"cat {file}")
        with AIAgent(model, sandbox="none", allow_unsandboxed=True, toolsets=()) as agent:
            assert agent.chat('Hi.\nSCRIPT: ["yes"]') == "yes"
            file.write_text("token-2")
            server.config = replace(server.config, key="token-2")
            assert agent.chat("And now?") == "done"
            assert [entry.outcome for entry in server.entries] == ["served", "refused", "served"]
        home.run(server.aclose())
