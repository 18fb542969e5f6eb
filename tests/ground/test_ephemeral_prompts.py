"""What is sent and not stored, as people write it: an ephemeral system prompt and a prefill."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.config import parse_assignment, parse_config, set_key, to_yaml
from hermes_rl.config_agent import check_prefill
from hermes_rl.errors import UserError
from hermes_rl.messages import AssistantMessage, ToolMessage, UserMessage

GOOD: dict[str, Any] = {"dataset": {"path": "rows"}, "model": {"name": "m"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
SHOTS: list[dict[str, Any]] = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "Three."},
]


def agent(**keys: Any) -> Any:
    return parse_config({**GOOD, "agent": keys}).agent


def test_ephemeral_prompt_and_prefill_are_read_from_files(tmp_path: Path) -> None:
    text, shots = tmp_path / "now.txt", tmp_path / "shots.json"
    text.write_text("Today is Monday.")
    shots.write_text(json.dumps(SHOTS))
    keys = {"ephemeral_system_prompt": f"@{text}", "prefill": f"@{shots}"}
    read = parse_config({**GOOD, "agent": keys})
    assert read.agent == agent(ephemeral_system_prompt="Today is Monday.", prefill=SHOTS)
    kinds = [type(m) for m in read.agent.prefill_messages]
    assert kinds == [UserMessage, AssistantMessage, ToolMessage, AssistantMessage]
    text.unlink(), shots.unlink()
    assert parse_config(yaml.safe_load(to_yaml(read))) == read


def test_ephemeral_prompt_and_prefill_on_the_command_line(tmp_path: Path) -> None:
    shots = tmp_path / "shots.json"
    shots.write_text(json.dumps(SHOTS[:1] + SHOTS[-1:]))
    data: dict[str, Any] = {**GOOD}
    for assignment in ("agent.ephemeral_system_prompt=Be quick.", f"agent.prefill=@{shots}"):
        set_key(data, *parse_assignment(assignment))
    read = parse_config(data).agent
    assert read.ephemeral_system_prompt == "Be quick."
    assert len(read.prefill_messages) == 2
    assert agent(prefill=None).prefill == agent(prefill=[]).prefill == ()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"ephemeral_system_prompt": " "}, "agent.ephemeral_system_prompt' is empty. Write"),
        ({"ephemeral_system_prompt": "@no.txt"}, "no.txt: No such file"),
        ({"ephemeral_system_prompt": "\ud800"}, "half a surrogate pair"),
        ({"ephemeral_system_prompt": ["a"]}, "'agent.ephemeral_system_prompt' must be"),
        ({"prefill": "shots.json"}, "write a list of messages, or @FILE"),
        ({"prefill": "@no.json"}, "no.json: No such file .*Check agent.prefill"),
        ({"prefill": {"role": "user"}}, "must be a list of messages"),
        ({"prefill": ["hi"]}, "'agent.prefill' message 1 is 'hi': write an object"),
        ({"prefill": [{"role": "wat"}]}, "message 1: message with role 'wat': use"),
        ({"prefill": [{"role": "system", "content": "s"}]}, "Put its text into agent.ephemeral"),
        ({"prefill": [{"role": "user", "content": "x", "n": float("nan")}]}, "NaN"),
    ],
)
def test_bad_input_is_one_line(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        agent(**keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[\n{]", r"shots.json:2: not valid JSON"),
        (b"\xff", "not valid UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'[{"role": "tol"}]', r"shots.json message 1: message with role 'tol'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "shots.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        agent(prefill=f"@{path}")


@given(
    st.lists(
        st.one_of(
            st.sampled_from(SHOTS),
            st.dictionaries(st.sampled_from(["role", "content"]), st.text() | st.none()),
            st.integers() | st.text(),
        ),
        max_size=6,
    )
)
def test_any_prefill_is_accepted_or_refused(forms: list[Any]) -> None:
    refused = ""
    try:
        check_prefill(forms, "here")
    except UserError as error:
        refused = str(error)
    assert refused.startswith("here") or all("role" in form for form in forms)
