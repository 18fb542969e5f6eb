"""OpenTelemetry spans of rollouts, as a receiver and an application's provider get them."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batch_runner import Silent, arun_batch
from hermes_rl import load_run
from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.telemetry import open_telemetry
from hermes_rl.testing import FakeServer

STEPS = [{"run": "echo hi"}, {"calls": [{"name": "terminal", "arguments": "{"}]}, "Done."]
ROWS = [{"id": f"t{n}", "prompt": f"Do {n}\nSCRIPT: " + json.dumps(STEPS)} for n in range(3)]


class Receiver(ThreadingHTTPServer):
    """Takes traces by OTLP over HTTP."""

    daemon_threads = True

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.spans = status, list[Any]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield running
        running.shutdown()
        thread.join()


def config(server: FakeServer, out: Path, otel: str) -> Any:
    return parse_config(
        {
            "dataset": {"path": ROWS},
            "model": {"name": "fake", "temperature": 0.5},
            "agent": {"preset": "rl"},
            "endpoint": {"base_url": server.base_url},
            "sandbox": {"backend": "none"},
            "run": {"out": str(out), "workers": 0, "allow_unsandboxed": True, "otel": otel},
        }
    )


def attributes(span: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        if kind == "array_value":
            return [value(inner) for inner in one.array_value.values]
        return getattr(one, kind)

    return {pair.key: value(pair.value) for pair in span.attributes}


async def test_each_rollout_is_a_trace_of_its_calls_and_tools(
    server: FakeServer, receiver: Receiver, tmp_path: Path
) -> None:
    report = await arun_batch(config(server, tmp_path / "run", "spans"), progress=Silent())
    assert report.done == len(ROWS)
    rows = load_run(tmp_path / "run").trajectories.set_index("trajectory_id")
    traces: dict[bytes, list[Any]] = {}
    for span in receiver.spans:
        traces.setdefault(span.trace_id, []).append(span)
    assert len(traces) == len(ROWS)
    for spans in traces.values():
        (root,) = [span for span in spans if not span.parent_span_id]
        about = attributes(root)
        row = rows.loc[about["gen_ai.conversation.id"]]
        assert (root.name, about["gen_ai.operation.name"]) == (
            "invoke_agent hermes_rl",
            "invoke_agent",
        )
        assert about["gen_ai.usage.input_tokens"] == row["usage"]["input_tokens"]
        assert about["gen_ai.usage.output_tokens"] == row["usage"]["output_tokens"]
        below = [span for span in spans if span.parent_span_id == root.span_id]
        assert len(below) == len(spans) - 1
        names = [span.name for span in sorted(below, key=lambda span: span.start_time_unix_nano)]
        chat, tool = "chat fake", "execute_tool terminal"
        assert names == ["hermes_rl.sandbox", chat, tool, chat, tool, chat]
        calls = [attributes(span) for span in below if span.name == chat]
        assert sum(c["gen_ai.usage.output_tokens"] for c in calls) == row["usage"]["output_tokens"]
        assert {c["gen_ai.request.temperature"] for c in calls} == {0.5}
        assert {(c["server.address"], c["server.port"]) for c in calls} == {
            ("127.0.0.1", int(server.base_url.split(":")[2].split("/")[0]))
        }
        assert all(c["gen_ai.response.finish_reasons"] for c in calls)
        tools = [span for span in below if span.name == tool]
        assert [attributes(span).get("error.type") for span in tools] == [None, "tool_error"]
        for span in below:
            assert root.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert not any("message" in key or "result" in key for key in about)
        assert not any("echo hi" in str(attributes(span)) for span in spans)


async def test_content_is_in_spans_only_on_request(
    server: FakeServer, receiver: Receiver, tmp_path: Path
) -> None:
    await arun_batch(config(server, tmp_path / "run", "content"), progress=Silent())
    found = [attributes(span) for span in receiver.spans]
    tool = next(a for a in found if a.get("gen_ai.operation.name") == "execute_tool")
    assert json.loads(tool["gen_ai.tool.call.arguments"]) == {"command": "echo hi"}
    assert json.loads(tool["gen_ai.tool.call.result"])["output"] == "hi\n"
    root = next(a for a in found if a.get("gen_ai.operation.name") == "invoke_agent")
    assert root["gen_ai.system_instructions"].startswith("You are an agent")
    assert [m["role"] for m in json.loads(root["gen_ai.input.messages"])] == ["user"]
    assert json.loads(root["gen_ai.output.messages"])[-1]["content"] == "Done."


async def test_rows_are_the_same_without_spans_and_without_a_receiver(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    rows = []
    for otel in ("off", "spans"):
        out = tmp_path / otel
        report = await arun_batch(config(server, out, otel), progress=Silent())
        assert report.done == len(ROWS)
        frame = load_run(out).trajectories.sort_values("row_index")
        rows.append(
            [(list(m), h) for m, h in zip(frame["messages"], frame["config_hash"], strict=True)]
        )
    assert rows[0] == rows[1]


APPLICATION = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from hermes_rl import AIAgent, ModelConfig

memory, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(memory))
trace.set_tracer_provider(provider)
model = ModelConfig(name="m", base_url=sys.argv[1], api_key="k")
with AIAgent(model, toolsets=[], otel="spans", session_id="s-1") as agent:
    agent.chat('Hello\\nSCRIPT: ["Hi."]')
spans = memory.get_finished_spans()
print(json.dumps([[s.name, s.attributes.get("gen_ai.conversation.id")] for s in spans]))
"""


async def test_an_application_with_a_provider_gets_the_spans(server: FakeServer) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", APPLICATION, server.base_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["invoke_agent hermes_rl", "s-1"], ["chat m", None]]


OFF = """
import sys
from hermes_rl import AIAgent
with AIAgent("noop", toolsets=[]) as agent:
    agent.chat("Hello")
assert not any(name.startswith("opentelemetry.sdk") for name in sys.modules)
print("off")
"""


def test_nothing_is_imported_without_spans() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFF], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "off\n", done.stderr
    with pytest.raises(UserError, match="otel must be off, spans or content, not 'yes'"):
        open_telemetry("yes")
