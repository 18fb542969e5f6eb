"""`hermes-rl sessions`: stored conversations from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.cli import main
from hermes_rl.messages import AssistantMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.sessions import SessionStore, TurnRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two sessions."""
    call = ToolCall(id="c1", name="terminal", arguments='{"command": "ls"}')
    with SessionStore(tmp_path / "s.db") as store:
        store.open("work").record(
            TurnRecord(
                messages=[
                    UserMessage(content="List the files\x1b[31m"),
                    AssistantMessage(tool_calls=(call,)),
                    ToolMessage(tool_call_id="c1", name="terminal", content='{"output": "a.py"}'),
                    AssistantMessage(content="One file."),
                ],
                system_prompt="Be brief.",
                model="m",
                end_reason="answered",
            )
        )
        store.open("other").record(TurnRecord(messages=[UserMessage(content="Hello there")]))
    return tmp_path / "s.db"


def test_sessions_are_listed_shown_and_found(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*line: str) -> str:
        assert main(["sessions", *line, "--store", str(path)]) == 0
        return capsys.readouterr().out

    def rows(*line: str) -> list[dict[str, Any]]:
        return [json.loads(one) for one in run(*line, "--json").splitlines()]

    listed = run("list")
    assert listed.index("other") < listed.index("work") < listed.index("2 sessions")
    assert "\x1b" not in listed
    assert [row["name"] for row in rows("list", "--limit", "1")] == ["other"]
    shown = run("show", "work")
    assert [line.split()[0] for line in shown.splitlines()] == [
        *("work", "system", "0", "1", "a.py", "3")
    ]
    assert "$ ls" in shown
    (whole,) = rows("show", "work")
    assert whole["system_prompt"] == "Be brief."
    assert [m["role"] for m in whole["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert run("search", "a.py").startswith("work #2")
    assert [row["position"] for row in rows("search", "hel*", "there")] == [0]
    assert run("search", "absent") == "no message has all of these terms\n"
    run("rename", "work", "Another title")
    assert "Another title" in run("list")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (["show", "\udcff"], "no session '\\udcff'"),
        (["export", "\udcff", "-o", "x.jsonl"], "no session '\\udcff'"),
        (["export", "work", "-o", "absent/x.jsonl"], "cannot be written: No such file"),
        (["prune", "\udcff"], "no session '\\udcff'"),
        (["rename", "work", "\udcff"], ""),
        (["search", "\udcff"], ""),
    ],
)
def test_arguments_that_are_not_utf_8_and_files_that_cannot_be_written_are_one_line(
    path: Path, line: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", *line, "--store", str(path)]) == (2 if error else 0)
    found = capsys.readouterr().err
    assert error in found
    assert found.count("\n") == bool(error)


def test_sessions_are_exported_imported_and_pruned(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*line: str, code: int = 0) -> tuple[str, str]:
        assert main(["sessions", *line]) == code
        found = capsys.readouterr()
        return found.out, found.err

    store, file = ("--store", str(path)), tmp_path / "work.jsonl"
    run("export", "work", "-o", str(file), *store)
    assert run("export", "work", *store)[0] == file.read_text()
    other = ("--store", str(tmp_path / "new" / "other.db"))
    assert "session again, 4 messages" in run("import", str(file), "--name", "again", *other)[0]
    assert "already" in run("import", str(file), *other, code=2)[1]
    pruned = ("prune", "work", *store)
    assert "1 sessions would be removed" in run(*pruned, "--dry-run")[0]
    assert "1 sessions removed" in run(*pruned)[0]
    assert json.loads(run("prune", "--older-than", "0", "--json", *store)[0])["name"] == "other"
    assert "0 sessions in" in run("list", *store)[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["show", "wrk"], "did you mean 'work'?"),
        (["show", ""], "no session ''"),
        (["prune"], "name the sessions, or use --older-than DAYS"),
        (["export", "work", "-o", "."], ". exists. Choose another file"),
        (["import", "absent.jsonl"], "absent.jsonl: no such file or directory"),
        (["list", "--store", "absent.db"], "there is no store absent.db"),
    ],
)
def test_mistakes_are_one_line(
    path: Path, line: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = [] if "--store" in line else ["--store", str(path)]
    assert main(["sessions", *line, *store]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
