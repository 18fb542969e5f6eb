"""`AIAgent`: the agent as people use it, from scripts, notebooks and async code.

All its work happens on one event loop in a thread of its own, so that connections and sandbox stay
whole over many calls, whoever makes them. `run_agent` is the same agent without all this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from hermes_rl import events as ev
from hermes_rl.agent import (
    AgentParts,
    Control,
    Hooked,
    Hooks,
    Limits,
    OnEvent,
    Policy,
    Session,
    SessionEnd,
    SessionStart,
    call_hook,
    common_length,
    continuable,
    last_answer,
    open_session,
    run_agent,
    split_system,
    system_prompt,
    with_user,
)
from hermes_rl.agent import (
    preset as policy_of,
)
from hermes_rl.aio import LoopThread
from hermes_rl.config import ModelConfig
from hermes_rl.config_endpoint import ConnectionSection, EndpointSection
from hermes_rl.definitions import sampling_of
from hermes_rl.errors import HermesError, Interrupted, ModelError, UserError, end_reason_of
from hermes_rl.events import EventLog
from hermes_rl.messages import (
    Message,
    UserMessage,
    conversation_from_openai,
    to_openai,
    with_unique_ids,
)
from hermes_rl.models import NoopClient, Sampling
from hermes_rl.models.calls import ModelCaller, RetryPolicy
from hermes_rl.models.providers import Keys, Routes, asks_endpoint, find_keys, targets_of
from hermes_rl.models.rate import Share
from hermes_rl.sandboxes import Sandbox, SandboxBackend, SandboxSpec
from hermes_rl.text import clean
from hermes_rl.tools import DEFAULT_TOOLSETS, resolve
from hermes_rl.trajectory import fold
from hermes_rl.wiring import BACKENDS, make_backend, open_models

FIRST_ANSWER_S = 5.0
"""Somebody waits: an endpoint that fails from the start is told soon."""
INTERACTIVE_TURNS = 90
_CALLS_AT_ONCE = 8
_EXPLICIT_KEY = "api_key"
"""Stands for a variable's name where the key itself was passed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """An open connection to a model, kept for the life of an agent."""

    model: str
    sampling: Sampling
    routes: Routes


@asynccontextmanager
async def open_link(model: object) -> AsyncIterator[Link]:
    """Connect to a model: a name or a `ModelConfig`. Raises: UserError."""
    config = ModelConfig(name=model) if isinstance(model, str) else model
    if not isinstance(config, ModelConfig):
        raise UserError(f"model {model!r}: give a name or a ModelConfig")
    if config.name == "oracle":
        raise UserError("model 'oracle' plays a task's solution; use `hermes-rl run` for it")
    key = config.api_key.get_secret_value() if config.api_key else None
    has_key = bool(key) or config.key_command is not None
    shared = config.model_dump(include=set(ConnectionSection.model_fields), exclude_defaults=True)
    if has_key or key is not None:
        shared["api_key_env"] = _EXPLICIT_KEY if has_key else ""
    if config.key_command is not None:
        shared["key_commands"] = {_EXPLICIT_KEY: config.key_command}
    where = EndpointSection(**shared)
    targets = targets_of(where, extra=config.extra_body, stop=config.stop)
    keys: dict[str, str] = {}
    if asks_endpoint(config.name, where):
        places = [target.place for target in targets]
        environ = {**os.environ, **({_EXPLICIT_KEY: key} if key else {})}
        keys = await asyncio.to_thread(find_keys, places, environ, where.key_commands)
    held = Keys.renewed_by(where.key_commands, keys)
    share = Share(maximum=_CALLS_AT_ONCE)
    async with AsyncExitStack() as stack:
        routes = await open_models(config.name, where, {config.name: targets}, stack, held, share)
        yield Link(config.name, sampling_of(config), routes or Routes.to(NoopClient(), share))


@asynccontextmanager
async def open_sandbox(sandbox: object) -> AsyncIterator[Sandbox]:
    """A sandbox from a specification, a backend, a name, or None for the default.

    A backend lives on the loop that opened it, so it is closed with its sandbox.

    Raises: UserError, SandboxStartError.
    """
    spec = SandboxSpec(lease=f"agent-{uuid.uuid4().hex[:16]}")
    if isinstance(sandbox, SandboxSpec):
        spec, sandbox = sandbox, None
    if sandbox is None or isinstance(sandbox, str):
        sandbox = make_backend(sandbox or BACKENDS[0])
    elif not hasattr(sandbox, "lease"):
        raise UserError(f"sandbox {sandbox!r}: give a backend, a SandboxSpec or a name")
    backend = cast(SandboxBackend, sandbox)
    try:
        async with await backend.lease(spec) as leased:
            yield leased
    finally:
        await backend.aclose()


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    end_reason: str
    final_response: str | None
    error: HermesError | None = None


def error_of(error: HermesError) -> dict[str, str | None]:
    """An error as plain data: class, reason (of model errors), cause and message."""
    reason = error.reason if isinstance(error, ModelError) else None
    named = {"class": type(error).__name__, "reason": reason, "cause": error.cause}
    return {**named, "message": str(error)}


def accounts_of(events: Sequence[ev.Event], end: Ended) -> dict[str, Any]:
    """Usage, calls and cost, made by the same fold as the rows of a run."""
    cause = "interrupted" if end.end_reason == "interrupted" else None
    if end.error is not None:
        cause = end.error.cause
    last = ev.Ended(finished_at=time.time(), end_reason=end.end_reason, cause=cause)
    row = fold([*events, last])
    usage, calls = msgspec.to_builtins(row.usage), msgspec.to_builtins(row.calls)
    return {"usage": usage, "calls": calls, "cost_usd": row.cost_usd}


def _prompt(history: list[Message], text: str, *, as_written: bool) -> list[Message]:
    """The conversation with the user's next message; one that the user wrote stays as it is."""
    if as_written:
        return [*history, UserMessage(content=clean(text))]
    return with_user(history, text)


class AIAgent:
    """An agent with tools in a sandbox. Keeps its conversation and its sandbox until `close`.

    Args:
        model: a model's name, or a `ModelConfig`.
        toolsets: names of toolsets; empty for none.
        sandbox: where tools work; None is the default backend with an empty workspace.
        preset: `interactive`, `datagen` or `rl`; or a policy of your own,
            `preset("interactive").switched({"nudge_empty": False})`.
        limits: bounds of each run; None is 90 turns.
        system: system prompt in place of the preset's.
        on_event: called with each event of `hermes_rl.events` as it happens, on the agent's loop.
        on_delta: called with each piece of text as it is streamed; without it nothing is streamed.
        session: where the conversation is kept between agents: a name, a `Path` of a file, or an
            object with `session_id`, `load`, `append` and `close`. The system prompt is not kept.
        hooks: callbacks before and after model calls and tools; see `Hooks`.
        allow_unsandboxed: needed for the sandbox `none`, which runs commands as you.

    Raises: UserError for an unknown toolset or preset, a session that cannot be used, or the
        sandbox `none` that was not allowed.
    """

    def __init__(
        self,
        model: object,
        *,
        toolsets: Sequence[str] = DEFAULT_TOOLSETS,
        sandbox: object = None,
        preset: str | Policy = "interactive",
        limits: Limits | None = None,
        system: str | None = None,
        on_event: OnEvent | None = None,
        on_delta: Callable[[str], None] | None = None,
        session: str | Path | Session | None = None,
        hooks: Hooks | None = None,
        allow_unsandboxed: bool = False,
    ) -> None:
        if getattr(sandbox, "name", sandbox) == "none" and not allow_unsandboxed:
            raise UserError(
                "sandbox 'none' runs the model's commands as you, on this machine. "
                "Use the default sandbox, or pass allow_unsandboxed=True"
            )
        self.model, self.sandbox = model, sandbox
        self.toolsets = tuple(toolsets)
        self.session_id = uuid.uuid4().hex
        self.hooks = hooks or Hooks()
        self._tools = resolve(self.toolsets)
        self._policy = policy_of(preset)
        if self._policy.name == "rl" and getattr(model, "fallbacks", None):
            raise UserError(
                "fallbacks would mix two policies in one conversation. Take them out, or use "
                "another preset than rl"
            )
        self._limits = limits or Limits(max_turns=INTERACTIVE_TURNS)
        policy = self._policy
        self._system = system or system_prompt(policy.name, self._tools, policy.wording)
        self._on_event, self._on_delta = on_event, on_delta
        self._loop_thread = LoopThread("hermes-rl-agent")
        self._history: list[Message] = []
        self._control = Control()
        self._running = False
        self._link: Link | None = None
        self._leased: Sandbox | None = None
        self._opened = AsyncExitStack()
        self._where = session
        self._session: Session | None = None
        self._ended: str | None = None
        """How the last run ended; None before the first."""
        self._open_session()

    def chat(self, message: str) -> str:
        """Say something and get the answer; the conversation continues from call to call.

        Raises: as `run_conversation`; also the error that ended the run after its first request,
            whose `result` is what `run_conversation` would have returned.
        """
        result, error = self._loop_thread.run(self._converse(message, None, None, None))
        if error is not None:
            raise error
        return str(result["final_response"] or "")

    def run_conversation(
        self,
        user_message: str,
        system_message: str | None = None,
        conversation_history: Sequence[Mapping[str, Any]] | None = None,
        task_id: str | None = None,
    ) -> dict[str, Any]:
        """Run until the agent ends; works in plain scripts and where a loop is already running.

        Args:
            system_message: replaces the system prompt from here on.
            conversation_history: OpenAI messages to continue from instead of the agent's own; `[]`
                starts a new one.

        Returns: final_response, messages, completed, end_reason, error, usage, calls, cost_usd,
            model, session_id, task_id. An error after the first request is an ending too: `error`
            then has its class, reason, cause and message, and the conversation keeps the turns
            that the model took.

        Raises: UserError, SandboxError and the like before the first request.
        """
        result, _ = self._loop_thread.run(
            self._converse(user_message, system_message, conversation_history, task_id)
        )
        return result

    async def run(
        self,
        user_message: str,
        system_message: str | None = None,
        conversation_history: Sequence[Mapping[str, Any]] | None = None,
        task_id: str | None = None,
    ) -> dict[str, Any]:
        """See `run_conversation`; cancelling it ends the run at once."""
        result, _ = await self._loop_thread.arun(
            self._converse(user_message, system_message, conversation_history, task_id)
        )
        return result

    def interrupt(self, message: str | None = None) -> None:
        """End the running run now, from any thread; with a message, continue with that instead.

        Does nothing while no run is active.
        """
        if self._running:
            self._control.interrupt(message)

    def steer(self, text: str) -> None:
        """Give the agent a hint without ending its run, from any thread: it reads it next turn."""
        self._control.steer(text)

    def close(self) -> None:
        """End the sandbox and the connections. Idempotent."""
        try:
            if self._link is not None:
                self._loop_thread.run(self._release())
        finally:
            self._loop_thread.close()
            session, self._session = self._session, None
            if session is not None:
                session.close()

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _converse(
        self,
        text: str,
        system: str | None,
        history: Sequence[Mapping[str, Any]] | None,
        task_id: str | None,
    ) -> tuple[dict[str, Any], HermesError | None]:
        """The result of a run, and the error that ended it."""
        if self._running:
            raise UserError("this agent is already running; interrupt it, steer it, or wait")
        if not isinstance(text, str) or not isinstance(system, str | None):
            raise UserError("user_message and system_message must be text")
        self._running = True
        try:
            self._open_session()
            if history is not None:
                own, rest = split_system(conversation_from_openai(history))
                self._history, system = rest, system or own
            self._system = clean(system or self._system)
            task_id = task_id or uuid.uuid4().hex
            return await self._until_done(text, task_id, as_written=history is not None)
        except BaseException:
            self._ended = "error" if self._ended is not None else None
            raise
        finally:
            self._running = False

    async def _until_done(
        self, text: str, task_id: str, *, as_written: bool
    ) -> tuple[dict[str, Any], HermesError | None]:
        """Run; after an interrupt with a message, continue with that."""
        link = await self._open()
        await self._begin_session(link)
        log = EventLog(listener=self._on_event)
        log.events.append(self._begun(link, text, task_id))
        prompt = _prompt(self._history, text, as_written=as_written)
        while True:
            first = len(log.events)
            try:
                ended = await self._run_once(link, log, prompt, task_id)
            except BaseException:  # cancelled, or a bug: what was paid for is kept all the same
                self._remember(log.events[first:], failed=True)
                await asyncio.to_thread(self._save, "error")
                raise
            messages = self._remember(log.events[first:], failed=ended.error is not None)
            control, self._control = self._control, Control()
            for hint in control.take_steers():
                self._control.steer(hint)
            if ended.end_reason != "interrupted" or control.message is None:
                break
            prompt = with_user(self._history, control.message)
        self._ended = ended.end_reason
        await asyncio.to_thread(self._save, ended.end_reason)
        result = {
            "final_response": ended.final_response,
            "messages": [to_openai(m, details=True) for m in messages],
            "completed": ended.end_reason == "answered",
            "end_reason": ended.end_reason,
            "error": None if ended.error is None else error_of(ended.error),
            **accounts_of(log.events, ended),
            "model": link.model,
            "session_id": self.session_id,
            "task_id": task_id,
        }
        if ended.error is not None:
            ended.error.result = result
        return result, ended.error

    def _remember(self, events: Sequence[ev.Event], *, failed: bool) -> list[Message]:
        """Take a run's messages over into the conversation, and return them. Of a failed run only
        where the model took a turn: else the user may send the same message again."""
        added = [event for event in events if isinstance(event, ev.MessageAdded)]
        messages = [event.message for event in added]
        if not failed or any(event.turn and not event.synthetic for event in added):
            self._history = continuable(messages)
        return messages

    async def _run_once(
        self, link: Link, log: EventLog, prompt: list[Message], task_id: str
    ) -> Ended:
        first = len(log.events)
        patience = RetryPolicy(first_answer_s=FIRST_ANSWER_S)
        caller = ModelCaller(link.routes.routes(link.model), log, patience)
        hooked = Hooked(self.hooks, caller, self.session_id, task_id)
        parts = AgentParts(
            caller=hooked,
            model=link.model,
            tools=hooked.tools(self._tools),
            sandbox=self._leased,
            recorder=log,
            policy=self._policy,
            limits=self._limits,
            sampling=link.sampling,
            system=self._system,
            stream=self._on_delta is not None,
            on_delta=self._on_delta,
        )
        try:
            result = await run_agent(parts, prompt, self._control)
        except Interrupted:
            return Ended("interrupted", last_answer(log.events[first:]))
        except HermesError as error:
            if not any(isinstance(event, ev.CallStarted) for event in log.events):
                raise
            return Ended(end_reason_of(error.cause), last_answer(log.events[first:]), error)
        return Ended(result.end_reason, result.final_response)

    async def _open(self) -> Link:
        if self._link is None:
            self._link = await self._opened.enter_async_context(open_link(self.model))
        if self._leased is None and any(t.needs_sandbox for t in self._tools.values()):
            self._leased = await self._opened.enter_async_context(open_sandbox(self.sandbox))
        return self._link

    def _open_session(self) -> None:
        if self._where is None or self._session is not None:
            return
        self._session = open_session(self._where)
        self.session_id = self._session.session_id
        self._history = with_unique_ids(continuable(self._session.load()))

    async def _begin_session(self, link: Link) -> None:
        """Tell the hook of the first run since the agent was made or closed."""
        if self._ended is None:
            self._ended = "error"  # until the run says otherwise
            start = SessionStart(
                session_id=self.session_id, model=link.model, resumed=bool(self._history)
            )
            await call_hook(self.hooks.on_session_start, start)

    def _save(self, end_reason: str) -> None:
        """Keep the conversation. What cannot be kept now is tried again after the next run."""
        if self._session is None:
            return
        try:
            before = self._session.load()
            if before == self._history:
                return
            kept = common_length(before, self._history)
            self._session.append(kept, self._history[kept:], end_reason)
        except Exception:  # also of a session that is not ours: the answer is paid for
            _log.exception("the conversation could not be saved")

    async def _release(self) -> None:
        opened, self._opened = self._opened, AsyncExitStack()
        link, self._link, self._leased = self._link, None, None
        ended, self._ended = self._ended, None
        async with opened:
            if link is None or ended is None:
                return
            end = SessionEnd(
                session_id=self.session_id,
                model=link.model,
                end_reason=ended,
                completed=ended == "answered",
                interrupted=ended == "interrupted",
            )
            await call_hook(self.hooks.on_session_end, end)

    def _begun(self, link: Link, text: str, task_id: str) -> ev.Begun:
        seen = link.routes.seen(link.model)
        return ev.Begun(
            key=ev.AttemptKey(unit_id=task_id, epoch=0, attempt=0),
            started_at=time.time(),
            run_id=self.session_id,
            group_id=task_id,
            member=0,
            repeat=0,
            row_index=0,
            task_id=task_id,
            task_hash="",
            config_hash="",
            seed=0,
            prompt=text,
            model=link.model,
            api_mode=seen.api_mode,
            endpoint=seen.endpoint,
            toolsets=self.toolsets,
            sampling=self._policy.complete(link.sampling).as_dict(),
        )
