"""What each layer of the agent adds to a turn: CPU in this process, without model and sandbox.

python layers.py RUNS

Prints a JSON object: layer -> microseconds per turn, `off` with all of them off, the others what is
added to that. A run has 50 turns of one command and a result of 200 characters; the layers are
measured in turn, and figures are medians of five rounds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from hermes_rl.agent import (
    PRESETS,
    AgentParts,
    ContextParts,
    Hooks,
    HookTable,
    Limits,
    Progress,
    RunHooks,
    SavedConversation,
    run_agent,
)
from hermes_rl.events import AttemptKey, Begun, Ended, Event, EventLog
from hermes_rl.messages import AssistantMessage, ToolCall, UserMessage
from hermes_rl.models import Completion, ModelRequest
from hermes_rl.sessions import SessionStore
from hermes_rl.telemetry import Telemetry
from hermes_rl.tools import Approval, Tool, ToolContext, ToolResult
from hermes_rl.usage import Usage

TURNS, ROUNDS = 50, 5
OFF = PRESETS["rl"]
GUARDED = {"tool_loop_limit": 5, "detect_cycles": True, "tool_failure_limit": 8}


class Model:
    """Calls the tool in each turn; the last answer is a text."""

    async def call(self, request: ModelRequest, *, turn: int, **more: Any) -> Completion:
        calls = ()
        if turn < TURNS:
            arguments = json.dumps({"command": f"cd /workspace && make target-{turn}"})
            calls = (ToolCall(id=f"call-{turn}", name="run", arguments=arguments),)
        usage = Usage(input_tokens=1_000 + 60 * turn, output_tokens=20)
        message = AssistantMessage(content=f"Step {turn}.", tool_calls=calls)
        return Completion(message, "tool_calls" if calls else "stop", usage)


async def run_command(context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
    return ToolResult(f"{arguments['command']}\n" + "x" * 200)


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = Tool(
    "run", "Run.", SCHEMA, run_command, "x", needs_sandbox=False, command_argument="command"
)


def begun() -> Begun:
    texts = dict.fromkeys(("run_id", "group_id", "task_id", "task_hash", "config_hash"), "x")
    key = AttemptKey(unit_id="u", epoch=0, attempt=0)
    more = {"prompt": "x", "model": "m", "api_mode": "chat_completions", "endpoint": "x"}
    zero = {"member": 0, "repeat": 0, "row_index": 0, "seed": 0}
    return Begun(key=key, started_at=time.time(), **texts, **more, **zero)


def observe(**payload: Any) -> None:
    """A hook that only looks."""


async def run(
    switches: dict[str, Any],
    changes: dict[str, Any],
    listener: Callable[[Event], None] | None = None,
) -> EventLog:
    log = EventLog(listener=listener)
    log.record(begun())
    hooks = changes.get("hooks")
    caller = Model() if hooks is None else hooks.caller(Model())
    parts = AgentParts(caller, "m", {"run": TOOL}, None, log, replace(OFF, **switches))
    parts = replace(parts, limits=Limits(max_turns=TURNS), system="You work.", **changes)
    await run_agent(parts, [UserMessage(content="Do all steps.")])
    log.record(Ended(finished_at=time.time(), end_reason="answered"))
    return log


async def with_session(store: SessionStore) -> None:
    saved = SavedConversation(store)
    saved.open()
    messages: list[Any] = []

    async def after_turn(progress: Progress) -> None:
        await asyncio.to_thread(saved.save, list(messages), "You work.", "m", "running")

    def listen(event: Event) -> None:
        saved.note(event)
        if (message := getattr(event, "message", None)) is not None and event.turn:
            messages.append(message)

    await run({}, {"after_turn": after_turn}, listen)


async def with_spans(telemetry: Telemetry) -> None:
    telemetry.export((await run({}, {})).events)


def layers(folder: Path) -> dict[str, Callable[[], Any]]:
    """Layer -> one run with it."""
    trace.set_tracer_provider(TracerProvider())
    telemetry, store = Telemetry(content=False), SessionStore(folder / "sessions.db")
    names = ("pre_llm_call", "pre_api_request", "post_api_request", "pre_tool_call")
    hooks = Hooks(**dict.fromkeys((*names, "post_tool_call", "transform_tool_result"), observe))
    of_run = RunHooks(HookTable.of(hooks, []), {})
    approval, far = Approval("allow", disposable=True), ContextParts(window=10_000_000)
    all_on = {f: getattr(PRESETS["datagen"], f) for f in PRESETS["datagen"].__dataclass_fields__}
    return {
        "off": partial(run, {}, {}),
        "hints": partial(run, {"budget_hints": True}, {}),
        "guardrails": partial(run, {**GUARDED, "loop_warnings": True}, {}),
        "approval": partial(run, {"check_commands": True}, {"approval": approval}),
        "spill, fence": partial(run, {"spill_results": True, "fence_untrusted": True}, {}),
        "compression far away": partial(run, {"compress_context": True}, {"context": far}),
        "six hooks": partial(run, {}, {"hooks": of_run}),
        "session": partial(with_session, store),
        "spans": partial(with_spans, telemetry),
        "all switches of datagen": partial(run, all_on, {"approval": approval, "context": far}),
    }


async def measure(runs: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        each = layers(Path(folder))
        for _ in range(ROUNDS):
            for name, one in each.items():
                start = time.process_time()
                for _ in range(runs):
                    await one()
                found.setdefault(name, []).append((time.process_time() - start) / runs / TURNS)
    off = found["off"]
    added = {
        name: [1e6 * (a - (b if name != "off" else 0)) for a, b in zip(times, off, strict=True)]
        for name, times in found.items()
    }
    return {name: round(median(times), 1) for name, times in added.items()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1])))))
