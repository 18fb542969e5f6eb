"""A server that speaks the part of modal's protocol that `hermes_rl.sandboxes` uses.

It runs the commands of its sandboxes for real: a container is a bubblewrap with user, process and
network namespaces. As root starts the fake, and no other may enter a container for `exec`, all in
it belongs to a user who owns nothing on this machine, and has rights in the container alone: what
agents try must not reach it. `MODAL_SERVER_URL` points the SDK at it.

    async with FakeModal("/usr/bin/bwrap") as server:
        os.environ.update(server.variables)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Self

from hermes_rl.sandboxes import processes

_TOKEN = "e30.eyJleHAiOiA5OTk5OTk5OTk5fQ.e30"
"""A JWT that does not expire."""
_RIGHTS = "-all,+chown,+dac_override,+fowner,+kill"
"""Root's over files and processes of its user namespace: the clock and the machine are not in it.
"""
_USER = 54322
"""A user id without an account."""
_CHUNK = 1 << 16


@dataclass
class Run:
    """A process of an `exec`."""

    process: asyncio.subprocess.Process
    written: int = 0


@dataclass
class Container:
    """A sandbox of the fake."""

    id: str
    definition: Any
    tags: dict[str, str]
    process: asyncio.subprocess.Process
    init: int
    """Process 1 of it, as the machine knows it."""
    runs: dict[str, Run] = field(default_factory=dict)
    terminated: bool = False

    def end(self) -> None:
        """End all that runs in it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)


def _refusal(status: str, message: str) -> Exception:
    from grpclib import GRPCError, Status

    error: Exception = GRPCError(Status[status], message)
    return error


def _started(init: int) -> None:
    """Wait until a container has its file systems: then its first program starts."""
    while not processes.children(init):
        time.sleep(0.005)


class FakeModal:
    """The server, as an async context manager.

    Args:
        bwrap: a bubblewrap that every user can start.
    """

    def __init__(self, bwrap: str) -> None:
        from modal_proto import api_pb2, task_command_router_pb2

        self._api: Any = api_pb2
        self._router: Any = task_command_router_pb2
        self._bwrap = bwrap
        self.containers: dict[str, Container] = {}
        self.images: dict[str, str] = {}
        """Id -> what it is made of."""
        self.calls: list[str] = []
        """Names of the calls, in order."""
        self.refused: set[str] = set()
        """Names of calls that fail."""

    async def __aenter__(self) -> Self:
        from grpclib.server import Server
        from modal_proto.api_grpc import ModalClientBase
        from modal_proto.task_command_router_grpc import TaskCommandRouterBase

        services = [self._service(ModalClientBase), self._service(TaskCommandRouterBase)]
        self._server = Server(services)
        await self._server.start("127.0.0.1", 0)
        assert self._server._server is not None
        self.url = f"http://127.0.0.1:{self._server._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        for container in self.containers.values():
            container.end()
            await container.process.wait()
        self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._server.wait_closed()

    @property
    def variables(self) -> dict[str, str]:
        """What points the SDK here."""
        return {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": "ak-fake",
            "MODAL_TOKEN_SECRET": "as-fake",
            "MODAL_CONFIG_PATH": "/nonexistent",
        }

    def _service(self, base: Any) -> Any:
        """Handlers for all calls of a service: those of this class, else a refusal."""
        from grpclib.const import Handler

        made: Any = type("Service", (base,), {})
        made.__abstractmethods__ = frozenset()
        handlers = {}
        for path, handler in made().__mapping__().items():
            name = path.rpartition("/")[2]
            handlers[path] = Handler(
                self._handle(name), handler.cardinality, handler.request_type, handler.reply_type
            )
        return type("Mapped", (), {"__mapping__": lambda _: handlers})()

    def _handle(self, name: str) -> Any:
        answer = getattr(self, f"_{name}", None)

        async def handle(stream: Any) -> None:
            self.calls.append(name)
            request = await stream.recv_message()
            if answer is None or name in self.refused:
                raise _refusal("UNIMPLEMENTED", f"the fake has no {name}")
            await answer(stream, request)

        return handle

    async def _AppGetOrCreate(self, stream: Any, request: Any) -> None:
        await stream.send_message(self._api.AppGetOrCreateResponse(app_id="ap-1"))

    async def _AuthTokenGet(self, stream: Any, request: Any) -> None:
        await stream.send_message(self._api.AuthTokenGetResponse(token=_TOKEN))

    async def _ClientHello(self, stream: Any, request: Any) -> None:
        await stream.send_message(self._api.ClientHelloResponse())

    async def _EnvironmentGetOrCreate(self, stream: Any, request: Any) -> None:
        settings = self._api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = self._api.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(
            self._api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)
        )

    async def _ImageGetOrCreate(self, stream: Any, request: Any) -> None:
        text = "\n".join(request.image.dockerfile_commands)
        image_id = f"im-{len(self.images) + 1}"
        self.images[image_id] = text
        await stream.send_message(self._api.ImageGetOrCreateResponse(image_id=image_id))

    async def _ImageJoinStreaming(self, stream: Any, request: Any) -> None:
        text = self.images[request.image_id]
        failed = "/missing" in text
        result = self._api.GenericResult(
            status=self._api.GenericResult.GENERIC_STATUS_FAILURE
            if failed
            else self._api.GenericResult.GENERIC_STATUS_SUCCESS,
            exception="no such image" if failed else "",
        )
        await stream.send_message(
            self._api.ImageJoinStreamingResponse(
                result=result, metadata=self._api.ImageMetadata(), eof=True
            )
        )

    async def _SandboxCreateV2(self, stream: Any, request: Any) -> None:
        definition = request.definition
        blocked = definition.network_access.network_access_type == self._api.NetworkAccess.BLOCKED
        info, tell = os.pipe()
        try:
            command = [
                *("setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--"),
                *(self._bwrap, "--unshare-all", *([] if blocked else ["--share-net"])),
                *("--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL"),
                *("--die-with-parent", "--ro-bind", "/usr", "/usr"),
                *(p for n in ("bin", "lib", "lib64") for p in ("--symlink", f"usr/{n}", f"/{n}")),
                *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/proc"),
                *("--tmpfs", "/tmp", "--dir", "/root", "--setenv", "HOME", "/root"),
                *("--info-fd", str(tell), "--", *definition.entrypoint_args),
            ]
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(tell,),
                env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
                start_new_session=True,
            )
        finally:
            os.close(tell)
        with os.fdopen(info, "rb") as file:
            init = int(json.loads(await asyncio.to_thread(file.read))["child-pid"])
        await asyncio.to_thread(_started, init)
        sandbox_id = f"sb-{len(self.containers) + 1}"
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        self.containers[sandbox_id] = Container(sandbox_id, definition, tags, process, init)
        access = self._api.CommandRouterAccess(jwt=_TOKEN, url=self.url)
        await stream.send_message(
            self._api.SandboxCreateV2Response(
                sandbox_id=sandbox_id, task_id=sandbox_id, command_router_access=access
            )
        )

    async def _SandboxGetTaskIdV2(self, stream: Any, request: Any) -> None:
        await stream.send_message(self._api.SandboxGetTaskIdResponse(task_id=request.sandbox_id))

    async def _SandboxGetCommandRouterAccess(self, stream: Any, request: Any) -> None:
        await stream.send_message(
            self._api.SandboxGetCommandRouterAccessResponse(jwt=_TOKEN, url=self.url)
        )

    async def _SandboxWaitV2(self, stream: Any, request: Any) -> None:
        container = self.containers[request.sandbox_id]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout):
                await container.process.wait()
        result = self._api.GenericResult()
        if container.process.returncode is not None:
            kinds = self._api.GenericResult
            success, terminated = kinds.GENERIC_STATUS_SUCCESS, kinds.GENERIC_STATUS_TERMINATED
            result.status = terminated if container.terminated else success
            result.exitcode = container.process.returncode
        await stream.send_message(self._api.SandboxWaitResponse(result=result))

    async def _SandboxTerminateV2(self, stream: Any, request: Any) -> None:
        container = self.containers[request.sandbox_id]
        container.terminated = True
        container.end()
        await stream.send_message(self._api.SandboxTerminateResponse())

    async def _SandboxListV2(self, stream: Any, request: Any) -> None:
        late = request.before_timestamp > 0  # of all, the first page has every container
        infos = [
            self._api.SandboxInfo(id=c.id, created_at=1.0)
            for c in self.containers.values()
            if c.process.returncode is None and not late
        ]
        await stream.send_message(self._api.SandboxListResponse(sandboxes=infos))

    async def _SandboxTagsGetV2(self, stream: Any, request: Any) -> None:
        tags = self.containers[request.sandbox_id].tags
        found = [self._api.SandboxTag(tag_name=k, tag_value=v) for k, v in tags.items()]
        await stream.send_message(self._api.SandboxTagsGetResponse(tags=found))

    async def _TaskExecStart(self, stream: Any, request: Any) -> None:
        container = self.containers[request.task_id]
        enter = ["nsenter", f"--target={container.init}", "--user", "--mount", "--pid", "--net"]
        powerless = [
            "setpriv",
            "--no-new-privs",
            f"--bounding-set={_RIGHTS}",
            "--inh-caps=-all",
            "--",
        ]
        process = await asyncio.create_subprocess_exec(
            *enter,
            *("--ipc", "--uts", "--wd=/root", "--", *powerless, *request.command_args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root"},
            start_new_session=True,
        )
        container.runs[request.exec_id] = Run(process)
        await stream.send_message(self._router.TaskExecStartResponse())

    def _run(self, request: Any) -> Run:
        return self.containers[request.task_id].runs[request.exec_id]

    async def _TaskExecStdinWrite(self, stream: Any, request: Any) -> None:
        run = self._run(request)
        assert run.process.stdin is not None
        data = request.data[max(0, run.written - request.offset) :]  # it may be sent again
        try:
            run.process.stdin.write(data)
            await run.process.stdin.drain()
            run.written += len(data)
            if request.eof:
                run.process.stdin.close()
        except (ConnectionError, RuntimeError):
            raise _refusal("FAILED_PRECONDITION", "the process has ended") from None
        await stream.send_message(self._router.TaskExecStdinWriteResponse())

    async def _TaskExecStdioRead(self, stream: Any, request: Any) -> None:
        run = self._run(request)
        out = request.file_descriptor == self._router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        source = run.process.stdout if out else run.process.stderr
        assert source is not None
        while data := await source.read(_CHUNK):
            await stream.send_message(self._router.TaskExecStdioReadResponse(data=data))

    async def _TaskExecWait(self, stream: Any, request: Any) -> None:
        code = await self._run(request).process.wait()
        await stream.send_message(self._router.TaskExecWaitResponse(code=code & 255))

    async def _TaskExecPoll(self, stream: Any, request: Any) -> None:
        code = self._run(request).process.returncode
        answer = self._router.TaskExecPollResponse()
        if code is not None:
            answer.code = code & 255
        await stream.send_message(answer)
