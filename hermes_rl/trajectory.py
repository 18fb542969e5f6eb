"""The one function that makes a `Trajectory`: `fold(events)`, live and in recovery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hermes_rl import events as ev
from hermes_rl.errors import CAUSES, ENDINGS, end_reason_of
from hermes_rl.identity import subagent_id, trajectory_id
from hermes_rl.images import without_images
from hermes_rl.messages import (
    UNPARSED,
    AssistantMessage,
    Message,
    ToolMessage,
    is_portable,
    to_openai,
)
from hermes_rl.record import (
    Call,
    Context,
    Image,
    MessageInfo,
    SandboxRecord,
    Timing,
    ToolStat,
    Trajectory,
)
from hermes_rl.text import SECRETS
from hermes_rl.usage import Usage, total_usage

UNSENT = "unsent_"
"""Prefix of metrics: a sampling parameter that calls went without, since an endpoint refused it."""

REDRAWN = "redrawn_answers"
"""Metric of a row: answers that broke off and were sampled again from their beginning. Long answers
break off more often, so such a redraw makes the answers that are left shorter."""

RESUMED = "resumed_turns"
"""Metric of a row that resumed from a checkpoint: turns before it, whose calls are in rows of
earlier attempts."""

REDACTED = "redacted"
"""Metric of a row in whose texts secrets were replaced."""

_encode = msgspec.json.Encoder().encode

_COPIED = tuple(f for f in ev.Begun.__struct_fields__ if f in Trajectory.__struct_fields__)
"""Columns that `Begun` has under the same name. Those of another form are replaced."""


def fold(events: Iterable[ev.Event], *, lost: str | None = None, at: float = 0.0) -> Trajectory:
    """The row of one attempt, without secrets of this process.

    Args:
        events: the attempt's events in order; the first is `Begun`.
        lost: the cause to record when the attempt has no `Ended` (`worker_lost`, `driver_lost`).
        at: Unix time in seconds at which the loss was noticed.

    Raises: ValueError when the first event is not `Begun`, or the end is missing and `lost` is
    None.
    """
    stream = list(events)
    if not stream or not isinstance(stream[0], ev.Begun):
        raise ValueError("an attempt's first event must be 'begun'")
    ends = [e for e in stream if isinstance(e, ev.Ended)]
    if not ends:
        if lost is None:
            raise ValueError("an attempt without an end needs the cause of its loss")
        ends = [ev.Ended(finished_at=at, end_reason="error", cause=lost, error=f"{lost}: killed")]
    whole = [*stream, ends[-1]]
    clean = SECRETS.scrub_record(whole)
    if clean is not whole:
        clean[-1:-1] = [ev.Redacted()]
    begun, ended = clean[0], clean.pop()
    assert isinstance(begun, ev.Begun)
    assert isinstance(ended, ev.Ended)
    return _Fold(clean, begun, ended).row()


def fold_subagents(events: Iterable[ev.Event], row: Trajectory) -> tuple[Trajectory, ...]:
    """The rows of an attempt's sub-agents; their calls are also in the attempt's own row.

    Args:
        row: the attempt's, as `fold` made it.
    """
    events = list(events)
    started = [e for e in ev.whole_rollout(events) if isinstance(e, ev.SubagentStarted)]
    if not started:
        return ()
    owner = {e.call_id: e.agent for e in events if isinstance(e, ev.CallStarted)}
    begun, root = events[0], row.trajectory_id
    assert isinstance(begun, ev.Begun)
    ids = {"main": root, **{s.agent: subagent_id(root, s.agent) for s in started}}
    rows = []
    for s in started:
        stream = [inner for e in events for inner in _of_subagent(e, s.agent, owner)]
        ends = [e for e in stream if isinstance(e, ev.Ended)]
        lost = ev.Ended(
            finished_at=row.finished_at / 1e6,
            end_reason="error",
            cause=row.cause or "harness",
            error=row.error,
        )
        first = msgspec.structs.replace(
            begun, prompt=s.prompt, started_at=s.started_at, queued_s=0.0, prompt_sha256=None
        )
        kept: list[ev.Event] = [first, *(e for e in stream if not isinstance(e, ev.Ended))]
        child = _Fold(kept, first, ends[-1] if ends else lost, s.agent).row()
        made = msgspec.structs.replace(
            child,
            trajectory_id=ids[s.agent],
            root_trajectory_id=root,
            parent_trajectory_id=ids.get(s.parent, root),
            parent_call_id=s.tool_call_id,
            sandbox=child.sandbox or row.sandbox,
        )
        rows.append(made)
    return tuple(SECRETS.scrub_record(rows))


def _of_subagent(event: ev.Event, agent: str, owner: Mapping[str, str]) -> list[ev.Event]:
    """What an event of an attempt says of one of its sub-agents."""
    if isinstance(event, ev.Resumed):  # its calls are in the rows of the attempts that paid them
        inner = [e for one in event.events for e in _of_subagent(one, agent, owner)]
        calls = [e for e in inner if isinstance(e, ev.CallStarted)]
        others: list[ev.Event] = [
            e for e in inner if not isinstance(e, ev.CallStarted | ev.CallEnded)
        ]
        turn = max((e.turn for e in calls), default=0)
        return (
            [*others, msgspec.structs.replace(event, turn=turn, events=calls)] if calls else others
        )
    if isinstance(event, ev.SubagentEvent):
        return [event.inner] if event.agent == agent else []
    if isinstance(event, ev.CallStarted | ev.AnswerDiscarded):
        return [event] if event.agent == agent else []
    if isinstance(event, ev.CallEnded) and owner.get(event.call_id) == agent:
        return [event]
    return []


def call_bounds(events: Iterable[ev.Event]) -> dict[str, float]:
    """Upper bounds on what calls without a known usage may have cost, as metrics; empty without
    such."""
    known = {e.call_id for e in events if isinstance(e, ev.CallEnded) and _settled(e)}
    open_calls = [e for e in events if isinstance(e, ev.CallStarted) and e.call_id not in known]
    if not open_calls:
        return {}
    bounds = {"unknown_input_tokens_max": sum(e.max_input_tokens or 0 for e in open_calls)}
    if all(e.max_output_tokens is not None for e in open_calls):
        bounds["unknown_output_tokens_max"] = sum(e.max_output_tokens or 0 for e in open_calls)
    return {k: float(v) for k, v in bounds.items()}


def _settled(end: ev.CallEnded) -> bool:
    return end.outcome == "refused" or (
        end.usage is not None and end.usage.total_tokens is not None
    )


def _micros(seconds: float) -> int:
    return round(seconds * 1_000_000)


class _Fold:
    """One pass over an attempt's events; each method makes some columns."""

    def __init__(
        self, stream: list[ev.Event], begun: ev.Begun, ended: ev.Ended, agent: str = "main"
    ) -> None:
        self.stream, self.begun, self.ended, self.agent = stream, begun, ended, agent
        self.whole = ev.whole_rollout(stream)
        self.added = [e for e in self.whole if isinstance(e, ev.MessageAdded)]
        self.starts = [e for e in stream if isinstance(e, ev.CallStarted)]
        self.ends = {e.call_id: e for e in stream if isinstance(e, ev.CallEnded)}

    def row(self) -> Trajectory:
        begun, ended = self.begun, self.ended
        cause = ended.cause
        row_id = trajectory_id(begun.key.unit_id, begun.key.epoch, begun.key.attempt)
        columns = {name: getattr(begun, name) for name in _COPIED}
        columns |= {
            **self._ending(cause),
            **self._conversation(),
            **self._usage_columns(),
            **self._tools(),
            **self._environment_columns(),
            "task_prompt": begun.prompt,
            "timing": self._timing(),
            "error": ended.error,
            "cause": cause,
            "toolsets": list(begun.toolsets),
            "sampling": _json(self._sampling()),
            "started_at": _micros(begun.started_at),
            "finished_at": _micros(ended.finished_at),
            "metadata": _portable(begun.metadata),
            "trajectory_id": row_id,
            "unit_id": begun.key.unit_id,
            "attempt": begun.key.attempt,
            "root_trajectory_id": row_id,
        }
        return Trajectory(**columns, parent_trajectory_id=None, parent_call_id=None)

    def _sampling(self) -> dict[str, Any]:
        """What was sent: what was asked for without parameters that the endpoint refused, and the
        output bound of the first call where a budget set one."""
        starts = [s for s in self.starts if s.purpose == "agent" and s.agent == self.agent]
        sampling = {k: v for k, v in self.begun.sampling.items() if k not in self._unsent(starts)}
        if not starts or starts[0].max_output_tokens is None:
            return sampling
        return {"max_tokens": starts[0].max_output_tokens, **sampling}

    def _unsent(self, starts: list[ev.CallStarted]) -> tuple[str, ...]:
        """What the first answered call went without; the last one where none was answered."""
        answered = (s for s in starts if (end := self.ends.get(s.call_id)) and end.outcome == "ok")
        call = next(answered, starts[-1] if starts else None)
        return call.unsent if call is not None else ()

    def _ending(self, cause: str | None) -> dict[str, Any]:
        reason = self.ended.end_reason if cause is None else end_reason_of(cause)
        graded = [e for e in self.stream if isinstance(e, ev.Graded)]
        last = graded[-1] if graded and cause is None else None
        owner = "policy" if cause is None else CAUSES[cause].owner
        ok = cause is None
        unsent = {f"{UNSENT}{name}": 1.0 for s in self.starts for name in s.unsent}
        redacted = {REDACTED: 1.0} if any(isinstance(e, ev.Redacted) for e in self.stream) else {}
        before = [e.turn for e in self.stream if isinstance(e, ev.Resumed)]
        resumed = {RESUMED: float(before[0])} if before else {}
        bounds = call_bounds(self.stream)
        decided = Counter(
            name
            for e in self.stream
            if isinstance(e, ev.CommandDecided)
            for name in (f"commands_{e.decision}", f"commands_{e.decision}: {e.pattern}")
        )
        metrics = {
            **bounds,
            **{name: float(n) for name, n in decided.items()},
            **unsent,
            **_redrawn(self.starts, self.ends),
            **redacted,
            **resumed,
            **self.ended.metrics,
        }
        return {
            "status": "ok" if ok else ("cancelled" if owner == "operator" else "failed"),
            "end_reason": reason,
            "truncated": ok and ENDINGS[reason].truncated,
            "owner": owner,
            "reward": last.reward if last else None,
            "rewards": list(last.rewards) if last else [],
            "metrics": {**metrics, **(last.metrics if last else {})},
        }

    def _conversation(self) -> dict[str, Any]:
        # Turn 0 is the prompt: what it quotes of other conversations is not this rollout's doing.
        messages = [e.message for e in self.added if e.turn and not e.synthetic]
        final = [m for m in messages if isinstance(m, AssistantMessage)]
        contexts = [
            Context(start=e.start, kept=e.kept, summary_index=e.summary_index, reason=e.reason)
            for e in self.whole
            if isinstance(e, ev.ContextStarted)
        ]
        if not contexts or contexts[0].start:  # the first one begins without an event
            contexts.insert(0, Context(start=0, kept=[], summary_index=None, reason=""))
        starts = [e for e in self.whole if isinstance(e, ev.CallStarted)]
        images: list[Image] = []
        openai = (to_openai(e.message, parsed_arguments=True) for e in self.added)
        forms = [without_images(form, images) for form in openai]
        return {
            "turns": len(
                {e.turn for e in starts if e.purpose == "agent" and e.agent == self.agent}
            ),
            "final_response": self._final_response(final),
            "messages": [_json(form) for form in forms],
            "message_info": [
                _info(e, f["content"]) for e, f in zip(self.added, forms, strict=True)
            ],
            "image_data": images,
            "contexts": contexts,
        }

    def _final_response(self, answers: list[AssistantMessage]) -> str | None:
        if self.ended.final_response is not None:
            return self.ended.final_response
        return answers[-1].content if answers else None

    def _usage_columns(self) -> dict[str, Any]:
        thrown = thrown_away(self.stream)
        calls = [_call(s, self.ends.get(s.call_id), thrown.get(s.call_id)) for s in self.starts]
        ends = list(self.ends.values())
        reported = [e.usage for e in ends if e.usage is not None]
        unknown = len(self.starts) - sum(_settled(e) for e in ends)
        spending = [e for e in ends if e.outcome != "refused"]
        unpriced = len(self.starts) - (len(ends) - len(spending))
        unpriced -= sum(e.cost_usd is not None for e in spending)
        costs = [e.cost_usd for e in spending if e.cost_usd is not None]
        return {
            "calls": calls,
            "usage": total_usage(reported, unknown_calls=unknown),
            "cost_usd": None if unpriced else float(sum(costs)),
            "unpriced_calls": unpriced,
            "served_models": sorted({e.served_model for e in ends if e.served_model}),
        }

    def _tools(self) -> dict[str, Any]:
        offered = [e.tools for e in self.whole if isinstance(e, ev.ToolsOffered)]
        results = [
            e
            for e in self.added
            if e.turn and isinstance(e.message, ToolMessage) and not e.compressed
        ]
        stats: dict[str, list[ev.MessageAdded]] = {}
        for e in results:
            stats.setdefault(_tool_name(e.message) or "", []).append(e)
        return {
            "tools": _json(offered[-1] if offered else []),
            "tool_call_count": len(results),
            "tool_stats": [_stat(tool, used) for tool, used in sorted(stats.items())],
        }

    def _timing(self) -> Timing:
        leased = [e.seconds for e in self.stream if isinstance(e, ev.SandboxLeased)]
        calls = {e.call_id for e in self.starts if e.agent == self.agent}
        return Timing(
            queued_s=self.begun.queued_s,
            sandbox_s=sum(leased),
            model_s=sum(e.latency_s for e in self.ends.values() if e.call_id in calls),
            tool_s=sum(e.seconds or 0.0 for e in self.stream if isinstance(e, ev.MessageAdded)),
            waiting_s=sum(e.seconds for e in self.stream if isinstance(e, ev.Waited)),
            verify_s=sum(e.seconds for e in self.stream if isinstance(e, ev.Graded)),
            total_s=max(0.0, self.ended.finished_at - self.begun.started_at),
        )

    def _environment_columns(self) -> dict[str, Any]:
        leased = [e for e in self.stream if isinstance(e, ev.SandboxLeased)]
        if not leased:
            return {"sandbox": None}
        e = leased[-1]
        record = SandboxRecord(
            backend=e.backend, image=e.image, digest=e.digest, limits=_json(e.limits)
        )
        return {"sandbox": record}


def _json(value: Any) -> str:
    return _encode(value).decode()


def _portable(value: dict[str, Any]) -> str:
    return _json(value if is_portable(value) else {UNPARSED: _json(value)})


def _tool_name(message: Message) -> str | None:
    return message.name if isinstance(message, ToolMessage) else None


def _info(e: ev.MessageAdded, content: Any) -> MessageInfo:
    message = e.message
    raw_content, raw_arguments, details = None, None, None
    if isinstance(message, AssistantMessage):
        raw_content = message.raw_content
        if message.tool_calls:
            raw_arguments = [c.arguments for c in message.tool_calls]
        if message.reasoning_details is not None:
            details = _json(message.reasoning_details)
    elif e.raw_text is not None:
        raw_content = e.raw_text
    return MessageInfo(
        role=message.__struct_config__.tag,  # type: ignore[arg-type]
        turn=e.turn,
        context=e.context,
        synthetic=e.synthetic,
        tool_name=_tool_name(message),
        tool_ok=e.tool_ok,
        chars=len(content) if isinstance(content, str) else len(_json(content)),
        raw_content=raw_content,
        raw_arguments=raw_arguments,
        reasoning_details=details,
    )


def _stat(tool: str, used: list[ev.MessageAdded]) -> ToolStat:
    ok = sum(e.tool_ok is not False for e in used)
    seconds = sum(e.seconds or 0.0 for e in used)
    return ToolStat(tool=tool, calls=len(used), ok=ok, errors=len(used) - ok, seconds=seconds)


def _redrawn(
    starts: Sequence[ev.CallStarted], ends: Mapping[str, ev.CallEnded]
) -> dict[str, float]:
    """Return the metric of answers that were sampled again."""
    continued = {s.continues for s in starts}
    latest = {(s.purpose, s.agent, s.turn): s.call_id for s in starts}
    number = sum(
        s.call_id not in continued and s.call_id != latest[s.purpose, s.agent, s.turn]
        for s in starts
        if (end := ends.get(s.call_id)) is not None and end.outcome == "cut"
        if end.usage is None or end.usage.output_tokens != 0
    )
    return {REDRAWN: float(number)} if number else {}


def thrown_away(stream: Iterable[ev.Event]) -> dict[str, str]:
    """call_id -> why the answer of that call was thrown away: `discarded: empty answer`."""
    latest: dict[tuple[str, int], str] = {}
    found = {}
    for e in stream:
        if isinstance(e, ev.CallStarted) and e.purpose == "agent":
            latest[e.agent, e.turn] = e.call_id
        elif isinstance(e, ev.AnswerDiscarded) and (e.agent, e.turn) in latest:
            found[latest[e.agent, e.turn]] = f"discarded: {e.why}"
    return found


def _call(start: ev.CallStarted, end: ev.CallEnded | None, thrown: str | None) -> Call:
    usage = (end.usage if end else None) or Usage()
    return Call(
        call_id=start.call_id,
        turn=start.turn,
        purpose=start.purpose,
        agent=start.agent,
        model=(end.served_model if end else None) or start.model,
        finish_reason=end.finish_reason if end else None,
        input_tokens=usage.input_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        output_tokens=usage.output_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cost_usd=end.cost_usd if end else None,
        latency_s=end.latency_s if end else None,
        retries=end.retries if end else 0,
        request_id=end.request_id if end else None,
        outcome=end.outcome if end else "unknown",
        error=end.error or thrown if end else None,
        started_at=_micros(start.started_at),
        policy_version=end.policy_version if end else None,
        usage_raw=end.usage_raw if end else None,
    )
