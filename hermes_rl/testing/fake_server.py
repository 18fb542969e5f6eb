"""A fake model server over a real socket: deterministic, stateless, fast, and with a log of its
own.

    python -m hermes_rl.testing.fake_server --faults '{"seed": 1, "mixed": 0.2}' --log served.jsonl

prints one JSON line, `{"port": N, "base_url": ...}`, and serves until it gets SIGTERM or SIGINT, or
its standard input closes when `--until-eof` is given. In a test:

    async with FakeServer(FakeConfig(script="echo-2")) as server:
        client = connect(Endpoint(server.base_url))

The log says of each request what this server did: `served` (a complete answer), `refused` (an error
before any work), `cut` (worked, and the answer was lost on purpose), `dropped` (the client hung up
before the answer). It is written before the answer's first byte, so it can be compared call by call
with what a client recorded, however either of them was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path
from types import TracebackType

import msgspec

from hermes_rl.models.dialects.chat_server import WireRequest, decode_request
from hermes_rl.testing.answers import answer_bytes
from hermes_rl.testing.faults import (
    BREAKS,
    REFUSALS,
    FaultPlan,
    Refusal,
    plan_from_json,
    refusal_body,
)
from hermes_rl.testing.scripts import ScriptError, Step, step_for, usage_of
from hermes_rl.testing.served_log import Entry, LogOutcome, ServedLog
from hermes_rl.testing.wire import LAST_CHUNK, Connection, Incoming, chunked, head
from hermes_rl.usage import Usage


@dataclass(frozen=True)
class FakeConfig:
    """What the server is like."""

    script: str = "echo"
    """For models whose name is no script."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    key: str | None = None
    """When set, other keys get 401."""
    models: tuple[str, ...] = ()
    """When set, other models get 404."""
    latency_s: float = 0.0
    """Before the first byte of each answer."""
    log: Path | None = None
    """Appended to, one JSON line per request."""
    keep: bool = True
    """Keep the log in `entries` too."""
    hold_at: int | None = None
    """From this request on (1-based) nothing is answered any more."""
    port: int = 0


class FakeServer:
    """The server, as an async context manager.

    Args:
        on_request: called with the number of each model request before it is answered.
    """

    def __init__(
        self, config: FakeConfig | None = None, on_request: Callable[[int], None] | None = None
    ) -> None:
        self.config = config or FakeConfig()
        self.requests = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.connections: set[Connection] = set()
        self.connections_made = 0
        self._on_request = on_request
        self._pending: dict[Connection, _Job] = {}
        self._server: asyncio.Server | None = None
        self._log = ServedLog(None, False)
        self._prefix = os.urandom(4).hex()

    async def __aenter__(self) -> FakeServer:
        loop = asyncio.get_running_loop()
        self._log = ServedLog(self.config.log, self.config.keep)
        self._server = await loop.create_server(
            self._accept,
            "127.0.0.1",
            self.config.port,
            backlog=4096,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening and hang up on everybody; what was owed is logged as dropped."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self.connections):
            if connection in self._pending:
                self.lost(connection)
            connection.close()
        await self._server.wait_closed()
        self._server = None
        self._log.close()

    @property
    def entries(self) -> list[Entry]:
        """What it did so far, in order; empty unless the configuration keeps it."""
        return self._log.entries

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def base_url(self) -> str:
        """What a client takes as `base_url`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def _accept(self) -> Connection:
        self.connections_made += 1
        return Connection(self, self.connections)

    def handle(self, connection: Connection, request: Incoming) -> None:
        """See `Handler.handle`."""
        if request.method == "GET":
            self._tell(connection, request)
            return
        self.requests += 1
        n = self.requests
        job = _Job(n, f"req-{self._prefix}-{n}", request.headers.get("x-hermes-call-id"))
        if self._on_request is not None:
            self._on_request(n)
        refusal = self._admit(request, job)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        if self.config.hold_at is not None and n >= self.config.hold_at:
            self._pending[connection] = job
        elif refusal is not None:
            self._refuse(connection, job, refusal)
        elif (delay := self._delay(job)) > 0:
            self._pending[connection] = job
            job.timer = asyncio.get_running_loop().call_later(delay, self._answer, connection, job)
        else:
            self._answer(connection, job)

    def lost(self, connection: Connection) -> None:
        """See `Handler.lost`."""
        job = self._pending.pop(connection, None)
        if job is not None:
            if job.timer is not None:
                job.timer.cancel()
            self._end(job, "dropped")

    def _tell(self, connection: Connection, request: Incoming) -> None:
        """The list of models; not a model request, so it is neither counted nor logged."""
        names = self.config.models or (self.config.script,)
        listed = {"object": "list", "data": [{"id": n, "object": "model"} for n in names]}
        status, body = 200, msgspec.json.encode(listed)
        if not self._knows(request):
            status, body = 401, refusal_body(REFUSALS["auth"])
        elif not request.path.endswith(("/models", "/health")):
            status, body = 404, b"{}"
        kind = {"content-type": "application/json"}
        connection.send(head(status, kind, len(body)) + body)

    def _knows(self, request: Incoming) -> bool:
        key, sent = self.config.key, request.headers.get("authorization", "")
        return key is None or hmac.compare_digest(sent.encode(), f"Bearer {key}".encode())

    def _admit(self, request: Incoming, job: _Job) -> Refusal | None:
        """Fill the job in; a refusal when it cannot be served."""
        if not request.path.endswith("/chat/completions"):
            return Refusal(404, "not_found_error", None, f"No route {request.path}.")
        if not self._knows(request):
            return REFUSALS["auth"]
        try:
            job.request = decode_request(request.body)
            job.step = step_for(job.request, self.config.script)
        except (ScriptError, ValueError) as error:
            return Refusal(400, "invalid_request_error", None, str(error))
        if self.config.models and job.request.model not in self.config.models:
            return REFUSALS["not_found"]
        job.body_hash = hashlib.blake2b(request.body, digest_size=12).hexdigest()
        nonce = job.call_id or request.headers.get("x-stainless-retry-count", "")
        identity = f"{job.call_id or job.body_hash}:{nonce}".encode()
        job.fault = job.step.fault or self.config.faults.draw(identity)
        return REFUSALS.get(job.fault or "")

    def _delay(self, job: _Job) -> float:
        assert job.step is not None
        extra = {"slow": self.config.faults.slow_s, "stall_first": self.config.faults.stall_s}
        return self.config.latency_s + job.step.latency_s + extra.get(job.fault or "", 0.0)

    def _refuse(self, connection: Connection, job: _Job, refusal: Refusal) -> None:
        headers = {"content-type": "application/json", "x-request-id": job.request_id}
        wait = self.config.faults.retry_after_s
        if job.fault == "rate_limit_after":
            headers["retry-after"] = f"{wait:g}"
        elif job.fault == "rate_limit_date":
            headers["retry-after"] = formatdate(time.time() + wait + 1, usegmt=True)
        if refusal.status == 429:
            headers["x-ratelimit-remaining-requests"] = "0"
        body = refusal_body(refusal)
        self._end(job, "refused")
        connection.send(head(refusal.status, headers, len(body)) + body)

    def _answer(self, connection: Connection, job: _Job) -> None:
        self._pending.pop(connection, None)
        request, step = job.request, job.step
        assert request is not None
        assert step is not None
        usage = usage_of(request, step)
        stream = bool(request.stream)
        answer_id = f"chatcmpl-{job.body_hash}"
        body = answer_bytes(request, step, usage, fault=job.fault, answer_id=answer_id)
        reported = request.include_usage and job.fault not in ("no_usage", "partial_usage")
        broken = job.fault in BREAKS and job.fault != "stall_first"
        self._end(job, "cut" if broken else "served", usage, reported=reported and not broken)
        kind = "text/event-stream" if stream else "application/json"
        headers = {"content-type": kind, "x-request-id": job.request_id}
        if broken:
            self._break(connection, job.fault, headers, body, stream)
        elif stream:
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
        usage = usage or Usage()
        self._log.add(
            Entry(
                n=job.n,
                request_id=job.request_id,
                call_id=job.call_id,
                model=job.request.model if job.request else None,
                outcome=outcome,
                at=time.time(),
                prompt_tokens=usage.input_tokens or 0,
                completion_tokens=usage.output_tokens or 0,
                cached_tokens=usage.cache_read_tokens or 0,
                reasoning_tokens=usage.reasoning_tokens or 0,
                reported=reported,
                fault=job.fault,
            )
        )


class _Job:
    """One request on its way."""

    __slots__ = ("body_hash", "call_id", "fault", "n", "request", "request_id", "step", "timer")

    def __init__(self, n: int, request_id: str, call_id: str | None) -> None:
        self.n, self.request_id, self.call_id = n, request_id, call_id
        self.request: WireRequest | None = None
        self.step: Step | None = None
        self.fault: str | None = None
        self.body_hash = ""
        self.timer: asyncio.TimerHandle | None = None


def _config_from(arguments: argparse.Namespace) -> FakeConfig:
    config = FakeConfig(
        script=arguments.script,
        key=arguments.key,
        models=tuple(arguments.model),
        latency_s=arguments.latency,
        log=arguments.log,
        keep=False,
        hold_at=arguments.hold_at,
        port=arguments.port,
    )
    return replace(config, faults=plan_from_json(arguments.faults))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fake_server", description=__doc__.split("\n\n")[0])
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--script", default="echo", help="for models whose name is no script")
    parser.add_argument("--faults", default="{}", help="a fault plan as JSON")
    parser.add_argument("--log", type=Path, help="appended to, one JSON line per request")
    parser.add_argument("--key", help="the API key that clients must send")
    parser.add_argument("--model", action="append", default=[], help="serve only these")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--hold-at", type=int, help="answer nothing from this request on")
    parser.add_argument("--notify-at", type=int, help="print a line at this request")
    parser.add_argument("--until-eof", action="store_true", help="stop when stdin closes")
    return parser


async def _serve(arguments: argparse.Namespace) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def notify(n: int) -> None:
        if n in (arguments.notify_at, arguments.hold_at):
            _say({"request": n})

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if arguments.until_eof:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    async with FakeServer(_config_from(arguments), notify) as server:
        _say({"port": server.port, "base_url": server.base_url, "pid": os.getpid()})
        await stop.wait()


def _say(form: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(form).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(_parser().parse_args()))
