"""An agent's conversation between two messages: taken back, compressed, with another model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import AIAgent, ModelConfig
from hermes_rl.aio import LoopThread
from hermes_rl.errors import UserError
from hermes_rl.messages import UserMessage
from hermes_rl.sessions import SessionStore
from hermes_rl.testing import FakeConfig, FakeServer


@pytest.fixture
def base_url() -> Iterator[str]:
    loop = LoopThread("server")
    server = FakeServer(FakeConfig(script="noop"))
    loop.run(server.__aenter__())
    yield server.base_url
    loop.run(server.__aexit__(None, None, None))
    loop.close()


def say(*steps: Any) -> str:
    return "Do it.\nSCRIPT: " + json.dumps(list(steps))


def model(base_url: str, name: str = "m") -> ModelConfig:
    return ModelConfig(name=name, base_url=base_url)


def test_a_conversation_is_changed_between_messages(base_url: str, tmp_path: Path) -> None:
    with (
        SessionStore(tmp_path / "s.db") as store,
        AIAgent(model(base_url), toolsets=["terminal"], session=store) as agent,
    ):
        assert agent.undo() is None
        agent.chat(say({"run": "echo kept > here"}, "one", "two", {"run": "cat here"}, "five"))
        assert agent.chat("second") == "two"
        assert agent.undo() == "second"
        assert agent.chat("again") == "two"
        agent.use_model(model(base_url, "other"))
        result = agent.run_conversation("and now")
        assert result["model"] == "other"
        assert result["final_response"] == "five"
        assert any(m["role"] == "tool" and "kept" in m["content"] for m in result["messages"])
        stored = store.messages(agent.session_id)
        assert [m.content for m in stored if isinstance(m, UserMessage)][1:] == ["again", "and now"]
        assert {call["model"] for call in store.calls(agent.session_id)} >= {"other"}


def test_a_context_is_compressed_when_the_user_wants_it(base_url: str, tmp_path: Path) -> None:
    with (
        SessionStore(tmp_path / "s.db") as store,
        AIAgent(model(base_url), toolsets=[], session=store) as agent,
    ):
        with pytest.raises(UserError, match="say something first"):
            agent.compress()
        agent.chat(say("one", "two", "three", "four"))
        agent.chat("many words " * 2_000)
        agent.chat("a last message")
        before = agent.session_id
        done = agent.compress()
        assert done is not None
        assert [call["purpose"] for call in done["calls"]] == ["summary"]
        assert agent.session_id != before
        short = agent.run_conversation("continue")
        assert short["usage"]["input_tokens"] < done["usage"]["input_tokens"]
        assert len(store.messages(before)) == 6
        assert agent.undo() == "continue"


def test_a_message_has_images(base_url: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    parts = [{"type": "text", "text": "look"}, image]
    with AIAgent(model(base_url), toolsets=[]) as agent:
        result = agent.run_conversation(parts)
        assert result["messages"][1] == {"role": "user", "content": parts}
        assert agent.undo() == parts
