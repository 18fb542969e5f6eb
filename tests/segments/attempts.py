"""Build the events of one attempt call by call, and the segments of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_rl import events as ev
from hermes_rl.models import Conversation, ModelRequest, Sampling, TokenCapture
from hermes_rl.models.tokens import TokenGraph, record_tokens
from hermes_rl.record import Segment
from hermes_rl.segments import captured_calls, verify_segments, with_segments
from hermes_rl.trajectory import fold
from hermes_rl.usage import Usage

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0)

BEGUN = ev.Begun(
    key=ev.AttemptKey(unit_id="a" * 32, epoch=1, attempt=0),
    started_at=1000.0,
    run_id="run",
    group_id="b" * 32,
    member=0,
    repeat=0,
    row_index=0,
    task_id="task",
    task_hash="t" * 64,
    config_hash="c" * 64,
    seed=0,
    prompt="do it",
    model="policy",
    api_mode="chat_completions",
    endpoint="exact:1",
)


def verify_all(segments: Sequence[Segment], events: Sequence[ev.Event]) -> None:
    """Check segments against every rule and against the events of their attempt."""
    calls = captured_calls(events)
    ok = any(isinstance(e, ev.Ended) and e.cause is None for e in events)
    verify_segments(segments, TokenGraph.of(calls.tokens, calls.agents), calls.calls, ok=ok)


@dataclass
class AttemptBuilder:
    """The events of an attempt. Methods that add events return the builder."""

    events: list[ev.Event] = field(default_factory=lambda: [BEGUN])
    graph: TokenGraph = field(default_factory=TokenGraph)
    sampling: Sampling = PLAIN
    extra: dict[str, Any] = field(default_factory=dict)

    def start(self, name: str, turn: int, **label: Any) -> "AttemptBuilder":
        label = {"purpose": "agent", "model": "policy", **label}
        self.events.append(ev.CallStarted(call_id=name, turn=turn, started_at=1.0, **label))
        return self

    def end(self, name: str, prompt, sampled, *, agent="main", reason="stop", version=None, **more):
        outcome = more.pop("outcome", "ok")
        capture = {"logprobs": (-0.5,) * len(sampled), "logprobs_kind": "sampling", **more}
        tokens = TokenCapture(prompt_ids=tuple(prompt), completion_ids=tuple(sampled), **capture)
        request = ModelRequest(
            "policy", Conversation(), "", sampling=self.sampling, extra=self.extra
        )
        event = record_tokens(self.graph, name, agent, tokens, request)
        assert event is not None
        end = ev.CallEnded(
            call_id=name,
            outcome=outcome,
            latency_s=0.1,
            finish_reason=reason,
            usage=Usage(input_tokens=len(prompt), output_tokens=len(sampled)),
            policy_version=version,
        )
        self.events += [event, end]
        return self

    def call(self, name: str, turn: int, prompt, sampled, **more: Any) -> "AttemptBuilder":
        label = {k: more.pop(k) for k in ("purpose", "model") if k in more}
        self.start(name, turn, agent=more.get("agent", "main"), **label)
        return self.end(name, prompt, sampled, **more)

    def discard(self, turn: int, agent: str = "main") -> "AttemptBuilder":
        self.events.append(ev.AnswerDiscarded(turn=turn, why="empty answer", agent=agent))
        return self

    def finish(self, reason: str = "answered", cause: str | None = None) -> list[Segment]:
        """End the attempt and return its verified segments."""
        ended = ev.Ended(finished_at=2.0, end_reason=reason, cause=cause)
        self.events += [ev.Graded(reward=0.5), ended]
        _, segments = with_segments(self.events, fold(self.events))
        verify_all(segments, self.events)
        return list(segments)
