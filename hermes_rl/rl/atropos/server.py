"""The HTTP side of the trajectory API: the 13 endpoints and fields of Atropos 0.4.0.

FastAPI and uvicorn are imported here, so that only `hermes-rl api` needs them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hmac
import io
import json
import signal
import sqlite3
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

try:
    import uvicorn
    from fastapi import BackgroundTasks, FastAPI, Header, HTTPException, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.middleware.gzip import GZipMiddleware
    from fastapi.responses import JSONResponse, PlainTextResponse
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ImportError(
        "the API server needs fastapi and uvicorn: pip install 'hermes-rl[rl]'"
    ) from error
from pydantic import BaseModel, ConfigDict, Field, field_validator

from hermes_rl.network import is_local_name, is_loopback, open_listener
from hermes_rl.rl.atropos.queue import (
    ApiLimits,
    NewGroup,
    Profile,
    Refusal,
    Reply,
    Sent,
    TrajectoryQueue,
)

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(min_length=0)]  # with a limit, pydantic refuses lone surrogates
Finite = Annotated[float, Field(allow_inf_nan=False)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200)]


class Trainer(BaseModel):
    """Body of `/register`."""

    wandb_group: Text
    wandb_project: Text
    batch_size: Integer
    max_token_len: Integer
    checkpoint_dir: Text
    save_checkpoint_interval: Integer
    starting_step: Integer
    num_steps: Integer


class EnvironmentInfo(BaseModel):
    """Body of `/register-env`."""

    max_token_length: Integer
    desired_name: Text
    weight: Finite
    group_size: Integer
    min_batch_allocation: Finite | None = None


class PolicyVersion(BaseModel):
    """Body of a POST to `/policy_version`; not part of Atropos."""

    version: Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class EnvironmentId(BaseModel):
    """Body of `/disconnect-env` and, on a GET, of `/status-env`."""

    env_id: int


class ScoredData(BaseModel):
    """A group: a list with one entry per sequence in each field. It is handed out with exactly
    these keys."""

    model_config = ConfigDict(extra="ignore")

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages")
    @classmethod
    def check_messages(cls, value: Sequence[Sequence[Any]] | None) -> Any:
        """Each message has a role and a content, of any kind."""
        if any(not {"role", "content"} <= set(m) for messages in value or () for m in messages):
            raise ValueError("Message must have 'role' and 'content' fields")
        return value

    def to_group(self) -> NewGroup:
        """Raises: Refusal for what JSON cannot hold: NaN, infinities, lone surrogates."""
        try:
            text = json.dumps(
                self.__dict__, allow_nan=False, ensure_ascii=False, separators=(",", ":")
            )
            return NewGroup(self.env_id, len(self.tokens), text.encode())
        except (ValueError, RecursionError) as error:
            raise Refusal(422, f"not valid JSON: {error}") from error

    def check_ids(self) -> None:
        """Raises: Refusal for tokens that cannot be ids."""
        for index, ids in enumerate(self.tokens):
            if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
                raise Refusal(422, f"tokens[{index}] has ids below 0 or of more than 31 bits")

    def check_lengths(self) -> None:
        """Raises: Refusal unless all lists fit to the tokens. An empty list is an absent one, as
        the environments of Atropos send it."""
        lengths = [len(sequence) for sequence in self.tokens]
        for name in ("masks", "scores", "advantages", "ref_logprobs", "inference_logprobs"):
            value = getattr(self, name)
            if value is None or (not value and name not in ("masks", "scores")):
                continue
            if len(value) != len(lengths):
                raise Refusal(422, f"{name} has {len(value)} entries, tokens {len(lengths)}")
            if name == "scores":
                continue
            for index, (sequence, length) in enumerate(zip(value, lengths, strict=True)):
                if len(sequence) != length:
                    raise Refusal(
                        422, f"{name}[{index}] has {len(sequence)} values, its tokens {length}"
                    )
        for name in ("messages", "overrides", "distill_token_ids", "distill_logprobs"):
            if (value := getattr(self, name)) and len(value) != len(lengths):
                raise Refusal(422, f"{name} has {len(value)} entries, tokens {len(lengths)}")


@dataclass(frozen=True)
class ApiOptions:
    """How the API is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    profile: Profile = "safe"
    state: Path | None = None
    """Database of the queue; None keeps it in memory."""
    token: str | None = None
    """What clients send as a bearer token, or as the password of a URL."""
    max_body: int = 1 << 28
    """Bytes of a request, inflated."""
    limits: ApiLimits = field(default_factory=ApiLimits)
    head_s: float = 30.0
    """Seconds for the head of a request."""
    body_s: float = 60.0
    """Seconds for a body, and one more for each 16 KB of it that arrive."""


class Gate:
    """ASGI middleware: checks the token, bounds and inflates the body."""

    def __init__(self, app: Any, options: ApiOptions) -> None:
        self.app, self.options = app, options

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(headers)
        body = b""
        if refusal is None:
            try:
                body = await self._read(receive, b"gzip" in headers.get(b"content-encoding", b""))
            except ValueError as error:
                status, text = error.args
                headers_sent = {"Connection": "close"} if status == 408 else None
                refusal = PlainTextResponse(text, status, headers_sent)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        left_out = (b"content-encoding", b"content-length")
        kept = [pair for pair in scope["headers"] if pair[0].lower() not in left_out]
        length = [(b"content-length", str(len(body)).encode())]
        first = True

        async def inflated() -> Any:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self.app({**scope, "headers": kept + length * bool(body)}, inflated, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> Response | None:
        if self.options.token is not None:
            expected = self.options.token.encode()
            scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() == b"basic":
                try:
                    value = base64.b64decode(value).partition(b":")[2]
                except ValueError:
                    value = b""
            if not hmac.compare_digest(value.strip(), expected):
                wanted = {"WWW-Authenticate": "Bearer"}
                return PlainTextResponse("a token is needed\n", 401, headers=wanted)
        elif self.options.profile != "exact" and (
            b"origin" in headers
            or headers.get(b"sec-fetch-site", b"none") != b"none"
            or not self._allows_host(headers.get(b"host", b"").decode("latin-1"))
        ):
            return PlainTextResponse("requests of web pages are refused\n", 403)
        return None

    def _allows_host(self, host: str) -> bool:
        """Whether a Host header is fine. A foreign site can make its name resolve to this machine;
        its requests then have neither Origin nor Sec-Fetch-Site."""
        return not is_loopback(self.options.host) or is_local_name(host)

    async def _read(self, receive: Any, compressed: bool) -> bytes:
        """Raises: ValueError with status and text."""
        most, parts, size, more = self.options.max_body, [], 0, True
        until = asyncio.get_running_loop().time() + self.options.body_s
        try:
            async with asyncio.timeout_at(until) as timeout:
                while more:
                    message = await receive()
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise ValueError(413, f"more than {most} bytes\n")
                    parts.append(part)
                    more = message.get("more_body", False)
                    timeout.reschedule(until + size / _BYTES_PER_S)
        except TimeoutError:
            raise ValueError(408, f"the body is too slow: {size} bytes have arrived\n") from None
        body = b"".join(parts)
        return await run_in_threadpool(_inflate, body, most) if compressed and body else body


_BYTES_PER_S = 16_384
"""Slowest upload of a large body that is waited for."""


def _inflate(body: bytes, most: int) -> bytes:
    """Raises: ValueError with status and text."""
    try:
        inflated = gzip.GzipFile(fileobj=io.BytesIO(body)).read(most + 1)
    except (OSError, EOFError, zlib.error):
        raise ValueError(400, "Invalid gzip payload") from None
    if len(inflated) > most:
        raise ValueError(413, f"more than {most} bytes\n")
    return inflated


def _make_app(queue: TrajectoryQueue, options: ApiOptions) -> FastAPI:
    """Return the server as an ASGI application."""
    app = FastAPI(title="hermes-rl api")
    if queue.exact:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=["*"],
            allow_credentials=True,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(GZipMiddleware, minimum_size=1000)
    app.add_middleware(Gate, options=options)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(sqlite3.Error, _failed)
    routes = Routes(queue)
    for method, path in ROUTES:
        endpoint = getattr(routes, path[1:].replace("-", "_") or "root")
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    noted = routes.set_policy_version
    app.add_api_route("/policy_version", noted, methods=["POST"], response_model=None)
    return app


def _invalid(request: Request, error: Exception) -> Response:
    """FastAPI's reply without the input: it may be large, or not be valid JSON."""
    assert isinstance(error, RequestValidationError)
    detail = [{name: part[name] for name in ("type", "loc", "msg")} for part in error.errors()]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = None if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse({"detail": str(error)}, error.status, headers=headers)


def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": f"the queue: {error}"}, 503, headers={"Retry-After": "10"})


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


class Routes:
    """The endpoints; each is a method of its name."""

    def __init__(self, queue: TrajectoryQueue) -> None:
        self.queue = queue

    async def root(self) -> Reply:
        """Say what answers."""
        return {"message": "AtroposLib API"}

    async def register(self, trainer: Trainer) -> Reply:
        """Register a trainer."""
        await run_in_threadpool(self.queue.register, trainer.model_dump())
        return {"uuid": uuid.uuid4().int}

    async def batch(self, request: Request, tasks: BackgroundTasks, key: Key = None) -> Response:
        """Hand out a batch. If the trainer is gone, the batch is the next one."""
        handout = await run_in_threadpool(self.queue.take, key)
        if handout.batch is not None:
            if key is None and await request.is_disconnected():
                await run_in_threadpool(self.queue.put_back, handout.batch)
            else:
                tasks.add_task(self.queue.confirm, handout.batch)
        return Response(handout.body, media_type="application/json", background=tasks)

    async def latest_example(self) -> Response:
        """Return the last queued group."""
        body = await run_in_threadpool(self.queue.latest)
        return Response(body, media_type="application/json")

    async def wandb_info(self) -> Reply:
        """Return group and project of the trainer's logs."""
        return await run_in_threadpool(self.queue.wandb_info)

    async def info(self) -> Reply:
        """Return what a batch is."""
        return await run_in_threadpool(self.queue.info)

    async def set_policy_version(self, policy: PolicyVersion) -> Reply:
        """Note the version of the weights that the trainer has loaded."""
        await run_in_threadpool(self.queue.set_policy_version, policy.version)
        return {"status": "success"}

    async def policy_version(self) -> Reply:
        """Return the version that the trainer noted."""
        return await run_in_threadpool(self.queue.policy_version)

    async def status(self) -> Reply:
        """Return step and queue size."""
        return await run_in_threadpool(self.queue.status)

    async def reset_data(self) -> Response:
        """Forget trainer and groups."""
        await run_in_threadpool(self.queue.reset)
        return PlainTextResponse("Reset successful")

    async def metrics(self) -> Response:
        """Return metrics for Prometheus."""
        text = await run_in_threadpool(self.queue.metrics)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def register_env(self, env: EnvironmentInfo, key: Key = None) -> Reply:
        """Register an environment."""
        reply = await run_in_threadpool(self.queue.register_env, env.model_dump(), key)
        if not reply:
            raise HTTPException(500, "no trainer has registered since the server started")
        return reply

    async def disconnect_env(self, env: EnvironmentId) -> Reply:
        """Leave an environment out."""
        return await run_in_threadpool(self.queue.disconnect_env, env.env_id)

    async def status_env(self, env: EnvironmentId) -> Reply:
        """Return what an environment paces itself by."""
        return await run_in_threadpool(self.queue.status_env, env.env_id)

    async def scored_data(self, data: ScoredData, request: Request, key: Key = None) -> Reply:
        """Queue a group."""
        return await self._submit([data], True, request, key)

    async def scored_data_list(
        self, data: list[ScoredData], request: Request, key: Key = None
    ) -> Reply:
        """Queue groups, all or none."""
        return await self._submit(data, False, request, key)

    async def _submit(
        self, data: Sequence[ScoredData], single: bool, request: Request, key: str | None
    ) -> Reply:
        def work() -> Sent:
            if not self.queue.exact:
                for group in data:
                    group.check_ids()
                    group.check_lengths()
            return self.queue.submit([d.to_group() for d in data], single=single, key=key)

        sent = await run_in_threadpool(work)
        if key is None and await request.is_disconnected():
            self.queue.note_unsent(sent)
        return sent.reply


ROUTES = [("POST", f"/{name}") for name in ["register", "register-env", "disconnect-env"]]
ROUTES += [("POST", f"/{name}") for name in ["scored_data", "scored_data_list"]]
ROUTES += [("GET", f"/{name}") for name in ["", "batch", "latest_example", "wandb_info", "info"]]
ROUTES += [("GET", f"/{name}") for name in ["status", "status-env", "reset_data", "metrics"]]
ROUTES += [("GET", "/policy_version")]
"""Method and path of each endpoint."""


def run_api(options: ApiOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; running requests are finished.

    Args:
        announce: called with the URL once requests are accepted.

    Raises: UserError for an address or a database that cannot be used.
    """
    with contextlib.closing(open_listener(options.host, options.port)) as bound:
        queue = TrajectoryQueue(options.state, options.profile, options.limits)
        with contextlib.closing(queue):
            host, port = bound.getsockname()[:2]
            announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            app = _make_app(queue, options)
            config = uvicorn.Config(
                app,
                http=_protocol(options.head_s),
                log_level="warning",
                timeout_graceful_shutdown=10,
            )
            _Server(config).run(sockets=[bound])


def _protocol(head_s: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit of time for the head of each request, and for what a
    client sends of a body that was already refused."""

    class Protocol(H11Protocol):
        late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            super().connection_made(transport)
            self.await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.late is not None:
                self.late.cancel()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.await_head()

        def await_head(self) -> None:
            if self.late is not None:
                self.late.cancel()
            self.late = self.loop.call_later(head_s, self.check_head)

        def check_head(self) -> None:
            waits = self.cycle is None or self.cycle.response_complete
            if waits and not self.transport.is_closing():
                self.transport.write(_LATE_HEAD)
                self.transport.close()

    return Protocol


_LATE_TEXT = b"the head of the request is too slow\n"
_LATE_HEAD = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s"
) % (len(_LATE_TEXT), _LATE_TEXT)


class _Server(uvicorn.Server):
    """Ends with its requests on SIGINT and SIGTERM. uvicorn's own would raise the signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
