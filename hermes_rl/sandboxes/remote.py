"""Sandboxes of another machine, over one channel to a helper that runs there.

The helper (`remote_helper`) is started with the code of this package, which is sent to it: the
other machine needs Python 3.11 and bash. It runs the sandboxes as that machine's own, and answers
calls.
A backend brings the channel (`Channel`), and says whose fault it is when that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import os
import platform
import secrets
import shlex
import tarfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

from hermes_rl.errors import SandboxDied, SandboxError, SandboxStartError
from hermes_rl.sandboxes import remote_start
from hermes_rl.sandboxes.base import (
    MAX_OUTPUT_BYTES,
    CommandResult,
    Connection,
    GradingResult,
    GradingSpec,
    Process,
    SandboxInfo,
    SandboxSnapshot,
    SandboxSpec,
)
from hermes_rl.sandboxes.files import READ_MAX
from hermes_rl.sandboxes.grading import MAX_BYTES
from hermes_rl.sandboxes.probe import packaged_files
from hermes_rl.sandboxes.remote_frames import (
    BINARIES,
    CHUNK,
    PING_S,
    SILENCE_S,
    Garbled,
    Header,
    pack,
    pieces,
    rebuild,
    receive,
)

_log = logging.getLogger(__name__)

START_S = 60.0
"""How long a helper may take to be ready."""
_PRINTED = 1 << 16
"""Bytes that a login may print before that, at most."""


class Channel(Protocol):
    """Input and output of a helper's process, elsewhere."""

    async def read(self, size: int) -> bytes:
        """Exactly so many bytes. Raises: EOFError at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Write, waiting while the other side is behind. Raises: OSError when it is gone."""
        ...

    async def failure(self) -> str:
        """What the process printed about its failure, after its end."""
        ...

    async def aclose(self) -> None:
        """End the process. Idempotent."""
        ...


@cache
def code_archive() -> bytes:
    """The code of the helper: this package, and what it needs of hermes_rl."""
    package = Path(__file__).parents[1]
    names = ["__init__.py", "lazy.py", "errors.py", "network.py", "aio.py", "locks.py"]
    folder = package / "sandboxes"
    paths = [package / name for name in names]
    paths += sorted(p for p in folder.iterdir() if p.suffix in (".py", ".sh", ".bpf", ".txt"))
    named = {f"hermes_rl/{path.relative_to(package)}": path for path in paths}
    # Our bubblewrap too, for machines of the same kind that have none.
    above = f"{BINARIES}/{platform.machine()}"
    named |= {f"{above}/{name}": path for name, path in packaged_files().items()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for name, path in named.items():
            entry = tarfile.TarInfo(name)
            data = path.read_bytes()
            entry.size, entry.mode = len(data), 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


@cache
def _start_text() -> str:
    return Path(remote_start.__file__).read_text(encoding="utf-8")


class Start:
    """How one helper is started.

    Args:
        python: the Python there.
        folder: for all that is kept there; None is the machine's temporary folder.
    """

    def __init__(self, python: str = "python3", folder: str | None = None) -> None:
        self._nonce = secrets.token_hex(16)
        code = code_archive()
        digest = hashlib.sha256(code).hexdigest()
        self.argv = [python, "-I", "-c", _start_text(), self._nonce, digest, folder or ""]
        self._sent = len(code).to_bytes(8, "big") + code

    @property
    def command(self) -> str:
        """The same for a shell."""
        return f"exec {shlex.join(self.argv)}"

    async def ready(self, channel: Channel) -> None:
        """Send the code, and wait until the helper answers. Raises: SandboxStartError."""
        wanted = f"{self._nonce}\n".encode()
        printed = b""
        try:
            async with asyncio.timeout(START_S):
                with contextlib.suppress(OSError):  # what it printed says why
                    await channel.write(self._sent)
                while not printed.endswith(wanted) and len(printed) < _PRINTED:
                    printed += await channel.read(1)
        except (EOFError, OSError):
            lines = (await channel.failure()).strip().splitlines()
            why = lines[-1].strip()[:300] if lines else "the connection ended"
            raise SandboxStartError(why) from None
        except TimeoutError:
            raise SandboxStartError(f"no answer within {START_S:g} s") from None
        if not printed.endswith(wanted):
            raise SandboxStartError("the login prints without end")


class Link:
    """Calls to one helper.

    Args:
        where: how messages name it.
        channel: to a helper that is ready; owned from here on.
        blame: who lost the channel, when it has ended; called once.
    """

    def __init__(
        self,
        where: str,
        channel: Channel,
        blame: Callable[[str], Awaitable[SandboxError]] | None = None,
    ) -> None:
        self.where = where
        self.isolation = ""
        self._channel, self._blame = channel, blame
        self._calls: dict[int, _Call] = {}
        self._made = self._leases = 0
        self._listeners: dict[int, Callable[[Connection], None]] = {}
        self._snapshots: dict[Path, asyncio.Task[str]] = {}
        self._error: SandboxError | None = None
        self._closing = False
        self._tasks = [asyncio.create_task(work()) for work in (self._receive, self._ping)]

    @property
    def lost(self) -> bool:
        """No call can be answered any more."""
        return self._error is not None

    async def open(self, slots: int, plain: str) -> None:
        """Have it choose its backend.

        Args:
            slots: sandboxes of the machine at a time, of all workers; 0 bounds nothing.
            plain: whether commands may run outside bubblewrap: `never`, `allowed` or `always`.

        Raises: SandboxStartError.
        """
        settings = {"slots": slots, "plain": plain, "silence_s": SILENCE_S}
        found, _ = await self.call("open", settings)
        self.isolation = str(found["isolation"])

    async def lease(self, spec: SandboxSpec, backend: str) -> RemoteSandbox:
        """Start a sandbox there. Raises: SandboxStartError, TaskFault, SnapshotLost, NoPlace."""
        number = self.new_number()
        request: dict[str, Any] = {
            field.name: getattr(spec, field.name)
            for field in fields(spec)
            if field.name not in ("on_connection", "snapshot", "limits", "env")
        }
        request |= {"limits": asdict(spec.limits), "env": dict(spec.env), "snapshot": None}
        if spec.snapshot is not None:
            name = await self._send_snapshot(spec.snapshot)
            request["snapshot"] = {"name": name, "shared": spec.snapshot.shared}
        self._listeners[number] = spec.on_connection
        try:
            found, _ = await self.call("lease", {"sandbox": number, "spec": request})
        except BaseException:
            self._listeners.pop(number, None)
            self.tell("close", {"sandbox": number})  # a lease that was cancelled late
            raise
        finally:
            if spec.snapshot is not None and not spec.snapshot.shared:
                self.tell("drop", {"name": request["snapshot"]["name"]})
        limits = {**found["limits"], "host": self.where, "isolation": self.isolation}
        info = SandboxInfo(backend, found["image"], limits)
        return RemoteSandbox(self, number, info, found["folders"])

    async def _send_snapshot(self, snapshot: SandboxSnapshot) -> str:
        """Send its files; those of one that many start from once. Returns its name there."""
        if not snapshot.shared:
            return await self._put_snapshot(snapshot.folder)
        sending = self._snapshots.get(snapshot.folder)
        if sending is None or (sending.done() and sending.exception() is not None):
            sending = asyncio.create_task(self._put_snapshot(snapshot.folder))
            self._snapshots[snapshot.folder] = sending
        return await asyncio.shield(sending)

    async def _put_snapshot(self, folder: Path) -> str:
        name = f"s{secrets.token_hex(8)}"
        try:
            paths = await asyncio.to_thread(lambda: sorted(folder.iterdir()))
        except OSError as error:
            raise SandboxStartError(f"a snapshot cannot be read: {error}") from error
        for path in paths:
            await self.call("keep", {"name": name, "file": path.name}, path)
        return name

    def new_number(self) -> int:
        """The number of the next sandbox, or session of one."""
        self._leases += 1
        return self._leases

    def released(self, number: int) -> None:
        """A sandbox is closed."""
        self._listeners.pop(number, None)

    async def call(
        self,
        verb: str,
        args: Header,
        data: bytes | Path = b"",
        into: Path | None = None,
    ) -> tuple[Header, bytes]:
        """Call the helper, and return its answer.

        Args:
            data: what goes with it.
            into: takes the data of the answer; removed again when there is none.

        Raises: what the helper raised; SandboxDied, or what `blame` finds, when it is lost.
        """
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        self._made += 1
        number = self._made
        call = self._calls[number] = _Call(into)
        try:
            await self._send(number, {"id": number, "call": verb, "args": args}, data)
            return await call.answered()
        except asyncio.CancelledError:
            if self._error is None:
                self._send_soon({"id": number, "cancel": True})
            raise
        finally:
            self._calls.pop(number, None)
            call.close()

    async def _send(self, number: int, header: Header, data: bytes | Path) -> None:
        try:
            if isinstance(data, bytes) and len(data) <= CHUNK:
                await self._channel.write(pack(header, data))
                return
            for piece in pieces(data):
                await self._channel.write(pack({"id": number, "part": True}, piece))
            await self._channel.write(pack(header))
        except ConnectionError:
            await asyncio.wait(self._tasks[:1])  # finds out whose fault it is
            raise self._error or SandboxDied(f"{self.where}: the connection is lost") from None

    def tell(self, verb: str, args: Header) -> None:
        """Call the helper, and wait for no answer."""
        self._made += 1
        self._send_soon({"id": self._made, "call": verb, "args": args})

    def _send_soon(self, header: Header) -> None:
        if self._error is None:
            task = asyncio.ensure_future(self._channel.write(pack(header)))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _receive(self) -> None:
        why = "the connection is lost"
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    header, data = await receive(self._channel.read)
                self._take(header, data)
        except TimeoutError:
            why = f"no answer for {SILENCE_S:g} s"
        except (EOFError, OSError):
            pass
        except (Garbled, KeyError, TypeError) as error:
            why = f"not a helper of ours: {error}"
        await self._lose(why)

    def _take(self, header: Header, data: bytes) -> None:
        if "connection" in header:
            listener = self._listeners.get(header["sandbox"])
            if listener is not None:
                listener(Connection(**header["connection"]))
            return
        call = self._calls.get(header.get("id", 0))
        if call is None:  # it was cancelled
            return
        if "part" in header:
            call.feed(data)
        elif "error" in header:
            call.fail(rebuild(header["error"]))
        elif "ok" in header:
            call.finish(header["ok"], data)

    async def _lose(self, why: str) -> None:
        error: SandboxError = SandboxDied(f"{self.where}: {why}")
        if self._blame is not None and not self._closing:
            error = await self._blame(why)
        self._error = error
        for call in self._calls.values():
            call.fail(error)
        await self._channel.aclose()

    async def _ping(self) -> None:
        """Have the helper know that we live, and answer that it does."""
        while self._error is None:
            await asyncio.sleep(PING_S)
            with contextlib.suppress(OSError):
                await self._channel.write(pack({}))

    async def aclose(self) -> None:
        """End the helper and all its sandboxes. Idempotent."""
        self._closing = True
        await self._channel.aclose()
        self._tasks[1].cancel()
        await asyncio.wait(self._tasks)


class _Call:
    """A call that waits for its answer."""

    def __init__(self, into: Path | None) -> None:
        self._future: asyncio.Future[tuple[Header, bytes]] = (
            asyncio.get_running_loop().create_future()
        )
        self._into = into
        self._file = into.open("wb") if into is not None else None
        self._data = bytearray()
        self._complete = False
        self._bytes = 0

    def feed(self, data: bytes) -> None:
        """A part of the answer's data."""
        self._bytes += len(data)
        most = 2 * READ_MAX if self._file is None else MAX_BYTES
        if self._bytes > most:  # whoever is root there may send what he likes
            self.fail(OSError(f"the answer has more than {most} bytes"))
            return
        try:
            if self._file is not None:
                self._file.write(data)
            else:
                self._data += data
        except OSError as error:
            self.fail(error)

    def finish(self, result: Header, data: bytes) -> None:
        """The end of the answer."""
        if self._future.done():
            return
        self.feed(data)
        if not self._future.done():
            self._complete = True
            self._future.set_result((result, bytes(self._data)))

    def fail(self, error: Exception) -> None:
        """The call failed."""
        if not self._future.done():
            self._future.set_exception(error)

    async def answered(self) -> tuple[Header, bytes]:
        """The answer. Raises: as `Link.call`."""
        return await self._future

    def close(self) -> None:
        """Close the file, and remove half of one."""
        if self._future.done() and not self._future.cancelled():
            self._future.exception()
        if self._file is not None and self._into is not None:
            self._file.close()
            if not self._complete:
                self._into.unlink(missing_ok=True)


class RemoteProcess:
    """A background process there (see `base.Process`)."""

    def __init__(self, sandbox: RemoteSandbox, number: int, pid: int) -> None:
        self.pid = pid
        self._sandbox, self.number = sandbox, number

    async def _call(
        self, verb: str, data: bytes = b"", **args: float | bool
    ) -> tuple[Header, bytes]:
        header = {"process": self.number, "verb": verb, **args}
        return await self._sandbox.call("process", header, data)

    async def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        found: int | None = (await self._call("poll"))[0]["code"]
        return found

    async def wait(self, timeout_s: float, *, output: bool = False) -> int | None:
        """See `base.Process.wait`."""
        found, _ = await self._call("wait", timeout_s=timeout_s, output=output)
        code: int | None = found["code"]
        return code

    async def write(self, data: bytes) -> None:
        """Write to its stdin. Raises: BrokenPipeError when it has ended, or its input was
        closed."""
        await self._call("write", data)

    async def close_input(self) -> None:
        """End its stdin."""
        await self._call("close")

    async def read(self) -> bytes:
        """Output since the last read."""
        return (await self._call("read"))[1]

    async def kill(self) -> None:
        """End its whole process tree."""
        await self._call("kill")


class RemoteSandbox:
    """See `base.Sandbox`."""

    def __init__(
        self, link: Link, number: int, info: SandboxInfo, folders: Mapping[str, str]
    ) -> None:
        self.info = info
        self.workspace = folders["workspace"]
        self.scratch = folders["scratch"]
        self.attached: dict[str, Any] = {}
        self._link, self.number = link, number
        self._closing: asyncio.Future[None] | None = None
        self.on_close: Callable[[], Awaitable[None]] | None = None
        """What else ends with it."""

    async def call(
        self, verb: str, args: Header, data: bytes | Path = b"", into: Path | None = None
    ) -> tuple[Header, bytes]:
        """Call a verb of it. Raises: as `Link.call`."""
        if self._closing is not None and verb != "close":
            raise SandboxDied("the sandbox is closed")
        return await self._link.call(verb, {"sandbox": self.number, **args}, data, into)

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        stdin: bytes | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> CommandResult:
        """See `base.Sandbox.run`."""
        args = {
            "command": command,
            "timeout_s": timeout_s,
            "cwd": cwd,
            "stdin": stdin is not None,
            "most": max_output_bytes,
        }
        stood = not self._link.lost
        try:
            result, raw = await self.call("run", args, stdin or b"")
        except SandboxError as error:
            if stood and self._link.lost:  # else the helper knows
                lost = type(error)(*error.args)
                lost.in_command = True
                raise lost from error
            raise
        return CommandResult(**result, raw=raw)

    async def new_session(self) -> RemoteSandbox:
        """See `base.Sandbox.new_session`."""
        number = self._link.new_number()
        await self.call("new_session", {"session": number})
        folders = {"workspace": self.workspace, "scratch": self.scratch}
        return RemoteSandbox(self._link, number, self.info, folders)

    async def start_process(
        self, command: str, *, cwd: str | None = None, lossless: bool = False
    ) -> Process:
        """See `base.Sandbox.start_process`."""
        args = {"command": command, "cwd": cwd, "lossless": lossless}
        found, _ = await self.call("start_process", args)
        return RemoteProcess(self, found["process"], found["pid"])

    async def read_file(self, path: str) -> bytes:
        """See `base.Sandbox.read_file`."""
        return (await self.call("read_file", {"path": path}))[1]

    async def write_file(self, path: str, data: bytes) -> None:
        """See `base.Sandbox.write_file`."""
        await self.call("write_file", {"path": path}, data)

    async def upload(self, local: Path, remote: str) -> None:
        """See `base.Sandbox.upload`."""
        await self.call("upload", {"path": remote}, local)

    async def download(self, remote: str, local: Path) -> None:
        """See `base.Sandbox.download`."""
        await self.call("download", {"path": remote}, into=local)

    async def grade(self, spec: GradingSpec) -> GradingResult:
        """See `base.Sandbox.grade`."""
        request = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "files"}
        request["mounts"] = dict(spec.mounts)
        sizes = [(name, len(data)) for name, data in spec.files.items()]
        data = b"".join(spec.files.values())
        found, report = await self.call("grade", {"spec": request, "files": sizes}, data)
        return GradingResult(**found, report=report)

    async def read_left(self, path: str) -> bytes:
        """See `base.Sandbox.read_left`."""
        return (await self.call("read_left", {"path": path}))[1]

    async def pack_left(self, local: Path) -> None:
        """See `base.Sandbox.pack_left`."""
        half = local.with_name(f".{local.name}.half")
        found, _ = await self.call("pack_left", {}, into=half)
        if found["kept"]:
            half.rename(local)
        else:
            half.unlink()
            _log.warning("what a rollout left on %s is not kept", self._link.where)

    async def snapshot(self, folder: Path) -> bool:
        """See `base.Sandbox.snapshot`."""
        found, _ = await self.call("snapshot", {})
        if not found["saved"]:
            return False
        folder.mkdir()
        try:
            for name in found["files"]:
                args = {"name": found["name"], "file": name}
                await self.call("fetch", args, into=folder / Path(name).name)
        finally:
            self._link.tell("drop", {"name": found["name"]})
        return True

    async def unpack(self, local: Path) -> None:
        """See `base.Sandbox.unpack`."""
        await self.call("unpack", {}, local)

    async def aclose(self) -> None:
        """See `base.Sandbox.aclose`."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._link.released(self.number)
        try:
            with contextlib.suppress(SandboxError):  # its machine is lost, or cleans up itself
                await self._link.call("close", {"sandbox": self.number})
        finally:
            if self.on_close is not None:
                await self.on_close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
