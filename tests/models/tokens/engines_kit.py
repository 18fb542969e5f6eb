"""What the tests of token engines share: a fake engine, a client for it, and a small agent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hermes_rl.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from hermes_rl.models import Completion, Conversation, Endpoint, ModelClient, ModelRequest, Sampling
from hermes_rl.models.tokens import TokenClient, load_renderer, token_client
from hermes_rl.testing import (
    ExactConfig,
    ExactEngine,
    Speaker,
    Truth,
    chat_of,
    scripted,
    write_tiny_tokenizer,
)

ROUTES = {
    "vllm": "/v1/completions",
    "vllm_generate": "/inference/v1/generate",
    "sglang": "/generate",
    "llamacpp": "/completion",
    "chat": "/v1/chat/completions",
}
WIRES = tuple(way for way in ROUTES if way != "chat")
FREE = Sampling(temperature=1.0, top_p=1.0, top_k=-1)
TERMINAL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
TOOLS = (TERMINAL,)


@asynccontextmanager
async def engine_at(
    folder: Path, *, family: str = "chatml", speaker: Speaker = scripted, **fields: Any
) -> AsyncIterator[ExactEngine]:
    """A fake engine of a family's tokenizer; Chat Completions included."""
    write_tiny_tokenizer(folder, family)
    config = ExactConfig(tokenizer=folder, **fields)
    async with ExactEngine(config, speaker, chat_of(folder)) as engine:
        yield engine


def client_of(engine: ExactEngine, wire: str, **fields: Any) -> TokenClient:
    """A token-in client for it."""
    renderer = load_renderer(engine.config.tokenizer)
    return token_client(Endpoint(engine.base_url), renderer, wire, **fields)


@asynccontextmanager
async def client_at(
    wire: str, folder: Path, **fields: Any
) -> AsyncIterator[tuple[ExactEngine, TokenClient]]:
    """A fake engine and a token-in client for it."""
    async with engine_at(folder, **fields) as engine:
        client = client_of(engine, wire)
        yield engine, client
        await client.aclose()


def continues(after: Completion, before: Completion) -> bool:
    """Whether a prompt begins with another call's prompt and what was sampled there."""
    assert after.tokens is not None
    assert before.tokens is not None
    path = (before.tokens.prompt_ids or ()) + (before.tokens.completion_ids or ())
    return (after.tokens.prompt_ids or ())[: len(path)] == path


def config_of(engine: ExactEngine, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration with this engine, to parse."""
    form: dict[str, dict[str, Any]] = {
        "dataset": {"path": "unused"},
        "model": {"name": "toy"},
        "agent": {"preset": "rl"},
        "sandbox": {"backend": "none"},
        "endpoint": {"base_url": engine.base_url},
        "run": {"allow_unsandboxed": True},
    }
    return form | {name: {**form[name], **values} for name, values in sections.items()}


def script(*steps: Any) -> str:
    """A prompt that makes the engine say these."""
    return f"Please.\nSCRIPT: {json.dumps(list(steps))}\n"


def request_of(
    conversation: Conversation, number: int = 0, *, sampling: Sampling = FREE, **fields: Any
) -> ModelRequest:
    return ModelRequest(
        model="toy",
        conversation=conversation,
        call_id=f"call-{number}",
        tools=fields.pop("tools", TOOLS),
        sampling=sampling,
        exact=True,
        **fields,
    )


async def played(
    client: ModelClient, messages: Sequence[Message], *, turns: int = 20, sampling: Sampling = FREE
) -> tuple[Conversation, list[Completion]]:
    """A small agent: asks, answers each call with a result, until there is none."""
    conversation, answers = Conversation(messages), []
    for turn in range(turns):
        answers.append(await client.complete(request_of(conversation, turn, sampling=sampling)))
        conversation.append(answers[-1].message)
        calls = answers[-1].message.tool_calls
        if not calls:
            break
        for call in calls:
            message = f"<|im_end|> result of {call.arguments}"
            conversation.append(ToolMessage(tool_call_id=call.id, name=call.name, content=message))
    return conversation, answers


def user_turn(text: str) -> list[Message]:
    return [SystemMessage(content="You help."), UserMessage(content=text)]


def agree(answers: Sequence[Completion], truth: Sequence[Truth], kind: str = "raw") -> None:
    """Every answer's ids and logprobs are those that the engine sampled."""
    served = [entry for entry in truth if entry.outcome == "served"]
    assert len(served) == len(answers)
    for answer, entry in zip(answers, served, strict=True):
        assert answer.tokens is not None
        assert answer.tokens.prompt_ids == entry.prompt_ids
        assert answer.tokens.completion_ids == entry.sampled_ids
        expected = entry.raw_logprobs if kind == "raw" else entry.scaled_logprobs
        reported = answer.tokens.logprobs
        assert reported is not None
        assert len(reported) == len(expected)
        assert all(abs(a - b) < 1e-9 for a, b in zip(reported, expected, strict=True))


def texts(conversation: Conversation) -> list[str]:
    return [m.content for m in conversation if isinstance(m, AssistantMessage)]


STEPS = (
    {"reasoning": "hm", "text": "Well,", "run": "ls -la"},
    {"calls": [{"arguments": {"command": "<|im_end|> é"}}, {"arguments": "{no json"}]},
    {"text": "It is cut", "end": False, "finish": "length"},
)


def kind(wire: str) -> str:
    """What a wire's logprobs are of."""
    return "scaled" if wire == "llamacpp" else "raw"
