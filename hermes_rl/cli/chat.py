"""The conversation of `hermes-rl chat`: turns of the agent, and the commands of the user.

The agent works in a thread. All that it reports goes through one queue to the main thread, which
alone writes to the terminal and asks questions while a message is being answered.
"""

from __future__ import annotations

import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from hermes_rl import events as ev
from hermes_rl.aiagent import AIAgent
from hermes_rl.cli import render
from hermes_rl.cli.chat_input import Reader, with_images
from hermes_rl.cli.chat_screen import Screen, quiet_terminal
from hermes_rl.config import ModelConfig
from hermes_rl.errors import ExitCode, HermesError, UserError
from hermes_rl.input_errors import did_you_mean
from hermes_rl.messages import AssistantMessage, ToolCall, ToolMessage, parse_arguments, text_of
from hermes_rl.sessions import SessionInfo, SessionStore, default_store_path
from hermes_rl.text import many
from hermes_rl.tools import SKILLS, Approval, ApprovalRequest, Mode, open_skills, resolve

_TICK_S = 0.5
_ASK_S = 86_400.0
"""How long a question waits for its answer."""
_CLOSE_S = 10.0
"""How long leaving waits for the running turn to be saved."""
_LISTED = 10
_COMMAND = re.compile(r"/[a-z?]*(?=\s|$)")
_ENDINGS = {"answered": "", "interrupted": "interrupted", "max_turns": "the turn limit is reached"}


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What every agent of a chat is made with."""

    model: ModelConfig
    toolsets: tuple[str, ...]
    sandbox: Callable[[], Any]
    """Makes a backend."""
    approval: Mode
    place: str
    """Where its tools work, for people."""
    disposable: bool
    """Commands reach an empty sandbox alone."""


@dataclass
class Totals:
    """Usage of all calls of this chat, those of background tasks included."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    unpriced: int = 0
    unknown: int = 0
    """Calls whose usage is not known."""
    context: int = 0
    """Tokens of the last prompt."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, event: ev.Event) -> None:
        """Take an event of an agent."""
        if not isinstance(event, ev.CallEnded):
            return
        with self._lock:  # background tasks count too
            self.calls += 1
            usage = event.usage
            self.unknown += usage is None
            self.input_tokens += (usage and usage.input_tokens) or 0
            self.output_tokens += (usage and usage.output_tokens) or 0
            self.context = (usage and usage.input_tokens) or self.context
            self.unpriced += event.cost_usd is None
            self.cost_usd += event.cost_usd or 0.0

    def cost(self) -> str:
        """The cost, or that it is unknown."""
        if not self.cost_usd:
            return "cost unknown" if self.unpriced else "$0"
        return f"${self.cost_usd:.4f}{' and more' if self.unpriced else ''}"


class _Piece(NamedTuple):
    text: str
    reasoning: bool


class _Question(NamedTuple):
    request: ApprovalRequest
    answer: Future[bool]
    unanswered: bool = False


class _Clarification(NamedTuple):
    question: str
    choices: list[str]
    answer: Future[str | None]
    unanswered: None = None


@dataclass
class _Turn:
    """What is known of the message that is being answered."""

    began: float = field(default_factory=time.monotonic)
    calls: dict[str, ToolCall] = field(default_factory=dict)
    streamed: bool = False
    interrupted: bool = False


class Leave(Exception):
    """The user leaves."""

    def __init__(self, code: int = ExitCode.DONE) -> None:
        self.code = code


class Chat:
    """A chat in one terminal.

    Args:
        options: of its agents.
        store: keeps the sessions; closed by whoever opened it.
        resume: id of the session that it continues; None begins a new one.
        screen: where it writes.
    """

    def __init__(
        self,
        options: AgentOptions,
        store: SessionStore,
        screen: Screen,
        resume: str | None = None,
    ) -> None:
        self.options, self.store, self.screen = options, store, screen
        self.totals = Totals()
        self.reader: Reader | None = None
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._allowed: set[str] = set()
        """Patterns of commands that the user allowed for the rest of the chat."""
        self._tasks: dict[int, tuple[AIAgent, threading.Thread]] = {}
        self._presses = 0
        """Of Ctrl-C in a row."""
        self._draft = ""
        self.agent = self._open(resume)

    # Agents

    def _open(self, resume: str | None) -> AIAgent:
        session = self.store.open() if resume is None else self.store.resume(resume)
        approval = Approval(
            self.options.approval,
            self._ask,
            timeout_s=_ASK_S,
            disposable=self.options.disposable,
        )
        return self._agent(
            session,
            approval,
            on_event=self._events.put,
            clarify_callback=self._clarify,
            on_delta=lambda text: self._events.put(_Piece(text, reasoning=False)),
            reasoning_callback=lambda text: self._events.put(_Piece(text, reasoning=True)),
        )

    def _agent(self, session: Any, approval: Approval, **more: Any) -> AIAgent:
        try:
            return AIAgent(
                self.options.model,
                toolsets=self.options.toolsets,
                sandbox=self.options.sandbox(),
                session=session,
                approval=approval,
                allow_unsandboxed=True,  # the user named it in --sandbox
                **more,
            )
        except BaseException:
            session.close()
            raise

    def _switch(self, resume: str | None) -> None:
        """Continue with another session."""
        agent = self._open(resume)
        self._close_agent()
        self.agent = agent

    def _close_agent(self) -> None:
        """Close the agent; a session without messages is not kept."""
        session_id = self.agent.session_id
        self.agent.close()
        info = self.store.find(session_id)
        if not info.messages and not info.parent_id:
            self.store.prune(wanted=[session_id])

    def close(self) -> None:
        """End all work and keep what is paid for. Idempotent."""
        worker, self._worker = self._worker, None
        until = time.monotonic() + _CLOSE_S
        threads = [worker] if worker is not None else []
        for agent, thread in self._tasks.values():
            agent.interrupt()
            threads.append(thread)
        for thread in threads:
            while thread.is_alive() and time.monotonic() < until:
                self.agent.interrupt()
                self._refuse_questions()
                thread.join(_TICK_S)
        self._close_agent()

    def _refuse_questions(self) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, _Question | _Clarification):
                event.answer.set_result(event.unanswered)  # type: ignore[arg-type]

    # The loop

    def run(self, reader: Reader) -> int:
        """Read and answer messages until the user leaves; returns the exit code."""
        self.reader = reader
        with quiet_terminal():
            try:
                while True:
                    self._next(reader)
            except EOFError:
                return ExitCode.DONE
            except Leave as leave:
                return leave.code

    def _next(self, reader: Reader) -> None:
        """Read and answer one message. Raises: EOFError, Leave."""
        try:
            draft, self._draft = self._draft, ""
            text = reader.message(draft)
        except KeyboardInterrupt:
            self._press()
            return
        self._presses = 0
        self._take(text)

    def _press(self) -> None:
        """Take a Ctrl-C. Raises: Leave at the second in a row."""
        self._presses += 1
        if self._presses > 1:
            raise Leave(ExitCode.INTERRUPTED)
        self.screen.line("Ctrl-C again, or Ctrl-D, leaves", "dim")

    def _take(self, text: str) -> None:
        """Run a command, or send a message. A mistake is reported and ends nothing."""
        if not text.strip():
            return
        try:
            if found := _COMMAND.match(text):
                self._command(found[0][1:], text[found.end() :].strip())
            else:
                self.say(text)
        except HermesError as error:
            self.screen.line(f"error: {error}", "red")

    def _command(self, name: str, rest: str) -> None:
        known = COMMANDS.get(name)
        if known is None:
            instead = did_you_mean(f"/{name}", [f"/{one}" for one in COMMANDS])
            raise UserError(f"no command /{name}{instead or '. /help lists them'}")
        if rest and not known.argument:
            raise UserError(f"/{name} takes no argument")
        known.run(self, rest)

    # A turn

    def say(self, text: str, images: tuple[Path, ...] = ()) -> Any:
        """Send a message, show what happens, and return the result of `run_conversation`; None
        after an error."""
        try:
            content = with_images(text, images)
        except UserError:
            self._draft = text
            raise
        result = self._answer(lambda: self.agent.run_conversation(content))
        if result is None:
            self._draft = text  # nothing was sent: it can be sent again
        return result

    def _answer(self, work: Callable[[], Any]) -> Any:
        """Do an agent's work in a thread and show what happens. Raises: Leave."""
        turn, done = _Turn(), Future[Any]()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # a boundary: the main thread reports it
                done.set_exception(error)
            self._events.put(done)

        before = signal.signal(signal.SIGINT, lambda *_: self._events.put("interrupt"))
        self._worker = threading.Thread(target=run, name="hermes-rl-chat")
        try:
            self._worker.start()
            self._show(turn, done)
        finally:
            signal.signal(signal.SIGINT, before)
        self._worker = None
        self.screen.end_line()
        try:
            result = done.result()
        except HermesError as error:
            self.screen.line(f"error: {error}", "red")
            return None
        self._report(result, turn)
        return result

    def _show(self, turn: _Turn, done: Future[Any]) -> None:
        """Show events until the work is done. Raises: Leave."""
        while True:
            try:
                event = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                if turn.interrupted:
                    self.agent.interrupt()  # the first one may have come before the run
                self.screen.status(self._waiting(turn))
                continue
            match event:
                case Future():
                    if event is done:
                        return
                case "interrupt":
                    self._interrupt(turn)
                case _Question() | _Clarification():
                    self._put(event, turn)
                case _Piece():
                    turn.streamed = turn.streamed or not event.reasoning
                    self.screen.stream(event.text, "dim italic" if event.reasoning else "")
                case str():
                    self.screen.line(event, "dim")
                case _:
                    self._event(event, turn)

    def _interrupt(self, turn: _Turn) -> None:
        self._presses += 1
        if self._presses > 1:
            raise Leave(ExitCode.INTERRUPTED)
        turn.interrupted = True
        self.agent.interrupt()
        self.screen.line("interrupting; Ctrl-C again leaves", "dim")

    def _waiting(self, turn: _Turn) -> str:
        what = " | ".join(map(_call_text, turn.calls.values())) or "waiting for the model"
        return f"{render.seconds(time.monotonic() - turn.began)} {what}"

    def _event(self, event: ev.Event, turn: _Turn) -> None:
        self.totals.count(event)
        match event:
            case ev.CallStarted():
                turn.streamed = False
                self.screen.end_line()
            case ev.CallEnded() if event.outcome not in ("ok", "cancelled"):
                self.screen.line(f"the call failed: {event.error or event.outcome}", "dim")
            case ev.AnswerDiscarded():
                self.screen.line(f"requested again: {event.why}", "dim")
            case ev.ContextStarted() if event.start:
                self.screen.line(f"the context was compressed ({event.reason})", "dim")
            case ev.SubagentStarted():
                self.screen.clipped(f"sub-agent {event.agent}: {event.prompt}", "dim")
            case ev.MessageAdded(message=AssistantMessage() as answer) if event.turn:
                if answer.content and not turn.streamed and not event.synthetic:
                    self.screen.stream(answer.content)
                turn.calls |= {call.id: call for call in answer.tool_calls}
            case ev.MessageAdded(message=ToolMessage() as result) if event.turn:
                if call := turn.calls.pop(result.tool_call_id, None):
                    content, ok = result.content, event.tool_ok
                    self.screen.tool(_call_text(call), content, ok, event.seconds)

    def _report(self, result: Any, turn: _Turn) -> None:
        """Say how a run ended, and what it took."""
        if not isinstance(result, dict) or "end_reason" not in result:
            return
        if result["error"]:
            error = result["error"]
            self.screen.line(f"error: {error['class']}: {error['message']}", "red")
            self.screen.line("the turns so far are kept: say something to continue", "dim")
        elif note := _ENDINGS.get(result["end_reason"], result["end_reason"]):
            self.screen.line(note, "yellow")
        self.screen.clipped(self._accounts(result, turn), "dim")

    def _accounts(self, result: dict[str, Any], turn: _Turn) -> str:
        usage, dot = result["usage"] or {}, f" {self.screen.dot} "
        parts = [render.seconds(time.monotonic() - turn.began)]
        parts.append(f"{render.number(usage.get('input_tokens'))} in")
        parts.append(f"{render.number(usage.get('output_tokens'))} out")
        if result["cost_usd"] is not None:
            parts.append(f"${result['cost_usd']:.4f}")
        return dot.join(parts)

    # Questions

    def _ask(self, request: ApprovalRequest) -> bool:
        """Called on a thread of the agent."""
        if request.pattern in self._allowed:
            return True
        question = _Question(request, Future())
        self._events.put(question)
        return question.answer.result()

    def _put(self, query: _Question | _Clarification, turn: _Turn) -> None:
        if isinstance(query, _Question):
            self._decide(query, turn)
        else:
            self._clarified(query, turn)

    def _decide(self, question: _Question, turn: _Turn) -> None:
        """Ask the user about a dangerous command; anything but consent denies it."""
        request, allowed = question.request, question.request.pattern in self._allowed
        try:
            if not allowed and self.reader is not None and not turn.interrupted:
                self.screen.line(f"{request.tool} wants to run:", "yellow")
                self.screen.line(f"  {request.command}", "bold")
                self.screen.line(f"{request.reason} ({request.pattern})", "yellow")
                answer = self.reader.answer("Run it? [y]es, [a]lways here, [N]o: ").strip().lower()
                if answer in ("a", "always"):
                    self._allowed.add(request.pattern)
                allowed = answer in ("y", "yes", "a", "always")
        except KeyboardInterrupt:
            self._interrupt(turn)
        except EOFError:
            pass
        finally:
            question.answer.set_result(allowed)

    def _clarify(self, question: str, choices: list[str]) -> str | None:
        """Called on a thread of the agent, by the tool `clarify`."""
        query = _Clarification(question, choices, Future())
        self._events.put(query)
        return query.answer.result()

    def _clarified(self, query: _Clarification, turn: _Turn) -> None:
        """Ask the user a question of the model; a number chooses."""
        answer = None
        try:
            if self.reader is not None and not turn.interrupted:
                self.screen.line(query.question, "yellow")
                for number, choice in enumerate(query.choices, 1):
                    self.screen.line(f"  {number}  {choice}")
                answer = self.reader.answer("Answer: ").strip()
                if answer.isascii() and answer.isdigit() and 0 < int(answer) <= len(query.choices):
                    answer = query.choices[int(answer) - 1]
        except KeyboardInterrupt:
            self._interrupt(turn)
        except EOFError:
            pass
        finally:
            query.answer.set_result(answer)

    # Commands

    def help(self, _: str) -> None:
        width = max(len(f"{name} {one.argument}") for name, one in COMMANDS.items())
        for name, one in COMMANDS.items():
            self.screen.line(f"/{f'{name} {one.argument}'.ljust(width)}  {one.help}")
        self.screen.line("Enter sends; Alt-Enter, Ctrl-J or \\ Enter begins another line.", "dim")
        self.screen.line("Ctrl-C interrupts a turn, twice leaves. @PATH attaches an image.", "dim")

    def model(self, name: str) -> None:
        if name:
            first, _, base_url = name.partition(" ")
            update = {"name": first} | ({"base_url": base_url.strip()} if base_url else {})
            before = self.options.model
            fields = {k: getattr(before, k) for k in before.model_fields_set} | update
            model = make_model(fields)
            self.agent.use_model(model)
            self.options = replace(self.options, model=model)
        self.screen.line(f"model {self.options.model.name}")

    def tools(self, _: str) -> None:
        for tool in resolve(self.options.toolsets).values():
            self.screen.clipped(f"{tool.name:<16} {tool.description.strip().splitlines()[0]}")
        self.screen.line(f"toolsets: {', '.join(self.options.toolsets)}", "dim")

    def skills(self, _: str) -> None:
        for skill in open_skills((), default_store_path().parent / SKILLS).listed({}):
            self.screen.clipped(f"{skill.name:<20} {skill.description}")
        if SKILLS not in self.options.toolsets:
            self.screen.line("the model sees them with --toolsets terminal,file,skills", "dim")

    def usage(self, _: str) -> None:
        totals = self.totals
        known = f"; usage of {totals.unknown} unknown" if totals.unknown else ""
        self.screen.line(f"{many(totals.calls, 'call')}{known}, {totals.cost()}")
        self.screen.line(f"{totals.input_tokens:,} tokens in, {totals.output_tokens:,} out")
        self.screen.line(f"{totals.context:,} tokens in the last prompt")
        self.screen.line(f"session {self.agent.session_id}", "dim")

    def compress(self, _: str) -> None:
        before = self.totals.calls
        done = self._answer(lambda: {"compressed": self.agent.compress()})
        if done is not None and done["compressed"] is None:
            paid = self.totals.calls - before
            self.screen.line(
                "nothing can be left out" + (f" ({many(paid, 'call')})" if paid else "")
            )

    def resume(self, wanted: str) -> None:
        if not wanted:
            for info in self._recent():
                self.screen.clipped(f"{info.session_id[:12]}  {info.messages:>4}  {info.title}")
            self.screen.line("/resume ID continues one", "dim")
            return
        if self.store.find(wanted).session_id == self.agent.session_id:
            raise UserError("this session is the one that you are in")
        self._switch(wanted)
        self.show_tail()

    def _recent(self) -> list[SessionInfo]:
        return [info for info in self.store.sessions(_LISTED) if info.messages]

    def show_tail(self) -> None:
        """Show how the session ended so far."""
        for message in self.store.messages(self.agent.session_id)[-4:]:
            if not isinstance(message, ToolMessage) and (text := text_of(message).strip()):
                who = "" if isinstance(message, AssistantMessage) else "> "
                self.screen.clipped(f"{who}{text}", "dim")
        self.screen.line(f"continuing session {self.agent.session_id}", "dim")

    def new(self, _: str) -> None:
        self._switch(None)
        self.screen.line("a new session, with a new sandbox")

    def _undone(self) -> str | list[dict[str, Any]]:
        content = self.agent.undo()
        if content is None:
            raise UserError("nothing can be taken back")
        return content

    def undo(self, _: str) -> None:
        self._draft = _text(self._undone())
        self.screen.line("taken back; files stay as they are", "dim")

    def retry(self, _: str) -> None:
        content = self._undone()
        self._answer(lambda: self.agent.run_conversation(content))

    def background(self, text: str) -> None:
        if not text:
            raise UserError("say what to do: /background TASK")
        number = len(self._tasks) + 1
        agent = self._agent(
            self.store.open(),
            Approval("deny", disposable=self.options.disposable),
            on_event=self.totals.count,
        )
        thread = threading.Thread(target=self._work, args=(number, agent, text))
        self._tasks[number] = agent, thread
        thread.start()
        self.screen.line(f"background {number}: session {agent.session_id}", "dim")

    def _work(self, number: int, agent: AIAgent, text: str) -> None:
        try:
            result = agent.run_conversation(text)
            report = result["final_response"] or result["end_reason"]
        except Exception as error:  # a boundary: a thread of its own
            report = f"error: {error}"
        agent.close()
        note = f"background {number} (session {agent.session_id[:12]}): {report}"
        if self._worker is not None:
            self._events.put(note)  # the main thread writes it
        else:
            self.screen.line(note, "dim")

    def leave(self, _: str) -> None:
        raise Leave

    def toolbar(self) -> str:
        """The status line below the prompt."""
        totals, dot = self.totals, f" {self.screen.dot} "
        parts = (
            self.options.model.name,
            self.agent.session_id[:8],
            f"{totals.input_tokens:,} in, {totals.output_tokens:,} out",
            totals.cost(),
        )
        return render.visible(dot.join(parts))


def make_model(fields: Mapping[str, Any]) -> ModelConfig:
    """The model of these fields. Raises: UserError."""
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "model"
        raise UserError(f"{name} {fields.get(name)!r}: {first['msg']}") from None


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _call_text(call: ToolCall) -> str:
    arguments = parse_arguments(call.arguments)
    shown = call.arguments if arguments is None else arguments
    return render.call_text({"function": {"name": call.name, "arguments": shown}})


class Command(NamedTuple):
    """A command of the user."""

    run: Callable[[Chat, str], None]
    help: str
    argument: str = ""


COMMANDS: dict[str, Command] = {
    "help": Command(Chat.help, "these lines"),
    "model": Command(Chat.model, "the model; or continue with another one", "[NAME [URL]]"),
    "tools": Command(Chat.tools, "the tools that the model has"),
    "skills": Command(Chat.skills, "the skills of this user"),
    "usage": Command(Chat.usage, "calls, tokens and cost of this chat"),
    "compress": Command(Chat.compress, "replace the older part of the context by a summary"),
    "undo": Command(Chat.undo, "take back the last message, and edit it"),
    "retry": Command(Chat.retry, "send the last message again"),
    "background": Command(Chat.background, "another agent works on a task meanwhile", "TASK"),
    "resume": Command(Chat.resume, "recent sessions; or continue one", "[ID]"),
    "new": Command(Chat.new, "begin another session"),
    "exit": Command(Chat.leave, "leave; the session stays"),
}
"""The commands by name, in the order of the help."""
