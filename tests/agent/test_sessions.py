"""Conversations that outlive an agent, through `AIAgent`."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl import Hooks
from hermes_rl.errors import AuthError, UserError
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    from_openai,
)
from hermes_rl.sessions import FileSession, SessionStore, common_length

from .conftest import Make, say


def test_a_session_keeps_the_turns_of_a_run_that_an_error_ended(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    steps = {"run": "echo a"}, [{"fault": "billing"}, "Yes."]
    with make(session=path) as agent:
        ended = agent.run_conversation(say(*steps))
        assert ended["error"]["class"] == "BillingError"
    with make(session=path) as agent:
        result = agent.run_conversation("SCRIPT is off")
    assert [m["role"][0] for m in result["messages"]] == list("suatua")
    lines = len(path.read_text().splitlines())
    with make(key="wrong", session=path) as agent, pytest.raises(AuthError):
        agent.chat("Nothing of this is kept.")
    assert len(path.read_text().splitlines()) == lines


THOUGHT = {"type": "thinking", "thinking": "I look first.", "signature": "c2ln"}


STRICT = "anthropic_messages"
"""A wire that refuses a repeated id."""


def test_a_conversation_goes_on_from_its_messages_with_signed_thinking(make: Make) -> None:
    step = {"run": "echo kept", "reasoning": "I look first.", "details": [THOUGHT]}
    with make(api_mode=STRICT) as agent:
        first = agent.run_conversation(say(step, "Done.", "More."))
    sent: list[Any] = []

    def see(conversation_history: list[dict[str, Any]]) -> None:
        sent.extend(conversation_history)

    with make(api_mode=STRICT, hooks=Hooks(pre_llm_call=see)) as agent:
        again = agent.run_conversation("And?", conversation_history=first["messages"])
    assert again["final_response"] == "More."
    answers = [m for m in sent if m["role"] == "assistant"]
    assert answers[0]["reasoning_details"] == [THOUGHT]
    assert [m.get("reasoning_details") for m in first["messages"] if m["role"] == "assistant"] == [
        [THOUGHT],
        None,
    ]
    json.dumps(again["messages"])


def test_a_history_with_one_id_twice_is_taken_by_a_strict_provider(
    make: Make, tmp_path: Path
) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
    turn: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "out"},
    ]
    history = [{"role": "user", "content": say("a", "b", "Fine.")}, *turn, *turn]
    with make(api_mode=STRICT) as agent:
        result = agent.run_conversation("And?", conversation_history=history)
    assert result["final_response"] == "Fine."
    session = FileSession(tmp_path / "s.jsonl")
    session.append(0, [from_openai(form) for form in history], "answered")
    session.close()
    with make(api_mode=STRICT, session=tmp_path / "s.jsonl") as agent:
        assert agent.chat("And?") == "Fine."


def test_a_conversation_goes_on_in_another_agent(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "talks" / "one.jsonl"
    script = say({"run": "echo kept"}, "Written.", "Read.", "Third.")
    with make(session=path) as agent:
        assert agent.chat(script) == "Written."
        name = agent.session_id
        with pytest.raises(UserError, match="in use by another agent"):
            make(session=path)
    started: list[bool] = []

    def note(resumed: bool) -> None:
        started.append(resumed)

    with make(session=path, hooks=Hooks(on_session_start=note)) as agent:
        result = agent.run_conversation("And?")
        assert result["final_response"] == "Read."
    assert started == [True]
    assert (result["session_id"], agent.session_id) == (name, name)
    with path.open("ab") as file:
        file.write(b'{"kept": 3, "add')  # torn by a kill
    with make(session=path) as agent:
        assert agent.chat("Once more.") == "Third."
        assert agent.run_conversation(say("New."), conversation_history=[])["completed"]
    session = FileSession(path)
    assert [type(m) for m in session.load()] == [UserMessage, AssistantMessage]
    session.close()


def test_a_stored_session_replays_the_system_prompt_and_counts_the_calls(
    make: Make, tmp_path: Path
) -> None:
    path, sent = tmp_path / "s.db", "Be brief.\n  \u00fcber \x0b"
    with SessionStore(path) as store, make(session=store.open("work"), system=sent) as agent:
        assert agent.chat(say({"run": "true"}, "Done.", "More.")) == "Done."
        name = agent.session_id
    with SessionStore(path) as store, make(session=store.open("work")) as agent:
        result = agent.run_conversation("And?")
        assert (result["messages"][0]["content"], result["session_id"]) == (sent, name)
        assert store.find("work").calls == 3
        assert store.find("work").end_reason == "answered"
        assert agent.run_conversation("New.", conversation_history=[])["session_id"] != name
    with SessionStore(path) as store, make(session=store.open("work"), system="Other.") as agent:
        assert agent.run_conversation("?")["messages"][0]["content"] == "Other."
        assert (store.find("work").system_prompt, store.find(name).system_prompt) == (
            "Other.",
            sent,
        )
        assert store.find("work").parent_id == name


calls = st.builds(ToolCall, id=st.text(min_size=1), name=st.text(), arguments=st.text())
messages = st.lists(
    st.builds(UserMessage, content=st.text())
    | st.builds(ToolMessage, tool_call_id=st.text(), name=st.text(), content=st.text())
    | st.builds(
        AssistantMessage,
        content=st.text(),
        reasoning_content=st.none() | st.text(),
        tool_calls=st.lists(calls, max_size=2).map(tuple),
    ),
    max_size=5,
)


@given(histories=st.lists(messages, max_size=4))
def test_a_session_gives_back_what_it_was_given(
    histories: list[list[Message]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("session") / "s.jsonl"
    session = FileSession(path)
    for history in histories:
        kept = common_length(session.load(), history)
        session.append(kept, history[kept:], "answered")
    session.close()
    again = FileSession(path)
    assert again.load() == (histories[-1] if histories else [])
    assert again.session_id == session.session_id
    again.close()


def test_a_system_message_is_a_message_too() -> None:
    system = SystemMessage(content="s")
    assert common_length([system], [system, UserMessage(content="u")]) == 1


@pytest.mark.parametrize("text", ["notes, one line", "notes\nwithout an end", '{"my": "json"}'])
def test_a_file_that_is_no_session_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(UserError, match="not a session file"):
        FileSession(path)
    assert path.read_text() == text
