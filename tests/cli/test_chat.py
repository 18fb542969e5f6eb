"""`hermes-rl chat`, by keystrokes in a real terminal whose screen is read back."""

import base64
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forks
import pytest
from cli_runner import COMMAND, clean_environment
from terminal import CTRL_C, CTRL_D, ENTER, WAIT_S, Terminal

from hermes_rl.messages import UserMessage
from hermes_rl.sessions import SessionStore

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def say(*steps: Any) -> str:
    """A message that tells the fake server what to answer."""
    return "Do it.\nSCRIPT: " + json.dumps(list(steps))


@dataclass
class Place:
    """A folder with a store, and a model server."""

    folder: Path
    base_url: str
    log: Path
    """What the server was asked, here and in earlier tests."""

    @property
    def env(self) -> dict[str, str]:
        data = {"XDG_DATA_HOME": str(self.folder), "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}
        return {**clean_environment(), **data}

    @property
    def model(self) -> tuple[str, ...]:
        return ("--model", "m", "--base-url", self.base_url)

    def command(self, *arguments: str) -> list[str]:
        return ["chat", *self.model, *arguments]

    def open(self, *arguments: str, **settings: Any) -> Terminal:
        changed = settings.pop("env", {})
        settings |= {"env": {**self.env, **changed}, "interpreter": "LC_ALL" in changed}
        terminal = Terminal(self.command(*arguments), cwd=self.folder, **settings)
        terminal.wait_for("/help lists commands")
        terminal.wait_for(">")
        return terminal

    def ask(self, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments)
        found = forks.call(command, self.folder, self.env, typed)
        return subprocess.CompletedProcess(command, *found)

    def store(self) -> SessionStore:
        return SessionStore(self.folder / "hermes-rl" / "sessions.db")

    def last_request(self) -> dict[str, Any]:
        return json.loads(self.log.read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a model server that keeps nothing between requests, and its log."""
    log = tmp_path_factory.mktemp("server") / "requests.jsonl"
    command = [sys.executable, "-m", "hermes_rl.testing.fake_server", "--until-eof"]
    server = subprocess.Popen(
        [*command, "--log", str(log), "--script", "noop"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout
    assert server.stdin
    yield json.loads(server.stdout.readline())["base_url"], log
    server.stdin.close()
    server.wait(timeout=60)
    server.stdout.close()


@pytest.fixture
def place(tmp_path: Path, served: tuple[str, Path]) -> Place:
    return Place(tmp_path, *served)


DONE = " in · "
"""In the line below an answer."""
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred \u202eback\x9b5n"


@pytest.mark.parametrize("columns", [60, 200])
def test_a_turn_shows_reasoning_text_and_tools_with_times(place: Place, columns: int) -> None:
    """At both widths, without colours, and with a model that tries to control the terminal."""
    long = "word " * 60
    with place.open(columns=columns, env={"NO_COLOR": "1"}) as terminal:
        terminal.say(
            say(
                {"run": "printf 'a\\033]0;owned\\007b\\n'; seq 30", "reasoning": "Thinking first."},
                {"text": f"{HOSTILE} {long}The end."},
            ),
            until=DONE,
        )
        shown = terminal.text
        assert "Thinking first." in shown
        assert re.search(r"✓ \$ printf.* \d+\.\d s", shown)
        assert "| 1\n" in shown
        assert "more lines" in shown
        assert "\\x1b[31mred" in shown
        answer = shown[shown.index("more lines") :].replace("\n", "")
        assert answer.count("word") == 60
        assert b"owned\x07" not in terminal.raw
        assert b"\xe2\x80\xae" not in terminal.raw
        assert not re.search(rb"\x1b\[(?:\d+;)*3\dm", terminal.raw)
        assert not [line for line in shown.splitlines() if len(line) > columns]
        terminal.resize(80, 50)
        terminal.say("/usage", until="2 calls")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_a_dangerous_command_runs_only_with_consent_to_the_question(place: Place) -> None:
    """What was typed before the question does not answer it."""
    removal = {"run": "mkdir -p kept; rm -r kept; echo removed it"}
    typed = place.folder / "typed"
    wait = {"run": f"until test -e {typed}; do sleep 0.1; done"}
    script = say(wait, removal, {"text": "first"}, removal, {"text": "second"})
    with place.open("--sandbox", "none") as terminal:
        terminal.say(script, until="$ until")
        terminal.type("y")
        typed.touch()
        terminal.wait_for("Run it?")
        terminal.type(ENTER)
        assert "This command was denied" in terminal.wait_for(DONE)
        terminal.say("once more")
        terminal.wait_for("Run it?", count=2)
        terminal.type("y" + ENTER)
        terminal.wait_for("| removed it")
        terminal.wait_for(DONE, count=2)


def test_the_model_asks_the_user(place: Place) -> None:
    call = {"name": "clarify", "arguments": {"question": "Which one?", "choices": ["red", "blue"]}}
    with place.open("--toolsets", "clarify") as terminal:
        terminal.say(say({"calls": [call]}, "thanks"), until="Answer:")
        assert "  2  blue" in terminal.text
        terminal.type("2" + ENTER)
        terminal.wait_for(DONE)
        terminal.say("/skills", until="the model sees them with")
    with place.store() as store:
        [info] = [one for one in store.sessions() if one.messages]
        texts = [str(message.content) for message in store.messages(info.session_id)]
    assert '{"question":"Which one?","answer":"blue"}' in texts


def test_ctrl_c_interrupts_a_turn_and_twice_leaves_a_session_that_continues(place: Place) -> None:
    mark = f"sleep 7{uuid.uuid4().int % 10**6}"
    with place.open() as terminal:
        terminal.say(say({"text": "one"}, {"run": mark}, {"text": "three"}), until=DONE)
        terminal.say("the next one", until=f"$ {mark}")
        terminal.type(CTRL_C)
        terminal.wait_for("interrupted")
        terminal.say("/usage", until="2 calls")
        terminal.type(CTRL_C)
        terminal.wait_for("Ctrl-C again, or Ctrl-D, leaves")
        terminal.type(CTRL_C)
        assert terminal.wait() == 130
    _until_gone(mark)
    with place.open("--continue") as terminal:
        assert "> the next one" in terminal.wait_for("continuing session")
        terminal.say("third", until="three")


@pytest.mark.parametrize("end", ["hang up", "terminate", "kill"])
def test_whatever_ends_a_chat_leaves_a_session_that_resumes(place: Place, end: str) -> None:
    """Within a turn: its finished turns are kept, and its processes end."""
    mark = f"sleep 8{uuid.uuid4().int % 10**6}"
    with place.open() as terminal:
        script = say({"text": "paid one"}, {"run": "echo step"}, [{"run": mark}, "late"], "later")
        terminal.say(script, until=DONE)
        terminal.say("second", until=f"$ {mark}")
        if end == "hang up":
            terminal.hang_up()
        else:
            terminal.process.send_signal(signal.SIGTERM if end == "terminate" else signal.SIGKILL)
        code = terminal.wait()
    assert code == {"hang up": 129, "terminate": 143, "kill": -9}[end]
    _until_gone(mark)
    with place.store() as store:
        [info] = [one for one in store.sessions() if one.messages]
        texts = [str(message.content) for message in store.messages(info.session_id)]
    assert any("paid one" in text for text in texts)
    assert "second" in texts
    assert any("step" in text for text in texts[3:])
    with place.open("--resume", info.session_id[:8]) as terminal:
        terminal.say("continue", until=DONE)


def test_commands_change_the_conversation(place: Place) -> None:
    with place.open() as terminal:
        terminal.say(say("one", "two", "three", "four"), until=DONE)
        terminal.say("/undp", until="did you mean '/undo'")
        terminal.say("to be undone")
        terminal.wait_for(DONE, count=2)
        terminal.say("/undo", until="taken back")
        terminal.wait_for("to be undone", count=2)  # to be changed
        terminal.type(" no more" + ENTER)
        terminal.wait_for(DONE, count=3)
        terminal.say("/retry")
        terminal.wait_for(DONE, count=4)
        terminal.say("/model other", until="model other")
        terminal.say("now")
        terminal.wait_for(DONE, count=5)
        terminal.say("/help", until="/background TASK")
        terminal.say("/tools", until="toolsets: terminal, file")
        terminal.say("/usage", until="5 calls")
        terminal.say("/new", until="a new session")
        terminal.say("/resume", until="/resume ID continues one")
        assert re.search(r"\w{12}     6  Do it.", terminal.text)
    last = place.last_request()
    assert last["model"] == "other"
    with place.store() as store:
        info = max(store.sessions(), key=lambda one: one.updated_at if one.messages else 0)
        users = [m.content for m in store.messages(info.session_id) if isinstance(m, UserMessage)]
    assert users[1:] == ["to be undone no more", "now"]


def test_a_background_task_reports_while_the_user_types(place: Place) -> None:
    with place.open() as terminal:
        terminal.say("/background " + say("the background is done").split("\n")[0])
        terminal.wait_for("background 1: session")
        terminal.type("half a mess")
        terminal.wait_for("background 1 (session")
        terminal.type("age" + ENTER)
        terminal.wait_for(DONE)
    with place.store() as store:
        assert sum(bool(info.messages) for info in store.sessions()) == 2


def test_an_image_is_attached_by_its_path(place: Place) -> None:
    (place.folder / "dot.png").write_bytes(PNG)
    with place.open() as terminal:
        terminal.say("see @missing.png", until="error: missing.png")
        terminal.type("\x15see @dot.png" + ENTER)
        terminal.wait_for(DONE)
    result = place.ask("-q", "and this", "--image", "dot.png")
    assert result.returncode == 0, result.stderr
    with place.store() as store:
        for info in store.sessions():
            [user] = [m for m in store.messages(info.session_id) if isinstance(m, UserMessage)]
            assert user.content[1]["image_url"]["url"].startswith("data:image/png;base64,")


def test_one_question_prints_the_answer_alone(place: Place) -> None:
    result = place.ask("-q", say({"run": "echo x"}, f"42{HOSTILE}"))
    assert result.returncode == 0
    assert result.stdout.startswith("42\\x1b]0;owned\\x07")
    assert result.stdout.count("\n") == 1
    assert "$ echo x" in result.stderr
    assert place.ask("-q", "-", typed=say("from a pipe")).stdout == "from a pipe\n"
    refused = place.ask("-q", say({"run": "rm -r /tmp/x"}, "denied"))
    assert "This command was denied" in refused.stderr
    down = subprocess.run(
        [COMMAND, "chat", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "-q", "x"],
        env=place.env,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert down.returncode == 1
    assert down.stdout == ""
    assert "Traceback" not in down.stderr
    lines = place.ask(typed="first\n/usage\nsecond\n")
    assert lines.returncode == 0
    assert "1 call, " in lines.stdout


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}])
def test_poor_terminals_work(place: Place, env: dict[str, str]) -> None:
    with place.open(env=env) as terminal:
        terminal.say(
            say({"run": "echo é"}, "fine é"), until=" in · " if "TERM" in env else " in - "
        )
        assert terminal.raw.decode("ascii" if "LC_ALL" in env else "utf-8")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_what_was_typed_is_kept_for_its_owner_alone(place: Place) -> None:
    with place.open() as terminal:
        terminal.say("line one\nline two", until=DONE)
        terminal.type(CTRL_D)
        terminal.wait()
    history = place.folder / "hermes-rl" / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+line one\n+line two\n" in history.read_text()
    with place.open() as terminal:
        terminal.type("\x1b[A")
        terminal.wait_for("line two")
    with place.store() as store:
        assert [info.messages for info in store.sessions()][-1] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--approval", "maybe"], "ask"),
        (["--workspace", "nowhere"], "--workspace nowhere: not a folder"),
        (["--continue"], "no session to continue"),
        (["--resume", "x", "--continue"], "contradict"),
        (["--resume", "none"], "no session 'none'"),
        (["--toolsets", "terminl"], "did you mean 'terminal'"),
        (["--image", "x.png"], "@PATH"),
        (["-q", " "], "empty"),
    ],
)
def test_a_mistake_is_one_line(place: Place, arguments: Sequence[str], message: str) -> None:
    result = place.ask(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def _running(mark: str) -> bool:
    """Whether a process has a mark in its command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if line.startswith(mark):
                return True
    return False


def _until_gone(mark: str) -> None:
    end = time.monotonic() + WAIT_S
    while _running(mark):
        assert time.monotonic() < end, f"{mark} still runs"
        time.sleep(0.1)
