"""What the tests of models share: the fixture `kit`."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_rl.events import CallEnded, CallStarted, Event, Waited
from hermes_rl.messages import AssistantMessage, Message, ToolMessage, UserMessage
from hermes_rl.models import Completion, Conversation, Endpoint, ModelClient, ModelRequest, connect
from hermes_rl.models.calls import Clock, ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Limiter
from hermes_rl.testing import FakeConfig, FakeServer, encode_event
from hermes_rl.usage import Usage

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # for wire_kit
    sys.path.insert(0, HERE)

import simulated_time  # noqa: E402 - found there
import wire_kit  # noqa: E402 - found there

TERMINAL: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "terminal",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    },
)


class Events:
    """A recorder in memory."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    def record(self, event: Event) -> None:
        self.all.append(event)

    @property
    def starts(self) -> list[CallStarted]:
        return [e for e in self.all if isinstance(e, CallStarted)]

    @property
    def ends(self) -> list[CallEnded]:
        return [e for e in self.all if isinstance(e, CallEnded)]

    @property
    def waited(self) -> list[float]:
        return [e.seconds for e in self.all if isinstance(e, Waited)]


class FakeTime:
    """A clock that only sleeping moves; chance always takes the upper end."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self._ids = 0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def clock(self) -> Clock:
        return Clock(
            monotonic=lambda: self.now,
            time=lambda: self.now,
            sleep=self.sleep,
            uniform=lambda low, high: high,
            new_id=self._next,
        )

    def _next(self) -> str:
        self._ids += 1
        return f"call-{self._ids}"


ANSWER = Completion(
    message=AssistantMessage(content="yes"),
    finish_reason="stop",
    usage=Usage(input_tokens=3, output_tokens=1),
)


class Scripted:
    """A client that raises or returns its outcomes, request by request; the last one for ever.

    Args:
        before: called as each request begins.
    """

    api_mode = endpoint = "scripted"

    def __init__(self, *outcomes: Any, before: Callable[[], Any] = lambda: None) -> None:
        self.outcomes, self.before = list(outcomes), before
        self.call_ids: list[str] = []

    async def complete(self, request: ModelRequest) -> Completion:
        self.call_ids.append(request.call_id)
        self.before()
        await asyncio.sleep(0)
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def bound(self, request: ModelRequest) -> int:
        return 11

    async def aclose(self) -> None:
        pass


def request(
    prompt: str | Iterable[Message] = "hi", model: str = "echo", **fields: Any
) -> ModelRequest:
    messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    return ModelRequest(
        model=model, conversation=Conversation(messages), call_id="test-call", **fields
    )


def caller(client: ModelClient, events: Events, **options: Any) -> ModelCaller:
    options.setdefault("policy", RetryPolicy(base_s=0.01, max_attempts=50))
    return ModelCaller([Route.single("", client, Limiter(256))], events, **options)


async def rollout(
    calling: ModelCaller, prompt: str = "hi", model: str = "echo", **fields: Any
) -> Conversation:
    """An agent's conversation in small: answers every tool call with its arguments."""
    model_request = request(prompt, model, tools=TERMINAL, **fields)
    conversation = model_request.conversation
    for turn in range(1, 50):
        answer = await calling.call(model_request, turn=turn)
        conversation.append(answer.message)
        if not answer.message.tool_calls:
            break
        for call in answer.message.tool_calls:
            conversation.append(
                ToolMessage(tool_call_id=call.id, name=call.name, content=call.arguments)
            )
    return conversation


async def until(condition: Callable[[], Any], seconds: float = 30.0, step: float = 0.005) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it lives in another task
            await asyncio.sleep(step)


def answer_with(message, **fields):
    return json.dumps({"id": "x", "choices": [{"message": message}], **fields}).encode()


def stream_of(*deltas, finish="stop", done=True):
    chunks = [{"choices": [{"index": 0, "delta": d}]} for d in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    events = [encode_event(json.dumps(c).encode()) for c in chunks]
    return b"".join(events) + (encode_event(b"[DONE]") if done else b"")


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    return SimpleNamespace(
        TERMINAL=TERMINAL,
        Events=Events,
        FakeTime=FakeTime,
        request=request,
        caller=caller,
        budget_of=wire_kit.budget_of,
        rollout=rollout,
        ANSWER=ANSWER,
        Scripted=Scripted,
        until=until,
        decode=wire_kit.decode,
        answer_with=answer_with,
        stream_of=stream_of,
        JSON=wire_kit.JSON,
        SSE=wire_kit.SSE,
    )


class Stage:
    """Clients and callers on fake servers, closed at the end."""

    quick = RetryPolicy(base_s=0.01, cap_s=0.05)

    def __init__(self, stack):
        self.stack, self.events = stack, Events()

    async def server(self, **config):
        return await self.stack.enter_async_context(FakeServer(FakeConfig(**config)))

    def client(self, server, **endpoint):
        client = connect(Endpoint(server.base_url, **endpoint))
        self.stack.push_async_callback(client.aclose)
        return client

    def route(self, server, model="", **endpoint):
        return Route.single(model, self.client(server, **endpoint), Limiter(64))

    def caller(self, *routes, policy=quick, **options):
        return ModelCaller(routes, self.events, policy, **options)

    def in_loop_time(self, *routes, policy=quick):
        return self.caller(*routes, policy=policy, clock=simulated_time.loop_clock())

    @property
    def outcomes(self):
        return [end.outcome for end in self.events.ends]


@pytest.fixture
def stage():
    @asynccontextmanager
    async def opened():
        async with AsyncExitStack() as stack:
            yield Stage(stack)

    return opened
