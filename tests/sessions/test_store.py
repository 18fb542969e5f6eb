"""The store of sessions: what it keeps, for whom, and what it refuses."""

import os
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import UserError
from hermes_rl.events import CallEnded, CallStarted, ContextStarted
from hermes_rl.messages import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage
from hermes_rl.sessions import (
    FileSession,
    SessionStore,
    TurnRecord,
    export_session,
    import_file,
    open_session,
)
from hermes_rl.usage import Usage


def user(text: str) -> UserMessage:
    return UserMessage(content=text)


def answer(text: str) -> AssistantMessage:
    return AssistantMessage(content=text)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with SessionStore(tmp_path / "deep" / "s.db") as opened:
        yield opened


def record(session: Any, *messages: Message, **more: Any) -> None:
    session.record(TurnRecord(messages=messages, **more))


calls = st.builds(ToolCall, id=st.text(min_size=1), name=st.text(), arguments=st.text())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
parts = st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})
messages = st.lists(
    st.builds(UserMessage, content=st.text() | st.lists(parts, max_size=2))
    | st.builds(ToolMessage, tool_call_id=st.text(), name=st.text(), content=st.text())
    | st.builds(
        AssistantMessage,
        content=st.text(),
        reasoning_content=st.none() | st.text(),
        tool_calls=st.lists(calls, max_size=2).map(tuple),
        raw_content=st.none() | st.text(),
        reasoning_details=st.none() | st.lists(json_values, max_size=2),
    ),
    max_size=5,
)


@given(histories=st.lists(messages, min_size=1, max_size=4), prompt=st.text())
def test_a_session_returns_exactly_what_was_stored(
    histories: list[list[Message]], prompt: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    with SessionStore(folder / "s.db") as store:
        session = store.open("work")
        for history in histories:
            record(session, *history, system_prompt=prompt)
        assert session.load() == histories[-1]
    with SessionStore(folder / "s.db") as store:
        assert store.messages("work") == histories[-1]
        info = store.find("work")
        assert (info.session_id, info.messages) == (session.session_id, len(histories[-1]))
        assert info.system_prompt == prompt
        (folder / "out.jsonl").write_bytes(b"".join(export_session(store, "work")))
        with SessionStore(folder / "other.db") as other:
            copied = import_file(other, folder / "out.jsonl")
            assert other.messages(copied.session_id) == histories[-1]
            assert copied.system_prompt == prompt
    file = FileSession(folder / "out.jsonl")  # an agent can continue the exported file as it is
    assert (file.session_id, file.load()) == (session.session_id, histories[-1])
    file.close()


def test_the_files_are_the_users_alone(store: SessionStore) -> None:
    store.open("work")
    for file in store.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_usage_titles_and_models_are_stored(store: SessionStore) -> None:
    session = store.open("work")
    shared: dict[str, Any] = {"turn": 1, "purpose": "agent", "model": "m", "started_at": 1.0}
    usage = Usage(input_tokens=10, output_tokens=5)
    events = [
        CallStarted(call_id="a", **shared),
        CallEnded(call_id="a", outcome="ok", latency_s=0.5, usage=usage, cost_usd=0.25),
        CallStarted(call_id="b", **shared),
    ]
    record(session, user("  Fix it.\nNow."), answer("ok"), events=events, model="m")
    info = store.find("work")
    assert (info.title, info.model, info.end_reason) == ("Fix it.", "m", "running")
    assert (info.calls, info.input_tokens, info.output_tokens, info.cost_usd) == (2, 10, 5, None)
    assert [call["outcome"] for call in store.calls("work")] == ["ok", "unknown"]
    store.rename("work", "The parser")
    record(session, user("  Fix it.\nNow."), answer("ok"), user("More"), end_reason="answered")
    info = store.find(session.session_id[:6])
    assert (info.title, info.model, info.end_reason) == ("The parser", "m", "answered")


def test_a_compressed_conversation_continues_in_a_new_session(store: SessionStore) -> None:
    first = [user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f")]
    session = store.open("work")
    record(session, *first, system_prompt="s")
    parent = session.session_id
    compressed = [user("a"), answer("A summary of all."), user("g"), answer("h")]
    events = [ContextStarted(start=6, reason="compression")]
    record(session, *compressed, events=events)
    child = store.find("work")
    assert session.session_id == child.session_id != parent
    assert (child.parent_id, child.branched_by, child.shared) == (parent, "compression", 1)
    assert (child.title, child.system_prompt, child.messages) == ("a", "s", 4)
    assert store.messages("work") == compressed
    assert store.messages(parent) == first  # nothing is lost, and all of it is found
    assert {h.session_id for h in store.search("f")} == {parent}
    record(session, user("a new subject"))
    assert store.find("work").branched_by == "branch"
    with pytest.raises(UserError, match="in use by another agent"):
        store.open("work")
    with pytest.raises(UserError, match="in use by another agent"):
        store.resume(session.session_id)
    session.close()
    again = store.open("work")
    assert again.load() == [user("a new subject")]
    assert [info.name for info in store.sessions()] == ["work", None, None]


def test_the_last_message_may_be_replaced_and_stays_in_the_file(store: SessionStore) -> None:
    session = store.open("work")
    record(session, user("a"), answer("b"), user("interrupted"))
    record(session, user("a"), answer("b"), user("interrupted\n\nagain"), answer("c"))
    assert len(store.sessions()) == 1
    hits = store.search("interrupted")
    assert [(hit.position, hit.replaced) for hit in hits] == [(2, False), (2, True)]


def test_a_branch_shares_the_beginning_and_not_the_rest(store: SessionStore) -> None:
    session = store.open("work")
    record(session, user("a"), answer("b"), user("c"), answer("d"), system_prompt="s")
    other = store.branch("work", 2, "other")
    assert (other.load(), other.system_prompt) == ([user("a"), answer("b")], "s")
    record(other, user("a"), answer("b"), user("x"))
    record(session, user("a"), answer("b"), user("c"), answer("d"), user("e"))
    assert store.messages("other") == [user("a"), answer("b"), user("x")]
    assert len(store.messages("work")) == 5
    with pytest.raises(UserError, match="has 5 messages, not 6"):
        store.branch("work", 6)
    with pytest.raises(UserError, match=r"'other' is in .* already"):
        store.branch("work", name="other")


def test_prune_removes_whole_lineages_and_their_texts(store: SessionStore) -> None:
    old = store.open("old")
    record(old, user("the word xylophone"), answer("b"), user("c"))
    record(old, user("another subject"))
    held = store.open("held")
    record(held, user("kept"))
    future = time.time() + 1
    assert store.prune(before=time.time() - 60) == []
    assert store.prune(before=future) == []  # an agent has each of them open
    old.close()
    assert len(store.prune(before=future, dry_run=True)) == 2
    assert [info.name for info in store.prune(before=future)] == [None, "old"]
    assert [info.name for info in store.sessions()] == ["held"]
    assert store.search("xylophone") == []
    assert all(b"xylophone" not in f.read_bytes() for f in store.path.parent.iterdir())
    with pytest.raises(UserError, match="in use by an agent"):
        store.prune(wanted=["held"])
    with pytest.raises(UserError, match=r"no session 'hold' in .* \(did you mean 'held'\?\)"):
        store.prune(wanted=["hold"])


def test_a_file_of_an_earlier_version_is_upgraded_and_of_a_later_one_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    with SessionStore(path) as store:
        record(store.open("work"), user("find me"), answer("修复登录问题"))
    with sqlite3.connect(path) as file:  # as version 1 left it, which had no search
        for name in ("added", "added_cjk", "removed", "removed_cjk"):
            file.execute(f"DROP TRIGGER messages_{name}")
        file.execute("DROP TABLE message_text")
        file.execute("DROP TABLE message_trigrams")
        file.execute("DROP INDEX messages_cjk")
        file.execute("PRAGMA user_version = 1")
    file.close()
    with SessionStore(path) as store:
        assert [hit.position for hit in store.search("find")] == [0]
        assert [hit.position for hit in store.search("登录")] == [1]
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 99")
    file.close()
    with pytest.raises(UserError, match="were written by a later version"):
        SessionStore(path)


def test_what_is_not_a_store_is_left_as_it_is(tmp_path: Path) -> None:
    text, other = tmp_path / "notes.db", tmp_path / "other.db"
    text.write_text("notes " * 100)
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE mine (x)")
    file.close()
    before = other.read_bytes()
    for path, reason in ((text, "not a database"), (other, "not a session store")):
        with pytest.raises(UserError, match=reason) as caught:
            SessionStore(path)
        assert "\n" not in str(caught.value)
    assert text.read_text() == "notes " * 100
    assert tables_of(other) == ["mine"]
    assert len(other.read_bytes()) == len(before)
    with pytest.raises(UserError, match="Choose another file"):
        SessionStore(tmp_path / "notes.db" / "s.db")


def tables_of(path: Path) -> list[str]:
    with sqlite3.connect(path) as file:
        names = [row[0] for row in file.execute("SELECT name FROM sqlite_master")]
    file.close()
    return names


def test_names_and_files_open_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    earlier = FileSession(tmp_path / "hermes-rl" / "sessions" / "work.jsonl")
    earlier.append(0, [user("a"), answer("b")], "answered")
    earlier.close()
    session = open_session("work")  # an earlier version kept it in a file
    assert (session.session_id, session.load()) == (earlier.session_id, [user("a"), answer("b")])
    session.close()
    with SessionStore() as store:
        assert store.path == tmp_path / "hermes-rl" / "sessions.db"
        assert store.find("work").end_reason == "answered"
        store.prune(wanted=["work"])
        assert open_session(store).load() == []
    session = open_session("work")
    assert session.load() == []  # not imported a second time
    session.close()
    file = open_session(str(tmp_path / "talk.jsonl"))
    assert isinstance(file, FileSession)
    file.close()
    with pytest.raises(UserError, match="pass a Path"):
        open_session("../up")
    with pytest.raises(UserError, match="pass a Path"):
        open_session("\ud800")
    open_session("x" * 5_000).close()
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "p"}\n')
    with pytest.raises(UserError, match="not a session file"):
        open_session(other)
    if os.geteuid():
        (tmp_path / "shut").mkdir(mode=0o500)
        with pytest.raises(UserError, match="Permission denied"):
            open_session(tmp_path / "shut" / "s.jsonl")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from hermes_rl.errors import UserError
from hermes_rl.messages import UserMessage
from hermes_rl.sessions import SessionStore, TurnRecord

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
store = SessionStore(path)
session = store.open("work")
first = UserMessage(content="a" * 1000)
session.record(TurnRecord(messages=[first]))
size = max(file.stat().st_size for file in path.parent.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100_000, resource.RLIM_INFINITY))
large = [first, *(UserMessage(content=f"{n} " * 500) for n in range(900))]
try:
    session.record(TurnRecord(messages=large))
except UserError as error:
    print(error)
assert store.messages("work") == [first] == session.load()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
session.record(TurnRecord(messages=large))
assert store.messages("work") == large
assert len(store.search("899")) == 1
"""


def test_a_full_disk_in_the_middle_of_a_write_loses_nothing(tmp_path: Path) -> None:
    """The limit on the size of files cuts the write, as a full disk does."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "s.db")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Free some space" in done.stdout
    assert done.stdout.count("\n") == 1
