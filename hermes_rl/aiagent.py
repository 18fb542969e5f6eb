"""`AIAgent`: the agent as people use it, from scripts, notebooks and async code.

All its work happens on one event loop in a thread of its own, so that connections and sandbox stay
whole over many calls, whoever makes them. `run_agent` is the same agent without all this.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, Unpack

from hermes_rl import events as ev
from hermes_rl.agent import (
    AgentParts,
    Caller,
    Control,
    Delegation,
    Ended,
    Hooks,
    HookTable,
    Limits,
    OnEvent,
    OtherNames,
    Policy,
    Progress,
    RunHooks,
    SavedConversation,
    accounts_of,
    check_kinds,
    compress_context,
    context_files,
    continuable,
    continued_context,
    error_of,
    keep_todos,
    last_answer,
    load_plugins,
    run_agent,
    settle,
    split_system,
    system_prompt,
    typed,
    whole_conversation,
    with_services,
    with_user,
)
from hermes_rl.agent import (
    preset as policy_of,
)
from hermes_rl.aio import LoopThread, run_sync, to_end
from hermes_rl.errors import HermesError, Interrupted, SandboxError, UserError
from hermes_rl.events import EventLog
from hermes_rl.identity import digest, unit_id
from hermes_rl.messages import (
    Message,
    UserMessage,
    conversation_from_openai,
    text_of,
    to_openai,
    with_unique_ids,
)
from hermes_rl.models.calls import ModelCaller, RetryPolicy
from hermes_rl.places import Place, Places, Servers
from hermes_rl.ports import Recorder
from hermes_rl.sessions import Session, SessionStore
from hermes_rl.store import append_attempts
from hermes_rl.telemetry import open_telemetry
from hermes_rl.text import clean
from hermes_rl.tools import DELEGATE_TASK, Tool, default_approval
from hermes_rl.wiring import Link, auxiliary_model, context_parts, open_link

FIRST_ANSWER_S = 5.0
"""Somebody waits: an endpoint that fails from the start is told soon."""
_IDENTITY = {"agent": {"name": "AIAgent"}}
"""Of run directories with the rows of agents."""

_log = logging.getLogger(__name__)


class AIAgent:
    """An agent with tools in a sandbox. Keeps its conversation and its sandboxes until `close`.

    Args:
        model: a model's name, or a `ModelConfig`.
        toolsets: names of toolsets; empty for none, None for `terminal` and `file`.
        tools: functions of yours (see `hermes_rl.tools.function_tool`), or `Tool`s.
        sandbox: where tools work; None is the default backend with an empty workspace.
        preset: `interactive`, `datagen` or `rl`; or a policy of your own,
            `preset("interactive").switched({"nudge_empty": False})`.
        limits: bounds of each run; None is 90 turns.
        system: system prompt in place of the preset's.
        fallbacks: models that are called when the model cannot answer, as in `ModelConfig`. Each
            run begins with the first model again.
        on_event: called with each event of `hermes_rl.events` as it happens, on the agent's loop.
        on_delta: called with each piece of text as it is streamed; without it nothing is streamed.
        session: where the conversation is kept between agents: a name in the default store, the
            path of a `.jsonl` file, a `SessionStore` (which gets a new session), a session of one,
            or an object with `session_id`, `load`, `append` and `close`.
        context: how a full context is compressed: a `ContextConfig`, its fields, or an engine.
        hooks: functions that are called at named moments of a run; see `Hooks`.
        plugins: names or paths of plugins, whose hooks are called before those of `hooks`.
        mcp: MCP servers by name, as in the section `mcp` of a run; asked for their tools at the
            first message.
        otel: `spans` makes OpenTelemetry spans of each run, `content` with texts in them.
        allow_unsandboxed: needed for the sandbox `none`, which runs commands as you.
        names: further keywords, as hermes-agent names them; see `OtherNames`.

    Raises: UserError for an unknown toolset, preset or keyword, keywords that contradict each
        other, a session that cannot be used, or the sandbox `none` that was not allowed.
    """

    def __init__(
        self,
        model: object,
        *,
        toolsets: Sequence[str] | None = None,
        tools: Sequence[Callable[..., Any] | Tool] = (),
        sandbox: object = None,
        preset: str | Policy = "interactive",
        limits: Limits | None = None,
        system: str | None = None,
        fallbacks: Any = None,
        on_event: OnEvent | None = None,
        on_delta: Callable[[str], None] | None = None,
        session: str | Path | SessionStore | Session | None = None,
        hooks: Hooks | None = None,
        context: object = None,
        plugins: Sequence[str | Path] = (),
        mcp: Mapping[str, Any] | None = None,
        otel: str | None = None,
        allow_unsandboxed: bool = False,
        **names: Unpack[OtherNames],
    ) -> None:
        check_kinds({**locals(), **names})
        sandboxed = getattr(sandbox, "name", sandbox) != "none"
        if not sandboxed and not allow_unsandboxed:
            raise UserError(
                "sandbox 'none' runs the model's commands as you, on this machine. "
                "Use the default sandbox, or pass allow_unsandboxed=True"
            )
        self._policy = policy = policy_of(preset)
        self._settings = settings = settle(
            model,
            names,
            policy=policy,
            toolsets=toolsets,
            tools=tools,
            limits=limits,
            fallbacks=fallbacks,
            session=session,
            approval=default_approval(sandboxed, sandbox),
            context=context,
        )
        self.model, self.sandbox, self.toolsets = settings.model, sandbox, settings.toolsets
        self.session_id = settings.session_id or uuid.uuid4().hex
        self._table = HookTable.of(hooks, load_plugins(plugins)) if hooks or plugins else None
        if policy.name == "rl" and getattr(settings.model, "fallbacks", None):
            raise UserError(
                "fallbacks would mix two policies in one conversation. Take them out, or use "
                "another preset than rl"
            )
        preset_text = system_prompt(policy.name, settings.tools, policy.wording)
        text, services = clean(system or preset_text), settings.services
        self._system = with_services(text, services, {}, settings.tools) or text
        self._on_event, self._on_delta = on_event, on_delta
        self._loop_thread = LoopThread("hermes-rl-agent")
        self._history: list[Message] = []
        """The conversation as the model sees it next."""
        self._was_read = False
        """It came from outside, and its todo list is in no place yet."""
        self._whole: list[Message] | None = None
        """All of it, once a part was compressed."""
        self._control = Control()
        self._running = False
        self._link: Link | None = None
        self._opened = AsyncExitStack()
        self._places = Places(sandbox)
        self._servers = Servers(mcp or {})
        self._task_id = uuid.uuid4().hex
        self._rows: list[list[ev.Event]] = []
        """Events of the runs of the last message."""
        self._runs = 0
        self._keeps_system = system is None
        """A session's own system prompt is used again."""
        self._telemetry = open_telemetry(otel) if otel is not None else None
        self._joins_files = policy.context_files and system is None
        self._saved = None if session is None else SavedConversation(session)
        self._ended: str | None = None
        """How the last run ended; None before the first."""
        self._open_session()

    def chat(self, message: str, task_id: str | None = None) -> str:
        """Say something and get the answer; the conversation continues from call to call.

        Args:
            task_id: see `run_conversation`.

        Raises: as `run_conversation`; also the error that ended the run after its first request,
            whose `result` is what `run_conversation` would have returned.
        """
        result = self._loop_thread.run(
            self._converse(message, None, None, task_id, raise_on_error=True)
        )
        return str(result["final_response"] or "")

    def run_conversation(
        self,
        user_message: str | Sequence[Mapping[str, Any]],
        system_message: str | None = None,
        conversation_history: Sequence[Mapping[str, Any]] | None = None,
        task_id: str | None = None,
        *,
        raise_on_error: bool = False,
    ) -> dict[str, Any]:
        """Run until the agent ends; works in plain scripts and where a loop is already running.

        Args:
            user_message: text, or a list of OpenAI content parts (text and images).
            system_message: replaces the system prompt from here on.
            conversation_history: OpenAI messages to continue from instead of the agent's own; `[]`
                starts a new one. What servers would refuse in it is repaired in requests.
            task_id: names a sandbox and a state of tools of its own, kept until `end_task` or
                `close`; None is the agent's own.
            raise_on_error: raise the error that ended the run after its first request; its `result`
                is what would have been returned.

        Returns: final_response, messages, completed, end_reason, error, usage, calls, cost_usd,
            model, session_id, task_id. An error after the first request is an ending too: `error`
            then has its class, reason, cause and message, and the conversation keeps the turns
            that the model took. The saved row also has the messages of the harness.

        Raises: UserError, SandboxError and the like before the first request.
        """
        return self._loop_thread.run(
            self._converse(
                user_message,
                system_message,
                conversation_history,
                task_id,
                raise_on_error=raise_on_error,
            )
        )

    async def run(
        self,
        user_message: str | Sequence[Mapping[str, Any]],
        system_message: str | None = None,
        conversation_history: Sequence[Mapping[str, Any]] | None = None,
        task_id: str | None = None,
        *,
        raise_on_error: bool = False,
    ) -> dict[str, Any]:
        """See `run_conversation`; cancelling it ends the run at once."""
        return await self._loop_thread.arun(
            self._converse(
                user_message,
                system_message,
                conversation_history,
                task_id,
                raise_on_error=raise_on_error,
            )
        )

    def save_trajectory(self, path: str | Path) -> None:
        """Add the row of the last run to a run directory, which `load_run` reads.

        A message whose run was interrupted with another one has a row for each run. Failed and
        interrupted runs are in `failures`. A row that the directory has already is not added again.

        Args:
            path: the run directory; made when it is absent.

        Raises: UserError when nothing was run or the place cannot be used; StoreError; DiskFull.
        """
        if not self._rows:
            raise UserError("there is no run to save yet. Call chat or run_conversation before")
        run_sync(append_attempts(path, _IDENTITY, list(self._rows)))

    def end_task(self, task_id: str) -> None:
        """End the sandbox of a task id and forget the state of its tools. Raises: UserError while a
        run is active."""
        self._refuse_running()
        self._loop_thread.run(self._places.end(task_id))

    def use_model(self, model: object) -> None:
        """Continue the conversation, in its sandbox, with another model.

        Args:
            model: a name, or a `ModelConfig`. Fallbacks of the present model no longer apply.

        Raises: UserError while a run is active.
        """
        self._refuse_running()
        self._loop_thread.run(self._disconnect())
        self.model = model
        self._settings = replace(self._settings, model=model, keys={})

    def compress(self) -> dict[str, Any] | None:
        """Compress the context now, whatever its size; the session keeps the whole conversation.

        Returns: usage, calls and cost_usd of the summary; None when nothing can be left out.
        Raises: UserError while a run is active, before the first message, and with the preset rl.
        """
        self._refuse_running()
        return self._loop_thread.run(self._compress())

    def undo(self) -> str | list[dict[str, Any]] | None:
        """Take back the last user message and all that followed; files stay as they are.

        Returns: its content; None when there is none, or a compression put it into a summary.

        Raises: UserError while a run is active.
        """
        self._refuse_running()
        self._open_session()
        places = [n for n, m in enumerate(self._history) if isinstance(m, UserMessage)]
        if not places or (self._whole is not None and len(places) == 1):
            return None
        message = self._history[places[-1]]
        removed = len(self._history) - places[-1]
        self._history = self._history[: places[-1]]
        if self._whole is not None:
            self._whole = self._whole[: len(self._whole) - removed]
        self._was_read = True  # its todo list is that of the messages that are left
        self._loop_thread.run(self._save(self._history, "answered"))
        return message.content if isinstance(message, UserMessage) else None

    def _refuse_running(self) -> None:
        if self._running:
            raise UserError("this agent is running; interrupt it, or wait")

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
            if self._saved is not None:
                self._saved.close()
            if self._telemetry is not None:
                self._telemetry.close()

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
        text: str | Sequence[Mapping[str, Any]],
        system: str | None,
        history: Sequence[Mapping[str, Any]] | None,
        task_id: str | None,
        *,
        raise_on_error: bool,
    ) -> dict[str, Any]:
        if self._running:
            raise UserError("this agent is already running; interrupt it, steer it, or wait")
        if not isinstance(text, str | list) or not isinstance(system, str | None):
            raise UserError("user_message must be text or content parts, system_message text")
        self._running = True
        try:
            self._open_session()
            reset = history is not None and bool(self._history)
            if history is not None:
                own, rest = split_system(conversation_from_openai(history))
                self._history, self._whole, system = rest, None, system or own
                self._was_read = True
            if system:
                self._system, self._joins_files = clean(system), False
            prompt = with_user(self._history, text, joined=history is None)
            result, error = await self._until_done(prompt, task_id or self._task_id, reset=reset)
        except BaseException:
            self._ended = "error" if self._ended is not None else None
            raise
        finally:
            self._running = False
        if error is not None and raise_on_error:
            raise error
        return result

    async def _until_done(
        self, prompt: list[Message], task_id: str, *, reset: bool
    ) -> tuple[dict[str, Any], HermesError | None]:
        """Run; after an interrupt with a message, continue with that.

        Args:
            reset: another conversation takes the place of the agent's.
        """
        link = await self._connect()
        if more := await self._servers.take_tools(self._places.lease):
            self._settings = replace(self._settings, tools={**self._settings.tools, **more})
        sandboxed = any(tool.needs_sandbox for tool in self._settings.tools.values())
        place, seconds = await self._places.of(task_id, sandboxed=sandboxed)
        keep_todos(place.tool_state, self._settings.tools, prompt if self._was_read else None)
        self._was_read = False
        await self._join_files(place)
        await self._begin_session(link, reset=reset)
        self._rows = []
        while True:
            log = self._begin_run(link, place, text_of(prompt[-1]), task_id, seconds)
            ended, messages = await self._run_once(link, place, log, prompt, task_id)
            control, self._control = self._control, Control()
            for hint in control.take_steers():
                self._control.steer(hint)
            if ended.end_reason != "interrupted" or control.message is None:
                break
            prompt, seconds = with_user(self._history, control.message), 0.0
        response = ended.final_response
        if response is not None and (hooks := self._hooks_of(link, task_id)) is not None:
            response = await hooks.output(response)
        result = {
            "final_response": response,
            "messages": [to_openai(m, details=True) for m in messages],
            "completed": ended.end_reason == "answered",
            "end_reason": ended.end_reason,
            "error": None if ended.error is None else error_of(ended.error),
            **accounts_of([event for run in self._rows for event in run]),
            "model": link.model,
            "session_id": self.session_id,
            "task_id": task_id,
        }
        if ended.error is not None:
            ended.error.result = result
        return result, ended.error

    async def _connect(self) -> Link:
        if self._link is None:
            known = self._settings
            opened = open_link(self.model, known.keys, known.others, ask_windows=known.asks_window)
            self._link = await self._opened.enter_async_context(opened)
        return self._link

    async def _disconnect(self) -> None:
        opened, self._opened, self._link = self._opened, AsyncExitStack(), None
        await opened.aclose()

    async def _compress(self) -> dict[str, Any] | None:
        self._open_session()
        if self._settings.context is None or not self._history:
            raise UserError("there is no context to compress: say something first")
        self._running = True
        try:
            link = await self._connect()
            place, _ = await self._places.of(self._task_id, sandboxed=False)
            log = self._begin_run(link, place, "", self._task_id, 0.0)
            parts = self._parts(link, place, log, self._history, None)
            if not await compress_context(parts, self._history):
                return None
            await self._finalise(log, Ended("answered", None), self._task_id, None, failed=False)
            return accounts_of(self._rows.pop())
        finally:
            self._running = False

    async def _run_once(
        self, link: Link, place: Place, log: EventLog, prompt: list[Message], task_id: str
    ) -> tuple[Ended, list[Message]]:
        """Run the agent on a prompt. However it ends, what was paid for is kept.

        Raises: HermesError before the first request; cancellation.
        """
        hooks = self._hooks_of(link, task_id)
        try:
            parts = self._parts(link, place, log, prompt, hooks)
            result = await run_agent(parts, prompt, self._control)
            ended = Ended(result.end_reason, result.final_response, metrics=result.metrics)
        except Interrupted as stop:
            ended = Ended("interrupted", last_answer(log.events), metrics=stop.metrics)
        except Exception as error:
            if not any(isinstance(event, ev.CallStarted) for event in log.events):
                raise
            ended = Ended.by(typed(error), last_answer(log.events))
        except BaseException:  # cancelled
            cut = Ended("interrupted", last_answer(log.events))
            await to_end(self._finalise(log, cut, task_id, hooks, failed=True))
            raise
        failed = ended.error is not None
        return ended, await self._finalise(log, ended, task_id, hooks, failed=failed)

    async def _finalise(
        self, log: EventLog, ended: Ended, task_id: str, hooks: RunHooks | None, *, failed: bool
    ) -> list[Message]:
        """Keep the conversation and the row, and end a sandbox that is lost; the messages."""
        if hooks is not None:
            await hooks.end("error" if failed else ended.end_reason)
            ended = replace(ended, metrics={**ended.metrics, **hooks.metrics})
        self._rows.append([*log.events, ended.event])
        if self._telemetry is not None:
            self._telemetry.export(self._rows[-1])
        added = [event for event in log.events if isinstance(event, ev.MessageAdded)]
        messages = whole_conversation(added, self._whole)
        # Of a failed run only where the model took a turn: the user may send the message again.
        if not failed or any(event.turn and not event.synthetic for event in added):
            self._history = continuable(continued_context(log.events))
            if self._whole is not None or any(event.compressed for event in added):
                self._whole = messages
        self._ended = "error" if failed else ended.end_reason
        try:
            await self._save(self._history, self._ended)
            if self._settings.save_to is not None:
                await append_attempts(self._settings.save_to, _IDENTITY, self._rows[-1:])
            if isinstance(ended.error, SandboxError) or ended.end_reason == "sandbox_killed":
                _log.warning("the sandbox is lost; the next message gets a new one")
                await self._places.end(task_id)
        except Exception:  # the answer is paid for, and is returned whatever fails here
            _log.exception("the end of the run could not be recorded")
        return messages

    def _parts(
        self,
        link: Link,
        place: Place,
        log: EventLog,
        prompt: list[Message],
        hooks: RunHooks | None,
    ) -> AgentParts:
        settings, caller = self._settings, partial(self._caller, link, hooks)
        delegation = Delegation(log, caller, self._places.lease)
        streams = settings.callbacks is not None and settings.callbacks.streams
        beside = {
            use: auxiliary_model(named, self._caller(link, hooks, log, use))
            for use, named in settings.others.items()
        }
        return AgentParts(
            caller=caller(log),
            model=link.model,
            tools=settings.tools,
            sandbox=place.sandbox,
            recorder=log,
            policy=self._policy,
            limits=settings.limits,
            sampling=link.sampling,
            system=self._system,
            ephemeral=settings.ephemeral,
            prefill=tuple(with_unique_ids([*prompt, *settings.prefill])[len(prompt) :]),
            stream=self._on_delta is not None or streams,
            on_delta=self._deltas,
            on_reasoning=settings.callbacks.on_reasoning if settings.callbacks else None,
            tool_state=place.tool_state,
            services=settings.services,
            opened=place.opened,
            budget=settings.budget,
            approval=settings.approval,
            hooks=hooks,
            delegation=delegation if DELEGATE_TASK in settings.tools else None,
            after_turn=None if self._saved is None else partial(self._after_turn, log),
            context=context_parts(settings.context, beside.get("summary")),
            vision=beside.get("vision"),
            images=getattr(self.model, "images", False),
        )

    def _caller(
        self, link: Link, hooks: RunHooks | None, recorder: Recorder, use: str = ""
    ) -> Caller:
        routes = link.others[use].routes(use) if use else link.routes.routes(link.model)
        made = ModelCaller(routes, recorder, RetryPolicy(first_answer_s=FIRST_ANSWER_S))
        return made if hooks is None else hooks.caller(made)

    def _deltas(self, text: str) -> None:
        if self._on_delta is not None:
            self._on_delta(text)
        if self._settings.callbacks is not None:
            self._settings.callbacks.on_delta(text)

    def _listen(self, event: ev.Event) -> None:
        if self._saved is not None:
            self._saved.note(event)
        if self._on_event is not None:
            self._on_event(event)
        if self._settings.callbacks is not None:
            self._settings.callbacks(event)

    def _open_session(self) -> None:
        stored = None if self._saved is None else self._saved.open()
        if self._saved is None or stored is None:
            return
        self.session_id = self._saved.session_id
        self._history = with_unique_ids(continuable(stored))
        self._was_read = True
        if self._keeps_system and (system := self._saved.system_prompt) is not None:
            self._system, self._joins_files = system, False

    async def _join_files(self, place: Place) -> None:
        """Join the project's instructions to the system prompt, once: it stays the same then."""
        if self._joins_files and place.sandbox is not None:
            self._joins_files = False
            found = await context_files(place.sandbox)
            self._system = f"{self._system}\n\n{found}" if found else self._system

    def _hooks_of(self, link: Link, task_id: str) -> RunHooks | None:
        """The hooks of one message, or of none in particular."""
        if self._table is None:
            return None
        about = {"session_id": self.session_id, "model": link.model, "platform": "agent"}
        turn_id = f"{self._task_id}-{self._runs}"
        return RunHooks(self._table, {**about, "task_id": task_id, "turn_id": turn_id})

    async def _begin_session(self, link: Link, *, reset: bool) -> None:
        """Call the hook of the first run since the agent was made or closed, or of a conversation
        that another one replaces."""
        begun, self._ended = self._ended is not None, self._ended or "error"
        if (hooks := self._hooks_of(link, self._task_id)) is not None and (reset or not begun):
            if begun:
                await hooks.observe("on_session_reset")
            else:
                await hooks.observe("on_session_start", resumed=bool(self._history))

    async def _save(self, messages: list[Message], end_reason: str) -> None:
        if self._saved is None:
            return
        model = self._link.model if self._link is not None else ""
        await asyncio.to_thread(self._saved.save, messages, self._system, model, end_reason)
        self.session_id = self._saved.session_id

    async def _after_turn(self, log: EventLog, progress: Progress) -> None:
        """Keep the conversation as far as it is: a kill loses the running turn alone."""
        await self._save(continuable(continued_context(log.events)), "running")

    async def _release(self) -> None:
        opened, self._opened = self._opened, AsyncExitStack()
        link, self._link = self._link, None
        ended, self._ended = self._ended, None
        opened.push_async_callback(self._servers.shared.aclose)
        opened.push_async_callback(self._places.aclose)
        async with opened:
            if link is None or ended is None:
                return
            if (hooks := self._hooks_of(link, self._task_id)) is not None:
                await hooks.observe("on_session_finalize")

    def _begin_run(
        self, link: Link, place: Place, text: str, task_id: str, seconds: float
    ) -> EventLog:
        """The log of the next run, with what is known before its first message."""
        seen = link.routes.seen(link.model)
        self._runs += 1
        # Not of the session: another agent may continue that, and would give the same ids.
        unit = unit_id(self._task_id, digest(task_id), self._runs, 0)
        ephemeral = self._settings.ephemeral
        begun = ev.Begun(
            key=ev.AttemptKey(unit_id=unit, epoch=0, attempt=0),
            started_at=time.time(),
            run_id=self.session_id,
            group_id=unit,
            member=0,
            repeat=0,
            row_index=self._runs - 1,
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
            metadata={"session_id": self.session_id},
            prompt_sha256=None if ephemeral is None else sha256(ephemeral.encode()).hexdigest(),
        )
        log = EventLog(listener=self._listen)
        log.record(begun)
        if (leased := place.leased(seconds)) is not None:
            log.record(leased)
        return log
