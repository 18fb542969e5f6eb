"""OpenTelemetry spans of rollouts, by the semantic conventions for generative AI.

The spans of a rollout are made from its events when it has ended, so that a rollout without them
costs nothing: one `invoke_agent` with a `chat` for each model call and an `execute_tool` for each
tool call below it. The conventions are in development; `_USAGE` and `_REQUEST` are the names of
semantic-conventions-genai of October 2026.

This is the one file that imports OpenTelemetry (extra `otel`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hermes_rl import __version__
from hermes_rl import events as ev
from hermes_rl.errors import UserError
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    text_of,
    to_openai,
)
from hermes_rl.text import SECRETS
from hermes_rl.trajectory import fold

_log = logging.getLogger(__name__)

Spans = Literal["off", "spans", "content"]
"""`content` adds messages, tool arguments and results, without secrets of this process."""

_USAGE = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cache_read_tokens": "gen_ai.usage.cache_read.input_tokens",
    "cache_write_tokens": "gen_ai.usage.cache_write.input_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
}
_REQUEST = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "reasoning": "gen_ai.request.reasoning.level",
}
_PROVIDERS = {"anthropic_messages": "anthropic", "played": "hermes_rl"}
"""API mode -> `gen_ai.provider.name`; all others speak OpenAI's protocols."""
_FLUSH_MS = 5_000


class Telemetry:
    """Where spans go: the application's own provider, or one that sends them by OTLP to
    `OTEL_EXPORTER_OTLP_ENDPOINT`.

    Args:
        content: put texts into spans.

    Raises: UserError when OpenTelemetry is not installed.
    """

    def __init__(self, *, content: bool) -> None:
        self.content = content
        self._provider: Any = None
        try:
            from opentelemetry import trace

            provider = trace.get_tracer_provider()
            if isinstance(provider, trace.ProxyTracerProvider):
                provider = self._provider = _otlp_provider()
        except ImportError:
            raise UserError(
                "OpenTelemetry is not installed: pip install 'hermes-rl[otel]', or leave otel out"
            ) from None
        self._trace = trace
        self._tracer = provider.get_tracer("hermes_rl", __version__)

    def close(self) -> None:
        """Send what is left, for a few seconds at most; blocks. Idempotent."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.force_flush(_FLUSH_MS)
            provider.shutdown()

    def export(self, events: Sequence[ev.Event]) -> None:
        """Make the spans of a rollout that has ended. Raises nothing."""
        try:
            _Rollout(self, list(events)).export()
        except Exception:  # spans are an extra: they must not cost a rollout
            _log.exception("the spans of a rollout could not be made")

    def span(
        self,
        name: str,
        attributes: Mapping[str, Any],
        times: tuple[float, float],
        parent: Any = None,
        error: str | None = None,
    ) -> Any:
        """A span that is over; returns the context for spans below it.

        Args:
            times: Unix times in seconds at which it started and ended.
        """
        kinds, kind = self._trace.SpanKind, attributes.get("gen_ai.operation.name")
        start, end = (round(seconds * 1e9) for seconds in times)
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=kinds.CLIENT if kind == "chat" else kinds.INTERNAL,
            attributes={k: v for k, v in attributes.items() if v is not None},
            start_time=start,
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_time=max(start, end))
        return self._trace.set_span_in_context(span)


def open_telemetry(spans: str | None) -> Telemetry | None:
    """Telemetry as a user switches it; None for `off`. Raises: UserError."""
    if spans not in (None, "off", "spans", "content"):
        raise UserError(f"otel must be off, spans or content, not {spans!r}")
    return None if spans in (None, "off") else Telemetry(content=spans == "content")


def _otlp_provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "hermes_rl", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


@dataclass
class _Rollout:
    """The events of one rollout on their way to spans."""

    telemetry: Telemetry
    events: list[ev.Event]

    def export(self) -> None:
        begun = next(event for event in self.events if isinstance(event, ev.Begun))
        row = fold(self.events)
        started, finished = begun.started_at, row.finished_at / 1e6
        usage = {name: getattr(row.usage, field) for field, name in _USAGE.items()}
        about = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": begun.env_name or "hermes_rl",
            "gen_ai.agent.version": __version__,
            "gen_ai.conversation.id": str(begun.metadata.get("session_id") or row.trajectory_id),
            **self._model(begun, begun.model),
            **usage,
            "hermes_rl.trajectory_id": row.trajectory_id,
            "hermes_rl.run_id": row.run_id,
            "hermes_rl.task_id": row.task_id,
            "hermes_rl.end_reason": row.end_reason,
            "hermes_rl.turns": row.turns,
            "hermes_rl.cost_usd": row.cost_usd,
            "gen_ai.evaluation.score.value": row.reward,
            **self._content(),
        }
        below = self.telemetry.span(
            f"invoke_agent {about['gen_ai.agent.name']}",
            about,
            (started, finished),
            error=row.cause,
        )
        self._steps(begun, below, started)

    def _steps(self, begun: ev.Begun, parent: Any, cursor: float) -> None:
        """The calls of models and tools, below the agent's span."""
        ends = {e.call_id: e for e in self.events if isinstance(e, ev.CallEnded)}
        calls: dict[str, ToolCall] = {}
        for event in self.events:
            if isinstance(event, ev.SandboxLeased):
                times = cursor, cursor + event.seconds
                about = {"hermes_rl.sandbox.backend": event.backend}
                self.telemetry.span("hermes_rl.sandbox", about, times, parent)
                cursor = times[1]
            elif isinstance(event, ev.CallStarted):
                cursor = self._chat(begun, event, ends.get(event.call_id), parent)
            elif isinstance(event, ev.MessageAdded) and isinstance(event.message, AssistantMessage):
                calls |= {call.id: call for call in event.message.tool_calls}
            elif isinstance(event, ev.MessageAdded) and event.seconds is not None:
                cursor = self._tool(event, calls, parent, cursor)

    def _chat(
        self, begun: ev.Begun, start: ev.CallStarted, end: ev.CallEnded | None, parent: Any
    ) -> float:
        usage = None if end is None else end.usage
        outcome = "unknown" if end is None else end.outcome
        times = start.started_at, start.started_at + (0.0 if end is None else end.latency_s)
        about = {
            "gen_ai.operation.name": "chat",
            **self._model(begun, start.model),
            **{_REQUEST[k]: v for k, v in begun.sampling.items() if k in _REQUEST},
            **{name: getattr(usage, field, None) for field, name in _USAGE.items()},
            "gen_ai.response.model": end.served_model if end else None,
            "gen_ai.response.id": end.request_id if end else None,
            "gen_ai.response.finish_reasons": [end.finish_reason]
            if end is not None and end.finish_reason
            else None,
            "hermes_rl.turn": start.turn,
            "hermes_rl.purpose": start.purpose,
            "hermes_rl.call_id": start.call_id,
            "hermes_rl.cost_usd": end.cost_usd if end else None,
        }
        error = None if outcome == "ok" else outcome
        self.telemetry.span(f"chat {start.model}", about, times, parent, error)
        return times[1]

    def _tool(
        self, event: ev.MessageAdded, calls: Mapping[str, ToolCall], parent: Any, cursor: float
    ) -> float:
        message = event.message
        if not isinstance(message, ToolMessage) or event.seconds is None:
            return cursor
        call = calls.get(message.tool_call_id)
        about: dict[str, Any] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": message.name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": message.tool_call_id,
            "hermes_rl.turn": event.turn,
        }
        if self.telemetry.content:
            about["gen_ai.tool.call.result"] = SECRETS.scrub(message.content)
            about["gen_ai.tool.call.arguments"] = SECRETS.scrub(call.arguments) if call else None
        times = cursor, cursor + event.seconds
        failed = None if event.tool_ok else "tool_error"
        self.telemetry.span(f"execute_tool {message.name}", about, times, parent, failed)
        return times[1]

    def _model(self, begun: ev.Begun, model: str) -> dict[str, Any]:
        host, _, port = begun.endpoint.rpartition(":")
        known = bool(host) and port.isdecimal()
        return {
            "gen_ai.provider.name": _PROVIDERS.get(begun.api_mode, "openai"),
            "gen_ai.request.model": model,
            "server.address": host if known else begun.endpoint,
            "server.port": int(port) if known else None,
        }

    def _content(self) -> dict[str, str]:
        if not self.telemetry.content:
            return {}
        added = [event for event in self.events if isinstance(event, ev.MessageAdded)]
        system = [e.message for e in added if isinstance(e.message, SystemMessage)]
        prompt = [e.message for e in added if not e.turn and e.message not in system]
        output = [e.message for e in added if e.turn]
        return {
            "gen_ai.system_instructions": SECRETS.scrub("\n\n".join(text_of(m) for m in system)),
            "gen_ai.input.messages": _json(prompt),
            "gen_ai.output.messages": _json(output),
        }


def _json(messages: Sequence[Message]) -> str:
    scrubbed = SECRETS.scrub_record(list(messages))
    return json.dumps([to_openai(message) for message in scrubbed], ensure_ascii=False)
