"""Sub-agents: a run gives tasks to runs of its own, which share its record, its budgets and, by
default, its sandbox.

A sub-agent's messages are recorded as `SubagentEvent`s: they make a row of `subagents`. Its model
calls are recorded as calls of the attempt, under its name, so that they count once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from hermes_rl import events as ev
from hermes_rl.agent.parts import (
    AgentParts,
    AgentResult,
    Caller,
    Control,
    FallsBack,
    KnowsWindow,
    RunState,
)
from hermes_rl.agent.policy import Limits, Refunds
from hermes_rl.agent.prompt import system_prompt
from hermes_rl.agent.run import run_agent
from hermes_rl.errors import (
    ENDINGS,
    CostLimit,
    DiskFull,
    HermesError,
    SandboxDied,
    SandboxKilled,
    Stalled,
    ToolError,
    cause_of,
    end_reason_of,
)
from hermes_rl.messages import UserMessage
from hermes_rl.models import Completion, ModelRequest
from hermes_rl.ports import Recorder
from hermes_rl.sandboxes import Sandbox, SandboxSnapshot
from hermes_rl.text import clean, cut_middle
from hermes_rl.tools import DELEGATE_TASK, ChildResult, ChildTask, OpenParts

AT_ONCE = 3
"""Sub-agents of one run that work at the same time."""
SUMMARY_CHARS = 24_000
"""Characters of a sub-agent's answer that its parent reads."""
BLOCKED = ("clarify", "memory")
"""Tools that a sub-agent never has."""
BLOCKED_TOOLSETS = ("browser",)
"""Nor the tools of these: a sandbox can run one browser."""
STOP_S = 0.7
"""How long a sub-agent that is interrupted may take to record its end."""
_COUNT = "delegated"
"""Key of the tool state: how many sub-agents a run has had."""


_COPIES = "hermes-rl-copy-"
"""Prefix of the folders with copies of workspaces; a lock in each is held while it is used."""


def _make_copy_folder() -> tuple[str, int]:
    """Make a folder for a copy; remove those that killed processes left.

    Returns: the folder, and the descriptor that locks it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_COPIES}*/lock"):
        try:
            with left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
        except OSError:  # in use, another user's, or gone
            continue
    folder = tempfile.mkdtemp(prefix=_COPIES)
    lock = os.open(Path(folder, "new"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(Path(folder, "new"), Path(folder, "lock"))  # nobody finds it unlocked
    return folder, lock


@dataclass(frozen=True)
class Delegation:
    """What the sub-agents of one run are made with.

    Args:
        recorder: of the whole attempt.
        caller: makes the model calls of a sub-agent, which records into the recorder it is passed.
        lease: starts a sandbox for the sub-agent of that name, from a copy of its parent's; None
            where there is none.
        agent: name of the run.
        depth: 0 for the run that no other started.
    """

    recorder: Recorder
    caller: Callable[[Recorder], Caller]
    lease: Callable[[str, SandboxSnapshot], Awaitable[Sandbox]] | None = None
    agent: str = "main"
    depth: int = 0

    def of(self, run: RunState) -> Children:
        """What the tool `delegate_task` of a run calls."""
        return Children(run, self)


class Children:
    """The sub-agents of a run (`tools.Delegate`)."""

    def __init__(self, run: RunState, delegation: Delegation) -> None:
        self._run, self._with = run, delegation
        self._places = asyncio.Semaphore(AT_ONCE)
        self.seconds = 0.0

    async def __call__(self, call_id: str, tasks: Sequence[ChildTask]) -> list[ChildResult]:
        """See `tools.Delegate`. Raises: SandboxDied and SandboxKilled of the parent's sandbox;
        CostLimit; DiskFull; ToolError where its sandbox cannot be copied."""
        start, state = time.monotonic(), self._run.parts.tool_state
        first = int(state.get(_COUNT, 0))
        state[_COUNT] = first + len(tasks)
        names = [f"{self._with.agent}.{first + n}" for n in range(1, len(tasks) + 1)]
        try:
            async with self._copy() as copy, asyncio.TaskGroup() as group:
                started = [
                    group.create_task(self._child(name, call_id, task, number, copy))
                    for number, (name, task) in enumerate(zip(names, tasks, strict=True), 1)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.seconds += time.monotonic() - start
        return [task.result() for task in started]

    @asynccontextmanager
    async def _copy(self) -> AsyncIterator[SandboxSnapshot | None]:
        """What the sandboxes of sub-agents start from; None where they share their parent's.

        Raises: ToolError.
        """
        parent, start = self._run.parts, time.monotonic()
        if not parent.policy.child_sandbox or self._with.lease is None or parent.sandbox is None:
            yield None
            return
        folder, lock = await asyncio.to_thread(_make_copy_folder)
        try:
            copy = SandboxSnapshot(Path(folder, "copy"))
            await parent.opened.aclose()  # programs of tools would block the copy
            try:
                if not await parent.sandbox.snapshot(copy.folder):
                    raise ToolError(
                        "Sub-agents work on a copy of the files, and none can be made while "
                        "processes run in the background. End them first"
                    )
            except OSError as error:
                raise ToolError(f"The files cannot be copied for sub-agents: {error}") from error
            self._run.add_active(time.monotonic() - start)
            yield copy
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
            os.close(lock)

    async def _child(
        self,
        name: str,
        call_id: str,
        task: ChildTask,
        number: int,
        copy: SandboxSnapshot | None,
    ) -> ChildResult:
        """Run one sub-agent and record it, however it ends."""
        async with self._places:
            prompt = task.prompt
            recorder = ChildRecorder(self._with.recorder, name)
            begun = ev.SubagentStarted(
                agent=name,
                parent=self._with.agent,
                tool_call_id=call_id,
                started_at=time.time(),
                prompt=prompt,
            )
            self._with.recorder.record(begun)
            ended = _Ended("interrupted", cause="interrupted")
            hooks, start = self._run.parts.hooks, time.monotonic()
            about = {"child_id": name, "parent_id": self._with.agent, "tool_call_id": call_id}
            try:
                if hooks is not None:
                    await hooks.observe("subagent_start", **about, goal=prompt)
                result = await self._run_in_sandbox(name, recorder, prompt, copy)
                ended = _Ended(result.end_reason, result=result)
            except HermesError as error:
                ended = _Ended.by(error)
                if self._ends_parent(error):
                    raise
            finally:
                recorder.record(ended.event())
                recorder.close()
            found = ended.for_parent(number)
            if hooks is not None:
                await hooks.observe(
                    "subagent_stop",
                    **about,
                    status=found.status,
                    end_reason=found.end_reason,
                    summary=found.summary or found.error or "",
                    duration_ms=round((time.monotonic() - start) * 1000),
                )
            return found

    def _ends_parent(self, error: HermesError) -> bool:
        """Whether an error of a sub-agent is one of its parent too."""
        shared = not self._run.parts.policy.child_sandbox
        lost = isinstance(error, SandboxDied | SandboxKilled)
        return isinstance(error, DiskFull | CostLimit) or (lost and shared)

    async def _run_in_sandbox(
        self, name: str, recorder: ChildRecorder, prompt: str, copy: SandboxSnapshot | None
    ) -> AgentResult:
        """Run a sub-agent in a shell session of its parent's sandbox, or in a copy of that."""
        parent = self._run.parts
        if copy is None or self._with.lease is None:
            if parent.sandbox is None:
                return await self._bounded(self._parts(name, recorder, None), prompt)
            session = await parent.sandbox.new_session()
            try:
                return await self._bounded(self._parts(name, recorder, session), prompt)
            finally:
                await asyncio.shield(session.aclose())
        start = time.monotonic()
        sandbox = await self._with.lease(name, copy)
        try:
            seconds = time.monotonic() - start
            self._run.add_active(seconds)
            info = sandbox.info
            leased = ev.SandboxLeased(
                backend=info.backend, image=info.image, limits=info.limits, seconds=seconds
            )
            recorder.record(leased)
            return await self._bounded(self._parts(name, recorder, sandbox), prompt)
        finally:
            await asyncio.shield(sandbox.aclose())

    async def _bounded(self, parts: AgentParts, prompt: str) -> AgentResult:
        """Run a sub-agent until its deadline. Raises: Stalled at the deadline; HermesError.

        A cancelled one ends at once: it completes its conversation first, if that takes no time.
        """
        control = Control("the time limit of the sub-agent was reached")
        task = asyncio.create_task(run_agent(parts, [UserMessage(content=prompt)], control))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        seconds = parts.policy.child_timeout_s
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            if not task.done():
                control.interrupt()
                await asyncio.wait({task}, timeout=STOP_S)
                task.cancel()
            await asyncio.shield(parts.opened.aclose())
        if control.interrupted and not (task.done() and task.exception() is None):
            raise Stalled(f"no end within {seconds} s (agent.switches.child_timeout_s)")
        return task.result()

    def _parts(self, name: str, recorder: ChildRecorder, sandbox: Sandbox | None) -> AgentParts:
        run, parent, made = self._run, self._run.parts, self._with
        policy, depth = parent.policy, made.depth + 1
        blocked = BLOCKED if depth < policy.child_depth else (*BLOCKED, DELEGATE_TASK)
        tools = {
            name: tool
            for name, tool in parent.tools.items()
            if name not in blocked and tool.toolset not in BLOCKED_TOOLSETS and not tool.answers
        }
        shared = policy.children_share_turns
        most = policy.child_turns
        if parent.limits.max_turns is not None:
            most = min(most, parent.limits.max_turns)
        return replace(
            parent,
            caller=ChildCaller(made.caller(recorder), name),
            tools=tools,
            sandbox=sandbox,
            recorder=recorder,
            limits=Limits(max_turns=None if shared else most),
            system=system_prompt("datagen", tools, policy.wording),
            ephemeral=None,
            prefill=(),
            stream=False,
            on_delta=None,
            reply=None,
            tool_state={},
            opened=OpenParts(),
            budget=SharedTurns(run) if shared else None,
            active_s=0.0,
            after_turn=None,
            resumed=None,
            agent=name,
            inside=run,
            delegation=replace(made, agent=name, depth=depth),
        )


@dataclass(frozen=True)
class _Ended:
    """How a sub-agent ended."""

    end_reason: str
    result: AgentResult | None = None
    cause: str | None = None
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def by(cls, error: HermesError) -> _Ended:
        cause = cause_of(error)
        text = clean(f"{type(error).__name__}: {error}")[:2_000]
        return cls(end_reason_of(cause), cause=cause, error=text, metrics=error.metrics)

    def event(self) -> ev.Ended:
        """The last event of the sub-agent."""
        result = self.result
        return ev.Ended(
            finished_at=time.time(),
            end_reason=self.end_reason,
            cause=self.cause,
            error=self.error,
            metrics=dict(self.metrics if result is None else result.metrics),
            final_response=None if result is None else result.final_response,
        )

    def for_parent(self, number: int) -> ChildResult:
        """What the parent's model reads."""
        result = self.result
        if result is None:
            status = "timeout" if self.cause == Stalled.cause else "failed"
        elif self.end_reason in ("answered", "refused"):
            status = "completed"
        else:
            status = "exhausted" if ENDINGS[self.end_reason].truncated else "failed"
        answer = None if result is None else result.final_response
        return ChildResult(
            task=number,
            status=status,
            end_reason=self.end_reason,
            summary=cut_middle(answer, SUMMARY_CHARS) if answer else None,
            turns=0 if result is None else result.turns,
            error=self.error,
        )


@dataclass(frozen=True)
class ChildCaller:
    """A caller whose calls carry the name of a sub-agent."""

    caller: Caller
    agent: str

    async def call(
        self,
        request: ModelRequest,
        *,
        turn: int,
        purpose: ev.Purpose = "agent",
        agent: str = "main",
    ) -> Completion:
        """See `Caller`."""
        return await self.caller.call(request, turn=turn, purpose=purpose, agent=self.agent)

    @property
    def window(self) -> int | None:
        """See `KnowsWindow`."""
        return self.caller.window if isinstance(self.caller, KnowsWindow) else None

    def fall_back(self) -> bool:
        """See `FallsBack`."""
        return isinstance(self.caller, FallsBack) and self.caller.fall_back()


class ChildRecorder:
    """Records a sub-agent into the log of its attempt: calls as they are, all else as its own."""

    def __init__(self, recorder: Recorder, agent: str) -> None:
        self._recorder, self._agent = recorder, agent
        self._closed = False

    def record(self, event: ev.Event) -> None:
        """See `ports.Recorder`."""
        if isinstance(event, ev.CallStarted | ev.CallEnded | ev.TokensAdded):
            self._recorder.record(event)
        elif isinstance(event, ev.AnswerDiscarded):
            self._recorder.record(msgspec.structs.replace(event, agent=self._agent))
        elif not self._closed:
            self._recorder.record(ev.SubagentEvent(agent=self._agent, inner=event))

    def close(self) -> None:
        """Its row is complete: what a tool that did not end in time still causes is dropped."""
        self._closed = True


@dataclass(frozen=True)
class SharedTurns:
    """The turns of a run, as its sub-agents take them."""

    run: RunState

    def consume(self) -> bool:
        """See `Budget`."""
        run, limit = self.run, self.run.parts.limits.max_turns
        if limit is not None and run.turns_used >= limit:
            return False
        if run.parts.budget is not None and not run.parts.budget.consume():
            return False
        run.lent += 1
        return True

    def refund(self) -> None:
        """See `Refunds`."""
        self.run.lent -= 1
        if isinstance(self.run.parts.budget, Refunds):
            self.run.parts.budget.refund()
