"""Tools of MCP servers (Model Context Protocol), by the official SDK (extra `[mcp]`).

What a server offers is read once, when a run starts; each rollout then connects at its first call.
A program is spoken to through the sandbox in which it runs, so that it ends with that. Whatever a
server does (hang, die, flood, answer nonsense) costs the model a `ToolError`, never the run.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import re
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hermes_rl.config_agent import McpServer, McpTool, fill_in
from hermes_rl.errors import SandboxError, ToolError, UserError
from hermes_rl.sandboxes import Process, Sandbox, SandboxSpec, Subprocess
from hermes_rl.text import clean, cut_middle, to_json
from hermes_rl.tools.base import OpenParts, Tool, ToolContext, ToolResult

if TYPE_CHECKING:
    from mcp.client import Client
    from pydantic import ValidationError

CLOSE_S = 5.0
ERRORS_S = 5.0
"""How long the standard error of a program that ended is waited for."""
MAX_LOSSES = 3
"""Lost connections in a row after which a rollout has no further one."""
MAX_TOOLS = 128
"""Of one server."""
MAX_SCHEMA_CHARS = 32_000
"""Of one tool, as JSON."""
MAX_DESCRIPTION_CHARS = 8_000
MAX_MESSAGE_BYTES = 8 << 20
MAX_CALL_BYTES = 32 << 20
"""Of all that a program prints during one call."""
MAX_IMAGES = 8
MAX_ERROR_CHARS = 2_000
MAX_LOG_BYTES = 16_000
"""Of a program's standard error, for the message when it does not start."""
MAX_NAME_CHARS = 64
"""Of a tool's name: what all providers accept."""
_PAUSE_S = 0.01
_HOST = "mcp host"
"""Where `OpenParts` has the backend of programs on the host."""
_ODD = re.compile(r"[^A-Za-z0-9_-]")
_ENDINGS = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}


def missing_sdk() -> str | None:
    """What to install for MCP servers; None where it is there."""
    try:
        import mcp.client  # noqa: F401
    except ImportError:
        return "MCP servers need the package mcp: pip install 'hermes-rl[mcp]'"
    return None


def tool_name(server: str, tool: str) -> str:
    """The name that models see: `mcp_SERVER_TOOL`, shortened by a hash where it is too long."""
    name = f"mcp_{_ODD.sub('_', server)}_{_ODD.sub('_', tool)}"
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{name[: MAX_NAME_CHARS - 9]}_{hashlib.sha256(tool.encode()).hexdigest()[:8]}"


def mcp_tools(
    servers: Mapping[str, McpServer], variables: Mapping[str, str], shared: OpenParts
) -> dict[str, Tool]:
    """The tools that servers offered, by the names that models see.

    Args:
        servers: as `read_offers` returns them.
        variables: values of the `${NAME}`s.
        shared: keeps what all rollouts share; closed by the caller.

    Raises: UserError for two tools with one name.
    """
    tools: dict[str, Tool] = {}
    for server, section in servers.items():
        for offered in section.offered or ():
            name = tool_name(server, offered.name)
            if name in tools:
                raise UserError(
                    f"'mcp.{server}': the tool {offered.name!r} has the name of another one, "
                    f"{name}. Leave one out ('tools')"
                )

            async def call(
                ctx: ToolContext,
                arguments: dict[str, Any],
                server: str = server,
                section: McpServer = section,
                offered: McpTool = offered,
            ) -> ToolResult:
                owner = shared if section.shared else ctx.opened
                make = partial(_Server, server, section, variables, shared)
                key = f"mcp {server}"
                used: _Server = owner.get(key) or owner.setdefault(key, make())
                return await used.call(offered, arguments, ctx)

            tools[name] = Tool(
                name=name,
                description=offered.description,
                parameters=offered.parameters,
                handler=call,
                toolset=f"mcp_{server}",
                needs_sandbox=section.in_sandbox,
                untrusted=True,
            )
    return tools


async def read_offers(
    servers: Mapping[str, McpServer],
    variables: Mapping[str, str],
    lease: Callable[[], Awaitable[Sandbox]],
) -> dict[str, McpServer]:
    """Connect to each server once and read what it offers.

    Args:
        lease: starts the sandbox for programs that run in one.

    Returns the servers that are not disabled, with `offered` filled in.
    Raises: UserError for a server that does not answer, or a tool that cannot be offered;
        SandboxStartError.
    """
    used = {name: section for name, section in servers.items() if not section.disabled}
    if used and (reason := missing_sdk()):
        raise UserError(f"'mcp': {reason}")
    shared, sandbox = OpenParts(), None
    try:
        for name, section in used.items():
            if section.in_sandbox and sandbox is None:
                sandbox = await lease()
            offered = await _list_offers(name, section, variables, sandbox, shared)
            used[name] = section.model_copy(update={"offered": offered})
    finally:
        await shared.aclose()
        if sandbox is not None:
            await asyncio.shield(sandbox.aclose())
    mcp_tools(used, variables, shared)  # says which names are taken twice
    return used


async def _list_offers(
    server: str,
    section: McpServer,
    variables: Mapping[str, str],
    sandbox: Sandbox | None,
    shared: OpenParts,
) -> tuple[McpTool, ...]:
    """What one server offers. Raises: UserError."""
    used = _Server(server, section, variables, shared)
    try:
        offered = await used.list_tools(sandbox)
    except (ToolError, SandboxError) as error:
        raise UserError(f"'mcp.{server}': {error}") from None
    finally:
        await used.aclose()
    known = [tool.name for tool in offered]
    if absent := [name for name in section.tools or () if name not in known]:
        raise UserError(f"'mcp.{server}.tools': no tool {absent[0]!r}. It has {', '.join(known)}")
    chosen = [tool for tool in offered if section.tools is None or tool.name in section.tools]
    fix = f"List the tools that you want in 'mcp.{server}.tools'"
    if len(chosen) > MAX_TOOLS:
        raise UserError(f"'mcp.{server}' has {len(chosen)} tools, at most {MAX_TOOLS} fit. {fix}")
    for tool in chosen:
        if tool.parameters.get("type") != "object" or len(to_json(tool.parameters)) > (
            MAX_SCHEMA_CHARS
        ):
            raise UserError(
                f"'mcp.{server}': the schema of its tool {tool.name[:80]!r} is not one of an "
                f"object, or longer than {MAX_SCHEMA_CHARS:,} characters. {fix}"
            )
    return tuple(chosen)


class _Server:
    """A server as one rollout uses it, or all of a process; reconnects after a loss."""

    def __init__(
        self, name: str, section: McpServer, variables: Mapping[str, str], shared: OpenParts
    ) -> None:
        self._name, self._section = name, section
        self._variables, self._shared = variables, shared
        self._link: _Link | None = None
        self._opening = asyncio.Lock()
        self._losses = 0
        self._calls = 0
        """That wait for an answer."""
        self._images = 0

    async def call(self, tool: McpTool, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Call a tool. Raises: ToolError; SandboxError when the sandbox is lost."""
        from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult

        async def ask(client: Client) -> CallToolResult:
            # Not `client.call_tool`: that checks results by the server's own patterns and
            # references, with which it could keep this process busy.
            params = CallToolRequestParams(name=tool.name, arguments=arguments)
            return await client.session.send_request(CallToolRequest(params=params), CallToolResult)

        seconds = min(self._section.timeout, ctx.max_timeout_s)
        link = await self._linked(ctx.sandbox, seconds)
        now = link.schemas.get(tool.name)
        if now is not None and now != tool.parameters:
            raise ToolError(f"the arguments of {tool.name!r} changed since the run began")
        result = await self._ask(link, ask, seconds)
        parts = [await self._part(block, ctx.sandbox) for block in result.content]
        if not parts and result.structured_content is not None:
            parts = [to_json(result.structured_content)]
        text = clean("\n".join(parts)) or "(no output)"
        return ToolResult(text, ok=not result.is_error)

    async def list_tools(self, sandbox: Sandbox | None) -> list[McpTool]:
        """What it offers now. Raises: ToolError; SandboxError."""
        return (await self._linked(sandbox, self._section.timeout)).tools

    async def _part(self, block: Any, sandbox: Sandbox | None) -> str:
        """A block of a result as text. Images are put into a file of the sandbox."""
        if block.type == "text":
            return str(block.text)
        if block.type == "resource_link":
            return f"[resource {block.uri}]"
        resource = getattr(block, "resource", None)
        if (text := getattr(resource, "text", None)) is not None:
            return str(text)
        kind = str(getattr(resource or block, "mime_type", None) or "data")
        data = str(getattr(block, "data", None) or getattr(resource, "blob", ""))
        size = f"{kind[:80]}, about {len(data) * 3 // 4:,} bytes"
        self._images += kind in _ENDINGS
        if sandbox is None or kind not in _ENDINGS or self._images > MAX_IMAGES:
            return f"[{size}: not shown]"
        path = f"{sandbox.scratch}/mcp/{self._name}-{self._images}.{_ENDINGS[kind]}"
        try:
            await sandbox.write_file(path, base64.b64decode(data, validate=True))
        except (OSError, binascii.Error):
            return f"[{size}: could not be saved]"
        return f"[{size}: saved as {path}]"

    async def _ask(self, link: _Link, ask: Callable[[Client], Any], seconds: float) -> Any:
        """Raises: ToolError; SandboxError."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED
        from pydantic import ValidationError

        self._calls += 1
        link.begin()
        lost = True
        try:
            async with asyncio.timeout(seconds):
                answer = await ask(link.client)
            self._losses, lost = 0, False
            return answer
        except TimeoutError:
            # Others may wait for answers of a server that all rollouts share.
            lost = self._calls == 1
            raise self._error(f"no answer within {seconds:g} s") from None
        except ValidationError as error:
            lost = False
            raise self._error(_no_protocol(error)) from None
        except asyncio.CancelledError:
            lost = not self._section.shared
            raise
        except Exception as error:  # of the SDK and its transports, by whatever the server sent
            if isinstance(error, MCPError) and error.error.code != CONNECTION_CLOSED:
                lost = False
                raise self._error(error.error.message) from None
            await self._drop(link)
            raise self._error(link.why(error)) from None
        finally:
            self._calls -= 1
            link.end()
            if lost:
                await self._drop(link)

    async def _drop(self, link: _Link) -> None:
        """A connection is lost."""
        if self._link is link:
            self._link = None
            self._losses += 1
            await asyncio.shield(link.aclose())

    async def _linked(self, sandbox: Sandbox | None, seconds: float) -> _Link:
        """The connection, opened where there is none. Raises: ToolError; SandboxError."""
        import mcp.client  # noqa: F401  # takes a second, outside the server's time
        from pydantic import ValidationError

        async with self._opening:
            if self._link is not None:
                return self._link
            if self._losses >= MAX_LOSSES and not self._section.shared:
                raise self._error(f"lost {self._losses} times; it is not started again")
            link = _Link(self._transport(sandbox))
            self._losses += 1
            try:
                async with asyncio.timeout(seconds):
                    await link.open()
            except TimeoutError:
                await link.aclose()
                raise self._error(f"not ready within {seconds:g} s{link.printed}") from None
            except Exception as error:  # as above
                await link.aclose()
                why = _no_protocol(error) if isinstance(error, ValidationError) else link.why(error)
                raise self._error(f"cannot be used: {why}{link.printed}") from None
            except BaseException:
                await asyncio.shield(link.aclose())
                raise
            self._losses -= 1
            self._link = link
            return link

    def _transport(self, sandbox: Sandbox | None) -> Transport:
        section = self._section
        if section.url is not None:
            headers = {k: fill_in(v, self._variables) for k, v in section.headers.items()}
            return _http(fill_in(section.url, self._variables), headers)
        return _stdio(self._name, section, self._variables, sandbox, self._shared)

    def _error(self, why: str) -> ToolError:
        text = " ".join(clean(why).split()) or "an error without a message"
        return ToolError(f"MCP server {self._name}: {cut_middle(text, MAX_ERROR_CHARS)}")

    async def aclose(self) -> None:
        """End the connection."""
        link, self._link = self._link, None
        if link is not None:
            await link.aclose()


class _Traffic:
    """What a program's transport and its calls know of each other."""

    def __init__(self) -> None:
        self.calling = asyncio.Event()
        """A call waits for its answer: output is read."""
        self.bytes = 0
        """That came since the last call began."""
        self.fault: BaseException | None = None
        """What ended the transport."""
        self.printed = ""
        """The end of standard error, of a program that did not start."""


Transport = Callable[[_Traffic], AbstractAsyncContextManager[Any]]


class _Link:
    """An open connection. The SDK's scopes must be left by the task that entered them, so it has
    a task of its own.

    Args:
        transport: connects; leaving it disconnects.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._traffic = _Traffic()
        self._waiting, self._opened = 0, False
        self._close = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.client: Client
        self.tools: list[McpTool] = []
        self.schemas: dict[str, dict[str, Any]] = {}

    async def open(self) -> None:
        """Connect, and read what is offered. Raises: whatever stands against it."""
        self.begin()
        ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        self.end()
        if not ready.done():
            await self._task
            raise ConnectionError(_ENDED)

    async def _run(self, ready: asyncio.Future[None]) -> None:
        from mcp.client import Client

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # the model reads what goes wrong
        try:
            async with Client(self._transport(self._traffic), cache=None) as self.client:
                self.tools = await _list_tools(self.client)
                self.schemas = {tool.name: tool.parameters for tool in self.tools}
                self._opened = True
                ready.set_result(None)
                await self._close.wait()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    def begin(self) -> None:
        """A call begins."""
        self._waiting += 1
        self._traffic.bytes = 0
        self._traffic.calling.set()

    def end(self) -> None:
        """A call ended."""
        self._waiting -= 1
        if not self._waiting:
            self._traffic.calling.clear()

    def why(self, error: BaseException) -> str:
        """Why the connection was lost. Raises: SandboxError, where it was the sandbox."""
        fault = self._traffic.fault or error
        if isinstance(fault, SandboxError):
            raise fault
        return str(fault) or type(fault).__name__

    @property
    def printed(self) -> str:
        """What a program printed that did not start, as the end of a message."""
        return self._traffic.printed and f"; it printed: {self._traffic.printed}"

    async def aclose(self) -> None:
        """Disconnect. A server that does not let go is left behind."""
        self._close.set()
        if self._task is None or self._task.done():
            return
        if not self._opened:
            self._task.cancel()
        await asyncio.wait((self._task,), timeout=CLOSE_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=CLOSE_S)


def _no_protocol(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, fault["loc"]))
    return f"its answer does not follow the protocol ({place}: {fault['msg']})"


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _list_tools(client: Client) -> list[McpTool]:
    found: list[McpTool] = []
    cursor: str | None = None
    for _ in range(MAX_TOOLS):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            description = cut_middle(clean(tool.description or ""), MAX_DESCRIPTION_CHARS)
            schema = dict(tool.input_schema)
            if not schema.get("properties"):
                # They may be elsewhere (`$ref`, `anyOf`): the server checks them.
                schema.setdefault("additionalProperties", True)
            found.append(McpTool(name=tool.name, description=description, parameters=schema))
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _http(url: str, headers: Mapping[str, str]) -> Transport:
    @asynccontextmanager
    async def connect(traffic: _Traffic) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def bound(response: httpx2.Response) -> None:
            """Of an event stream the SDK bounds each event."""
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx2.TransportError("it sent a compressed answer, which was refused")
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                response.stream = _Bounded(response.stream)

        class _Bounded(httpx2.AsyncByteStream):
            def __init__(self, stream: Any) -> None:
                self._stream = stream

            async def __aiter__(self) -> AsyncIterator[bytes]:
                size = 0
                async for chunk in self._stream:
                    size += len(chunk)
                    if size > MAX_MESSAGE_BYTES:
                        raise httpx2.TransportError(_TOO_LONG)
                    yield chunk

            async def aclose(self) -> None:
                await self._stream.aclose()

        async with (
            httpx2.AsyncClient(
                headers={**headers, "accept-encoding": "identity"},
                timeout=httpx2.Timeout(30.0, read=None),
                event_hooks={"response": [bound]},
            ) as http,
            streamable_http_client(
                url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES
            ) as streams,
        ):
            yield streams

    return connect


_ENDED = "it ended"
_TOO_LONG = f"it sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"


def _stdio(
    name: str,
    section: McpServer,
    variables: Mapping[str, str],
    sandbox: Sandbox | None,
    shared: OpenParts,
) -> Transport:
    """A program in the sandbox, or one on the host: in a workspace and with the environment of the
    sandbox `none`, whose processes end with this one."""

    @asynccontextmanager
    async def connect(traffic: _Traffic) -> AsyncIterator[Any]:
        if section.where == "sandbox":
            assert sandbox is not None, "the agent refuses tools that lack their sandbox"
            async with _program(name, section, variables, sandbox, traffic) as streams:
                yield streams
            return
        if _HOST not in shared:
            shared[_HOST] = Subprocess()
        spec = SandboxSpec(lease=f"mcp-{name}", network=True)
        async with (
            await shared[_HOST].lease(spec) as place,
            _program(name, section, variables, place, traffic) as streams,
        ):
            yield streams

    return connect


@asynccontextmanager
async def _program(
    name: str,
    section: McpServer,
    variables: Mapping[str, str],
    sandbox: Sandbox,
    traffic: _Traffic,
) -> AsyncIterator[Any]:
    """Start a program, and speak with it; it is ended on leaving."""
    import anyio

    log = f"{sandbox.scratch}/mcp-{name}.log"
    variables_set = [f"{k}={fill_in(v, variables)}" for k, v in section.env.items()]
    program = shlex.join(["env", *variables_set, section.command or "", *section.args])
    part, whole = shlex.quote(f"{log}.part"), shlex.quote(log)
    errors = f"2> >(head -c {MAX_LOG_BYTES} >{part}; mv {part} {whole}; cat >/dev/null)"
    process = await sandbox.start_process(
        f"rm -f {whole}; exec {program} {errors}", cwd=section.cwd, lossless=True
    )
    to_session, read = anyio.create_memory_object_stream[Any](0)
    write, from_session = anyio.create_memory_object_stream[Any](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, process, to_session, traffic)
            tasks.start_soon(_write, process, from_session, to_session, traffic)
            try:
                yield read, write
            finally:
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), suppress(OSError):
            try:
                if traffic.fault is not None and await process.poll() is not None:
                    data = await _read_errors(sandbox, log)
                    traffic.printed = clean(data[-400:].decode("utf-8", "replace")).strip()
                await process.kill()
            except SandboxError as error:
                traffic.fault = error
        for stream in (to_session, read, write, from_session):
            stream.close()


async def _read_errors(sandbox: Sandbox, log: str) -> bytes:
    """Read the standard error of a program that ended. The file appears when it is complete: some
    moments after the exit, or later when the program left children behind.

    Raises: FileNotFoundError when it is not there after `ERRORS_S`.
    """
    deadline = time.monotonic() + ERRORS_S
    while True:
        try:
            return await sandbox.read_file(log)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_PAUSE_S)


async def _read(process: Process, to_session: Any, traffic: _Traffic) -> None:
    """Pass on what a program prints, a message in each line, while a call waits for it."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    rest = b""
    async with to_session:
        try:
            while True:
                await traffic.calling.wait()
                ended = await process.poll() is not None
                if not (data := await process.read()):
                    if ended:
                        raise ConnectionError(_ENDED)
                    await anyio.sleep(_PAUSE_S)
                    continue
                traffic.bytes += len(data)
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_MESSAGE_BYTES:
                    raise ConnectionError(_TOO_LONG)
                if traffic.bytes > MAX_CALL_BYTES:
                    raise ConnectionError(
                        f"it printed more than {MAX_CALL_BYTES >> 20} MiB during one call"
                    )
                for line in lines:
                    # Notifications have no use here, and there may be many.
                    if line.lstrip().startswith(b"{") and b'"id"' in line:
                        with suppress(ValueError):
                            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                            await to_session.send(SessionMessage(message))
                await anyio.lowlevel.checkpoint()
        except (ConnectionError, SandboxError, anyio.BrokenResourceError) as error:
            traffic.fault = traffic.fault or error


async def _write(process: Process, from_session: Any, to_session: Any, traffic: _Traffic) -> None:
    """Pass on what the session sends."""
    try:
        async with from_session:
            async for sent in from_session:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.write(text.encode() + b"\n")
    except BrokenPipeError:
        traffic.fault = traffic.fault or ConnectionError(_ENDED)  # as the reader finds
        await to_session.aclose()
    except (OSError, SandboxError) as error:
        traffic.fault = traffic.fault or error
        await to_session.aclose()
