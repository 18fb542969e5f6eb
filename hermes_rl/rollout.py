"""One attempt end to end: lease a sandbox, run the agent, verify, record.

`run_attempt` never raises for a failed attempt: the row says how it ended. Cancellation, a full
disk and internal errors do raise; the worker turns the latter into a row with cause `harness`, by
`lost_row`.

An `Episode` is what happens around the agent: tools, what comes before the first call, a user's
replies and the reward.

`verify` turns what the rollout left into a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl import events as ev
from hermes_rl.agent import (
    AgentParts,
    AgentResult,
    Caller,
    Control,
    Delegation,
    Progress,
    RunHooks,
    context_files,
    run_agent,
    wall_limit,
    with_services,
)
from hermes_rl.aio import to_end
from hermes_rl.checkpoints import AgentEnd, Checkpoint, Found
from hermes_rl.definitions import sandbox_limits_of
from hermes_rl.errors import (
    DiskFull,
    HermesError,
    SandboxDied,
    SandboxKilled,
    SnapshotLost,
    Stalled,
    TaskFault,
    UserError,
    VerifierFault,
    cause_of,
    end_reason_of,
)
from hermes_rl.events import AttemptKey, EventLog, Graded
from hermes_rl.identity import trajectory_id
from hermes_rl.judging import Replies
from hermes_rl.messages import Message, with_unique_ids
from hermes_rl.models.rate import Budget
from hermes_rl.ports import Recorder, WorkItem
from hermes_rl.record import Trajectory
from hermes_rl.sandboxes import (
    Connection,
    Sandbox,
    SandboxSnapshot,
    SandboxSpec,
)
from hermes_rl.tasks import Task
from hermes_rl.text import clean, scrub
from hermes_rl.tools import DELEGATE_TASK, MEMORY, Approval, OpenParts, Tool
from hermes_rl.trajectory import fold
from hermes_rl.verify import Answer, check_scorers, grade_task
from hermes_rl.wiring import Draw, RunContext
from hermes_rl.workspaces import Workspaces, state_text

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """One attempt, before it begins."""

    context: RunContext
    item: WorkItem
    task: Task
    log: EventLog
    budget: Budget | None = None
    """What the attempt may spend, on all models together."""
    replies: Replies = field(default_factory=Replies)
    """Those of judges about its answer."""


class Episode:
    """What happens around the agent in one attempt; this one is of a plain task of a dataset."""

    env_name: str | None = None
    """For the row."""
    replies = False
    """Somebody may reply to an answer."""
    sandboxed: bool | None = None
    """None: if a tool or a part of the task needs a sandbox."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def tools(self) -> Mapping[str, Tool]:
        """Tools beside those of the toolsets, by name. Raises: TaskFault."""
        return {}

    def tool_state(self) -> dict[str, Any]:
        """What tools find as `ToolContext.env`."""
        return {}

    async def start(self, sandbox: Sandbox | None) -> None:
        """After the task's setup, before the first call. Raises: TaskFault for a task that cannot
        be graded; other HermesErrors."""
        if self.stage.item.task is not None:
            check_scorers(self.stage.context.config, self.stage.item.task.score)

    async def run(
        self, parts: AgentParts, prompt: Sequence[Message], control: Control
    ) -> AgentResult:
        """Run the agent. Raises: Interrupted and other HermesErrors."""
        return await run_agent(parts, prompt, control)

    async def reply(self, messages: Sequence[Message]) -> Message | None:
        """What the user says to an answer; None ends the rollout. Raises: HermesError."""
        return None

    def _messages(self) -> Sequence[str]:
        """The conversation so far."""
        ended = ev.Ended(finished_at=time.time(), end_reason="answered")
        return fold([*self.stage.log.events, ended]).messages

    async def grade(self, sandbox: Sandbox | None, result: AgentResult) -> Graded:
        """The reward; may end the agent's session. Raises: VerifierFault and other HermesErrors."""
        stage = self.stage
        answer = Answer(result.final_response or "", self._messages)
        return await grade_task(
            stage.context, stage.item, stage.log, sandbox, answer, stage.budget, stage.replies
        )


MakeEpisode = Callable[[Stage], Episode]
"""Makes an attempt's episode. Raises: HermesError."""

SETUP_TIMEOUT_S = 300.0
_ERROR_CHARS = 2_000


def lost_row(log: EventLog, error: BaseException) -> Trajectory:
    """The row of an attempt that a bug of ours ended; its turns and calls are kept."""
    why = scrub(clean(f"{type(error).__name__}: {error}"))
    log.record(ev.Ended(finished_at=time.time(), end_reason="error", cause="harness", error=why))
    try:
        return fold(log.events)
    except Exception:  # the bug may lie in a message: the books of the attempt must still stand
        return fold(e for e in log.events if not isinstance(e, ev.MessageAdded | ev.ToolsOffered))


async def run_attempt(
    context: RunContext,
    item: WorkItem,
    log: EventLog,
    control: Control | None = None,
    *,
    make: MakeEpisode = Episode,
) -> Trajectory:
    """Make one attempt at a unit and return its row.

    Args:
        context: what this process has for all its rollouts.
        item: the attempt to make.
        log: takes every event, `Begun` and `Ended` included.
        control: lets an operator interrupt or steer it.
        make: what happens around the agent; a plain task's by default.

    Raises: CancelledError; DiskFull when the journal cannot be written; bugs of ours as they are.
    """
    fault: HermesError | None = None
    episode: Episode | None = None
    finished = False
    try:
        if item.task is not None:
            episode = make(Stage(context, item, item.task, log, context.budget(item)))
        draw = context.draw(item, episode.tools() if episode else None)
    except (UserError, TaskFault) as error:
        draw, fault = context.no_draw(item), error
    except Exception:  # a bug of ours: its row needs a beginning
        log.record(_begun(context, item, context.no_draw(item), None))
        raise
    log.record(_begun(context, item, draw, episode.env_name if episode else None))
    watched = _Watched(context, item, draw.model)
    try:
        if fault is not None or episode is None:
            raise fault or TaskFault(item.bad_row or "bad row")
        await watched.begin()
        result = await _Attempt(episode, draw, control or Control(), watched).run()
        metrics = await watched.end(result.end_reason)
        log.record(
            ev.Ended(
                finished_at=time.time(),
                end_reason=result.end_reason,
                metrics={**metrics, **result.metrics},
                final_response=result.final_response,
            )
        )
        finished = True
    except DiskFull:
        raise
    except HermesError as error:
        log.record(_failed(context, error, {**await watched.end("error"), **error.metrics}))
    finally:
        if episode is not None and episode.stage.budget is not None:
            episode.stage.budget.end(finished=finished)
    if context.telemetry is not None:
        context.telemetry.export(log.events)
    return fold(log.events)


def _begun(context: RunContext, item: WorkItem, draw: Draw, env_name: str | None) -> ev.Begun:
    now, sent = time.time(), context.config.agent.ephemeral_system_prompt
    return ev.Begun(
        key=ev.AttemptKey(unit_id=item.unit_id, epoch=item.epoch, attempt=item.attempt),
        started_at=now,
        run_id=context.run_id,
        group_id=item.group_id,
        member=item.repeat,
        repeat=item.repeat,
        row_index=item.row_index,
        task_id=item.task_id,
        task_hash=item.task_hash,
        config_hash=context.config_hash,
        seed=item.seed,
        prompt=item.task.prompt_text if item.task else "",
        model=draw.model,
        api_mode=draw.api_mode,
        endpoint=draw.endpoint,
        toolsets=draw.toolsets,
        sampling={**context.sent(draw).as_dict(), **draw.extra},
        split=_text(item.task, "split"),
        env_name=env_name,
        metadata=item.task.metadata if item.task else {},
        queued_s=max(0.0, now - item.enqueued_at) if item.enqueued_at else 0.0,
        prompt_sha256=hashlib.sha256(sent.encode()).hexdigest() if sent else None,
    )


def _text(task: Task | None, column: str) -> str | None:
    value = task.metadata.get(column) if task else None
    return value if isinstance(value, str) else None


def _failed(context: RunContext, error: HermesError, metrics: dict[str, float]) -> ev.Ended:
    cause = "task" if isinstance(error, UserError) else cause_of(error)
    text = context.scrub(clean(f"{type(error).__name__}: {error}"))[:_ERROR_CHARS]
    return ev.Ended(
        finished_at=time.time(),
        end_reason=end_reason_of(cause),
        cause=cause,
        error=text,
        metrics=metrics,
        fatal_command=error.command if isinstance(error, SandboxDied) else None,
    )


_LOGGED_CONNECTIONS = 1_000
"""Of one attempt; further ones are only counted."""


class _Connections:
    """What an attempt's sandbox asked of its egress proxy: sums for the row, lines for the log."""

    def __init__(self, context: RunContext, item: WorkItem) -> None:
        self._log, self._lines, self._scrub = context.network_log, 0, context.scrub
        self._row = trajectory_id(item.unit_id, item.epoch, item.attempt)
        listed = not isinstance(context.config.sandbox.network, bool)
        self.metrics: dict[str, float] = dict.fromkeys(_NETWORK_METRICS if listed else (), 0.0)

    def add(self, connection: Connection) -> None:
        """Take one that has ended. Raises: OSError."""
        self.metrics[f"network_{connection.outcome}"] += 1
        self.metrics["network_sent_bytes"] += connection.sent_bytes
        self.metrics["network_received_bytes"] += connection.received_bytes
        self._lines += 1
        if self._log is None or self._lines > _LOGGED_CONNECTIONS:
            return
        line = self._scrub(json.dumps({"trajectory_id": self._row, **asdict(connection)}))
        self._log(line.encode("utf-8", "replace"))


_NETWORK_METRICS = tuple(
    f"network_{name}" for name in ("allowed", "refused", "failed", "sent_bytes", "received_bytes")
)


class _Watched:
    """What is noted of an attempt beside its events: its connections and its hooks."""

    def __init__(self, context: RunContext, item: WorkItem, model: str) -> None:
        self.connections = _Connections(context, item)
        self.hooks: RunHooks | None = None
        if context.hooks is not None:
            row = trajectory_id(item.unit_id, item.epoch, item.attempt)
            about = {"session_id": row, "turn_id": row, "task_id": item.task_id}
            self.hooks = RunHooks(context.hooks, {**about, "model": model, "platform": "batch"})

    async def begin(self) -> None:
        """Before the sandbox starts."""
        if self.hooks is not None:
            await self.hooks.observe("on_session_start", resumed=False)

    async def end(self, end_reason: str) -> dict[str, float]:
        """After the attempt; the metrics for its row."""
        if self.hooks is None:
            return self.connections.metrics
        await self.hooks.end(end_reason)
        await self.hooks.observe("on_session_finalize")
        return {**self.connections.metrics, **self.hooks.metrics}


class _Attempt:
    """The middle of one attempt, in the order in which it happens."""

    def __init__(self, episode: Episode, draw: Draw, control: Control, watched: _Watched) -> None:
        self.episode, self.draw, self.control = episode, draw, control
        self.connections, self.hooks = watched.connections, watched.hooks
        self._opened = OpenParts()
        self._kept = 0
        """The turn of the latest checkpoint."""
        self._setup: str | None = None
        """The name of a setup that other rollouts share."""
        self._ready = False
        """The task is set up already."""
        self._to_grade: tuple[Sandbox | None, AgentResult] | None = None
        """The agent has ended: its sandbox and result."""
        self._keeping = asyncio.Lock()
        """Held while that is saved."""
        stage = self.stage = episode.stage
        self.context, self.item, self.task, self.log = (
            stage.context, stage.item, stage.task, stage.log,
        )  # fmt: skip

    async def run(self) -> AgentResult:
        """Raises: Stalled and other HermesErrors."""
        try:
            async with wall_limit(self.draw.limits.wall_seconds):
                return await self._run()
        except Stalled as stalled:
            if self._to_grade is not None:
                await self._keep_ended(*self._to_grade)
            raise Stalled(f"{stalled}{self._unanswered()}") from stalled

    def _unanswered(self) -> str:
        """The models that were not answering at the end."""
        started = {e.call_id: e for e in self.log.events if isinstance(e, ev.CallStarted)}
        ended = [e for e in self.log.events if isinstance(e, ev.CallEnded)]
        if not ended:
            return ""
        purpose = started[ended[-1].call_id].purpose
        calls = ((started[e.call_id], e.outcome) for e in ended)
        last = {call.model: outcome for call, outcome in calls if call.purpose == purpose}
        silent = [model for model, outcome in last.items() if outcome != "ok"]
        return f": no answer of {purpose} {', '.join(silent)}" if silent else ""

    async def _run(self) -> AgentResult:
        start, sandbox = time.monotonic(), None
        found, checkpoint = await self._found(), None
        if found is not None and (ended := found.checkpoint.result()) is not None:
            self._take_up(found.checkpoint)
            self.log.record(await self._graded(None, ended))
            return ended
        if self._is_sandboxed():
            sandbox, checkpoint = await self._sandbox(found)
        try:
            try:
                if sandbox is not None:
                    await self._prepare(sandbox)
                await self.episode.start(sandbox)
            finally:
                seconds = time.monotonic() - start
                if sandbox is not None:
                    self.log.record(await self._leased(sandbox, seconds))
            result = await self._agent(sandbox, seconds, checkpoint)
            if any(scorer.type == "judge" for scorer in self.task.score):
                await self._keep_ended(sandbox, result)  # a kill from here on repeats no answer
            self.log.record(await self._graded(sandbox, result))
            return result
        finally:
            # A cancelled attempt must still end its sandbox: the shield lets teardown finish.
            if self._opened:
                await asyncio.shield(self._opened.aclose())
            if sandbox is not None:
                await asyncio.shield(sandbox.aclose())

    async def _found(self) -> Found | None:
        """The unit's checkpoint."""
        checkpoints = self.context.checkpoints
        return None if checkpoints is None else await checkpoints.find(self.item.unit_id)

    async def _sandbox(self, found: Found | None) -> tuple[Sandbox, Checkpoint | None]:
        """A sandbox: as it was at the unit's checkpoint, with that, or with the task set up, or an
        empty one."""
        backend, spec = self.context.backend, self._spec()
        if (checkpoints := self.context.checkpoints) is not None and found is not None:
            if found.snapshot and (sandbox := await self._fork(spec, found.snapshot)) is not None:
                self._take_up(found.checkpoint)
                return sandbox, found.checkpoint
            await checkpoints.drop(self.item.unit_id)
        if self.task.setup and self.item.repeats > 1:
            self._setup = f"{self.item.task_hash}-{spec.image}-{spec.limits}"
            folder = await self.context.setups.find(self._setup)
            if folder and (sandbox := await self._fork(spec, folder, shared=True)) is not None:
                return sandbox, None
        try:
            return await backend.lease(spec), None
        except BaseException:
            self._setup_failed()
            raise

    async def _fork(
        self, spec: SandboxSpec, folder: Path, *, shared: bool = False
    ) -> Sandbox | None:
        """A sandbox that starts from a snapshot; None where it cannot be put back."""
        snapshot = SandboxSnapshot(folder, shared)
        try:
            sandbox = await self.context.backend.lease(replace(spec, snapshot=snapshot))
        except SnapshotLost as error:
            _log.warning("unit %s starts without a snapshot: %s", self.item.unit_id[:12], error)
            return None
        self._ready = True
        return sandbox

    async def _prepare(self, sandbox: Sandbox) -> None:
        """Set the task up, unless the sandbox came with that. Raises: TaskFault."""
        if self._ready:
            return
        try:
            await prepare(sandbox, self.task)
        except BaseException:
            self._setup_failed()
            raise
        if self._setup is not None:
            await self.context.setups.saved(self._setup, sandbox)

    def _setup_failed(self) -> None:
        if self._setup is not None:
            self.context.setups.failed(self._setup)

    def _take_up(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint: its messages, and what the unit had spent."""
        self.log.record(checkpoint.resumed())
        if checkpoint.ended is not None:
            self.stage.replies.received.update(checkpoint.ended.replies)
        if self.stage.budget is not None:
            self.stage.budget.charge(checkpoint.spent)

    async def _after_turn(self, sandbox: Sandbox | None, progress: Progress) -> None:
        """Write a checkpoint when it is time, or was and processes were running."""
        every = self.context.checkpoints.every if self.context.checkpoints else None
        due = every is not None and progress.turn - self._kept >= every
        if due and await self._checkpoint(sandbox, progress):
            self._kept = progress.turn

    async def _checkpoint(self, sandbox: Sandbox | None, state: Progress | AgentEnd) -> bool:
        item, budget, checkpoints = self.item, self.stage.budget, self.context.checkpoints
        key = AttemptKey(unit_id=item.unit_id, epoch=item.epoch, attempt=item.attempt)
        spent = budget.unit_spent() if budget is not None else {}
        return checkpoints is not None and await checkpoints.keep(
            key, state, self.log.events, spent, sandbox
        )

    async def _keep_ended(self, sandbox: Sandbox | None, result: AgentResult) -> None:
        """Keep a finished rollout without its grade, so that its next attempt makes only calls of
        judges without a reply. Not where its sandbox is graded or kept, nor with token ids: a
        resumed attempt trains on its own answers only."""
        graded_inside = self.task.verify or any(s.type == "code" for s in self.task.score)
        workspace = sandbox is not None and self.context.workspaces is not None
        exact = any(isinstance(event, ev.TokensAdded) for event in self.log.events)
        if not (graded_inside or workspace or exact):
            async with self._keeping:  # several judges may reply at the same time
                ended = AgentEnd.of(result, self.stage.replies.received)
                await to_end(self._checkpoint(None, ended))

    def _is_sandboxed(self) -> bool:
        """Raises: TaskFault for a task that needs a sandbox in an environment without."""
        chosen, task = self.episode.sandboxed, self.task
        if chosen:
            return True
        env_tools = self.episode.tools()
        needing = [n for n, t in self.draw.tools.items() if t.needs_sandbox and n not in env_tools]
        parts: dict[str, Any] = {
            "files": task.files, "setup": task.setup, "verify": task.verify, "cwd": task.cwd,
            "score": [s for s in task.score if s.type == "code"],
        }  # fmt: skip
        if chosen is None:
            parts |= {"image": task.image, "requires": task.requires}
        needing += [f"the task's '{name}'" for name, part in parts.items() if part]
        if chosen is None:
            return bool(needing)
        if needing:
            raise TaskFault(
                f"{needing[0]} needs a sandbox, and this environment has none. "
                "Set env.config.sandboxed to true, or take it out"
            )
        return False

    async def _graded(self, sandbox: Sandbox | None, result: AgentResult) -> ev.Graded:
        """The reward; what the rollout left is kept either way. Raises: HermesError."""
        state, self._to_grade = self._state_left(), (sandbox, result)
        self.stage.replies.save = partial(self._keep_ended, sandbox, result)
        try:
            graded = await self.episode.grade(sandbox, result)
        except VerifierFault:
            ended = {
                "end_reason": result.end_reason,
                "final_response": result.final_response,
                "metrics": result.metrics,
            }
            try:
                await self._keep(sandbox, state, ended)
            except SandboxDied:
                pass  # nothing is kept then; the rollout is not rolled again for it
            await self._keep_ended(sandbox, result)
            raise
        except HermesError:
            await self._keep_ended(sandbox, result)
            raise
        await self._keep(sandbox, state)
        return graded

    def _state_left(self) -> str | None:
        """What the rollout noted, before a grader may change it; None where nothing is kept, or it
        is not plain JSON."""
        kept = self.context.workspaces is not None
        return state_text(self.episode.tool_state()) if kept else None

    async def _keep(
        self,
        sandbox: Sandbox | None,
        state: str | None,
        unjudged: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the workspace, where the run keeps them, before the row that says it is there."""
        if self.context.workspaces is None or state is None:
            return
        item = self.item
        row_id = trajectory_id(item.unit_id, item.epoch, item.attempt)
        await Workspaces(self.context.workspaces).keep(sandbox, row_id, state, unjudged)

    async def _leased(self, sandbox: Sandbox, seconds: float) -> ev.SandboxLeased:
        info = sandbox.info
        return ev.SandboxLeased(
            backend=info.backend,
            image=info.image,
            digest=await self.context.digest_of(self._image()),
            limits=info.limits,
            seconds=seconds,
        )

    def _image(self) -> str | None:
        return self.task.image or self.context.config.sandbox.image

    def _spec(self) -> SandboxSpec:
        key = f"{self.item.unit_id[:16]}-{self.item.epoch}-{self.item.attempt}"
        return SandboxSpec(
            lease=f"{self.context.run_id}-{key}",
            image=self._image(),
            cwd=self.task.cwd,
            env=self.task.env_vars,
            network=self.context.config.sandbox.network,
            limits=sandbox_limits_of(self.context.config.sandbox.limits, self.task),
            on_connection=self.connections.add,
        )

    async def _system(self, sandbox: Sandbox | None) -> str | None:
        """The system prompt, with the project's instructions where they are asked for."""
        system = with_services(
            self.draw.system, self.context.services, self._first_state(), self.draw.tools
        )
        if sandbox is None or not self.draw.policy.context_files:
            return system
        found = await context_files(sandbox)
        return "\n\n".join(part for part in (system, found) if part) or None

    def _first_state(self) -> dict[str, Any]:
        """What the tools of the unit begin with."""
        memory = self.context.first_memory
        return {MEMORY: {k: list(v) for k, v in memory.items()}} if memory else {}

    async def _agent(
        self, sandbox: Sandbox | None, active_s: float, checkpoint: Checkpoint | None
    ) -> AgentResult:
        draw = self.draw
        endpoint, agent = self.context.config.endpoint, self.context.config.agent
        prompt, hooks = self.task.prompt, self.hooks
        caller = self.context.caller(self.task, self.log, draw.model, self.stage.budget)
        parts = AgentParts(
            caller=caller if hooks is None else hooks.caller(caller),
            model=draw.model,
            tools=draw.tools,
            sandbox=sandbox,
            recorder=self.log,
            policy=draw.policy,
            limits=draw.limits,
            sampling=draw.sampling,
            system=await self._system(sandbox),
            ephemeral=agent.ephemeral_system_prompt,
            prefill=tuple(with_unique_ids([*prompt, *agent.prefill_messages])[len(prompt) :]),
            stream=endpoint.stream,
            cache=None if endpoint.prompt_cache == "off" else endpoint.prompt_cache,
            active_s=active_s,
            reply=self.episode.reply if self.episode.replies else None,
            env=self.episode.tool_state(),
            tool_state=self._first_state(),
            services=self.context.services,
            opened=self._opened,
            fatal_commands=self.item.fatal_commands,
            approval=self._approval(sandbox) if draw.policy.check_commands else None,
            context=self.context.context_parts(draw.policy, self.log, self.stage.budget),
            hooks=hooks,
            delegation=self._delegation() if DELEGATE_TASK in draw.tools else None,
            vision=self.context.vision(self.log, self.stage.budget),
            images=self.context.config.model.images,
        )
        if self.context.checkpoints is not None and self.context.checkpoints.every is not None:
            parts = replace(parts, after_turn=partial(self._after_turn, sandbox))
        if checkpoint is None:
            return await self.episode.run(parts, prompt, self.control)
        self._kept = checkpoint.turn
        parts = replace(parts, resumed=checkpoint.progress)
        return await run_agent(parts, checkpoint.messages, self.control)

    def _delegation(self) -> Delegation:
        def caller(recorder: Recorder) -> Caller:
            made = self.context.caller(self.task, recorder, self.draw.model, self.stage.budget)
            return made if self.hooks is None else self.hooks.caller(made)

        async def lease(agent: str, copy: SandboxSnapshot) -> Sandbox:
            spec = self._spec()
            name = f"{spec.lease}-{agent.replace('.', '-')}"
            return await self.context.backend.lease(replace(spec, lease=name, snapshot=copy))

        return Delegation(self.log, caller, lease)

    def _approval(self, sandbox: Sandbox | None) -> Approval:
        """A sandbox contains what commands do; without one, dangerous ones are denied."""
        safe = sandbox is not None and self.context.config.sandbox.backend != "none"
        return Approval("allow", disposable=True) if safe else Approval("deny")


async def prepare(sandbox: Sandbox, task: Task) -> None:
    """Files, required programs, setup.

    Raises: TaskFault for whatever fails here: it is the task's fault, not the model's.
    """
    try:
        for path, data in task.files.items():
            await sandbox.write_file(path, data)
        if task.requires:
            await _require(sandbox, task.requires)
        if task.setup:
            await _set_up(sandbox, task.setup)
    except (OSError, SandboxKilled) as error:
        raise TaskFault(f"setup failed: {error}") from error


async def _require(sandbox: Sandbox, programs: Sequence[str]) -> None:
    words = " ".join("'" + p.replace("'", "'\\''") + "'" for p in programs)
    command = f'for p in {words}; do command -v -- "$p" >/dev/null || printf \'%s \' "$p"; done'
    result = await sandbox.run(command, timeout_s=30.0)
    if result.output.strip():
        raise TaskFault(f"the sandbox lacks {', '.join(result.output.split())} ('requires')")


async def _set_up(sandbox: Sandbox, script: str) -> None:
    # In a shell of its own: a `cd` or `export` of the setup must not reach the agent's session.
    command = 'bash -c "$(cat)" setup'
    result = await sandbox.run(command, timeout_s=SETUP_TIMEOUT_S, stdin=script.encode())
    if result.timed_out:
        raise TaskFault(f"setup took more than {SETUP_TIMEOUT_S:g} s")
    if result.exit_code != 0:
        printed = result.output.strip()[-500:]
        raise TaskFault(f"setup failed with exit code {result.exit_code}: {printed}")
