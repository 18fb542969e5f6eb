"""Search: any input is a query, parts of words without spaces are found, and it is quick."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.messages import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage
from hermes_rl.sessions import SessionStore, TurnRecord

CHINESE = "登录页面在会议室预订系统里超时了，请修复 bug 并运行测试"
JAPANESE = "東京のカフェで会議の予約をキャンセルしました"
KOREAN = "서울에서 회의실 예약을 취소했습니다"
CALL = ToolCall(id="c1", name="terminal", arguments='{"command": "grep -n frobnicate src/a.py"}')
MESSAGES: list[Message] = [
    UserMessage(content="The function read_file of Café.parse() fails with a TimeoutError"),
    AssistantMessage(content="I look.", tool_calls=(CALL,)),
    ToolMessage(tool_call_id="c1", name="terminal", content="src/a.py:7: x = 1  # 100% done"),
    UserMessage(content=CHINESE),
    UserMessage(content=JAPANESE),
    UserMessage(content=KOREAN),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionStore]:
    with SessionStore(tmp_path_factory.mktemp("search") / "s.db") as opened:
        opened.open("work").record(TurnRecord(messages=MESSAGES))
        yield opened


@pytest.mark.parametrize(
    ("query", "positions"),
    [
        ("timeouterror", [0]),
        ("cafe parse", [0]),  # without accents, and all terms
        ("cafe terminal", []),
        ("read_file", [0]),
        ("file read", [0]),
        ('"file read"', []),
        ("frob*", [1]),
        ("frob", []),
        ("frobnicate", [1]),  # in a tool call
        ("src/a.py", [2, 1]),
        ("100%", [2]),
        ("bug", [3]),
        ("超时", [3]),
        ("时", [3]),
        ("会议室预订", [3]),
        ("bug 修复", [3]),
        ("会", [4, 3]),
        ("カフェ", [4]),
        ("회의실", [5]),
        ("예약을", [5]),
        ("NOT", []),
        ("", []),
        ('"', []),
        ("*", []),
        ("::", []),
        ("()", [0]),
    ],
)
def test_queries(store: SessionStore, query: str, positions: list[int]) -> None:
    assert [hit.position for hit in store.search(query)] == positions


@given(query=st.text() | st.text('ab"*()^:-+{}~ANDORT\0 会議', max_size=20))
def test_no_input_is_an_error(store: SessionStore, query: str) -> None:
    assert isinstance(store.search(query), list)


@given(data=st.data())
def test_each_part_of_a_text_without_spaces_is_found(
    store: SessionStore, data: st.DataObject
) -> None:
    position, text = data.draw(st.sampled_from([(3, CHINESE), (4, JAPANESE)]))
    start = data.draw(st.integers(0, len(text) - 1))
    part = text[start : data.draw(st.integers(start + 1, len(text)))]
    cjk = [char for char in part if ord(char) > 0x3040 and char != "，"]
    if cjk and part == part.strip():
        assert position in {hit.position for hit in store.search(part)}


def test_snippets_show_the_term(store: SessionStore) -> None:
    (hit,) = store.search("frobnicate")
    assert "grep -n frobnicate src/a.py" in hit.snippet
    assert (hit.name, hit.role, hit.replaced) == ("work", "assistant", False)
    assert hit.title.startswith("The function read_file")


def test_thousands_of_messages_are_searched_quickly(tmp_path: Path) -> None:
    """`make bench` has the row of 100,000 messages."""
    with SessionStore(tmp_path / "s.db") as store:
        texts = [f"term{n % 997} line{n} common text of a message" for n in range(20_000)]
        texts[3] = "一个罕见的词在这里"
        session = store.open("large")
        session.record(TurnRecord(messages=[UserMessage(content=text) for text in texts]))
        for query in ("common", "term7", "common line19999", "absent", "罕见", "term3*", "%"):
            best = min(_seconds(store, query) for _ in range(3))
            assert best < 0.1, (query, best)
        assert [hit.position for hit in store.search("罕见")] == [3]
        assert [hit.position for hit in store.search("term7", 2)] == [19_947, 18_950]


def _seconds(store: SessionStore, query: str) -> float:
    start = time.process_time()
    store.search(query)
    return time.process_time() - start
