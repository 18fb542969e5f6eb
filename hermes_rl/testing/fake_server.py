"""A fake model server over a real socket: deterministic, stateless and fast, with a log.

    python -m hermes_rl.testing.fake_server --faults '{"seed": 1, "mixed": 0.2}' --log served.jsonl

prints one JSON line, `{"port": N, "base_url": ...}`, and serves until it gets SIGTERM or SIGINT, or
its standard input closes when `--until-eof` is given. In a test:

    async with FakeServer(FakeConfig(script="echo-2")) as server:
        client = connect(Endpoint(server.base_url))

The log has the outcome of each request: `served` (a complete answer), `refused` (an error before
any work), `cut` (the answer was lost on purpose), `dropped` (the client closed the connection
first). It is written before the answer's first byte, so it can be compared call by call with what a
client recorded, even if either of them was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any, Self

import msgspec

from hermes_rl.messages import AssistantMessage
from hermes_rl.models import Completion
from hermes_rl.testing.conditions import Conditions, Limits, RateLimits, needs_of
from hermes_rl.testing.dialects import CHAT, Wire, any_key, wire_of
from hermes_rl.testing.dialects.base import ServedRequest, ServerDialect
from hermes_rl.testing.dialects.chat import ChatServer
from hermes_rl.testing.faults import (
    BREAKS,
    REFUSALS,
    FaultPlan,
    Refusal,
    conditional_refusal,
    over_window,
    plan_from_json,
    refusal_body,
    refusal_for,
)
from hermes_rl.testing.http_server import (
    LAST_CHUNK,
    Connection,
    Incoming,
    Server,
    chunked,
    head,
    print_json,
    program_parser,
    serve,
)
from hermes_rl.testing.scripts import Play, Step, TurnCounts, step_for, usage_of
from hermes_rl.testing.server_logs import Entry, LineLog, LogOutcome
from hermes_rl.usage import Usage


@dataclass(frozen=True)
class FakeConfig:
    """Configuration of the server."""

    script: str = "echo"
    """For models whose name is not a script."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    key: str | None = None
    """If set, other keys get 401."""
    models: tuple[str, ...] = ()
    """If set, other models get 404."""
    latency_s: float = 0.0
    """Before the first byte of each answer."""
    log: Path | None = None
    """Appended to, one JSON line per request."""
    keep: bool = True
    """Whether `entries` keeps the log too."""
    hold_at: int | None = None
    """Answer no request from this one (1-based) on, GET requests included."""
    gather: int = 0
    """Hold answers until this many requests are in flight, then send them together."""
    port: int = 0
    rate: RateLimits | None = None
    """What an account may use in a minute."""
    conditions: Conditions = field(default_factory=Conditions)
    """Its clock, outages and prices."""
    plays: Mapping[str, Play] = field(default_factory=dict)
    """Model -> function that plays it instead of a script."""
    window: int | None = None
    """Tokens of prompt and answer together; a request for more is refused, with the numbers."""
    pages: Mapping[str, Any] = field(default_factory=dict)
    """Path -> JSON of a GET request, in the place of the list of models."""


class FakeServer(Server):
    """The server, as an async context manager.

    Args:
        on_request: called with the number of each model request before it is answered.
    """

    def __init__(
        self, config: FakeConfig | None = None, on_request: Callable[[int], None] | None = None
    ) -> None:
        self.config = config or FakeConfig()
        super().__init__(self.config.port)
        self.in_flight = 0
        self.peak_in_flight = 0
        self.connections_made = 0
        self._on_request = on_request
        self._pending: dict[Connection, _Job] = {}
        self._log = LineLog[Entry](keep=False)
        self._turn_counts = TurnCounts()
        self._started = time.monotonic()
        rate = self.config.rate
        self.limits = None if rate is None else Limits(rate)
        """The buckets; `limits.factor` changes the quota of all accounts."""

    async def __aenter__(self) -> Self:
        self._log = LineLog(self.config.log, keep=self.config.keep)
        self._started = time.monotonic()
        return await super().__aenter__()

    async def aclose(self) -> None:
        """Stop listening; pending requests are logged as dropped."""
        for connection in list(self._pending):
            self.lost(connection)
        await super().aclose()
        self._log.close()

    @property
    def now(self) -> float:
        """Seconds of the server's clock since its start."""
        return (time.monotonic() - self._started) * self.config.conditions.clock_scale

    @property
    def entries(self) -> list[Entry]:
        """The log so far, in order; empty unless the configuration keeps it."""
        return self._log.entries

    def _accept(self) -> Connection:
        self.connections_made += 1
        return super()._accept()

    def handle(self, connection: Connection, request: Incoming) -> None:
        """Answer a model request, now or later, or refuse it."""
        hold_at = self.config.hold_at
        if request.method == "GET":
            if hold_at is None or self.requests < hold_at:
                self._answer_query(connection, request)
            return
        self.requests += 1
        n = self.requests
        call_id = request.headers.get("x-hermes-call-id")
        job = _Job(n, f"req-{self._prefix}-{n}", call_id, wire_of(request.path))
        if self._on_request is not None:
            self._on_request(n)
        refusal = self._admit(request, job)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        if hold_at is not None and n >= hold_at:
            self._pending[connection] = job
        elif refusal is not None:
            self._refuse(connection, job, refusal)
        elif self.config.gather:
            self._gather(connection, job)
        elif (delay := self._delay(job)) > 0:
            self._pending[connection] = job
            job.timer = asyncio.get_running_loop().call_later(delay, self._answer, connection, job)
        else:
            self._answer(connection, job)

    def _gather(self, connection: Connection, job: _Job) -> None:
        self._pending[connection] = job
        if self.in_flight >= self.config.gather:
            for waiting, owed in list(self._pending.items()):
                self._answer(waiting, owed)

    def lost(self, connection: Connection) -> None:
        """Log a pending request as dropped."""
        job = self._pending.pop(connection, None)
        if job is not None:
            if job.timer is not None:
                job.timer.cancel()
            self._end(job, "dropped")

    def _answer_query(self, connection: Connection, request: Incoming) -> None:
        """Answer the list of models, for several providers' clients; not counted or logged."""
        names = self.config.models or (self.config.script,)
        both = {"object": "model", "type": "model", "created": 0, "owned_by": "hermes-rl"}
        since = {"created_at": "2026-01-01T00:00:00Z"}
        data = [{"id": n, "display_name": n, **both, **since} for n in names]
        listed = {"object": "list", "data": data, "has_more": False}
        status, body = 200, msgspec.json.encode(listed)
        if not self._knows(any_key(request.headers)):
            status, body = 401, refusal_body(REFUSALS["auth"], CHAT.dialect)
        elif self.config.conditions.is_out(self.now):
            refusal = REFUSALS[self.config.conditions.outage]
            status, body = refusal.status, refusal_body(refusal, CHAT.dialect)
        elif (page := self.config.pages.get(request.path)) is not None:
            body = msgspec.json.encode(page)
        elif not request.path.endswith(("/models", "/health")):
            status, body = 404, b"{}"
        kind = {"content-type": "application/json"}
        connection.send(head(status, kind, len(body)) + body)

    def _knows(self, sent: str) -> bool:
        key = self.config.key
        return key is None or hmac.compare_digest(sent.encode(), key.encode())

    def _admit(self, request: Incoming, job: _Job) -> Refusal | None:
        """Complete the job; return a refusal when it cannot be served."""
        name = job.dialect.name
        if self.config.conditions.is_out(self.now):
            job.fault = self.config.conditions.outage
            return refusal_for(job.fault, name)
        if job.route is None:
            return Refusal(404, "not_found_error", None, f"No route {request.path}.")
        key = job.dialect.key_of(request.headers)
        if not self._knows(key):
            return refusal_for("auth", name)
        try:
            job.request = job.dialect.decode_request(request.body)
            job.step = step_for(
                job.request, self.config.script, self._turn_counts, self.config.plays
            )
        except ValueError as error:
            return Refusal(400, "invalid_request_error", None, str(error))
        if self.config.models and job.request.model not in self.config.models:
            return refusal_for("not_found", name)
        job.body_hash = hashlib.blake2b(request.body, digest_size=12).hexdigest()
        job.usage = usage_of(job.request, job.step)
        if (refusal := over_window(job.request, job.usage, self.config.window)) is not None:
            return refusal
        if (refusal := self._meter(job, key)) is not None:
            return refusal
        nonce = job.call_id or request.headers.get("x-stainless-retry-count", "")
        identity = f"{job.call_id or job.body_hash}:{nonce}".encode()
        job.fault = job.step.fault or self.config.faults.draw(identity)
        return conditional_refusal(job.fault, job.request, request.body) or refusal_for(
            job.fault, name
        )

    def _meter(self, job: _Job, account: str) -> Refusal | None:
        """Charge the request to its account; return a refusal when it hits a limit."""
        if self.limits is None or job.request is None:
            return None
        verdict = self.limits.admit(account, needs_of(job.request, job.usage), self.now)
        job.headers = self.limits.headers(verdict, job.dialect.name, time.time())
        if verdict.refused is not None:
            job.fault = "rate_limit"
        return verdict.refusal

    def _delay(self, job: _Job) -> float:
        assert job.step is not None
        extra = {"slow": self.config.faults.slow_s, "stall_first": self.config.faults.stall_s}
        return self.config.latency_s + job.step.latency_s + extra.get(job.fault or "", 0.0)

    def _refuse(self, connection: Connection, job: _Job, refusal: Refusal) -> None:
        headers = {"content-type": "application/json", job.wire.id_header: job.request_id}
        wait = self.config.faults.retry_after_s
        if job.fault == "rate_limit_after":
            headers["retry-after"] = f"{wait:g}"
        elif job.fault == "rate_limit_date":
            headers["retry-after"] = formatdate(time.time() + wait + 1, usegmt=True)
        if refusal.status == 429 and not job.headers:
            headers[job.wire.remaining_header] = "0"
        headers |= job.headers
        body = refusal_body(refusal, job.dialect)
        self._end(job, "refused")
        connection.send(head(refusal.status, headers, len(body)) + body)

    def _answer(self, connection: Connection, job: _Job) -> None:
        self._pending.pop(connection, None)
        request, step, dialect = job.request, job.step, job.dialect
        assert request is not None
        assert step is not None
        answer = _completion_of(request, step, job.usage, job.fault)
        answer_id = job.wire.answer_prefix + job.body_hash
        if isinstance(dialect, ChatServer):  # Chat Completions have several reasoning fields
            dialect = ChatServer(step.reasoning_field)
        if request.stream:
            events = dialect.encode_stream(
                answer, answer_id=answer_id, include_usage=request.include_usage
            )
            kind, body = "text/event-stream", b"".join(events)
        else:
            kind, body = "application/json", dialect.encode_answer(answer, answer_id=answer_id)
        reported = request.include_usage and job.fault not in ("no_usage", "partial_usage")
        broken = job.fault in BREAKS and job.fault != "stall_first"
        self._end(job, "cut" if broken else "served", job.usage, reported=reported and not broken)
        headers = {"content-type": kind, job.wire.id_header: job.request_id, **job.headers}
        if broken:
            self._break(connection, job.fault, headers, body, request.stream)
        elif request.stream:
            connection.send(head(200, headers, None) + chunked(body) + LAST_CHUNK)
        else:
            connection.send(head(200, headers, len(body)) + body)

    def _break(
        self,
        connection: Connection,
        fault: str | None,
        headers: dict[str, str],
        body: bytes,
        stream: bool,
    ) -> None:
        half = body[: len(body) // 2]
        if fault == "reset":
            connection.reset()
        elif fault == "garbage":
            text = b"<html><body>Bad gateway</body></html>"
            connection.send(head(200, headers, len(text)) + text)
        else:
            framed = chunked(half) if stream else half
            connection.send(head(200, headers, None if stream else len(body)) + framed, last=False)
            if fault == "cut":
                connection.close()
            else:
                stall = self.config.faults.stall_s
                asyncio.get_running_loop().call_later(stall, connection.close)

    def _end(
        self, job: _Job, outcome: LogOutcome, usage: Usage | None = None, *, reported: bool = False
    ) -> None:
        self.in_flight -= 1
        if not self._log.wanted:
            return
        model = job.request.model if job.request else None
        cost = self.config.conditions.cost(model, usage) if model and usage else None
        usage = usage or Usage()
        self._log.add(
            Entry(
                n=job.n,
                request_id=job.request_id,
                call_id=job.call_id,
                model=model,
                api_mode=job.dialect.name,
                outcome=outcome,
                at=time.time(),
                prompt_tokens=usage.input_tokens or 0,
                completion_tokens=usage.output_tokens or 0,
                cached_tokens=usage.cache_read_tokens or 0,
                cache_write_tokens=usage.cache_write_tokens or 0,
                reasoning_tokens=usage.reasoning_tokens or 0,
                max_tokens=None if job.request is None else job.request.sampling.max_tokens,
                reported=reported,
                dollars=cost,
                fault=job.fault,
            )
        )


@dataclass(eq=False)
class _Job:
    """One request in progress."""

    n: int
    request_id: str
    call_id: str | None
    route: Wire | None
    """None for an unknown one."""
    request: ServedRequest | None = None
    step: Step | None = None
    fault: str | None = None
    body_hash: str = ""
    usage: Usage = field(default_factory=Usage)
    headers: dict[str, str] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None

    @property
    def wire(self) -> Wire:
        return self.route or CHAT

    @property
    def dialect(self) -> ServerDialect:
        return self.wire.dialect


def _completion_of(
    request: ServedRequest, step: Step, usage: Usage, fault: str | None
) -> Completion:
    """Return the answer of a step, changed by its fault."""
    answer = Completion(
        message=step.message,
        finish_reason=step.finish_reason,
        usage=usage,
        served_model=request.model,
    )
    if fault == "no_usage":
        return replace(answer, usage=None)
    if fault == "partial_usage":
        return replace(answer, usage=Usage(input_tokens=usage.input_tokens))
    if fault == "filtered":
        return replace(answer, message=AssistantMessage(), finish_reason="content_filter")
    return replace(answer, finish_reason="abort") if fault == "abort" else answer


# The program


def _parser() -> argparse.ArgumentParser:
    about = "A fake model server over a real socket: deterministic, fast, with a log."
    parser = program_parser("fake_server", about)
    parser.add_argument("--script", default="echo", help="for models without a script name")
    parser.add_argument("--rate", default="null", help="rate limits of an account as JSON")
    parser.add_argument("--conditions", default="{}", help="clock, outages and prices as JSON")
    parser.add_argument("--key", help="the API key that clients must send")
    parser.add_argument("--model", action="append", default=[], help="serve only these")
    parser.add_argument("--window", type=int, help="tokens of the model's context window")
    parser.add_argument(
        "--hold-at", type=int, help="answer nothing from this request on, which is printed"
    )
    return parser


def main() -> None:
    """Serve until a signal, or the end of stdin."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        config = _config(arguments)
    except (msgspec.DecodeError, ValueError) as error:
        parser.error(str(error))

    def notify(n: int) -> None:
        if n == arguments.hold_at:
            print_json({"request": n})

    try:
        asyncio.run(serve(FakeServer(config, notify), until_eof=arguments.until_eof))
    except OSError as error:
        parser.error(str(error))


def _config(arguments: argparse.Namespace) -> FakeConfig:
    """Raises: ValueError and DecodeError for a value that cannot be read."""
    return FakeConfig(
        script=arguments.script,
        faults=plan_from_json(arguments.faults),
        key=arguments.key,
        models=tuple(arguments.model),
        latency_s=arguments.latency,
        log=arguments.log,
        keep=False,
        hold_at=arguments.hold_at,
        window=arguments.window,
        port=arguments.port,
        rate=msgspec.json.decode(arguments.rate.encode(), type=RateLimits | None),
        conditions=msgspec.json.decode(arguments.conditions.encode(), type=Conditions),
    )


if __name__ == "__main__":
    main()
