"""The agent against the fake model server over a socket, with real shells."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import AIAgent, ModelConfig
from hermes_rl.agent import PRESETS, AgentParts, AgentResult, Control, Limits, run_agent
from hermes_rl.aio import LoopThread
from hermes_rl.events import (
    AttemptKey,
    Begun,
    CallEnded,
    CallStarted,
    Ended,
    Event,
    EventLog,
    MessageAdded,
)
from hermes_rl.messages import Message, UserMessage
from hermes_rl.models import Endpoint, ModelClient, Sampling, connect
from hermes_rl.models.calls import ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Limiter
from hermes_rl.record import Trajectory
from hermes_rl.sandboxes import Sandbox, SandboxSpec, Subprocess
from hermes_rl.testing import FakeConfig, FakeServer
from hermes_rl.tools import Tool, resolve
from hermes_rl.trajectory import fold


def say(*steps: Any) -> str:
    """A prompt that tells the fake server what to answer."""
    return "Do it.\nSCRIPT: " + json.dumps(list(steps))


def begun() -> Begun:
    """The first event of some attempt."""
    return Begun(
        key=AttemptKey(unit_id="u", epoch=0, attempt=0),
        started_at=time.time(),
        run_id="r",
        group_id="g",
        member=0,
        repeat=0,
        row_index=0,
        task_id="t",
        task_hash="h",
        config_hash="c",
        seed=0,
        prompt="x",
        model="echo",
        api_mode="chat_completions",
        endpoint="here",
    )


def row_of(log: EventLog, result: AgentResult | None) -> Trajectory:
    """The row of a run as a batch run makes it; None for one that failed."""
    ended = Ended(finished_at=time.time(), end_reason="error", cause="model_server")
    if result is not None:
        ended = Ended(
            finished_at=time.time(),
            end_reason=result.end_reason,
            metrics=result.metrics,
            final_response=result.final_response,
        )
    return fold([begun(), *log.events, ended])


@dataclass
class Ran:
    """A run and what it recorded."""

    result: AgentResult
    log: EventLog

    def added(self) -> list[MessageAdded]:
        return [e for e in self.log.events if isinstance(e, MessageAdded)]

    def results(self) -> list[MessageAdded]:
        return [e for e in self.added() if e.tool_ok is not None]

    def outline(self) -> str:
        """One letter per message: s u a t; capital where the harness wrote it."""
        letters = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
        roles = [(letters[row.role], row.synthetic) for row in self.row().message_info]
        return "".join(letter.upper() if synthetic else letter for letter, synthetic in roles)

    def row(self) -> Trajectory:
        """The run's row, as a batch run makes it."""
        return row_of(self.log, self.result)

    def call_ids(self) -> list[str]:
        """The calls of the row."""
        return sorted(call.call_id for call in self.row().calls)

    def errors(self) -> list[str | None]:
        """What the row says of each call."""
        return [call.error for call in self.row().calls]

    def limits(self) -> list[int | None]:
        """The output limit of each call."""
        return [start.max_output_tokens for start, _ in self.calls()]

    def calls(self) -> list[tuple[CallStarted, CallEnded]]:
        starts = [e for e in self.log.events if isinstance(e, CallStarted)]
        ends = {e.call_id: e for e in self.log.events if isinstance(e, CallEnded)}
        return [(s, ends[s.call_id]) for s in starts]


@dataclass
class Rig:
    """Runs the agent; keeps the log of the last run."""

    server: FakeServer
    client: ModelClient
    sandbox: Sandbox | None
    tools: dict[str, Tool]
    log: EventLog = field(default_factory=EventLog)
    listener: Callable[[Event], None] | None = None

    def parts(self, **changes: Any) -> AgentParts:
        self.log = EventLog(listener=self.listener)
        caller = ModelCaller(
            [Route.single("", self.client, Limiter(8))],
            self.log,
            RetryPolicy(max_attempts=2, base_s=0.01, outage_s=0.2),
        )
        parts = AgentParts(
            caller=caller,
            model="echo",
            tools=self.tools,
            sandbox=self.sandbox,
            recorder=self.log,
            policy=PRESETS["datagen"],
            limits=Limits(max_turns=10),
            sampling=Sampling(),
            system="You are a test.",
        )
        return replace(parts, **changes)

    async def play(self, *steps: Any, control: Control | None = None, **changes: Any) -> Ran:
        """Run on a prompt that tells the fake server what to answer, step by step."""
        return await self.run(say(*steps), control, **changes)

    async def run(
        self, prompt: str | Sequence[Message], control: Control | None = None, **changes: Any
    ) -> Ran:
        messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        parts = self.parts(**changes)
        return Ran(await run_agent(parts, messages, control), self.log)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeServer(FakeConfig()))
        client = connect(Endpoint(server.base_url))
        stack.push_async_callback(client.aclose)
        backend = Subprocess(state_dir=tmp_path)
        stack.push_async_callback(backend.aclose)
        sandbox = await stack.enter_async_context(await backend.lease(SandboxSpec(lease="test")))
        yield Rig(server, client, sandbox, resolve(["terminal", "file"]))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A fake model server on a loop of its own, for tests of synchronous entry points."""
    with LoopThread() as home:
        server = FakeServer(FakeConfig(key="right"))
        home.run(server.__aenter__())
        yield server
        home.run(server.aclose())


def served_ids(server: FakeServer) -> list[str | None]:
    """The calls whose requests the server has seen the end of."""
    return sorted((entry.call_id for entry in server.entries), key=str)


Make = Callable[..., AIAgent]


@pytest.fixture
def make(server: FakeServer) -> Make:
    """Makes agents of that server, whose tools run without a sandbox."""

    def agent(key: str = "right", api_mode: Any = None, **more: Any) -> AIAgent:
        model = ModelConfig(name="m", base_url=server.base_url, api_key=key, api_mode=api_mode)
        return AIAgent(model, **{"sandbox": "none", "allow_unsandboxed": True} | more)

    return agent
